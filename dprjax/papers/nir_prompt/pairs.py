"""Labelled pairs, two texts and whether they match, as the data of a task.

A split is a file SPLIT.jsonl, SPLIT.tsv or SPLIT.csv (``text.records``) with the columns
`text1`, `text2` and `label`. A label is 1, true or yes, or 0, false or no.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jaxtyping as jt
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from dprjax.base import files, hashes, provenance
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.retrieval import measures
from dprjax.retrieval.reranker import Reranker
from dprjax.text import batches, docstrings, records, sources, trec
from dprjax.text.batches import Batch, DrawnQueries, Feed
from dprjax.text.tokenizing import Tokenizer, pad_batch
from dprjax.text.vector_spec import SIDES
from dprjax.training.cross_encoder import Scorer
from dprjax.training.method import Evaluate, Scores

VIEWS = ('first', 'second')
COLUMNS = ('label', 'first_index', 'second_index')  # numbers of a batch, one a pair

_COLUMNS = ('text1', 'text2', 'label')
_LABELS = {'1': 1, 'true': 1, 'yes': 1, '0': 0, 'false': 0, 'no': 0}
_CHUNK = 1024  # pairs tokenised at a time

logger = logging.getLogger('dprjax')


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
    hold_out, held_out: as in ``sources.Source``, by a hash of both texts.
    max_pairs: the most pairs, half of each label, also chosen by a hash.
  """

  path: str
  split: str = 'train'
  hold_out: tuple[float, int] | None = None
  held_out: bool = False
  max_pairs: int | None = None


def locate(source: PairSource) -> epath.Path:
  folder = files.existing(source.path, 'data')
  names = [f'{source.split}.{ending}' for ending in ('jsonl', 'tsv', 'csv')]
  return files.regular_file(sources.find_file(folder, 'pairs', *names), 'pairs file')


def read_pairs(source: PairSource) -> list[Pair]:
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
  tokens: tuple[list[jt.Int32[np.ndarray, ' _']], list[jt.Int32[np.ndarray, ' _']]]
  labels: jt.Int32[np.ndarray, ' pairs']
  lines: list[int]
  pad_id: int

  @functools.cached_property
  def lengths(self) -> tuple[jt.Int32[np.ndarray, ' pairs'], ...]:
    return tuple(np.array([len(row) for row in rows], np.int32) for rows in self.tokens)


def tokenise(source: PairSource, tokenizer: Tokenizer, section: ConfigDict) -> Pairs:
  """Tokenises a source. Options for queries apply to first texts, those for passages to second."""
  pairs = read_pairs(source)
  tokens: tuple[list[Any], list[Any]] = [], []
  cut = 0
  for start in range(0, len(pairs), _CHUNK):
    chunk = pairs[start : start + _CHUNK]
    for rows, view, side in zip(tokens, VIEWS, SIDES, strict=True):
      texts = [section[f'{side}_prefix'] + getattr(pair, view) for pair in chunk]
      encoded, more = tokenizer.encode(texts, section[f'{side}_max_length'])
      rows += encoded
      cut += more
  labels = labels_of(pairs)
  if jax.process_index() == 0:
    logger.info(
      '%s, split %s: %s, %s of them matching; %s cut',
      *(source.path, source.split, counted(len(pairs), 'pairs')),
      *(f'{labels.sum():,}', counted(cut, 'texts')),
    )
  return Pairs(tokens, labels, [pair.line for pair in pairs], tokenizer.pad_id)


def labels_of(pairs: Iterable[Pair]) -> jt.Int32[np.ndarray, ' pairs']:
  return np.array([pair.label for pair in pairs], np.int32)


class PairFeed:
  def __init__(self, pairs: Pairs, section: Mapping[str, Any]):
    for lengths, side in zip(pairs.lengths, SIDES, strict=True):
      batches.longest_bucket(lengths.max(), section[f'{side}_buckets'], f'{side}_buckets')
    self._pairs, self.size = pairs, len(pairs.labels)
    self.counts = {'first_index': self.size, 'second_index': self.size}

  def draw(
    self, rows: jt.Int32[np.ndarray, ' B'], epochs: Any, random: np.random.Generator
  ) -> jt.Int32[np.ndarray, ' B']:
    del epochs, random
    return rows

  def lengths(self, drawn: jt.Int32[np.ndarray, ' B']) -> tuple[np.ndarray, np.ndarray]:
    first, second = self._pairs.lengths
    return first[drawn], second[drawn]

  def read(
    self,
    drawn: jt.Int32[np.ndarray, ' B'],
    rows: jt.Int[np.ndarray, ' own'],
    first_length: int,
    second_length: int,
  ) -> Batch:
    index = drawn[rows]
    batch: Batch = {'label': self._pairs.labels[index], 'first_index': index, 'second_index': index}
    lengths = first_length, second_length
    for view, tokens, length in zip(VIEWS, self._pairs.tokens, lengths, strict=True):
      padded = pad_batch([tokens[row] for row in index], length, self._pairs.pad_id)
      batch[f'{view}_tokens'], batch[f'{view}_mask'] = padded
    return batch

  def names(self, batch: Batch) -> list[str]:
    return [f'line {self._pairs.lines[row]}' for row in batch['first_index']]


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
    indices = {
      'query_index': batch['first_index'],
      'passage_index': batch['second_index'][:, None],
    }
    return self._feed.names(indices)


