"""Finds, checks, reads and hashes the safetensors files of a model."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.reading import convert, read_json_object
from dprjax.models import checkpoint_names as names
from dprjax.models.encoder_config import EncoderConfig

Params = dict[str, Any]

WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_FileName = Annotated[str, msgspec.Meta(pattern=r'\A(?!\.\.?\Z)[^/\0]+\Z')]
_PICKLES = (
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
  'model.ckpt.index',
  'tf_model.h5',
  'flax_model.msgpack',
)


class Stored(NamedTuple):
  handle: Any
  name: str

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self.handle.get_slice(self.name).get_shape())

  @property
  def dtype(self) -> str:
    return self.handle.get_slice(self.name).get_dtype()

  def read(self) -> np.ndarray:
    return self.handle.get_tensor(self.name)

  def part(self, index: tuple[slice, ...]) -> np.ndarray:
    return self.handle.get_slice(self.name)[index]


@dataclasses.dataclass(frozen=True, eq=False)
class OnDisk:
  """A leaf of our tree that stays in its file. Slices are read into new arrays.

  So several devices get their parts of a leaf one by one, without the whole leaf in memory.

  Attributes:
    stored: its tensor, or those of all layers; None: zeros, for a layer without the tensor.
    dtype: of the slices: bfloat16 if all of ``stored`` are, else float32.
  """

  stored: tuple[Stored | None, ...]
  tensor: names.Tensor
  part: int = 0
  dtype: Any = np.float32

  @classmethod
  def of(cls, stored: Sequence[Stored | None], tensor: names.Tensor, part: int) -> Self:
    dtypes = {place.dtype for place in stored if place is not None}
    dtype = jnp.dtype('bfloat16' if dtypes == {names.DTYPES['bfloat16']} else 'float32')
    return cls(tuple(stored), tensor, part, dtype)

  @property
  def _rows(self) -> int:
    return self.tensor.shape[0] // len(self.tensor.paths)

  @property
  def shape(self) -> tuple[int, ...]:
    core = self._rows, *self.tensor.shape[1:]
    core = core[::-1] if self.tensor.kernel else core
    return core if self.tensor.layer is None else (len(self.stored), *core)

  @property
  def ndim(self) -> int:
    return len(self.shape)

  def astype(self, dtype: Any) -> 'OnDisk':
    return dataclasses.replace(self, dtype=dtype)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return self[(slice(None),) * self.ndim].astype(dtype or self.dtype, copy=False)

  def __getitem__(self, index: Any) -> np.ndarray:
    if isinstance(index, int) and self.tensor.layer is not None:  # one layer
      return self[(slice(index, index + 1), *(slice(None),) * (self.ndim - 1))][0]
    if not (isinstance(index, tuple) and len(index) == self.ndim):
      return np.asarray(self)[index]
    stacked, kernel = self.tensor.layer is not None, self.tensor.kernel
    layers: slice = index[0] if stacked else slice(None)
    places = self.stored[layers]
    sizes = [len(range(*one.indices(size))) for one, size in zip(index, self.shape, strict=True)]
    array = np.zeros((len(places), *sizes[stacked:]), self.dtype)
    rows, *rest = index[stacked:][::-1] if kernel else index[stacked:]
    start, stop, _ = rows.indices(self._rows)
    first = self.part * self._rows
    for number, place in enumerate(places):
      if place is not None:
        part = place.part((slice(first + start, first + stop), *rest))
        array[number] = part.T if kernel else part
    return array if stacked else array[0]


class Checkpoint(NamedTuple):
  """An open model.

  Attributes:
    tensors: by names of the family; several if stored twice.
  """

  folder: epath.Path
  config: EncoderConfig
  hf_config: dict[str, Any]
  tensors: dict[str, list[Stored]]


def open_checkpoint(
  folder: epath.Path,
  source: str,
  config: EncoderConfig,
  hf_config: dict[str, Any],
  stack: contextlib.ExitStack,
) -> Checkpoint:
  """Opens the safetensors files of a model, which ``stack`` closes. Messages call it ``source``."""
  head = 'ForSequenceClassification'
  head = head if head in str(hf_config.get('architectures')) else ''
  stored: list[Stored] = []
  for file in _weight_files(folder, source, f'AutoModel{head}'):
    stored += stored_in(open_file(file, stack))
  before = names.wrapper(config, (place.name for place in stored), f'{folder}: the weights')
  tensors: dict[str, list[Stored]] = {}
  for place in stored:
    name = config.family.canonical(place.name.removeprefix(before))
    tensors.setdefault(name, []).append(place)
  # A guard, since config.json decides how many names are listed.
  if config.num_layers > len(tensors):
    raise InputError(
      f'{folder}/config.json: num_hidden_layers is {config.num_layers}, but there are only '
      f'{len(tensors)} tensors'
    )
  return Checkpoint(folder, config, hf_config, tensors)


def read_encoder(checkpoint: Checkpoint, on_disk: bool) -> tuple[Params, str]:
  """Parameters and SHA-256 of an encoder. Memory holds each tensor once, or one at a time."""
  config, stored = checkpoint.config, checkpoint.tensors
  encoder = {tensor.name: tensor for tensor in config.family.tensors(config)}
  check(
    f'{checkpoint.folder}: the weights do not match a {config.model_type} encoder with '
    f'{config.num_layers} layers',
    encoder.values(),
    stored,
    config.family.extras,
  )
  params: Params = {}

  def placed() -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(encoder):
      array = stored[name][0].read()
      if not on_disk:
        names.place(params, encoder[name], array)
      yield name, array

  digest = sha256(placed())  # this fills params
  if on_disk:
    places: dict[tuple[str, ...], list[Stored | None]] = {}
    for name, tensor in encoder.items():
      for path in tensor.paths:
        of_layers = places.setdefault(path, [None] * (tensor.num_layers or 1))
        of_layers[tensor.layer or 0] = stored[name][0]
    for tensor in encoder.values():
      for number, path in enumerate(tensor.paths):
        if path in places:
          *parents, last = path
          node = params
          for key in parents:
            node = node.setdefault(key, {})
          node[last] = OnDisk.of(places.pop(path), tensor, number)
  return params, digest


def weight_files(folder: epath.Path) -> list[epath.Path]:
  paths = _weight_files(folder, str(folder), 'AutoModel')
  return paths if paths == [folder / WEIGHTS] else [folder / _INDEX, *paths]


def _weight_files(folder: epath.Path, name: str, class_name: str) -> list[epath.Path]:
  if (folder / WEIGHTS).exists():
    return [folder / WEIGHTS]
  if (folder / _INDEX).exists():
    index = read_json_object(folder / _INDEX, 'index of weights')
    shards = convert(
      index.get('weight_map'), f'{folder / _INDEX}: weight_map', dict[str, _FileName]
    )
    files = [folder / name for name in sorted(set(shards.values()))]
    if missing := [file.name for file in files if not file.exists()]:
      raise InputError(
        f'{folder}: weights named in {_INDEX} are missing: {listed(missing)}; fetch them again'
      )
    return files
  pickles = [name for name in _PICKLES if (folder / name).exists()]
  raise InputError(
    f'{folder}: no {WEIGHTS} to load{", only " + ", ".join(pickles) if pickles else ""}; pickled '
    'weights can run code and are never loaded. '
    f'Where PyTorch is installed, convert them: python -c "from transformers import {class_name}, '
    'AutoTokenizer; '
    f"[c.from_pretrained('{name}').save_pretrained('{name}') for c in ({class_name}, "
    'AutoTokenizer)]"'
  )


def open_file(file: epath.Path, stack: contextlib.ExitStack) -> Any:
  """Opens a safetensors file. Raises InputError for a damaged one.

  It closes when nothing refers to it; ``stack`` removes a local copy, which stays mapped.
  """
  try:
    return safetensors.safe_open(_local(file, stack), framework='np')
  except (safetensors.SafetensorError, OSError) as error:
    raise InputError(
      f'{file}: cut off, damaged or not a safetensors file ({error}); fetch it again'
    ) from error


def stored_in(handle: Any) -> list[Stored]:
  return [Stored(handle, name) for name in handle.keys()]  # noqa: SIM118 (cannot be iterated)


def find_problems(tensors: Iterable[names.Tensor], stored: Mapping[str, list[Stored]]) -> list[str]:
  problems = []
  for tensor in tensors:
    for number, place in enumerate(stored.get(tensor.name, ())):
      if number:
        problems.append(f'{tensor.name} is stored twice')
      if place.shape != tensor.shape:
        problems.append(
          f'{tensor.name} has shape {list(place.shape)}; config.json implies {list(tensor.shape)}'
        )
      if place.dtype not in names.DTYPES.values():
        problems.append(
          f'{tensor.name} is of type {place.dtype}, not one of {", ".join(names.DTYPES.values())}'
        )
  return problems


def check(
  where: str,
  tensors: Collection[names.Tensor],
  stored: Mapping[str, list[Stored]],
  extras: re.Pattern[str] = re.compile('(?!)'),
) -> None:
  """Raises InputError, which begins with ``where``, unless exactly these tensors are stored.

  Names matched by ``extras`` are ignored.
  """
  problems = find_problems(tensors, stored)
  expected = {tensor.name for tensor in tensors}
  others = [name for name in stored if name not in expected and not extras.match(name)]
  for word, wrong in (
    ('missing', [tensor.name for tensor in tensors if tensor.name not in stored]),
    ('unknown', [place.name for name in others for place in stored[name]]),
  ):
    if wrong:
      problems.append(f'{word} {listed(wrong)}')
  if problems:
    raise InputError(f'{where}: {listed(problems, "; ")}')


def read_file(
  file: epath.Path, where: str, tensors: Collection[names.Tensor], stack: contextlib.ExitStack
) -> Params:
  stored = {one.name: [one] for one in stored_in(open_file(file, stack))}
  check(f'{file}: {where}', tensors, stored)
  params: Params = {}
  for tensor in tensors:
    names.place(params, tensor, stored[tensor.name][0].read())
  return params


def _local(file: epath.Path, stack: contextlib.ExitStack) -> str:
  """A local path of the file, since safetensors maps files into memory."""
  if '://' not in str(file):
    return os.fspath(file)
  copy = epath.Path(stack.enter_context(tempfile.TemporaryDirectory())) / file.name
  file.copy(copy)
  return os.fspath(copy)


def sha256(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
  """The digest of name, type, shape and bytes of each tensor. Tensors must be sorted by name."""
  digest = hashlib.sha256()
  for name, array in tensors:
    digest.update(json.dumps([name, names.DTYPES[array.dtype.name], list(array.shape)]).encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()


def listed(names: Sequence[str], separator: str = ', ') -> str:
  """The first eight names, and the number of the others."""
  shown = separator.join(names[:8])
  return f'{shown}{separator}and {len(names) - 8} more' if len(names) > 8 else shown
