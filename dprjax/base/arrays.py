"""npz files of strangers: arrays alone, no larger than the file can hold, nothing unpickled."""

import errno
import math
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, regular_file

_MOST_PACKED = 1100  # times that deflate can shrink bytes: 1,032, and a little room
_KINDS = 'biufU'
_UNREADABLE = (
  zipfile.BadZipFile,
  zlib.error,
  EOFError,
  KeyError,
  ValueError,
  NotImplementedError,
  OverflowError,
  RuntimeError,  # a member with a password
  SyntaxError,
  TypeError,
)


def read_arrays(path: PathLike, what: str) -> dict[str, np.ndarray]:
  """The arrays of an npz file, by name.

  Raises:
    InputError: it is missing, a folder, a pipe, damaged or no npz; a member is no array of numbers
      or texts, or says that it is larger than its bytes; the message begins with ``what``.
  """
  found = regular_file(path, what)
  arrays: dict[str, np.ndarray] = {}
  name = ''
  try:
    with found.open('rb') as file, zipfile.ZipFile(file) as archive:
      members = archive.infolist()
      packed = sum(member.compress_size for member in members)
      size = sum(member.file_size for member in members)
      file.seek(0, 2)
      if packed > file.tell() or size > _MOST_PACKED * packed:
        raise ValueError(f'{size:,} bytes in a file of {file.tell():,}')
      for member in members:
        name = member.filename.removesuffix('.npy')
        if name in arrays or not member.filename.endswith('.npy'):
          raise ValueError(f'{member.filename!r:.60} is no array, or comes twice')
        with archive.open(member) as stream:
          arrays[name] = _read_array(stream, member.file_size)
  except (*_UNREADABLE, OSError) as error:
    # An offset that is not true is a bad argument of a system call.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
      raise
    at = f', array {name!r:.60}' if name else ''
    raise InputError(
      f'{what} {found}{at}: cut off, damaged or not an npz file of arrays '
      f'({" ".join(str(error).split()):.200}); make or fetch it again'
    ) from error
  return arrays


def _read_array(stream: IO[bytes], size: int) -> np.ndarray:
  """An array of a member of ``size`` bytes, of which the header says how many numbers there are."""
  version = np.lib.format.read_magic(stream)
  if version not in ((1, 0), (2, 0)):
    raise ValueError(f'the array format {version} is not known')
  read = (
    np.lib.format.read_array_header_1_0
    if version == (1, 0)
    else np.lib.format.read_array_header_2_0
  )
  shape, fortran, dtype = read(stream)
  if dtype.hasobject:
    raise ValueError('it holds pickled objects, which are never loaded')
  if dtype.kind not in _KINDS:
    raise ValueError(f'it is of type {dtype}')
  if any(side < 0 for side in shape) or stream.tell() + math.prod(shape) * dtype.itemsize != size:
    raise ValueError(f'its header says {list(shape)} {dtype}, and it has {size:,} bytes')
  values = np.frombuffer(stream.read(), dtype) if dtype.itemsize else np.empty(0, dtype)
  if len(values) != math.prod(shape):
    raise ValueError(f'its header says {list(shape)}, and it holds {len(values):,} values')
  # A copy, which can be written to.
  return values.reshape(shape, order='F' if fortran else 'C').copy()


def write_arrays(path: PathLike, arrays: Mapping[str, Any]) -> None:
  """Writes an npz, whole or not at all; the same arrays make the same bytes."""
  with atomic_write(path, 'wb') as file:
    np.savez(file, allow_pickle=False, **arrays)
