"""The store: a data set's text tokenised once, in rows that batches are read from.

    DIR/store.json     what it was made of (files, tokenizer, lengths, prefixes) and what the report
    said DIR/lengths.npz    tokens of every query and passage, and how many negatives each query
    has, and has of each pool DIR/passages/      TFDS data set, split 'passages': id, tokens
    DIR/queries/       TFDS data set, split 'queries': id, tokens, rows of passages (positives,
    relevant, negatives), and the negatives' pools

Several processes may build it together: each tokenises and writes every so-manieth shard of the
passages, and process 0 puts all of them in place. The store is the same, bit for bit, whatever
their number.

The same text has one row, whatever ids it goes by (the first is kept), so that a copy of a positive
cannot become a negative. `relevant` holds the positives of every query with the same text, its own
included; `positives` only its own, those with text.
"""

import dataclasses
import hashlib
import json
import logging
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.data import fingerprint, sources, table
from dprjax.data.sources import Dataset, Source
from dprjax.data.text import Tokenizer
from dprjax.formats import examples

FORMAT_VERSION = 2
UNDENOISED, DENOISED = 1, 2  # bits of a negative's pools

_BITS = {examples.UNDENOISED: UNDENOISED, examples.DENOISED: DENOISED}
_QUERY_COLUMNS = ('tokens', 'positives', 'relevant', 'negatives', 'pools')
_COUNTS = (
  'query_lengths',
  'negative_counts',
  'relevant_counts',
  'undenoised_counts',
  'denoised_counts',
)
_SHARE = 'share.npz'
_CHUNK = 1024  # texts tokenised at a time
_SHARD_ROWS = (
  1 << 17
)  # passages a file: by number, so that where a row goes is known before it is tokenised
_log = logging.getLogger(__name__)


class QueryRow(NamedTuple):
  tokens: table.Integers
  positives: table.Integers
  relevant: table.Integers
  negatives: table.Integers
  pools: table.Integers


@dataclasses.dataclass(frozen=True)
class Store:
  """An open store.

  Attributes:
    settings: what it was built from, as in store.json.
    pad_id: of the tokenizer, for batches.
    query_lengths, passage_lengths: tokens of each row, special tokens included.
    negative_counts: hard negatives of each query; ``relevant_counts`` likewise.
    undenoised_counts, denoised_counts: those of each pool; a negative may be in both.
  """

  path: epath.Path
  settings: dict[str, Any]
  pad_id: int
  query_lengths: jt.Int32[np.ndarray, 'queries']
  passage_lengths: jt.Int32[np.ndarray, 'passages']
  negative_counts: jt.Int32[np.ndarray, 'queries']
  relevant_counts: jt.Int32[np.ndarray, 'queries']
  undenoised_counts: jt.Int32[np.ndarray, 'queries']
  denoised_counts: jt.Int32[np.ndarray, 'queries']
  queries: table.Table
  passages: table.Table

  @property
  def num_queries(self) -> int:
    return len(self.query_lengths)

  @property
  def num_passages(self) -> int:
    return len(self.passage_lengths)

  @property
  def max_relevant(self) -> int:
    return int(self.relevant_counts.max())

  def passage_tokens(self, rows: jt.Int[np.ndarray, 'B']) -> list[table.Integers]:
    return [np.frombuffer(tokens, np.int32) for tokens in self.passages.read(rows, ('tokens',))[0]]

  def query_tokens(self, rows: jt.Int[np.ndarray, 'B']) -> list[table.Integers]:
    return [np.frombuffer(tokens, np.int32) for tokens in self.queries.read(rows, ('tokens',))[0]]

  def query_rows(self, rows: jt.Int[np.ndarray, 'B']) -> list[QueryRow]:
    columns = self.queries.read(rows, _QUERY_COLUMNS)
    return [
      QueryRow(*(np.frombuffer(value, np.int32) for value in row))
      for row in zip(*columns, strict=True)
    ]

  def passage_ids(self, rows: jt.Int[np.ndarray, 'B']) -> list[str]:
    return [name.decode() for name in self.passages.read(rows, ('id',))[0]]

  def query_ids(self, rows: jt.Int[np.ndarray, 'B']) -> list[str]:
    return [name.decode() for name in self.queries.read(rows, ('id',))[0]]


