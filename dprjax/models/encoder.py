"""BERT, RoBERTa and XLM-RoBERTa encoders whose deep prompt is an argument.

The layers are those of ``transformers`` (post-LayerNorm). Their parameters are stacked on a leading
layer axis; kernels are ``[in, out]``. A prompt gives each layer key and value vectors that every
token attends to (prefix tuning, DPTDR section 3.1). It has no positions and does not change from
layer to layer. It is no parameter of a module, so that a gradient with respect to the prompt alone
computes no gradient of a weight. docs/architecture.md has the shape letters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.models import fused_attention
from dprjax.models.dropout import Dropout

MODEL_TYPES = ('bert', 'roberta', 'xlm-roberta')

# Added to the scores of masked keys. Finite, so that a row of padding alone does not give NaN.
_MASKED = -1e9


@jax.custom_jvp
def erf_gelu(x: Float[Array, '...']) -> Float[Array, '...']:
  """BERT's GELU, x * Phi(x)."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


@erf_gelu.defjvp
def _erf_gelu_jvp(primals, tangents):
  # Autodiff would keep several arrays of [B, T, intermediate_size] a layer for the backward pass.
  (x,), (dx,) = primals, tangents
  cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
  pdf = (2 * jnp.pi) ** -0.5 * jnp.exp(-0.5 * x * x)
  return x * cdf, dx * (cdf + x * pdf)


def _tanh_gelu(x):
  return nn.gelu(x, approximate=True)


# By the names of transformers' ACT2FN.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  'gelu': erf_gelu,
  'gelu_python': erf_gelu,
  'gelu_new': _tanh_gelu,
  'gelu_fast': _tanh_gelu,
  'gelu_accurate': _tanh_gelu,
  'gelu_pytorch_tanh': _tanh_gelu,
  'gelu_python_tanh': _tanh_gelu,
  'quick_gelu': lambda x: x * nn.sigmoid(1.702 * x),
  'relu': nn.relu,
  'silu': nn.silu,
  'swish': nn.silu,
  'tanh': jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The shape of an encoder; hashable, so it can be a static argument of ``jax.jit``.

  Raises:
    InputError: an unknown model type or activation, or heads that do not divide the hidden size.
  """

  model_type: str
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  intermediate_size: int
  max_positions: int = 512
  type_vocab_size: int = 2
  layer_norm_eps: float = 1e-12
  hidden_act: str = 'gelu'
  pad_token_id: int = 0
  hidden_dropout: float = 0.1
  attention_dropout: float = 0.1
  initializer_range: float = 0.02

  def __post_init__(self):
    if self.model_type not in MODEL_TYPES:
      raise InputError(
        f'model_type {self.model_type!r} is not supported; use one of: {", ".join(MODEL_TYPES)}'
      )
    if self.hidden_act not in ACTIVATIONS:
      raise InputError(
        f'hidden_act {self.hidden_act!r} is not supported; use one of: {", ".join(ACTIVATIONS)}'
      )
    if self.hidden_size % self.num_heads:
      raise InputError(
        f'hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_heads}'
      )

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_heads

  @property
  def first_position(self) -> int:
    """The first token's row of the position table. RoBERTa reserves the rows before it."""
    return 0 if self.model_type == 'bert' else self.pad_token_id + 1

  @property
  def max_tokens(self) -> int:
    """The longest input, in tokens."""
    return self.max_positions - self.first_position


class Arithmetic(NamedTuple):
  """What an encoder computes in.

  Attributes:
    name: 'float32', 'bfloat16', or 'mixed': dense layers round what they multiply to bfloat16 and
      add up in float32, all else is float32.
    activations: their dtype.
    products: that of what dense layers multiply; None: the activations'.
  """

  name: str
  activations: Any
  products: Any = None


_ARITHMETICS = {
  found.name: found
  for found in (
    Arithmetic('float32', jnp.dtype('float32')),
    Arithmetic('bfloat16', jnp.dtype('bfloat16')),
    Arithmetic('mixed', jnp.dtype('float32'), jnp.dtype('bfloat16')),
  )
}


