"""Measures of a run, computed by ir_measures, with counts.

The providers of ir_measures break ties differently, and some change ids. They get ranks as scores
and numbers as ids, so every measure uses the order of `dprjax.base.ranking`. pytrec_eval allocates
an array as long as the largest grade and crashes on negative ones, so it gets 1 (relevant), 0 and
-1 (judged below 0). nDCG, which needs the grades, and NumRet are computed here.

nAP@k is average precision as in sentence-transformers and Topic-DPR: the mean of the precision at
each relevant document among the first k, over min(k, R) for R relevant documents. AP@k of
ir_measures divides by R.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import ir_measures

from dprjax.base.errors import InputError
from dprjax.base.ranking import dcg
from dprjax.text.qrels import Qrels
from dprjax.text.trec import Run

DEFAULT_MEASURES = ('nDCG@10', 'RR@10', 'R@100', 'R@1000', 'AP', 'Success@1', 'Success@10')

_NORMALIZED = ('nAP@', 'nAP(')

# By other names, in lower case without _. In sentence-transformers, accuracy is Success.
_BY_OTHERS = {name.lower().replace('_', ''): name for name in ir_measures.measures.registry} | {
  'nap': 'nAP',
  'reciprank': 'RR',
  'setrecall': 'SetR',
  'setmap': 'SetAP',
  'hitrate': 'Success',
  'iprecatrecall': 'IPrec',
}
del _BY_OTHERS['accuracy']

# Queries for ir_measures at a time: its dictionaries take 200 bytes a row.
_QUERIES_AT_ONCE = 500
_LARGEST = 10**9  # cutoff or grade
_LARGEST_OF_GDEVAL = 4
_RECALLS = frozenset(round(percent / 100, 2) for percent in range(101))  # pytrec_eval rounds others
_NO_MEASURE = (
  NameError,
  ValueError,
  TypeError,
  LookupError,
  AttributeError,
  AssertionError,
  RecursionError,
  MemoryError,
)


class Metrics(TypedDict):
  """The content of metrics.json: means, values by measure and query, and counts."""

  mean: dict[str, float]
  per_query: dict[str, dict[str, float]]
  counts: dict[str, int]


def measure(run: Run, qrels: Qrels, measures: Sequence[str] = DEFAULT_MEASURES) -> Metrics:
  """Evaluates like ``trec_eval -c`` and BEIR: a judged query without results counts as 0.

  Counts: judged ``queries``, how many are ``missing`` from the run or ``without_relevant``
  documents; ``unjudged_queries`` of the run; ``relevant`` judgements and ``retrieved`` documents of
  the judged queries.
  """
  parsed = parse_measures(measures)
  judged = {query_id: grades for query_id, grades in qrels.items() if grades}
  each = zip(run.query_ids, run.offsets[:-1].tolist(), run.offsets[1:].tolist(), strict=True)
  rows = {id_: slice(start, stop) for id_, start, stop in each if id_ in judged and start < stop}
  if not rows:
    raise InputError(
      f'no judged query is in the run (judged: {_some(judged)}; in the run: {_some(run.query_ids)})'
    )
  names: dict[ir_measures.Measure, list[str]] = {}
  for name, kind in parsed.items():
    names.setdefault(kind, []).append(name)
  # Accuracy lacks some queries.
  per_query = {name: dict.fromkeys(judged, float(kind.DEFAULT)) for name, kind in parsed.items()}
  query_ids = list(judged)
  for first in range(0, len(query_ids), _QUERIES_AT_ONCE):
    some = query_ids[first : first + _QUERIES_AT_ONCE]
    rankings = {
      id_: [run.doc_ids[doc] for doc in run.docs[rows[id_]].tolist()] for id_ in some if id_ in rows
    }
    for kind, id_, value in _computed(list(names), {id_: judged[id_] for id_ in some}, rankings):
      for name in names[kind]:
        if name.startswith(_NORMALIZED):
          per_query[name][id_] = _normalized(value, kind, judged[id_])
        else:
          per_query[name][id_] = float(value)
  means = {}
  for name, kind in parsed.items():
    aggregator = kind.aggregator()
    for value in per_query[name].values():
      aggregator.add(value)
    means[name] = float(aggregator.result())
  return {
    'mean': means,
    'per_query': per_query,
    'counts': {
      'queries': len(judged),
      'missing': len(judged) - len(rows),
      'without_relevant': sum(max(grades.values()) < 1 for grades in judged.values()),
      'unjudged_queries': sum(query_id not in judged for query_id in run.query_ids),
      'relevant': sum(grade > 0 for grades in judged.values() for grade in grades.values()),
      'retrieved': sum(part.stop - part.start for part in rows.values()),
    },
  }


def _computed(
  kinds: Sequence[ir_measures.Measure], judged: Qrels, rankings: Mapping[str, Sequence[str]]
) -> Iterator[tuple[ir_measures.Measure, str, float]]:
  """Yields (measure, query id, value). ``rankings``: documents by query, best first."""
  query_ids = list(judged)
  ours = [kind for kind in kinds if _is_ours(kind)]
  for kind in ours:
    for query_id in query_ids:
      ranking = rankings.get(query_id, ())
      value = _ndcg(kind, judged[query_id], ranking) if kind.NAME == 'nDCG' else len(ranking)
      yield kind, query_id, value
  places = {query_id: str(place) for place, query_id in enumerate(query_ids)}
  numbers: dict[str, str] = {}

  def number(doc_id: str) -> str:
    return numbers.setdefault(doc_id, str(len(numbers)))

  ranked = {
    places[query_id]: {
      number(doc_id): float(len(ranking) - place) for place, doc_id in enumerate(ranking)
    }
    for query_id, ranking in rankings.items()
  }
  graded = {
    places[query_id]: {number(doc_id): grade for doc_id, grade in grades.items()}
    for query_id, grades in judged.items()
  }
  by_level: dict[int | None, list[ir_measures.Measure]] = {}
  for kind in kinds:
    if kind not in ours:
      by_level.setdefault(_level(kind), []).append(kind)
  for level, some in by_level.items():
    qrels = graded if level is None else _binary(graded, level)
    # Grades are 0 and 1 now.
    originals = {kind(rel=1) if level and 'rel' in kind.params else kind: kind for kind in some}
    try:
      if any(map(ir_measures.gdeval.supports, some)) and _largest(judged) > _LARGEST_OF_GDEVAL:
        raise ValueError(f'a grade of {_largest(judged)} is above {_LARGEST_OF_GDEVAL}')
      metrics = list(ir_measures.iter_calc(list(originals), qrels, ranked))
      if not all(math.isfinite(metric.value) for metric in metrics):
        raise ValueError('a value is not finite')
    except MemoryError:
      raise
    except Exception as error:  # providers do not check their input
      raise InputError(
        f'cannot compute {", ".join(map(str, some)):.200} of these judgements: '
        f'{type(error).__name__}: {error}'
      ) from error
    for metric in metrics:
      yield originals[metric.measure], query_ids[int(metric.query_id)], metric.value


def _is_ours(kind: ir_measures.Measure) -> bool:
  """Whether a measure is computed here: nDCG, and NumRet of all grades.

  ir_measures 0.4 takes NumRet from other measures, even if they drop unjudged documents.
  """
  if kind.NAME == 'NumRet':
    return 'rel' not in kind.params
  return kind.NAME == 'nDCG' and kind['dcg'] == 'log2'


def _largest(judged: Qrels) -> int:
  return max(max(grades.values()) for grades in judged.values())


def _level(kind: ir_measures.Measure) -> int | None:
  """The lowest relevant grade; None if a measure uses grades."""
  if not ir_measures.pytrec_eval.supports(kind):
    return None
  return kind.params.get('rel', 1)


def _binary(graded: Qrels, level: int) -> Qrels:
  """1 from the level on, else 0; -1 for grades below 0, which Bpref and infAP leave out.

  A query of negative grades gets 0 for all: the native code crashes on a query with only -1.
  """
  junk = {query: -1 if max(grades.values()) >= 0 else 0 for query, grades in graded.items()}
  return {
    query: {
      doc: int(grade >= level) if grade >= 0 else junk[query] for doc, grade in grades.items()
    }
    for query, grades in graded.items()
  }


def _ndcg(kind: ir_measures.Measure, grades: Mapping[str, int], ranking: Sequence[str]) -> float:
  """nDCG as in trec_eval: the gain is the grade, and negative grades count as not judged."""
  gain_of = kind.params.get('gains', {})
  gains = {doc: gain_of.get(grade, grade) for doc, grade in grades.items()}
  if kind['judged_only']:
    ranking = [doc for doc in ranking if gains.get(doc, -1) >= 0]
  cutoff = kind.params.get('cutoff')
  ideal = dcg(sorted(gains.values(), reverse=True)[:cutoff])
  return dcg([gains.get(doc, 0) for doc in ranking[:cutoff]]) / ideal if ideal else 0.0


def _normalized(value: float, kind: ir_measures.Measure, judged: Mapping[str, int]) -> float:
  relevant = sum(grade >= kind['rel'] for grade in judged.values())
  # Guards against rounding above 1.
  return min(value * relevant / min(kind['cutoff'], relevant), 1.0) if relevant else 0.0


def parse_measures(names: Sequence[str]) -> dict[str, ir_measures.Measure]:
  """Measures by name: ``nDCG@10``, ``AP(rel=2)@100``; ``nAP@10`` maps to AP@10.

  Names of trec_eval and in lower case, ``ndcg_cut_10`` and ``mrr@10``, are understood.
  """
  parsed = {}
  for name in map(_as_here, names):
    normalized = name.startswith(_NORMALIZED)
    try:
      with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # for its use of ast
        kind = ir_measures.parse_measure(name[normalized:])
      _check_parameters(kind)
      if normalized and 'cutoff' not in kind.params:
        raise ValueError('it needs a cutoff, as nAP@10 has')
    except _NO_MEASURE as error:
      raise InputError(
        f'the measure {name!r:.80} cannot be computed ({error!s:.200}); use names of ir_measures, '
        'such as nDCG@10, RR@10, P(rel=2)@10'
      ) from error
    parsed[f'n{kind}' if normalized else str(kind)] = kind
  return parsed


def _as_here(name: str) -> str:
  form = re.fullmatch(
    r'(\w{1,20}?)(?:(?:(?:_cut)?[_.@]|_at_)(\d+(?:\.\d+)?))?', name := name.strip()
  )
  ours = form and _BY_OTHERS.get(form[1].lower().replace('_', ''))
  return ours + ((form[2] and f'@{form[2]}') or '') if form and ours else name


def check_name(name: str, key: str) -> None:
  """Raises InputError, with ``key``, unless a measure has this name in metrics."""
  [known] = parse_measures([name])
  if known != name:
    raise InputError(f'{key}: {name!r} is {known} here; use that name')


def _check_parameters(kind: ir_measures.Measure) -> None:
  """Raises one of `_NO_MEASURE` for parameters that crash native code."""
  params = kind.params
  if any(isinstance(value, int) and abs(value) > _LARGEST for value in params.values()):
    raise ValueError(f'a number in it is above {_LARGEST:,}')
  if min(params.get('cutoff', 1), params.get('rel', 1)) < 1:
    raise ValueError('cutoff and rel are 1 or more')
  if params.get('recall', 0.5) not in _RECALLS:
    raise ValueError('a recall is between 0 and 1, with two decimals')
  for needed, about in kind.SUPPORTED_PARAMS.items():
    if about.required and needed not in params:
      raise ValueError(f'it needs a value of {needed}')
  kind.validate_params()
  gains = params.get('gains', {}).items()
  if not all(type(number) in (int, float) for gain in gains for number in gain):
    raise ValueError('gains must map grades to numbers, such as {1: 1, 2: 3}')
  if not ir_measures.DefaultPipeline.supports(kind):
    raise ValueError('no installed provider computes it')


def _some(ids: Sequence[str] | Qrels) -> str:
  return ', '.join(list(ids)[:3]) + (', ...' if len(ids) > 3 else '') if ids else 'none'
