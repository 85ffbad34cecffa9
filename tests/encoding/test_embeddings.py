import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from dprjax.encoding import codes, embeddings, manifest
from dprjax.encoding.embeddings import load_embeddings
from dprjax.encoding.folders import EmbeddingsWriter, summary
from dprjax.encoding.manifest import Meta
from tests.refusals import refused

META = Meta(
  dimension=3,
  dtype='float32',
  side='passage',
  backbone_sha256='b' * 64,
  config_sha256='c' * 64,
  tokenizer_sha256='t' * 64,
  prompt_sha256=None,
  shift_positions=False,
  pooling='mean',
  normalize=True,
  prefix='',
  max_length=256,
  arithmetic='float32',
  input_sha256='i' * 64,
)
IDS = ['a', 'b', 'c', 'd', 'e']
VECTORS = np.arange(15, dtype=np.float32).reshape(5, 3)


def put_shard(writer, shard, ids=IDS, vectors=VECTORS):
  rows = slice(shard.start, shard.stop)
  writer.write(shard, vectors[rows], ids[rows])


def fill(folder, meta=META, ids=IDS, shard_rows=2, stop_after=None):
  """Writes VECTORS; returns the indices of the shards that were written."""
  writer = EmbeddingsWriter(folder, meta, summary(ids), shard_rows)
  written = []
  for shard in writer.pending()[:stop_after]:
    put_shard(writer, shard, ids)
    written.append(shard.number)
  if not writer.pending():
    writer.finish()
  return written


def damage(path):
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)


def test_round_trip(tmp_path):
  assert fill(tmp_path / 'e') == [0, 1, 2]
  found = load_embeddings(tmp_path / 'e')
  assert found.ids == IDS and len(found) == 5
  assert [len(shard) for shard in found.shards] == [2, 2, 1]
  np.testing.assert_array_equal(found.shards[1], VECTORS[2:4])
  part = found.shards[1][1:]
  assert part[0:0].shape == (0, 3) and part.shape == (1, 3)
  np.testing.assert_array_equal(part, VECTORS[3:4])
  np.testing.assert_array_equal(part[:1], VECTORS[3:4])
  assert found.ids_at(np.array([0, 3, 4])) == ['a', 'd', 'e']
  assert found.ids_at(np.array([], np.int64)) == []
  np.testing.assert_array_equal(found.vectors(), VECTORS)
  blocks = list(found.blocks(1))
  assert [ids for ids, _ in blocks] == [[id_] for id_ in IDS]
  np.testing.assert_array_equal(np.concatenate([vectors for _, vectors in blocks]), VECTORS)
  assert found.meta == META
  assert sorted(path.name for path in (tmp_path / 'e').iterdir()) == sorted(
    [f'embeddings-0000{i}-of-00003.npy' for i in range(3)]
    + [f'ids-0000{i}-of-00003.txt' for i in range(3)]
    + ['manifest.json']
  )


@pytest.mark.parametrize('dtype', codes.LEVELS)
def test_codes(tmp_path, dtype):
  """Stored with their ranges, read as the values that they stand for; another process's and a
  continued run's have the same ranges.
  """
  meta = dataclasses.replace(META, dtype=dtype)
  writer = EmbeddingsWriter(tmp_path, meta, summary(IDS), 2)
  with refused(tmp_path):
    writer.calibrate(np.full((2, 3), np.nan, np.float32))
  again = EmbeddingsWriter(tmp_path, meta, summary(IDS), 2)
  assert again.needs_ranges
  again.calibrate(VECTORS[:4])
  code = codes.Code(dtype, codes.calibrate(VECTORS[:4], dtype))
  for process in (1, 0):
    other = EmbeddingsWriter(tmp_path, meta, summary(IDS), 2, process)
    assert not other.needs_ranges
    shard = other.pending()[process]
    put_shard(other, shard)
  last = EmbeddingsWriter(tmp_path, meta, summary(IDS), 2)
  (shard,) = last.pending()
  put_shard(last, shard)
  last.finish()
  found = load_embeddings(tmp_path)
  stored = codes.encode(VECTORS, code)
  np.testing.assert_array_equal(np.concatenate([s.stored for s in found.shards]), stored)
  expected = codes.decode(stored, code)
  np.testing.assert_array_equal(found.vectors(), expected)
  np.testing.assert_array_equal(found.shards[1][1:], expected[3:4])
  np.testing.assert_array_equal(found.take(np.array([0, 1, 4])), expected[[0, 1, 4]])
  assert found.shards[0].code is not None and found.shards[0].shape == (2, 3)
  short = found.cut(2, '--corpus')
  assert short.shards[0].code is None and short.shards[0][:1].shape == (1, 2)
  np.testing.assert_array_equal(short.vectors(), codes.cut(expected, 2, True))
  np.testing.assert_array_equal(short.take(np.array([3])), codes.cut(expected, 2, True)[3:4])