def open_store(directory: files.PathLike) -> Store:
  """Opens what `build_store` wrote.

  Raises InputError if it is not there, or was written by another version.
  """
  path = epath.Path(directory)
  written = fingerprint.read_description(path, 'store.json', FORMAT_VERSION)
  with (path / 'lengths.npz').open('rb') as file, np.load(file) as arrays:
    columns = {name: arrays[name] for name in ('passage_lengths', *_COUNTS)}
  return Store(
    path=path,
    settings=written['settings'],
    pad_id=written['pad_id'],
    queries=table.Table(path / 'queries', 'queries'),
    passages=table.Table(path / 'passages', 'passages'),
    **columns,
  )


def build_store(
  source: Source,
  tokenizer: Tokenizer,
  directory: files.PathLike,
  *,
  query_max_length: int,
  passage_max_length: int,
  query_prefix: str = '',
  passage_prefix: str = '',
  process_index: int = 0,
  process_count: int = 1,
  wait_s: float = 24 * 3600,
) -> Store:
  """The store at ``directory``, built unless what is there was made of just this.

  Longer texts are cut to the maximum lengths (tokens, special ones included), counted and reported
  once. The store is built aside and renamed. All processes must call this; they see one file
  system, and wait for one another up to ``wait_s`` seconds. What a process has tokenised when the
  job is interrupted before the end is taken over by the next one of the same files, settings and
  number of processes, if it had finished its share (process 0 begins anew).

  Raises:
    InputError: for anything wrong with the source; the directory holds something else; a process
      was not done in time.
  """
  path = epath.Path(directory)
  where = sources.locate(source)
  settings = _settings(
    source, tokenizer, query_max_length, passage_max_length, query_prefix, passage_prefix
  )
  # Through JSON, as the file's: tuples become lists.
  settings = json.loads(json.dumps(settings))
  reports = []

  def build(aside: epath.Path, stamps: dict[str, Any]) -> None:
    dataset = sources.load_dataset(source)
    reports.append(dataset.report)
    parts = fingerprint.parts_folder(path, settings, stamps, process_count)
    _write(
      aside,
      dataset,
      tokenizer,
      settings,
      stamps,
      [parts / str(process) for process in range(1, process_count)],
      wait_s,
    )
    # Those that an interrupted job left for other files or settings as well.
    for old in path.parent.glob(f'.{path.name}.*.parts'):
      old.rmtree()

  def help_build(stamps: dict[str, Any]) -> None:
    part = fingerprint.parts_folder(path, settings, stamps, process_count) / str(process_index)
    if not part.exists():
      with files.atomic_path(part) as aside:
        share = _write_passages(
          aside, sources.load_dataset(source), tokenizer, settings, process_index, process_count
        )
        with (aside / _SHARE).open('wb') as file:
          np.savez(
            file,
            shards=np.array(
              [(shard, *size) for shard, size in share.sizes.items()], np.int64
            ).reshape(-1, 3),
            cut=share.cut,
            lengths=share.lengths,
          )

  built = fingerprint.build_once(
    path,
    'store.json',
    settings,
    where,
    build,
    process_index=process_index,
    wait_s=wait_s,
    help_build=help_build if process_count > 1 else None,
  )
  store = open_store(path)
  if built:
    _log.info('store: built %s\n%s', path, reports[0])
  else:
    _log.info(
      'store: %s passages and %s queries, built before, in %s',
      f'{store.num_passages:,}',
      f'{store.num_queries:,}',
      path,
    )
  return store


