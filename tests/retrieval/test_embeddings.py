import dataclasses
import json

import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.retrieval.embeddings import EmbeddingsWriter, Meta, load_embeddings

META = Meta(
  dimension=3,
  dtype='float32',
  kind='passage',
  backbone_sha256='b' * 64,
  prompt_sha256=None,
  pooling='mean',
  normalize=True,
  max_length=256,
  input_sha256='i' * 64,
)
IDS = ['a', 'b', 'c', 'd', 'e']
VECTORS = np.arange(15, dtype=np.float32).reshape(5, 3)


def fill(folder, meta=META, ids=IDS, shard_rows=2, stop_after=None):
  """Writes VECTORS; returns the indices of the shards that were written."""
  writer = EmbeddingsWriter(folder, meta, ids, shard_rows)
  written = []
  for shard in writer.pending()[:stop_after]:
    writer.write(shard, VECTORS[shard.start : shard.stop])
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


def test_float16(tmp_path):
  meta = dataclasses.replace(META, dtype='float16')
  fill(tmp_path, meta)
  found = load_embeddings(tmp_path)
  assert found.shards[0].dtype == np.float16 and found.vectors().dtype == np.float32
  np.testing.assert_array_equal(found.vectors(), VECTORS)
  writer = EmbeddingsWriter(tmp_path / 'large', meta, ['a'])
  with pytest.raises(InputError, match=r"embedding of 'a' is not finite as float16"):
    writer.write(writer.pending()[0], np.full((1, 3), 1e5, np.float32))


def test_continues_where_it_stopped(tmp_path):
  folder = tmp_path / 'e'
  assert fill(folder, stop_after=2) == [0, 1]
  with pytest.raises(InputError, match='unfinished'):
    load_embeddings(folder)
  (folder / '.embeddings-00002-of-00003.npy.12345678.tmp').write_bytes(b'half')
  assert fill(folder) == [2]
  np.testing.assert_array_equal(load_embeddings(folder).vectors(), VECTORS)
  assert not list(folder.glob('.*'))
  assert fill(folder) == []  # finished: nothing to do


def test_a_damaged_shard_is_detected_and_rewritten(tmp_path):
  fill(tmp_path)
  damage(tmp_path / 'embeddings-00001-of-00003.npy')
  with pytest.raises(InputError, match=r'embeddings-00001-of-00003\.npy was changed or damaged'):
    load_embeddings(tmp_path)
  assert len(load_embeddings(tmp_path, verify=False)) == 5
  assert fill(tmp_path, stop_after=0) == []
  with pytest.raises(InputError, match='unfinished'):
    load_embeddings(tmp_path)
  assert fill(tmp_path) == [1]
  np.testing.assert_array_equal(load_embeddings(tmp_path).vectors(), VECTORS)


@pytest.mark.parametrize(
  'change, message',
  [
    (
      lambda f: (f / 'embeddings-00002-of-00003.npy').unlink(),
      'shard not found: .*embeddings-00002',
    ),
    (lambda f: (f / 'ids-00000-of-00003.txt').unlink(), 'shard not found: .*ids-00000'),
    (
      lambda f: (f / 'ids-00000-of-00003.txt').write_text('a\n'),
      '1 ids, but manifest.json says float32',
    ),
    (
      lambda f: (f / 'embeddings-00000-of-00003.npy').write_bytes(b'\x93NUMPY'),
      'not a whole .npy file',
    ),
    (
      lambda f: np.save(f / 'embeddings-00000-of-00003.npy', VECTORS),
      r'float32 \(5, 3\) with 2 ids',
    ),
    (
      lambda f: np.save(f / 'embeddings-00000-of-00003.npy', np.array([{}], object)),
      'not a whole .npy file',
    ),
    (lambda f: (f / 'manifest.json').write_text('{}'), 'is not a dprjax.embeddings manifest'),
    (lambda f: (f / 'manifest.json').write_text('{"format": '), 'manifest is not JSON'),
    (lambda f: (f / 'manifest.json').unlink(), 'holds no embeddings'),
    (lambda f: edit(f, 'rows', 9), '5 rows in the shards, but manifest.json says 9'),
    (lambda f: edit(f, 'version', 2), 'version 2, expected 1'),
    (lambda f: edit(f, 'pooling', None), r"incomplete \('pooling'\)"),
  ],
)
def test_bad_folders(tmp_path, change, message):
  fill(tmp_path)
  change(tmp_path)
  with pytest.raises(InputError, match=message):
    load_embeddings(tmp_path, verify=False)