class EncoderOptions(NamedTuple):
  """How an encoder computes. Hashable, so it can be a static argument of ``jax.jit``.

  Attributes:
    dtype: of matrix products and activations between layers; softmax and LayerNorm stay float32.
    remat: recompute each layer in the backward pass.
    unroll: layers a step of the scan over layers; 0: all of them.
    dropout: the rate where a dropout key is given; None: the rates of the model's config.
    rows: how activations are split by their first axis; None: as the compiler likes.
    heads: how a batch and the heads are split over the devices, for fused attention; None: one
      device.
    attention: 'plain', or 'fused': scores stay on the chip (`fused_attention`), but on a processor
      that kernel is interpreted, which is slow.
    products: dense layers multiply in this dtype and add up in float32, where ``dtype`` is
      float32; None: in ``dtype``.
    prompt_dropout: the rate at which numbers of a prompt are left out, others for each example,
      where a dropout key is given.
  """

  dtype: Any = jnp.float32
  remat: bool = False
  unroll: int = 1
  dropout: float | None = None
  rows: NamedSharding | None = None
  heads: NamedSharding | None = None
  attention: str = 'plain'
  products: Any = None
  prompt_dropout: float = 0.0

  @classmethod
  def from_config(
    cls, backbone: Any, rows: NamedSharding | None = None, heads: NamedSharding | None = None
  ) -> Self:
    """The options in a training run's ``config.backbone``, and where it splits activations.

    Raises:
      InputError: an unknown dtype, or a kernel that the devices do not have.
    """
    dropout = backbone.dropout if backbone.dropout >= 0 else None
    _, dtype, products = arithmetic(backbone.dtype, 'config.backbone.dtype')
    attention, platform = backbone.attention, platform_of(heads)
    if attention == 'auto':
      attention = _attention(platform)
    elif attention == 'fused' and platform not in ('tpu', 'cpu'):
      raise InputError(
        f"config.backbone.attention: 'fused' is for TPUs (and, slowly, processors), not for a "
        f"{platform}; use 'auto' or 'plain'"
      )
    memory = backbone.remat, backbone.unroll
    return cls(dtype, *memory, dropout, rows, heads, attention, products)

  @classmethod
  def of(cls, arithmetic: Arithmetic, heads: NamedSharding | None = None) -> Self:
    """Those of an arithmetic on some devices, without dropout or what saves memory."""
    return cls(
      arithmetic.activations,
      heads=heads,
      attention=_attention(platform_of(heads)),
      products=arithmetic.products,
    )

  def apply_dropout(self, config: EncoderConfig) -> EncoderConfig:
    """``config`` with this dropout rate in place of its own."""
    if self.dropout is None:
      return config
    return dataclasses.replace(config, hidden_dropout=self.dropout, attention_dropout=self.dropout)


DEFAULT_OPTIONS = EncoderOptions()


def platform_of(split: NamedSharding | None) -> str:
  """That of the devices of a mesh, which need not be there; of none, the default one's."""
  return jax.default_backend() if split is None else split.mesh.devices.flat[0].platform


def _attention(platform: str) -> str:
  """The attention of 'auto'."""
  return 'fused' if platform == 'tpu' else 'plain'


def arithmetic(name: str, knob: str) -> Arithmetic:
  """The arithmetic of a name: 'float32', 'bfloat16', 'mixed' or 'auto'.

  'auto' is bfloat16 on accelerators and float32 on processors. 'mixed' is faster than both on
  processors that multiply bfloat16 (AMX): docs/performance.md.

  Raises:
    InputError: another word; ``knob`` says where it stands.
  """
  if name == 'auto':
    name = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  if name not in _ARITHMETICS:
    known = ', '.join(map(repr, _ARITHMETICS))
    raise InputError(f"{knob}: expected 'auto' or one of {known}, not {name!r:.60}")
  return _ARITHMETICS[name]


def split_rows(x: Float[Array, 'B ...'], rows: NamedSharding | None) -> Float[Array, 'B ...']:
  """``x`` split by its first axis, where that can be divided so.

  Without it the compiler takes over the split of weights for activations, which are then reduced
  over the devices in every layer.
  """
  if rows is None or x.shape[0] % math.prod(rows.mesh.shape[axis] for axis in rows.spec[0]):
    return x
  return jax.lax.with_sharding_constraint(x, rows)


