"""Heads on hidden states: the masked-LM head and the Condenser head."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.models import activations, encoder, layers
from dprjax.models.encoder_config import EncoderConfig


def init_mlm_head(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Fresh parameters of a masked-LM head, float32, as BERT starts (see ``encoder.init_layers``).

  Returns:
    ``dense`` (``kernel`` [H, E], ``bias`` [E]), ``norm`` (``scale``, ``bias`` [E]) and ``bias``
    [V], without biases that the family lacks. E is the width of word embeddings, which serve as the
    output projection.
  """
  head: dict[str, Any] = {}
  assert config.family.mlm_tensors is not None  # callers check this first
  for tensor in config.family.mlm_tensors(config):
    *parents, name = tensor.path
    node = head
    for parent in parents:
      node = node.setdefault(parent, {})
    if tensor.kernel:
      node[name] = layers.kernel_init(config)(key, tensor.shape[::-1], jnp.float32)
    else:
      node[name] = jnp.full(tensor.shape, float(name == 'scale'), jnp.float32)
  return head


def mlm_logits(
  config: EncoderConfig,
  head: Mapping[str, Any],
  embedding: Float[Array, 'V E'],
  hidden: Float[Array, '*n H'],
  dtype: Any = jnp.float32,
) -> Float[Array, '*n V']:
  """A logit for every word of the vocabulary, float32.

  Args:
    config: of the encoder; its family decides the activation of the head.
    hidden: states of any number of tokens.
    dtype: of the inputs of matrix products; LayerNorm and the logits are float32.
  """
  x: Any = hidden.reshape(1, -1, config.hidden_size)
  width = embedding.shape[1]
  dense = layers.dense(config, width, dtype, bias='bias' in head['dense'])
  x = dense.apply({'params': head['dense']}, x)
  x = activations.ACTIVATIONS[config.family.mlm_act(config)](x)
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
  return encoder.init_layers(config, num_layers, key)
