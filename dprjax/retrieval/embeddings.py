"""A folder of embeddings: vectors, their ids, and what made them.

    embeddings-00000-of-00003.npy   [rows, H] float32 or float16
    ids-00000-of-00003.txt          one id a line, in the rows' order
    manifest.json                   counts, what made the vectors (``Meta``), SHA-256 of every file

The manifest appears when all shards are written. Until then there is a ``progress.json`` in its
place. Where several processes fill the folder, each of the others has its own ``progress-I.json``.
Each file is written aside and renamed.
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
_MANIFEST, _PROGRESS, _PROGRESS_OF_OTHERS = 'manifest.json', 'progress.json', 'progress-*.json'
_DTYPES = ('float32', 'float16')
# A shard's files, as its entry in the manifest names them, and their suffixes.
_FILES = {'embeddings': 'npy', 'ids': 'txt'}


@dataclasses.dataclass(frozen=True)
class Meta:
  """What made the vectors.

  Attributes:
    dimension: H.
    dtype: of the stored vectors, 'float32' or 'float16'.
    kind: 'query' or 'passage'.
    backbone_sha256: of the encoder's tensors.
    prompt_sha256: of the prompt's file; None without a prompt.
    pooling: 'cls', 'mean', ...
    normalize: whether the vectors were scaled to length 1.
    max_length: tokens at which a text was cut.
    input_sha256: of the text file, which shows whether a text changed under its old id.
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
    names = ('dimension', 'backbone_sha256', 'prompt_sha256', 'pooling', 'normalize')
    return {name: getattr(self, name) for name in names}


def check_same_space(
  name: str, space: Mapping[str, Any], other_name: str, other: Mapping[str, Any]
) -> None:
  """Raises InputError where two spaces (`Meta.space`) differ, and says in what."""

  def short(value: Any) -> str:
    return f'{value[:12]}...' if isinstance(value, str) and len(value) > 20 else str(value)

  differences = '; '.join(
    f'{field} {short(space.get(field))} and {short(value)}'
    for field, value in other.items()
    if space.get(field) != value
  )
  if differences:
    raise InputError(
      f'{name} and {other_name} do not belong together: {differences}; encode both with the same '
      'backbone, prompt and settings'
    )


