"""Labelled pairs: two texts and whether they match, and the cache of their tokens.

A split is a file SPLIT.jsonl, SPLIT.tsv or SPLIT.csv (``text.records``) with the columns
`text1`, `text2` and `label`. A label is 1, true or yes, or 0, false or no.

    DIR/pairs.json     inputs of the cache
    DIR/lengths.npz    tokens of both texts of every pair, and the labels
    DIR/pairs/         TFDS data set, split 'pairs': id (the number of the line), first, second
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
from etils import epath

from dprjax.base import files, hashes, provenance
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.text import batches, docstrings, fingerprint, records, sources, table
from dprjax.text.batches import Batch, DrawnQueries, Feed
from dprjax.text.tokenizing import Tokenizer, pad_flat

FORMAT_VERSION = 1
VIEWS = ('first', 'second')
COLUMNS = ('label', 'first_index', 'second_index')  # numbers of a batch, one a pair

_COLUMNS = ('text1', 'text2', 'label')
_LABELS = {'1': 1, 'true': 1, 'yes': 1, '0': 0, 'false': 0, 'no': 0}
_CHUNK = 1024  # pairs tokenised at a time


class Pair(NamedTuple):
  """Two texts, the label (1: they match), and the line."""

  first: str
  second: str
  label: int
  line: int


@dataclasses.dataclass(frozen=True)
class PairSource:
  """Which pairs to read.

  Attributes:
    path: the folder of the splits.
    split: the name of a file without ending.
    hold_out, held_out: as in ``sources.Source``, by a hash of both texts.
    max_pairs: the most pairs, half of each label, also chosen by a hash.
  """

  path: str
  split: str = 'train'
  hold_out: tuple[float, int] | None = None
  held_out: bool = False
  max_pairs: int | None = None


def locate(source: PairSource) -> epath.Path:
  """The file of a source; raises InputError if it is missing."""
  folder = files.existing(source.path, 'data')
  names = [f'{source.split}.{ending}' for ending in ('jsonl', 'tsv', 'csv')]
  return files.regular_file(sources.find_file(folder, 'pairs', *names), 'pairs file')


def read_pairs(source: PairSource) -> list[Pair]:
  """The pairs of a source, in the order of the file."""
  path = locate(source)
  pairs = _read_file(path, provenance.identity(path))
  fraction, seed = source.hold_out or (0.0, 0)
  names = [f'{pair.first}\t{pair.second}' for pair in pairs]
  chosen = list(range(len(pairs)))
  if source.hold_out is not None:
    held_out = sources.held_out
    chosen = [i for i in chosen if held_out(names[i], fraction, seed) == source.held_out]
  if source.max_pairs is not None:
    chosen.sort(key=lambda i: hashes.draw(names[i], seed, 'max_queries'))
    of_label = [[i for i in chosen if pairs[i].label == label] for label in (0, 1)]
    chosen = sorted(i for some in of_label for i in some[: source.max_pairs // 2])
  if len({pairs[i].label for i in chosen}) < 2:
    raise InputError(
      f'{path}: {counted(len(chosen), "pairs")} of {len(pairs):,} (hold_out={fraction}) have one '
      'label; both are needed'
    )
  return [pairs[i] for i in chosen]


@functools.lru_cache(maxsize=8)  # a training reads them again for its dev split
def _read_file(path: epath.Path, _: object) -> list[Pair]:
  rows = records.read_columns(path, _COLUMNS, 'pairs file')
  return [_make_pair(values, number, path) for number, values in rows]


def _make_pair(values: list[Any], line: int, path: epath.Path) -> Pair:
  *texts, label = values
  number = _LABELS.get(str(label).strip().lower()) if isinstance(label, str | int) else None
  if number is None or not all(isinstance(text, str) and text.strip() for text in texts):
    raise InputError(
      f'{path}, line {line}: expected {", ".join(_COLUMNS)}: two texts, and 1 (true, yes) or 0 '
      f'(false, no), not {values!r:.80}'
    )
  return Pair(texts[0].strip(), texts[1].strip(), number, line)


@dataclasses.dataclass(frozen=True)
class Pairs:
  """An open cache of pairs.

  Attributes:
    pad_id: of the tokenizer.
    first_lengths, second_lengths: tokens of the texts, with special tokens.
    labels: 1 for a match, else 0.
  """

  path: epath.Path
  pad_id: int
  first_lengths: jt.Int32[np.ndarray, ' pairs']
  second_lengths: jt.Int32[np.ndarray, ' pairs']
  labels: jt.Int32[np.ndarray, ' pairs']
  rows: table.Table

  @property
  def num_pairs(self) -> int:
    return len(self.labels)

  def tokens(self, rows: jt.Int[np.ndarray, ' B']) -> tuple[list[bytes], list[bytes]]:
    """First and second texts, in the form for `table.lists`."""
    first, second = self.rows.read(rows, VIEWS)
    return first, second


def build_pairs(
  source: PairSource,
  tokenizer: Tokenizer,
  directory: files.PathLike,
  *,
  query_max_length: int,
  passage_max_length: int,
  query_prefix: str = '',
  passage_prefix: str = '',
  process_index: int = 0,
) -> Pairs:
  """The cache at ``directory``, rebuilt if its inputs changed.

  Options for queries apply to first texts, options for passages to second texts, as in
  `token_cache.build_cache`.
  """
  path = epath.Path(directory)
  lengths = (query_max_length, passage_max_length)
  prefixes = (query_prefix, passage_prefix)
  settings = {
    'format_version': FORMAT_VERSION,
    'source': {k: v for k, v in dataclasses.asdict(source).items() if k != 'path'},
    'tokenizer_sha256': tokenizer.sha256,
    'max_lengths': lengths,
    'prefixes': prefixes,
  }

  def build(aside: epath.Path) -> fingerprint.Built:
    report, pairs = ReadReport(), read_pairs(source)
    report.counts['pairs'] = len(pairs)
    report.counts['of them matching'] = sum(pair.label for pair in pairs)
    counts: dict[str, list[int]] = {view: [] for view in VIEWS}
    with table.TableWriter(aside / 'pairs', 'pairs', VIEWS) as writer:
      for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        tokens = {}
        for view, prefix, length in zip(VIEWS, prefixes, lengths, strict=True):
          texts = [prefix + getattr(pair, view) for pair in chunk]
          tokens[view], cut = tokenizer.encode(texts, length)
          report.counts[f'{view} texts of more than {length} tokens: cut'] += cut
          counts[view] += map(len, tokens[view])
        for row, pair in enumerate(chunk):
          writer.write(str(pair.line), {view: tokens[view][row] for view in VIEWS})
    arrays = {f'{view}_lengths': np.array(counts[view], np.int32) for view in VIEWS}
    arrays['labels'] = np.array([pair.label for pair in pairs], np.int32)
    return fingerprint.Built(arrays, report, {'pad_id': tokenizer.pad_id})

  fingerprint.build_once(
    path,
    'pairs',
    settings,
    {'pairs': locate(source)},
    build,
    process_index,
  )
  description, arrays = fingerprint.open_built(path, 'pairs')
  return Pairs(path, description['pad_id'], rows=table.Table(path / 'pairs', 'pairs'), **arrays)


class PairFeed:
  """Pairs of a cache, as `mixture.Examples`."""

  def __init__(self, cache: Pairs, *, query_buckets: Any, passage_buckets: Any):
    batches.longest_bucket(cache.first_lengths.max(), query_buckets, 'query_buckets')
    batches.longest_bucket(cache.second_lengths.max(), passage_buckets, 'passage_buckets')
    self._cache = cache
    self.size = cache.num_pairs
    self.counts = {'first_index': cache.num_pairs, 'second_index': cache.num_pairs}

  def draw(
    self, rows: jt.Int32[np.ndarray, ' B'], epochs: Any, random: np.random.Generator
  ) -> jt.Int32[np.ndarray, ' B']:
    del epochs, random
    return rows

  def lengths(self, drawn: jt.Int32[np.ndarray, ' B']) -> tuple[np.ndarray, np.ndarray]:
    return self._cache.first_lengths[drawn], self._cache.second_lengths[drawn]

  def read(
    self,
    drawn: jt.Int32[np.ndarray, ' B'],
    rows: jt.Int[np.ndarray, ' own'],
    first_length: int,
    second_length: int,
  ) -> Batch:
    own = drawn[rows]
    first, second = map(table.lists, self._cache.tokens(own))
    arrays = (
      *pad_flat(*first, first_length, self._cache.pad_id),
      *pad_flat(*second, second_length, self._cache.pad_id),
    )
    names = (f'{view}_{what}' for view in VIEWS for what in ('tokens', 'mask'))
    return {
      **dict(zip(names, arrays, strict=True)),
      'label': self._cache.labels[own],
      'first_index': own,
      'second_index': own,
    }

  def names(self, batch: Batch) -> list[str]:
    """The lines of pairs, for messages."""
    return [f'line {name}' for name in self._cache.rows.ids(batch['first_index'])]


class QueryPairFeed:
  """The queries of a feed as pairs: each with its positive, and with each negative."""

  def __init__(self, feed: Feed):
    self._feed, self._columns = feed, 1 + feed.negatives
    self.size = feed.size * self._columns
    queries, passages = feed.counts['query_index'], feed.counts['passage_index']
    self.counts = {'first_index': queries, 'second_index': passages}

  def draw(
    self, rows: jt.Int32[np.ndarray, ' B'], epochs: Any, random: np.random.Generator
  ) -> tuple[DrawnQueries, jt.Int32[np.ndarray, ' B']]:
    queries, column = np.divmod(rows, np.int32(self._columns))
    drawn = self._feed.draw(queries, epochs, random)
    passages = np.take_along_axis(drawn.passages, column[:, None], axis=1)
    return drawn._replace(passages=passages, sources=None), column

  def lengths(self, drawn: tuple[DrawnQueries, Any]) -> tuple[np.ndarray, np.ndarray]:
    return self._feed.lengths(drawn[0])

  def read(
    self,
    drawn: tuple[DrawnQueries, jt.Int32[np.ndarray, ' B']],
    rows: jt.Int[np.ndarray, ' own'],
    first_length: int,
    second_length: int,
  ) -> Batch:
    batch = self._feed.read(drawn[0], rows, first_length, second_length)
    return {
      'first_tokens': batch['query_tokens'],
      'first_mask': batch['query_mask'],
      'second_tokens': batch['passage_tokens'][:, 0],
      'second_mask': batch['passage_mask'][:, 0],
      'label': (drawn[1][rows] == 0).astype(np.int32),
      'first_index': batch['query_index'],
      'second_index': batch['passage_index'][:, 0],
    }

  def names(self, batch: Batch) -> list[str]:
    """The queries and passages, for messages."""
    indices = {
      'query_index': batch['first_index'],
      'passage_index': batch['second_index'][:, None],
    }
    return self._feed.names(indices)


def write_docstrings(folder: files.PathLike, packages: list[str]) -> None:
  """Writes pairs of docstrings, train.jsonl, dev.jsonl and test.jsonl, into a new folder.

  A summary matches the rest of its docstring, and does not match the rest of the next one.
  """
  with files.atomic_path(folder) as aside:
    docstrings.build(aside / 'beir', packages)
    for split in ('train', 'dev', 'test'):
      dataset = sources.load_dataset(sources.Source(str(aside / 'beir'), 'beir', split))
      texts = {passage.id: passage.text for passage in dataset.passages}
      answers = [texts[dataset.positives(query.id)[0]] for query in dataset.queries]
      rows = (
        (query.text, answers[(i + shift) % len(answers)], label)
        for i, query in enumerate(dataset.queries)
        for shift, label in ((0, 1), (1, 0))
      )
      write_pairs(aside / f'{split}.jsonl', rows)


def write_pairs(path: files.PathLike, pairs: Iterable[tuple[str, str, int]]) -> None:
  """Writes a jsonl of pairs that `read_pairs` reads."""
  with files.atomic_write(path) as file:
    for pair in pairs:
      file.write(json.dumps(dict(zip(_COLUMNS, pair, strict=True))) + '\n')
