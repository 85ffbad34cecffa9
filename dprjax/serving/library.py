"""A folder of prompt files, ``NAME.npz``, that may change while it is served.

Every request checks the times and size of its file, so that prompts from other servers or copy
commands are served at once. The least recently used prompts leave host memory first. A file that
cannot be served is logged once.
"""

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from dprjax.base import provenance
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, sha256_file
from dprjax.encoding.text_encoder import BankEntry, check_length, check_prefix
from dprjax.models import adapter as adapters
from dprjax.models import artifact, hub
from dprjax.models.adapter import Adapter, Kind
from dprjax.retrieval import folder as folders
from dprjax.serving.bank import AdapterChoice
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.options import ServerOptions
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES, VectorSpec, of_meta

NAME = re.compile(r'[\w-][\w .-]{0,63}')
NAMES = '1 to 64 letters, digits, spaces and . _ -, no dot or space first'
_ENDING = '.npz'
_META_BYTES = 64 << 10  # of the meta of a prompt as JSON
_LEFT_S = 3600  # an unfinished upload of this age is from a dead server

logger = logging.getLogger('dprjax')

_Identity = tuple[int, ...]


class UnknownPrompt(Exception):
  """No prompt has this name."""


class NameTaken(Exception):
  """The backbone or a retriever has this name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
  """One content of the file of a prompt, or the bare backbone.

  Attributes:
    lengths: by side, the size of the adapter, such as P.
    choices: by side, one or one for each topic; empty where the vectors are not kept.
    refused: why the file cannot be served, or ''; then most of the rest is empty.
  """

  name: str = ''
  sha256: str = ''
  spec: VectorSpec = dataclasses.field(default_factory=VectorSpec)
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)
  lengths: dict[str, int] = dataclasses.field(default_factory=dict)
  two_sided: bool = False
  nbytes: int = 0
  modified: float = 0
  choices: dict[str, list[AdapterChoice]] = dataclasses.field(default_factory=dict)
  topic_model: Any = None
  refused: str = ''

  @property
  def shift_positions(self) -> bool:
    """Whether tokens count their positions from the prompt length."""
    return bool(self.meta.get('shift_positions'))

  def choose(self, texts: Sequence[str], side: str) -> list[AdapterChoice]:
    choices = self.choices[side]
    if self.topic_model is None:
      return choices * len(texts)
    return [choices[number] for number in self.topic_model.assign(texts).tolist()]


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
    options: ServerOptions,
    metrics: ServerMetrics,
  ):
    """Reads every file once, and lists those that cannot be served.

    Args:
      name: of the bare backbone; no prompt can have it.
      options: ``prompt_length`` is P of a slot for prefixes, and the size of the other kinds; the
        last prompt read stays, also if it is larger than ``host_bytes``.
    """
    if not all(map(NAME.fullmatch, name.split('/'))):
      raise InputError(f'--name={name}: expected {NAMES}; / between such parts')
    # A relative path may look like a name of a hub.
    self.folder, self.name = epath.Path(os.path.abspath(folder)), name
    self._backbone, self._tokenizer = backbone, tokenizer
    self._options, self._most_tokens, self._metrics = options, options.lengths[-1], metrics
    self._lock = threading.RLock()
    self._kept: collections.OrderedDict[str, tuple[_Identity, Version]] = collections.OrderedDict()
    self._about: dict[str, tuple[_Identity, Version]] = {}  # without vectors
    self._told: set[str] = set()  # why files are not served
    self._bytes = 0
    spec = backbone.spec.at_most(self._most_tokens)
    for side in SIDES:
      self._check_room(f'backbone {name}', spec, side)
    bare = AdapterChoice(None, None, spec)
    self.bare = Version(
      name,
      spec=spec,
      lengths=dict.fromkeys(SIDES, 0),
      two_sided=_differ(spec),
      choices={side: [bare] for side in SIDES},
    )
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.glob(f'.*{_ENDING}.*.tmp'):
      with contextlib.suppress(OSError):
        if os.stat(path).st_mtime < time.time() - _LEFT_S:
          path.unlink()
    make = [kind.row for kind in adapters.every().values() if kind.row is not None]
    rows = [one(backbone.config, options.prompt_length) for one in make]
    self.rows: dict[type[Adapter], Adapter] = {type(row): row for row in rows}
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
    identity = self._identity(name)
    with self._lock:
      for known in (self._kept.get(name), self._about.get(name)):
        if known is None or known[0] != identity:
          continue
        if known[1].refused:
          raise InputError(known[1].refused)
        if known[1].choices:
          self._kept.move_to_end(name)
          return known[1]
    return self._read(name, identity)

  def kept(self, name: str) -> Version | None:
    """The prompt as last read, if it is in memory; reads no file."""
    if name == self.name:
      return self.bare
    with self._lock:
      entry = self._kept.get(name)
    return None if entry is None else entry[1]

  def about(self, name: str) -> Version:
    """Describes a prompt, also one that is refused. Raises UnknownPrompt."""
    identity = self._identity(name)
    if (known := self._about.get(name)) is None or known[0] != identity:
      with contextlib.suppress(InputError):
        self.get(name)
      known = self._about.get(name)
    if known is None:
      raise UnknownPrompt(name)
    return known[1]

  def listing(self) -> list[tuple[str, Version]]:
    """All prompts by name, and other prompt files with why they are not served."""
    versions: dict[str, Version] = {}
    for entry in os.scandir(self.folder):
      name = entry.name.removesuffix(_ENDING)
      if name == entry.name and not folders.is_folder(entry):
        continue
      if name == self.name:
        why = 'has the name of the backbone; rename it, or choose another --name'
      elif not NAME.fullmatch(name):
        why = f'rename it: expected {NAMES}'
      else:
        try:
          versions[name] = self.about(name)
          continue
        except UnknownPrompt:
          if not entry.is_symlink():  # removed meanwhile
            continue
          why = 'is a link to a file that is not there'
        except OSError as error:
          why = f'cannot be read ({error.strerror})'
      shown = name.encode(errors='backslashreplace').decode()
      versions[shown] = Version(refused=f'prompt {shown!r}: {why}')
    for version in versions.values():
      if version.refused and version.refused not in self._told:
        self._told.add(version.refused)
        logger.warning('not served: %s', version.refused)
    return sorted(versions.items())

  def put(self, name: str, content: bytes) -> str | None:
    """Adds or replaces a prompt; the old file stays until the new one is checked and on disk.

    Returns the SHA-256 of the file that it replaced.

    Raises:
      NameTaken: by the backbone or a retriever.
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
      self._check(name, aside)
      before = None
      with contextlib.suppress(UnknownPrompt):
        before = self.about(name).sha256
      aside.replace(final)
      self._sync_folder()
    finally:
      aside.unlink(missing_ok=True)
    return before

  def delete(self, name: str) -> str:
    """Removes the file of a prompt, and returns its SHA-256. Queued texts are still answered.

    Raises:
      UnknownPrompt: there is none.
      NameTaken: it belongs to a retriever.
    """
    path = self._path(name)
    if path.parent != self.folder:
      raise NameTaken(name)
    before = self.about(name).sha256
    try:
      path.unlink()
    except (FileNotFoundError, IsADirectoryError):
      raise UnknownPrompt(name) from None
    self._sync_folder()
    self._forget(name)
    return before

  def _path(self, name: str) -> epath.Path:
    """The file of a prompt. Raises UnknownPrompt for an impossible name."""
    if not NAME.fullmatch(name):
      raise UnknownPrompt(name)
    if folders.is_folder(self.folder / name):
      return self.folder / name / hub.PROMPT
    return self.folder / (name + _ENDING)

  def _identity(self, name: str) -> _Identity:
    """Changes with the content of a file. Raises UnknownPrompt; OSError if the folder is gone."""
    try:
      return provenance.identity(self._path(name))
    except (FileNotFoundError, NotADirectoryError):
      if not self.folder.is_dir():
        raise OSError(errno.ENOENT, 'the folder of prompts is not there') from None
      self._forget(name)
      raise UnknownPrompt(name) from None

  def _sync_folder(self) -> None:
    descriptor = os.open(self.folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)

  def _read(self, name: str, identity: _Identity) -> Version:
    path, modified = self._path(name), identity[2] / 1e9
    try:
      inside = epath.Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder))
      if not (inside and stat.S_ISREG(os.stat(path).st_mode)):
        raise InputError(f'prompt {name}: not a file of this folder; copy the file into it')
      version = dataclasses.replace(self._check(name, path), modified=modified)
    except FileNotFoundError:
      raise UnknownPrompt(name) from None
    except InputError as error:
      if self._identity(name) == identity:  # raises if the file, or the folder, is gone
        self._forget(name)
        self._about[name] = identity, Version(name, modified=modified, refused=str(error))
      raise
    self._keep(identity, version)
    return version

  def _check(self, name: str, path: epath.Path) -> Version:
    """Reads a prompt; errors name the prompt, not the folder."""
    try:
      while True:
        sha256 = sha256_file(path)
        prompt = artifact.load_prompt_for(path, self._tokenizer.sha256, self._backbone)
        if sha256_file(path) == sha256:  # another server may replace it meanwhile
          break
      return self._version(name, prompt, sha256)
    except InputError as error:
      message = str(error).replace(f'prompt {path}', f'prompt {name}')
      message = message.replace(str(path), f'prompt {name}')
      raise InputError(message.replace(self._backbone.path, self.name)) from error

  def _version(self, name: str, prompt: artifact.Prompt, sha256: str) -> Version:
    made_for = prompt.meta['backbone_sha256']
    several = isinstance(made_for, dict) and len(set(made_for.values())) > 1
    if prompt.kind.load is None or several:
      what = 'prompts of two encoders' if several else prompt.kind.text
      raise InputError(
        f'prompt {name}: servers do not take {what}; encode with dprjax.encode --prompt'
      )
    if (size := len(json.dumps(prompt.meta))) > _META_BYTES:
      raise InputError(
        f'prompt {name}: its meta has {size:,} bytes; a server takes {_META_BYTES:,} at most'
      )
    spec = of_meta(prompt.meta, self._backbone.spec)
    by_side: dict[str, list[Adapter | None]] = {}
    for side in SIDES:
      check_length(name, BankEntry(prompt, spec), side, self._backbone)
      self._check_room(f'prompt {name}', spec, side)
      tied = prompt.tied and side != SIDES[0]
      by_side[side] = by_side[SIDES[0]] if tied else [*prompt.adapters(side)]
      if (adapter := by_side[side][0]) is not None:
        self._check_slot(name, prompt.kind, adapter)
    # Passages of a query-only prompt use the bare backbone and no slot.
    choices = {
      side: [
        AdapterChoice(
          None if adapter is None else (sha256, '' if prompt.tied else side, number), adapter, spec
        )
        for number, adapter in enumerate(of_side)
      ]
      for side, of_side in by_side.items()
    }
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(by_side) if isinstance(leaf, np.ndarray)}
    return Version(
      name,
      sha256,
      spec,
      prompt.meta,
      {side: 0 if of_side[0] is None else of_side[0].size() for side, of_side in by_side.items()},
      not prompt.tied or _differ(spec),
      sum(leaf.nbytes for leaf in arrays.values()),
      choices=choices,
      topic_model=prompt.kind.topics(prompt) if prompt.kind.topics else None,
    )

  def _check_slot(self, name: str, kind: Kind, adapter: Adapter) -> None:
    """Raises InputError if no slot of this server can hold an adapter."""
    slot = self.rows.get(type(adapter))
    room = adapters.blank([*([] if slot is None else [slot]), adapter.row()])
    if slot is not None and adapters.same_shapes(slot, room):
      return
    from_flag = kind.row is not None  # --prompt_length gives the size
    if self._starting and not from_flag:
      self.rows[type(adapter)] = room
      return
    remedy = f'start it with --prompt_length={adapter.size()}' if from_flag else 'restart it'
    raise InputError(
      f'prompt {name}: this server has no slots for kind {kind.name!r} of size {adapter.size()}; '
      f'{remedy}'
    )

  def _check_room(self, whose: str, spec: VectorSpec, side: str) -> None:
    longest, specials = spec.max_length(side), self._tokenizer.num_specials
    if not specials < longest <= self._most_tokens:
      raise InputError(
        f'{whose}: {side}_max_length is {longest}; this server takes {specials + 1} to '
        f'{self._most_tokens} tokens, special ones among them: see --lengths'
      )
    check_prefix(f'{whose}: ', spec, side, self._tokenizer)

  def _keep(self, identity: _Identity, version: Version) -> None:
    with self._lock:
      self._forget(version.name)
      about = dataclasses.replace(version, choices={}, topic_model=None)
      self._about[version.name] = identity, about
      self._kept[version.name] = identity, version
      self._bytes += version.nbytes
      self._metrics.loads.labels('host').inc()
      while self._bytes > self._options.host_bytes and len(self._kept) > 1:
        _, (_, oldest) = self._kept.popitem(last=False)
        self._bytes -= oldest.nbytes
        self._metrics.evictions.labels('host').inc()
      self._metrics.resident.labels('host').set(len(self._kept))

  def _forget(self, name: str) -> None:
    with self._lock:
      self._about.pop(name, None)
      if (entry := self._kept.pop(name, None)) is not None:
        self._bytes -= entry[1].nbytes


def _differ(spec: VectorSpec) -> bool:
  return spec.prefix('query') != spec.prefix('passage')