def test_continues_where_it_stopped(tmp_path):
  folder = tmp_path / 'e'
  assert fill(folder, stop_after=2) == [0, 1]
  with refused(folder):
    load_embeddings(folder)
  (folder / '.embeddings-00002-of-00003.npy.12345678.tmp').write_bytes(b'half')
  assert fill(folder) == [2]
  np.testing.assert_array_equal(load_embeddings(folder).vectors(), VECTORS)
  assert not list(folder.glob('.*'))
  assert fill(folder) == []  # finished: nothing to do


def test_a_damaged_shard_is_detected_and_rewritten(tmp_path):
  fill(tmp_path)
  damage(tmp_path / 'embeddings-00001-of-00003.npy')
  with refused('embeddings-00001-of-00003.npy'):
    load_embeddings(tmp_path)
  assert len(load_embeddings(tmp_path, verify=False)) == 5
  assert fill(tmp_path, stop_after=0) == []
  with refused(tmp_path):
    load_embeddings(tmp_path)
  assert fill(tmp_path) == [1]
  np.testing.assert_array_equal(load_embeddings(tmp_path).vectors(), VECTORS)


def header(folder, **changes):
  """Rewrites the header of the vectors of the first shard; the rest of the file stays."""
  path = folder / 'embeddings-00000-of-00003.npy'
  content = path.read_bytes()
  text = content[10:128].decode('latin1')
  for old, new in changes.values():
    assert old in text
    text = text.replace(old, new)
  path.write_bytes(content[:10] + text.rstrip().ljust(117).encode() + b'\n' + content[128:])


def edit(folder, change, name='manifest.json'):
  manifest = json.loads((folder / name).read_text())
  change(manifest)
  (folder / name).write_text(json.dumps(manifest))


VECTORS_0, IDS_0 = 'embeddings-00000-of-00003.npy', 'ids-00000-of-00003.txt'


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda f: (f / 'embeddings-00002-of-00003.npy').unlink(), 'embeddings-00002-of-00003.npy'),
    (lambda f: (f / IDS_0).write_text('a\n'), VECTORS_0),
    (lambda f: (f / IDS_0).write_text('b\na\n'), 'manifest.json'),
    (lambda f: replace(f / IDS_0, os.mkfifo), 'ids-00000-of-00003.txt'),
    (lambda f: (f / VECTORS_0).write_bytes(b'\x93NUMPY'), '.npy'),
    (lambda f: np.save(f / VECTORS_0, VECTORS[:2].astype('>f4')), VECTORS_0),
    (lambda f: header(f, shape=('(2, 3)', '(2, 300000000000)')), ('float32', '300000000000')),
    (lambda f: header(f, dtype=("'<f4'", "'|O'")), '.npy'),
    (lambda f: os.truncate(f / VECTORS_0, 140), ('.npy', '140')),
    (lambda f: (f / 'manifest.json').write_text('{"format": '), 'not JSON'),
  ],
)
def test_bad_folders(tmp_path, change, message):
  fill(tmp_path)
  change(tmp_path)
  with refused(message):
    load_embeddings(tmp_path, verify=False)


def replace(path, make):
  path.unlink()
  make(path)


def put(*keys, value):
  """A change of a manifest: the value at ``keys``; `...` removes it."""

  def change(manifest):
    for key in keys[:-1]:
      manifest = manifest[key]
    if value is ...:
      del manifest[keys[-1]]
    else:
      manifest[keys[-1]] = value

  return change


MANIFESTS = [
  (put('version', value=1), '1'),
  (put('dimension', value=-3), 'dimension'),
  (put('pooling', value=...), 'pooling'),
]


@pytest.mark.parametrize('change, message', MANIFESTS)
def test_a_manifest_that_lies(tmp_path, change, message):
  """Neither opened nor continued; nothing in the folder changes."""
  fill(tmp_path)
  edit(tmp_path, change)
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  for use in (load_embeddings, fill):
    with refused(message):
      use(tmp_path)
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
  # The same in place of the progress of an unfinished folder.
  (tmp_path / 'manifest.json').rename(tmp_path / 'progress.json')
  with refused(message):
    fill(tmp_path)


