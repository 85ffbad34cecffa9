"""A folder of embeddings: vectors, their ids, and what made them.

    embeddings-00000-of-00003.npy   [rows, H] float32, float16 or codes (``codes.py``)
    ids-00000-of-00003.txt          one id a line, in the rows' order
    manifest.json                   counts, what made the vectors (``Meta``), SHA-256 of every file

The manifest appears when all shards are written. Until then there is a ``progress.json`` in its
place. Where several processes fill the folder, each of the others has its own ``progress-I.json``.
Each file is written aside and renamed. A folder of another `Meta`, other ids or another format's
version is never continued.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int, Shaped

from dprjax.base import arrays, files, outputs
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, sha256_file
from dprjax.retrieval import codes
from dprjax.retrieval.manifest import (
  DTYPES,
  FILES,
  MANIFEST,
  PROGRESS,
  PROGRESS_OF_OTHERS,
  Entry,
  Manifest,
  Meta,
  Shard,
  cut_shards,
  shard_names,
  shown,
)

# What a killed run leaves of a file that it was writing.
_LEFT = re.compile(r'\.(embeddings-|ids-|manifest|progress).*\.[0-9a-f]{8}\.tmp')
# White space and control characters separate the columns and lines of a run.
_BAD_IDS = re.compile(r'^\n|\n\n|[^\S\n]|[\x00-\x09\x0b-\x1f\x7f]')


class EmbeddingsWriter:
  """Fills a folder shard by shard; a second run keeps the shards that are complete.

      writer = EmbeddingsWriter(folder, meta, ids)
      for shard in writer.pending():
        writer.write(shard, encode(texts[shard.start:shard.stop]))
      writer.finish()

  Several processes may write different shards. Process 0 opens the folder before the others do, and
  finishes it after them.
  """

  def __init__(
    self,
    folder: PathLike,
    meta: Meta,
    ids: Sequence[str],
    shard_rows: int = 100_000,
    process: int = 0,
    source: str = 'ids',
    seen: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
  ):
    """Opens or makes the folder, and verifies the shards of an earlier run.

    ``source`` names where the ids are from, for messages. ``seen`` has ids of queries that the
    model has seen (`formats.seen.ids`).

    Raises:
      InputError: no ids; an id that is empty, repeated or has whitespace in it; or a folder that
        holds other embeddings (another model, text or shard size) or something else.
    """
    if meta.dtype not in DTYPES:
      raise InputError(f'embeddings cannot be stored as {meta.dtype}: choose {" or ".join(DTYPES)}')
    _check_ids(ids, source)
    self.folder = epath.Path(folder)
    self.meta = meta
    self.ids = ids
    self._process = process
    self._progress = PROGRESS if process == 0 else f'progress-{process:05d}.json'
    self._shards = cut_shards(len(ids), shard_rows)
    ids_sha256 = hashlib.sha256(''.join(f'{id_}\n' for id_ in ids).encode()).hexdigest()
    self._manifest = Manifest(meta, len(ids), shard_rows, ids_sha256, {}, seen=seen)
    done = self._resume()
    self._manifest.entries.update(done)

  def _resume(self) -> dict[int, Entry]:
    """The manifest's entries, by shard, of the shards that are there and undamaged."""
    if self.folder.exists() and not self.folder.is_dir():
      raise InputError(f'{self.folder} is a file; embeddings need a folder')
    names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
    stored = next((name for name in (MANIFEST, PROGRESS) if name in names), None)
    if stored is None:
      if names and not outputs.is_vacant(self.folder):
        raise InputError(
          f'{self.folder} is not empty and holds no embeddings; choose another folder'
        )
      self._clear()
      self._manifest.write(self.folder / PROGRESS)
      return {}
    manifest = Manifest.read(self.folder / stored)
    if different := self._differences(manifest):
      raise InputError(
        f"{self.folder} holds other embeddings: {'; '.join(different)}; repeat the first command's "
        'settings, or choose another folder'
      )
    # What is written in addition must mean the same.
    self._manifest = dataclasses.replace(self._manifest, ranges=manifest.ranges)
    if self._process:  # process 0 has verified them
      return manifest.entries
    self._clear()
    done = {
      number: entry
      for number, entry in (self._others() | manifest.entries).items()
      if self._intact(number, entry)
    }
    # A finished folder with a damaged shard is unfinished again.
    if stored == PROGRESS or len(done) < len(self._shards):
      dataclasses.replace(self._manifest, entries=done).write(self.folder / PROGRESS)
      (self.folder / MANIFEST).unlink(missing_ok=True)
    for path in self.folder.glob(PROGRESS_OF_OTHERS):
      path.unlink()
    return done

  def _clear(self) -> None:
    """Removes what a killed run left of files that it was writing."""
    for path in self.folder.iterdir() if self.folder.exists() else ():
      if _LEFT.fullmatch(path.name):
        path.unlink()

  def _intact(self, number: int, entry: Entry) -> bool:
    names = shard_names(number, len(self._shards))
    return all(
      path.exists()
      and not path.is_dir()
      and not files.is_special(path)
      and sha256_file(path) == digest
      for path, digest in zip((self.folder / names[what] for what in FILES), entry, strict=True)
    )

  def _differences(self, manifest: Manifest) -> list[str]:
    """What differs: 'arithmetic is float32 there, bfloat16 here'."""
    there = manifest.header()
    return [
      f'{key} is {shown(there[key])} there, {shown(value)} here'
      for key, value in self._manifest.header().items()
      if there[key] != value
    ]

  def _others(self) -> dict[int, Entry]:
    """The entries of the shards that other processes wrote."""
    entries: dict[int, Entry] = {}
    for path in self.folder.glob(PROGRESS_OF_OTHERS):
      progress = Manifest.read(path)
      if not self._differences(progress):
        entries |= progress.entries
    return entries

  @property
  def needs_ranges(self) -> bool:
    """Whether vectors are stored as codes whose ranges are not known yet."""
    return self.meta.dtype in codes.LEVELS and self._manifest.ranges is None

  def calibrate(self, sample: Float[np.ndarray, 'n H']) -> None:
    """Takes the ranges of codes from a sample of the vectors; before any are written.

    Raises InputError for NaN or infinity.
    """
    if not np.isfinite(sample).all():
      raise InputError(f'{self.folder}: the embedding of a text is not finite: check the backbone')
    ranges = codes.calibrate(sample, self.meta.dtype)
    self._manifest = dataclasses.replace(self._manifest, ranges=ranges)
    self._manifest.write(self.folder / self._progress)

  def pending(self) -> list[Shard]:
    """The shards still to be written, in order."""
    return [shard for shard in self._shards if shard.number not in self._manifest.entries]

  def write(self, shard: Shard, vectors: Float[np.ndarray, 'rows H']) -> None:
    """Writes one shard.

    Raises InputError for a wrong shape, NaN or infinity, or values beyond float16's range.
    """
    count = shard.stop - shard.start
    expected = (count, self.meta.dimension)
    if vectors.shape != expected:
      raise InputError(
        f'shard {shard.number} of {self.folder}: vectors of shape {vectors.shape}, expected '
        f'{expected}'
      )
    if self.needs_ranges:
      raise RuntimeError('calibrate comes before the first shard')
    ranges = self._manifest.ranges
    dtype = self.meta.dtype if ranges is None else 'float32'
    with np.errstate(over='ignore'):  # a value too large for float16 becomes infinite
      vectors = np.ascontiguousarray(vectors, dtype=dtype)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
      raise InputError(
        f'the embedding of {self.ids[shard.start + bad[0]]!r} is not finite as {dtype} '
        f'({bad.size} of {count} rows)'
      )
    if ranges is not None:
      vectors = codes.encode(vectors, codes.Code(self.meta.dtype, ranges))
    names = shard_names(shard.number, len(self._shards))
    with atomic_write(self.folder / names['embeddings'], 'wb') as file:
      np.save(file, vectors, allow_pickle=False)
    with atomic_write(self.folder / names['ids']) as file:
      file.writelines(f'{id_}\n' for id_ in self.ids[shard.start : shard.stop])
    self._manifest.entries[shard.number] = Entry(
      *(sha256_file(self.folder / names[what]) for what in FILES)
    )
    self._manifest.write(self.folder / self._progress)

  def discard(self) -> None:
    """Leaves nothing of a folder in which no shard is written yet; for a command that fails."""
    if self._process or self._manifest.entries or any(self.folder.glob(PROGRESS_OF_OTHERS)):
      return
    if not (self.folder / MANIFEST).exists():
      (self.folder / PROGRESS).unlink(missing_ok=True)

  def finish(self) -> None:
    """Writes the manifest, on process 0. Raises RuntimeError while shards are pending."""
    if self._process:
      return
    self._manifest.entries.update(self._others())
    if pending := self.pending():
      raise RuntimeError(f'{len(pending)} of {len(self._shards)} shards are not written')
    self._manifest.write(self.folder / MANIFEST)
    for path in (self.folder / PROGRESS, *self.folder.glob(PROGRESS_OF_OTHERS)):
      path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Rows:
  """Vectors of one file, on disk. So is a slice of them; ``np.asarray`` of either reads it.

  A local file is mapped, until that array is released; codes are decoded.

  Attributes:
    path: a .npy file that was checked (`_open_npy`).
    count: the rows.
    columns: of the file.
    dtype: of the file's numbers.
    offset: the first row's byte in the file.
    stored_as: what the numbers stand for; None: themselves.
    dimension: numbers of a vector that are used, the first ones; None: all.
    normalize: whether vectors that are cut get unit length again.
  """

  path: epath.Path
  count: int
  columns: int
  dtype: np.dtype
  offset: int
  stored_as: codes.Code | None = None
  dimension: int | None = None
  normalize: bool = False

  @property
  def shape(self) -> tuple[int, int]:
    """``(rows, H)`` of the vectors."""
    whole = self.columns if self.stored_as is None else len(self.stored_as.ranges.low)
    return self.count, self.dimension or whole

  @property
  def code(self) -> codes.Code | None:
    """How ``stored`` is read; None where that is not these vectors' codes."""
    return self.stored_as if self.dimension is None else None

  @property
  def stored(self) -> 'Rows':
    """The same rows as they are stored."""
    return Rows(self.path, self.count, self.columns, self.dtype, self.offset)

  def take(self, rows: Int[np.ndarray, ' n']) -> Float[np.ndarray, 'n H']:
    """The vectors of these rows, float32, without the others where the file is local."""
    return np.asarray(self._vectors(self._read()[rows]), np.float32)

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, rows: slice) -> 'Rows':
    start, stop, _ = rows.indices(len(self))
    offset = self.offset + start * self.columns * self.dtype.itemsize
    return dataclasses.replace(self, count=max(stop - start, 0), offset=offset)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float[np.ndarray, 'rows H']:
    return np.array(self._vectors(self._read()), dtype, copy=copy or None)

  def _vectors(self, values: Shaped[np.ndarray, 'n W']) -> Float[np.ndarray, 'n H']:
    if self.stored_as is not None:
      values = codes.decode(values, self.stored_as)
    return values if not self.dimension else codes.cut(values, self.dimension, self.normalize)

  def _read(self) -> Shaped[np.ndarray, 'rows W']:
    shape = self.count, self.columns
    if not self.count:
      return np.empty(shape, self.dtype)
    if not files.is_remote(self.path):
      try:
        return np.memmap(self.path, self.dtype, 'r', self.offset, shape)
      except ValueError as error:  # it has become shorter
        raise InputError(f'{self.path} was changed while it is read ({error})') from error
    with self.path.open('rb') as file:
      file.seek(self.offset)
      content = file.read(math.prod(shape) * self.dtype.itemsize)
    return np.frombuffer(content, self.dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """A finished folder. Vectors and ids are read when they are used: they may exceed memory.

  Attributes:
    shards: files of rows that follow one another.
    meta: what made them.
    sha256: of the manifest, and so of everything in the folder.
    is_cut: whether vectors are cut to their first numbers.
    seen: ids of queries that the model was trained on, or chosen by (`formats.seen.ids`).
  """

  shards: list[Rows]
  meta: Meta
  sha256: str
  _id_files: list[epath.Path]
  is_cut: bool = False
  seen: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return sum(len(shard) for shard in self.shards)

  @property
  def folder(self) -> epath.Path:
    return self._id_files[0].parent

  @property
  def fingerprint(self) -> str:
    """Names the vectors: the manifest's SHA-256 where they are whole."""
    if not self.is_cut:
      return self.sha256
    return hashlib.sha256(f'{self.sha256} {self.meta.dimension}'.encode()).hexdigest()

  def cut(self, dimension: int | None, flag: str) -> 'Embeddings':
    """The same vectors cut to their first numbers; unchanged for None.

    Raises InputError, which begins with the flag that named the folder, where they have fewer.
    """
    if dimension is None or dimension == self.meta.dimension:
      return self
    if dimension > self.meta.dimension:
      raise InputError(
        f'{flag}: {self.folder} has vectors of {self.meta.dimension} dimensions, and '
        f'--dimensions={dimension} asks for more; encode again, or ask for fewer'
      )
    return dataclasses.replace(
      self,
      shards=[
        dataclasses.replace(shard, dimension=dimension, normalize=self.meta.normalize)
        for shard in self.shards
      ],
      meta=dataclasses.replace(self.meta, dimension=dimension),
      is_cut=True,
    )

  def check_kind(self, kind: str, flag: str) -> None:
    """Raises InputError, which begins with the flag that named the folder, for another kind."""
    if self.meta.kind != kind:
      raise InputError(
        f'{flag} holds embeddings of kind {self.meta.kind}, expected {kind}: is it the right '
        'folder?'
      )

  @functools.cached_property
  def ids(self) -> list[str]:
    """One a row, all of them in memory; `ids_at` reads some.

    Raises InputError for one that comes twice.
    """
    ids = [id_ for file in self._id_files for id_ in _read_ids(file)[0]]
    check_unique(ids, str(self.folder))
    return ids

  def ids_at(self, rows: Int[np.ndarray, ' n']) -> list[str]:
    """The ids of these rows, which must ascend; one file's ids are in memory at a time."""
    found: list[str] = []
    for number, own in self._by_shard(rows):
      ids, _ = _read_ids(self._id_files[number])
      found += [ids[row] for row in own.tolist()]
    return found

  def take(self, rows: Int[np.ndarray, ' n']) -> Float[np.ndarray, 'n H']:
    """The vectors of these rows, which must ascend, float32; without the others."""
    parts = [self.shards[number].take(own) for number, own in self._by_shard(rows)]
    return np.concatenate([np.empty((0, self.meta.dimension), np.float32), *parts])

  def _by_shard(self, rows: Int[np.ndarray, ' n']) -> Iterator[tuple[int, Int[np.ndarray, ' m']]]:
    """(number of a shard, which of its rows are among these), of shards that have any."""
    starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
    bounds = np.searchsorted(rows, starts).tolist()
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
      if stop > first:
        yield number, rows[first:stop] - starts[number]

  def vectors(self) -> Float[np.ndarray, 'n H']:
    """All rows in memory, float32."""
    vectors = np.empty((len(self), self.meta.dimension), np.float32)
    start = 0
    for shard in self.shards:
      vectors[start : start + len(shard)] = shard
      start += len(shard)
    return vectors

  def blocks(self, rows: int) -> Iterator[tuple[list[str], Float[np.ndarray, 'rows H']]]:
    """Ids and vectors of all rows in turn, at most ``rows`` at a time."""
    for shard, file in zip(self.shards, self._id_files, strict=True):
      ids, _ = _read_ids(file)
      for start in range(0, len(shard), rows):
        yield ids[start : start + rows], np.asarray(shard[start : start + rows])


def load_embeddings(
  folder: PathLike, verify: bool = True, process: int = 0, processes: int = 1
) -> Embeddings:
  """Opens a finished folder.

  Args:
    folder: as ``EmbeddingsWriter`` filled it.
    verify: read every file once and compare its SHA-256.
    process, processes: this process's rank and their count; each verifies a part of the files.

  Raises:
    InputError: no such folder, unfinished, a file missing or changed, counts or shapes that
      disagree.
  """
  root = files.existing(folder, 'embeddings')
  path = root / MANIFEST
  if not path.exists():
    if (root / PROGRESS).exists():
      raise InputError(
        f'{root} is unfinished: run the dprjax.encode command that began it again; it continues '
        'where it stopped'
      )
    raise InputError(
      f'{root} holds no embeddings ({MANIFEST} not found): make them with dprjax.encode'
    )
  manifest = Manifest.read(path)
  meta, all_shards = manifest.meta, -(-manifest.rows // manifest.shard_rows)
  if len(manifest.entries) < all_shards:
    raise InputError(
      f'{path} lists {len(manifest.entries):,} of {all_shards:,} shards: encode again'
    )
  code = None
  if meta.dtype in codes.LEVELS:
    if manifest.ranges is None:
      raise InputError(f"{path}: 'ranges' of {meta.dtype} are missing: encode again")
    code = codes.Code(meta.dtype, manifest.ranges)
  dtype, columns = codes.stored(meta.dtype), codes.width(meta.dimension, meta.dtype)
  shards, id_files, digest = [], [], hashlib.sha256()
  for shard in manifest.shards():
    names = shard_names(shard.number, all_shards)
    vectors_file, ids_file = (root / names[what] for what in FILES)
    for file, expected in zip(
      (vectors_file, ids_file), manifest.entries[shard.number], strict=True
    ):
      files.regular_file(file, 'embeddings shard')
      if verify and shard.number % processes == process and sha256_file(file) != expected:
        raise InputError(
          f'{file} was changed or damaged since it was written (SHA-256 differs from {MANIFEST}): '
          'encode again'
        )
    ids, content = _read_ids(ids_file)
    digest.update(content)
    shape = (shard.stop - shard.start, columns)
    found, kind, offset = _open_npy(vectors_file, 'encode again')
    if found != shape or kind != dtype or len(ids) != shape[0]:
      raise InputError(
        f'{vectors_file}: {kind} {found} with {len(ids)} ids, but {MANIFEST} says {dtype} {shape}: '
        'encode again'
      )
    shards.append(Rows(vectors_file, *shape, dtype, offset, code))
    id_files.append(ids_file)
  if digest.hexdigest() != manifest.ids_sha256:
    raise InputError(f'{root}: the ids are not those of {MANIFEST}: encode again')
  return Embeddings(shards, meta, sha256_file(path), id_files, seen=manifest.seen)


def open_array(path: PathLike, rows: int) -> Rows:
  """The vectors of a .npy file that others made, one a row.

  Raises:
    InputError: it is no whole .npy file of float32 or float16 of this many rows.
  """
  found = files.regular_file(path, 'vectors')
  shape, dtype, offset = _open_npy(found, 'save it again')
  if (
    dtype.name not in ('float32', 'float16') or len(shape) != 2 or shape[0] != rows or not shape[1]
  ):
    raise InputError(
      f'{found}: {dtype} {list(shape)!s:.60}, expected float32 or float16 [{rows}, H], a row '
      'for each id'
    )
  return Rows(found, shape[0], shape[1], dtype, offset)


def check_unique(ids: Sequence[str], where: str) -> None:
  """Raises InputError, which begins with ``where``, for an id that comes twice."""
  if len(set(ids)) < len(ids):
    twice = collections.Counter(ids).most_common(1)[0][0]
    raise InputError(f'{where}: the id {twice!r:.80} is there twice; ids must be unique')


def _read_ids(path: epath.Path) -> tuple[list[str], bytes]:
  """The ids, one a line, and the file's bytes."""
  content = path.read_bytes()
  try:
    text = content.decode()
  except UnicodeDecodeError as error:
    raise InputError(f'{path} is not UTF-8 text: encode again') from error
  if not text.endswith('\n') or _BAD_IDS.search(text):
    raise InputError(f'{path} does not hold an id on each line: encode again')
  return text[:-1].split('\n'), content


def _open_npy(path: epath.Path, remedy: str) -> tuple[tuple[int, ...], np.dtype, int]:
  """A .npy file's shape, type, and the byte at which its rows begin.

  Raises:
    InputError: it is no such file, or shorter or longer than it says. Nothing of the declared size
      is allocated before.
  """
  with path.open('rb') as file:
    try:
      shape, by_columns, dtype = arrays.read_header(file)
    except arrays.UNREADABLE as error:
      reason = ' '.join(str(error).split())
      raise InputError(f'{path} is not a whole .npy file ({reason:.200}): {remedy}') from error
    offset = file.tell()
    size = file.seek(0, io.SEEK_END)
  whole = size == offset + math.prod(shape) * dtype.itemsize
  if by_columns or dtype.hasobject or not whole:
    raise InputError(
      f'{path} is not a whole .npy file of numbers by rows ({size:,} bytes, says {dtype} {shape}): '
      f'{remedy}'
    )
  return shape, dtype, offset


def _check_ids(ids: Sequence[str], source: str) -> None:
  if not ids:
    raise InputError(f'{source}: there is nothing to encode')
  for row, id_ in enumerate(ids, start=1):
    if not id_ or _BAD_IDS.search(id_) or '\n' in id_:
      raise InputError(
        f'{source}, row {row}: the id {id_!r:.80} is empty, or has white space or a control '
        'character in it'
      )
  check_unique(ids, source)
