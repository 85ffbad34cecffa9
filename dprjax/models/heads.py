"""Heads on hidden states: masked-LM, Condenser and sequence classification.

A classifier scores a query and a passage read together, as ForSequenceClassification of
transformers: a dense layer (the BERT pooler) and tanh on the last state of the first token, then a
linear layer to 1 or 2 labels. Some families use another activation, a norm after it, or the mean of
the states.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.base import tree
from dprjax.base.errors import InputError
from dprjax.models import encoder, layers, pooling, scratch
from dprjax.models.checkpoint_names import Tensor
from dprjax.models.encoder_config import DEFAULT_OPTIONS, EncoderConfig, EncoderOptions
from dprjax.models.layers import ACTIVATIONS

LABELS = (1, 2)  # of a classifier


def init_mlm_head(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Fresh parameters of a masked-LM head, float32, as BERT starts (see ``scratch.init_layers``).

  Returns:
    ``dense`` (``kernel`` [H, E], ``bias`` [E]), ``norm`` (``scale``, ``bias`` [E]) and ``bias``
    [V], without biases that the family lacks. E is the width of word embeddings, which serve as the
    output projection.
  """
  assert config.family.mlm_tensors is not None  # callers check this first
  return _init(config, config.family.mlm_tensors(config), {'dense': key})


def _init(
  config: EncoderConfig, tensors: Iterable[Tensor], keys: Mapping[str, Array]
) -> dict[str, Any]:
  """Kernels by the key of their layer, scales of 1, and biases of 0."""
  head: dict[str, Any] = {}
  for tensor in tensors:
    *parents, name = tensor.path
    if tensor.kernel:
      array = layers.kernel_init(config)(keys[parents[0]], tensor.shape[::-1], jnp.float32)
    else:
      array = jnp.full(tensor.shape, float(name == 'scale'), jnp.float32)
    head['/'.join(tensor.path)] = array
  return tree.unflatten(head)


def mlm_logits(
  config: EncoderConfig,
  head: Mapping[str, Any],
  embedding: Float[Array, 'V E'],
  hidden: Float[Array, '*n H'],
  dtype: Any = jnp.float32,
) -> Float[Array, '*n V']:
  """A logit for every word of the vocabulary, float32.

  Args:
    dtype: of the inputs of matrix products; LayerNorm and the logits are float32.
  """
  x: Any = hidden.reshape(1, -1, config.hidden_size)
  width = embedding.shape[1]
  dense = layers.dense(config, width, dtype, bias='bias' in head['dense'])
  x = dense.apply({'params': head['dense']}, x)
  x = ACTIVATIONS[config.family.mlm_act(config)](x)
  norm = layers.LayerNorm(config.layer_norm_eps, use_bias='bias' in head['norm'])
  x = norm.apply({'params': head['norm']}, x)
  x = x.astype(dtype).reshape(*hidden.shape[:-1], width)
  logits = jnp.einsum(
    '...h,vh->...v', x, embedding.astype(dtype), preferred_element_type=jnp.float32
  )
  if 'bias' not in head:
    return logits
  bias = head['bias'].astype(jnp.float32)
  return logits + bias.reshape(*(1,) * (logits.ndim - 1), -1)


def init_condenser_head(config: EncoderConfig, key: Array, num_layers: int = 2) -> dict[str, Any]:
  """Fresh parameters of the Condenser head: layers like those of the encoder (Condenser, 3.4)."""
  if config.family.final is not None:
    # Eq. 8 mixes the last state of one token with earlier states of others.
    raise InputError(
      f'{config.model_type} models normalise only their last states, so they cannot have a '
      'Condenser head; set config.pretrain.head_layers=0'
    )
  return scratch.init_layers(config, num_layers, key)


def init_classifier(config: EncoderConfig, key: Array, labels: int = 1) -> dict[str, Any]:
  """Fresh parameters, float32: kernels N(0, ``initializer_range``), biases 0.

  Returns:
    ``dense`` (``kernel`` [H, H], ``bias`` [H]), ``output`` (``kernel`` [H, labels], ``bias``
    [labels]), and in some families ``norm`` (``scale`` [H]).
  """
  keys = dict(zip(('dense', 'output'), jax.random.split(key), strict=True))
  assert config.family.classifier_tensors is not None  # callers check this first
  return _init(config, config.family.classifier_tensors(config, labels), keys)


def classify(
  config: EncoderConfig,
  head: Mapping[str, Any],
  pooled: Float[Array, 'B H'],
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B labels']:
  """The logits, float32.

  Args:
    config: of the encoder. As in transformers, dropout comes before the last layer; in RoBERTa and
      XLM-R also before the first.
    options: the dtype applies to the first layer; the last is float32.
  """
  keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
  rate = options.apply_dropout(config).hidden_dropout
  x: Any = _drop(pooled, keys[0], rate) if config.family.classifier_drops else pooled
  activation = ACTIVATIONS[config.family.classifier_act(config)]
  x = activation(_dense(x.astype(options.dtype), head['dense']))
  if 'norm' in head:
    norm = layers.LayerNorm(config.layer_norm_eps, use_bias='bias' in head['norm'])
    normed: Any = norm.apply({'params': head['norm']}, x[:, None])
    x = normed[:, 0]
  x = _drop(x, keys[1], rate).astype(jnp.float32)
  return _dense(x, head['output'])


def score(logits: Float[Array, 'B labels']) -> Float[Array, ' B']:
  """A logit of relevance: of the only label, or of label 1 minus label 0."""
  return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def score_pairs(
  config: EncoderConfig,
  backbone: Mapping[str, Any],
  head: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  token_types: Int[Array, 'B T'] | None = None,
  *,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, ' B']:
  """The scores of pairs, float32.

  Args:
    token_types: segment ids, default 0; ignored by an encoder with one type.
  """
  keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
  hidden = encoder.encode(
    config,
    backbone,
    tokens,
    mask,
    token_types=token_types if config.type_vocab_size > 1 else None,
    options=options,
    dropout_key=keys[0],
  )
  pooled = pooling.find(config.family.classifier_pooling(config)).pool(hidden, mask)
  return score(classify(config, head, pooled, options, keys[1]))


def _dense(x: Float[Array, 'B I'], layer: Mapping[str, Any]) -> Float[Array, 'B O']:
  # Summed in float32 even for bfloat16. The tf32 default of GPUs would cost three digits of a
  # logit.
  product = jnp.einsum(
    'bi,io->bo',
    x,
    layer['kernel'].astype(x.dtype),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  return product + layer['bias'].astype(jnp.float32)[None, :] if 'bias' in layer else product


def _drop(x: Float[Array, 'B H'], key: Array | None, rate: float) -> Float[Array, 'B H']:
  if key is None or not rate:
    return x
  return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
