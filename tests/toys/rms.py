"""A family of backbones in one file: RMSNorm before each half of a layer, rotary positions, heads
that share keys and values, a gated MLP and a causal window.

    DPRJAX_EXTENSIONS=tests.toys.rms python -m dprjax.train ...
"""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dprjax.models import layers
from dprjax.models.adapter import BARE
from dprjax.models.checkpoint_names import Tensor
from dprjax.models.families import bert
from dprjax.models.family import Family, Shape
from dprjax.models.reach import Reach

NAME = 'rms'
WINDOW = 6  # tokens that a token sees: its own and those before it


@dataclasses.dataclass(frozen=True)
class Config(Shape):
  """The shape: values of config.json, under the same names."""

  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  max_tokens: int = 64
  pad_token_id: int = 0
  hidden_dropout: float = 0.0
  attention_dropout: float = 0.0
  model_type: str = NAME

  # Facts that are in no key of config.json.
  type_vocab_size = 1
  layer_norm_eps = 1e-6
  initializer_range = 0.02


class RMSNorm(nn.Module):
  epsilon: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:]).astype(jnp.float32)
    x = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + self.epsilon) * scale[None, None]


class Embeddings(nn.Module):
  config: Config
  dtype: type
  deterministic: bool

  @nn.compact
  def __call__(self, tokens, positions, token_types, adapter=BARE):
    x = adapter.embed_tokens(tokens, layers.Embed(self.config, self.config.vocab_size, name='word'))
    return x.astype(self.dtype)


def rotate(x, positions, size):
  """Rotary position embedding of heads that lie side by side (Su et al., 2021)."""
  x = x.reshape(*x.shape[:2], -1, size)
  first, second = jnp.split(x, 2, axis=3)
  frequency = 100.0 ** -(jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
  angle = (positions[:, :, None].astype(jnp.float32) * frequency[None, None])[:, :, None]
  cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=3)
  return turned.reshape(*x.shape[:2], -1)


class Attention(layers.Attention):
  """Attention in a causal window: `attend` is that of all families."""

  @nn.compact
  def __call__(self, x, shared, adapter):
    config, dtype = self.config, self.options.dtype

    def dense(x, name, width):
      return adapter.project(f'attention/{name}', x, layers.dense(config, width, dtype, name)(x))

    query, key, value = (
      dense(x, name, count * config.head_dim)
      for name, count in (
        ('query', config.num_heads),
        ('key', config.num_kv_heads),
        ('value', config.num_kv_heads),
      )
    )
    query, key = (rotate(y, shared.positions, config.head_dim) for y in (query, key))
    reach = Reach(causal=True, window=WINDOW - 1)
    mixed = self.attend(query, key, value, shared.bias, adapter, reach)
    return dense(mixed, 'output', config.hidden_size)


class MLP(nn.Module):
  config: Config
  dtype: type

  @nn.compact
  def __call__(self, x, adapter):
    def dense(x, name, width):
      return adapter.project(
        f'mlp/{name}', x, layers.dense(self.config, width, self.dtype, name)(x)
      )

    gate, up = (dense(x, name, self.config.intermediate_size) for name in ('gating', 'up'))
    return dense(jax.nn.silu(gate) * up, 'down', self.config.hidden_size)


class Layer(nn.Module):
  config: Config
  options: layers.EncoderOptions
  deterministic: bool

  @nn.compact
  def __call__(self, x, scanned, shared):
    dtype = self.options.dtype
    adapter = shared.adapter.of_layer(scanned.adapter)
    x = adapter.enter_layer(x)

    def norm(x, name):
      return RMSNorm(self.config.layer_norm_eps, name=name)(x).astype(dtype)

    attention = Attention(self.config, self.options, self.deterministic, name='attention')
    x += attention(norm(x, 'before_attention'), shared, adapter)
    x += MLP(self.config, dtype, name='mlp')(norm(x, 'before_mlp'), adapter)
    return adapter.leave_layer(x), None


def layer_tensors(config, count):
  width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
  dense = {
    ('attention', 'query'): (config.num_heads * size, width),
    ('attention', 'key'): (config.num_kv_heads * size, width),
    ('attention', 'value'): (config.num_kv_heads * size, width),
    ('attention', 'output'): (width, config.num_heads * size),
    ('mlp', 'gating'): (inner, width),
    ('mlp', 'up'): (inner, width),
    ('mlp', 'down'): (width, inner),
  }
  for layer in range(count):
    for path, shape in dense.items():
      name = f'layers.{layer}.{".".join(path)}'
      yield Tensor(f'{name}.weight', shape, (*path, 'kernel'), layer, count)
      yield Tensor(f'{name}.bias', shape[:1], (*path, 'bias'), layer, count)
    for norm in ('before_attention', 'before_mlp'):
      yield Tensor(f'layers.{layer}.{norm}.weight', (width,), (norm, 'scale'), layer, count)


def tensors(config):
  width = config.hidden_size
  yield Tensor('embed.weight', (config.vocab_size, width), ('embeddings', 'word', 'embedding'))
  yield Tensor('norm.weight', (width,), ('final', 'scale'))
  for tensor in layer_tensors(config, config.num_layers):
    yield tensor._replace(path=('layers', *tensor.path))


KEYS = [field.name for field in dataclasses.fields(Config) if not field.kw_only]

FAMILY: Family = bert.FAMILY._replace(
  model_type=NAME,
  class_name='RMS',
  read_config=lambda hf_config: Config(**{key: hf_config[key] for key in KEYS}),
  write_config=lambda config: {key: getattr(config, key) for key in KEYS},
  embeddings=Embeddings,
  layer=Layer,
  final=lambda config, dtype: RMSNorm(config.layer_norm_eps),
  positions=lambda config, tokens, mask, shift: (
    jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1 + shift
  ),
  tensors=tensors,
  layer_tensors=layer_tensors,
  canonical=lambda name: name,
  prefix='',
  extras=re.compile('(?!)'),
  sharding=((r'(backbone|head)/.*mlp/gating/kernel', P(None, 'fsdp', 'model')),),
)
