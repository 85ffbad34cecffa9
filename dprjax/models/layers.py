"""Modules of the BERT encoder, and parts for other families.

docs/architecture.md has the shape letters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dprjax.base.errors import InputError
from dprjax.models.adapter import BARE, Adapter
from dprjax.models.dropout import Dropout, drop
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions, platform_of
from dprjax.models.family import Config
from dprjax.models.reach import ALL, MASKED, Reach, attend_in_blocks, queries_at_once
from dprjax.models.splits import split_rows


@jax.custom_jvp
def erf_gelu(x: Float[Array, '...']) -> Float[Array, '...']:
  """The BERT GELU, x * Phi(x)."""
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


# By their names in ACT2FN of transformers.
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


def check_activation(name: str, key: str) -> None:
  """Raises InputError if the value of a key in config.json is no known activation."""
  if name not in ACTIVATIONS:
    raise InputError(f'{key} {name!r:.60} is not supported; use one of: {", ".join(ACTIVATIONS)}')


def kernel_init(config: Config) -> nn.initializers.Initializer:
  return nn.initializers.normal(config.initializer_range)


def dense(
  config: Config,
  features: int,
  dtype: Any,
  name: str | None = None,
  products: Any = None,
  bias: bool = True,
) -> nn.Dense:
  """A dense layer of this encoder; ``products`` as in ``EncoderOptions``."""
  dot = None
  if products not in (None, dtype):
    dot = functools.partial(_dot_general, products)
  return nn.Dense(
    features,
    use_bias=bias,
    dtype=dtype,
    kernel_init=kernel_init(config),
    dot_general=dot,
    name=name,
  )


def _dot_general(dtype, x, kernel, *_, **__):
  return _round_and_multiply(dtype, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_and_multiply(
  dtype: Any, x: Float[Array, '... I'], kernel: Float[Array, 'I O']
) -> Float[Array, '... O']:
  """A product of rounded factors, summed in float32, as are its gradients.

  Autodiff would multiply float32 gradients with the rounded factors.
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
  """LayerNorm in float32, with the PyTorch two-pass variance.

  The backward pass keeps the normalized input in ``dtype``.
  """

  epsilon: float
  dtype: Any = jnp.float32
  use_bias: bool = True

  @nn.compact
  def __call__(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:]).astype(jnp.float32)
    bias = jnp.zeros(x.shape[-1:], jnp.float32)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, x.shape[-1:]).astype(jnp.float32)
    return _normalize((self.epsilon, self.dtype), x.astype(jnp.float32), scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
  static: tuple[float, Any],
  x: Float[Array, 'B T H'],
  scale: Float[Array, ' H'],
  bias: Float[Array, ' H'],
) -> Float[Array, 'B T H']:
  """LayerNorm that keeps one array of the size of ``x``; autodiff would keep two."""
  return _normalize_fwd(static, x, scale, bias)[0]


def _normalize_fwd(static, x, scale, bias):
  epsilon, dtype = static
  x -= jnp.mean(x, axis=-1, keepdims=True)
  factor = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
  x *= factor
  return x * scale[None, None] + bias[None, None], (x.astype(dtype), factor, scale)


def _normalize_bwd(_, residuals, gradient):
  unit, factor, scale = residuals
  unit = unit.astype(jnp.float32)
  by_unit = gradient * scale[None, None]
  along = jnp.mean(by_unit * unit, axis=-1, keepdims=True)
  by_x = factor * (by_unit - jnp.mean(by_unit, axis=-1, keepdims=True) - unit * along)
  return by_x, jnp.sum(gradient * unit, axis=(0, 1)), jnp.sum(gradient, axis=(0, 1))


_normalize.defvjp(_normalize_fwd, _normalize_bwd)


