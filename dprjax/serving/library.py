"""A folder of prompt files, ``NAME.npz``, that may change while it is served.

Every request checks the times and size of its file, so that prompts from other servers or copy
commands are served at once. The least recently used prompts leave host memory first. A file that
cannot be served is logged once.

Names are in the composed form of Unicode (NFC); file names may be decomposed.
"""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pathlib
import re
import stat
import threading
import time
import unicodedata
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, sha256_file
from dprjax.encoding.text_encoder import BankEntry, check_length, check_prefix
from dprjax.models import adapter as adapters
from dprjax.models import artifact, hub
from dprjax.models.adapter import Adapter, Kind
from dprjax.models.encoder_config import EncoderConfig
from dprjax.retrieval import folder as folders
from dprjax.serving.bank import AdapterChoice
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.versions import About, Version
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES, VectorSpec, of_meta

NAME = re.compile(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}')  # of an upload
_BACKBONE_NAME = re.compile(
  rf'{NAME.pattern}(/{NAME.pattern}){{0,3}}'
)  # as of a hub: ORGANISATION/MODEL
_ENDING = '.npz'
_LEFT = re.compile(r'\.[A-Za-z0-9._-]{1,64}\.npz\.[0-9a-f]{8}\.tmp')
_META_BYTES = 256 << 10  # of the meta of a prompt as JSON; lists show parts of it
_LEFT_S = 3600  # an unfinished upload of this age is from a dead server

logger = logging.getLogger('dprjax')

_Signature = tuple[int, int, int, int]


class UnknownPrompt(Exception):
  """No prompt has this name."""


class NameTaken(Exception):
  """The backbone or a retriever has this name."""


class Changed(Exception):
  """The prompt differs from the one known to the client."""


class Condition(NamedTuple):
  """A condition on the file of a prompt for a change.

  Attributes:
    of: the file must have one of these SHA-256s; empty: it must exist. None: no condition.
    new: the file must not exist.
  """

  of: frozenset[str] | None = None
  new: bool = False

  def check(self, sha256: str | None) -> None:
    """Raises Changed if the file SHA-256 (None: no file) does not meet it."""
    if self.new and sha256 is not None:
      raise Changed('the prompt is there already')
    if self.of is not None and (sha256 is None or (self.of and sha256 not in self.of)):
      what = 'is gone' if sha256 is None else f'has SHA-256 {sha256} by now'
      raise Changed(f'the prompt {what}')


ALWAYS = Condition()


