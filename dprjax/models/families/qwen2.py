"""Qwen 2 (Yang et al., 2024): Llama with biases of queries, keys and values."""

from typing import Any

from dprjax.models.families import llama


class Keys(llama.Keys):
  """The keys read from config.json."""

  use_sliding_window: bool = False
  max_window_layers: int = 28


def read_config(keys: Keys, model_type: str, **traits: Any) -> llama.Config:
  """The shape in a config.json, as `llama.read_config`; the last layers may have a window."""
  windows = {}
  if keys.use_sliding_window:
    windows = llama.read_windows(keys, lambda layer: layer >= keys.max_window_layers)
  return llama.read_config(keys, model_type, **windows, **traits)


def _write_config(config: llama.Config) -> dict[str, Any]:
  window = {'use_sliding_window': any(config.windowed), **llama.written_window(config)}
  return llama.write_config(config) | window


FAMILY = llama.FAMILY._replace(
  model_type='qwen2',
  class_name='Qwen2',
  read_config=lambda hf_config: read_config(
    llama.read_keys(hf_config, Keys), 'qwen2', qkv_bias=True, output_bias=False
  ),
  write_config=_write_config,
  shapes=dict,
)