class PromptBank(NamedTuple):
  """Prompts that may differ in length, for examples that each choose one.

  Attributes:
    prefixes: their key/value vectors, padded with finite numbers to the longest.
    lengths: prompt k has the first ``lengths[k]`` of them; 0: none, the plain encoder.
  """

  prefixes: Float[Array, 'K L 2 P N D']
  lengths: Int[Array, ' K']


class LayeredBank(NamedTuple):
  """A ``PromptBank`` with the layers' axis first, as they use it, and each prompt's own shift.

  Attributes:
    prefixes: key/value vectors, padded with finite numbers to the longest.
    lengths: prompt k has the first ``lengths[k]`` of them.
    shifts: the position of the first token under prompt k, in place of ``shift_positions``.
  """

  prefixes: Float[Array, 'L K 2 P N D']
  lengths: Int[Array, ' K']
  shifts: Int[Array, ' K']


def kernel_init(config: EncoderConfig) -> nn.initializers.Initializer:
  """How kernels and embeddings start, of the encoder and its heads, as in BERT."""
  return nn.initializers.normal(config.initializer_range)


def dense(
  config: EncoderConfig,
  features: int,
  dtype: Any,
  name: str | None = None,
  products: Any = None,
) -> nn.Dense:
  """A dense layer of this encoder; ``products`` as in ``EncoderOptions``."""
  dot = None
  if products not in (None, dtype):
    dot = functools.partial(_dot_general, products)
  return nn.Dense(
    features, dtype=dtype, kernel_init=kernel_init(config), dot_general=dot, name=name
  )


def _dot_general(dtype, x, kernel, *_, **__):
  return _round_and_multiply(dtype, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_and_multiply(
  dtype: Any, x: Float[Array, '... I'], kernel: Float[Array, 'I O']
) -> Float[Array, '... O']:
  """A product of rounded factors, added up in float32.

  Its gradients are such products, too. Autodiff would multiply float32 with the rounded factors.
  """
  return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)


def _round_and_multiply_fwd(dtype, x, kernel):
  return _round_and_multiply(dtype, x, kernel), (x.astype(dtype), kernel.astype(dtype))


def _round_and_multiply_bwd(dtype, factors, gradient):
  x, kernel = factors
  gradient = gradient.astype(dtype)
  rows = list(range(x.ndim - 1))
  return (
    jnp.matmul(gradient, kernel.T, preferred_element_type=jnp.float32),
    jnp.tensordot(x, gradient, (rows, rows), preferred_element_type=jnp.float32),
  )


_round_and_multiply.defvjp(_round_and_multiply_fwd, _round_and_multiply_bwd)


class LayerNorm(nn.Module):
  """LayerNorm in float32, with PyTorch's two-pass variance.

  What the backward pass needs of its result is kept in ``dtype``, as activations are.
  """

  epsilon: float
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:]).astype(jnp.float32)
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:]).astype(jnp.float32)
    return _normalize((self.epsilon, self.dtype), x.astype(jnp.float32), scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
  static: tuple[float, Any],
  x: Float[Array, 'B T H'],
  scale: Float[Array, ' H'],
  bias: Float[Array, ' H'],
) -> Float[Array, 'B T H']:
  """LayerNorm. Autodiff would keep two float32 arrays of the size of ``x``; this keeps one."""
  return _normalize_fwd(static, x, scale, bias)[0]


def _normalize_fwd(static, x, scale, bias):
  epsilon, dtype = static
  x -= jnp.mean(x, axis=-1, keepdims=True)
  factor = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
  x *= factor
  return x * scale[None, None] + bias[None, None], (x.astype(dtype), factor, scale)


def _normalize_bwd(_, kept, gradient):
  unit, factor, scale = kept
  unit = unit.astype(jnp.float32)
  by_unit = gradient * scale[None, None]
  along = jnp.mean(by_unit * unit, axis=-1, keepdims=True)
  by_x = factor * (by_unit - jnp.mean(by_unit, axis=-1, keepdims=True) - unit * along)
  return by_x, jnp.sum(gradient * unit, axis=(0, 1)), jnp.sum(gradient, axis=(0, 1))


_normalize.defvjp(_normalize_fwd, _normalize_bwd)


class Embed(nn.Module):
  """A table of vectors, looked up and cast to float32. An id outside it gives NaN."""

  config: EncoderConfig
  rows: int

  @nn.compact
  def __call__(self, ids: Int[Array, 'B T']) -> Float[Array, 'B T H']:
    table = self.param('embedding', kernel_init(self.config), (self.rows, self.config.hidden_size))
    return jnp.take(table, ids, axis=0).astype(jnp.float32)