@dataclasses.dataclass(frozen=True)
class LabelledPairs:
  """Labelled pairs of a run; attributes as in `retrieval_data.Retrieval`."""

  section: ConfigDict
  train: PairSource
  dev: PairSource | None

  def read_passages(self) -> Iterator[str]:
    return (text for pair in read_pairs(self.train) for text in pair[:2])

  def files(self) -> dict[str, epath.Path]:
    paths = {'pairs': locate(self.train)}
    if self.dev is not None and (dev := locate(self.dev)) != paths['pairs']:
      paths['dev pairs'] = dev
    return paths

  def evaluation(
    self, scorer: Scorer, tokenizer: Tokenizer, measure: str, number: int | None = None
  ) -> Evaluate:
    assert self.dev is not None
    pairs = tokenise(self.dev, tokenizer, self.section)
    packed = scorer.pack(*pairs.tokens)
    return lambda params: classify(scorer(params, packed, number), pairs.labels, measure)


def find_pairs(section: ConfigDict, workdir: epath.Path, seed: int, task: str) -> LabelledPairs:
  folder = section.dir
  if section.format == 'docstrings':
    folder = str(workdir / 'data' / task)
    if not epath.Path(folder).exists():
      write_docstrings(folder, section.dir.split(','))
  hold_out = (section.hold_out, seed) if section.hold_out and not section.dev_split else None
  most = 2 * section.max_queries or None  # of each label
  train = PairSource(folder, section.train_split, hold_out=hold_out, max_pairs=most)
  if most:
    most = max(len(read_pairs(train)), 2)
  dev = None
  if section.dev_split:
    dev = PairSource(folder, section.dev_split, max_pairs=most)
  elif hold_out:
    dev = dataclasses.replace(train, held_out=True, max_pairs=most)
  return LabelledPairs(section, train, dev)


def classify(
  scores: jt.Float[np.ndarray, ' n'], labels: jt.Int32[np.ndarray, ' n'], measure: str
) -> Scores:
  """``accuracy``, ``F1`` and ``AP`` of matching pairs, and the share of ``yes``.

  A positive score says yes; AP is of their order. ``values`` are for ``measure``, accuracy or F1.
  """
  yes, true = scores > 0, labels == 1
  ranked = {f'{i:09}': score for i, score in enumerate(scores.tolist())}
  judged = {f'{i:09}': int(label) for i, label in enumerate(labels)}
  right = int(np.count_nonzero(yes & true))
  either = int(np.count_nonzero(yes)) + int(np.count_nonzero(true))
  means = {
    'accuracy': float(np.mean(yes == true)),
    'F1': 2 * right / either if either else 0.0,
    'AP': measures.measure(trec.run_from_dict({'': ranked}), {'': judged}, ['AP'])['mean']['AP'],
    'yes': float(np.mean(yes)),
  }
  values = (yes == true).astype(np.float64)
  if measure == 'F1':  # 2 a / b of two means, linear in both
    each = 2.0 * (yes & true) - means['F1'] * (yes.astype(np.float64) + true)
    values = means['F1'] + each * (len(scores) / max(either, 1))
  return Scores(means, {'': values})


def one_answer(labels: jt.Int32[np.ndarray, ' n'], measure: str) -> Scores:
  """The scores of yes or no to all pairs, the better by ``measure``."""
  both = [classify(np.full(len(labels), answer), labels, measure) for answer in (1.0, -1.0)]
  return max(both, key=lambda scores: scores.means[measure])


def measure_pairs(
  reranker: Reranker, folder: files.PathLike, split: str = 'test'
) -> dict[str, float]:
  """Means of `classify`, and the accuracy of the more frequent label as ``one answer``."""
  rows = read_pairs(PairSource(str(folder), split))
  labels = labels_of(rows)
  scores = classify(reranker.score([row[:2] for row in rows]), labels, 'accuracy')
  return {**scores.means, 'one answer': one_answer(labels, 'accuracy').means['accuracy']}


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
  with files.atomic_write(path) as file:
    for pair in pairs:
      file.write(json.dumps(dict(zip(_COLUMNS, pair, strict=True))) + '\n')
