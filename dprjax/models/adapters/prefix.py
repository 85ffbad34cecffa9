"""Key and value vectors before those of the tokens, in every layer (DPTDR section 3.1)."""

import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models import encoder
from dprjax.models.adapter import BARE, Adapter, AdapterTraining, Kind, Peft
from dprjax.models.encoder_config import DEFAULT_OPTIONS, EncoderConfig

_TENSOR = 'prompt_embeddings'
_HIDDEN = 512  # width of the MLP of a reparametrised prompt


class _Meta(msgspec.Struct):
  shift_positions: bool


@flax.struct.dataclass
class Prefix(Adapter):
  """Vectors that every token attends to, without positions.

  Attributes:
    vectors: keys (index 0) and values, shared or one prefix for each example.
    lengths: the number of vectors in use for each example; the rest is finite padding. None: all.
    shift: the position of the first token; P is that of ``past_key_values`` in transformers.
  """

  vectors: Float[Array | np.ndarray, 'L *B 2 P N D']
  lengths: Int[Array | np.ndarray, '*B'] | None = None
  shift: Int[Array | np.ndarray, '*B'] | int = 0

  by_layer = ('vectors',)

  def drop_examples(self, rate: float, key: Array, count: int) -> 'Prefix':
    return self  # attention draws the masks and copies no vectors

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

  def row(self) -> 'Prefix':
    return Prefix(self.vectors, np.array(self.size(), np.int32), np.array(self.shift, np.int32))


def init(config: Any, model: Any, key: Array) -> dict[str, Any]:
  """Parameters of one prefix of P = ``config.prompt.length``.

  ``config.prompt.reparam`` 'none': the prefix itself; 'mlp': Embedding(P, H) -> Linear(512) ->
  Tanh -> Linear(L*2*H) (Li and Liang 2021, section 4.3; DPTDR Table 5). Embeddings, kernels and
  prefixes start as N(0, ``init_std``), biases as 0, like the released code in effect. The default
  of PyTorch Linear would start all vectors nearly alike.
  """
  settings, width = config.prompt, model.hidden_size
  length, hidden, std = settings.length, _HIDDEN, settings.init_std
  layers, two, heads, size = one_position(model)
  if settings.reparam == 'none':
    return {'prefix': std * jax.random.normal(key, (layers, two, length, heads, size), jnp.float32)}
  embedding, first, second = jax.random.split(key, 3)
  return {
    'embedding': std * jax.random.normal(embedding, (length, width), jnp.float32),
    'hidden': linear(first, width, hidden, std),
    'output': linear(second, hidden, math.prod(one_position(model)), std),
  }


def expand(config: Any, model: Any, params: Mapping[str, Any]) -> Prefix:
  if 'prefix' in params:
    vectors = params['prefix']
  else:
    x = jnp.tanh(apply(params['hidden'], params['embedding']))
    x = apply(params['output'], x)  # [P, L * 2 * N * D]
    vectors = x.reshape(x.shape[0], *one_position(model)).transpose(1, 2, 0, 3, 4)
  return Prefix(vectors, shift=vectors.shape[2] if config.prompt.shift_positions else 0)


def one_position(config: Any) -> tuple[int, int, int, int]:
  return config.num_layers, 2, config.num_kv_heads, config.head_dim


def linear(key: Array, rows: int, columns: int, std: float) -> dict[str, Array]:
  """Parameters of a linear layer: its kernel N(0, std), its bias 0."""
  return {
    'kernel': std * jax.random.normal(key, (rows, columns), jnp.float32),
    'bias': jnp.zeros(columns, jnp.float32),
  }


def apply(params: Mapping[str, Array], x: Array) -> Array:
  return x @ params['kernel'] + jnp.expand_dims(params['bias'], 0)


def of_text(
  config: Any, model: Any, params: Mapping[str, Any], tokens: Int[np.ndarray, ' P']
) -> dict[str, Any]:
  """The prefix that acts like this text put before every other text.

  It has the encoder keys and values of the text. Keys with rotary positions are turned to the P
  positions before the first token. Under causal attention, states equal those of the joined texts,
  as far as windows reach.
  """
  vectors = keys_and_values(model, params, tokens)
  turn = model.family.turn_keys
  if turn is not None and not config.prompt.shift_positions:
    vectors[:, 0] = turn(model, vectors[:, 0], -len(tokens))
  return {'prefix': vectors}


