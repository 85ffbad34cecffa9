"""How good a run is: ir_measures' arithmetic, with the counts that one should see beside a mean."""

import ast
import re
from collections.abc import Sequence
from typing import TypedDict

import ir_measures

from dprjax.base.errors import InputError
from dprjax.formats.qrels import Qrels
from dprjax.formats.trec import Run

DEFAULT_MEASURES = ('nDCG@10', 'RR@10', 'R@100', 'R@1000', 'AP', 'Success@1', 'Success@10')

# Queries handed to ir_measures at a time: it wants a dictionary of Python numbers, some 200 bytes a
# row.
_QUERIES_AT_ONCE = 500


class Metrics(TypedDict):
  """The form of metrics.json: means, values by measure and query, and what was counted."""

  mean: dict[str, float]
  per_query: dict[str, dict[str, float]]
  counts: dict[str, int]


def measure(run: Run, qrels: Qrels, measures: Sequence[str] = DEFAULT_MEASURES) -> Metrics:
  """Evaluates as ``trec_eval -c`` and BEIR do: over every judged query, 0 for those that the run
  has nothing for.

  The counts: ``queries`` judged, of them ``missing`` from the run and ``without_relevant``
  documents; ``unjudged_queries`` of the run, which are left out; ``relevant`` judgements and
  ``retrieved`` documents of the judged queries.

  Raises:
    InputError: a measure that ir_measures does not have, or no query that both the run and the
      judgements know.
  """
  parsed = parse_measures(measures)
  place = {query_id: number for number, query_id in enumerate(run.query_ids)}
  found = {
    query_id
    for query_id in qrels
    if query_id in place and run.offsets[place[query_id]] < run.offsets[place[query_id] + 1]
  }
  if not found:
    raise InputError(
      f'none of the {len(qrels)} judged queries is in the run (judged: {_some(qrels)}; in the run: '
      f'{_some(run.query_ids)})'
    )
  aggregators = {name: parsed[name].aggregator() for name in parsed}
  values: dict[str, dict[str, float]] = {name: {} for name in parsed}
  names = {parsed[name]: name for name in parsed}
  retrieved = 0
  query_ids = list(qrels)
  for start in range(0, len(query_ids), _QUERIES_AT_ONCE):
    some = query_ids[start : start + _QUERIES_AT_ONCE]
    rankings: dict[str, dict[str, float]] = {}
    for query_id in some:
      if query_id in found:
        rows = slice(run.offsets[place[query_id]], run.offsets[place[query_id] + 1])
        documents = [run.doc_ids[doc] for doc in run.docs[rows].tolist()]
        rankings[query_id] = dict(zip(documents, run.scores[rows].tolist(), strict=True))
        retrieved += len(documents)
    for metric in ir_measures.iter_calc(
      list(names), {query_id: qrels[query_id] for query_id in some}, rankings
    ):
      aggregators[names[metric.measure]].add(metric.value)
      values[names[metric.measure]][metric.query_id] = float(metric.value)
  counts = {
    'queries': len(qrels),
    'missing': len(qrels) - len(found),
    'without_relevant': sum(max(judged.values()) < 1 for judged in qrels.values()),
    'unjudged_queries': sum(query_id not in qrels for query_id in run.query_ids),
    'relevant': sum(relevance > 0 for judged in qrels.values() for relevance in judged.values()),
    'retrieved': retrieved,
  }
  return {
    'mean': {name: float(aggregators[name].result()) for name in parsed},
    'per_query': {
      name: {query_id: values[name][query_id] for query_id in query_ids} for name in parsed
    },
    'counts': counts,
  }


def parse_measures(names: Sequence[str]) -> dict[str, ir_measures.Measure]:
  """Measures by their names, ``nDCG@10``, ``AP(rel=2)@100``.

  ir_measures' own parser uses nodes that Python 3.12 deprecated and 3.14 removed.

  Raises:
    InputError: a name that ir_measures does not know, or parameters that the measure does not take.
  """
  parsed = {}
  for name in names:
    match = re.fullmatch(r'(\w+)(?:\((.*)\))?(?:@([1-9]\d*))?', name.strip())
    kind = ir_measures.measures.registry.get(match[1]) if match else None
    if match is None or kind is None:
      raise InputError(
        f"unknown measure {name!r}: give one of ir_measures', such as nDCG@10, RR@10, R@100, AP, "
        'Success@5, P(rel=2)@10'
      )
    try:
      arguments = {
        key.strip(): ast.literal_eval(value.strip())
        for key, value in (part.split('=') for part in (match[2] or '').split(',') if part)
      }
      if match[3]:
        arguments[kind.AT_PARAM] = int(match[3])
      wanted = kind(**arguments) if arguments else kind
      wanted.validate_params()
      if not ir_measures.DefaultPipeline.supports(wanted):
        raise ValueError('no installed provider computes it')
    except (ValueError, TypeError, SyntaxError, AssertionError) as error:
      raise InputError(f'the measure {name!r} cannot be computed: {error}') from error
    parsed[str(wanted)] = wanted
  return parsed


def _some(ids: Sequence[str] | Qrels) -> str:
  return ', '.join(list(ids)[:3]) + (', ...' if len(ids) > 3 else '') if ids else 'none'