class Library:
  """The prompts of a folder for one backbone, by name: files, or folders of retrievers.

  Attributes:
    rows: by kind of adapter, a row of the size of slots that changes nothing. Optional kinds depend
      on the folder at the start.
  """

  def __init__(
    self,
    folder: PathLike,
    backbone: hub.Backbone,
    tokenizer: tokenizing.Tokenizer,
    *,
    name: str,
    most_vectors: int,
    most_tokens: int,
    host_bytes: int,
    metrics: ServerMetrics,
  ):
    """Reads every file once, and lists those that cannot be served.

    Args:
      folder: made if missing.
      name: of the bare backbone; no prompt can have it.
      most_vectors: P of a slot for prefixes; also the size of the other kinds.
      host_bytes: memory for vectors; the last one read always stays.
      metrics: counts loads and evictions.

    Raises:
      InputError: a bad name, texts that are too long in the settings of the backbone, or the folder
        is a file.
    """
    if not _BACKBONE_NAME.fullmatch(name):
      raise InputError(
        f'--name={name}: expected 1 to 64 of A-Z a-z 0-9 . _ -, no dot first; / between such parts'
      )
    self.folder = pathlib.Path(folder).absolute()  # a relative one may look like a name of a hub
    self.name = name
    self._backbone, self._tokenizer = backbone, tokenizer
    self._most_tokens, self._host_bytes, self._metrics = most_tokens, host_bytes, metrics
    self._lock, self._change = threading.Lock(), threading.Lock()
    self._reading: dict[str, threading.Lock] = {}
    self._kept: collections.OrderedDict[str, tuple[_Signature, Version]] = collections.OrderedDict()
    self._about: dict[str, tuple[_Signature, About]] = {}
    self._told: set[str] = set()  # why files are not served
    self._bytes = 0
    spec = backbone.spec.at_most(most_tokens)
    for side in SIDES:
      self._check_room(f'backbone {name}', spec, side)
    bare = AdapterChoice(None, None, spec)
    self.bare = Version(
      name, '', spec, {}, dict.fromkeys(SIDES, 0), {side: [bare] for side in SIDES}
    )
    if self.folder.exists() and not self.folder.is_dir():
      raise InputError(f'--prompts={folder} is a file, not a folder')
    self.folder.mkdir(parents=True, exist_ok=True)
    self._clear()
    self.rows = _rows(backbone.config, most_vectors)
    self._from_flag = set(self.rows)
    self._starting = True
    self.listing()
    self._starting = False

  def get(self, name: str) -> Version:
    """The prompt in its present file, or the bare backbone by its name.

    Raises:
      UnknownPrompt: no such file.
      InputError: the file cannot be served.
    """
    if name == self.name:
      return self.bare
    name = unicodedata.normalize('NFC', name)
    signature = self._signature(name)
    with self._lock:
      kept = self._kept.get(name)
      if kept is not None and kept[0] == signature:
        self._kept.move_to_end(name)
        return kept[1]
      about = self._about.get(name)
      if about is not None and about[0] == signature and about[1].refused:
        raise InputError(about[1].refused)
      reading = self._reading.setdefault(name, threading.Lock())
    with reading:
      with self._lock:
        kept = self._kept.get(name)
        if kept is not None and kept[0] == signature:
          return kept[1]
      return self._read(name, signature)

  def kept(self, name: str) -> Version | None:
    """The prompt as last read, if it is in memory; reads no file."""
    with self._lock:
      kept = self._kept.get(unicodedata.normalize('NFC', name))
    return self.bare if name == self.name else None if kept is None else kept[1]

  def about(self, name: str) -> About:
    """Describes a prompt. Raises UnknownPrompt."""
    name = unicodedata.normalize('NFC', name)
    signature = self._signature(name)
    if name == self.name:
      return _refused(name, 'has the name of the backbone; rename it, or choose another --name')
    with self._lock:
      about = self._about.get(name)
    if about is None or about[0] != signature:
      with contextlib.suppress(InputError):
        self.get(name)
      with self._lock:
        about = self._about.get(name)
    if about is None:
      raise UnknownPrompt(name)
    return about[1]

  def listing(self) -> list[tuple[str, About]]:
    """All prompts by name, and other prompt files with why they are not served."""
    found = []
    for entry in os.scandir(self.folder):
      stem = entry.name.removesuffix(_ENDING)
      name = unicodedata.normalize('NFC', stem)
      if why := self._why_not(entry):
        shown = entry.name.encode(errors='backslashreplace').decode()
        found.append((shown, _refused(shown, why)))
      elif entry.name.endswith(_ENDING) or folders.is_folder(entry):
        try:
          found.append((name, self.about(name)))
        except UnknownPrompt:
          continue
        except OSError as error:
          found.append((name, _refused(name, f'cannot be read ({error.strerror})')))
    for _, about in found:
      if about.refused and about.refused not in self._told:
        self._told.add(about.refused)
        logger.warning('not served: %s', about.refused)
    return sorted(found, key=lambda one: one[0])

  def put(
    self, name: str, content: bytes, condition: Condition = ALWAYS
  ) -> tuple[Version, str | None]:
    """Adds or replaces a prompt; the old file stays until the new one is checked and on disk.

    Returns the prompt, and the SHA-256 of the file that it replaced.

    Raises:
      NameTaken: by the backbone or a retriever.
      Changed: the file does not meet the condition.
      InputError: no prompt, or one for another backbone, tokenizer or size.
    """
    final = self._path(name)
    if name == self.name or final.parent != self.folder:
      raise NameTaken(name)
    aside = final.with_name(f'.{final.name}.{uuid.uuid4().hex[:8]}.tmp')
    try:
      with aside.open('wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      version = self._check(name, aside)
      with self._changing():
        before = self._sha256(final)
        condition.check(before)
        written = _signature_of(aside)
        aside.replace(final)
        _sync_folder(self.folder)
        with contextlib.suppress(FileNotFoundError):
          signature = _signature_of(final)
          if signature[:3] == written[:3]:  # a copy command may have replaced it
            self._keep(name, signature, version)
    finally:
      with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    return version, before

  def content(self, name: str) -> bytes:
    """The file of a prompt.

    Raises:
      UnknownPrompt: there is none.
      InputError: it is no regular file of the folder, or too large.
    """
    name = unicodedata.normalize('NFC', name)
    self._signature(name)
    path = self._path(name)
    self._check_file(name, path)
    # A link or pipe that replaced it meanwhile is not followed.
    descriptor = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, 'rb') as file:
      found = os.fstat(descriptor)
      if not stat.S_ISREG(found.st_mode):
        raise InputError(f'prompt {name}: not a file')
      return file.read(found.st_size)

  def delete(self, name: str, condition: Condition = ALWAYS) -> str | None:
    """Removes the file of a prompt, and returns its SHA-256. Queued texts are still answered.

    Raises:
      UnknownPrompt: there is none.
      NameTaken: it belongs to a retriever.
      Changed: the file does not meet the condition.
    """
    name = unicodedata.normalize('NFC', name)
    path = self._path(name)
    if path.parent != self.folder:
      raise NameTaken(name)
    try:
      with self._changing():
        before = self._sha256(path)
        condition.check(before)
        path.unlink()
    except (FileNotFoundError, IsADirectoryError):
      self._check_folder()
      raise UnknownPrompt(name) from None
    _sync_folder(self.folder)
    with self._lock:
      self._forget(name)
      self._about.pop(name, None)
    return before

  @contextlib.contextmanager
  def _changing(self) -> Iterator[None]:
    """One change at a time, also of other servers where the file system has locks."""
    with self._change:
      descriptor = os.open(self.folder, os.O_RDONLY)
      try:
        with contextlib.suppress(OSError):
          fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
      finally:
        os.close(descriptor)

  def _sha256(self, path: pathlib.Path) -> str | None:
    """The SHA-256 of a file; None if it is missing; '' if it is not a regular file."""
    try:
      if not stat.S_ISREG(os.stat(path).st_mode):
        return ''
      return sha256_file(path)
    except FileNotFoundError:
      return None

  def _check_folder(self) -> None:
    """Raises OSError if the folder itself is gone."""
    if not self.folder.is_dir():
      raise OSError(errno.ENOENT, 'the folder of prompts is not there', str(self.folder))

  def _check_file(self, name: str, path: pathlib.Path) -> None:
    """Raises InputError unless a path is a regular file in the folder, or a link to one."""
    if not stat.S_ISREG(os.stat(path).st_mode):
      raise InputError(f'prompt {name}: not a file')
    if not pathlib.Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder)):
      raise InputError(f'prompt {name}: a link to a file outside the folder; copy the file')

  def _path(self, name: str) -> pathlib.Path:
    """The file of a composed name. Raises UnknownPrompt for an impossible name."""
    if _bad_name(name):
      raise UnknownPrompt(name)
    if folders.is_folder(self.folder / name):
      return self.folder / name / artifact.FILE
    composed, decomposed = (
      self.folder / (unicodedata.normalize(form, name) + _ENDING) for form in ('NFC', 'NFD')
    )
    other = not name.isascii() and not os.path.exists(composed) and os.path.exists(decomposed)
    return decomposed if other else composed

  def _signature(self, name: str) -> _Signature:
    try:
      return _signature_of(self._path(name))
    except (FileNotFoundError, NotADirectoryError):
      self._check_folder()
      with self._lock:
        self._forget(name)
        self._about.pop(name, None)
      raise UnknownPrompt(name) from None

  def _why_not(self, entry: os.DirEntry[str]) -> str:
    """Why a file that looks like a prompt is not served, or ''."""
    stem = entry.name.removesuffix(_ENDING)
    if _LEFT.fullmatch(entry.name):
      return ''
    if stem == entry.name:
      if entry.name.lower().endswith(_ENDING):
        return f'has another ending than {_ENDING}; rename it'
      if folders.is_folder(entry):
        return f'{why}; rename it' if (why := _bad_name(stem)) else ''
      return 'is a folder; put its prompts beside it' if _holds_prompts(entry) else ''
    if why := _bad_name(stem):
      return f'{why}; rename it'
    try:
      os.stat(entry)
    except FileNotFoundError:
      return 'is a link to a file that is not there'
    except OSError as error:  # a loop of links, a damaged disk
      return f'cannot be read ({error.strerror})'
    path = self._path(unicodedata.normalize('NFC', stem))
    if path.name != entry.name:
      if os.path.exists(path):
        return 'has the name of another file in another normal form of Unicode; rename it'
      return 'has a name in no normal form of Unicode; rename it'
    return ''

  def _read(self, name: str, signature: _Signature) -> Version:
    path = self._path(name)
    try:
      self._check_file(name, path)
      version = self._check(name, path)
    except FileNotFoundError:
      raise UnknownPrompt(name) from None
    except InputError as error:
      if self._signature(name) == signature:  # raises if the file, or the folder, is gone
        with self._lock:
          self._forget(name)
          self._about[name] = signature, About(modified=signature[2] / 1e9, refused=str(error))
      raise
    self._keep(name, signature, version)
    return version

  def _check(self, name: str, path: pathlib.Path) -> Version:
    """Reads a prompt; errors name the prompt, not the folder."""
    try:
      while True:
        sha256 = sha256_file(path)
        prompt = artifact.load_prompt_for(path, self._tokenizer.sha256, self._backbone)
        if sha256_file(path) == sha256:  # another server may replace it meanwhile
          break
      return self._version(name, dataclasses.replace(prompt, path=f'prompt {name}'), sha256)
    except InputError as error:
      found = str(error).replace(f'prompt {path}', str(path))
      found = found.replace(str(path), f'prompt {name}')
      raise InputError(found.replace(self._backbone.path, self.name)) from error

  def _version(self, name: str, prompt: artifact.Prompt, sha256: str) -> Version:
    if prompt.kind.load is None:
      raise InputError(
        f'prompt {name}: servers do not take {prompt.kind.text}; encode with dprjax.encode --prompt'
      )
    made_for = prompt.meta['backbone_sha256']
    if isinstance(made_for, dict) and len(set(made_for.values())) > 1:
      raise InputError(
        f'prompt {name}: for two encoders, of queries and of passages; a server has one'
      )
    if (size := len(json.dumps(prompt.meta))) > _META_BYTES:
      raise InputError(
        f'prompt {name}: its meta has {size:,} bytes; a server takes {_META_BYTES:,} at most'
      )
    spec = of_meta(prompt.meta, self._backbone.spec)
    model = None
    lengths: dict[str, int] = {}
    choices: dict[str, list[AdapterChoice]] = {}
    for side in SIDES:
      check_length(name, BankEntry(prompt, spec), side, self._backbone)
      self._check_room(f'prompt {name}', spec, side)
      longest = spec.max_length(side)
      if longest > self._most_tokens:
        raise InputError(
          f'prompt {name}: {side}_max_length {longest} exceeds the {self._most_tokens} tokens of '
          'this server; start it with longer --lengths'
        )
      if prompt.tied and choices:
        lengths[side], choices[side] = lengths[SIDES[0]], choices[SIDES[0]]
        continue
      own = prompt.adapters(side)
      lengths[side] = 0 if own[0] is None else own[0].size()
      if own[0] is not None:
        self._check_slot(name, prompt.kind, own[0])
      # Passages of a query-only prompt use the bare backbone and no slot.
      choices[side] = [
        AdapterChoice(
          None if adapter is None else (sha256, '' if prompt.tied else side, number), adapter, spec
        )
        for number, adapter in enumerate(own)
      ]
    if prompt.kind.topics:
      model = prompt.kind.topics(prompt)
    return Version(name, sha256, spec, prompt.meta, lengths, choices, model)

  def _check_slot(self, name: str, kind: Kind, adapter: Adapter) -> None:
    """Raises InputError if no slot of this server can hold an adapter."""
    slot, size = self.rows.get(type(adapter)), adapter.size()
    room = adapters.blank([*([] if slot is None else [slot]), adapter.row()])
    if slot is not None and adapters.same_shapes(slot, room):
      return
    from_flag = type(adapter) in self._from_flag  # --prompt_length gives the size
    if self._starting and not from_flag:
      self.rows[type(adapter)] = room
      return
    found = 'none' if slot is None else f'size {slot.size()} at most'
    if slot is not None and size <= slot.size():
      found = 'other arrays'
    raise InputError(
      f'prompt {name}: kind {kind.name!r}, size {size}; this server has slots for {found}: '
      + (f'start it with --prompt_length={size}' if from_flag else 'restart it with this file')
    )

  def _check_room(self, whose: str, spec: VectorSpec, side: str) -> None:
    longest = spec.max_length(side)
    if longest <= self._tokenizer.num_specials:
      raise InputError(f'{whose}: {side}_max_length {longest} leaves no room beside special tokens')
    check_prefix(f'{whose}: ', spec, side, self._tokenizer)

  def _keep(self, name: str, signature: _Signature, version: Version) -> None:
    about = About(
      version.sha256,
      version.meta,
      version.lengths,
      version.spec,
      version.two_sided,
      version.nbytes,
      signature[2] / 1e9,
    )
    with self._lock:
      self._forget(name)
      self._about[name] = signature, about
      self._kept[name] = signature, version
      self._bytes += version.nbytes
      self._metrics.loads.labels('host').inc()
      while self._bytes > self._host_bytes and len(self._kept) > 1:
        self._forget(next(iter(self._kept)))
        self._metrics.evictions.labels('host').inc()
      self._metrics.resident.labels('host').set(len(self._kept))

  def _forget(self, name: str) -> None:
    kept = self._kept.pop(name, None)
    if kept is not None:
      self._bytes -= kept[1].nbytes

  def _clear(self) -> None:
    """Removes unfinished uploads of dead servers."""
    for path in self.folder.iterdir():
      with contextlib.suppress(OSError):
        if _LEFT.fullmatch(path.name) and path.stat().st_mtime < time.time() - _LEFT_S:
          path.unlink()


