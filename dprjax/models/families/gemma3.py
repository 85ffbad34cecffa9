"""Gemma 3 (Gemma Team, 2025) without images; EmbeddingGemma, without the causal mask.

Norms multiply by 1 plus their scale, and there is also one after each half of a layer. Most layers
have a window, with rotary settings of their own.
"""

from collections.abc import Mapping
from typing import Any

from dprjax.models import rotary
from dprjax.models.families import llama
from dprjax.models.family import only


def _traits(width: int, score_scale: int) -> dict[str, Any]:
  return {
    'head_norms': True,
    'after_norms': True,
    'norm_offset': 1.0,
    'score_scale': score_scale,
    'embedding_scale': width**0.5,
  }


class Keys(llama.Keys):
  hidden_activation: str = 'gelu_pytorch_tanh'
  query_pre_attn_scalar: llama.Size = 256
  rope_local_base_freq: float = 10000.0
  sliding_window_pattern: llama.Size = 6


def _read_config(hf_config: Mapping[str, Any]) -> llama.Config:
  only(hf_config, attn_logit_softcapping=None)
  pattern = hf_config.get('_sliding_window_pattern') or 6
  keys = llama.read_keys(hf_config, Keys, head_dim=256, sliding_window_pattern=pattern)
  causal = keys.causal
  if keys.use_bidirectional_attention:  # as transformers does
    keys.sliding_window = keys.sliding_window // 2 + 1
    keys.use_bidirectional_attention = False
  windows = llama.read_windows(keys, lambda layer: (layer + 1) % keys.sliding_window_pattern > 0)
  whole = keys.rope_parameters.get('full_attention') or keys.rope_scaling
  near = keys.rope_parameters.get('sliding_attention') or {}
  tokens = keys.max_position_embeddings
  return llama.read_config(
    keys,
    'gemma3_text',
    **_traits(keys.hidden_size, keys.query_pre_attn_scalar),
    **windows | {'causal': causal},
    hidden_act=keys.hidden_activation,
    rope=rotary.read(whole, keys.rope_theta or 1000000.0, tokens),
    window_rope=rotary.read(near, keys.rope_local_base_freq, tokens),
  )


def _write_config(config: llama.Config) -> dict[str, Any]:
  window, local = llama.written_window(config), config.window_rope or config.rope
  if not config.causal:
    window |= {'sliding_window': 2 * config.reach, 'is_causal': True}
  return llama.write_config(config) | {
    'hidden_activation': config.hidden_act,
    'query_pre_attn_scalar': config.score_scale,
    'use_bidirectional_attention': not config.causal,
    'rope_local_base_freq': local.theta,
    **window,
  }


FAMILY = llama.FAMILY._replace(
  model_type='gemma3_text',
  class_name='Gemma3Text',
  read_config=_read_config,
  write_config=_write_config,
)
