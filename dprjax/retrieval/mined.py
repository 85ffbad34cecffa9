"""The training file of mining: the Tevatron format, with the origin of every negative.

A line is ``{"query_id", "query", "positive_passages": [...], "negative_passages": [...]}``. A
passage is ``{"docid", "title", "text"}``, or ``{"docid"}`` without texts (training then needs a
corpus beside the file: ``config.data.mined_negatives``). A negative also has:

| key                         | value                                                              |
|-----------------------------|--------------------------------------------------------------------|
| `retriever`, `rank`, `score`| the run that ranks it best, with rank (from 1) and score |
| `also`                      | the same three for other runs that have it; absent if none         |
| `sources`                   | `["undenoised"]`, `["denoised"]` or both                           |
| `reranker_score`            | the logit of the reranker; absent if not scored                    |

With ``--score_positives`` positives also have a `reranker_score`. `dprjax.text.examples` reads
the file.
"""

import json
from collections.abc import Sequence

from dprjax.text.examples import MINED_SOURCES
from dprjax.text.texts import PassageRecord


def passage(entry: PassageRecord, texts: bool) -> str:
  """A passage as a JSON object without its closing brace."""
  rest = f', "title": {to_json(entry.title)}, "text": {to_json(entry.text)}' if texts else ''
  return f'{{"docid": {to_json(entry.id)}{rest}'


def origin(
  rows: Sequence[tuple[str, int, float]], undenoised: bool, denoised: bool, logit: float | None
) -> str:
  """The rest of a negative, after its `passage`.

  Args:
    rows: (retriever as JSON, rank, score) for every run that has it.
    undenoised, denoised: whether it is drawn from these sources.
  """
  first, *others = (
    f'"retriever": {retriever}, "rank": {rank}, "score": {score!r}'
    for retriever, rank, score in rows
  )
  inside = zip(MINED_SOURCES, (undenoised, denoised), strict=True)
  sources = ', '.join(f'"{source}"' for source, member in inside if member)
  also = f', "also": [{", ".join(f"{{{other}}}" for other in others)}]' if others else ''
  return f', {first}, "sources": [{sources}]{scored(logit)}{also}}}'


def scored(logit: float | None) -> str:
  """The reranker score of a passage, if it has one."""
  return '' if logit is None else f', "reranker_score": {logit!r}'


def line(query_id: str, query: str, positives: Sequence[str], negatives: Sequence[str]) -> bytes:
  """The line of a query; passages are JSON."""
  return (
    f'{{"query_id": {to_json(query_id)}, "query": {to_json(query)}, "positive_passages": '
    f'[{", ".join(positives)}], "negative_passages": [{", ".join(negatives)}]}}\n'
  ).encode()


# json.dumps(ensure_ascii=False) makes an encoder in each call and is several times slower.
to_json = json.JSONEncoder(ensure_ascii=False).encode