def _settings(
  source: Source,
  tokenizer: Tokenizer,
  query_max_length: int,
  passage_max_length: int,
  query_prefix: str,
  passage_prefix: str,
) -> dict[str, Any]:
  """All that decides the rows, but for the files, which `fingerprint` describes; where they lie and
  strictness decide nothing.
  """
  selection = {
    key: value
    for key, value in dataclasses.asdict(source).items()
    if key not in ('path', 'corpus', 'queries', 'qrels', 'negatives', 'strict')
  }
  return {
    'format_version': FORMAT_VERSION,
    'source': selection,
    'tokenizer_sha256': tokenizer.sha256,
    'query_max_length': query_max_length,
    'passage_max_length': passage_max_length,
    'query_prefix': query_prefix,
    'passage_prefix': passage_prefix,
  }


class _Share(NamedTuple):
  """What one process wrote of the passages.

  Attributes:
    sizes: of its shards.
    lengths: tokens of its rows, in their order.
    cut: how many of its passages were too long.
    rows: the row of every id of the whole corpus.
    empty: the rows without text.
  """

  sizes: dict[int, table.ShardSize]
  lengths: list[int]
  cut: int
  rows: dict[str, int]
  empty: set[int]


def _write(
  aside: epath.Path,
  dataset: Dataset,
  tokenizer: Tokenizer,
  settings: dict[str, Any],
  stamps: dict[str, Any],
  parts: list[epath.Path],
  wait_s: float,
) -> None:
  share = _write_passages(aside / 'passages', dataset, tokenizer, settings, 0, len(parts) + 1)
  arrays = _write_queries(aside / 'queries', dataset, tokenizer, settings, share.rows, share.empty)
  arrays['passage_lengths'] = _gather(aside / 'passages', dataset, settings, share, parts, wait_s)
  with (aside / 'lengths.npz').open('wb') as file:
    np.savez(file, **arrays)
  counts = dict(dataset.report.counts)
  files.write_json(
    aside / 'store.json',
    {'settings': settings, 'pad_id': tokenizer.pad_id, 'files': stamps, 'report': counts},
  )


def _gather(
  folder: epath.Path,
  dataset: Dataset,
  settings: dict[str, Any],
  share: _Share,
  parts: list[epath.Path],
  wait_s: float,
) -> jt.Int32[np.ndarray, 'passages']:
  """Puts the shards of all processes into one folder and makes them a table; returns the lengths of
  all rows.
  """
  sizes, cut = dict(share.sizes), share.cut
  lengths = np.zeros(max(share.rows.values()) + 1, np.int32)

  def place(own: dict[int, table.ShardSize], of_rows: jt.Int[np.ndarray, 'rows']) -> None:
    ends = np.cumsum([size.rows for size in own.values()])
    for (shard, size), end in zip(own.items(), ends.tolist(), strict=True):
      lengths[shard * _SHARD_ROWS : shard * _SHARD_ROWS + size.rows] = of_rows[
        end - size.rows : end
      ]

  place(share.sizes, np.array(share.lengths, np.int32))
  for number, part in enumerate(parts, start=1):
    fingerprint.wait_for(
      part.exists, wait_s, f'{folder}: process {number} has not tokenised its share of the passages'
    )
    with (part / _SHARE).open('rb') as file, np.load(file) as arrays:
      own = {
        int(shard): table.ShardSize(int(rows), int(size)) for shard, rows, size in arrays['shards']
      }
      place(own, arrays['lengths'])
      cut += int(arrays['cut'])
    sizes |= own
    for file in part.iterdir():
      if file.name != _SHARE:
        file.copy(folder / file.name)
  table.describe(folder, 'passages', ('tokens',), sizes)
  limit = settings['passage_max_length']
  dataset.report.counts[f'passages of more than {limit} tokens: cut'] += cut
  return lengths


