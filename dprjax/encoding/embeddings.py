"""Reads a folder of embeddings: vectors, their ids, and a manifest.

    embeddings-00000-of-00003.npy   [rows, H] float32, float16 or codes (``codes.py``)
    ids-00000-of-00003.txt          one id a line, in the order of rows
    manifest.json                   counts, settings (``Meta``), SHA-256 of every file

An unfinished folder has ``progress.json`` in place of the manifest, and ``progress-I.json`` for
each additional process. `dprjax.encoding.folders` writes it.
"""

import dataclasses
import functools
import hashlib
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int, Shaped

from dprjax.base import arrays, files
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, sha256_file
from dprjax.encoding import codes
from dprjax.encoding.manifest import FILES, MANIFEST, Manifest, Meta, shard_names, shown
from dprjax.text.fields import check_unique


@dataclasses.dataclass(frozen=True)
class ShardRows:
  """Vectors in a file on disk, or a slice of them; ``np.asarray`` reads and decodes them.

  A local file is mapped.

  Attributes:
    path: a .npy file, checked by `_open_npy`.
    offset: byte of the first row.
    stored_as: the code; None for plain numbers.
    dimension: how many leading numbers of a vector are used; None for all.
    normalize: whether cut vectors are scaled to unit length.
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
    full = self.columns if self.stored_as is None else len(self.stored_as.ranges.low)
    return self.count, self.dimension or full

  @property
  def code(self) -> codes.Code | None:
    """The code of ``stored``; None for plain or cut vectors."""
    return self.stored_as if self.dimension is None else None

  @property
  def stored(self) -> 'ShardRows':
    """The same rows without decoding."""
    return ShardRows(self.path, self.count, self.columns, self.dtype, self.offset)

  def take(self, rows: Int[np.ndarray, ' n']) -> Float[np.ndarray, 'n H']:
    """The vectors of these rows, float32. A remote file is read whole."""
    return np.asarray(self._vectors(self._read()[rows]), np.float32)

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, rows: slice) -> 'ShardRows':
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
      return np.memmap(self.path, self.dtype, 'r', self.offset, shape)
    with self.path.open('rb') as file:
      file.seek(self.offset)
      content = file.read(math.prod(shape) * self.dtype.itemsize)
    return np.frombuffer(content, self.dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """A finished folder. Vectors and ids are read when used, since they may exceed memory.

  Attributes:
    sha256: of the manifest, which covers everything in the folder.
  """

  shards: list[ShardRows]
  meta: Meta
  sha256: str
  _id_files: list[epath.Path]
  is_cut: bool = False

  def __len__(self) -> int:
    return sum(len(shard) for shard in self.shards)

  @property
  def folder(self) -> epath.Path:
    return self._id_files[0].parent

  @property
  def fingerprint(self) -> str:
    """Identifies the vectors: the manifest SHA-256 unless they are cut."""
    if not self.is_cut:
      return self.sha256
    return hashlib.sha256(f'{self.sha256} {self.meta.dimension}'.encode()).hexdigest()

  def cut(self, dimension: int | None, flag: str) -> 'Embeddings':
    """The vectors cut to their first ``dimension`` numbers; None keeps all."""
    if dimension is None or dimension == self.meta.dimension:
      return self
    if dimension > self.meta.dimension:
      raise InputError(
        f'{flag}: {self.folder} has vectors of {self.meta.dimension} dimensions: '
        f'--dimensions={dimension} is too large'
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

  def check_side(self, side: str, flag: str) -> None:
    """Raises InputError, which begins with ``flag``, for vectors of the other side."""
    if self.meta.side != side:
      raise InputError(f'{flag} has {self.meta.side} embeddings, expected {side} embeddings')

  @functools.cached_property
  def ids(self) -> list[str]:
    """The ids, one a row, all in memory; `ids_at` reads some of them."""
    ids = [id_ for file in self._id_files for id_ in _read_ids(file)[0]]
    check_unique(ids, str(self.folder))
    return ids

  def ids_at(self, rows: Int[np.ndarray, ' n']) -> list[str]:
    """Ids of ascending rows; reads one file of ids at a time."""
    selected: list[str] = []
    for number, local in self._by_shard(rows):
      ids, _ = _read_ids(self._id_files[number])
      selected += [ids[row] for row in local.tolist()]
    return selected

  def take(self, rows: Int[np.ndarray, ' n']) -> Float[np.ndarray, 'n H']:
    """Vectors of ascending rows, float32."""
    parts = [self.shards[number].take(local) for number, local in self._by_shard(rows)]
    return np.concatenate([np.empty((0, self.meta.dimension), np.float32), *parts])

  def _by_shard(self, rows: Int[np.ndarray, ' n']) -> Iterator[tuple[int, Int[np.ndarray, ' m']]]:
    """Yields (number of a shard, wanted rows of that shard)."""
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
    """Ids and vectors, at most ``rows`` at a time."""
    for shard, file in zip(self.shards, self._id_files, strict=True):
      ids, _ = _read_ids(file)
      for start in range(0, len(shard), rows):
        yield ids[start : start + rows], np.asarray(shard[start : start + rows])


def load_embeddings(
  folder: PathLike, verify: bool = True, process: int = 0, processes: int = 1
) -> Embeddings:
  """Opens a finished folder.

  Args:
    process, processes: rank and count; each process verifies a part of the files.
  """
  root = files.existing(folder, 'embeddings')
  path = root / MANIFEST
  if not path.exists():
    raise InputError(
      f'{root} has no finished embeddings ({MANIFEST} not found): run its dprjax.encode command, '
      'which continues an unfinished folder'
    )
  manifest = Manifest.read(path)
  meta, all_shards = manifest.meta, -(-manifest.rows // manifest.shard_rows)
  code = None if manifest.ranges is None else codes.Code(meta.dtype, manifest.ranges)
  dtype, columns = codes.stored(meta.dtype), codes.width(meta.dimension, meta.dtype)
  shards, id_files, digest = [], [], hashlib.sha256()
  where, whole = path, manifest.checksums.keys() == set(range(all_shards))
  for shard in manifest.shards() if whole else ():
    names = shard_names(shard.number, all_shards)
    vectors_file, ids_file = (root / names[what] for what in FILES)
    for file, expected in zip(
      (vectors_file, ids_file), manifest.checksums[shard.number].of_files, strict=True
    ):
      files.regular_file(file, 'embeddings shard')
      if verify and shard.number % processes == process and sha256_file(file) != expected:
        raise InputError(f'{file} was changed or damaged (SHA-256): encode again')
    ids, content = _read_ids(ids_file)
    digest.update(content)
    shape = (shard.stop - shard.start, columns)
    actual, stored, offset = _open_npy(vectors_file)
    if actual != shape or stored != dtype or len(ids) != shape[0]:
      where, whole = vectors_file, False
      break
    shards.append(ShardRows(vectors_file, *shape, dtype, offset, code))
    id_files.append(ids_file)
  if not whole or digest.hexdigest() != manifest.ids_sha256:
    raise InputError(f'{where}: shards, shapes or ids differ from {MANIFEST}: encode again')
  return Embeddings(shards, meta, sha256_file(path), id_files)


def join(several: Sequence[Embeddings], flag: str) -> Embeddings:
  """Joins parts of a corpus in order, without moving their vectors."""
  first, *others = several
  if not others:
    return first
  for one in others:
    theirs, ours = (
      {
        **dataclasses.asdict(each.meta),
        'ranges of codes': hashlib.sha256(repr(each.shards[0].code).encode()).hexdigest(),
      }
      for each in (one, first)
    )
    different = [
      f'{name} {shown(ours[name])} and {shown(theirs[name])}'
      for name in ours
      if name != 'input_sha256' and theirs[name] != ours[name]
    ]
    if different:
      raise InputError(
        f'{flag}: {first.folder} and {one.folder} are not parts of one corpus: '
        f'{"; ".join(different)}; encode all with the same settings, and codes in one folder'
      )
  return Embeddings(
    [shard for one in several for shard in one.shards],
    dataclasses.replace(
      first.meta, input_sha256=_digest_of(one.meta.input_sha256 for one in several)
    ),
    _digest_of(one.sha256 for one in several),
    [file for one in several for file in one._id_files],
  )


def _digest_of(several: Iterable[str]) -> str:
  return hashlib.sha256(' '.join(several).encode()).hexdigest()


def _read_ids(path: epath.Path) -> tuple[list[str], bytes]:
  """The ids, one a line, and the bytes of the file."""
  content = path.read_bytes()
  return content.decode()[:-1].split('\n'), content


def _open_npy(path: epath.Path) -> tuple[tuple[int, ...], np.dtype, int]:
  """The shape and dtype of a .npy file, and the byte of its first row."""
  with path.open('rb') as file:
    try:
      shape, by_columns, dtype = arrays.read_header(file)
      offset = file.tell()
      size = file.seek(0, io.SEEK_END)
      if by_columns or dtype.hasobject or size != offset + math.prod(shape) * dtype.itemsize:
        raise ValueError(f'{size:,} bytes, says {dtype} {shape}, by columns: {by_columns}')
    except arrays.UNREADABLE as error:
      reason = ' '.join(str(error).split())
      raise InputError(
        f'{path} is not a whole .npy file of numbers by rows ({reason:.200}): encode again'
      ) from error
  return shape, dtype, offset
