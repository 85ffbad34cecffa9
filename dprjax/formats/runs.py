"""Runs of any length as a stream of arrays: no more than a block of the file is in memory.

`dprjax.formats.trec.read_run` reads a run whole and orders it; here the lines may come in any
order, ids are 64-bit keys (`dprjax.base.outofcore`), and whoever reads puts the rows together.
Arrow's CSV reader parses, 12 times as fast as ``line.split()``; what it will not take (several
spaces in a row, a bad line) is looked at line by line.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int32, UInt64
from pyarrow import csv

from dprjax.base import outofcore
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, open_bytes
from dprjax.formats import trec

_BLOCK = 1 << 23  # bytes
_PARSED = 1 << 20  # bytes that one of Arrow's threads parses at a time
_COLUMNS = {
  'query': pa.binary(),
  'zero': pa.binary(),
  'doc': pa.binary(),
  'rank': pa.int32(),
  'score': pa.float64(),
  'tag': pa.binary(),
}
_USED = ['query', 'doc', 'rank', 'score']


class Block(NamedTuple):
  """Some lines of a run.

  Attributes:
    queries, docs: the ids' keys.
    ranks, scores: as the file has them.
    line: the number of the first line (a blank line within the block is not counted).
    ids: the ids themselves, columns ``query`` and ``doc``.
    share: of the file that is read by now.
  """

  queries: UInt64[np.ndarray, 'rows']
  docs: UInt64[np.ndarray, 'rows']
  ranks: Int32[np.ndarray, 'rows']
  scores: Float64[np.ndarray, 'rows']
  line: int
  ids: pa.Table
  share: float

  def query_id(self, row: int) -> str:
    return str(self.ids['query'][row].as_py(), 'utf-8', 'replace')

  def doc_id(self, row: int) -> str:
    return str(self.ids['doc'][row].as_py(), 'utf-8', 'replace')


def read_blocks(path: PathLike, block_bytes: int = _BLOCK) -> Iterator[Block]:
  """Streams a TREC run (``qid Q0 docid rank score tag``).

  Raises:
    InputError: missing or empty; naming the line: not six columns, a rank that is no whole number,
      a score that is no finite number.
  """
  lines, rows = 0, 0
  with open_bytes(path, 'run') as (file, share):
    rest, delimiter = b'', b''
    while piece := file.read(block_bytes):
      text = rest + piece
      end = text.rfind(b'\n') + 1
      text, rest = text[:end], text[end:]
      if text:
        delimiter = delimiter or _delimiter(text)
        block = _block(path, text, delimiter, lines, share())
        lines += text.count(b'\n')
        rows += len(block.docs)
        yield block
    if rest.strip():
      if len(rest.split()) < 6:
        raise InputError(
          f'{path}, line {lines + 1}: the file ends in the middle of a line ({len(rest.split())} '
          'of 6 columns): '
          'it was cut off, write it again'
        )
      yield _block(path, rest + b'\n', delimiter or _delimiter(rest), lines, 1.0)
      rows += 1
  if not rows:
    raise InputError(f'{path}: no line in this run')


def read_tag(path: PathLike) -> str:
  """What the run's first line calls its retriever. Raises InputError as `read_blocks` does."""
  with open_bytes(path, 'run') as (file, _):
    for line in file:
      if columns := line.split():
        return str(columns[-1], 'utf-8', 'replace')
  raise InputError(f'{path}: no line in this run')


def name_rows(path: PathLike, pairs: Sequence[tuple[int, int]]) -> list[str]:
  """'line 7: query q3 document d12 rank 4 score 0.5' of rows that have these pairs of keys, as many
  as there are pairs; for messages.
  """
  names: list[str] = []
  wanted = set(pairs)
  docs = np.array(sorted({doc for _, doc in wanted}), np.uint64)
  for block in read_blocks(path):
    for row in np.flatnonzero(np.isin(block.docs, docs)).tolist():
      if (int(block.queries[row]), int(block.docs[row])) in wanted and len(names) < len(pairs):
        names.append(
          f'line {block.line + row}: query {block.query_id(row)} document {block.doc_id(row)} rank '
          f'{block.ranks[row]} '
          f'score {float(block.scores[row])!r}'
        )
    if len(names) == len(pairs):
      break
  return names


def _delimiter(text: bytes) -> bytes:
  return b'\t' if b'\t' in text[: text.find(b'\n')] else b' '


def _block(path: PathLike, text: bytes, delimiter: bytes, lines: int, share: float) -> Block:
  try:
    table = _parse(text, delimiter)
    sound = bool(np.isfinite(table['score'].to_numpy()).all())
  except pa.ArrowInvalid:
    sound = False
  if not sound:
    table = _parse(_line_by_line(path, text, lines), b' ')
  return Block(
    _keys(table['query']),
    _keys(table['doc']),
    table['rank'].to_numpy(),
    table['score'].to_numpy(),
    lines + 1,
    table.select(['query', 'doc']),
    share,
  )


def _parse(text: bytes, delimiter: bytes) -> pa.Table:
  if not text.strip():
    return pa.table({name: pa.array([], _COLUMNS[name]) for name in _USED})
  return csv.read_csv(
    pa.BufferReader(text),
    read_options=csv.ReadOptions(column_names=list(_COLUMNS), block_size=_PARSED),
    parse_options=csv.ParseOptions(
      delimiter=delimiter.decode(), quote_char=False, escape_char=False
    ),
    convert_options=csv.ConvertOptions(
      column_types=_COLUMNS, include_columns=_USED, check_utf8=False, null_values=[]
    ),
  ).combine_chunks()


def _line_by_line(path: PathLike, text: bytes, lines: int) -> bytes:
  """The same lines, columns between single spaces.

  Raises InputError for the one that cannot be used.
  """
  sound = []
  for number, line in enumerate(text.split(b'\n'), start=lines + 1):
    columns = line.split()
    if not columns:
      continue
    said = [str(column, 'utf-8', 'replace') for column in columns]
    score = trec.row_score(said, path, number)
    try:
      in_range = abs(int(said[3])) < 2**31
    except ValueError:
      in_range = False
    if not in_range:
      raise InputError(f'{path}, line {number}: the rank {said[3]!r} is not a whole number')
    # Python's spelling of both, which Arrow reads: it takes neither '+1' nor '1_000'.
    sound.append(
      b' '.join((*columns[:3], str(int(said[3])).encode(), repr(score).encode(), columns[5]))
    )
  return b'\n'.join(sound) + b'\n'


def _keys(column: pa.ChunkedArray) -> UInt64[np.ndarray, 'rows']:
  array = column.combine_chunks()
  if isinstance(
    array, pa.ChunkedArray
  ):  # what combine_chunks returns depends on pyarrow's version, and on there being a chunk
    array = array.chunk(0) if array.num_chunks else pa.array([], pa.binary())
  _, offsets, text = array.buffers()
  if not len(array):
    return np.empty(0, np.uint64)
  places = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
  return outofcore.keys_at(np.frombuffer(text, np.uint8), places[:-1], places[1:])