def _write_passages(
  folder: epath.Path,
  dataset: Dataset,
  tokenizer: Tokenizer,
  settings: dict[str, Any],
  process_index: int,
  process_count: int,
) -> _Share:
  """Writes one process's shards of the passages, having read all of them: the number of a row
  depends on the texts that came before it.
  """
  lengths: list[int] = []
  rows: dict[str, int] = {}
  row_of_text: dict[bytes, int] = {}
  empty: set[int] = set()
  cut = 0
  limit, prefix = settings['passage_max_length'], settings['passage_prefix']
  progress = Progress('passages', dataset.total_passages(), 'tokenising')
  with table.TableWriter(folder, 'passages', ('tokens',), part=True) as writer:

    def flush(chunk: list[tuple[int, sources.Passage]]) -> int:
      tokens, too_long = tokenizer.encode([prefix + passage.text for _, passage in chunk], limit)
      for (row, passage), ids in zip(chunk, tokens, strict=True):
        writer.write(passage.id, {'tokens': ids}, row // _SHARD_ROWS)
        lengths.append(len(ids))
      return too_long

    chunk: list[tuple[int, sources.Passage]] = []
    for passage in dataset.passages:
      digest = hashlib.blake2b(passage.text.encode(), digest_size=16).digest()
      new = len(row_of_text)
      rows[passage.id] = row_of_text.setdefault(digest, new)
      if rows[passage.id] != new:
        dataset.report.count('passages with the text of another: one row for both', passage.id)
      else:
        if new // _SHARD_ROWS % process_count == process_index:
          chunk.append((new, passage))
        if not passage.text:
          empty.add(new)
      progress.advance()
      if len(chunk) == _CHUNK:
        cut += flush(chunk)
        chunk = []
    if chunk:
      cut += flush(chunk)
  return _Share(writer.sizes, lengths, cut, rows, empty)


def _write_queries(
  folder: epath.Path,
  dataset: Dataset,
  tokenizer: Tokenizer,
  settings: dict[str, Any],
  rows: dict[str, int],
  empty: set[int],
) -> dict[str, Any]:
  """Writes the queries and what belongs to them; returns the arrays of lengths.npz."""
  report, limit = dataset.report, settings['query_max_length']
  relevant: dict[str, dict[int, None]] = {}
  for query in dataset.queries:
    same_text = relevant.setdefault(query.text, {})
    same_text.update(
      dict.fromkeys(rows[name] for name in dataset.positives(query.id) if name in rows)
    )
  lengths: list[tuple[int, ...]] = []
  with table.TableWriter(folder, 'queries', _QUERY_COLUMNS) as writer:
    for start in range(0, len(dataset.queries), _CHUNK):
      chunk = dataset.queries[start : start + _CHUNK]
      tokens, cut = tokenizer.encode(
        [settings['query_prefix'] + query.text for query in chunk], limit
      )
      report.counts[f'queries of more than {limit} tokens: cut'] += cut
      for query, ids in zip(chunk, tokens, strict=True):
        known = relevant[query.text]
        positives = [
          row
          for row in dict.fromkeys(
            rows[name] for name in dataset.positives(query.id) if name in rows
          )
          if row not in empty
        ]
        if not positives:
          report.count('queries whose positives are unknown or have no text: skipped', query.id)
          continue
        mined: dict[int, int] = {}
        for negative in dataset.negatives.get(query.id, ()):
          if negative.id in rows:
            mined[rows[negative.id]] = mined.get(rows[negative.id], 0) | sum(
              _BITS[pool] for pool in set(negative.pools)
            )
        negatives = [row for row in mined if row not in known]
        pools = np.array([mined[row] for row in negatives], np.int32)
        report.counts['negatives with the text of a relevant passage: ignored'] += len(mined) - len(
          negatives
        )
        values = {
          'positives': positives,
          'relevant': list(known),
          'negatives': negatives,
          'pools': pools,
        }
        writer.write(
          query.id,
          {'tokens': ids} | {name: np.array(value, np.int32) for name, value in values.items()},
        )
        in_pool = (int(np.count_nonzero(pools & bit)) for bit in (UNDENOISED, DENOISED))
        lengths.append((len(ids), len(negatives), len(known), *in_pool))
  if not lengths:
    raise InputError(
      f'{dataset.files["qrels"]}: no query is left whose positive is in the corpus and has text'
    )
  columns = np.array(lengths, np.int32).T
  return dict(zip(_COUNTS, columns, strict=True))