def keys_and_values(
  config: EncoderConfig, params: Mapping[str, Any], tokens: Int[np.ndarray, ' T']
) -> Float[np.ndarray, 'L 2 T N D']:
  """Keys (index 0) and values of a text in each layer, float32, in the form used by attention.

  Keys have passed their norm and the rotation by positions, which count from 0.

  Args:
    params: as for ``encoder.encode``, or on disk; one layer at a time is read from there.
  """
  rows = jnp.asarray(tokens, jnp.int32)[None]
  first = {
    name: jax.tree.map(np.asarray, params[name])
    for name in ('embeddings', 'relative')
    if name in params
  }
  x, scanned, shared = encoder.embed_tokens(config, first, rows, jnp.ones(rows.shape, bool), BARE)
  stack = encoder.stack(config, 1, DEFAULT_OPTIONS, True)

  @jax.jit
  def run(layer, scanned, x, shared):
    (x, _), sown = stack.apply({'params': layer}, x, scanned, shared, mutable=['intermediates'])
    sown = sown['intermediates']['attention']
    return x, [sown[name][0][0, 0] for name in ('keys', 'values')]

  pairs = []
  for layer in range(config.num_layers):

    def own(leaf, layer=layer):
      return leaf[(slice(layer, layer + 1), *(slice(None),) * (leaf.ndim - 1))]

    x, pair = run(jax.tree.map(own, params['layers']), jax.tree.map(own, scanned), x, shared)
    pairs.append(jax.device_get(pair))
  shape = config.num_layers, 2, len(tokens), config.num_kv_heads, config.head_dim
  return np.asarray(pairs, np.float32).reshape(shape)


def load(meta: Mapping[str, Any], vectors: Float[np.ndarray, 'L 2 P N D']) -> Prefix:
  return Prefix(vectors, shift=vectors.shape[2] if meta['shift_positions'] else 0)


def _row(config: Any, size: int) -> Prefix:
  layers, two, heads, head_dim = one_position(config)
  vectors = np.zeros((layers, two, size, heads, head_dim), np.float32)
  return Prefix(vectors, np.zeros((), np.int32), np.zeros((), np.int32))


def arrays(axes: str, where: str, meta: Mapping[str, Any]) -> dict[str, str]:
  convert(dict(meta), f'{where}: meta', _Meta)
  return {'prefix': axes}


def meta_of(config: Any) -> dict[str, bool]:
  return {'shift_positions': bool(config.prompt.shift_positions)}


def _export(config: Any, adapter: Prefix) -> tuple[dict[str, Any], dict[str, Any]]:
  return {'prefix': adapter.vectors}, meta_of(config)


def to_peft(
  where: str, model: Any, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """A prefix in PEFT format: for each position and layer, first the keys, then the values.

  PEFT passes no positions, so positions of tokens start at P. Rotary scores depend only on
  distances, so keys trained with tokens from 0 are turned by P places.
  """
  vectors = arrays['prefix']
  layers, _, length, heads, size = vectors.shape
  longest = max(meta['query_max_length'], meta['passage_max_length'])
  turn, why = model.family.turn_keys, ''
  if model.family.prompted_by != 'cache':
    why = f'{model.model_type} models take no past keys'
  elif model.window is not None and length + longest > model.window:
    why = f'{length} vectors and {longest} tokens exceed the window of {model.window}'
  elif turn is None and not meta['shift_positions']:
    why = f'PEFT counts positions from {length}: train with --config.prompt.shift_positions=True'
  if why:
    raise InputError(f'{where}: not a prompt for PEFT ({why}); export with another --format')
  if turn is not None and not meta['shift_positions']:
    vectors = np.stack([turn(model, vectors[:, 0], length), vectors[:, 1]], axis=1)
  config = {
    'encoder_hidden_size': heads * size,
    'num_attention_heads': heads,
    'num_layers': layers,
    'num_transformer_submodules': 1,
    'num_virtual_tokens': length,
    'prefix_projection': False,
    'token_dim': heads * size,
  }
  rows = vectors.transpose(2, 0, 1, 3, 4).reshape(length, -1)
  return config, {_TENSOR: np.ascontiguousarray(rows)}


ADAPTER = Kind(
  'prefix',
  'key and value vectors in every layer',
  functools.partial(arrays, 'L 2 P N D'),
  lambda meta, arrays: [load(meta, arrays['prefix'])],
  AdapterTraining(init, expand, _export, of_text),
  row=_row,
  peft=Peft('PREFIX_TUNING', to_peft),
  code=pathlib.Path(__file__).parents[1] / 'dprjax_prompt.py.txt',
)
