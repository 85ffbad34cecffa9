"""Files and batches of tenants in a folder, with their answers.

    FOLDER/TENANT/file-ID.jsonl      a file of requests, or of answers
    FOLDER/TENANT/file-ID.json       its card
    FOLDER/TENANT/batch_ID.json      a batch and its progress
    FOLDER/TENANT/batch_ID.cancel    it is to end
    FOLDER/TENANT/batch_ID.out, .err answers so far

TENANT is a digest of the name of the tenant, so a tenant reaches only its own folder. Several
servers may share the folder: all read and add, and the holder of the lock works.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
import threading
import time
from collections.abc import Iterator
from typing import IO, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.serving.messages import Usage

_T = TypeVar('_T')
_HEX = r'[0-9a-f]{24}'
_FILE = re.compile(rf'file-{_HEX}(?:out|err)?')
_BATCH = re.compile(rf'batch_{_HEX}')
_MOST_ENTRIES = 2000  # files and batches of a tenant
_DAY_S = 24 * 3600
_ASIDE = '.tmp'
_ASIDE_S = 3600  # an unfinished file of this age is from a dead server

Metadata = Annotated[
  dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
  Meta(max_length=16),
]
ACTIVE = ('validating', 'in_progress', 'finalizing')


class UnknownEntry(Exception):
  """The tenant has no file or batch of this id."""


class Full(Exception):
  """The tenant has no room left."""


class InUse(Exception):
  """A batch needs the file."""


class FileCard(Struct, kw_only=True):
  id: str
  object: Literal['file'] = 'file'
  bytes: int
  created_at: int
  expires_at: int
  filename: str
  purpose: str
  status: str = 'processed'


class BatchProblem(Struct):
  code: str
  message: str
  line: int | None = None
  param: str | None = None


class BatchProblems(Struct, kw_only=True):
  object: Literal['list'] = 'list'
  data: list[BatchProblem]


class BatchCounts(Struct):
  total: int = 0
  completed: int = 0
  failed: int = 0


class BatchCard(Struct, kw_only=True):
  """`output_file_id` and `error_file_id` are there when the batch has ended."""

  id: str
  object: Literal['batch'] = 'batch'
  endpoint: str
  input_file_id: str
  completion_window: str
  status: str = 'validating'
  created_at: int
  expires_at: int
  in_progress_at: int | None = None
  finalizing_at: int | None = None
  completed_at: int | None = None
  failed_at: int | None = None
  cancelling_at: int | None = None
  cancelled_at: int | None = None
  output_file_id: str | None = None
  error_file_id: str | None = None
  errors: BatchProblems | None = None
  request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
  usage: Usage = msgspec.field(default_factory=lambda: Usage(0, 0))
  metadata: Metadata | None = None


class Record(Struct):
  """A batch on disk: its card, its tenant, and the valid bytes of its files."""

  card: BatchCard
  tenant: str
  read: int = 0
  out: int = 0
  err: int = 0


class Backlog:
  """The folder.

  Args:
    folder: made if it is missing.
    most_bytes: of a file of requests.
    most_tenant_bytes: of all files of a tenant, answers too.
    days: after which files and batches that have ended are removed.

  Raises:
    InputError: the folder cannot be used.
  """

  def __init__(self, folder: PathLike, *, most_bytes: int, most_tenant_bytes: int, days: float):
    self.most_bytes, self._most_tenant, self._days = most_bytes, most_tenant_bytes, days
    self._folder = pathlib.Path(folder)
    self._change = threading.Lock()
    self._lock: int | None = None
    try:
      self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      (self._folder / '.lock').touch(mode=0o600)
    except OSError as error:
      raise InputError(f'--batches={folder}: {error.strerror or error}') from error

  # Files.

  def add_file(self, tenant: str, filename: str, purpose: str, content: IO[bytes]) -> FileCard:
    """Keeps a file. Raises Full."""
    folder = self._folder_of(tenant)
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    with self._change:
      self._check_room(folder, size)
      folder.mkdir(mode=0o700, exist_ok=True)
      id = f'file-{secrets.token_hex(12)}'
      path = folder / f'{id}.jsonl'
      with _aside(path) as file:
        while block := content.read(1 << 20):
          file.write(block)
      return self._write_card(path, size, filename, purpose)

  def files(self, tenant: str) -> list[FileCard]:
    """The newest first."""
    return sorted(
      self._read_all(tenant, _FILE, FileCard), key=lambda card: (-card.created_at, card.id)
    )

  def file(self, tenant: str, id: str) -> FileCard:
    """Raises UnknownEntry."""
    return self._read(tenant, id, _FILE, FileCard)

  def content(self, tenant: str, id: str) -> pathlib.Path:
    """The path of the bytes of a file. Raises UnknownEntry."""
    self.file(tenant, id)
    return self._path(tenant, id, '.jsonl')

  def delete_file(self, tenant: str, id: str) -> None:
    """Raises UnknownEntry; InUse if a batch needs it."""
    with self._change:
      self.file(tenant, id)
      if any(one.status in ACTIVE and one.input_file_id == id for one in self.batches(tenant)):
        raise InUse
      self._remove_file(tenant, id)

  # Batches.

  def add_batch(
    self, tenant: str, input_file: str, endpoint: str, window: str, metadata: Metadata | None
  ) -> BatchCard:
    """A batch to be worked off. Raises UnknownEntry, Full."""
    now = int(time.time())
    with self._change:
      self.file(tenant, input_file)
      self._check_room(self._folder_of(tenant), 0)
      card = BatchCard(
        id=f'batch_{secrets.token_hex(12)}',
        endpoint=endpoint,
        input_file_id=input_file,
        completion_window=window,
        created_at=now,
        expires_at=now + int(self._days * _DAY_S),
        metadata=metadata,
      )
      self.write(Record(card, tenant))
    return card

  def batches(self, tenant: str) -> list[BatchCard]:
    """The newest first."""
    records = self._read_all(tenant, _BATCH, Record)
    cards = [self._shown(record) for record in records]
    return sorted(cards, key=lambda card: (-card.created_at, card.id))

  def batch(self, tenant: str, id: str) -> BatchCard:
    """Raises UnknownEntry."""
    return self._shown(self._read(tenant, id, _BATCH, Record))

  def cancel(self, tenant: str, id: str) -> BatchCard:
    """Asks for the end of a batch, if it has not ended. Raises UnknownEntry."""
    if self.batch(tenant, id).status in ACTIVE:
      self._path(tenant, id, '.cancel').touch(mode=0o600)
    return self.batch(tenant, id)

  # For the server that works.

  def acquire(self) -> bool:
    """Tries to get the lock; returns whether this process has it and may work."""
    if self._lock is None:
      descriptor = os.open(self._folder / '.lock', os.O_RDWR)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        os.close(descriptor)
        return False
      self._lock = descriptor
    return True

  def close(self) -> None:
    """Releases the lock."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def active(self) -> list[Record]:
    """Batches to process, the oldest first."""
    found = []
    for folder in self._folders():
      records = self._read_folder(folder, _BATCH, Record)
      found += [record for record in records if record.card.status in ACTIVE]
    return sorted(found, key=lambda record: (record.card.created_at, record.card.id))

  def is_cancelled(self, record: Record) -> bool:
    """Whether the batch is to end."""
    return self._path(record.tenant, record.card.id, '.cancel').exists()

  def write(self, record: Record) -> None:
    """Writes the progress of a batch."""
    _replace(self._path(record.tenant, record.card.id, '.json'), msgspec.json.encode(record))

  @contextlib.contextmanager
  def open_input(self, record: Record) -> Iterator[IO[bytes]]:
    """The remaining requests of a batch. Raises UnknownEntry."""
    try:
      file = self.content(record.tenant, record.card.input_file_id).open('rb')
    except FileNotFoundError:
      raise UnknownEntry from None
    with file:
      file.seek(record.read)
      yield file

  def append(self, record: Record, out: bytes, err: bytes) -> None:
    """Adds lines of answers to a batch; they count once it is written. Raises Full."""
    self._check_room(self._folder_of(record.tenant), len(out) + len(err))
    for ending, content in (('out', out), ('err', err)):
      if not content:
        continue
      path = self._path(record.tenant, record.card.id, f'.{ending}')
      with open(path, 'ab', opener=_private) as file:
        file.truncate(getattr(record, ending))  # a server that was killed may have left more
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      setattr(record, ending, getattr(record, ending) + len(content))

  def finish(self, record: Record, status: str) -> None:
    """Ends a batch: its answers become files. It may be called again after a kill."""
    card, now = record.card, int(time.time())
    for ending in ('out', 'err'):
      size = getattr(record, ending)
      path = self._path(record.tenant, card.id, f'.{ending}')
      id = f'file-{card.id.removeprefix("batch_")}{ending}'
      final = self._path(record.tenant, id, '.jsonl')
      if not size:
        path.unlink(missing_ok=True)
        continue
      if path.exists():
        os.truncate(path, size)
        path.replace(final)
      self._write_card(final, size, f'{card.id}_{ending}.jsonl', 'batch_output')
      if ending == 'out':
        card.output_file_id = id
      else:
        card.error_file_id = id
    card.status = status
    setattr(card, f'{status}_at', now)
    self.write(record)
    self._path(record.tenant, card.id, '.cancel').unlink(missing_ok=True)

  def clear(self) -> None:
    """Removes expired entries, and unfinished files of dead servers."""
    now = time.time()
    for folder in self._folders():
      with self._change:
        records = self._read_folder(folder, _BATCH, Record)
        needed = {one.card.input_file_id for one in records if one.card.status in ACTIVE}
        for record in records:
          if record.card.status not in ACTIVE and record.card.expires_at < now:
            (folder / f'{record.card.id}.json').unlink(missing_ok=True)
        for card in self._read_folder(folder, _FILE, FileCard):
          if card.expires_at < now and card.id not in needed:
            (folder / f'{card.id}.json').unlink(missing_ok=True)
            (folder / f'{card.id}.jsonl').unlink(missing_ok=True)
        for path in folder.glob(f'*{_ASIDE}'):
          with contextlib.suppress(OSError):
            if path.stat().st_mtime < now - _ASIDE_S:
              path.unlink()

  # On disk.

  def _folder_of(self, tenant: str) -> pathlib.Path:
    return self._folder / hashlib.sha256(tenant.encode()).hexdigest()[:32]

  def _folders(self) -> list[pathlib.Path]:
    return [path for path in self._folder.iterdir() if path.is_dir()]

  def _path(self, tenant: str, id: str, ending: str) -> pathlib.Path:
    return self._folder_of(tenant) / f'{id}{ending}'

  def _check_room(self, folder: pathlib.Path, size: int) -> None:
    entries = 0
    with contextlib.suppress(FileNotFoundError):
      for entry in os.scandir(folder):
        entries += 1
        with contextlib.suppress(FileNotFoundError):
          size += entry.stat().st_size
    if entries > 3 * _MOST_ENTRIES or size > self._most_tenant:
      raise Full

  def _write_card(self, path: pathlib.Path, size: int, filename: str, purpose: str) -> FileCard:
    now = int(time.time())
    card = FileCard(
      id=path.stem,
      bytes=size,
      created_at=now,
      expires_at=now + int(self._days * _DAY_S),
      filename=filename,
      purpose=purpose,
    )
    _replace(path.with_suffix('.json'), msgspec.json.encode(card))
    return card

  def _read(self, tenant: str, id: str, form: re.Pattern[str], kind: type[_T]) -> _T:
    if not form.fullmatch(id):
      raise UnknownEntry
    try:
      return msgspec.json.decode(self._path(tenant, id, '.json').read_bytes(), type=kind)
    except FileNotFoundError:
      raise UnknownEntry from None

  def _read_all(self, tenant: str, form: re.Pattern[str], kind: type[_T]) -> list[_T]:
    return self._read_folder(self._folder_of(tenant), form, kind)

  def _read_folder(self, folder: pathlib.Path, form: re.Pattern[str], kind: type[_T]) -> list[_T]:
    found = []
    with contextlib.suppress(FileNotFoundError):
      for path in folder.glob('*.json'):
        if form.fullmatch(path.stem):
          with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
    return found

  def _remove_file(self, tenant: str, id: str) -> None:
    for ending in ('.json', '.jsonl'):
      self._path(tenant, id, ending).unlink(missing_ok=True)

  def _shown(self, record: Record) -> BatchCard:
    card = record.card
    if card.status in ACTIVE:
      with contextlib.suppress(FileNotFoundError):
        at = self._path(record.tenant, card.id, '.cancel').stat().st_mtime
        card.status, card.cancelling_at = 'cancelling', int(at)
    return card


def _private(path: str, flags: int) -> int:
  return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _aside(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """A file that takes its place, whole and on disk, at the end."""
  aside = path.with_name(f'.{path.name}.{secrets.token_hex(4)}{_ASIDE}')
  try:
    with open(aside, 'wb', opener=_private) as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    aside.replace(path)
  finally:
    aside.unlink(missing_ok=True)


def _replace(path: pathlib.Path, content: bytes) -> None:
  with _aside(path) as file:
    file.write(content)
