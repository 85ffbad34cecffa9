"""Stores compiled programs in files, so that later processes need not trace them.

The cache of JAX keeps the output of XLA, but finds it by the traced program, and tracing takes most
of the start of a server. Here the key is a hash of the inputs of tracing: the source code of
dprjax, all versions, flags and variables read by JAX, the device, and the shapes.

Loading a program runs code from the file, as in the cache of JAX, so only files of this user that
nobody else may write are read.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import secrets
import stat
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from dprjax.base import compiled

logger = logging.getLogger('dprjax')

_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy')
_VARIABLES = ('JAX_', 'XLA_', 'LIBTPU_', 'TPU_', 'CUDA_', 'NVIDIA_')
_MOST = 512  # files; the oldest go first
_ENDING = '.program'


class Programs:
  """Programs in a folder, which is made if it is missing."""

  def __init__(self, folder: str | os.PathLike[str]):
    self._folder = pathlib.Path(folder)

  def compile(
    self, about: Any, lower: Callable[[], Any], args: Any, result: Any, device: jax.Device
  ) -> tuple[Any, bool]:
    """A program for one device, and whether it was loaded.

    Args:
      about: inputs of tracing besides ``args``; its repr is part of the key.
    """
    path = self._folder / f'{_key(about, args, device)}{_ENDING}'
    trees = jax.tree.structure((args, {})), jax.tree.structure(result)
    try:
      content = _read(path)
      found = serialize_executable.deserialize_and_load(
        content, *trees, backend=device.client, execution_devices=[device]
      )
      os.utime(path)
      return found, True
    except FileNotFoundError:
      pass
    except Exception as error:  # it is compiled again, and replaced
      logger.warning('%s cannot be used and is made again: %s', path, type(error).__name__)
    program = lower()
    # What JAX takes from its own cache cannot be written again.
    with _no_cache():
      program = program.compile()
    try:
      content, *own = serialize_executable.serialize(program)
      if (own[0], own[1]) == trees:
        self._write(path, content)
    except Exception as error:
      logger.warning('%s cannot be written: %s', path, type(error).__name__)
    return program, False

  def _write(self, path: pathlib.Path, content: bytes) -> None:
    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f'.{path.name}.{secrets.token_hex(4)}')
    try:
      descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
      with open(descriptor, 'wb') as file:
        file.write(content)
      aside.replace(path)
    finally:
      aside.unlink(missing_ok=True)
    old = sorted(self._folder.glob(f'*{_ENDING}'), key=lambda one: one.stat().st_mtime)
    for one in old[:-_MOST]:
      one.unlink(missing_ok=True)


def beside_cache() -> Programs | None:
  """Programs in the folder of JAX's cache, if it has one on this machine."""
  folder = jax.config.values['jax_compilation_cache_dir']
  if not folder or '://' in folder or os.environ.get('DPRJAX_EXTENSIONS'):
    return None
  return Programs(pathlib.Path(folder) / 'dprjax-programs')


def _read(path: pathlib.Path) -> bytes:
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
  with open(descriptor, 'rb') as file:
    found = os.fstat(descriptor)
    others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_uid != os.getuid() or found.st_mode & others:
      raise PermissionError
    return file.read()


@contextlib.contextmanager
def _no_cache() -> Any:
  before = jax.config.values['jax_enable_compilation_cache']
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()


def _key(about: Any, args: Any, device: jax.Device) -> str:
  leaves, tree = jax.tree.flatten(args)
  parts = [
    _here(),
    repr(about),
    str(tree),
    [[list(one.shape), str(one.dtype), bool(getattr(one, 'weak_type', False))] for one in leaves],
    [device.platform, device.device_kind, device.id, device.client.platform_version],
    {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    {name: repr(value) for name, value in jax.config.values.items() if 'cache' not in name},
  ]
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _here() -> str:
  """The source code of dprjax, the versions of packages used in tracing, and this CPU."""
  digest = hashlib.sha256()
  package = pathlib.Path(__file__).parent.parent
  for path in sorted(package.rglob('*.py')):
    digest.update(f'{path.relative_to(package)}\n'.encode())
    digest.update(path.read_bytes())
  versions = [importlib.metadata.version(name) for name in _PACKAGES]
  return f'{digest.hexdigest()} {versions} {sys.version} {compiled.machine()}'
