"""Round trips."""

from dprjax.generation import round_trip
from dprjax.text.read_report import ReadReport


def test_a_query_stays_if_it_finds_its_passage_among_the_first(tmp_path):
  run = tmp_path / 'run.trec'
  rows = [('a', 'd1', 3), ('a', 'd2', 2), ('b', 'd1', 3), ('b', 'd2', 2), ('b', 'd3', 1)]
  run.write_text(''.join(f'{q} Q0 {d} 0 {score} x\n' for q, d, score in rows))
  qrels = {'a': {'d2': 1}, 'b': {'d3': 1, 'd9': 1}, 'c': {'d1': 1}, 'z': {'d1': 0}}
  report = ReadReport()
  assert round_trip.found(qrels, run, 2, report) == {'a': {'d2': 1}}
  assert report.counts == {
    'queries that find their passages': 1,
    'queries left out: not among the first 2': 1,
    'queries left out: not in the run': 2,
  }
  assert set(round_trip.found(qrels, run, 3, ReadReport())) == {'a', 'b'}
