"""Reads adapters of PEFT, as files of goldens have them, into prompts."""

import json
import re

import numpy as np
import safetensors.numpy

from dprjax.exports.prompt_folders import CONFIG, WEIGHTS
from dprjax.models.adapters import lora
from dprjax.models.artifact import Prompt


def read(folder):
  config = json.loads((folder / CONFIG).read_text())
  return config, safetensors.numpy.load_file(folder / WEIGHTS)


def prefix(tensors, model):
  """``[L, 2, P, N, D]``: PEFT has, for each position and layer, the keys and then the values."""
  rows = tensors['prompt_embeddings']
  sizes = len(rows), model.num_layers, 2, model.num_kv_heads, model.head_dim
  return rows.reshape(sizes).transpose(1, 2, 0, 3, 4).astype(np.float32)


def lora_prompt(folder, model, meta):
  """A prompt with ``meta``; layers of a projection without an adapter are zeros."""
  config, tensors = read(folder)
  known = {f'{one.module}.weight': one for one in lora.modules(model)}
  arrays = {}
  for key, array in tensors.items():
    name, which = re.fullmatch(r'base_model\.model\.(.+)\.lora_([AB])\.weight', key).groups()
    module = known[model.family.canonical(f'{name}.weight')]
    count = len(module.names)
    parts = [array] * count if which == 'A' else np.split(array, count)
    for one, part in zip(module.names, parts, strict=True):
      shape = model.num_layers, *part.T.shape
      stacked = arrays.setdefault(f'{one}/{which.lower()}', np.zeros(shape, np.float32))
      stacked[module.layer] = part.T
  targets = sorted({name.rpartition('/')[0] for name in arrays})
  scale = config['r'] ** 0.5 if config.get('use_rslora') else 1.0
  own = {'rank': config['r'], 'alpha': config['lora_alpha'] * scale, 'targets': targets}
  return Prompt(meta | own, arrays)
