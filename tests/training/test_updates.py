import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dprjax.base import tree
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training import updates
from tests.refusals import refused


def settings(**options):
  c = configs.default().optim
  c.update(options)
  return c


PARAMS = {
  'backbone/kernel': np.full(3, 2.0, np.float32),
  'prompt/bias': np.full(2, 3.0, np.float32),
  'prompt/prefix': np.full(2, 5.0, np.float32),
}
TRAINABLE = {'prompt/bias', 'prompt/prefix'}


def step(config, gradients, params=PARAMS, trainable=TRAINABLE, steps=10, n=1):
  optimizer = updates.make_optimizer(config, list(params), trainable, steps)
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for _ in range(n):
    changes, state = update(gradients, state, params)
    params = optax.apply_updates(params, changes)
  return params, state


def test_masked_freezes_even_where_every_gradient_is_given():
  ones = jax.tree.map(jnp.ones_like, PARAMS)
  params, _ = step(settings(warmup=0.0), ones, n=3)
  np.testing.assert_array_equal(params['backbone/kernel'], PARAMS['backbone/kernel'])
  assert not np.array_equal(params['prompt/prefix'], PARAMS['prompt/prefix'])


def test_frozen_gradients_do_not_shrink_the_live_ones_through_the_clip():
  gradients = {
    'backbone/kernel': jnp.full(3, 1e6),
    'prompt/bias': jnp.full(2, 0.1),
    'prompt/prefix': jnp.full(2, 0.1),
  }
  small = {**gradients, 'backbone/kernel': jnp.zeros(3)}
  with_large, without = (
    step(settings(warmup=0.0, clip=1.0, eps=1.0), g)[0] for g in (gradients, small)
  )
  np.testing.assert_array_equal(with_large['prompt/prefix'], without['prompt/prefix'])


def test_state_exists_for_the_live_leaves_alone():
  optimizer = updates.make_optimizer(settings(), list(PARAMS), TRAINABLE, 10)
  state = optimizer.init({**PARAMS, 'backbone/kernel': jnp.zeros(1000)})
  assert tree.count(state) <= 2 * 4 + 4


def test_adamw_against_its_equations():
  config = settings(warmup=0.0, decay='none', learning_rate=0.1, clip=0.0, weight_decay=0.01)
  gradients = {
    'backbone/kernel': jnp.zeros(3),
    'prompt/bias': jnp.full(2, 0.3),
    'prompt/prefix': jnp.full(2, -0.2),
  }
  params, _ = step(config, gradients)
  # Loshchilov and Hutter 2019, Algorithm 2, first step: both moments' bias corrections cancel their
  # decay.
  expected = 5.0 - 0.1 * (-0.2 / (np.sqrt(0.2**2) + 1e-8) + 0.01 * 5.0)
  np.testing.assert_allclose(params['prompt/prefix'], expected, rtol=1e-6)
  # Rules: biases do not decay.
  np.testing.assert_allclose(params['prompt/bias'], 3.0 - 0.1 * 0.3 / (0.3 + 1e-8), rtol=1e-6)


def test_learning_rate_rules_scale_a_subtree():
  gradients = jax.tree.map(jnp.ones_like, PARAMS)
  config = settings(
    warmup=0.0,
    decay='none',
    learning_rate=0.1,
    learning_rate_rules=((r'prompt/bias', 0.5), ('.*', 1.0)),
  )
  params, _ = step(config, gradients)
  assert float(3.0 - params['prompt/bias'][0]) * 2 == pytest.approx(
    float(5.0 - params['prompt/prefix'][0]), rel=1e-5
  )


def test_schedule_rises_over_the_warm_up_and_falls_to_zero():
  schedule = updates.make_schedule(settings(learning_rate=1.0, warmup=0.1), 100)
  assert [float(schedule(s)) for s in (0, 5, 10, 55, 100)] == pytest.approx([0, 0.5, 1.0, 0.5, 0.0])
  constant = updates.make_schedule(settings(learning_rate=1.0, warmup=0.0, decay='none'), 100)
  assert float(constant(99)) == 1.0


def test_an_uncovered_name_is_an_error():
  with refused('config.optim.learning_rate_rules'):
    updates.make_optimizer(
      settings(learning_rate_rules=(('backbone/.*', 1.0),)), list(PARAMS), TRAINABLE, 10
    )


def test_the_average_equals_numpy():
  ema, interpolate = 0.4, 0.75

  def loss(params, batch, key):
    value = jnp.sum(jnp.square(params['w'] - batch['x']))
    return value, {}

  optimizer = updates.make_optimizer(settings(warmup=0.0), ['w'], {'w'}, 20)
  start = {'w': jnp.array([0.5, -2.0], jnp.float32)}
  copies = [jax.tree.map(jnp.copy, start) for _ in range(2)]
  layout = updates.ParameterLayout(
    {'w': np.dtype('float32')}, {}, frozenset({'w'}), optimizer, None, ema, interpolate
  )
  state = updates.State(start, optimizer.init(start), *copies)
  method = methods.Model(None, loss, None, {})
  update = updates.make_update(method, layout)
  begin = average = np.array([0.5, -2.0])
  for step in range(1, 13):
    state, _ = update(state, {}, {'x': jnp.ones(2, jnp.float32)}, jax.random.key(0), step)
    decay = min(ema, (1 + step) / (10 + step))  # 0.4 from step 5 on
    average = decay * average + (1 - decay) * np.asarray(state.trainable['w'], np.float64)
    scored = (1 - interpolate) * begin + interpolate * average
    np.testing.assert_allclose(state.average['w'], scored, rtol=1e-6)
  assert state.model is state.average and (state.average['w'] != state.trainable['w']).all()
