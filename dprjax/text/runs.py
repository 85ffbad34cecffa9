"""Streams TREC runs of any length as arrays, with one block of the file in memory.

Lines may come in any order: `trec.read_run` sorts a whole run, `retrieval.negatives` sorts rows
on disk. Runs are UTF-8, with or without a byte-order mark. Columns are separated by white
space, as in trec_eval. Arrow splits lines 12 times as fast as ``line.split()``.
"""

import codecs
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32, Int64, UInt64

from dprjax.base import hashes
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import open_bytes
from dprjax.text.fields import check_id

_BLOCK = 1 << 23  # bytes
_LONGEST_LINE = 1 << 20  # bytes
_LARGEST = float(np.finfo(np.float32).max)  # trec_eval compares scores as float32
_CONTROLS = bytes({*range(32), 127} - {*b'\t\n\r'})


class Block(NamedTuple):
  """Some lines of a run.

  Attributes:
    ranks: as in the file; empty unless read.
    scores: finite, also as float32.
    lines: the number of each line in the file, from 1.
    offsets: where each line begins in the (decompressed) file, in bytes.
    fraction: of the file read so far.
  """

  query_ids: pa.StringArray
  doc_ids: pa.StringArray
  ranks: Int32[np.ndarray, ' ranks']
  scores: Float64[np.ndarray, ' rows']
  lines: Int64[np.ndarray, ' rows']
  offsets: Int64[np.ndarray, ' rows']
  fraction: float


def read_blocks(path: PathLike, block_bytes: int = _BLOCK, ranks: bool = True) -> Iterator[Block]:
  """Streams a TREC run (``qid Q0 docid rank score tag``), with or without ranks."""
  lines, rows = 0, 0
  with open_bytes(path, 'run') as (file, fraction):
    start = file.read(3)
    rest = start.removeprefix(codecs.BOM_UTF8)
    offset = len(start) - len(rest)
    more = True
    while more:
      piece = file.read(block_bytes)
      more = bool(piece)
      text = rest + piece
      end = text.rfind(b'\n') + 1 if more else len(text)
      text, rest = text[:end], text[end:]
      block = parse(path, text, lines + 1, offset, ranks)._replace(fraction=fraction())
      if len(block.scores):
        yield block
      lines, rows = lines + text.count(b'\n'), rows + len(block.scores)
      offset += len(text)
  if not rows:
    raise InputError(f'{path}: the run has no lines')


def parse(
  path: PathLike, text: bytes, first_line: int, offset: int = 0, ranks: bool = False
) -> Block:
  """The block of some whole lines of a run."""
  if text and not text.endswith(b'\n'):
    text += b'\n'
  _check_utf8(path, text, first_line)
  ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord('\n')) + 1
  starts = np.concatenate([[0], ends]).astype(np.int32)
  whole = pa.StringArray.from_buffers(len(ends), pa.py_buffer(starts), pa.py_buffer(text))
  stripped = pc.ascii_trim_whitespace(whole)
  rows = np.flatnonzero(pc.binary_length(stripped).to_numpy())
  columns = pc.ascii_split_whitespace(stripped.take(pa.array(rows)))
  lines, counts = rows + first_line, pc.list_value_length(columns).to_numpy()
  if (counts != 6).any():
    row = int(np.argmax(counts != 6))
    raise InputError(
      f'{path}, line {lines[row]}: {counted(int(counts[row]), "columns")}, expected 6 between '
      'spaces or tabs: query Q0 document rank score tag'
    )
  cells = columns.flatten()
  queries, docs, rank, score = (
    cells.take(pa.array(np.arange(column, len(cells), 6))) for column in (0, 2, 3, 4)
  )
  if not text.isascii() or len(text.translate(None, _CONTROLS)) < len(text):
    for ids in (queries, docs):
      for line, id_ in zip(lines.tolist(), ids.to_pylist(), strict=True):
        check_id(id_, f'{path}, line {line}')
  return Block(
    queries,
    docs,
    _numbers(path, rank, pa.int32(), 'rank', lines) if ranks else np.empty(0, np.int32),
    _numbers(path, score, pa.float64(), 'score', lines),
    lines,
    starts[rows].astype(np.int64) + offset,
    1.0,
  )


def _check_utf8(path: PathLike, text: bytes, first_line: int) -> None:
  if not text.isascii():
    try:
      text.decode()
    except UnicodeDecodeError as error:
      line = first_line + text.count(b'\n', 0, error.start)
      raise InputError(
        f'{path}, line {line}: not UTF-8 text ({error.reason}); convert it first'
      ) from error


def _numbers(
  path: PathLike, cells: pa.StringArray, kind: pa.DataType, name: str, lines: np.ndarray
) -> np.ndarray:
  try:
    values = cells.cast(kind).to_numpy()
  except pa.ArrowInvalid:
    unsigned = pc.replace_substring_regex(cells, r'^\+([0-9.])', r'\1')  # Arrow rejects '+1'
    values = np.array([_number(cell, kind) for cell in unsigned])
  fits = np.abs(values) <= _LARGEST
  if not fits.all():
    row = int(np.argmin(fits))
    raise InputError(
      f'{path}, line {lines[row]}: the {name} {cells[row].as_py()!r:.40} is not a finite number of '
      f'32 bits{", and whole" if name == "rank" else ""}'
    )
  return values.astype(kind.to_pandas_dtype(), copy=False)


def _number(cell: pa.Scalar, kind: pa.DataType) -> float:
  try:
    return cell.cast(kind).as_py()
  except pa.ArrowInvalid:
    return np.nan


def read_tag(path: PathLike) -> str:
  """The tag in the first line of the run; empty without lines."""
  with open_bytes(path, 'run') as (file, _):
    while line := file.readline(_LONGEST_LINE):
      if columns := line.split():
        tag = columns[-1].decode('utf-8', 'replace')
        return check_id(tag, f'{path}: the tag in the first line of the run')
  return ''


def keys(ids: pa.StringArray) -> UInt64[np.ndarray, ' rows']:
  """The keys of ids (`dprjax.base.hashes`)."""
  if not len(ids):
    return np.empty(0, np.uint64)
  _, offsets, text = ids.buffers()
  ends = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1]
  return hashes.keys_at(np.frombuffer(text, np.uint8), ends[:-1], ends[1:])
