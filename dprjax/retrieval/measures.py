"""Measures of a run, computed by ir_measures, and counts to read beside the means.

nAP@k is average precision as sentence-transformers and Topic-DPR have it: the mean of the precision
at each relevant document among the first k, over min(k, R), so that it can reach 1 for a query of
R relevant documents. ir_measures' AP@k divides by all R.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

import ir_measures

from dprjax.base.errors import InputError
from dprjax.formats.qrels import Qrels
from dprjax.formats.trec import Run

DEFAULT_MEASURES = ('nDCG@10', 'RR@10', 'R@100', 'R@1000', 'AP', 'Success@1', 'Success@10')

_NORMALIZED = ('nAP@', 'nAP(')

# Queries given to ir_measures at a time: it takes dictionaries, some 200 bytes a row.
_QUERIES_AT_ONCE = 500
_LARGEST = 10**9  # cutoff or grade
_NO_MEASURE = (ValueError, TypeError, SyntaxError, AssertionError, RecursionError, MemoryError)


class Metrics(TypedDict):
  """The content of metrics.json: means, values by measure and query, and counts."""

  mean: dict[str, float]
  per_query: dict[str, dict[str, float]]
  counts: dict[str, int]


def measure(run: Run, qrels: Qrels, measures: Sequence[str] = DEFAULT_MEASURES) -> Metrics:
  """Evaluates as ``trec_eval -c`` and BEIR do: a judged query without results counts as 0.

  The counts: ``queries`` judged, of them ``missing`` from the run and ``without_relevant``
  documents; ``unjudged_queries`` of the run, which are left out; ``relevant`` judgements and
  ``retrieved`` documents of the judged queries.

  Raises:
    InputError: a measure that ir_measures does not have, or no query is in both the run and the
      judgements.
  """
  parsed = parse_measures(measures)
  names: dict[ir_measures.Measure, list[str]] = {}
  for name, kind in parsed.items():
    names.setdefault(kind, []).append(name)
  rows = {
    query_id: slice(start, stop)
    for query_id, start, stop in zip(
      run.query_ids, run.offsets[:-1].tolist(), run.offsets[1:].tolist(), strict=True
    )
    if query_id in qrels and start < stop
  }
  if not rows:
    raise InputError(
      f'none of the {len(qrels)} judged queries is in the run (judged: {_some(qrels)}; in the run: '
      f'{_some(run.query_ids)})'
    )
  aggregators = {name: kind.aggregator() for name, kind in parsed.items()}
  values: dict[str, dict[str, float]] = {name: {} for name in parsed}
  query_ids = list(qrels)
  for first in range(0, len(query_ids), _QUERIES_AT_ONCE):
    chunk = query_ids[first : first + _QUERIES_AT_ONCE]
    rankings = {
      query_id: {
        run.doc_ids[doc]: score
        for doc, score in zip(
          run.docs[rows[query_id]].tolist(), run.scores[rows[query_id]].tolist(), strict=True
        )
      }
      for query_id in chunk
      if query_id in rows
    }
    judged = {query_id: qrels[query_id] for query_id in chunk}
    for metric in _computed(list(names), judged, rankings):
      for name in names[metric.measure]:
        value = metric.value
        if not math.isfinite(value):
          raise InputError(f'{name} of query {metric.query_id} is {value}, no finite number')
        if name.startswith(_NORMALIZED):
          value = _normalized(value, metric.measure, judged[metric.query_id])
        aggregators[name].add(value)
        values[name][metric.query_id] = float(value)
  counts = {
    'queries': len(qrels),
    'missing': len(qrels) - len(rows),
    'without_relevant': sum(max(judged.values()) < 1 for judged in qrels.values()),
    'unjudged_queries': sum(query_id not in qrels for query_id in run.query_ids),
    'relevant': sum(relevance > 0 for judged in qrels.values() for relevance in judged.values()),
    'retrieved': sum(part.stop - part.start for part in rows.values()),
  }
  return {
    'mean': {name: float(aggregators[name].result()) for name in parsed},
    'per_query': {
      name: {query_id: values[name][query_id] for query_id in query_ids} for name in parsed
    },
    'counts': counts,
  }


def _computed(
  kinds: Sequence[ir_measures.Measure], judged: Qrels, rankings: dict[str, dict[str, float]]
) -> list[ir_measures.Metric]:
  try:
    return list(ir_measures.iter_calc(list(kinds), judged, rankings))
  except MemoryError:
    raise
  except Exception as error:  # of a provider, which does not check what it is given
    raise InputError(
      f'the measures {", ".join(map(str, kinds)):.200} cannot be computed of these judgements: '
      f'{type(error).__name__}: {error}'
    ) from error


def _normalized(value: float, kind: ir_measures.Measure, judged: Mapping[str, int]) -> float:
  """nAP@k from AP@k, which is over all R relevant documents."""
  relevant = sum(grade >= kind['rel'] for grade in judged.values())
  # Rounding must not lead above 1.
  return min(value * relevant / min(kind['cutoff'], relevant), 1.0) if relevant else 0.0


def parse_measures(names: Sequence[str]) -> dict[str, ir_measures.Measure]:
  """Measures by their names: ``nDCG@10``, ``AP(rel=2)@100``; ``nAP@10`` is AP@10's, see the module.

  Not by ir_measures' own parser, which needs parts of Python that 3.14 removed.

  Raises:
    InputError: an unknown name, or parameters that the measure does not take.
  """
  parsed = {}
  for name in names:
    name = name.strip()
    normalized = name.startswith(_NORMALIZED)
    match = re.fullmatch(
      r'(\w+)(?:\((.*)\))?(?:@([1-9]\d*))?', name[1:] if normalized else name, re.ASCII
    )
    kind = ir_measures.measures.registry.get(match[1]) if match else None
    if normalized and (match is None or not match[3]):
      raise InputError(f'the measure {name!r} needs a cutoff, as nAP@10 has')
    if match is None or kind is None:
      raise InputError(
        f"unknown measure {name!r:.80}: give one of ir_measures', such as nDCG@10, RR@10, R@100, "
        'AP, Success@5, P(rel=2)@10'
      )
    try:
      arguments = {
        key.strip(): ast.literal_eval(value.strip())
        for key, value in (part.split('=') for part in (match[2] or '').split(',') if part)
      }
      if match[3]:
        arguments[kind.AT_PARAM] = int(match[3])
      if any(isinstance(value, int) and abs(value) > _LARGEST for value in arguments.values()):
        raise ValueError(f'a number in it is above {_LARGEST:,}')
      wanted = kind(**arguments) if arguments else kind
      wanted.validate_params()
      if not ir_measures.DefaultPipeline.supports(wanted):
        raise ValueError('no installed provider computes it')
    except _NO_MEASURE as error:
      raise InputError(f'the measure {name!r:.80} cannot be computed: {error}') from error
    parsed[f'n{wanted}' if normalized else str(wanted)] = wanted
  return parsed


def _some(ids: Sequence[str] | Qrels) -> str:
  return ', '.join(list(ids)[:3]) + (', ...' if len(ids) > 3 else '') if ids else 'none'