class Embed(nn.Module):
  """A table of vectors, cast to float32. An id outside the table gives NaN."""

  config: Config
  rows: int
  width: int = 0  # the hidden size, if 0

  @nn.compact
  def __call__(self, ids: Int[Array, 'B T']) -> Float[Array, 'B T H']:
    shape = self.rows, self.width or self.config.hidden_size
    table = self.param('embedding', kernel_init(self.config), shape)
    return jnp.take(table, ids, axis=0).astype(jnp.float32)


def attention_scores(
  query: Float[Array, 'B N T D'], key: Float[Array, 'B N S D']
) -> Float[Array, 'B N T S']:
  """Inner products over sqrt(D), summed in float32 and not rounded."""
  scale = query.shape[3] ** -0.5
  if query.dtype == jnp.float32:  # fewer products; queries of another dtype would be rounded
    return jnp.einsum('bntd,bnsd->bnts', query * scale, key)
  scores = jnp.einsum('bntd,bnsd->bnts', query, key, preferred_element_type=jnp.float32)
  return scores * scale


class Attention(nn.Module):
  """The attention half of a layer, with residual and LayerNorm."""

  config: Config
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B T H'], bias: Float[Array, '_ 1 _ S'], adapter: Adapter
  ) -> Array:
    config, dtype = self.config, self.options.dtype

    def project(x, name, features):
      y = dense(config, features, dtype, name, self.options.products)(x)
      return adapter.project(f'attention/{name}', x, y)

    query = project(x, 'query', config.num_heads * config.head_dim)
    key, value = (
      project(x, name, config.num_kv_heads * config.head_dim) for name in ('key', 'value')
    )
    out = project(self.attend(query, key, value, bias, adapter), 'output', config.hidden_size)
    out = Dropout(config.hidden_dropout, deterministic=self.deterministic)(out)
    return LayerNorm(config.layer_norm_eps, dtype, name='norm')(out + x).astype(dtype)

  @nn.compact
  def attend(
    self,
    query: Float[Array, 'B T N*D'],
    key: Float[Array, 'B T K*D'],
    value: Float[Array, 'B T K*D'],
    bias: Float[Array, '_ _ _ S'],
    adapter: Adapter,
    reach: Reach = ALL,
  ) -> Float[Array, 'B T N*D']:
    """The weighted means of values, including those of the adapter prefix.

    The kernel of 'fused' needs the same mask for all tokens and as many heads of keys as of
    queries. The kernels of 'library' need the same mask for all heads and no dropout of weights.
    Otherwise attention is plain. Texts longer than ``reach.LONG`` tokens are processed in blocks of
    queries, with 'plain' in place of 'fused'.
    """
    # Kept only if the caller asks for intermediates.
    self.sow('intermediates', 'keys', key)
    self.sow('intermediates', 'values', value)
    shape, length = query.shape, query.shape[1]
    # The weights of a first token need the whole text.
    in_blocks = queries_at_once(length) < length and not self.is_mutable_collection('intermediates')
    single = bias.shape[1:3] == (1, 1) and key.shape == query.shape and not reach.limited
    if self.options.attention == 'fused' and single and not in_blocks:
      return self.fused(query, key, value, bias, adapter.prefix())
    query, key, value, bias = self._with_prompt(query, key, value, bias, adapter.prefix())
    rate = 0.0 if self.deterministic else self.config.attention_dropout
    library = self.options.attention == 'library' and bias.shape[1] == 1 and not rate
    attend = self.library if library else self.plain
    if not in_blocks:
      if reach.limited:
        places = jnp.arange(length - key.shape[2], length, dtype=jnp.int32)
        bias = bias + reach.bias(places[-length:], places)
      mixed = attend(query, key, value, bias, Dropout(rate, deterministic=False))
    else:
      key_of_masks = self.make_rng('dropout') if rate else None

      def attend_block(query, key, value, bias, number):
        def drop_out(weights):
          if key_of_masks is None:
            return weights
          return drop(weights, rate, jax.random.fold_in(key_of_masks, number), rows=True)

        return attend(query, key, value, bias, drop_out)

      mixed = attend_in_blocks(attend_block, query, key, value, bias, reach)
    return mixed.swapaxes(1, 2).reshape(shape)

  @nn.compact
  def fused(
    self,
    query: Float[Array, 'B T H'],
    key: Float[Array, 'B T H'],
    value: Float[Array, 'B T H'],
    bias: Float[Array, 'B 1 1 S'],
    prompt: Array | None,
  ) -> Float[Array, 'B T H']:
    prompt_rate = 0.0 if self.deterministic else self.options.prompt_dropout
    if prompt is not None:
      prompt = prompt.astype(query.dtype).reshape(*prompt.shape[:-2], query.shape[2])
      if prompt.ndim == 4:  # one for each example; the kernel does not copy a shared one
        prompt = Dropout(self.options.prompt_dropout, self.deterministic)(prompt)
      if (
        bias.shape[3] > key.shape[1]
      ):  # it masks vectors of the prompt, which then become ordinary keys
        key, value = (
          jnp.concatenate([prompt[:, index], rows], axis=1)
          for index, rows in enumerate((key, value))
        )
        prompt = None
    from dprjax.models import fused_attention  # only where it runs

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

  def plain(
    self,
    query: Float[Array, 'B N T D'],
    key: Float[Array, 'B K S D'],
    value: Float[Array, 'B K S D'],
    bias: Float[Array, '_ _ _ S'],
    drop_out: Callable[[Array], Array],
  ) -> Float[Array, 'B N T D']:
    """The weighted means of values, with scores in memory."""
    dtype = self.options.dtype
    if key.shape[1] < query.shape[1]:  # several query heads share keys and values
      key, value = (jnp.repeat(y, query.shape[1] // key.shape[1], axis=1) for y in (key, value))
    scores = attention_scores(query, key) + bias
    # Divide after the product with the values: [B, N, T, D] is smaller than the scores.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Kept only if the caller asks for intermediates.
    self.sow('intermediates', 'first_token', weights[:, :, 0] / total[:, :, 0])
    context = jnp.einsum(
      'bnts,bnsd->bntd',
      drop_out(weights).astype(dtype),
      value,
      preferred_element_type=jnp.float32,
    )
    return (context / total).astype(dtype)

  def library(
    self,
    query: Float[Array, 'B N T D'],
    key: Float[Array, 'B K S D'],
    value: Float[Array, 'B K S D'],
    bias: Float[Array, '_ 1 _ S'],
    drop_out: Callable[[Array], Array],
  ) -> Float[Array, 'B N T D']:
    """The weighted means of values, by ``jax.nn.dot_product_attention``, without dropout.

    On GPUs, inputs of 16 bits use a kernel that stores no scores [B, N, T, S].
    """
    half = query.dtype.itemsize == 2
    kernel = half and platform_of(self.options.heads) in ('gpu', 'cuda')
    mask = bias > MASKED / 2
    mixed = jax.nn.dot_product_attention(
      query.swapaxes(1, 2),
      key.swapaxes(1, 2),
      value.swapaxes(1, 2),
      mask=jnp.broadcast_to(mask, (len(query), 1, query.shape[2], key.shape[2])),
      implementation='cudnn' if kernel else 'xla',
    )
    return mixed.swapaxes(1, 2)

  def _with_prompt(
    self, query: Array, key: Array, value: Array, bias: Array, prompt: Array | None
  ) -> tuple[Array, Array, Array, Array]:
    """Heads of queries [B, N, T, D] and of keys and values [B, K, P + T, D], and the bias."""
    config, dtype, shape = self.config, self.options.dtype, query.shape

    def heads(y):
      y = y.reshape(*y.shape[:2], -1, config.head_dim)
      return y.swapaxes(1, 2)  # [B, N, T, D]: 1.5x faster on a CPU than [B, T, N, D]

    query, key, value = heads(query), heads(key), heads(value)
    if prompt is not None:
      prompt = prompt.astype(dtype).swapaxes(-3, -2)
      # Copying a shared prompt for each example takes little memory beside the scores, and is 10 %
      # faster than separate scores of prompt and tokens.
      prompt = jnp.broadcast_to(
        prompt if prompt.ndim == 5 else prompt[None], (shape[0], *prompt.shape[-4:])
      )
      prompt = Dropout(self.options.prompt_dropout, self.deterministic)(prompt)
      key = jnp.concatenate([prompt[:, 0], key], axis=2)  # [B, N, P + T, D]
      value = jnp.concatenate([prompt[:, 1], value], axis=2)
      # A bias without columns for the prompt masks none of it.
      bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (key.shape[2] - bias.shape[3], 0)))
    return query, key, value, bias


