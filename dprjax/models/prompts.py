"""Trainable prompts: their parameters, and the key/value prefixes that these expand to.

Every parametrisation gives a prefix ``[L, 2, P, N, D]`` float32 (index 0 of axis 1: keys, 1:
values), as the encoder takes it and ``export`` writes it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.formats.texts import KINDS
from dprjax.models.encoder_config import EncoderConfig

REPARAMS = ('none', 'mlp')


def init_prefix(
  config: EncoderConfig,
  key: Array,
  length: int,
  *,
  reparam: str = 'none',
  hidden: int = 512,
  std: float = 0.02,
) -> dict[str, Any]:
  """Parameters of one prompt.

  Args:
    length: P.
    reparam: 'none': the prefix itself (DPTDR: an Embedding of L*2*H a position); 'mlp':
      Embedding(P, H) -> Linear(hidden) -> Tanh -> Linear(L*2*H) (Li and Liang 2021, section 4.3;
      DPTDR Table 5).
    hidden: width of the MLP.
    std: initial values are N(0, std): the prefix's, or the embedding's and both kernels' of the
      MLP, whose biases are 0. So the released code starts in effect: transformers initialises
      anew whatever a checkpoint lacks. PyTorch's own Linear would start all vectors nearly alike.

  Raises:
    InputError: an unknown ``reparam``.
  """
  width = config.hidden_size
  layers, two, heads, size = _vectors(config)
  if reparam == 'none':
    return {'prefix': std * jax.random.normal(key, (layers, two, length, heads, size), jnp.float32)}
  if reparam != 'mlp':
    raise InputError(
      f'config.prompt.reparam: expected one of {", ".join(REPARAMS)}, not {reparam!r}'
    )
  embedding, first, second = jax.random.split(key, 3)
  return {
    'embedding': std * jax.random.normal(embedding, (length, width), jnp.float32),
    'hidden': _linear(first, width, hidden, std),
    'output': _linear(second, hidden, math.prod(_vectors(config)), std),
  }


def expand_prefix(config: EncoderConfig, params: Mapping[str, Any]) -> Float[Array, 'L 2 P N D']:
  """The prefix that a prompt's parameters expand to."""
  if 'prefix' in params:
    return params['prefix']
  x = jnp.tanh(_apply(params['hidden'], params['embedding']))
  x = _apply(params['output'], x)  # [P, L * 2 * N * D]
  return x.reshape(x.shape[0], *_vectors(config)).transpose(1, 2, 0, 3, 4)


def _vectors(config: EncoderConfig) -> tuple[int, int, int, int]:
  """The shape [L, 2, N, D] of one position of a prefix."""
  return config.num_layers, 2, config.num_kv_heads, config.head_dim


def init_prompt(
  config: EncoderConfig,
  key: Array,
  length: int,
  *,
  tied: bool = True,
  sides: str = 'both',
  **kwargs: Any,
) -> dict[str, Any]:
  """The ``prompt`` subtree: one prompt where tied, else ``{'query': ..., 'passage': ...}``.

  For queries alone, ``sides='query'``, it is ``{'query': ...}``.
  """
  if sides == 'query':
    return {'query': init_prefix(config, key, length, **kwargs)}
  if tied:
    return init_prefix(config, key, length, **kwargs)
  return {
    kind: init_prefix(config, jax.random.fold_in(key, i), length, **kwargs)
    for i, kind in enumerate(KINDS)
  }


def expand_prompt(
  config: EncoderConfig, params: Mapping[str, Any] | None
) -> dict[str, Float[Array, 'L 2 P N D'] | None]:
  """The prefixes of queries and passages: one array where tied, None where there is no prompt."""
  if params is None:
    return dict.fromkeys(KINDS)
  if is_tied(params):
    return dict.fromkeys(KINDS, expand_prefix(config, params))
  return {kind: expand_prefix(config, params[kind]) if kind in params else None for kind in KINDS}


def init_topics(config: EncoderConfig, key: Array, *, std: float = 0.02) -> dict[str, Any]:
  """Parameters of the prompts of topics (Topic-DPR section 3.2), the same for all topics.

  A residual MLP over the words' embeddings, V = e + W2 relu(W1 e + b1) + b2, and a matrix M from
  H to L * 2 * H without bias. Initial values are N(0, std), biases 0: the paper leaves them open.
  """
  width = config.hidden_size
  first, second, third = jax.random.split(key, 3)
  return {
    'hidden': _linear(first, width, width, std),
    'residual': _linear(second, width, width, std),
    'matrix': {
      'kernel': std * jax.random.normal(third, (width, math.prod(_vectors(config))), jnp.float32)
    },
  }


def expand_topics(
  config: EncoderConfig, params: Mapping[str, Any], words: Float[Array, 'K P H']
) -> Float[Array, 'K L 2 P N D']:
  """The prefix of each topic.

  Args:
    config: the encoder's shape.
    params: see `init_topics`.
    words: embeddings of the first P tokens of each topic's words.
  """
  topics, length, width = words.shape
  rows = words.reshape(topics * length, width)
  rows = rows + _apply(params['residual'], jax.nn.relu(_apply(params['hidden'], rows)))
  prefixes = rows @ params['matrix']['kernel']  # [K * P, L * 2 * N * D]
  return prefixes.reshape(topics, length, *_vectors(config)).transpose(0, 2, 3, 1, 4, 5)


def is_tied(params: Mapping[str, Any]) -> bool:
  """Whether queries and passages have one prompt."""
  return not set(KINDS) & set(params)


def _linear(key: Array, rows: int, columns: int, std: float) -> dict[str, Array]:
  return {
    'kernel': std * jax.random.normal(key, (rows, columns), jnp.float32),
    'bias': jnp.zeros(columns, jnp.float32),
  }


def _apply(params: Mapping[str, Array], x: Array) -> Array:
  return x @ params['kernel'] + jnp.expand_dims(params['bias'], 0)
