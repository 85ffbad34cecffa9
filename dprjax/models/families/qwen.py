"""Qwen 2 and 3 (Yang et al., 2024, 2025) and Qwen3-Embedding.

Llama with biases of queries, keys and values, or with norms of queries and keys by head.
"""

from typing import Any

from dprjax.models.families import llama


class Keys(llama.Keys):
  use_sliding_window: bool = False
  max_window_layers: int = 28


def _read_config(keys: Keys, model_type: str, **traits: Any) -> llama.Config:
  """The shape in a config.json, as `llama.read_config`; the last layers may have a window."""
  windows = {}
  if keys.use_sliding_window:
    windows = llama.read_windows(keys, lambda layer: layer >= keys.max_window_layers)
  return llama.read_config(keys, model_type, **windows, **traits)


def _write_config(config: llama.Config) -> dict[str, Any]:
  window = {'use_sliding_window': any(config.windowed), **llama.written_window(config)}
  return llama.write_config(config) | window


QWEN2 = llama.FAMILY._replace(
  model_type='qwen2',
  class_name='Qwen2',
  read_config=lambda hf_config: _read_config(
    llama.read_keys(hf_config, Keys), 'qwen2', qkv_bias=True, output_bias=False
  ),
  write_config=_write_config,
)


QWEN3 = QWEN2._replace(
  model_type='qwen3',
  class_name='Qwen3',
  read_config=lambda hf_config: _read_config(
    llama.read_keys(hf_config, Keys, head_dim=128), 'qwen3', head_norms=True
  ),
)