class MLP(nn.Module):
  """The feed-forward half of a layer, with residual and LayerNorm."""

  config: EncoderConfig
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x: Float[Array, 'B T H'], adapter: Adapter) -> Float[Array, 'B T H']:
    config, dtype = self.config, self.options.dtype

    def project(x, name, features):
      y = dense(config, features, dtype, name, self.options.products)(x)
      return adapter.project(f'mlp/{name}', x, y)

    y = project(x, 'up', config.intermediate_size)
    y = project(ACTIVATIONS[config.hidden_act](y), 'down', config.hidden_size)
    y = Dropout(config.hidden_dropout, deterministic=self.deterministic)(y)
    return LayerNorm(config.layer_norm_eps, dtype, name='norm')(y + x).astype(dtype)


class Scanned(NamedTuple):
  """Inputs that differ by layer, with a leading layer axis."""

  adapter: Any
  number: Array


class Shared(NamedTuple):
  """Inputs that all layers share.

  Attributes:
    bias: [B or 1, 1 or N, 1 or T, S], of padding and of ``family.Family.relative``.
    adapter: without the arrays that differ by layer.
  """

  bias: Array
  positions: Array
  adapter: Adapter


class Layer(nn.Module):
  """One layer for ``nn.scan``: ``(carry, scanned, broadcast) -> (carry, None)``."""

  config: EncoderConfig
  options: EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x, scanned: Scanned, shared: Shared):
    how, rows = (self.config, self.options, self.deterministic), self.options.rows
    adapter = shared.adapter.of_layer(scanned.adapter)
    x = split_rows(adapter.enter_layer(x), rows)
    x = split_rows(Attention(*how, name='attention')(x, shared.bias, adapter), rows)
    x = MLP(*how, name='mlp')(x, adapter)
    return split_rows(adapter.leave_layer(x), rows), None


class Embeddings(nn.Module):
  """Word embeddings, with additions of the family."""

  config: Config
  dtype: Any
  deterministic: bool

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    token_types: Int[Array, 'B T'],
    adapter: Adapter = BARE,
  ) -> Float[Array, 'B T H']:
    config, width = self.config, self.config.embedding_size
    words = adapter.embed_tokens(tokens, Embed(config, config.vocab_size, width, name='word'))
    x = self.combine(words, positions, token_types)
    x = Dropout(config.hidden_dropout, deterministic=self.deterministic)(x).astype(self.dtype)
    if width != config.hidden_size:
      x = dense(config, config.hidden_size, self.dtype, 'project')(x)
    return x

  def combine(
    self, x: Float[Array, 'B T E'], positions: Int[Array, 'B T'], token_types: Int[Array, 'B T']
  ) -> Float[Array, 'B T E']:
    config, width = self.config, self.config.embedding_size
    if config.type_vocab_size:
      x += Embed(config, config.type_vocab_size, width, name='token_type')(token_types)
    x += Embed(config, config.max_positions, width, name='position')(positions)
    return LayerNorm(config.layer_norm_eps, name='norm')(x)
