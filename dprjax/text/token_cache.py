"""The token cache: a data set tokenised once, stored as rows for batches.

    DIR/token_cache.json  its sources (files, tokenizer, lengths, prefixes), and the report
    DIR/lengths.npz    token counts of queries and passages; the first passage with the same tokens;
                       relevant passages and negatives of each query, in all and per source;
                       categories of passages, if asked for, as numbers of the names in
                       token_cache.json
    DIR/passages/      TFDS data set, split 'passages': id, tokens
    DIR/queries/       TFDS data set, split 'queries': id, tokens, rows of passages (positives,
                       relevant, negatives), and the sources of negatives

Process 0 builds it; others wait.

Each text has one row, under its first id. Different texts with the same tokens (after a cut, say)
keep their rows, because evaluation needs their ids. A loss treats them as one passage, so a copy of
a positive never becomes a negative: `positives` and `negatives` name the first row, which
`TokenCache.canonical` gives for any row. `relevant` has the positives of all queries with the same
tokens; `positives` only those of the query itself, if they have text.
"""

import collections
import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
from etils import epath

from dprjax.base import files, hashes
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.text import examples, fingerprint, sources, table
from dprjax.text.sources import Dataset, Source
from dprjax.text.table import Integers, Lists
from dprjax.text.texts import Passage, Query
from dprjax.text.tokenizing import Tokenizer

FORMAT_VERSION = 4
UNDENOISED, DENOISED = 1, 2  # bits of the sources of a negative

_BITS = {examples.UNDENOISED: UNDENOISED, examples.DENOISED: DENOISED}
_QUERY_COLUMNS = ('tokens', 'positives', 'relevant', 'negatives', 'sources')
_COUNTS = (
  'query_lengths',
  'negative_counts',
  'relevant_counts',
  'undenoised_counts',
  'denoised_counts',
)
_CUT = {
  'query': 'queries of more than {} tokens: cut',
  'passage': 'passages of more than {} tokens: cut',
}
_CHUNK = 1024  # texts tokenised at a time
_READ = 1 << 16  # texts whose digests are stored at a time
_SHARD_ROWS = 1 << 17  # passages in a file
_log = logging.getLogger(__name__)


class QueryRow(NamedTuple):
  tokens: Integers
  positives: Integers
  relevant: Integers
  negatives: Integers
  sources: Integers


@dataclasses.dataclass(frozen=True)
class TokenCache:
  """An open token cache.

  Attributes:
    settings: its inputs, as in token_cache.json.
    query_lengths, passage_lengths: tokens of each row, with special tokens.
    negative_counts, relevant_counts: hard negatives and relevant passages of each query.
    undenoised_counts, denoised_counts: negatives of each source; a negative may have both.
    canonical: for each passage, the first row with the same tokens, or with the same text by
      `hashes.sameness`.
    comparable: whether some query has a positive that is not relevant to another query.
    categories: of each passage, as indices of ``category_names``; None if not asked for.
    cut: number of cut texts, by side.
  """

  path: epath.Path
  settings: dict[str, Any]
  pad_id: int
  query_lengths: jt.Int32[np.ndarray, ' queries']
  passage_lengths: jt.Int32[np.ndarray, ' passages']
  negative_counts: jt.Int32[np.ndarray, ' queries']
  relevant_counts: jt.Int32[np.ndarray, ' queries']
  undenoised_counts: jt.Int32[np.ndarray, ' queries']
  denoised_counts: jt.Int32[np.ndarray, ' queries']
  canonical: jt.Int32[np.ndarray, ' passages']
  comparable: bool
  queries: table.Table
  passages: table.Table
  categories: Lists | None = None
  category_names: tuple[str, ...] = ()
  cut: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def num_queries(self) -> int:
    return len(self.query_lengths)

  @property
  def num_passages(self) -> int:
    return len(self.passage_lengths)

  @property
  def max_relevant(self) -> int:
    return int(self.relevant_counts.max())

  def distinct_passages(self) -> jt.Int32[np.ndarray, ' distinct']:
    """The first rows of passages with distinct tokens."""
    return np.flatnonzero(self.canonical == np.arange(self.num_passages)).astype(np.int32)

  def passage_tokens(self, rows: jt.Int[np.ndarray, ' B']) -> list[Integers]:
    return list(map(table.integers, self.passages.read(rows, ('tokens',))[0]))

  def query_rows(self, rows: jt.Int[np.ndarray, ' B']) -> list[QueryRow]:
    columns = self.queries.read(rows, _QUERY_COLUMNS)
    return [QueryRow(*map(table.integers, values)) for values in zip(*columns, strict=True)]

  def passage_ids(self, rows: jt.Int[np.ndarray, ' B']) -> list[str]:
    return self.passages.ids(rows)

  def query_ids(self, rows: jt.Int[np.ndarray, ' B']) -> list[str]:
    return self.queries.ids(rows)


