"""Qwen 3 (Yang et al., 2025) and Qwen3-Embedding: Llama with norms of queries and keys by head."""

from dprjax.models.families import llama, qwen2
from dprjax.models.rotary import Rope


def _shapes() -> dict[str, llama.Config]:
  sizes = {
    '0.6b': (151669, 1024, 28, 16, 8, 128, 3072, 32768),
    '4b': (151665, 2560, 36, 32, 8, 128, 9728, 40960),
    '8b': (151665, 4096, 36, 32, 8, 128, 12288, 40960),
  }
  return {
    f'qwen3-embedding-{name}': llama.Config('qwen3', *size, Rope(1000000.0), head_norms=True)
    for name, size in sizes.items()
  }


FAMILY = qwen2.FAMILY._replace(
  model_type='qwen3',
  class_name='Qwen3',
  read_config=lambda hf_config: qwen2.read_config(
    llama.read_keys(hf_config, qwen2.Keys, head_dim=128), 'qwen3', head_norms=True
  ),
  shapes=_shapes,
)
