"""Retriever-Prompt: loss and gradients as numpy has them by loops, on any mesh and in any chunks;
what a run declares trainable, and prompt files that do not fit.
"""

import jax
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.papers.nir_prompt import nir_prompt, nir_retriever
from dprjax.text.vector_spec import SIDES
from tests import reference
from tests.options import check_options
from tests.papers.nir_prompt import nir
from tests.refusals import refused
from tests.training.conftest import WORDS

ROWS, CANDIDATES = 16, 2


@pytest.fixture(scope='module')
def batch(tokenizer):
  rng = np.random.default_rng(1)
  q = nir.texts(rng, ROWS, 5, 7, tokenizer, WORDS)
  p = nir.texts(rng, ROWS * CANDIDATES, 7, 9, tokenizer, WORDS)
  index = rng.integers(0, 3 * ROWS, size=(ROWS, CANDIDATES)).astype(np.int32)
  return {
    'query_tokens': q[0],
    'query_mask': q[1],
    'passage_tokens': p[0].reshape(ROWS, CANDIDATES, -1),
    'passage_mask': p[1].reshape(ROWS, CANDIDATES, -1),
    'passage_index': index,
    'relevant': np.stack([index[:, 0], rng.integers(0, 3 * ROWS, ROWS)], axis=1).astype(np.int32),
    'task': rng.integers(0, 2, ROWS).astype(np.int32),
  }


def reference_loss(config, shape, tokenizer, params, batch):
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  fixed = config.template.fixed_layers if config.template.fixed_layers >= 0 else 2
  names = sorted(config.tasks)
  vectors = {}
  for side in SIDES:
    tokens, mask = batch[f'{side}_tokens'], batch[f'{side}_mask']
    rows = []
    for place in np.ndindex(mask.shape[:-1]):
      task = names[batch['task'][place[0]]]
      text = nir.bare(tokens[place], mask[place])
      first, second = (
        nir.slot(config, params, tokenizer, task, f'{side}/P{number}') for number in (1, 2)
      )
      row = [tokenizer.opening[0], *first, *text, *second, tokenizer.mask_id, tokenizer.closing[0]]
      states = reference.encode_template(shape, params['backbone'], row, fixed)
      start = 1 + len(first)
      vector = {
        'mask': states[-2],
        'cls': states[0],
        'mean': states[start : start + len(text)].sum(axis=0) / max(len(text), 1),
      }[config.pooling]
      rows.append(vector / (np.linalg.norm(vector) or 1) if config.normalize else vector)
    vectors[side] = np.array(rows).reshape(*mask.shape[:-1], -1)
  return reference.loss(
    vectors['query'],
    vectors['passage'],
    batch['passage_index'],
    batch['relevant'],
    config.temperature,
    config.in_batch,
  )


WORDS_ALONE = {'template__kind': 'manual', 'trainable': ('backbone/.*',)}
SIMILAR = {'pooling': 'mean', 'normalize': True, 'temperature': 0.1}


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('changes', 'sizes'),
  [
    ({'template__lengths': (2, 3, 1), 'grad_cache': 2, 'template__fixed_layers': 1}, {'data': 8}),
    ({'grad_cache': 2, 'template__fixed_layers': 0, 'pooling': 'cls'}, {'data': 1}),
    # Without prompt encoders, which take seconds to compile.
    (WORDS_ALONE | SIMILAR | {'grad_cache': 4}, {'data': 1}),
    (WORDS_ALONE, {'data': 8}),
    ({'template__kind': 'none', 'trainable': ('backbone/.*',)}, {'data': 1}),
  ],
)
def test_loss_and_gradient_equal_loops_in_float64(changes, sizes, tokenizer, shape, parts, batch):
  config = nir.make_config('nir_retriever', **changes)
  params, value, metrics, gradient = nir.value_and_gradient(
    nir_retriever.build, config, shape, tokenizer, parts, batch, sizes
  )

  def loss(params):
    return reference_loss(config, shape, tokenizer, params, batch)

  expected = loss(params)
  np.testing.assert_allclose(
    [value, metrics['accuracy'], metrics['negatives']], expected, rtol=2e-5
  )
  nir.assert_slope(lambda params: loss(params)[0], params, gradient)


