"""An index of a corpus on disk: by passage id, the place in the file and a digest of the text.

The index takes 24 bytes a passage, in parts by the first byte of the key of the id. Passages with
the same digest are copies: titles and texts differ at most in white space.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import numpy as np
from jaxtyping import Int64, UInt64

from dprjax.base import files, outofcore, reading
from dprjax.base.errors import InputError
from dprjax.formats import texts

_ENTRY = np.dtype([('key', '<u8'), ('offset', '<i8'), ('digest', '<u8')])
_PARTS = 256  # of the index, each sorted in memory
_CHUNK = 1 << 16  # passages indexed at a time


@dataclasses.dataclass(frozen=True)
class Passages:
  """An indexed corpus; ``name`` is its path in messages."""

  path: pathlib.Path
  name: str
  layout: texts.FileLayout
  index: outofcore.Buckets

  def look_up(
    self, keys: UInt64[np.ndarray, ' n']
  ) -> tuple[Int64[np.ndarray, ' n'], UInt64[np.ndarray, ' n']]:
    """Offsets (-1: unknown) and digests of the passages with these ascending keys."""
    offsets, digests = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.uint64)
    borders = np.searchsorted(_part(keys), np.arange(_PARTS + 1))
    for part, (start, stop) in enumerate(itertools.pairwise(borders.tolist())):
      if start < stop:
        entries = self.index.read(part)
        places = outofcore.positions(entries['key'], keys[start:stop])
        known = np.flatnonzero(places >= 0)
        offsets[start + known] = entries['offset'][places[known]]
        digests[start + known] = entries['digest'][places[known]]
    return offsets, digests

  def read(self, offsets: Int64[np.ndarray, ' n']) -> Iterator[texts.PassageRecord]:
    """The passages at these offsets, fastest if ascending."""
    with self.path.open('rb') as file:
      for offset in offsets.tolist():
        file.seek(offset)
        lines = (line.decode().rstrip('\r\n') for line in reading.byte_lines(file))
        _, row = next(self.layout.rows(enumerate(lines, start=1), self.name))
        yield self.layout.entry(row, self.name)


class Loader:
  """Reads each passage once, by key, into ``passages``."""

  def __init__(
    self, corpus: Passages, keys: UInt64[np.ndarray, ' n'], offsets: Int64[np.ndarray, ' n']
  ):
    """``keys`` are ascending, with their ``offsets`` from `Passages.look_up`."""
    self._corpus, self._keys, self._offsets = corpus, keys, offsets
    self.passages: dict[int, texts.PassageRecord] = {}

  def read(self, keys: UInt64[np.ndarray, ' m']) -> None:
    new = [key for key in np.unique(keys).tolist() if key not in self.passages]
    offsets = self._offsets[np.searchsorted(self._keys, np.array(new, np.uint64))]
    order = np.argsort(offsets)
    entries = self._corpus.read(offsets[order])
    self.passages.update((new[place], next(entries)) for place in order.tolist())


def index_corpus(
  path: files.PathLike, folder: pathlib.Path, progress: Callable[[int, float], None] | None = None
) -> Passages:
  """Reads a corpus once and writes the index.

  Args:
    path: a corpus for `dprjax.formats.texts`. A compressed or remote one is unpacked into the
      folder; formats without lines of BEIR or MS MARCO are converted there to BEIR.
    folder: created for the index.
    progress: called with the number of passages and the fraction of the file read so far.

  Raises:
    InputError: a missing, empty or malformed file, a pipe, a repeated id, or no space.
  """
  found = texts.corpus_lines(path)
  if found is None:
    found = _as_lines(path, folder)
  found = files.regular_file(found, 'corpus')
  index = outofcore.Buckets(folder / 'index', _ENTRY)
  plain = found.suffix not in reading.COMPRESSED and '://' not in str(found)
  new: list[tuple[str, int, int]] = []
  offsets: dict[int, int] = {}  # by line, since the last row
  count = number = 0

  def flush() -> None:
    entries = np.empty(len(new), _ENTRY)
    ids, entries['offset'], entries['digest'] = zip(*new, strict=True)
    entries['key'] = outofcore.keys_of(ids)
    index.append(entries, _part(entries['key']))
    new.clear()

  def read_lines(file: IO[bytes], copy: IO[bytes] | None) -> Iterator[tuple[int, str]]:
    nonlocal number
    offset = 0
    for number, line in enumerate(reading.byte_lines(file), start=1):
      if copy:
        copy.write(line)
      if number == 1 and line.startswith(codecs.BOM_UTF8):
        offset = len(codecs.BOM_UTF8)
        line = line[offset:]
      offsets[number] = offset
      yield number, reading.sound_line(line.decode(), str(path), number)
      offset += len(line)

  spool = contextlib.nullcontext() if plain else (folder / 'text').open('wb')
  with (
    reading.open_bytes(found, 'corpus') as (file, fraction),
    files.no_room(folder),
    spool as copy,
    reading.decoding(str(path), lambda: f', line {number}'),
  ):
    layout, rows = texts.open_rows(read_lines(file, copy), texts.format_of(found), str(path))
    for first, row in rows:
      passage = layout.entry(row, f'{path}, line {first}')
      new.append((passage.id, offsets[first], digest(passage.joined)))
      offsets.clear()
      count += 1
      if len(new) == _CHUNK:
        flush()
        if progress:
          progress(count, fraction())
  if not count:
    raise InputError(f'{path}: it has no passages')
  if new:
    flush()
  for part in range(_PARTS):
    entries = index.pop(part)
    entries = entries[np.argsort(entries['key'], kind='stable')]
    twice = np.flatnonzero(entries['key'][1:] == entries['key'][:-1])
    if len(twice):
      first, again = entries['offset'][twice[0] : twice[0] + 2].tolist()
      raise InputError(
        f'{path}: {_line_at(found, first)} and {_line_at(found, again)} have the same passage id'
      )
    index.append(entries, np.full(len(entries), part))
  return Passages(pathlib.Path(found) if plain else folder / 'text', str(path), layout, index)


def _as_lines(path: files.PathLike, folder: pathlib.Path) -> pathlib.Path:
  written = folder / 'corpus.jsonl'
  folder.mkdir(parents=True, exist_ok=True)
  with files.no_room(folder), written.open('wb') as file:
    for passage in texts.read_texts(path, 'passage'):
      record = {'_id': passage.id, 'text': passage.text}
      file.write(msgspec.json.encode(record) + b'\n')
  return written


def digest(text: str) -> int:
  """64 bits of a hash of the words in a text, ignoring white space."""
  words = ' '.join(text.split()).encode('utf-8', 'surrogatepass')
  return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest())


EMPTY = np.uint64(digest(''))


def _part(keys: UInt64[np.ndarray, ' n']) -> Int64[np.ndarray, ' n']:
  return (keys >> np.uint64(56)).astype(np.int64)


def _line_at(path: files.PathLike, offset: int) -> str:
  number, line = 0, b''
  with reading.open_bytes(path) as (file, _):
    while offset >= 0:
      line = file.readline()
      number, offset = number + 1, offset - len(line)
  return f'line {number} ({str(line[:60], "utf-8", "replace").strip()}...)'
