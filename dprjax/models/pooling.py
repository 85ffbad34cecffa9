"""Poolings of the hidden states of a text into one vector, as in sentence-transformers.

An extension (`base.extensions`) adds a pooling as its value ``POOLING``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dprjax.base import extensions
from dprjax.base.errors import InputError

States = Float[Array, 'B T H']
Mask = Bool[Array, 'B T']


class Pooling(NamedTuple):
  """One way to pool.

  Attributes:
    name: in ``config.pooling``, in the meta of a prompt, and in files of sentence-transformers.
    pool: ``(states, mask) -> vectors [B, H]``, finite for a row of padding.
    flag: its key in 1_Pooling/config.json before version 5.4.
    text: a description of the vector, for a model card.
  """

  name: str
  pool: Callable[[States, Mask], Float[Array, 'B H']]
  flag: str = ''
  text: str = ''


def _first(states: States, mask: Mask) -> Float[Array, 'B H']:
  return states[:, 0]


def _mean(states: States, mask: Mask) -> Float[Array, 'B H']:
  weights = mask.astype(states.dtype)[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)


def _mean_over_root(states: States, mask: Mask) -> Float[Array, 'B H']:
  weights = mask.astype(states.dtype)[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.sqrt(jnp.maximum(jnp.sum(weights, axis=1), 1))


def _weighted_mean(states: States, mask: Mask) -> Float[Array, 'B H']:
  """Later tokens weigh more (SGPT, Muennighoff 2022, section 3.1)."""
  places = jnp.arange(1, mask.shape[1] + 1, dtype=states.dtype)
  weights = (mask.astype(states.dtype) * places[None])[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)


def _max(states: States, mask: Mask) -> Float[Array, 'B H']:
  lowest = jnp.finfo(states.dtype).min
  return jnp.max(jnp.where(mask[:, :, None], states, lowest), axis=1)


def _last(states: States, mask: Mask) -> Float[Array, 'B H']:
  last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
  return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]


_OURS = (
  Pooling('cls', _first, 'pooling_mode_cls_token', 'its first state'),
  Pooling('mean', _mean, 'pooling_mode_mean_tokens', 'the mean of its states'),
  Pooling('max', _max, 'pooling_mode_max_tokens', 'the maximum of its states'),
  Pooling(
    'mean_sqrt_len_tokens',
    _mean_over_root,
    'pooling_mode_mean_sqrt_len_tokens',
    'the sum of its states over the root of their number',
  ),
  Pooling(
    'weightedmean',
    _weighted_mean,
    'pooling_mode_weightedmean_tokens',
    'the mean of its states, weighted by their places',
  ),
  Pooling('lasttoken', _last, 'pooling_mode_lasttoken', 'its last state'),
)


def every() -> dict[str, Pooling]:
  """All poolings by name, those of dprjax first."""
  return {pooling.name: pooling for pooling in (*_OURS, *extensions.values('POOLING'))}


def find(name: str, where: str = 'pooling') -> Pooling:
  """The pooling of this name."""
  poolings = every()
  if not isinstance(name, str) or name not in poolings:
    raise InputError(f'{where}: expected one of {", ".join(poolings)}, not {name!r:.60}')
  return poolings[name]