def test_ids_that_come_twice_in_a_folder(tmp_path):
  fill(tmp_path)
  (tmp_path / IDS_0).write_text('a\na\n')
  content = ''.join(f'{id_}\n' for id_ in ['a', 'a', 'c', 'd', 'e']).encode()
  edit(tmp_path, put('ids_sha256', value=hashlib.sha256(content).hexdigest()))
  with refused('a'):
    load_embeddings(tmp_path, verify=False).ids  # noqa: B018


OTHER = {
  'dimension': 4,
  'dtype': 'float16',
  'side': 'query',
  'backbone_sha256': 'x' * 64,
  'config_sha256': 'x' * 64,
  'tokenizer_sha256': 'x' * 64,
  'prompt_sha256': 'x' * 64,
  'shift_positions': True,
  'pooling': 'cls',
  'normalize': False,
  'prefix': 'query: ',
  'max_length': 255,
  'arithmetic': 'bfloat16',
  'input_sha256': 'x' * 64,
  'topic': 'infer',
  'query_prompt_sha256': 'x' * 64,
}


def test_every_field_is_compared():
  assert list(OTHER) == [field.name for field in dataclasses.fields(Meta)]
  assert set(manifest.SPACE) < set(OTHER)


@pytest.mark.parametrize(
  'change',
  [
    *({'meta': dataclasses.replace(META, **{name: value})} for name, value in OTHER.items()),
    {'ids': ['a', 'b', 'c', 'd', 'x']},
    {'shard_rows': 3},
  ],
)
def test_a_folder_of_another_model_is_kept(tmp_path, change):
  fill(tmp_path, stop_after=1)
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  with refused(tmp_path):
    fill(tmp_path, **change)
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
  'ids, message',
  [
    (['a', 'a'], ('ids', 'a')),
    (['a\u2028'], 'row 1'),
  ],
)
def test_bad_ids(tmp_path, ids, message):
  with refused(message):
    EmbeddingsWriter(tmp_path / 'e', META, summary(ids))
  assert not (tmp_path / 'e').exists()


def test_bad_vectors(tmp_path):
  writer = EmbeddingsWriter(tmp_path, META, summary(IDS), shard_rows=2)
  shard = writer.pending()[0]
  with refused('b'):
    writer.write(shard, np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), IDS[:2])
  with pytest.raises(RuntimeError, match='3 of 3 shards are not written'):
    writer.finish()


def test_space_is_what_passages_share_and_in_part_queries():
  free = {'dtype', 'side', 'arithmetic', 'input_sha256', 'query_prompt_sha256'}
  of_side = {'prefix', 'max_length', 'topic'}
  early = {name: value for name, value in META.space().items() if name not in {*of_side, 'side'}}
  for name, value in OTHER.items():
    other = dataclasses.replace(META, **{name: value})
    assert [*manifest.differences(META.space(), other.space())] == [name] * (name not in free)
    query = dataclasses.replace(other, side='query').space()
    for space in (META.space(), early):  # a collection of an earlier version has no side
      assert [*manifest.differences(space, query)] == [name] * (name not in free | of_side)
    assert [*manifest.differences(early, other.space())] == [name] * (name not in free | of_side)