def edit(folder, key, value):
  manifest = json.loads((folder / 'manifest.json').read_text())
  manifest[key] = value
  if value is None:
    del manifest[key]
  (folder / 'manifest.json').write_text(json.dumps(manifest))


def test_no_folder(tmp_path):
  with pytest.raises(InputError, match='embeddings not found'):
    load_embeddings(tmp_path / 'nowhere')


@pytest.mark.parametrize(
  'change',
  [
    {'meta': dataclasses.replace(META, prompt_sha256='p' * 64)},
    {'meta': dataclasses.replace(META, input_sha256='j' * 64)},
    {'ids': ['a', 'b', 'c', 'd', 'x']},
    {'shard_rows': 3},
  ],
)
@pytest.mark.parametrize('stop_after', [1, None])
def test_a_folder_of_another_model_is_kept(tmp_path, change, stop_after):
  fill(tmp_path, stop_after=stop_after)
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  with pytest.raises(InputError, match='holds other embeddings'):
    fill(tmp_path, **change)
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_of_something_else_is_kept(tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  with pytest.raises(InputError, match='is not empty and holds no embeddings'):
    fill(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


@pytest.mark.parametrize(
  'ids, message',
  [
    ([], 'nothing to encode'),
    (['a', 'a'], "row 2: the id 'a' is there twice; ids must be unique"),
    (['a', ''], "row 2: the id '' is empty"),
    (['a b'], "row 1: the id 'a b'"),
    (['a\u2028'], 'row 1'),
  ],
)
def test_bad_ids(tmp_path, ids, message):
  with pytest.raises(InputError, match=message):
    EmbeddingsWriter(tmp_path / 'e', META, ids)
  assert not (tmp_path / 'e').exists()


def test_bad_vectors(tmp_path):
  writer = EmbeddingsWriter(tmp_path, META, IDS, shard_rows=2)
  shard = writer.pending()[0]
  with pytest.raises(InputError, match=r'shape \(2, 4\), expected \(2, 3\)'):
    writer.write(shard, np.zeros((2, 4), np.float32))
  with pytest.raises(InputError, match=r"embedding of 'b' is not finite"):
    writer.write(shard, np.array([[0, 0, 0], [0, np.nan, 0]], np.float32))
  with pytest.raises(RuntimeError, match='3 of 3 shards are not written'):
    writer.finish()


def test_space_is_what_queries_and_passages_share():
  free = {'kind': 'query', 'max_length': 32, 'dtype': 'float16', 'input_sha256': 'q'}
  assert META.space() == dataclasses.replace(META, **free).space()
  assert META.space() != dataclasses.replace(META, prompt_sha256='p').space()


def test_several_processes_fill_one_folder(tmp_path):
  ids = [f'd{i}' for i in range(10)]
  vectors = np.arange(30, dtype=np.float32).reshape(10, 3)

  def fill(folder, processes, skip=()):
    """Each process opens the folder, then writes every ``processes``-th shard, then finishes."""
    writers = [EmbeddingsWriter(folder, META, ids, 2, process=i) for i in range(processes)]
    written = []
    for i, writer in enumerate(writers):
      for shard in writer.pending()[i::processes]:
        if shard.number not in skip:
          writer.write(shard, vectors[shard.start : shard.stop])
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


def test_a_damaged_shard_is_written_again_by_any_process(tmp_path):
  fill(tmp_path)
  next(tmp_path.glob('embeddings-00001*')).write_bytes(b'')
  writers = [EmbeddingsWriter(tmp_path, META, IDS, 2, process=i) for i in range(2)]
  assert [writer.pending() for writer in writers] == [[(1, 2, 4)]] * 2


def test_several_processes_verify_other_files_each(tmp_path):
  fill(tmp_path)
  damage(tmp_path / 'embeddings-00001-of-00003.npy')
  assert len(load_embeddings(tmp_path, process=0, processes=2)) == 5
  with pytest.raises(InputError, match='embeddings-00001'):
    load_embeddings(tmp_path, process=1, processes=2)
