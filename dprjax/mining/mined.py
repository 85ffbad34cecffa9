"""The training file that mining writes: Tevatron's form, in which every negative says where it
comes from.

A line is ``{"query_id", "query", "positive_passages": [...], "negative_passages": [...]}``; a
passage is ``{"docid", "title", "text"}``, or ``{"docid"}`` alone where the texts were left out
(then a corpus must be beside it: ``config.data.train``). A negative has besides:

| key | what | |---|---| | `retriever`, `rank`, `score` | the run that ranks it best, its rank there
from 1, and that run's score | | `also` | a list of the same three for every other run that has it;
absent where there is none | | `pools` | `["undenoised"]`, `["denoised"]` or both | |
`reranker_score` | the reranker's logit; absent where it was not scored |

`dprjax.formats.examples` reads it.
"""

import json
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

from dprjax.formats.examples import POOLS
from dprjax.formats.texts import Entry
from dprjax.mining.passages import Passages


class Loader:
  """Those passages of a corpus that are asked for, each read once.

  Attributes:
    passages: by key, what was read so far.
  """

  def __init__(
    self, indexed: Passages, keys: UInt64[np.ndarray, 'n'], offsets: Int64[np.ndarray, 'n']
  ):
    """``keys`` ascend; ``offsets`` says where they lie, as `Passages.look_up` does."""
    self._indexed, self._keys, self._offsets = indexed, keys, offsets
    self.passages: dict[int, Entry] = {}

  def read(self, keys: UInt64[np.ndarray, 'm']) -> None:
    wanted = np.array(
      [key for key in np.unique(keys).tolist() if key not in self.passages], np.uint64
    )
    places = self._offsets[np.searchsorted(self._keys, wanted)]
    order = np.argsort(places)
    self.passages.update(
      zip(wanted[order].tolist(), self._indexed.read(places[order]), strict=True)
    )

  def fragments(self, keys: UInt64[np.ndarray, 'm'], texts: bool) -> dict[int, str]:
    """These passages, by key, as JSON objects without their closing brace, for a negative's origin
    or a brace to follow.
    """
    self.read(keys)
    fragments = {}
    for key in np.unique(keys).tolist():
      part = self.passages[key]
      rest = f', "title": {to_json(part.title)}, "text": {to_json(part.text)}' if texts else ''
      fragments[key] = f'{{"docid": {to_json(part.id)}{rest}'
    return fragments


def origin(
  found: Sequence[tuple[str, int, float]], undenoised: bool, denoised: bool, logit: float
) -> str:
  """What follows a negative's fragment: (retriever as JSON, rank, score) of every run that has it,
  its pools, its score (nan: none).
  """
  first, *others = (
    f'"retriever": {retriever}, "rank": {rank}, "score": {score!r}'
    for retriever, rank, score in found
  )
  pools = [
    f'"{pool}"' for pool, inside in zip(POOLS, (undenoised, denoised), strict=True) if inside
  ]
  scored = '' if math.isnan(logit) else f', "reranker_score": {logit!r}'
  also = f', "also": [{", ".join(f"{{{other}}}" for other in others)}]' if others else ''
  return f', {first}, "pools": [{", ".join(pools)}]{scored}{also}}}'


def line(query_id: str, query: str, positives: Sequence[str], negatives: Sequence[str]) -> bytes:
  """One query's line; passages are JSON."""
  return (
    f'{{"query_id": {to_json(query_id)}, "query": {to_json(query)}, "positive_passages": '
    f'[{", ".join(positives)}], '
    f'"negative_passages": [{", ".join(negatives)}]}}\n'
  ).encode()


def to_json(text: str) -> str:
  """A JSON string, in UTF-8 where it can be: a lone surrogate, which JSON may hold, cannot."""
  quoted = _quote(text)
  if not quoted.isascii():
    try:
      quoted.encode()
    except UnicodeEncodeError:
      return json.dumps(text)
  return quoted


# json.dumps(ensure_ascii=False) makes an encoder each time: several times as slow.
_quote = json.JSONEncoder(ensure_ascii=False).encode
