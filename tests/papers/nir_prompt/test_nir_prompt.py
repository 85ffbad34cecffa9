"""Exports of NIR-Prompt runs: the prompt of a task."""

import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.models import artifact, head_specs, hub
from dprjax.models.artifact import Prompt
from dprjax.papers.nir_prompt import (
  learned_tokens,
  nir_prompt,
  nir_reranker,
  nir_retriever,
)
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES, same_length
from dprjax.training.method import DataSource
from tests.models.test_artifact import META
from tests.papers.nir_prompt import nir
from tests.training.conftest import WORDS

METHODS = {'nir_retriever': nir_retriever, 'nir_reranker': nir_reranker}
BODY = 'backbone/(?!embeddings/word/).*'


@pytest.fixture(scope='module')
def backbone(shape, parts):
  sentence = same_length(32, 'cls', False)
  return hub.Backbone(
    shape, parts.encoder, nir.SHA, 'BACKBONE', sentence, {}, {'mlm': parts.heads['mlm']}
  )


def export(config, workdir, backbone, trained, tokenizer):
  """The prompt files that ``dprjax.export`` would write of this run, by task."""
  product = METHODS[config.method].METHOD.export(config, workdir, backbone, trained)
  prompts = product.prompts or {product.meta['task']: (product.prompt, product.meta)}
  stamp = {name: META[name] for name in ('format', 'version', 'dprjax_version')} | {
    'backbone': 'BACKBONE',
    'backbone_sha256': nir.SHA,
    'tokenizer_sha256': tokenizer.sha256,
  }
  files = {}
  for task, (arrays, meta) in prompts.items():
    files[task] = workdir.parent / f'{task}.npz'
    artifact.save_prompt(files[task], Prompt({**stamp, **meta}, dict(arrays)))
  return product, files


def embedded(config, shape, tokenizer, devices, params, tokens, mask):
  """Output of the method for texts of the first task, or for their pairs with themselves."""
  method = METHODS[config.method].build(config, shape, devices, tokenizer)
  numbers = np.zeros(len(tokens), np.int32)
  embed = jax.jit(method.embed, static_argnums=1)
  if config.method == 'nir_retriever':
    return np.concatenate([embed(params, side, tokens, mask, numbers) for side in SIDES])
  bare = [np.array(nir.bare(*row), np.int32) for row in zip(tokens, mask, strict=True)]
  found = nir_prompt.make_templates(
    config, ('pair',), nir_prompt.read_files(config), tokenizer, shape.vocab_size
  )
  pairs = found.templates['pair'][0].pack((bare, bare), shape.max_tokens, tokenizer.pad_id)
  rows, seen = tokenizing.pad_batch(pairs.rows, shape.max_tokens, tokenizer.pad_id)
  return np.asarray(embed(params, 'pair', rows, seen, pairs.lengths, numbers))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['nir_retriever', 'nir_reranker'])
def test_a_prompt_that_was_trained_is_the_prompt_of_its_file(
  name, tokenizer, shape, parts, backbone, devices, tmp_path
):
  kinds = SIDES if name == 'nir_retriever' else ('pair',)
  config = nir.make_config(name, ('qa',), trainable=('prompt/.*',), template__fixed_layers=1)
  method = METHODS[name].build(config, shape, devices, tokenizer)
  params = method.init(parts, jax.random.key(3))
  assert {name.split('/')[0] for name in tree.flatten(params)} == {'backbone', 'prompt'} | (
    {'head'} if kinds == ('pair',) else set()
  )
  trained = {n: leaf for n, leaf in tree.flatten(params).items() if n.startswith('prompt/')}
  product, files = export(config, tmp_path / 'run', backbone, trained, tokenizer)
  assert not product.encoders and list(files) == ['qa']
  prompt = artifact.load_prompt(files['qa'])
  assert prompt.meta['task'] == 'qa' and prompt.meta['fixed_layers'] == 1
  assert (prompt.meta['query_max_length'], prompt.meta['passage_max_length']) == (7, 9)
  encoders = {
    slot: params['prompt']['qa'][slot.split('/')[0]][slot.split('/')[1]]
    for slot in learned_tokens.vectors(prompt)
  }
  for slot, own in jax.jit(learned_tokens.encode_prompts)(encoders).items():
    np.testing.assert_allclose(learned_tokens.vectors(prompt)[slot], own, rtol=0, atol=1e-6)
  assert len(learned_tokens.vectors(prompt)) == (4 if len(kinds) == 2 else 3)

  # Under the file the model says the same.
  rng = np.random.default_rng(0)
  rows = nir.texts(rng, 6, 5, 7, tokenizer, WORDS)
  before = embedded(config, shape, tokenizer, devices, params, *rows)
  config.tasks.qa.prompt, config.trainable = str(files['qa']), (BODY,)
  params = METHODS[name].build(config, shape, devices, tokenizer).init(parts, jax.random.key(4))
  after = embedded(config, shape, tokenizer, devices, params, *rows)
  np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
  assert np.ptp(after) > 0.01


def test_prompts_at_the_start_of_a_run_are_exported(tokenizer, shape, parts, backbone, tmp_path):
  config = nir.make_config('nir_reranker', ('qa',), trainable=(BODY, 'head/.*'))
  config.tasks.qa.prompt = str(tmp_path / 'mine.npz')
  arrays = nir.write_prompt(tmp_path / 'mine.npz', shape, tokenizer, config, ('pair',))
  texts = DataSource(None, lambda *_: 'opened')
  kept = nir_prompt._keep(texts, tmp_path / 'run', nir_prompt.read_files(config))
  assert kept.open(None, None) == 'opened'
  assert {str(file) for file in kept.files.values()} == {config.tasks.qa.prompt}
  (tmp_path / 'mine.npz').unlink()
  trained = {'head/mlm/dense/bias': np.full(8, 2, np.float32)}
  product, files = export(config, tmp_path / 'run', backbone, trained, tokenizer)
  head = product.encoders['']['heads']['mlm']
  np.testing.assert_array_equal(head.params['dense']['bias'], 2)
  np.testing.assert_array_equal(head.params['bias'], parts.heads['mlm'].params['bias'])
  prompt = artifact.load_prompt(files['qa'])
  assert prompt.meta['head_sha256'] == head_specs.sha256('mlm', shape, head)
  for name, array in arrays.items():
    np.testing.assert_array_equal(learned_tokens.vectors(prompt)[name], array)