def _signature_of(path: pathlib.Path) -> _Signature:
  # Tools that copy the time of a file cannot copy that of its change.
  found = os.stat(path)
  return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _bad_name(name: str) -> str:
  """Why a file of this name (without its ending) cannot be served, or ''."""
  if not name or name.startswith('.'):
    return 'is a hidden file'
  if not name.isprintable() or '/' in name:
    return 'has a character in its name that is not printable'
  if ':' in name:
    return 'has a colon in its name, which divides a name from query or passage'
  if len(name.encode()) > 255 - len(_ENDING):
    return 'has too long a name'
  return ''


def _holds_prompts(entry: os.DirEntry[str]) -> bool:
  """Whether an entry is a visible folder of prompts."""
  if entry.name.startswith('.'):
    return False
  try:
    return entry.is_dir() and any(name.endswith(_ENDING) for name in os.listdir(entry))
  except OSError:
    return False


def _rows(config: EncoderConfig, size: int) -> dict[type[Adapter], Adapter]:
  """The rows of the banks that every server has."""
  rows = (kind.row(config, size) for kind in adapters.every().values() if kind.row is not None)
  return {type(row): row for row in rows}


def _refused(name: str, why: str) -> About:
  return About(refused=f'prompt {name!r}: {why}')


def _sync_folder(folder: pathlib.Path) -> None:
  """Flushes a rename or removal to disk."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
