"""Llama (Touvron et al., 2023), and the parts that related families share.

A norm before each half of a layer, rotary positions, heads of queries that share keys and values,
and a gated MLP. Related families have another `Config` with the same modules. Tensors have their
names in ``LlamaModel``. The head of a language model is not read.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models import layers, rotary
from dprjax.models.adapter import Adapter
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.dropout import Dropout
from dprjax.models.encoder_config import EncoderOptions
from dprjax.models.family import Family, Shape
from dprjax.models.reach import Reach
from dprjax.models.rotary import Rope
from dprjax.models.splits import split_rows

# Limit of counts in config.json.
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
K = TypeVar('K', bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True)
class Config(Shape):
  """The shape of a Llama-like encoder. Hashable, so it can be a static argument of ``jax.jit``.

  Attributes:
    windowed: whether each layer has a window; empty: none has.
    reach: in a layer with a window, how many places before its own a token sees, and as many after
      it unless ``causal``.
    window_rope: ``rope`` of windowed layers; None: the same.
    gated: whether one of two products in the MLP passes the activation and multiplies the other.
    qkv_bias, output_bias, mlp_bias, down_bias: whether these dense layers have biases;
      ``down_bias`` is the last layer of an MLP without other biases.
    after_norms: whether a norm also follows each half of a layer.
    norm_offset: norms multiply by this plus their scale.
    score_scale: scores are divided by the root of this; 0: of the head size.
  """

  model_type: str
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  max_tokens: int
  rope: Rope
  layer_norm_eps: float = 1e-6
  hidden_act: str = 'silu'
  causal: bool = True
  windowed: tuple[bool, ...] = ()
  reach: int = 0
  window_rope: Rope | None = None
  qkv_bias: bool = False
  output_bias: bool = False
  mlp_bias: bool = False
  down_bias: bool = False
  gated: bool = True
  head_norms: bool = False
  after_norms: bool = False
  norm_offset: float = 0.0
  score_scale: int = 0
  embedding_scale: float = 1.0
  hidden_dropout: float = 0.0
  attention_dropout: float = 0.0
  initializer_range: float = 0.02

  type_vocab_size = 1

  @property
  def window(self) -> int | None:
    return self.reach + 1 if any(self.windowed) else None


C = TypeVar('C', bound=Config)


class RMSNorm(nn.Module):
  """RMSNorm (Zhang and Sennrich, 2019) in float32.

  The backward pass keeps its input in ``dtype``, like activations.
  """

  config: Config
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, '... H']) -> Float[Array, '... H']:
    offset = self.config.norm_offset
    scale = self.param('scale', nn.initializers.constant(1 - offset), x.shape[-1:])
    scale = jnp.reshape(scale.astype(jnp.float32) + offset, (*(1,) * (x.ndim - 1), -1))
    return _normalize((self.config.layer_norm_eps, self.dtype), x.astype(jnp.float32), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(static: tuple[float, Any], x: Array, scale: Array) -> Array:
  """RMSNorm. Autodiff would keep two float32 arrays of the size of ``x``; this keeps one."""
  return _normalize_fwd(static, x, scale)[0]


def _normalize_fwd(static, x, scale):
  epsilon, dtype = static
  factor = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
  x *= factor
  return x * scale, (x.astype(dtype), factor, scale)


def _normalize_bwd(_, residuals, gradient):
  unit, factor, scale = residuals
  unit = unit.astype(jnp.float32)
  by_unit = gradient * scale
  along = jnp.mean(by_unit * unit, axis=-1, keepdims=True)
  by_scale = jnp.sum(gradient * unit, axis=tuple(range(unit.ndim - 1)), keepdims=True)
  return factor * (by_unit - unit * along), by_scale


_normalize.defvjp(_normalize_fwd, _normalize_bwd)


class Embeddings(layers.Embeddings):
  def combine(self, x: Array, positions: Array, token_types: Array) -> Array:
    # The factor is rounded as in transformers.
    return x * jnp.asarray(self.config.embedding_scale, self.dtype).astype(jnp.float32)


class Attention(layers.Attention):
  """Attention over the tokens and a prefix, whose keys are neither normed nor rotated."""

  @nn.compact
  def __call__(self, x, shared, adapter, reach, rope):  # type: ignore[override]
    config, options = self.config, self.options

    def project(x, name, features, bias):
      y = layers.dense(config, features, options.dtype, name, options.products, bias)(x)
      return adapter.project(f'attention/{name}', x, y)

    def heads(name, count, norm):
      y = project(x, name, count * config.head_dim, config.qkv_bias)
      y = y.reshape(*y.shape[:2], count, config.head_dim)
      if config.head_norms and norm:
        y = RMSNorm(config, options.dtype, name=norm)(y).astype(options.dtype)
      return y

    query = heads('query', config.num_heads, 'query_norm')
    key = heads('key', config.num_kv_heads, 'key_norm')
    value = heads('value', config.num_kv_heads, '')
    if rope is not None:
      query, key = (rotary.turn(y, shared.positions, *rope) for y in (query, key))
    if config.score_scale:  # replaces the head size
      query *= (config.head_dim / config.score_scale) ** 0.5
    query, key, value = (y.reshape(*y.shape[:2], -1) for y in (query, key, value))
    mixed = self.attend(query, key, value, shared.bias, adapter, reach)
    return project(mixed, 'output', config.hidden_size, config.output_bias)


class MLP(nn.Module):
  config: Config
  options: EncoderOptions

  @nn.compact
  def __call__(self, x: Float[Array, 'B T H'], adapter: Adapter) -> Float[Array, 'B T H']:
    config, options = self.config, self.options

    def project(x, name, features, bias=config.mlp_bias):
      dense = layers.dense(config, features, options.dtype, name, options.products, bias)
      return adapter.project(f'mlp/{name}', x, dense(x))

    y = project(x, 'up', config.intermediate_size)
    if config.gated:
      y *= layers.ACTIVATIONS[config.hidden_act](project(x, 'gate', config.intermediate_size))
    else:
      y = layers.ACTIVATIONS[config.hidden_act](y)
    return project(y, 'down', config.hidden_size, config.mlp_bias or config.down_bias)


class Layer(nn.Module):
  """One layer, as ``nn.scan`` wants it."""

  config: Config
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x, scanned: layers.Scanned, shared: layers.Shared):
    config, options, number = self.config, self.options, scanned.number
    adapter = shared.adapter.of_layer(scanned.adapter)
    x = split_rows(adapter.enter_layer(x), options.rows)
    attention = Attention(config, options, self.deterministic, name='attention')
    y = self.enter(x, 'before_attention', number)
    y = attention(y, shared, adapter, _reach(config, number), _rope(config, number))
    x = self.leave(x, y, 'after_attention')
    y = MLP(config, options, name='mlp')(self.enter(x, 'before_mlp', number), adapter)
    x = adapter.leave_layer(self.leave(x, y, 'after_mlp'))
    return split_rows(x, options.rows), None

  def norm(self, x: Array, name: str) -> Array:
    return RMSNorm(self.config, self.options.dtype, name=name)(x).astype(self.options.dtype)

  def enter(self, x: Array, name: str, number: Array) -> Array:
    return self.norm(x, name)

  def leave(self, x: Array, y: Array, name: str) -> Array:
    """The output of a half of the layer, which computed ``y`` from ``x``."""
    y = self.norm(y, name) if self.config.after_norms else y
    return self.add(x, y)

  def add(self, x: Array, y: Array) -> Array:
    y = Dropout(self.config.hidden_dropout, deterministic=self.deterministic)(y)
    return split_rows((x + y).astype(self.options.dtype), self.options.rows)


def _reach(config: Config, number: Array) -> Reach:
  if not config.windowed:
    return Reach(config.causal)
  if all(config.windowed):
    return Reach(config.causal, config.reach)
  return Reach(config.causal, config.reach, jnp.asarray(config.windowed)[number])


def _rope(config: Config, number: Array) -> tuple[Array, float | Array] | None:
  """The frequencies of a layer, and the factor on rotated heads."""
  if config.rope == rotary.NONE:
    return None
  turns, scale = config.rope.frequencies(config.head_dim)
  if config.window_rope is None:
    return jnp.asarray(turns), scale
  window_turns, window_scale = config.window_rope.frequencies(config.head_dim)
  kind = jnp.asarray(config.windowed, jnp.int32)[number]
  scales = np.array([scale, window_scale], np.float32)
  return jnp.asarray(np.stack([turns, window_turns]))[kind], jnp.asarray(scales)[kind]


def turn_keys(
  config: Config, keys: Float[np.ndarray, 'L P N D'], places: int
) -> Float[np.ndarray, 'L P N D']:
  """Rotates the keys of a text in each layer by ``places`` positions, backwards if negative."""
  ropes = [config.rope] * config.num_layers
  if config.window_rope is not None:
    ropes = [config.window_rope if one else config.rope for one in config.windowed]
  angles = [places * rope.frequencies(config.head_dim)[0].astype(np.float64) for rope in ropes]
  by = np.exp(1j * np.array(angles))[:, None, None]
  first, second = np.split(keys.astype(np.float64), 2, axis=3)
  turned = (first + 1j * second) * by
  return np.concatenate([turned.real, turned.imag], axis=3).astype(np.float32)


def positions(config: Config, tokens: Array, mask: Array, shift: int | Array) -> Array:
  """Counts real tokens, so padding may be on either side."""
  return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0) + shift


def tensors(config: Config) -> Iterator[Tensor]:
  width = config.hidden_size
  yield Tensor(
    'embed_tokens.weight', (config.vocab_size, width), ('embeddings', 'word', 'embedding')
  )
  yield Tensor('norm.weight', (width,), ('final', 'scale'))
  for tensor in layer_tensors(config, config.num_layers):
    yield tensor._replace(path=('layers', *tensor.path))


def layer_tensors(config: Config, num_layers: int) -> Iterator[Tensor]:
  """A stack of layers: ``layers.0.self_attn.q_proj.weight``, ..."""
  width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
  wide, narrow = config.num_heads * size, config.num_kv_heads * size
  modules = [
    weights(f'{half}.{name}_proj', (ours, part), shape, bias)
    for half, ours, name, part, shape, bias in (
      ('self_attn', 'attention', 'q', 'query', (wide, width), config.qkv_bias),
      ('self_attn', 'attention', 'k', 'key', (narrow, width), config.qkv_bias),
      ('self_attn', 'attention', 'v', 'value', (narrow, width), config.qkv_bias),
      ('self_attn', 'attention', 'o', 'output', (width, wide), config.output_bias),
      ('mlp', 'mlp', 'gate', 'gate', (inner, width), config.mlp_bias),
      ('mlp', 'mlp', 'up', 'up', (inner, width), config.mlp_bias),
      ('mlp', 'mlp', 'down', 'down', (width, inner), config.mlp_bias),
    )
  ]
  norms: dict[str, tuple[str, ...]] = {'input_layernorm': ('before_attention',)}
  if config.after_norms:
    norms |= {
      'post_attention_layernorm': ('after_attention',),
      'pre_feedforward_layernorm': ('before_mlp',),
      'post_feedforward_layernorm': ('after_mlp',),
    }
  else:
    norms |= {'post_attention_layernorm': ('before_mlp',)}
  modules += [weights(name, path, (width,), False) for name, path in norms.items()]
  if config.head_norms:
    modules += [
      weights(f'self_attn.{name[0]}_norm', ('attention', f'{name}_norm'), (size,), False)
      for name in ('query', 'key')
    ]
  return stack(num_layers, 'layers', *modules)


class Keys(msgspec.Struct):
  vocab_size: Size
  hidden_size: Size
  num_hidden_layers: Size
  num_attention_heads: Size
  intermediate_size: Size
  max_position_embeddings: Size
  num_key_value_heads: Size = 0
  head_dim: Size = 0
  rms_norm_eps: float = 1e-6
  hidden_act: str = 'silu'
  attention_bias: bool = False
  mlp_bias: bool = False
  attention_dropout: float = 0.0
  initializer_range: float = 0.02
  is_causal: bool = True
  use_bidirectional_attention: bool = False
  rope_theta: float | None = None
  rope_scaling: dict[str, Any] = {}
  rope_parameters: dict[str, Any] = {}
  layer_types: list[Literal['full_attention', 'sliding_attention']] = []
  sliding_window: Size = 0

  @property
  def causal(self) -> bool:
    return self.is_causal and not self.use_bidirectional_attention


def read_keys(hf_config: Mapping[str, Any], kind: type[K], **defaults: Any) -> K:
  """The keys of a config.json; null means the default."""
  keys = {key: value for key, value in hf_config.items() if value is not None}
  return convert(defaults | keys, hf_config['model_type'], kind)


def read_config(keys: Keys, model_type: str, kind: type[C] = Config, **traits: Any) -> C:  # type: ignore[assignment]
  """The shape in a config.json.

  Args:
    traits: its fields that override the keys of Llama, or that `Config` lacks.
  """
  heads = keys.num_attention_heads
  fields: dict[str, Any] = {
    'num_kv_heads': keys.num_key_value_heads or heads,
    'head_dim': keys.head_dim or keys.hidden_size // heads,
    'hidden_act': keys.hidden_act,
    'causal': keys.causal,
    'qkv_bias': keys.attention_bias,
    'output_bias': keys.attention_bias,
    'mlp_bias': keys.mlp_bias,
  } | traits
  if 'rope' not in fields:
    fields['rope'] = rotary.read(
      keys.rope_scaling or keys.rope_parameters,
      keys.rope_theta or 10000.0,
      keys.max_position_embeddings,
    )
    fields['rope'].frequencies(fields['head_dim'])  # raises if its numbers do not fit
  layers.check_activation(fields['hidden_act'], 'the activation')
  return kind(
    model_type,
    keys.vocab_size,
    keys.hidden_size,
    keys.num_hidden_layers,
    heads,
    intermediate_size=keys.intermediate_size,
    max_tokens=int(min(keys.max_position_embeddings, fields['rope'].longest)),
    layer_norm_eps=keys.rms_norm_eps,
    attention_dropout=keys.attention_dropout,
    initializer_range=keys.initializer_range,
    **fields,
  )


def read_windows(keys: Keys, windowed: Callable[[int], bool]) -> dict[str, Any]:
  """The fields of `Config` about layers with a window.

  Args:
    windowed: whether the layer with this number has a window, without ``layer_types``.
  """
  layers, types = keys.num_hidden_layers, keys.layer_types
  if types and len(types) != layers:
    raise InputError(f'layer_types: {len(types)} layers, and num_hidden_layers is {layers}')
  by_layer = tuple(name == 'sliding_attention' for name in types) or tuple(
    map(windowed, range(layers))
  )
  if not any(by_layer):
    return {}
  if not keys.sliding_window:
    raise InputError('sliding_window is missing, but there are layers with a window')
  # As in transformers: includes the place of the token itself under causal attention.
  return {'windowed': by_layer, 'reach': keys.sliding_window - keys.causal}


def write_config(config: Config) -> dict[str, Any]:
  return {
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'intermediate_size': config.intermediate_size,
    'max_position_embeddings': config.max_tokens,
    'rms_norm_eps': config.layer_norm_eps,
    'hidden_act': config.hidden_act,
    'rope_theta': config.rope.theta,
    'rope_scaling': config.rope.written(),
    'attention_bias': config.qkv_bias,
    'mlp_bias': config.mlp_bias,
    'attention_dropout': config.attention_dropout,
    'initializer_range': config.initializer_range,
    'is_causal': config.causal,
  }


def written_window(config: Config) -> dict[str, Any]:
  windowed = config.windowed or (False,) * config.num_layers
  return {
    'layer_types': ['sliding_attention' if one else 'full_attention' for one in windowed],
    'sliding_window': config.reach + config.causal if any(windowed) else None,
  }


FAMILY = Family(
  model_type='llama',
  class_name='Llama',
  read_config=lambda hf_config: read_config(read_keys(hf_config, Keys), 'llama'),
  write_config=write_config,
  embeddings=Embeddings,
  layer=Layer,
  final=RMSNorm,
  positions=positions,
  first_position=lambda config: 0,
  turn_keys=turn_keys,
  tensors=tensors,
  layer_tensors=layer_tensors,
  canonical=lambda name: name.removeprefix('model.'),
  prefix='model.',
  # Old versions of transformers stored the frequencies.
  extras=re.compile(r'(lm_head|score|classifier|qa_outputs)\.|(.*\.)?rotary_emb\.inv_freq$'),
)

# EuroBERT (Boizard et al., 2025): without the causal mask.
EUROBERT = FAMILY._replace(
  model_type='eurobert',
  class_name='EuroBert',
  read_config=lambda hf_config: read_config(
    read_keys(hf_config, Keys, rms_norm_eps=1e-5), 'eurobert', causal=False
  ),
  prompted_by='attention',
)


def _read_mistral(hf_config: Mapping[str, Any]) -> Config:
  keys = read_keys(hf_config, Keys, num_key_value_heads=8)
  windows = read_windows(keys, lambda layer: True) if keys.sliding_window else {}
  return read_config(keys, 'mistral', **windows)


# Mistral (Jiang et al., 2023): a window in every layer, or in none.
MISTRAL = FAMILY._replace(
  model_type='mistral',
  class_name='Mistral',
  read_config=_read_mistral,
  write_config=lambda config: (
    write_config(config) | {'sliding_window': written_window(config)['sliding_window']}
  ),
)


class _QwenKeys(Keys):
  use_sliding_window: bool = False
  max_window_layers: int = 28


def _read_qwen(keys: _QwenKeys, model_type: str, **traits: Any) -> Config:
  windows = {}
  if keys.use_sliding_window:  # in the last layers
    windows = read_windows(keys, lambda layer: layer >= keys.max_window_layers)
  return read_config(keys, model_type, **windows, **traits)


# Qwen 2 (Yang et al., 2024): biases of queries, keys and values.
QWEN2 = FAMILY._replace(
  model_type='qwen2',
  class_name='Qwen2',
  read_config=lambda hf_config: _read_qwen(
    read_keys(hf_config, _QwenKeys), 'qwen2', qkv_bias=True, output_bias=False
  ),
  write_config=lambda config: (
    write_config(config) | {'use_sliding_window': any(config.windowed)} | written_window(config)
  ),
)

# Qwen 3 (Yang et al., 2025) and Qwen3-Embedding: norms of queries and keys by head.
QWEN3 = QWEN2._replace(
  model_type='qwen3',
  class_name='Qwen3',
  read_config=lambda hf_config: _read_qwen(
    read_keys(hf_config, _QwenKeys, head_dim=128), 'qwen3', head_norms=True
  ),
)