def open_cache(directory: files.PathLike) -> TokenCache:
  path = epath.Path(directory)
  description, lengths = fingerprint.open_built(path, 'token_cache')
  if 'category_flat' in lengths:
    lengths['categories'] = Lists(lengths.pop('category_flat'), lengths.pop('category_counts'))
    lengths['category_names'] = tuple(description['categories'])
  return TokenCache(
    path=path,
    settings=description['settings'],
    pad_id=description['pad_id'],
    comparable=description['comparable'],
    queries=table.Table(path / 'queries', 'queries'),
    passages=table.Table(path / 'passages', 'passages'),
    cut={
      side: description['report'].get(_CUT[side].format(description['settings'][length]), 0)
      for side, length in (('query', 'query_max_length'), ('passage', 'passage_max_length'))
    },
    **lengths,
  )


def build_cache(
  source: Source,
  tokenizer: Tokenizer,
  directory: files.PathLike,
  *,
  query_max_length: int,
  passage_max_length: int,
  query_prefix: str = '',
  passage_prefix: str = '',
  process_index: int = 0,
) -> TokenCache:
  """The cache at ``directory``, rebuilt if its inputs changed (`fingerprint.build_once`).

  Longer texts are cut to the maximum lengths (in tokens, with special ones) and counted.
  """
  path = epath.Path(directory)
  settings = {
    'format_version': FORMAT_VERSION,
    # Paths do not change the rows.
    'source': {
      key: value
      for key, value in dataclasses.asdict(source).items()
      if key not in ('path', 'corpus', 'queries', 'qrels', 'negatives')
      and (
        key not in ('categories', 'fold', 'columns') or value
      )  # unset options keep older caches valid
    },
    'tokenizer_sha256': tokenizer.sha256,
    'query_max_length': query_max_length,
    'passage_max_length': passage_max_length,
    'query_prefix': query_prefix,
    'passage_prefix': passage_prefix,
  }

  def build(aside: epath.Path) -> fingerprint.Built:
    dataset = sources.load_dataset(source)
    passages = _write_passages(
      aside / 'passages', dataset, tokenizer, passage_prefix, passage_max_length
    )
    canonical = _first_rows(passages.tokens, passages.texts)
    copies = int(np.count_nonzero(canonical != np.arange(len(canonical))))
    dataset.report.counts['passages that equal another: one passage for the loss'] += copies
    description: dict[str, Any] = {'pad_id': tokenizer.pad_id}
    categories: dict[str, np.ndarray] = {}
    if source.categories:
      categories, description['categories'] = _number_categories(dataset, passages, canonical)
      # Passages without categories, like those without text, are never positives.
      bare = np.flatnonzero(categories['category_counts'] == 0)
      passages.empty.update(bare.tolist())
    lengths, description['comparable'] = _write_queries(
      aside / 'queries', dataset, tokenizer, query_prefix, query_max_length, passages, canonical
    )
    lengths |= {'passage_lengths': passages.lengths, 'canonical': canonical}
    return fingerprint.Built(lengths | categories, dataset.report, description)

  built = fingerprint.build_once(
    path, 'token_cache', settings, sources.locate(source), build, process_index
  )
  cache = open_cache(path)
  if not built:
    _log.debug(
      'token_cache: %s and %s, built before, in %s',
      counted(cache.num_passages, 'passages'),
      counted(cache.num_queries, 'queries'),
      path,
    )
  return cache