def attention_scores(
  query: Float[Array, 'B N T D'], key: Float[Array, 'B N S D']
) -> Float[Array, 'B N T S']:
  """Inner products over sqrt(D), added up in float32 and not rounded, whatever the inputs are."""
  scale = query.shape[3] ** -0.5
  if query.dtype == jnp.float32:  # fewer products, which would round queries of another dtype
    return jnp.einsum('bntd,bnsd->bnts', query * scale, key)
  scores = jnp.einsum('bntd,bnsd->bnts', query, key, preferred_element_type=jnp.float32)
  return scores * scale


class Attention(nn.Module):
  """The attention half of a layer, over the prompt and the tokens, with residual and LayerNorm."""

  config: EncoderConfig
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B T H'], bias: Float[Array, 'B 1 1 S'], prompt: Array | None
  ) -> Array:
    config, dtype = self.config, self.options.dtype

    def project(x, name):
      return dense(config, config.hidden_size, dtype, name, self.options.products)(x)

    query, key, value = (project(x, name) for name in ('query', 'key', 'value'))
    attend = self.fused if self.options.attention == 'fused' else self.plain
    out = project(attend(query, key, value, bias, prompt), 'output')
    out = Dropout(config.hidden_dropout, deterministic=self.deterministic)(out)
    return LayerNorm(config.layer_norm_eps, dtype, name='norm')(out + x).astype(dtype)

  @nn.compact
  def fused(
    self,
    query: Float[Array, 'B T H'],
    key: Float[Array, 'B T H'],
    value: Float[Array, 'B T H'],
    bias: Float[Array, 'B 1 1 S'],
    prompt: Array | None,
  ) -> Float[Array, 'B T H']:
    """The weighted means of values, by a kernel."""
    prompt_rate = 0.0 if self.deterministic else self.options.prompt_dropout
    if prompt is not None:
      prompt = prompt.astype(query.dtype).reshape(*prompt.shape[:-2], query.shape[2])
      if prompt.ndim == 4:  # each example's own; of a shared one the kernel makes no copies
        prompt = Dropout(self.options.prompt_dropout, self.deterministic)(prompt)
      if (
        bias.shape[3] > key.shape[1]
      ):  # it masks vectors of the prompt, which become keys as others
        key, value = (
          jnp.concatenate([prompt[:, index], rows], axis=1)
          for index, rows in enumerate((key, value))
        )
        prompt = None
    rate = 0.0 if self.deterministic else self.config.attention_dropout
    return fused_attention.attend(
      query,
      key,
      value,
      bias,
      prompt,
      num_heads=self.config.num_heads,
      dropout=rate,
      dropout_key=self.make_rng('dropout') if rate else None,
      prompt_dropout=prompt_rate,
      prompt_key=self.make_rng('dropout') if prompt_rate else None,
      split=self.options.heads,
      interpret=platform_of(self.options.heads) != 'tpu',
    )

  @nn.compact
  def plain(
    self,
    query: Float[Array, 'B T H'],
    key: Float[Array, 'B T H'],
    value: Float[Array, 'B T H'],
    bias: Float[Array, 'B 1 1 S'],
    prompt: Array | None,
  ) -> Float[Array, 'B T H']:
    """The weighted means of values."""
    config, dtype, shape = self.config, self.options.dtype, query.shape

    def heads(y):
      y = y.reshape(*y.shape[:2], config.num_heads, config.head_dim)
      return y.swapaxes(1, 2)  # [B, N, T, D]: 1.5x faster on a CPU than [B, T, N, D]

    query, key, value = heads(query), heads(key), heads(value)
    if prompt is not None:
      prompt = prompt.astype(dtype).swapaxes(-3, -2)
      # A copy of a shared prompt for each example is small next to the scores, and 10 % faster than
      # scoring prompt and tokens apart.
      prompt = jnp.broadcast_to(
        prompt if prompt.ndim == 5 else prompt[None], (shape[0], *prompt.shape[-4:])
      )
      prompt = Dropout(self.options.prompt_dropout, self.deterministic)(prompt)
      key = jnp.concatenate([prompt[:, 0], key], axis=2)  # [B, N, P + T, D]
      value = jnp.concatenate([prompt[:, 1], value], axis=2)
      # A bias of the tokens alone masks no vector of the prompt.
      bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (key.shape[2] - bias.shape[3], 0)))
    scores = attention_scores(query, key) + bias
    # The softmax's division comes after the product with the values: [B, N, T, D] is smaller than
    # the scores.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Kept only where the caller asks for intermediates.
    self.sow('intermediates', 'first_token', weights[:, :, 0] / total[:, :, 0])
    weights = Dropout(config.attention_dropout, deterministic=self.deterministic)(weights)
    context = jnp.einsum(
      'bnts,bnsd->bntd', weights.astype(dtype), value, preferred_element_type=jnp.float32
    )
    return (context / total).astype(dtype).swapaxes(1, 2).reshape(shape)


