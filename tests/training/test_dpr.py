"""DPT and FT: loss, gradients, work a device, and the parameters that move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models.encoder_config import EncoderConfig
from dprjax.training import dpr, updates
from dprjax.training.method import Parts
from tests import gradients, reference, starts
from tests.gradients import make_mesh
from tests.options import with_options
from tests.refusals import refused

MODEL = EncoderConfig('bert', 40, 8, 2, 2, 16, max_positions=12)
ROWS, CANDIDATES = 32, 2


def make_config(**changes):
  return with_options(
    **{'prompt__length': 3, 'prompt__dropout': 0.0, 'backbone__dropout': 0.0, 'batch_size': ROWS}
    | changes
  )


def make_batch(
  rows=ROWS, candidates=CANDIDATES, query_length=5, passage_length=7, vocab=40, seed=1
):
  rng = np.random.default_rng(seed)

  def tokens(*shape):
    lengths = rng.integers(2, shape[-1] + 1, size=shape[:-1])
    mask = np.arange(shape[-1]) < lengths[..., None]
    return np.where(mask, rng.integers(1, vocab, size=shape), 0).astype(np.int32), mask

  q, p = tokens(rows, query_length), tokens(rows, candidates, passage_length)
  index = rng.integers(0, 3 * rows, size=(rows, candidates)).astype(np.int32)
  relevant = np.stack([index[:, 0], rng.integers(0, 3 * rows, size=rows)], axis=1).astype(np.int32)
  teacher = starts.draw_teacher(np.random.default_rng(seed), index.shape)
  return {
    'query_tokens': q[0],
    'query_mask': q[1],
    'passage_tokens': p[0],
    'passage_mask': p[1],
    'query_index': np.arange(rows, dtype=np.int32),
    'passage_index': index,
    'relevant': relevant,
    'teacher_scores': teacher,
  }


def make_params(method, seed=0, std=0.5, model=MODEL):
  # Larger weights than the initial ones of BERT, so that the prompt matters.
  start, other = (starts.init_params(model, i + seed) for i in range(2))
  params = method.init(Parts(start), jax.random.key(9))
  if 'passage' in params['backbone']:  # two encoders differ once they are trained
    params['backbone']['passage'] = other
  return {
    name: np.asarray(leaf)
    * (std / 0.02 if name.endswith(('kernel', 'embedding', 'prefix')) else 1.0)
    for name, leaf in tree.flatten(params).items()
  }


def value_and_gradient(config, mesh, batch, trainable=('prompt/.*',)):
  method = dpr.build(config, MODEL, mesh)
  params = make_params(method)
  value, _, gradient = gradients.value_and_gradient(method, params, trainable, mesh, batch)
  return params, value, gradient


def reference_loss(config, params, batch):
  """The loss in float64 numpy; ``params`` is the flat tree."""
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  vectors, frozen, apart = {}, {}, []
  for side in ('query', 'passage'):
    prompt = params.get('prompt')
    if prompt is not None and not config.prompt.tied:
      prompt = prompt[side]
    backbone = params['backbone'][side] if config.backbone.two_encoders else params['backbone']
    t, m = batch[f'{side}_tokens'], batch[f'{side}_mask']
    flat = (t.reshape(-1, t.shape[-1]), m.reshape(-1, t.shape[-1]))
    hidden = reference.encode(MODEL, backbone, *flat, None if prompt is None else prompt['prefix'])
    vectors[side] = reference.pool(hidden, flat[1], config.pooling, config.normalize).reshape(
      *t.shape[:-1], -1
    )
    if config.prompt.regularization:
      bare = reference.encode(MODEL, backbone, *flat, None)
      bare = reference.pool(bare, flat[1], config.pooling, config.normalize)
      frozen[side] = bare.reshape(vectors[side].shape)
      apart.append(np.mean(np.sum((vectors[side].reshape(bare.shape) - bare) ** 2, axis=1)))
  rest = batch['passage_index'], batch['relevant'], config.temperature, config.in_batch

  def loss(q, p):
    value = reference.loss(q, p, *rest)[0]
    settings = config.distillation
    if settings.loss == 'none':
      return value
    scores = np.einsum('bh,bch->bc', q, p) / config.temperature
    teacher = np.float64(batch['teacher_scores']) / settings.temperature
    distilled = reference.distillation_loss(scores, teacher, settings.loss)
    return settings.weight * distilled + (1 - settings.weight) * value

  value = loss(vectors['query'], vectors['passage'])
  if not apart:
    return value
  if config.prompt.regularization_on == 'scores':
    both = ([found[side] for side in ('query', 'passage')] for found in (frozen, vectors))
    apart = reference.divergence(*(reference.candidate_scores(*two, *rest)[0] for two in both))
  return value + config.prompt.regularization * np.mean(apart)


CHUNKED = [{}, {'grad_cache': 4}]
ANCHOR = {'prompt__regularization': 0.5}
OTHERS = [
  ANCHOR | {'prompt__tied': False, 'grad_cache': 2},
  {'backbone__two_encoders': True},
  {'backbone__remat': True, 'backbone__unroll': 0},
  {'in_batch': False},
]
SCORES = ANCHOR | {'prompt__regularization_on': 'scores'}
MARGINS = {'distillation__loss': 'margin_mse', 'distillation__weight': 0.75}
LISTS = {'distillation__loss': 'kl', 'distillation__temperature': 2.0, 'temperature': 0.5}


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ('sizes', 'settings'),
  [
    slow({'data': 8}, CHUNKED[1] | MARGINS | ANCHOR),
    slow({'data': 8}, CHUNKED[1] | SCORES),
    slow({'data': 1}, SCORES | {'normalize': True, 'pooling': 'mean', 'in_batch': False}),
    ({'data': 1}, {}),
    slow({'data': 1}, {'normalize': True, 'temperature': 0.1}),
    slow({'data': 1}, MARGINS | CHUNKED[1]),
    slow({'data': 8}, LISTS),
    slow({'data': 1}, LISTS | {'grad_cache': 2}),
    *(slow({'data': 8}, settings) for settings in [CHUNKED[0], *OTHERS]),
    slow({'data': 4, 'model': 2}, CHUNKED[1]),
  ],
  ids=str,
)
def test_prompt_loss_and_gradient_equal_numpy(sizes, settings):
  config, batch = make_config(**settings), make_batch()
  if config.grad_cache == 4 and sizes == {'data': 8}:
    assert ROWS // 4 // 8 == 1  # the smallest chunk: a row a device
  params, value, gradient = value_and_gradient(config, make_mesh(sizes), batch)
  assert value == pytest.approx(reference_loss(config, params, batch), rel=1e-5)
  assert all(name.startswith('prompt/') for name in gradient)
  gradients.assert_slope(lambda params: reference_loss(config, params, batch), params, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('sizes', 'cache'),
  [
    ({'data': 1}, 1),
    ({'data': 8}, 2),
    ({'data': 2, 'fsdp': 2, 'model': 2}, 2),
  ],
  ids=str,
)
def test_full_fine_tuning_gradient_equals_numpy(sizes, cache):
  config, batch = make_config(prompt__length=0, grad_cache=cache), make_batch()
  params, value, gradient = value_and_gradient(
    config, make_mesh(sizes), batch, trainable=('backbone/.*',)
  )
  assert set(gradient) == set(params)
  assert value == pytest.approx(reference_loss(config, params, batch), rel=1e-5)
  gradients.assert_slope(lambda params: reference_loss(config, params, batch), params, gradient)


def run_steps(config, steps, mesh):
  """The real update of the training loop on random batches.

  Returns the flat parameters before and after, and the optimiser state.
  """
  method = dpr.build(config, MODEL, mesh)
  params = make_params(method, std=0.02)
  names = tree.trainable_names(config.trainable, list(params))
  layout = updates.lay_out(config, params, names, mesh, steps)
  state, frozen = layout.place(params)
  update = updates.make_update(method, layout)
  for step in range(steps):
    state, metrics = update(
      state, frozen, meshes.put_batch(mesh, make_batch(seed=step)), jax.random.key(0), step + 1
    )
    # Read before the next step: eight devices on two cores wait for each other for ever where
    # several steps are queued.
    assert np.isfinite(metrics['loss'])
  return params, {n: np.asarray(x) for n, x in {**frozen, **state.trainable}.items()}, state


@pytest.mark.parametrize(
  'settings',
  [
    {'prompt__reparam': 'mlp', 'prompt__tied': False},
    {'prompt__dropout': 0.1, 'backbone__dropout': 0.1},
  ],
  ids=str,
)
@pytest.mark.slow
def test_after_twenty_steps_the_backbone_is_bit_identical(settings):
  before, after, state = run_steps(make_config(**settings), 20, make_mesh({'data': 8}))
  for name in before:
    if name.startswith('backbone/'):
      np.testing.assert_array_equal(before[name].view(np.int32), after[name].view(np.int32))
    else:
      assert not np.array_equal(before[name], after[name]), name
  trained = sum(x.size for n, x in before.items() if n.startswith('prompt/'))
  assert tree.count(state.opt_state) == pytest.approx(
    2 * trained, abs=8
  )  # two moments and a few counters


@pytest.mark.slow
def test_after_twenty_steps_of_fine_tuning_everything_moved():
  config = make_config(prompt__length=0, trainable=('backbone/.*',))
  before, after, _ = run_steps(config, 20, make_mesh({'data': 2, 'fsdp': 2, 'model': 2}))
  still = {name for name in before if np.array_equal(before[name], after[name])}
  # The bias of keys shifts all scores of a query alike, so its gradient is zero but for rounding;
  # nothing else may stand still.
  assert still <= {'backbone/layers/attention/key/bias'}


@pytest.mark.slow
def test_a_batch_has_one_mask_of_the_prompt_whatever_its_chunks():
  mesh, batch, found = make_mesh({'data': 8}), make_batch(), []
  for chunks in CHUNKED:
    config = make_config(prompt__dropout=0.3, prompt__dropout_scope='batch', **chunks)
    method = dpr.build(config, MODEL, mesh)
    flat = make_params(method)
    params = tree.unflatten(flat)
    rows, key = meshes.put_batch(mesh, batch), jax.random.key(3)
    run = jax.value_and_grad(
      lambda prompt, params=params, method=method, rows=rows, key=key: method.loss(
        {**params, 'prompt': prompt}, rows, key
      )[0]
    )
    found.append(jax.jit(run)(params['prompt']))
  (value, gradient), *others = found
  assert value != pytest.approx(reference_loss(make_config(), flat, batch), rel=1e-3)
  for other, slope in others:
    assert float(other) == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(slope['prefix'], gradient['prefix'], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_anchor_needs_a_prompt_on_a_frozen_backbone():
  mesh = make_mesh({'data': 1})
  with refused('config.prompt.regularization'):
    make_params(dpr.build(make_config(**ANCHOR, trainable=('.*',)), MODEL, mesh))


def test_a_batch_may_tell_what_its_negatives_are():
  assert dpr.negative_shares({}) == {}
  kind = np.array([[2, 2, 1, 0], [2, 5, 3, 4]], np.int8)
  shares = {
    name.removeprefix('negatives/'): float(value)
    for name, value in dpr.negative_shares({'negative_source': jnp.asarray(kind)}).items()
  }
  assert shares == {
    'random': 1 / 8,
    'undenoised': 1 / 8,
    'denoised': 3 / 8,
    'denoised_for_undenoised': 1 / 8,
    'random_for_undenoised': 1 / 8,
    'random_for_denoised': 1 / 8,
    'queries_short_of_a_source': 1 / 2,
  }


@pytest.mark.slow
def test_dropout_is_drawn_from_the_key_alone():
  config = make_config(prompt__dropout=0.3, backbone__dropout=0.1)
  batch = make_batch()
  values = {}
  for sizes in ({'data': 1}, {'data': 8}):
    mesh = make_mesh(sizes)
    method = dpr.build(config, MODEL, mesh)
    params = tree.unflatten({n: jnp.asarray(x) for n, x in make_params(method).items()})
    loss = jax.jit(
      lambda key, params=params, method=method, mesh=mesh: method.loss(
        params, meshes.put_batch(mesh, batch), key
      )[0]
    )
    values[sizes['data']] = [float(loss(jax.random.key(seed))) for seed in (0, 0, 1)]
  assert values[1][0] == values[1][1] != values[1][2]
  np.testing.assert_allclose(values[1], values[8], rtol=1e-5)