class _Passages(NamedTuple):
  """The written passages.

  Attributes:
    lengths: tokens of each.
    tokens, texts: digests of the tokens and of the `hashes.sameness` of the text.
    rows: of ids; without categories, only of judged passages and negatives.
    empty: rows without text.
  """

  lengths: jt.Int32[np.ndarray, ' passages']
  tokens: jt.Int64[np.ndarray, ' passages']
  texts: jt.Int64[np.ndarray, ' passages']
  rows: dict[str, int]
  empty: set[int]


def _write_passages(
  folder: epath.Path,
  dataset: Dataset,
  tokenizer: Tokenizer,
  prefix: str,
  limit: int,
) -> _Passages:
  """Writes the passages, which are read twice, since rows depend on earlier texts: first to find
  copies.
  """
  copies, total = _find_copies(dataset)
  rows: dict[str, int] = {}
  empty: set[int] = set()
  lengths = np.zeros(total - len(copies), np.int32)
  token_digests, text_digests = np.zeros((2, total - len(copies)), np.int64)
  wanted = None if dataset.source.categories else _needed(dataset)
  cut = number = 0
  progress = Progress('passages', total, 'tokenising')
  with table.TableWriter(folder, 'passages', ('tokens',)) as writer:

    def flush(chunk: list[tuple[int, Passage]]) -> int:
      tokens, too_long = tokenizer.encode([prefix + passage.text for _, passage in chunk], limit)
      for (row, passage), ids in zip(chunk, tokens, strict=True):
        writer.write(passage.id, {'tokens': ids}, row // _SHARD_ROWS)
        lengths[row] = len(ids)
        token_digests[row] = _digest(ids.tobytes())
        text_digests[row] = _digest(hashes.sameness(passage.text))
      return too_long

    chunk: list[tuple[int, Passage]] = []
    for place, passage in enumerate(dataset.passages):
      is_copy = number < len(copies) and copies[number, 1] == place
      if is_copy:
        first = int(copies[number, 0])
        row = first - int(np.searchsorted(copies[:, 1], first))
        number += 1
        dataset.report.count('passages with the text of another: one row for both', passage.id)
      else:
        row = place - number
        chunk.append((row, passage))
        if not passage.text:
          empty.add(row)
      if wanted is None or passage.id in wanted:
        rows[passage.id] = row
      progress.advance()
      if len(chunk) == _CHUNK:
        cut += flush(chunk)
        chunk = []
    if chunk:
      cut += flush(chunk)
  dataset.report.counts[_CUT['passage'].format(limit)] += cut
  return _Passages(lengths, token_digests, text_digests, rows, empty)


def _digest(content: bytes) -> int:
  return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), 'little', signed=True)


def _find_copies(dataset: Dataset) -> tuple[jt.Int64[np.ndarray, 'copies 2'], int]:
  """Places of passages whose text occurred before, with its first place; and the passage count."""
  copies, waiting, total = hashes.Copies(), list[bytes](), 0
  progress = Progress('passages', task='reading')

  def flush() -> None:
    copies.add(b''.join(waiting), range(total - len(waiting), total))
    waiting.clear()

  for passage in dataset.passages:
    waiting.append(hashlib.blake2b(passage.text.encode(), digest_size=16).digest())
    total += 1
    progress.advance()
    if len(waiting) == _READ:
      flush()
  flush()
  return copies.pairs(), total


def _needed(dataset: Dataset) -> set[str]:
  named = {id_ for grades in dataset.qrels.values() for id_ in grades}
  return named | {one.id for several in dataset.negatives.values() for one in several}


def _number_categories(
  dataset: Dataset, passages: _Passages, canonical: jt.Int32[np.ndarray, ' passages']
) -> tuple[dict[str, np.ndarray], list[str]]:
  """The categories of rows, for lengths.npz, and their names; equal tokens share categories."""
  numbers: dict[str, int] = {}
  of_row: list[dict[int, None]] = [{} for _ in passages.lengths]
  for id_, categories in dataset.read_categories().items():
    if not categories:
      dataset.report.count('passages without categories: kept, never a positive', id_)
    row = of_row[canonical[passages.rows[id_]]]
    row.update((numbers.setdefault(name, len(numbers)), None) for name in categories)
  of_row = [of_row[first] for first in canonical]
  counts = np.array([len(row) for row in of_row], np.int32)
  flat = np.array([number for row in of_row for number in row], np.int32)
  return {'category_flat': flat, 'category_counts': counts}, list(numbers)


