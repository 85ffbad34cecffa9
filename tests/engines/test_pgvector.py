"""Indexes of pgvector, in a real PostgreSQL."""

import contextlib

import numpy as np
import pytest

from dprjax import engines
from dprjax.retrieval import exact
from tests.engines import test_collection as shared
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
  with (
    shared.served('pgvector', tmp_path_factory.mktemp('pgvector')) as address,
    contextlib.closing(engines.connect(address, new=True)) as connected,
  ):
    yield connected


def test_an_index_is_used(engine):
  rng = np.random.default_rng(1)
  centres = rng.standard_normal((50, 16), np.float32)
  vectors = centres[rng.integers(0, 50, 5000)] + 0.3 * rng.standard_normal((5000, 16), np.float32)
  queries = vectors[::500] + 0.1 * rng.standard_normal((10, 16), np.float32)
  ids = [f'd{row}' for row in range(5000)]
  payloads = [{'year': row % 100} for row in range(5000)]
  made = shared.fill(
    engine, 'many', ids=ids, vectors=vectors, payloads=payloads, index_type='HNSW_HALF'
  )
  truth = exact.search(queries, vectors, 20)
  found = made.search(queries, 20)
  shares = [
    len({*one} & {*other})
    for one, other in zip(shared.rankings(found), shared.named(truth.rows, ids), strict=True)
  ]
  assert np.mean(shares) > 19
  np.testing.assert_allclose(found.scores[:, 0], truth.scores[:, 0], rtol=1e-4)
  # A condition that few meet: the index goes on until there are enough.
  rare = [engines.parse_condition('year=7')]
  assert all(len(one) == 20 for one in shared.rankings(made.search(queries, 20, where=rare)))
  with engine.client.transaction():
    engine.client.execute('SET LOCAL enable_seqscan = off')
    near = 'vector::halfvec(16) <#> %s::vector::halfvec(16)'
    query = f'EXPLAIN SELECT id FROM many ORDER BY {near} LIMIT 5'
    plan = engine.client.execute(query, [queries[0]])
    assert any('many_dprjax' in line for (line,) in plan)
  # An index that is there is kept.
  made.upsert(['d1'], 3 * queries[:1])
  made.flush()
  assert shared.rankings(made.search(queries[:1], 1)) == [['d1']] and len(made) == 5000
  made.drop()


def test_more_dimensions_than_an_index_has(engine):
  for dimension, kind in ((2001, 'HNSW_HALF'), (4001, 'FLAT')):
    space = shared.SPACE | {'dimension': dimension}
    made = engines.create(engine, 'long', space)
    vectors = np.eye(3, dimension, dtype=np.float32)
    made.upsert(['a', 'b', 'c'], vectors)
    made.flush()
    assert made.kind == kind and shared.rankings(made.search(vectors[1:2], 1)) == [['b']]
    made.drop()
    with refused('--index_type=HNSW'):
      engines.create(engine, 'long', space, index_type='HNSW')
  assert not engines.exists(engine, 'long')
