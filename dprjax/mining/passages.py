"""A corpus by its ids without holding it: an index on disk of where each passage lies in its file,
and of what it says.

24 bytes a passage on disk, sorted by the id's key, and nothing that grows with the corpus in
memory. The text's digest is that of title and text with their white space made single spaces, so
that copies of a passage are known by it.
"""

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64, UInt64

from dprjax.base import files, outofcore
from dprjax.base.errors import InputError
from dprjax.formats import texts

_ENTRY = np.dtype([('key', '<u8'), ('offset', '<i8'), ('digest', '<u8')])
_PARTS = 256  # of the corpus, each sorted in memory
_CHUNK = 1 << 16  # entries read, and passages indexed, at a time


class Passages:
  """An indexed corpus; see `index_corpus`. ``count`` passages."""

  def __init__(
    self,
    path: pathlib.Path,
    name: str,
    parse: texts.Parse,
    entries: pathlib.Path,
    count: int,
  ):
    self._path, self._name, self._parse, self._entries, self.count = (
      path,
      name,
      parse,
      entries,
      count,
    )

  def look_up(
    self, keys: UInt64[np.ndarray, 'n']
  ) -> tuple[Int64[np.ndarray, 'n'], UInt64[np.ndarray, 'n']]:
    """Where these passages lie (-1: there is none of this key), and their texts' digests.

    The keys must ascend; the index is read once.
    """
    offsets, digests = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.uint64)
    with self._entries.open('rb') as file:
      while len(entries := np.fromfile(file, _ENTRY, _CHUNK)):
        known = np.ascontiguousarray(entries['key'])
        start, stop = (
          np.searchsorted(keys, known[0]),
          np.searchsorted(keys, known[-1], side='right'),
        )
        places = np.searchsorted(known, keys[start:stop])
        hit = np.flatnonzero(known[places] == keys[start:stop])
        offsets[start + hit], digests[start + hit] = (
          entries['offset'][places[hit]],
          entries['digest'][places[hit]],
        )
    return offsets, digests

  def read(self, offsets: Int64[np.ndarray, 'n']) -> Iterator[texts.Entry]:
    """The passages that lie there; quickest where the offsets ascend."""
    with self._path.open('rb') as file:
      for offset in offsets.tolist():
        file.seek(offset)
        yield self._parse(file.readline().decode().rstrip('\r\n'), self._name)


def index_corpus(
  path: files.PathLike, folder: pathlib.Path, progress: Callable[[int, float], None] | None = None
) -> Passages:
  """Reads a corpus once and writes the index.

  Args:
    path: BEIR's jsonl, or MS MARCO's or DPR's tsv, as `dprjax.formats.texts` reads them.
      A compressed file is unpacked into the folder: passages are read from the middle of it.
    folder: is made, for the index.
    progress: told now and then how many passages were read, and the share of the file.

  Raises:
    InputError: a missing, empty or malformed file, an id that comes twice, no room in the folder.
  """
  found = files.existing(path, 'corpus')
  buckets = outofcore.Buckets(folder / 'parts', _ENTRY)
  plain = found.suffix not in ('.gz', '.xz', '.bz2') and '://' not in str(found)
  parse: texts.Parse | None = None
  ids: list[str] = []
  places: list[tuple[int, int]] = []
  count = offset = 0

  def flush() -> None:
    if not ids:
      return
    entries = np.empty(len(ids), _ENTRY)
    entries['key'] = outofcore.keys_of(ids)
    entries['offset'], entries['digest'] = np.array(places, np.uint64).T
    # By the first bits of the key: the parts, sorted and one behind the other, are the index.
    buckets.append(entries, (entries['key'] >> np.uint64(56)).astype(np.int64))
    ids.clear()
    places.clear()

  spool = contextlib.nullcontext() if plain else (folder / 'text').open('wb')
  with files.open_bytes(found, 'corpus') as (file, share), files.no_room(folder), spool as copy:
    for number, line in enumerate(file, start=1):
      if copy:
        copy.write(line)
      text = line.decode().rstrip('\r\n')
      header = False
      if parse is None and text.strip():
        parse, header = texts.corpus_parser(texts.format_of(found), text)
      if parse is not None and text.strip() and not header:
        passage = parse(text, f'{path}, line {number}')
        ids.append(passage.id)
        places.append((offset, digest(passage.joined)))
        count += 1
        if len(ids) == _CHUNK:
          flush()
          if progress:
            progress(count, share())
      offset += len(line)
    flush()
  if not count or parse is None:
    raise InputError(f'{path}: no passage in it')
  entries_path = folder / 'entries'
  with entries_path.open('wb') as entries_file, files.no_room(folder):
    for part in range(_PARTS):
      entries = buckets.read(part)
      entries = entries[np.argsort(entries['key'], kind='stable')]
      twice = np.flatnonzero(entries['key'][1:] == entries['key'][:-1])
      if len(twice):
        first, again = entries['offset'][twice[0] : twice[0] + 2].tolist()
        raise InputError(
          f'{path}: {_line_at(found, first)} and {_line_at(found, again)} have the same passage '
          'id; ids must be unique'
        )
      entries_file.write(entries.tobytes())
      buckets.drop(part)
  return Passages(
    pathlib.Path(found) if plain else folder / 'text', str(path), parse, entries_path, count
  )


def digest(text: str) -> int:
  """64 bits of what a text says, whatever its white space."""
  return int.from_bytes(
    hashlib.blake2b(' '.join(text.split()).encode('utf-8', 'surrogatepass'), digest_size=8).digest()
  )


EMPTY = digest('')


def _line_at(path: files.PathLike, offset: int) -> str:
  """'line 7 (d12)', for a message."""
  number, line = 0, b''
  with files.open_bytes(path) as (file, _):
    while offset >= 0:
      line = file.readline()
      number, offset = number + 1, offset - len(line)
  return f'line {number} ({str(line[:60], "utf-8", "replace").strip()}...)'