def _first_rows(*digests: jt.Int64[np.ndarray, ' rows']) -> jt.Int32[np.ndarray, ' rows']:
  """For each row, the first row that shares a digest with it, or with a row that does."""
  groups = [np.unique(each, return_inverse=True)[1] for each in digests]
  first, before = np.arange(len(digests[0]), dtype=np.int32), None
  while before is None or not np.array_equal(first, before):
    before = first
    for group in groups:
      least = np.full(len(group), len(group), np.int32)
      np.minimum.at(least, group, first)
      first = least[group]
  return first


def _write_queries(
  folder: epath.Path,
  dataset: Dataset,
  tokenizer: Tokenizer,
  prefix: str,
  limit: int,
  passages: _Passages,
  canonical: jt.Int32[np.ndarray, ' passages'],
) -> tuple[dict[str, np.ndarray], bool]:
  """Writes the queries; returns arrays of lengths.npz, and `TokenCache.comparable`."""
  report, rows = dataset.report, passages.rows
  missing = 'neither text nor categories' if dataset.source.categories else 'no text'
  skipped = f'queries whose positives are unknown or have {missing}: skipped'

  def positives_of(query: Query) -> list[int]:
    return [rows[name] for name in dataset.positives(query.id) if name in rows]

  tokens: list[bytes] = []
  for start in range(0, len(dataset.queries), _CHUNK):
    texts = [prefix + query.text for query in dataset.queries[start : start + _CHUNK]]
    encoded, cut = tokenizer.encode(texts, limit)
    report.counts[_CUT['query'].format(limit)] += cut
    tokens += [ids.tobytes() for ids in encoded]
  digests = [[_digest(ids) for ids in tokens]]
  digests.append([_digest(hashes.sameness(query.text)) for query in dataset.queries])
  same = _first_rows(*np.array(digests, np.int64)).tolist()
  # Dictionaries, unlike sets, keep the order of the files.
  relevant: dict[int, dict[int, None]] = collections.defaultdict(dict)
  for query, group in zip(dataset.queries, same, strict=True):
    relevant[group] |= dict.fromkeys(positives_of(query))
  first = {row: int(canonical[row]) for known in relevant.values() for row in known}
  counts: list[tuple[int, ...]] = []
  trained: dict[int, set[int]] = {}  # relevant passages of written queries
  with table.TableWriter(folder, 'queries', _QUERY_COLUMNS) as writer:
    for query, ids, group in zip(dataset.queries, tokens, same, strict=True):
      positives = dict.fromkeys(
        first[row] for row in positives_of(query) if row not in passages.empty
      )
      if not positives:
        report.count(skipped, query.id)
        continue
      mined: dict[int, int] = collections.defaultdict(int)
      for negative in dataset.negatives.get(query.id, ()):
        if negative.id in rows:
          row = int(canonical[rows[negative.id]])
          mined[row] |= sum(_BITS[source] for source in set(negative.sources))
      known = relevant[group]
      trained[group] = {first[row] for row in known if row not in passages.empty}
      ignored = mined.keys() & {first[row] for row in known}
      report.counts['negatives with the text of a relevant passage: ignored'] += len(ignored)
      for row in ignored:
        del mined[row]
      columns = (positives, known, mined, mined.values())
      values = (
        np.frombuffer(ids, np.int32),
        *(np.array(list(column), np.int32) for column in columns),
      )
      writer.write(query.id, dict(zip(_QUERY_COLUMNS, values, strict=True)))
      by_source = (int(np.count_nonzero(values[-1] & bit)) for bit in (UNDENOISED, DENOISED))
      counts.append((len(values[0]), len(mined), len(known), *by_source))
  if not counts:
    raise InputError(f'{dataset.files["qrels"]}: no query has a positive with text in the corpus')
  everything = set().union(*trained.values())
  comparable = any(len(known) < len(everything) for known in trained.values())
  return dict(zip(_COUNTS, np.array(counts, np.int32).T, strict=True)), comparable
