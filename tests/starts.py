"""Fresh parameters of small encoders, made once: they take a quarter of a second."""

import functools

import jax

from dprjax.models import hub


def init_params(config, seed):
  """`hub.init_params`, in a tree of its own."""
  return jax.tree.map(lambda leaf: leaf, _made(config, seed))


@functools.cache
def _made(config, seed):
  return hub.init_params(config, jax.random.key(seed))
