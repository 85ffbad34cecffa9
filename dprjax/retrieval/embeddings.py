"""A folder of embeddings: vectors, their ids, and what made them.

    embeddings-00000-of-00003.npy   [rows, H] float32 or float16
    ids-00000-of-00003.txt          one id a line, in the rows' order
    manifest.json                   counts, what made the vectors (``Meta``), SHA-256 of every file

While a folder is being filled, ``progress.json`` stands where the manifest will be: the manifest is
there when, and only when, every shard is. Each file is written aside and renamed. Where several
processes fill it, each of the others has a ``progress-I.json`` of its own.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, existing, read_json, sha256_file, write_json

_FORMAT = 'dprjax.embeddings'
_VERSION = 1
_MANIFEST, _PROGRESS = 'manifest.json', 'progress.json'
_DTYPES = ('float32', 'float16')


@dataclasses.dataclass(frozen=True)
class Meta:
  """What made the vectors. Two folders are of one kind of vector where ``space`` is the same.

  Attributes:
    dimension: H.
    dtype: of the stored vectors, 'float32' or 'float16'.
    kind: 'query' or 'passage'.
    backbone_sha256: of the encoder's tensors.
    prompt_sha256: of the prompt's file; None where there was no prompt.
    pooling: 'cls', 'mean', ...
    normalize: whether the vectors were scaled to length 1.
    max_length: tokens a text was cut at.
    input_sha256: of the text file that was encoded, so that a changed text under old ids is
      noticed.
  """

  dimension: int
  dtype: str
  kind: str
  backbone_sha256: str
  prompt_sha256: str | None
  pooling: str
  normalize: bool
  max_length: int
  input_sha256: str

  def space(self) -> dict[str, Any]:
    """The fields that queries and passages must share for their inner product to mean anything."""
    return {
      name: getattr(self, name)
      for name in ('dimension', 'backbone_sha256', 'prompt_sha256', 'pooling', 'normalize')
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
  """Where two spaces (`Meta.space`) differ, in words; '' where they are one."""

  def short(value: Any) -> str:
    return f'{value[:12]}...' if isinstance(value, str) and len(value) > 20 else str(value)

  return '; '.join(
    f'{name} {short(ours.get(name))} and {short(theirs[name])}'
    for name in theirs
    if ours.get(name) != theirs[name]
  )


class Shard(NamedTuple):
  """One file's worth of rows: ``ids[start:stop]``."""

  number: int
  start: int
  stop: int


