"""Passages to ask about, from a corpus, a table, or documents cut into passages."""

import heapq
from collections.abc import Iterable, Iterator

from etils import epath

from dprjax.base import draws, files, words
from dprjax.base.progress import Progress
from dprjax.text import documents, hub_data, inputs, records
from dprjax.text.read_report import ReadReport
from dprjax.text.texts import PassageRecord, Texts, read_corpus

_SHORT = 8  # words; shorter passages are not asked about


def read_passages(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages at a path, read as in all commands (`text.inputs`).

  Passages of documents have the headings above them as titles.
  """
  progress = Progress('passages', task=f'reading {path}')
  corpus = _corpus_file(path)
  for passage in _others(path) if corpus is None else (entry for _, entry in read_corpus(corpus)):
    yield passage
    progress.advance()


def sample(
  passages: Iterable[PassageRecord], count: int, seed: int, report: ReadReport
) -> list[PassageRecord]:
  """At most ``count`` passages, drawn by a hash of their ids; memory does not grow with the corpus.

  Args:
    passages: the corpus, as a stream.
    count: passages wanted.
    seed: of the hash.
    report: counts passages, and those that are too short.
  """
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


def _corpus_file(path: files.PathLike) -> epath.Path | None:
  """The jsonl corpus or MS MARCO tsv at a path, or in a BEIR folder.

  Returns:
    None for anything else.
  """
  if hub_data.is_named(path) or files.is_pattern(path):
    return None
  found = files.existing(path, 'corpus')
  if found.is_dir():
    return inputs.variant(found, 'corpus.jsonl')
  files.regular_file(found, 'corpus')
  return None if records.ending_of(found) in ('csv', 'parquet') or _cut(found) else found


def _cut(path: epath.Path) -> bool:
  [found] = inputs.find(path, 'passage')
  return found.document


def _others(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages of tables and documents."""
  found = inputs.find(path, 'passage')
  if any(not one.document for one in found):
    for text in Texts(path, 'passage'):
      yield PassageRecord(text.id, '', text.text)
    return
  for one in found:
    for passage in documents.read_passages(one.path, one.name):
      yield PassageRecord(passage.id, passage.title, passage.text)
