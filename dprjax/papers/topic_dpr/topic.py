"""A prefix for each topic, chosen by a topic model (Topic-DPR section 3.2)."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.models.adapter import Kind
from dprjax.models.adapters import prefix


def init(config: Any, model: Any, key: Array) -> dict[str, Any]:
  """Parameters shared by all topics.

  A residual MLP over word embeddings, V = e + W2 relu(W1 e + b1) + b2, and a matrix M from H to
  L * 2 * H without bias. The paper gives no initial values: here N(0, ``config.prompt.init_std``),
  and biases 0.
  """
  width, std = model.hidden_size, config.prompt.init_std
  first, second, third = jax.random.split(key, 3)
  shape = width, math.prod(prefix.one_position(model))
  return {
    'hidden': prefix.linear(first, width, width, std),
    'residual': prefix.linear(second, width, width, std),
    'matrix': {'kernel': std * jax.random.normal(third, shape, jnp.float32)},
  }


def expand(
  model: Any, params: Mapping[str, Any], words: Float[Array, 'K P H']
) -> Float[Array, 'L K 2 P N D']:
  """The prefix of each topic.

  Args:
    words: embeddings of the first P tokens of the words of each topic.
  """
  topics, length, width = words.shape
  rows = words.reshape(topics * length, width)
  hidden = jax.nn.relu(prefix.apply(params['hidden'], rows))
  rows = rows + prefix.apply(params['residual'], hidden)
  prefixes = rows @ params['matrix']['kernel']  # [K * P, L * 2 * N * D]
  prefixes = prefixes.reshape(topics, length, *prefix.one_position(model))
  return prefixes.transpose(2, 0, 3, 1, 4, 5)


def _topics(prompt: Any) -> Any:
  from dprjax.papers.topic_dpr import topic_models

  topics = topic_models.Topics.from_arrays(prompt.arrays, prompt.path)
  if len(topics) != len(prompt.adapters('query')):
    raise InputError(
      f'{prompt.path}: {len(prompt.adapters("query"))} adapters for {len(topics)} topics'
    )
  return topics


def _load(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Any]:
  return [prefix.load(meta, vectors) for vectors in arrays['prefix']]


ADAPTER = Kind(
  'topic',
  'a prefix for each topic, chosen by a topic model',
  functools.partial(prefix.arrays, 'K L 2 P N D'),
  _load,
  sided=False,
  topics=_topics,
)
