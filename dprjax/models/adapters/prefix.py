"""Key and value vectors in front of those of tokens, in every layer (DPTDR section 3.1)."""

import math
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.models.adapter import Adapter, Kind, Training


@flax.struct.dataclass
class Prefix(Adapter):
  """Vectors that every token attends to. They have no positions and do not change between layers.

  Attributes:
    vectors: of all examples, or of each. Index 0 of the axis of two holds keys, 1 values.
    lengths: of each example: the first so many of its vectors are used, and what pads them is
      finite; 0: none, the plain encoder. None: all are.
    shift: the position of the first token. transformers counts from P with ``past_key_values``.
  """

  vectors: Float[Array | np.ndarray, 'L *B 2 P N D']
  lengths: Int[Array | np.ndarray, '*B'] | None = None
  shift: Int[Array | np.ndarray, '*B'] | int = 0

  by_layer = ('vectors',)

  def at(self, config: Any, tokens: Int[Array, 'B T']) -> Adapter:
    layers, *examples, two, _, heads, size = self.vectors.shape
    shape = layers, two, heads, size
    if shape != (config.num_layers, 2, config.num_kv_heads, config.head_dim) or examples not in (
      [],
      [len(tokens)],
    ):
      raise InputError(
        f'a prefix has shape {list(self.vectors.shape)}; for {len(tokens)} examples this encoder '
        f'takes [{config.num_layers}, 2, P, {config.num_kv_heads}, {config.head_dim}], or one of '
        'each example behind the axis of layers'
      )
    return self

  def shift_positions(self) -> Any:
    return self.shift

  def seen(self, mask: Bool[Array, 'B T']) -> Bool[Array, 'B S']:
    if self.lengths is None:
      return mask
    places = jnp.arange(self.vectors.shape[-3], dtype=jnp.int32)
    return jnp.concatenate([places[None, :] < self.lengths[:, None], mask], axis=1)

  def prefix(self) -> Any:
    return self.vectors if self.vectors.shape[-3] else None

  def size(self) -> int:
    return self.vectors.shape[-3]

  def row(self, size: int) -> 'Prefix':
    missing = ((0, 0), (0, 0), (0, size - self.size()), (0, 0), (0, 0))
    vectors = np.pad(np.asarray(self.vectors), missing)
    return Prefix(vectors, np.array(self.size(), np.int32), np.array(self.shift, np.int32))


def init(config: Any, model: Any, key: Array) -> dict[str, Any]:
  """Parameters of one prefix, of P = ``config.prompt.length``.

  ``config.prompt.reparam`` 'none': the prefix itself (DPTDR: an Embedding of L*2*H a position);
  'mlp': Embedding(P, H) -> Linear(hidden) -> Tanh -> Linear(L*2*H) (Li and Liang 2021, section 4.3;
  DPTDR Table 5). Initial values are N(0, ``init_std``): the prefix's, or the embedding's and both
  kernels' of the MLP, whose biases are 0. So the released code starts in effect: transformers
  initialises anew whatever a checkpoint lacks. PyTorch's own Linear would start all vectors nearly
  alike.
  """
  knobs, width = config.prompt, model.hidden_size
  length, hidden, std = knobs.length, knobs.reparam_hidden, knobs.init_std
  layers, two, heads, size = one_position(model)
  if knobs.reparam == 'none':
    return {'prefix': std * jax.random.normal(key, (layers, two, length, heads, size), jnp.float32)}
  embedding, first, second = jax.random.split(key, 3)
  return {
    'embedding': std * jax.random.normal(embedding, (length, width), jnp.float32),
    'hidden': linear(first, width, hidden, std),
    'output': linear(second, hidden, math.prod(one_position(model)), std),
  }


def expand(config: Any, model: Any, params: Mapping[str, Any]) -> Prefix:
  """The prefix of these parameters."""
  if 'prefix' in params:
    vectors = params['prefix']
  else:
    x = jnp.tanh(apply(params['hidden'], params['embedding']))
    x = apply(params['output'], x)  # [P, L * 2 * N * D]
    vectors = x.reshape(x.shape[0], *one_position(model)).transpose(1, 2, 0, 3, 4)
  return Prefix(vectors, shift=vectors.shape[2] if config.prompt.shift_positions else 0)


def one_position(config: Any) -> tuple[int, int, int, int]:
  """The shape [L, 2, N, D] of one position of a prefix."""
  return config.num_layers, 2, config.num_kv_heads, config.head_dim


def linear(key: Array, rows: int, columns: int, std: float) -> dict[str, Array]:
  """Parameters of a linear layer: its kernel N(0, std), its bias 0."""
  return {
    'kernel': std * jax.random.normal(key, (rows, columns), jnp.float32),
    'bias': jnp.zeros(columns, jnp.float32),
  }


def apply(params: Mapping[str, Array], x: Array) -> Array:
  """A linear layer."""
  return x @ params['kernel'] + jnp.expand_dims(params['bias'], 0)


def load(meta: Mapping[str, Any], vectors: Float[np.ndarray, 'L 2 P N D']) -> Prefix:
  """The prefix of a file."""
  return Prefix(vectors, shift=vectors.shape[2] if meta['shift_positions'] else 0)


def _row(config: Any, size: int) -> Prefix:
  layers, two, heads, head_dim = one_position(config)
  vectors = np.zeros((layers, two, size, heads, head_dim), np.float32)
  return Prefix(vectors, np.zeros((), np.int32), np.zeros((), np.int32))


ADAPTER = Kind(
  'prefix',
  'key and value vectors in every layer',
  lambda where, meta: {'prefix': 'L 2 P N D'},
  lambda meta, arrays: [load(meta, arrays['prefix'])],
  Training(init, expand, lambda config, adapter: ({'prefix': adapter.vectors}, {})),
  row=_row,
)