class Shard(NamedTuple):
  """The rows of one file: ``ids[start:stop]``."""

  number: int
  start: int
  stop: int


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
  ):
    """Opens or makes the folder, and verifies the shards of an earlier run.

    Raises:
      InputError: no ids; an id that is empty, repeated or has whitespace in it; or a folder that
        holds other embeddings (another model, text or shard size) or something else.
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
    starts = range(0, len(ids), shard_rows)
    self._shards = [
      Shard(number, start, min(start + shard_rows, len(ids))) for number, start in enumerate(starts)
    ]
    self._header = {
      'format': _FORMAT,
      'version': _VERSION,
      'rows': len(ids),
      'shard_rows': shard_rows,
      'ids_sha256': hashlib.sha256(''.join(f'{id_}\n' for id_ in ids).encode()).hexdigest(),
      **dataclasses.asdict(meta),
    }
    self._done = self._resume()

  def _resume(self) -> dict[int, dict[str, Any]]:
    """The manifest's entries, by shard, of the shards that are there and undamaged."""
    if self.folder.exists() and not self.folder.is_dir():
      raise InputError(f'{self.folder} is a file; embeddings need a folder')
    names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
    stored = next((name for name in (_MANIFEST, _PROGRESS) if name in names), None)
    if stored is None:
      if any(not name.startswith('.') for name in names):
        raise InputError(
          f'{self.folder} is not empty and holds no embeddings; choose another folder'
        )
      self._save(_PROGRESS, {})
      return {}
    manifest = read_json(self.folder / stored, 'embeddings manifest')
    if different := self._differences(manifest):
      raise InputError(
        f"{self.folder} holds other embeddings ({', '.join(different)} differ from this run's); "
        'remove it or choose another folder'
      )
    entries = _by_shard(manifest)
    if self._process:  # process 0 has verified them
      return entries
    for path in self.folder.glob('.*.tmp'):  # of a run that was killed
      path.unlink()
    done = {
      number: entry
      for number, entry in (self._others() | entries).items()
      if all(
        path.exists() and sha256_file(path) == digest for path, digest in _files(self.folder, entry)
      )
    }
    # A finished folder with a damaged shard is unfinished again.
    if stored == _PROGRESS or len(done) < len(self._shards):
      self._save(_PROGRESS, done)
      (self.folder / _MANIFEST).unlink(missing_ok=True)
    for path in self.folder.glob(_PROGRESS_OF_OTHERS):
      path.unlink()
    return done

  def _differences(self, manifest: Any) -> list[str]:
    if not isinstance(manifest, dict):
      return list(self._header)
    return [key for key, value in self._header.items() if manifest.get(key) != value]

  def _others(self) -> dict[int, dict[str, Any]]:
    """The entries of the shards that other processes wrote."""
    entries: dict[int, dict[str, Any]] = {}
    for path in self.folder.glob(_PROGRESS_OF_OTHERS):
      progress = read_json(path, 'embeddings progress')
      if not self._differences(progress):
        entries |= _by_shard(progress)
    return entries

  def pending(self) -> list[Shard]:
    """The shards still to be written, in order."""
    return [shard for shard in self._shards if shard.number not in self._done]

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
    with np.errstate(over='ignore'):  # a value too large for float16 becomes infinite
      vectors = np.ascontiguousarray(vectors, dtype=self.meta.dtype)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
      raise InputError(
        f'the embedding of {self.ids[shard.start + bad[0]]!r} is not finite as {self.meta.dtype} '
        f'({bad.size} of {count} rows)'
      )
    names = {
      what: f'{what}-{shard.number:05d}-of-{len(self._shards):05d}.{suffix}'
      for what, suffix in _FILES.items()
    }
    with atomic_write(self.folder / names['embeddings'], 'wb') as file:
      np.save(file, vectors, allow_pickle=False)
    with atomic_write(self.folder / names['ids']) as file:
      file.writelines(f'{id_}\n' for id_ in self.ids[shard.start : shard.stop])
    self._done[shard.number] = {
      'index': shard.number,
      'rows': count,
      **names,
      **{f'{what}_sha256': sha256_file(self.folder / name) for what, name in names.items()},
    }
    self._save(self._progress, self._done)

  def finish(self) -> None:
    """Writes the manifest, on process 0. Raises RuntimeError while shards are pending."""
    if self._process:
      return
    self._done |= self._others()
    if pending := self.pending():
      raise RuntimeError(f'{len(pending)} of {len(self._shards)} shards are not written')
    self._save(_MANIFEST, self._done)
    for path in (self.folder / _PROGRESS, *self.folder.glob(_PROGRESS_OF_OTHERS)):
      path.unlink(missing_ok=True)

  def _save(self, name: str, done: dict[int, dict[str, Any]]) -> None:
    shards = [done[number] for number in sorted(done)]
    write_json(self.folder / name, {**self._header, 'shards': shards})