class EmbeddingsWriter:
  """Fills a folder shard by shard; a second run keeps the shards that are whole.

      writer = EmbeddingsWriter(folder, meta, ids)
      for shard in writer.pending():
        writer.write(shard, encode(texts[shard.start:shard.stop]))
      writer.finish()

  Several processes may fill it, each other shards. Process 0 opens it before the others do, and
  finishes it when they have written theirs.
  """

  def __init__(
    self,
    folder: PathLike,
    meta: Meta,
    ids: Sequence[str],
    shard_rows: int = 100_000,
    process: int = 0,
  ):
    """Opens the folder, makes it if need be, and verifies the shards that an earlier run left.

    Raises:
      InputError: no ids, an id that is empty, twice there or has whitespace in it, or a folder that
        holds something else: embeddings of another model, other text, another shard size, or no
        embeddings at all.
    """
    if meta.dtype not in _DTYPES:
      raise InputError(
        f'embeddings cannot be stored as {meta.dtype}: choose {" or ".join(_DTYPES)}'
      )
    _check_ids(ids)
    self.folder = epath.Path(folder)
    self.meta = meta
    self.ids = ids
    self._process = process
    self._progress = _PROGRESS if process == 0 else f'progress-{process:05d}.json'
    self._count = -(-len(ids) // shard_rows)
    self._shards = [
      Shard(i, i * shard_rows, min((i + 1) * shard_rows, len(ids))) for i in range(self._count)
    ]
    self._header = {
      'format': _FORMAT,
      'version': _VERSION,
      'rows': len(ids),
      'shard_rows': shard_rows,
      'ids_sha256': _digest(ids),
      **dataclasses.asdict(meta),
    }
    self._done = self._resume()

  def _resume(self) -> dict[int, dict[str, Any]]:
    """Shard index -> its entry in the manifest, for the shards already there and unharmed."""
    if self.folder.exists() and not self.folder.is_dir():
      raise InputError(f'{self.folder} is a file; embeddings need a folder')
    found = next(
      (self.folder / name for name in (_MANIFEST, _PROGRESS) if (self.folder / name).exists()), None
    )
    if found is None:
      if self.folder.exists() and any(
        not path.name.startswith('.') for path in self.folder.iterdir()
      ):
        raise InputError(
          f'{self.folder} is not empty and holds no embeddings; choose another folder'
        )
      write_json(self.folder / _PROGRESS, {**self._header, 'shards': []})
      return {}
    manifest = read_json(found, 'embeddings manifest')
    different = [
      key
      for key, value in self._header.items()
      if not isinstance(manifest, dict) or manifest.get(key) != value
    ]
    if different:
      raise InputError(
        f"{self.folder} holds other embeddings ({', '.join(different)} differ from this run's); "
        'remove it or choose another folder'
      )
    entries = {entry['index']: entry for entry in manifest.get('shards', [])}
    if self._process:  # what process 0 has found is so
      return entries
    for path in self.folder.glob('.*.tmp'):  # a killed run left them
      path.unlink()
    done = {}
    for entry in (self._others() | entries).values():
      files = [
        (self.folder / entry[kind], entry[f'{kind}_sha256']) for kind in ('embeddings', 'ids')
      ]
      if all(path.exists() and sha256_file(path) == digest for path, digest in files):
        done[entry['index']] = entry
    if (
      found.name == _PROGRESS or len(done) < self._count
    ):  # a finished folder that was damaged is unfinished again
      self._save(_PROGRESS, done)
      (self.folder / _MANIFEST).unlink(missing_ok=True)
    for path in self.folder.glob('progress-*.json'):
      path.unlink()
    return done

  def _others(self) -> dict[int, dict[str, Any]]:
    """The entries of the shards that other processes wrote."""
    entries: dict[int, dict[str, Any]] = {}
    for path in self.folder.glob('progress-*.json'):
      progress = read_json(path, 'embeddings progress')
      if all(progress.get(key) == value for key, value in self._header.items()):
        entries |= {entry['index']: entry for entry in progress['shards']}
    return entries

  def pending(self) -> list[Shard]:
    """The shards still to be written, in order."""
    return [shard for shard in self._shards if shard.number not in self._done]

  def write(self, shard: Shard, vectors: Float[np.ndarray, 'rows H']) -> None:
    """Writes one shard.

    Raises InputError for a wrong shape, NaN or infinity, or values beyond float16's range.
    """
    expected = (shard.stop - shard.start, self.meta.dimension)
    if vectors.shape != expected:
      raise InputError(
        f'shard {shard.number} of {self.folder}: vectors of shape {vectors.shape}, expected '
        f'{expected}'
      )
    # Too large a value becomes infinite here, and is refused below.
    with np.errstate(over='ignore'):
      vectors = np.ascontiguousarray(vectors, dtype=self.meta.dtype)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
      raise InputError(
        f'the embedding of {self.ids[shard.start + bad[0]]!r} is not finite as {self.meta.dtype} '
        f'({bad.size} of {len(vectors)} rows)'
      )
    names = {
      kind: f'{kind}-{shard.number:05d}-of-{self._count:05d}.{suffix}'
      for kind, suffix in (('embeddings', 'npy'), ('ids', 'txt'))
    }
    with atomic_write(self.folder / names['embeddings'], 'wb') as file:
      np.save(file, vectors, allow_pickle=False)
    with atomic_write(self.folder / names['ids']) as file:
      file.writelines(f'{id_}\n' for id_ in self.ids[shard.start : shard.stop])
    self._done[shard.number] = {
      'index': shard.number,
      'rows': shard.stop - shard.start,
      **names,
      **{f'{kind}_sha256': sha256_file(self.folder / name) for kind, name in names.items()},
    }
    self._save(self._progress, self._done)

  def finish(self) -> None:
    """Writes the manifest, on process 0. Raises RuntimeError while shards are pending."""
    if self._process:
      return
    self._done |= self._others()
    if self.pending():
      raise RuntimeError(f'{len(self.pending())} of {self._count} shards are not written')
    self._save(_MANIFEST, self._done)
    for path in (self.folder / _PROGRESS, *self.folder.glob('progress-*.json')):
      path.unlink(missing_ok=True)

  def _save(self, name: str, done: dict[int, dict[str, Any]]) -> None:
    write_json(
      self.folder / name, {**self._header, 'shards': [done[index] for index in sorted(done)]}
    )


class Rows:
  """Vectors of one file that stay on disk. A slice of it does too; ``np.asarray`` of either reads
  it, and the file is let go of with that array.

  A local file is mapped; a remote one is fetched whole each time.
  """

  def __init__(self, path: epath.Path, shape: tuple[int, int], dtype: np.dtype, start: int = 0):
    self._path, self.shape, self.dtype, self._start = path, shape, dtype, start

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, rows: slice) -> 'Rows':
    start, stop, _ = rows.indices(len(self))
    return Rows(self._path, (max(stop - start, 0), self.shape[1]), self.dtype, self._start + start)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float[np.ndarray, 'rows H']:
    found = _open(self._path)[self._start : self._start + len(self)]
    return (
      found if dtype in (None, found.dtype) and not copy else found.astype(dtype or found.dtype)
    )


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """A finished folder. What is read of it is read when it is asked for, so that a corpus may be
  larger than memory.

  Attributes:
    shards: files of rows that follow one another.
    meta: what made them.
    sha256: of the manifest, and so of everything in the folder.
  """

  shards: list[Rows]
  meta: Meta
  sha256: str
  _id_files: list[epath.Path]

  def __len__(self) -> int:
    return sum(len(shard) for shard in self.shards)

  @functools.cached_property
  def ids(self) -> list[str]:
    """One a row, all of them in memory; `ids_at` reads some."""
    return [id_ for file in self._id_files for id_ in _read_ids(file)]

  def ids_at(self, rows: Int[np.ndarray, 'n']) -> list[str]:
    """The ids of these rows, which must ascend; one file's ids are in memory at a time."""
    starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
    found: list[str] = []
    for file, start, stop in zip(
      self._id_files, starts[:-1].tolist(), starts[1:].tolist(), strict=True
    ):
      wanted = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)]
      if len(wanted):
        ids = _read_ids(file)
        found += [ids[row - start] for row in wanted.tolist()]
    return found

  def vectors(self) -> Float[np.ndarray, 'n H']:
    """All rows in memory, float32."""
    whole = np.empty((len(self), self.meta.dimension), np.float32)
    start = 0
    for shard in self.shards:
      whole[start : start + len(shard)] = shard
      start += len(shard)
    return whole

  def blocks(self, rows: int) -> Iterator[tuple[list[str], Float[np.ndarray, 'rows H']]]:
    """The rows in turn with their ids, at most ``rows`` at a time."""
    for shard, file in zip(self.shards, self._id_files, strict=True):
      ids = _read_ids(file)
      for start in range(0, len(shard), rows):
        yield ids[start : start + rows], np.asarray(shard[start : start + rows])


