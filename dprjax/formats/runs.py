"""Streams TREC runs of any length as arrays, with one block of the file in memory.

Lines may come in any order: `dprjax.formats.trec.read_run` sorts a whole run, `dprjax.mining` sorts
rows on disk by 64-bit keys of ids. The CSV reader of Arrow parses 12 times as fast as
``line.split()``; a block that it rejects (several spaces in a row, a bad line) is read line by
line. Runs are UTF-8, with or without a byte-order mark.
"""

import codecs
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int32, UInt64
from pyarrow import csv

from dprjax.base import hashes
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import open_bytes
from dprjax.formats.fields import check_id

_BLOCK = 1 << 23  # bytes
_PARSED = 1 << 20  # bytes that a thread of Arrow parses at a time
_LONGEST_LINE = 1 << 20  # bytes
_LARGEST = float(np.finfo(np.float32).max)  # trec_eval compares scores as float32
_WHOLE = re.compile(rb'[+-]?[0-9]{1,20}')
_FLOAT = re.compile(rb'[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?')
_CONTROLS = bytes({*range(32), 127} - {*b'\t\n\r'})
_ODD_SPACE = re.compile(r'[^\S \t\r\n]|[\x80-\x9f\ufeff]')  # beyond ASCII
_COLUMNS = {
  'query': pa.binary(),
  'zero': pa.binary(),
  'doc': pa.binary(),
  'rank': pa.int32(),
  'score': pa.float64(),
  'tag': pa.binary(),
}


class Block(NamedTuple):
  """Some lines of a run.

  Attributes:
    query_ids, doc_ids: bytes of UTF-8.
    ranks: as in the file; empty unless read.
    scores: finite, also as float32.
    first_line, text: the number of the first line, and the lines.
    offset: of the text in the (decompressed) file, in bytes.
    fraction: of the file read so far.
  """

  query_ids: pa.BinaryArray
  doc_ids: pa.BinaryArray
  ranks: Int32[np.ndarray, ' rows']
  scores: Float64[np.ndarray, ' rows']
  first_line: int
  text: bytes
  offset: int
  fraction: float

  def line(self, row: int) -> int:
    """The number of the line of a row."""
    return self.lines()[row]

  def lines(self) -> Sequence[int]:
    """The number of the line of every row."""
    if self.text.count(b'\n') == len(self.scores):  # no blank lines
      return range(self.first_line, self.first_line + len(self.scores))
    lines = enumerate(self.text.split(b'\n'), self.first_line)
    return [number for number, line in lines if line.strip()]


def read_blocks(path: PathLike, block_bytes: int = _BLOCK, ranks: bool = True) -> Iterator[Block]:
  """Streams a TREC run (``qid Q0 docid rank score tag``), with or without ranks.

  Raises:
    InputError: missing or empty; naming the line: not UTF-8, not six columns, or a bad rank, score
      or id.
  """
  lines, rows = 0, 0
  with open_bytes(path, 'run') as (file, fraction):
    start = file.read(3)
    rest, delimiter = start.removeprefix(codecs.BOM_UTF8), ''
    offset = len(start) - len(rest)
    while piece := file.read(block_bytes):
      text = rest + piece
      end = text.rfind(b'\n') + 1
      text, rest = text[:end], text[end:]
      if text:
        delimiter = delimiter or _delimiter(text)
        yield (block := _block(path, text, delimiter, lines, offset, fraction(), ranks))
        lines, rows = lines + text.count(b'\n'), rows + len(block.scores)
        offset += len(text)
      if len(rest) > _LONGEST_LINE:
        raise InputError(
          f'{path}, line {lines + 1}: longer than {_LONGEST_LINE:,} bytes; not a TREC run'
        )
    if columns := rest.split():
      if len(columns) < 6:
        raise InputError(
          f'{path}, line {lines + 1}: cut off ({len(columns)} of 6 columns); write the file again'
        )
      yield _block(path, rest + b'\n', delimiter or _delimiter(rest), lines, offset, 1.0, ranks)
      rows += 1
  if not rows:
    raise InputError(f'{path}: the run has no lines')


def parse(path: PathLike, text: bytes, first_line: int) -> Block:
  """The block of some whole lines of a run, without ranks. Raises InputError as `read_blocks`."""
  return _block(path, text, _delimiter(text), first_line - 1, 0, 1.0, ranks=False)


def read_tag(path: PathLike) -> str:
  """The tag in the first line of the run. Raises InputError as `read_blocks` does."""
  with open_bytes(path, 'run') as (file, _):
    while line := file.readline(_LONGEST_LINE):
      if columns := line.split():
        return check_id(decode(columns[-1]), f'{path}: the tag in the first line of the run')
  raise InputError(f'{path}: the run has no lines')


def keys(ids: pa.BinaryArray) -> UInt64[np.ndarray, ' rows']:
  """The keys of ids (`dprjax.base.hashes`)."""
  if not len(ids):
    return np.empty(0, np.uint64)
  _, offsets, text = ids.buffers()
  ends = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1]
  return hashes.keys_at(np.frombuffer(text, np.uint8), ends[:-1], ends[1:])


