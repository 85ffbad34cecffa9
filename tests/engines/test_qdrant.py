"""The embedded mode of the client of Qdrant, on a folder; each point there is a transaction."""

import contextlib

import numpy as np
import pytest

from dprjax import engines
from dprjax.retrieval import exact
from tests.engines import test_collection as shared


@pytest.mark.slow
def test_a_folder_outlives_its_connection(tmp_path):
  pytest.importorskip('qdrant_client', reason="pip install 'dprjax[qdrant]'")  # a second
  address = f'qdrant:{tmp_path}/index'
  ids, vectors = shared.IDS[:20], shared.VECTORS[:20]
  with contextlib.closing(engines.connect(address, new=True)) as engine:
    made = shared.fill(engine, ids=ids, vectors=vectors, payloads=shared.PAYLOADS[:20])
    made.note({'sha256': 'x', 'rows': 20})
    assert made.kind == 'FLAT'
  with contextlib.closing(engines.connect(address)) as engine:
    again = engines.open_collection(engine, 'passages')
    assert again.record.loading == {'sha256': 'x', 'rows': 20} and again.space == shared.SPACE
    again.upsert(['d1'], 2 * vectors[1:2])
    assert again.delete(['d0', 'never']) == ['never'] and len(again) == 19
    changed = np.concatenate([2 * vectors[1:2], vectors[2:]])
    expected = exact.search(shared.QUERIES, changed, 5).rows
    found = again.search(shared.QUERIES, 5)
    assert shared.rankings(found) == shared.named(expected, ids[1:])
    (only,) = shared.rankings(
      again.search(shared.QUERIES[:1], 5, where=[engines.parse_condition('year=3')])
    )
    assert only == [] and again.payloads(['d2']) == [shared.PAYLOADS[2]]