def load_embeddings(
  folder: PathLike, verify: bool = True, share: int = 0, shares: int = 1
) -> Embeddings:
  """Opens a finished folder.

  Args:
    folder: as ``EmbeddingsWriter`` filled it.
    verify: read every file once and compare its SHA-256.
    share, shares: verify the i-th of so many parts alone: several processes do it together.

  Raises:
    InputError: not such a folder, unfinished, a file missing or changed, counts or shapes that
      disagree.
  """
  root = existing(folder, 'embeddings')
  if not (root / _MANIFEST).exists():
    if (root / _PROGRESS).exists():
      raise InputError(
        f'{root} is unfinished: run the dprjax.encode command that began it again, and it goes on '
        'where it stopped'
      )
    raise InputError(
      f'{root} holds no embeddings ({_MANIFEST} not found): make them with dprjax.encode'
    )
  manifest = read_json(root / _MANIFEST, 'embeddings manifest')
  if not isinstance(manifest, dict) or manifest.get('format') != _FORMAT:
    raise InputError(f'{root / _MANIFEST} is not a {_FORMAT} manifest')
  if manifest.get('version') != _VERSION:
    raise InputError(
      f'{root / _MANIFEST} is of version {manifest.get("version")}, expected {_VERSION}: encode '
      'again'
    )
  try:
    meta = Meta(**{field.name: manifest[field.name] for field in dataclasses.fields(Meta)})
    rows, entries = manifest['rows'], manifest['shards']
    files = [
      (
        entry['rows'],
        *((root / entry[kind], entry[f'{kind}_sha256']) for kind in ('embeddings', 'ids')),
      )
      for entry in entries
    ]
  except (KeyError, TypeError) as error:
    raise InputError(f'{root / _MANIFEST} is incomplete ({error}): encode again') from error
  shards, id_files = [], []
  for number, (count, (vectors_path, vectors_sha), (ids_path, ids_sha)) in enumerate(files):
    for path, digest in ((vectors_path, vectors_sha), (ids_path, ids_sha)):
      existing(path, 'embeddings shard')
      if verify and number % shares == share and sha256_file(path) != digest:
        raise InputError(
          f'{path} was changed or damaged since it was written (SHA-256 differs from {_MANIFEST}): '
          'encode again'
        )
    vectors, ids = _open(vectors_path), len(_read_ids(ids_path))
    if vectors.shape != (count, meta.dimension) or vectors.dtype != meta.dtype or ids != count:
      raise InputError(
        f'{vectors_path}: {vectors.dtype} {vectors.shape} with {ids} ids, '
        f'but {_MANIFEST} says {meta.dtype} {(count, meta.dimension)}: encode again'
      )
    shards.append(Rows(vectors_path, (count, meta.dimension), vectors.dtype))
    id_files.append(ids_path)
  found = Embeddings(shards, meta, sha256_file(root / _MANIFEST), id_files)
  if len(found) != rows:
    raise InputError(
      f'{root}: {len(found)} rows in the shards, but {_MANIFEST} says {rows}: encode again'
    )
  return found


def _read_ids(path: epath.Path) -> list[str]:
  return path.read_bytes().decode(errors='replace').splitlines()


def _open(path: epath.Path) -> np.ndarray:
  try:
    if '://' in str(path):
      with path.open('rb') as file:
        return np.load(file, allow_pickle=False)
    return np.load(path, mmap_mode='r', allow_pickle=False)
  except (ValueError, EOFError) as error:
    raise InputError(f'{path} is not a whole .npy file ({error}): encode again') from error


def _digest(ids: Sequence[str]) -> str:
  digest = hashlib.sha256()
  for id_ in ids:
    digest.update(id_.encode() + b'\n')
  return digest.hexdigest()


def _check_ids(ids: Sequence[str]) -> None:
  if not ids:
    raise InputError('there is nothing to encode: no ids')
  seen: set[str] = set()
  for row, id_ in enumerate(ids, start=1):
    # A TREC run separates its columns by white space, so an id cannot have any.
    if not id_ or any(character.isspace() for character in id_):
      raise InputError(
        f'row {row}: the id {id_!r} is empty or has white space in it; give ids without'
      )
    if id_ in seen:
      raise InputError(f'row {row}: the id {id_!r} is there twice; ids name one text each')
    seen.add(id_)