def name_rows(path: PathLike, pairs: Sequence[tuple[int, int]]) -> list[str]:
  """'line 7: query q3 document d12 rank 4 score 0.5' of rows with these pairs of keys."""
  names: list[str] = []
  docs = np.array(sorted({doc for _, doc in pairs}), np.uint64)
  for block in read_blocks(path):
    queries, block_docs = keys(block.query_ids), keys(block.doc_ids)
    for row in np.flatnonzero(np.isin(block_docs, docs)).tolist():
      if (int(queries[row]), int(block_docs[row])) in pairs and len(names) < len(pairs):
        names.append(
          f'line {block.line(row)}: query {decode(block.query_ids[row].as_py())} document '
          f'{decode(block.doc_ids[row].as_py())} rank {block.ranks[row]} score '
          f'{float(block.scores[row])!r}'
        )
    if len(names) == len(pairs):
      break
  return names


def decode(identifier: bytes) -> str:
  return identifier.decode('utf-8', 'replace')


def _delimiter(text: bytes) -> str:
  return '\t' if b'\t' in text[: text.find(b'\n')] else ' '


def _block(
  path: PathLike,
  text: bytes,
  delimiter: str,
  lines: int,
  offset: int,
  fraction: float,
  ranks: bool,
) -> Block:
  sound = _is_plain(path, text, delimiter.encode(), lines)
  if sound:
    try:
      table = _parse(text, delimiter, ranks)
      sound = bool((np.abs(table['score'].to_numpy()) <= _LARGEST).all())
    except pa.ArrowInvalid:
      sound = False
  if not sound:
    table = _parse(_line_by_line(path, text, lines, ranks), ' ', ranks)
  return Block(
    _array(table['query']),
    _array(table['doc']),
    table['rank'].to_numpy() if ranks else np.empty(0, np.int32),
    table['score'].to_numpy(),
    lines + 1,
    text,
    offset,
    fraction,
  )


def _is_plain(path: PathLike, text: bytes, delimiter: bytes, lines: int) -> bool:
  """Whether Arrow reads the text as `_line_by_line` does; InputError if it is not UTF-8."""
  # Arrow takes a lone carriage return for a line end, allows empty columns, and takes the other
  # delimiter for a part of an id.
  other = b' ' if delimiter == b'\t' else b'\t'
  if b'\r' in text:
    odd = (delimiter * 2, b'\n' + delimiter, delimiter + b'\n', delimiter + b'\r', other)
    plain = (
      text.count(b'\r') == text.count(b'\r\n')
      and len(text.translate(None, _CONTROLS)) == len(text)
      and not text.startswith(delimiter)
      and not any(part in text for part in odd)
    )
  else:  # the same test, several times as fast; blank lines are not plain
    bytes_ = np.frombuffer(text, np.uint8)
    blank = bytes_ <= ord(' ')
    plain = (
      other not in text
      and b'\x7f' not in text
      and not blank[0]
      and not (blank[1:] & blank[:-1]).any()
      and np.count_nonzero(bytes_ < ord(' '))
      == np.count_nonzero((bytes_ == ord('\n')) | (bytes_ == ord('\t')))
    )
  if text.isascii():
    return plain
  try:
    return plain and not _ODD_SPACE.search(text.decode())
  except UnicodeDecodeError as error:
    line = lines + 1 + text.count(b'\n', 0, error.start)
    raise InputError(
      f'{path}, line {line}: not UTF-8 text ({error.reason}); convert it first'
    ) from error


def _parse(text: bytes, delimiter: str, ranks: bool) -> pa.Table:
  names = ['query', 'doc', 'score', *(['rank'] if ranks else [])]
  if not text.strip():
    return pa.table({name: pa.array([], _COLUMNS[name]) for name in names})
  return csv.read_csv(
    pa.BufferReader(text),
    read_options=csv.ReadOptions(column_names=list(_COLUMNS), block_size=_PARSED),
    parse_options=csv.ParseOptions(delimiter=delimiter, quote_char=False, escape_char=False),
    convert_options=csv.ConvertOptions(
      column_types=_COLUMNS, include_columns=names, check_utf8=False, null_values=[]
    ),
  )


def _line_by_line(path: PathLike, text: bytes, lines: int, ranks: bool) -> bytes:
  """The lines with single spaces, and numbers that Arrow reads; InputError for a bad line."""
  sound = []
  for number, line in enumerate(text.split(b'\n'), start=lines + 1):
    columns = line.split()
    if not columns:
      continue
    where = f'{path}, line {number}'
    if b'\r' in line.strip():
      raise InputError(f'{where}: a carriage return within the line; lines end with a newline')
    if len(columns) != 6:
      raise InputError(
        f'{where}: {counted(len(columns), "columns")}, expected 6 between spaces or tabs: query Q0 '
        'document rank score tag'
      )
    for column in (columns[0], columns[2]):
      check_id(column.decode(), where)
    rank, score = decode(columns[3]), _number(columns[4])
    if not abs(score) <= _LARGEST:
      raise InputError(
        f'{where}: the score {decode(columns[4])!r:.40} is not a finite number of 32 bits'
      )
    if ranks:
      if not _WHOLE.fullmatch(columns[3]) or abs(int(rank)) >= 2**31:
        raise InputError(f'{where}: the rank {rank!r:.40} is not a whole number')
      # The Python spelling: Arrow does not take '+1'.
      columns[3] = b'%d' % int(rank)
    columns[4] = repr(score).encode()
    sound.append(b' '.join(columns))
  return b'\n'.join(sound) + b'\n'


def _number(text: bytes) -> float:
  # Python also takes '1_000'.
  return float(text) if _FLOAT.fullmatch(text) else math.nan


def _array(column: pa.ChunkedArray) -> pa.BinaryArray:
  # The type from combine_chunks depends on the pyarrow version and on the number of chunks.
  return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.binary())