class MLP(nn.Module):
  """The feed-forward half of a layer, with residual and LayerNorm."""

  config: EncoderConfig
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    config, dtype, products = self.config, self.options.dtype, self.options.products
    y = dense(config, config.intermediate_size, dtype, 'up', products)(x)
    y = ACTIVATIONS[config.hidden_act](y)
    y = dense(config, config.hidden_size, dtype, 'down', products)(y)
    y = Dropout(config.hidden_dropout, deterministic=self.deterministic)(y)
    return LayerNorm(config.layer_norm_eps, dtype, name='norm')(y + x).astype(dtype)


class _Scanned(NamedTuple):
  """What layers take of their own, on a leading layer axis."""

  prompt: Array | None = None
  is_fixed: Any = None  # [L], whether the layer's input holds the fixed vectors


class _Shared(NamedTuple):
  """What all layers take."""

  bias: Array  # [B, 1, 1, T], or P + T where vectors of the prompt are masked
  fixed: tuple[Array, Array] | None = None  # places [B, T, 1], and vectors [B, T, H] at these


class Layer(nn.Module):
  """One layer, as ``nn.scan`` wants it: ``(carry, scanned, broadcast) -> (carry, None)``."""

  config: EncoderConfig
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x, scanned: _Scanned, shared: _Shared):
    how, rows = (self.config, self.options, self.deterministic), self.options.rows
    if shared.fixed is not None:
      places, vectors = shared.fixed
      x = jnp.where(places & scanned.is_fixed, vectors, x)
    attention = Attention(*how, name='attention')
    x = split_rows(attention(split_rows(x, rows), shared.bias, scanned.prompt), rows)
    x = MLP(*how, name='mlp')(x)
    return split_rows(x, rows), None


class Embeddings(nn.Module):
  """Word, token type and position embeddings, summed and normalised in float32."""

  config: EncoderConfig
  dtype: Any
  deterministic: bool

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    token_types: Int[Array, 'B T'],
    vectors: Float[Array, 'E H'] | None = None,
  ) -> Float[Array, 'B T H']:
    config = self.config

    def embed(name, rows, ids):
      return Embed(config, rows, name=name)(ids)

    if vectors is None:
      words = embed('word', config.vocab_size, tokens)
    else:
      places = tokens >= config.vocab_size
      words = jnp.where(
        places[:, :, None],
        look_up(config, tokens, vectors),
        embed('word', config.vocab_size, jnp.where(places, 0, tokens)),
      )
    x = words + embed('token_type', config.type_vocab_size, token_types)
    x = LayerNorm(config.layer_norm_eps, name='norm')(
      x + embed('position', config.max_positions, positions)
    )
    return Dropout(config.hidden_dropout, deterministic=self.deterministic)(x).astype(self.dtype)


def look_up(
  config: EncoderConfig, tokens: Int[Array, 'B T'], vectors: Float[Array, 'E H']
) -> Float[Array, 'B T H']:
  """The rows of the table for token ids from the vocabulary's size on; any row for other ids."""
  return jnp.take(vectors, jnp.maximum(tokens - config.vocab_size, 0), axis=0).astype(jnp.float32)


