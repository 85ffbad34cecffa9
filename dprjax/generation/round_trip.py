"""The round-trip filter: a query stays if a retriever finds a passage that it was made from.

Dai et al. (2023, Promptagator, section 3.2) call it round-trip consistency.
"""

from dprjax.base import files
from dprjax.text import trec
from dprjax.text.qrels import Qrels
from dprjax.text.read_report import ReadReport


def found(qrels: Qrels, run: files.PathLike, within: int, report: ReadReport) -> Qrels:
  """The judgements of queries with a relevant passage among the first results of a run.

  Args:
    within: how many results of a query count.
  """
  kept: Qrels = {}
  rankings = trec.read_run(run).rankings()
  for query, judged in qrels.items():
    best = rankings[query].top(within).ids if query in rankings else []
    if any(judged.get(id_, 0) > 0 for id_ in best):
      report.count('queries that find their passages')
      kept[query] = judged
    elif best:
      report.count(f'queries left out: not among the first {within}', query)
    else:
      report.count('queries left out: not in the run', query)
  return kept
