"""The shape of an encoder, and options for computing it."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dprjax.base import mesh
from dprjax.base.errors import InputError
from dprjax.models import family as families


@dataclasses.dataclass(frozen=True)
class EncoderConfig(families.Shape):
  """The shape of an encoder with a table of positions, such as BERT. Hashable.

  Other families have their own `families.Shape` with the same properties: ``vocab_size``,
  ``hidden_size``, ``num_layers``, ``num_heads``, ``num_kv_heads``, ``head_dim``,
  ``intermediate_size``, ``type_vocab_size``, ``max_tokens``, ``pad_token_id``, ``layer_norm_eps``,
  ``initializer_range`` and the rates of dropout.
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
    families.find(self.model_type)
    if self.hidden_size % self.num_heads:
      raise InputError(
        f'hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_heads}'
      )

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_heads

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def first_position(self) -> int:
    """The row of the first token in the position table."""
    return self.family.first_position(self)

  @property
  def max_tokens(self) -> int:
    return self.max_positions - self.first_position


class Arithmetic(NamedTuple):
  """The dtypes used by an encoder.

  Attributes:
    name: 'float32', 'bfloat16' or 'mixed': dense layers multiply bfloat16 and sum float32; all else
      is float32.
    products: the dtype of factors in dense layers; None: as activations.
  """

  name: str
  activations: Any
  products: Any = None


_ARITHMETICS = {
  one.name: one
  for one in (
    Arithmetic('float32', jnp.dtype('float32')),
    Arithmetic('bfloat16', jnp.dtype('bfloat16')),
    Arithmetic('mixed', jnp.dtype('float32'), jnp.dtype('bfloat16')),
  )
}


class EncoderOptions(NamedTuple):
  """How an encoder computes. Hashable.

  Attributes:
    dtype: of products and activations between layers; softmax and LayerNorm stay float32.
    unroll: layers a step of the scan; 0: all.
    dropout: the rate; None: the config rates. Needs a dropout key.
    rows: how the first axis of activations is split; None: the compiler decides.
    heads: how fused attention splits the batch and the heads over devices; None: one device.
    attention: 'plain'; 'fused', a TPU kernel (`fused_attention`), interpreted slowly on other
      devices; 'library', ``jax.nn.dot_product_attention``.
    products: the dtype of factors in dense layers, which sum in float32; None: ``dtype``.
    prompt_dropout: the rate on the adapter, with a mask for each example. Needs a dropout key.
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
  def of(cls, arithmetic: Arithmetic, devices: Mesh) -> Self:
    """Options for inference with these dtypes on these devices."""
    rows, heads = mesh.activations(devices)
    return cls(
      arithmetic.activations,
      rows=rows,
      heads=heads,
      attention='fused' if platform_of(heads) == 'tpu' else 'plain',
      products=arithmetic.products,
    )

  def apply_dropout(self, config: EncoderConfig) -> EncoderConfig:
    if self.dropout is None:
      return config
    return dataclasses.replace(config, hidden_dropout=self.dropout, attention_dropout=self.dropout)


DEFAULT_OPTIONS = EncoderOptions()


def platform_of(split: NamedSharding | None) -> str:
  return jax.default_backend() if split is None else split.mesh.devices.flat[0].platform


def arithmetic(name: str) -> Arithmetic:
  """The dtypes named 'float32', 'bfloat16', 'mixed' or 'auto'.

  'auto' is bfloat16 on accelerators and float32 on CPUs. 'mixed' is faster than both on CPUs with
  bfloat16 products (AMX): docs/performance.md.
  """
  if name == 'auto':
    name = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  return _ARITHMETICS[name]
