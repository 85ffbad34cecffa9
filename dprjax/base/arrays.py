"""Reads npz files from untrusted sources: checks sizes and never unpickles."""

import errno
import math
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, regular_file

_MOST_PACKED = 1100  # deflate shrinks bytes at most 1,032 times
_KINDS = 'biufU'
_AT_A_TIME = 1 << 20
# Raised for a damaged file by zipfile, and by numpy, which parses a header as Python.
UNREADABLE = (
  zipfile.BadZipFile,
  zlib.error,
  EOFError,
  LookupError,
  ValueError,
  TypeError,
  SyntaxError,
  RuntimeError,  # RecursionError, NotImplementedError, and for an encrypted member
  ArithmeticError,
  MemoryError,
  struct.error,
  tokenize.TokenError,
)

# numpy parses a header as Python. On Python 3.11 one of two threads that do so at the same time may
# end with a SystemError (a wrong count of depth in ast), although its header is right.
_PARSING = threading.Lock()


class _Wrong(Exception):
  """A fault that neither zipfile nor numpy finds."""


def read_arrays(
  path: PathLike, what: str, most_packed: int = _MOST_PACKED, remedy: str = 'make or fetch it again'
) -> dict[str, np.ndarray]:
  """The arrays of an npz file, which may be ``most_packed`` times as large as the file."""
  place = regular_file(path, what)
  arrays: dict[str, np.ndarray] = {}
  name = ''
  try:
    with place.open('rb') as file:
      if file.read(6) == np.lib.format.MAGIC_PREFIX:
        raise _Wrong('a single array')
      with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        packed = sum(member.compress_size for member in members)
        size = sum(member.file_size for member in members)
        stored = file.seek(0, 2)
        if packed > stored or size > most_packed * packed + _AT_A_TIME:
          raise _Wrong(f'{stored:,} bytes that claim to unpack to {size:,}')
        for member in members:
          name = member.filename.removesuffix('.npy')
          if name in arrays:
            raise _Wrong(f'{member.filename!r:.80} occurs twice')
          if not member.filename.endswith('.npy'):
            raise _Wrong('is not an array')
          with archive.open(member) as stream:
            arrays[name] = _read_array(stream, member.file_size)
  except (*UNREADABLE, _Wrong, OSError) as error:
    # A wrong offset makes a system call fail with an invalid argument.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
      raise
    shown = name if name.isprintable() else ascii(name)
    at = f'{what} {place}' + (f', array {shown:.80}' if name else '')
    raise InputError(
      f'{at}: cut off, damaged or not an npz file of arrays '
      f'({" ".join(str(error).split()):.200}); {remedy}'
    ) from error
  return arrays


def _read_array(stream: IO[bytes], size: int) -> np.ndarray:
  shape, fortran, dtype = read_header(stream)
  if dtype.hasobject:
    raise _Wrong('holds pickled Python objects, which are never loaded')
  if dtype.kind not in _KINDS:
    raise _Wrong(f'is of type {dtype}')
  count, there = math.prod(shape), size - stream.tell()
  if any(side < 0 for side in shape) or count * dtype.itemsize != there:
    raise _Wrong(
      f'declares {count * dtype.itemsize:,} bytes, {list(shape)!s:.80} of {dtype}, but has '
      f'{there:,}'
    )
  values = np.empty(count, dtype)
  rest = values.view(np.uint8).data if dtype.itemsize else memoryview(b'')
  while rest:
    part = stream.read(min(len(rest), _AT_A_TIME))
    if not part:
      raise _Wrong(f'declares {count * dtype.itemsize:,} bytes, of which {len(rest):,} are missing')
    rest[: len(part)] = part
    rest = rest[len(part) :]
  stream.read(1)  # compares the checksum
  return values.reshape(shape, order='F' if fortran else 'C')


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
  """Reads from an npy file the shape, whether it is in Fortran order, and the dtype.

  Raises one of `UNREADABLE` for a damaged header.
  """
  version = np.lib.format.read_magic(stream)
  with _PARSING:
    if version == (1, 0):
      return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
      return np.lib.format.read_array_header_2_0(stream)
  raise ValueError(f'the array format {version} is unknown')


def write_arrays(path: PathLike, arrays: Mapping[str, Any]) -> None:
  """Writes an npz atomically; the same arrays give the same bytes."""
  with atomic_write(path, 'wb') as file:
    np.savez(file, allow_pickle=False, **arrays)
