"""Two texts, one vector each: the encoder of queries and of passages, with their prompts, as a
system trains it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.methods.method import Params
from dprjax.models import encoder, heads, prompts


class Dual(NamedTuple):
  """A dual encoder.

  Attributes:
    init: ``(parts, key) -> params``, as of a system.
    encode: ``(params, prefix, kind, tokens, mask, key or None) -> [B, H]`` under an expanded
      prompt; no key, no dropout.
    embed: ``(params, kind, tokens, mask) -> [B, H]``, as of a system.
  """

  init: Callable[[Mapping[str, Any], Array], dict[str, Any]]
  encode: Callable[
    [Params, Array | None, str, Int[Array, 'B T'], Bool[Array, 'B T'], Array | None],
    Float[Array, 'B H'],
  ]
  embed: Callable[[Params, str, Int[Array, 'B T'], Bool[Array, 'B T']], Float[Array, 'B H']]


def build(config: ml_collections.ConfigDict, model: encoder.EncoderConfig) -> Dual:
  """The dual encoder that ``config`` describes, for a backbone of the shape ``model``.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  if config.backbone.dtype not in ('float32', 'bfloat16'):
    raise InputError(
      f"config.backbone.dtype: expected 'float32' or 'bfloat16', not {config.backbone.dtype!r}"
    )
  if config.prompt.dropout_scope not in ('example', 'batch'):
    raise InputError(
      "config.prompt.dropout_scope: expected 'example' or 'batch', not "
      f'{config.prompt.dropout_scope!r}'
    )
  if config.backbone.dropout >= 0:
    model = dataclasses.replace(
      model, hidden_dropout=config.backbone.dropout, attention_dropout=config.backbone.dropout
    )
  no_dropout = not (model.hidden_dropout or model.attention_dropout)
  dtype = jnp.dtype(config.backbone.dtype)
  unroll = config.backbone.unroll or model.num_layers
  two = config.backbone.two_encoders
  pooling, normalize = config.pooling, config.normalize
  rate, scope = config.prompt.dropout, config.prompt.dropout_scope
  shift, remat = config.prompt.shift_positions, config.backbone.remat

  def init(parts: Mapping[str, Any], key: Array) -> dict[str, Any]:
    params: dict[str, Any] = {
      'backbone': {kind: parts[kind] for kind in prompts.KINDS} if two else parts['query']
    }
    if config.prompt.length:
      params['prompt'] = prompts.init_prompt(
        model,
        key,
        config.prompt.length,
        tied=config.prompt.tied,
        reparam=config.prompt.reparam,
        hidden=config.prompt.reparam_hidden,
        std=config.prompt.init_std,
      )
    return params

  def encode(
    params: Params, prefix: Array | None, kind: str, tokens: Array, mask: Array, key: Array | None
  ) -> Float[Array, 'B H']:
    backbone = params['backbone'][kind] if two else params['backbone']
    dropout_key = None
    if key is not None:
      backbone_key, prompt_key = jax.random.split(key)
      dropout_key = None if no_dropout else backbone_key
      if prefix is not None and rate:
        prefix = prompts.drop(
          prefix, prompt_key, rate, tokens.shape[0] if scope == 'example' else None
        )
    hidden = encoder.encode(
      model,
      backbone,
      tokens,
      mask,
      prompt=prefix,
      shift_positions=shift,
      dtype=dtype,
      remat=remat,
      unroll=unroll,
      dropout_key=dropout_key,
    )
    pooled = heads.pool(hidden, mask, pooling)
    return heads.normalize(pooled) if normalize else pooled

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    prefix = prompts.expand_prompt(model, params.get('prompt'))[kind]
    return encode(params, prefix, kind, tokens, mask, None)

  return Dual(init, encode, embed)
