"""Passages to ask about, from a corpus, a table, or documents cut into passages."""

import heapq
from collections.abc import Iterable, Iterator

from dprjax.base import draws, files, words
from dprjax.base.progress import Progress
from dprjax.text.read_report import ReadReport
from dprjax.text.texts import PassageRecord, Texts

_SHORT = 8  # words; shorter passages are not asked about


def read_passages(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages at a path, read as in all commands (`text.inputs`).

  Passages of documents have the headings above them as titles.
  """
  progress = Progress('passages', task=f'reading {path}')
  for entry in Texts(path, 'passage').entries():
    yield entry.record
    progress.advance()


def sample(
  passages: Iterable[PassageRecord], count: int, seed: int, report: ReadReport
) -> list[PassageRecord]:
  """At most ``count`` passages, drawn by a hash of their ids, in little memory."""
  heap: list[tuple[int, int, PassageRecord]] = []
  for number, passage in enumerate(passages):
    report.count('passages')
    if len(passage.text.split()) < _SHORT and len(words.words(passage.text)) < _SHORT:
      report.count(f'passages below {_SHORT} words: not asked about', passage.id)
      continue
    lot = int.from_bytes(draws.draw(passage.id, seed, 'asking')[:8])
    # The largest lot kept is the first to go.
    entry = -lot, -number, passage
    if len(heap) < count:
      heapq.heappush(heap, entry)
    else:
      heapq.heappushpop(heap, entry)
  return [passage for _, _, passage in sorted(heap, reverse=True)]
