"""Heads on hidden states: the masked-LM head and the Condenser head."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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


def mlm_loss(
  config: EncoderConfig,
  head: Mapping[str, Any],
  embedding: Float[Array, 'V E'],
  hidden: Float[Array, 'B T H'],
  positions: Int[Array, 'B M'],
  targets: Int[Array, 'B M'],
  weights: Float[Array, 'B M'],
  dtype: Any = jnp.float32,
) -> tuple[Float[Array, ''], Float[Array, ''], Float[Array, '']]:
  """The masked-LM loss (Condenser, Eqs. 3, 9 and 10) as sums, so that chunks of a batch can be
  added.

  States at ``positions`` are gathered first, so the largest array is [B, M, V], a seventh of [B, T,
  V].

  Args:
    hidden: the last states of the encoder or of the Condenser head.
    positions: of masked tokens, from ``papers.condenser.masking``.
    targets: the original tokens at ``positions``.
    weights: 1 for a masked token, 0 for padding.

  Returns:
    The weighted sums of cross-entropies, of ones, and of correct predictions.
  """
  gathered = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)  # [B, M, H]
  logits = mlm_logits(config, head, embedding, gathered, dtype)
  target = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[:, :, 0]
  entropy = jax.nn.logsumexp(logits, axis=2) - target
  right = (jnp.argmax(logits, axis=2) == targets).astype(jnp.float32)
  return jnp.sum(entropy * weights), jnp.sum(weights), jnp.sum(right * weights)


def answer_score(
  logits: Float[Array, 'B V'], yes: int, no: int, kind: str = 'logit'
) -> Float[Array, ' B']:
  """The preference for the word for yes over the word for no (NIR-Prompt, section 3.5).

  Args:
    kind: 'logit', the difference of logits, whose sigmoid is P(yes | yes or no); 'probability', the
      difference of probabilities over the vocabulary. Both have the same sign.
  """
  if kind == 'logit':
    return logits[:, yes] - logits[:, no]
  total = jax.nn.logsumexp(logits, axis=1)
  return jnp.exp(logits[:, yes] - total) - jnp.exp(logits[:, no] - total)


def init_condenser_head(config: EncoderConfig, key: Array, num_layers: int = 2) -> dict[str, Any]:
  """Fresh parameters of the Condenser head: layers like those of the encoder (Condenser, 3.4)."""
  if config.family.final is not None:
    # Eq. 8 mixes the last state of one token with earlier states of others.
    raise InputError(
      f'{config.model_type} models normalise only their last states, so they cannot have a '
      'Condenser head; set config.pretrain.head_layers=0'
    )
  return encoder.init_layers(config, num_layers, key)


def condenser_states(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  late: Float[Array, 'B T H'],
  early: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  **kwargs: Any,
) -> Float[Array, 'B T H']:
  """Applies the Condenser head to the late first and the other early tokens (Eq. 8), float32."""
  skipped = jnp.concatenate([late[:, :1], early[:, 1:]], axis=1)
  return encoder.encode_layers(config, layers, skipped, mask, **kwargs).astype(jnp.float32)
