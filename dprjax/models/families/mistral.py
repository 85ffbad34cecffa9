"""Mistral (Jiang et al., 2023): Llama with a window in every layer, or without windows."""

from collections.abc import Mapping
from typing import Any

from dprjax.models.families import llama
from dprjax.models.rotary import Rope


def _read_config(hf_config: Mapping[str, Any]) -> llama.Config:
  keys = llama.read_keys(hf_config, llama.Keys, num_key_value_heads=8)
  windows = llama.read_windows(keys, lambda layer: True) if keys.sliding_window else {}
  return llama.read_config(keys, 'mistral', **windows)


def _shapes() -> dict[str, llama.Config]:
  size = 32000, 4096, 32, 32, 8, 128, 14336, 32768, Rope(10000.0)
  shape = llama.Config('mistral', *size, layer_norm_eps=1e-5, windowed=(True,) * 32, reach=4095)
  return {'e5-mistral-7b': shape}


FAMILY = llama.FAMILY._replace(
  model_type='mistral',
  class_name='Mistral',
  read_config=_read_config,
  write_config=lambda config: (
    llama.write_config(config) | {'sliding_window': llama.written_window(config)['sliding_window']}
  ),
  shapes=_shapes,
)
