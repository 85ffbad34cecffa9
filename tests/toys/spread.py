"""A pooling in one file: the spread of the states of a text, number by number.

DPRJAX_EXTENSIONS=tests.toys.spread python -m dprjax.train --config.pooling=spread ...
"""

import jax.numpy as jnp

from dprjax.models.pooling import Pooling


def spread(states, mask):
  highest = jnp.max(jnp.where(mask[:, :, None], states, -1e9), axis=1)
  lowest = jnp.min(jnp.where(mask[:, :, None], states, 1e9), axis=1)
  return highest - lowest


POOLING = Pooling('spread', spread, text='the range of its states')