def test_several_processes_fill_one_folder(tmp_path):
  ids = [f'd{i}' for i in range(10)]
  vectors = np.arange(30, dtype=np.float32).reshape(10, 3)

  def fill(folder, processes, skip=()):
    """Each process opens the folder, then writes every ``processes``-th shard, then finishes."""
    writers = [EmbeddingsWriter(folder, META, summary(ids), 2, process=i) for i in range(processes)]
    written = []
    for i, writer in enumerate(writers):
      for shard in writer.pending()[i::processes]:
        if shard.number not in skip:
          put_shard(writer, shard, ids, vectors)
          written.append(shard.number)
    if not skip:
      for writer in reversed(writers):
        writer.finish()
    return sorted(written)

  assert fill(tmp_path / 'one', 1) == [0, 1, 2, 3, 4]
  # Interrupted, then continued by another number of processes after a shard was lost.
  assert fill(tmp_path / 'many', 3, skip=(4,)) == [0, 1, 2, 3]
  next((tmp_path / 'many').glob('embeddings-00001*')).unlink()
  assert fill(tmp_path / 'many', 2) == [1, 4]
  assert fill(tmp_path / 'many', 4) == []
  one, many = (
    {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    for name in ('one', 'many')
  )
  assert one == many and 'manifest.json' in one


KILLED = """
import os, signal, sys
import numpy as np
from dprjax.encoding import folders
from dprjax.encoding.manifest import Meta

folder, meta, rows = sys.argv[1], Meta(**eval(sys.argv[2])), eval(sys.argv[3])
write = folders.atomic_write

def killed(path, *mode):
  if path.name.startswith('ids-00002'):
    os.kill(os.getpid(), signal.SIGKILL)
  return write(path, *mode)

folders.atomic_write = killed
writer = folders.EmbeddingsWriter(folder, meta, folders.Rows(*rows), 2)
for shard in writer.pending():
  ids = ['a', 'b', 'c', 'd', 'e'][shard.start:shard.stop]
  vectors = np.arange(15, dtype=np.float32).reshape(5, 3)[shard.start:shard.stop]
  writer.write(shard, vectors, ids)
"""


def test_a_kill_costs_one_shard(tmp_path):
  rows = summary(IDS)
  words = (KILLED, str(tmp_path / 'e'), repr(dataclasses.asdict(META)), repr(tuple(rows)))
  child = subprocess.run([sys.executable, '-c', *words], capture_output=True, text=True)
  assert child.returncode == -signal.SIGKILL, child.stderr
  writer = EmbeddingsWriter(tmp_path / 'e', META, rows, 2)
  [shard] = writer.pending()
  assert shard.number == 2
  writer.write(shard, VECTORS[4:], IDS[4:])
  writer.finish()
  fill(tmp_path / 'whole')
  for path in (tmp_path / 'whole').iterdir():
    assert path.read_bytes() == (tmp_path / 'e' / path.name).read_bytes()
  assert len(list((tmp_path / 'e').iterdir())) == len(list((tmp_path / 'whole').iterdir()))


def test_parts_of_a_corpus_are_one(tmp_path):
  fill(tmp_path / 'a')
  fill(tmp_path / 'b', ids=['f', 'g', 'h', 'i', 'j'])
  fill(tmp_path / 'c', dataclasses.replace(META, max_length=9))
  parts = [load_embeddings(tmp_path / name) for name in 'ab']
  both = embeddings.join(parts, '--corpus')
  assert both.ids == list('abcdefghij') and both.fingerprint not in {one.sha256 for one in parts}
  np.testing.assert_array_equal(both.vectors(), np.concatenate([VECTORS, VECTORS]))
  assert both.ids_at(np.array([1, 5, 9])) == ['b', 'f', 'j']
  with refused('--corpus', 'max_length', '256', '9'):
    embeddings.join([parts[0], load_embeddings(tmp_path / 'c')], '--corpus')
  codes_of = []
  for name, scale in (('d', 1.0), ('e', 2.0)):
    meta = dataclasses.replace(META, dtype='int8')
    writer = EmbeddingsWriter(tmp_path / name, meta, summary(IDS), 5)
    writer.calibrate(VECTORS * scale)
    [shard] = writer.pending()
    put_shard(writer, shard)
    writer.finish()
    codes_of.append(load_embeddings(tmp_path / name))
  with refused('--corpus', str(tmp_path / 'e')):
    embeddings.join(codes_of, '--corpus')


def test_the_first_numbers_alone(tmp_path):
  fill(tmp_path)
  found = load_embeddings(tmp_path)
  short = found.cut(2, '--corpus')
  assert found.cut(3, '--corpus') is found and (short.meta.dimension, short.ids) == (2, found.ids)
  # An index that is kept of one is not taken for the other.
  assert short.fingerprint != found.fingerprint == found.sha256 == short.sha256
  np.testing.assert_array_equal(short.vectors(), codes.cut(VECTORS, 2, True))
  with refused('--corpus', '--dimensions=4'):
    found.cut(4, '--corpus')


def test_several_processes_verify_other_files_each(tmp_path):
  fill(tmp_path)
  damage(tmp_path / 'embeddings-00001-of-00003.npy')
  assert len(load_embeddings(tmp_path, process=0, processes=2)) == 5
  with refused('embeddings-00001'):
    load_embeddings(tmp_path, process=1, processes=2)
