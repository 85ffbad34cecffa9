"""Describes a data set and finds faults in it."""

import array
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from dprjax.base import hashes, reading
from dprjax.base.counts import counted
from dprjax.base.progress import Progress
from dprjax.text import seen, sources
from dprjax.text.splitting import document_of
from dprjax.text.texts import Text

SAMPLES = 3

_READ = 1 << 14  # passages at a time


class Finding(NamedTuple):
  """A count, with samples of the items counted."""

  number: int
  what: str
  samples: tuple[str, ...] = ()

  def __str__(self) -> str:
    lines = [counted(self.number, self.what), *(f'    {sample}' for sample in self.samples)]
    return '\n'.join(lines)


def splits_of(path: str) -> list[str]:
  """The splits of a data set, by the names of its files."""
  place = epath.Path(path)
  if not place.is_dir():
    return ['train']
  folder = place / 'qrels' if (place / 'qrels').is_dir() else place
  names = [reading.plain_name(child).rpartition('.')[0] for child in sorted(folder.iterdir())]
  names = [name.removeprefix('qrels.') for name in names]
  splits = [name for name in names if name not in ('', 'corpus', 'queries') and '.' not in name]
  order = {'train': 0, 'dev': 1, 'test': 2}
  return sorted(set(splits), key=lambda name: (order.get(name, 3), name)) or ['train']


def check(
  path: str, splits: Sequence[str], columns: str = ''
) -> Iterator[tuple[str, list[Finding]]]:
  """Yields (title, findings) for each split, for the passages, and for the overlap of splits."""
  loaded = {
    split: sources.load_dataset(sources.Source(path, split=split, columns=columns))
    for split in splits
  }
  for split, dataset in loaded.items():
    yield f'{split}: {dataset.files["qrels"]} ({dataset.format})', _of_split(dataset)
  corpora: dict[str, list[sources.Dataset]] = {}
  for dataset in loaded.values():
    corpora.setdefault(str(dataset.files['corpus']), []).append(dataset)
  for name, several in corpora.items():
    yield f'passages: {name}', _of_passages(several)
  names = list(loaded)
  for place, one in enumerate(names):
    for other in names[place + 1 :]:
      yield f'{one} and {other}', _shared(loaded[one], loaded[other])


def _of_split(dataset: sources.Dataset) -> list[Finding]:
  queries = dataset.queries
  positives = [len(dataset.positives(query.id)) for query in queries]
  findings = [
    Finding(len(queries), 'queries', _shown(queries)),
    Finding(sum(positives), f'positives, {np.mean(positives):.1f} a query'),
    Finding(sum(map(len, dataset.negatives.values())), 'hard negatives'),
    _lengths(queries, 'queries'),
  ]
  for what, count in dataset.report.counts.items():
    if what != 'queries' and count:
      findings.append(Finding(count, what, tuple(dataset.report.examples.get(what, ())[:SAMPLES])))
  first: dict[bytes, Text] = {}
  twice = [
    f'{first[digest].id} and {query.id}: {query.text:.100}'
    for query in queries
    if first.setdefault(digest := _digest(query.text), query) is not query
  ]
  findings.append(Finding(len(twice), 'queries with the text of another', tuple(twice[:SAMPLES])))
  return [one for one in findings if one.number]


def _of_passages(several: Sequence[sources.Dataset]) -> list[Finding]:
  dataset = several[0]
  unknown = {
    id_: query
    for one in several
    for query, ids in (
      *one.qrels.items(),
      *((query, [each.id for each in some]) for query, some in one.negatives.items()),
    )
    for id_ in ids
  }
  empty: list[str] = []
  copies, words, total = hashes.Copies(), array.array('i'), 0
  samples: list[Text] = []
  progress = Progress('passages', task='checking')
  for part in _batches(dataset.passages, _READ):
    copies.add(b''.join(_digest(one.text) for one in part), range(total, total + len(part)))
    words.extend(len(one.text.split()) for one in part)
    samples += part[: SAMPLES - len(samples)]
    empty += [one.id for one in part if not one.text.strip()]
    for one in part:
      unknown.pop(one.id, None)
    total += len(part)
    progress.advance(len(part))
  pairs = copies.pairs()
  findings = [
    Finding(total, 'passages', _shown(samples)),
    _summary(np.frombuffer(words, np.int32), 'passages'),
    Finding(len(pairs), 'passages with the text of another', _pairs(dataset, pairs)),
    Finding(len(empty), 'passages without text', tuple(empty[:SAMPLES])),
    Finding(
      len(unknown),
      'passages that are judged or negatives, and are not in the corpus',
      tuple(f'{id_} of query {query}' for id_, query in unknown.items())[:SAMPLES],
    ),
  ]
  return [one for one in findings if one.number]


def _shared(one: sources.Dataset, other: sources.Dataset) -> list[Finding]:
  known = set(seen.hashes(query.text for query in one.queries).tolist())
  leaked = [query for query in other.queries if set(seen.hashes([query.text]).tolist()) & known]
  documents = {document_of(id_) for query in one.queries for id_ in one.positives(query.id)}
  answered = [
    query
    for query in other.queries
    if {document_of(id_) for id_ in other.positives(query.id)} & documents
  ]
  split = other.source.split
  findings = [
    Finding(len(leaked), f'queries of {split} are in both: leave them out of one', _shown(leaked)),
    Finding(
      len(answered),
      f'queries of {split} share an answer, or its document, with {one.source.split} (a split by '
      'document avoids this)',
      _shown(answered),
    ),
  ]
  return [each for each in findings if each.number] or [Finding(0, 'queries or answers in both')]


def _pairs(dataset: sources.Dataset, pairs: np.ndarray) -> tuple[str, ...]:
  wanted = {int(place) for place in pairs[:SAMPLES].ravel()}
  at: dict[int, Text] = {}
  if wanted:
    for place, passage in enumerate(dataset.passages):
      if place in wanted:
        at[place] = passage
      if len(at) == len(wanted):
        break
  return tuple(
    f'{at[first].id} and {at[again].id}: {at[first].text:.100}'
    for first, again in pairs[:SAMPLES].tolist()
  )


def _lengths(texts: Sequence[Text], name: str) -> Finding:
  return _summary(np.array([len(one.text.split()) for one in texts], np.int32), name)


def _summary(words: np.ndarray, name: str) -> Finding:
  half, most = np.percentile(words, [50, 95])
  return Finding(
    int(words.sum()),
    f'words: half of the {name} have {half:.0f} or fewer, 95 % {most:.0f}, the '
    f'longest {words.max():,}',
  )


def _shown(texts: Sequence[Text]) -> tuple[str, ...]:
  return tuple(f'{one.id}: {one.text:.100}' for one in texts[:SAMPLES])


def _digest(text: str) -> bytes:
  return hashlib.blake2b(hashes.sameness(text), digest_size=16).digest()


def _batches(texts: Iterable[Text], size: int) -> Iterator[list[Text]]:
  part: list[Text] = []
  for text in texts:
    part.append(text)
    if len(part) == size:
      yield part
      part = []
  if part:
    yield part
