"""Parameters of small encoders, at little cost, and scores of a teacher."""

import functools

import jax
import numpy as np

from dprjax.models import scratch


def init_params(config, seed):
  """`scratch.init_params`, in a tree of its own; made once, since it takes a quarter second."""
  return jax.tree.map(lambda leaf: leaf, _made(config, seed))


@functools.cache
def _made(config, seed):
  return scratch.init_params(config, jax.random.key(seed))


def draw_params(config, rng, deviation):
  """Random parameters, without compiling anything: scales of norms around 1, others around 0."""
  shapes = jax.eval_shape(lambda key: scratch.init_encoder(config, key), jax.random.key(0))
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      deviation * rng.standard_normal(leaf.shape) + (path[-1].key == 'scale')
    ).astype(np.float32),
    shapes,
  )


def draw_teacher(rng, shape):
  """Teacher scores [queries, passages]; NaN where a passage has none."""
  made = rng.normal(size=shape).astype(np.float32)
  made[1::4, -1] = np.nan
  made[2::8, 0] = np.nan
  return made