def _stack(
  config: EncoderConfig, num_layers: int, options: EncoderOptions, deterministic: bool
) -> nn.Module:
  """A scan of ``Layer`` over parameters stacked on a leading axis."""
  # The compiler would merge the recomputed layers with the first ones where both are unrolled.
  layer = nn.remat(Layer, prevent_cse=options.unroll != 1) if options.remat else Layer
  scanned = nn.scan(
    layer,
    variable_axes={'params': 0, 'intermediates': 0},
    split_rngs={'params': True, 'dropout': True},
    in_axes=(0, nn.broadcast),
    length=num_layers,
    unroll=min(options.unroll or num_layers, num_layers),
  )
  return scanned(options.apply_dropout(config), options, deterministic)


def init_layers(config: EncoderConfig, num_layers: int, key: Array) -> dict[str, Any]:
  """Fresh stacked layers: kernels N(0, ``initializer_range``), biases 0, LayerNorm's scale 1."""
  x, bias = jnp.zeros((1, 1, config.hidden_size), jnp.float32), jnp.zeros((1, 1, 1, 1), jnp.float32)
  stack = _stack(config, num_layers, DEFAULT_OPTIONS, True)
  return jax.jit(stack.init)(key, x, _Scanned(), _Shared(bias))['params']


def init_encoder(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Fresh parameters of an encoder, see ``init_layers``."""
  embeddings_key, layers_key = jax.random.split(key)
  tokens = jnp.zeros((1, 1), jnp.int32)
  embeddings = jax.jit(Embeddings(config, jnp.float32, True).init)(
    embeddings_key, tokens, tokens, tokens
  )['params']
  return {'embeddings': embeddings, 'layers': init_layers(config, config.num_layers, layers_key)}


def _positions(config: EncoderConfig, mask: Array, shift: int | Array) -> Array:
  """Rows of the position table ``[B, T]``, as in transformers; ``shift`` is a number or [B, 1]."""
  if config.model_type == 'bert':
    count = jnp.arange(mask.shape[1], dtype=jnp.int32)
    if isinstance(shift, int):
      return jnp.broadcast_to(count + shift, mask.shape)
    positions = count[None, :] + shift
    # The padding of a long batch may lie outside the table, which would give NaN.
    return jnp.where(mask, positions, jnp.minimum(positions, config.max_positions - 1))
  real = mask.astype(jnp.int32)
  return (jnp.cumsum(real, axis=1) + shift) * real + config.pad_token_id


def _place(
  config: EncoderConfig,
  tokens: Array,
  mask: Array,
  prompt: Array | PromptBank | LayeredBank | None,
  prompt_ids: Array | None,
  shift_positions: bool,
) -> tuple[Array | None, Array, Array]:
  """The prompt with the layers' axis first, the keys that are not masked, and the positions.

  Raises what ``encode`` raises. The mask is [B, T], or [B, P + T] for a bank's prompts.
  """
  batch, length = tokens.shape
  shift: int | Array = 0
  seen = mask
  if isinstance(prompt, PromptBank | LayeredBank):
    if prompt_ids is None:
      raise InputError('a PromptBank needs prompt_ids, the number of the prompt of each example')
    axis = int(isinstance(prompt, LayeredBank))  # of the prompts
    shape = list(prompt.prefixes.shape)
    _check_prompt_shape(config, [shape.pop(axis), *shape], prompt_ids, batch)
    # Before the axes are moved: moving those of a whole bank costs memory and time.
    lengths = jnp.take(prompt.lengths, prompt_ids, axis=0)[:, None]  # [B, 1]
    if isinstance(prompt, LayeredBank):
      shift = jnp.take(prompt.shifts, prompt_ids, axis=0)[:, None]
    elif shift_positions:
      shift = lengths
    prompt = jnp.take(prompt.prefixes, prompt_ids, axis=axis)
    used = jnp.arange(prompt.shape[-3], dtype=jnp.int32)[None, :] < lengths
    seen = jnp.concatenate([used, mask], axis=1)
    if not axis:
      prompt = jnp.moveaxis(prompt, 0, 1)  # [L, B, 2, P, N, D]
  elif prompt is not None:
    if prompt_ids is not None:
      raise InputError('prompt_ids choose from a PromptBank; the prompt is an array')
    _check_prompt_shape(config, prompt.shape, None, batch)
    shift = prompt.shape[-3] if shift_positions else 0
    if prompt.ndim == 6:
      prompt = jnp.moveaxis(prompt, 0, 1)
  if prompt is not None and prompt.shape[-3] == 0:
    prompt = None
  known = shift if isinstance(shift, int) else 0
  if length + known > config.max_tokens:
    shifted = f' shifted by a prompt of {known}' if known else ''
    raise InputError(
      f'{length} tokens{shifted} exceed the {config.max_tokens} positions of this encoder; lower '
      'the maximum length'
    )
  return prompt, seen, _positions(config, mask, shift)


def _check_prompt_shape(
  config: EncoderConfig, axes: Sequence[int], prompt_ids: Array | None, batch: int
) -> None:
  """Raises InputError for a prompt of another shape than ``encode`` takes."""
  shape = tuple(axes)
  core = shape[-5:]
  fits = (
    len(core) == 5
    and core[:2] == (config.num_layers, 2)
    and core[3:] == (config.num_heads, config.head_dim)
  )
  wanted = f'[{config.num_layers}, 2, P, {config.num_heads}, {config.head_dim}]'
  if not fits or len(shape) > 6:
    raise InputError(
      f'prompt has shape {list(shape)}; this encoder takes {wanted}, or that with a leading axis '
      'for examples or prompts'
    )
  if prompt_ids is not None and (len(shape) != 6 or prompt_ids.shape != (batch,)):
    raise InputError(
      f'prompt_ids {list(prompt_ids.shape)} choose from a bank [K, ...] for {batch} examples; the '
      f'prompt is {list(shape)}'
    )
  if prompt_ids is None and len(shape) == 6 and shape[0] != batch:
    raise InputError(
      f'prompt holds {shape[0]} prompts for {batch} examples: pass a PromptBank and prompt_ids to '
      'choose'
    )


def _run(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Array,
  mask: Array,
  cuts: tuple[int, ...],
  *,
  prompt: Array | PromptBank | LayeredBank | None = None,
  prompt_ids: Array | None = None,
  token_types: Array | None = None,
  vectors: Array | None = None,
  fixed_layers: int = 0,
  shift_positions: bool = False,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> list[Float[Array, 'B T H']]:
  """The hidden states after each number of layers in ``cuts`` (rising)."""
  if not 0 <= fixed_layers <= config.num_layers:
    raise InputError(
      f'fixed_layers {fixed_layers}: this encoder has {config.num_layers} layers; use 0 to '
      f'{config.num_layers}'
    )
  prefix, seen, positions = _place(config, tokens, mask, prompt, prompt_ids, shift_positions)
  if token_types is None:
    token_types = jnp.zeros_like(tokens)
  keys: list[Array | None] = [None] * (1 + len(cuts))
  if dropout_key is not None:
    keys = list(jax.random.split(dropout_key, 1 + len(cuts)))
  x: Any = Embeddings(options.apply_dropout(config), options.dtype, dropout_key is None).apply(
    {'params': params['embeddings']}, tokens, positions, token_types, vectors, rngs=_rngs(keys[0])
  )
  scanned, shared = _Scanned(prefix), _Shared(_bias(seen))
  if vectors is not None and fixed_layers:
    places = (tokens >= config.vocab_size)[:, :, None]
    rows = look_up(config, tokens, vectors).astype(options.dtype)
    shared = shared._replace(fixed=(places, rows))
    is_fixed = jnp.arange(config.num_layers, dtype=jnp.int32) < fixed_layers
    scanned = scanned._replace(is_fixed=is_fixed)
  states = []
  for start, stop, key in zip((0, *cuts), cuts, keys[1:], strict=False):
    stacked = params['layers'], scanned
    if (start, stop) != (0, config.num_layers):
      stacked = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop], stacked)
    x = _run_layers(config, *stacked, x, shared, options, key)
    states.append(x)
  return states


def _run_layers(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  scanned: _Scanned,
  hidden: Array,
  shared: _Shared,
  options: EncoderOptions,
  dropout_key: Array | None,
) -> Array:
  count = jax.tree.leaves(layers)[0].shape[0]
  x, _ = _stack(config, count, options, dropout_key is None).apply(
    {'params': layers}, hidden.astype(options.dtype), scanned, shared, rngs=_rngs(dropout_key)
  )
  assert isinstance(x, jax.Array)  # apply's annotation also allows for mutable collections
  return x


def encode_layers(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  hidden: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  *,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B T H']:
  """Hidden states through stacked layers without a prompt, those of a head for instance."""
  shared = _Shared(_bias(mask))
  return _run_layers(config, layers, _Scanned(), hidden, shared, options, dropout_key)


def _bias(seen: Array) -> Array:
  return jnp.where(seen, 0.0, _MASKED)[:, None, None, :]


def _rngs(key: Array | None) -> dict[str, Array] | None:
  return None if key is None else {'dropout': key}


def encode(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  prompt: Float[Array, '*B L 2 P N D'] | PromptBank | LayeredBank | None = None,
  prompt_ids: Int[Array, ' B'] | None = None,
  token_types: Int[Array, 'B T'] | None = None,
  vectors: Float[Array, 'E H'] | None = None,
  fixed_layers: int = 0,
  shift_positions: bool = False,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B T H']:
  """Encodes tokens under an optional deep prompt.

  Args:
    config: the encoder's shape.
    params: ``embeddings`` and ``layers`` as ``hub.load_backbone`` gives them, float32 or bfloat16.
    tokens: token ids.
    mask: True at real tokens. A row may be padding alone.
    prompt: shared by all examples ``[L, 2, P, N, D]``, one for each ``[B, L, 2, P, N, D]``, or a
      bank that ``prompt_ids`` choose from. Index 0 of the axis of two holds keys, 1 values. None
      or P = 0: the plain encoder.
    prompt_ids: the bank's prompt for each example; an id out of range gives NaN.
    token_types: segment ids, default 0.
    vectors: token ids from the vocabulary's size on are rows of this table, in place of a word's
      embedding; an id beyond it gives NaN.
    fixed_layers: the first layers whose inputs hold the unchanged rows at these tokens, without
      position embedding, LayerNorm or dropout. From the next layer on these tokens change. 0: they
      are ordinary inputs of the embedding layer.
    shift_positions: an example's positions start behind its prompt, as transformers does with
      ``past_key_values``.
    options: how to compute.
    dropout_key: given, dropout is active.

  Returns:
    The last layer's hidden states, float32.

  Raises:
    InputError: at trace time, where the prompt's shape is not this encoder's, or the tokens (and
      the shift, unless it is a bank's) exceed its positions. A token that a bank's shift moves
      beyond them gives NaN.
  """
  (hidden,) = _run(
    config,
    params,
    tokens,
    mask,
    (config.num_layers,),
    prompt=prompt,
    prompt_ids=prompt_ids,
    token_types=token_types,
    vectors=vectors,
    fixed_layers=fixed_layers,
    shift_positions=shift_positions,
    options=options,
    dropout_key=dropout_key,
  )
  return hidden.astype(jnp.float32)


def encode_early_late(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  split: int,
  **kwargs: Any,
) -> tuple[Float[Array, 'B T H'], Float[Array, 'B T H']]:
  """The states after ``split`` layers and after all (Condenser, Eqs. 6 and 7), float32.

  Args:
    split: early layers, 1 to L - 1.
    kwargs: as for ``encode``.

  Raises:
    InputError: ``split`` leaves no early or no late layer; and as ``encode`` does.
  """
  if not 0 < split < config.num_layers:
    raise InputError(
      f'a split after {split} layers leaves no early or no late layer of {config.num_layers}; use '
      f'1 to {config.num_layers - 1}'
    )
  early, late = _run(config, params, tokens, mask, (split, config.num_layers), **kwargs)
  return early.astype(jnp.float32), late.astype(jnp.float32)


def first_token_attention(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  prompt: Array | None = None,
  shift_positions: bool = False,
) -> Float[Array, 'L B N S']:
  """The first token's attention weights over S = P + T, the prompt's vectors first.

  Args:
    config, params, tokens, mask, shift_positions: as for ``encode``.
    prompt: shared, or one for each example, as for ``encode``.

  Raises:
    InputError: as ``encode`` does.
  """
  prompt, seen, positions = _place(config, tokens, mask, prompt, None, shift_positions)
  x = Embeddings(config, jnp.float32, True).apply(
    {'params': params['embeddings']}, tokens, positions, jnp.zeros_like(tokens)
  )
  _, kept = _stack(config, config.num_layers, DEFAULT_OPTIONS, True).apply(
    {'params': params['layers']},
    x,
    _Scanned(prompt),
    _Shared(_bias(seen)),
    mutable=['intermediates'],
  )
  return kept['intermediates']['attention']['first_token'][0]