class Rows:
  """Vectors of one file, on disk. So is a slice of them; ``np.asarray`` of either reads it.

  A local file is mapped, until that array is released; a remote one is fetched whole each time.
  """

  def __init__(self, path: epath.Path, shape: tuple[int, int], dtype: np.dtype, start: int = 0):
    self._path, self.shape, self.dtype, self._start = path, shape, dtype, start

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, rows: slice) -> 'Rows':
    start, stop, _ = rows.indices(len(self))
    return Rows(self._path, (max(stop - start, 0), self.shape[1]), self.dtype, self._start + start)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float[np.ndarray, 'rows H']:
    values = _open(self._path)[self._start : self._start + len(self)]
    return (
      values if dtype in (None, values.dtype) and not copy else values.astype(dtype or values.dtype)
    )


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """A finished folder. Vectors and ids are read when they are used: they may exceed memory.

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

  def check_kind(self, kind: str, flag: str) -> None:
    """Raises InputError, which begins with the flag that named the folder, for another kind."""
    if self.meta.kind != kind:
      raise InputError(
        f'{flag} holds embeddings of kind {self.meta.kind}, expected {kind}: is it the right '
        'folder?'
      )

  @functools.cached_property
  def ids(self) -> list[str]:
    """One a row, all of them in memory; `ids_at` reads some."""
    return [id_ for file in self._id_files for id_ in _read_ids(file)]

  def ids_at(self, rows: Int[np.ndarray, 'n']) -> list[str]:
    """The ids of these rows, which must ascend; one file's ids are in memory at a time."""
    starts = np.cumsum([0, *(len(shard) for shard in self.shards)])
    bounds = np.searchsorted(rows, starts)
    ids_at: list[str] = []
    for number, file in enumerate(self._id_files):
      wanted = rows[bounds[number] : bounds[number + 1]] - starts[number]
      if len(wanted):
        ids = _read_ids(file)
        ids_at += [ids[row] for row in wanted.tolist()]
    return ids_at

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
      ids = _read_ids(file)
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
  root = existing(folder, 'embeddings')
  path = root / _MANIFEST
  if not path.exists():
    if (root / _PROGRESS).exists():
      raise InputError(
        f'{root} is unfinished: run the dprjax.encode command that began it again; it continues '
        'where it stopped'
      )
    raise InputError(
      f'{root} holds no embeddings ({_MANIFEST} not found): make them with dprjax.encode'
    )
  manifest = read_json(path, 'embeddings manifest')
  if not isinstance(manifest, dict) or manifest.get('format') != _FORMAT:
    raise InputError(f'{path} is not a {_FORMAT} manifest')
  if manifest.get('version') != _VERSION:
    raise InputError(
      f'{path} is of version {manifest.get("version")}, expected {_VERSION}: encode again'
    )
  try:
    meta = Meta(**{field.name: manifest[field.name] for field in dataclasses.fields(Meta)})
    rows = manifest['rows']
    entries = [(entry['rows'], _files(root, entry)) for entry in manifest['shards']]
  except (KeyError, TypeError) as error:
    raise InputError(f'{path} is incomplete ({error}): encode again') from error
  shards, id_files = [], []
  for number, (count, files) in enumerate(entries):
    for file, digest in files:
      existing(file, 'embeddings shard')
      if verify and number % processes == process and sha256_file(file) != digest:
        raise InputError(
          f'{file} was changed or damaged since it was written (SHA-256 differs from {_MANIFEST}): '
          'encode again'
        )
    (vectors_file, _), (ids_file, _) = files
    vectors, ids = _open(vectors_file), len(_read_ids(ids_file))
    if vectors.shape != (count, meta.dimension) or vectors.dtype != meta.dtype or ids != count:
      raise InputError(
        f'{vectors_file}: {vectors.dtype} {vectors.shape} with {ids} ids, '
        f'but {_MANIFEST} says {meta.dtype} {(count, meta.dimension)}: encode again'
      )
    shards.append(Rows(vectors_file, (count, meta.dimension), vectors.dtype))
    id_files.append(ids_file)
  embeddings = Embeddings(shards, meta, sha256_file(path), id_files)
  if len(embeddings) != rows:
    raise InputError(
      f'{root}: {len(embeddings)} rows in the shards, but {_MANIFEST} says {rows}: encode again'
    )
  return embeddings


def _by_shard(manifest: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
  return {entry['index']: entry for entry in manifest.get('shards', [])}


def _files(folder: epath.Path, entry: Mapping[str, Any]) -> list[tuple[epath.Path, str]]:
  """A shard's files and their SHA-256: the vectors', the ids'."""
  return [(folder / entry[what], entry[f'{what}_sha256']) for what in _FILES]


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


def _check_ids(ids: Sequence[str]) -> None:
  if not ids:
    raise InputError('there is nothing to encode: no ids')
  seen: set[str] = set()
  for row, id_ in enumerate(ids, start=1):
    # White space separates the columns of a TREC run.
    if not id_ or any(character.isspace() for character in id_):
      raise InputError(f'row {row}: the id {id_!r} is empty or has white space in it')
    if id_ in seen:
      raise InputError(f'row {row}: the id {id_!r} is there twice; ids must be unique')
    seen.add(id_)
