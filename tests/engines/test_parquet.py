"""Parquet collections, as other programs read them."""

import contextlib
import shutil

import duckdb
import numpy as np
import pytest
from pyarrow import parquet

from dprjax import engines
from dprjax.engines import parquet as parquet_engine
from tests.engines import test_collection as shared
from tests.refusals import refused


@pytest.fixture
def made(tmp_path):
  with contextlib.closing(engines.connect(f'parquet:{tmp_path}/out', new=True)) as engine:
    yield shared.fill(engine, payloads=shared.PAYLOADS)


def test_duckdb_reads_it(made, tmp_path):
  made.upsert(['d3', 'new'], shared.VECTORS[:2] / 2, payloads=[{'year': 1990}, {'other': 'x'}])
  made.flush()
  files = f"read_parquet('{tmp_path}/out/passages/*.parquet', union_by_name = true)"
  found = duckdb.sql(f"SELECT title, year, tags, vector FROM {files} WHERE id = 'd4'").fetchall()
  ((title, year, tags, vector),) = found
  assert (title, year, tags) == ('On 4', 2004, ['c'])
  np.testing.assert_array_equal(np.float32(vector), shared.VECTORS[4])
  assert duckdb.sql(f'SELECT count(*), count(DISTINCT id) FROM {files}').fetchall() == [(301, 301)]
  assert duckdb.sql(f"SELECT year, title FROM {files} WHERE id = 'd3'").fetchall() == [(1990, None)]
  query = ', '.join(map(str, shared.QUERIES[0].tolist()))
  near = f'array_inner_product(vector::FLOAT[16], [{query}]::FLOAT[16])'
  best = duckdb.sql(f'SELECT id FROM {files} ORDER BY {near} DESC LIMIT 5').fetchall()
  assert [[id_ for (id_,) in best]] == shared.rankings(made.search(shared.QUERIES[:1], 5))


@pytest.mark.slow
def test_lancedb_reads_it(made, tmp_path):
  lancedb = pytest.importorskip('lancedb', reason='the extra dev has it')
  table = lancedb.connect(tmp_path / 'lance').create_table(
    'passages', parquet.read_table(tmp_path / 'out' / 'passages')
  )
  found = table.search(shared.QUERIES[0], vector_column_name='vector').distance_type('dot').limit(5)
  assert [[row['id'] for row in found.to_list()]] == shared.rankings(
    made.search(shared.QUERIES[:1], 5)
  )
  assert table.count_rows("lang = 'de'") == 100


def test_an_upsert_that_has_not_ended_changes_nothing(made, tmp_path):
  made.note({'sha256': 'x', 'rows': 0})
  made.upsert(['d3', 'a'], shared.VECTORS[:2])
  made.upsert(['d4', 'b'], shared.VECTORS[:2])
  again = engines.open_collection(made.engine, 'passages')
  assert len(again) == 300 and again.payloads(['d3']) == [shared.PAYLOADS[3]]
  # The same command begins behind the noted rows, another one at its beginning.
  made.note({'sha256': 'x', 'rows': 2})
  folder = tmp_path / 'out' / 'passages'
  assert len([*folder.glob('.staged*')]) == 1
  made.upsert(['d5', 'c'], shared.VECTORS[:2])
  made.upsert(['c'], shared.VECTORS[5:6])  # the last of two counts
  made.flush()
  assert len(made) == 302 and not [*folder.glob('.staged*')]
  np.testing.assert_array_equal(made.vectors(['c']), shared.VECTORS[5:6])
  made.note({'sha256': 'y', 'rows': 0})
  made.upsert(['z'], shared.VECTORS[:1])
  made.note({'sha256': 'z', 'rows': 0})
  assert not [*folder.glob('.staged*')]


def test_fields_keep_their_type(made):
  made.upsert(['d1'], shared.VECTORS[:1], payloads=[{'year': 'old'}])
  with refused('year'):
    made.flush()
  assert made.payloads(['d1']) == [shared.PAYLOADS[1]] and len(made) == 300


def test_what_else_is_in_the_folder_stays(made, tmp_path):
  other = tmp_path / 'out' / 'passages' / 'mine.txt'
  other.write_text('x')
  with refused('mine.txt'):
    made.drop()
  assert len(made) == 300
  other.unlink()
  shutil.copytree(tmp_path / 'out', tmp_path / 'copy')
  (tmp_path / 'copy' / 'photos').mkdir()
  with refused('copy'):
    engines.connect(f'parquet:{tmp_path}/copy')
  made.drop()
  assert [*(tmp_path / 'out').iterdir()] == []


def test_row_groups_are_read_in_their_order(made, tmp_path, monkeypatch):
  monkeypatch.setattr(parquet_engine, '_GROUP_ROWS', 7)
  with contextlib.closing(engines.connect(f'parquet:{tmp_path}/small', new=True)) as engine:
    small = shared.fill(engine, payloads=shared.PAYLOADS)
    (path,) = (tmp_path / 'small' / 'passages').glob('*.parquet')
    assert parquet.ParquetFile(path).metadata.num_row_groups == 43
    for where in ((), [engines.Condition('lang', '=', ('de',))]):
      found, expected = (one.search(shared.QUERIES, 20, where=where) for one in (small, made))
      assert shared.rankings(found) == shared.rankings(expected)
      np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)
