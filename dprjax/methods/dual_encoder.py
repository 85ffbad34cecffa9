"""Two texts, one vector each: the encoder of queries and of passages, with their prompts, as a
system trains it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.methods.method import Params
from dprjax.models import encoder, prompts
from dprjax.models.embed import embed_text


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
  if config.prompt.dropout_scope not in ('example', 'batch'):
    raise InputError(
      "config.prompt.dropout_scope: expected 'example' or 'batch', not "
      f'{config.prompt.dropout_scope!r}'
    )
  options = encoder.EncoderOptions.from_config(config.backbone)
  two = config.backbone.two_encoders
  pooling, normalize = config.pooling, config.normalize
  rate, scope = config.prompt.dropout, config.prompt.dropout_scope
  shift = config.prompt.shift_positions

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
      dropout_key, prompt_key = jax.random.split(key)
      if prefix is not None and rate:
        prefix = prompts.drop(
          prefix, prompt_key, rate, tokens.shape[0] if scope == 'example' else None
        )
    return embed_text(
      model,
      backbone,
      tokens,
      mask,
      pooling=pooling,
      normalize=normalize,
      prompt=prefix,
      shift_positions=shift,
      options=options,
      dropout_key=dropout_key,
    )

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    prefix = prompts.expand_prompt(model, params.get('prompt'))[kind]
    return encode(params, prefix, kind, tokens, mask, None)

  return Dual(init, encode, embed)
