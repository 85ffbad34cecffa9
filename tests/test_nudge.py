"""The command against its closed form, on small folders of embeddings."""

import numpy as np
import pytest

from dprjax import nudge
from dprjax.formats.qrels import write_qrels
from dprjax.retrieval import nudging
from dprjax.retrieval.embeddings import load_embeddings
from tests.refusals import command_refused


def unit(x):
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def folders(tmp_path, write_embeddings):
  """Passages of 8 topics far from the queries about them, which agree with each other."""
  draw = np.random.default_rng(0)
  topics, corpus = draw.standard_normal((8, 16)), draw.standard_normal((90, 16))
  about = np.arange(40) % 8
  queries = topics[about] + 0.3 * draw.standard_normal((40, 16))
  ids = [f'd{row}' for row in range(90)]
  write_embeddings(tmp_path / 'corpus', ids, unit(corpus), normalize=True)
  names = [f'q{row}' for row in range(40)]
  write_embeddings(tmp_path / 'queries', names, unit(queries), normalize=True, side='query')
  write_qrels(
    tmp_path / 'train.tsv', {q: {f'd{row}': 1} for q, row in zip(names, about, strict=True)}
  )
  return tmp_path


def flags(folder, **changes):
  named = {'corpus': 'corpus', 'queries': 'queries', 'qrels': 'train.tsv', 'out': 'nudged'}
  return [f'--{name}={folder / path}' for name, path in (named | changes).items()]


def test_judged_passages_move_and_the_rest_stays(folders, command):
  status, log = command(nudge, *flags(folders))
  assert status == 0, log
  before, after = (load_embeddings(folders / name) for name in ('corpus', 'nudged'))
  assert after.ids == before.ids and after.meta.space() == before.meta.space()
  assert after.meta.nudged_sha256 and len(after.seen['train']) == 40
  old, new = before.vectors(), after.vectors()
  np.testing.assert_array_equal(new[8:], old[8:])
  queries = load_embeddings(folders / 'queries').vectors()
  sums = np.stack([queries[row::8].sum(axis=0) for row in range(8)])
  expected = [nudging.move(old[:8], sums, bound, True) for bound in nudging.BOUNDS[1:]]
  assert any(np.allclose(new[:8], one, atol=1e-6) for one in expected)
  assert 'that share passages with other training queries' in log
  command_refused(command(nudge, *flags(folders, corpus='nudged', out='x')), folders / 'nudged')


def test_nothing_is_written_where_no_distance_gains(folders, command):
  """Only one query has each passage."""
  write_qrels(folders / 'train.tsv', {f'q{row}': {f'd{row}': 1} for row in range(40)})
  command_refused(command(nudge, *flags(folders)), folders / 'train.tsv', folders / 'corpus')
  assert not (folders / 'nudged').exists()


def test_folders_that_do_not_go(folders, command, write_embeddings):
  command_refused(command(nudge, *flags(folders, corpus='queries')), '--corpus')
  write_qrels(folders / 'few.tsv', {'q1': {'d1': 1}})
  command_refused(command(nudge, *flags(folders, qrels='few.tsv')), folders / 'few.tsv', '10')
  other = np.eye(16, dtype=np.float32)
  names = [f'q{row}' for row in range(16)]
  write_embeddings(folders / 'other', names, other, side='query', pooling='cls')
  command_refused(command(nudge, *flags(folders, queries='other')), 'pooling')