def write_files(config, folder, shape, tokenizer, **kwargs):
  for seed, task in enumerate(config.tasks):
    path = folder / f'{task}.npz'
    nir.write_prompt(path, shape, tokenizer, config, SIDES, seed=seed, **kwargs)
    config.tasks[task].prompt = str(path)


@pytest.mark.slow
def test_a_new_task_has_the_weighted_sum_of_trained_prompts(
  tokenizer, shape, parts, batch, tmp_path
):
  config = nir.make_config(
    'nir_retriever',
    tasks=('new',),
    adapt__fusion=True,
    adapt__prompts=str(tmp_path),
    trainable=('prompt/.*',),
  )
  sources = {
    name: nir.write_prompt(tmp_path / f'{name}.npz', shape, tokenizer, config, SIDES, seed=seed)
    for seed, name in enumerate(('qa', 'dr', 'rd'))
  }
  batch = batch | {'task': np.zeros(ROWS, np.int32)}
  params, value, _, gradient = nir.value_and_gradient(
    nir_retriever.build, config, shape, tokenizer, parts, batch, {'data': 1}
  )
  assert list(gradient) == ['prompt/new/weights']
  np.testing.assert_array_equal(params['prompt/new/weights'], np.full(3, 1 / 3, np.float32))
  np.testing.assert_array_equal(params['sources/dr/query/P2'], sources['dr']['query/P2'])
  loss = lambda params: reference_loss(config, shape, tokenizer, params, batch)[0]  # noqa: E731
  np.testing.assert_allclose(value, loss(params), rtol=2e-5)
  nir.assert_slope(loss, params, gradient)


def init(config, tokenizer, shape, parts):
  devices = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  nir_prompt.specs(config, SIDES, nir_prompt.read_files(config))
  method = nir_retriever.build(config, shape, devices, tokenizer)
  return method.init(parts, jax.random.key(0))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'template__lengths': (6,)}, ('config.template.lengths', 'P2')),
    slow({'trainable': ('backbone/.*',)}, 'prompt/dialogue/'),
    ({'adapt__fusion': True, 'adapt__prompts': '/no/where'}, '/no/where'),
  ],
)
def test_bad_options(changes, message, tokenizer, shape, parts):
  with refused(message):
    config = nir.make_config('nir_retriever', **changes)
    check_options(config)
    init(config, tokenizer, shape, parts)


def test_a_file_of_another_task(tokenizer, shape, parts, tmp_path):
  config = nir.make_config('nir_retriever', trainable=('backbone/.*',))
  write_files(config, tmp_path, shape, tokenizer, task='qa')
  with refused('config.tasks.dialogue.prompt', 'dialogue.npz'):
    init(config, tokenizer, shape, parts)
  # Nor one of another backbone.
  write_files(config, tmp_path, shape, tokenizer, backbone_sha256='c' * 64)
  with refused('dialogue.npz', 'c' * 64):
    init(config, tokenizer, shape, parts)
  write_files(config, tmp_path, shape, tokenizer, task='qa')
  # Nor is it added for a new task of its name, whatever its file is called.
  config = nir.make_config(
    *('nir_retriever', ('qa',)), adapt__fusion=True, adapt__prompts=f'{tmp_path}/dialogue.npz'
  )
  with refused('config.adapt.prompts', 'dialogue'):
    init(config, tokenizer, shape, parts)


def test_files_that_are_not_to_be_trained_or_added(tokenizer, shape, parts, tmp_path):
  config = nir.make_config('nir_retriever')
  write_files(config, tmp_path, shape, tokenizer)
  with refused('config.trainable'):
    init(config, tokenizer, shape, parts)
  config = nir.make_config(
    'nir_retriever', tasks=('new',), adapt__fusion=True, adapt__prompts=str(tmp_path)
  )
  with refused('config.trainable'):
    config.trainable = ('prompt/.*', 'sources/.*')
    init(config, tokenizer, shape, parts)
  config.trainable = ('prompt/.*',)
  nir.write_prompt(tmp_path / 'third.npz', shape, tokenizer, config, SIDES, (4, 3, 1), seed=3)
  with refused('third.npz', 'query/P1', '[4, H]'):
    init(config, tokenizer, shape, parts)
