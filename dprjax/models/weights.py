"""A model's safetensors files: which there are, whether they hold what config.json promises, and
their SHA-256.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import safetensors
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import read_json
from dprjax.models import checkpoint_names as names
from dprjax.models.encoder import EncoderConfig

Params = dict[str, Any]

WEIGHTS, CONDENSER = 'model.safetensors', 'condenser.safetensors'
_INDEX = 'model.safetensors.index.json'
_PICKLES = (
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
  'model.ckpt.index',
  'tf_model.h5',
  'flax_model.msgpack',
)


def open_weights(
  folder: epath.Path, source: str, hf_config: dict[str, Any], stack: contextlib.ExitStack
) -> list[Any]:
  """The open safetensors files of a model's folder, which the user called ``source``; ``stack``
  closes them.

  Raises:
    InputError: there are none, pickled ones alone, or one is missing or damaged.
  """
  classes = hf_config.get('architectures') or ()
  head = (
    'ForSequenceClassification'
    if any(str(name).endswith('ForSequenceClassification') for name in classes)
    else ''
  )
  return [_open(file, stack) for file in _weight_files(folder, source, f'AutoModel{head}')]


def read_model(
  config: EncoderConfig, folder: epath.Path, handles: list[Any], heads: bool
) -> tuple[Params, str, Params | None]:
  """An encoder's parameters and SHA-256, and the masked-LM head if there is one; one tensor at a
  time, so that memory holds them once.

  Args:
    config: the encoder's shape, by config.json.
    folder: where the weights are, for messages.
    handles: as ``open_weights`` gives them.
    heads: look for a masked-LM head at all; what is wrong with one that nobody needs is no error.

  Raises:
    InputError: see ``hub.load_backbone``.
  """
  encoder = {tensor.name: tensor for tensor in names.encoder_tensors(config)}
  head = {tensor.name: tensor for tensor in names.mlm_tensors(config)} if heads else {}
  copies = names.decoder_tensors(config) if heads else {}
  shapes = {name: tensor.shape for name, tensor in (encoder | head).items()}
  shapes |= {copy: shapes[original] for copy, original in copies.items()}
  stored: dict[str, tuple[Any, str]] = {}
  unknown: list[str] = []
  problems: list[str] = []
  head_problems: list[str] = []
  for handle in handles:
    for raw in handle.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
      name = names.canonical(config, raw)
      found = problems if name in encoder else head_problems
      if name in stored:
        found.append(f'{name} is there twice')
      elif name in shapes:
        stored[name] = handle, raw
        found += _wrong(handle, raw, name, shapes[name])
      elif not names.EXTRAS.match(name):
        unknown.append(raw)
  if missing := [name for name in encoder if name not in stored]:
    problems.append(f'missing {_listed(missing)}')
  if unknown:
    problems.append(f'unknown {_listed(unknown)}')
  if problems:
    raise InputError(
      f'{folder}: the weights are not those of a {config.model_type} encoder with '
      f'{config.num_layers} layers: {_listed(problems, "; ")}'
    )

  there = [name for name in (*head, *copies) if name in stored]
  for copy, original in copies.items():
    if copy in stored:
      stored.setdefault(original, stored[copy])  # some files have the bias as decoder.bias alone
  if missing := [name for name in head if there and name not in stored]:
    head_problems.append(
      f'{_listed(there)} {"is" if len(there) == 1 else "are"} there, but missing {_listed(missing)}'
    )
  for copy, original in copies.items() if not head_problems else ():
    if copy in stored and not np.array_equal(_get(stored[copy]), _get(stored[original])):
      head_problems.append(
        f'{copy} differs from {original}; a decoder of its own, untied, is not supported'
      )
  if head_problems:
    raise InputError(
      f'{folder}: the masked-LM head does not fit the encoder: {_listed(head_problems, "; ")}; to '
      'start with a fresh one, save the encoder '
      'alone, as transformers.AutoModel does'
    )

  params: Params = {}

  def placed() -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(encoder):
      array = _get(stored[name])
      names.place(params, encoder[name], array)
      yield name, array

  digest = sha256(placed())
  mlm: Params = {}
  for name, tensor in head.items() if there else ():
    names.place(mlm, tensor, _get(stored[name]))
  return params, digest, mlm or None


def read_classifier(
  config: EncoderConfig, folder: epath.Path, handles: list[Any], hf_config: dict[str, Any]
) -> Params | None:
  """The sequence-classification head, in the layout of ``classifier.init_classifier``.

  Where there is but BERT's pooler, ``dense`` alone; None where there is neither.

  Args:
    config: the encoder's shape, by config.json.
    folder: where the weights are, for messages.
    handles: as ``open_weights`` gives them.
    hf_config: config.json, which may say how many labels there are.

  Raises:
    InputError: the head is there in part, of other shapes than config.json has, or of a number of
      labels other than 1 or 2.
  """
  raw = {
    names.canonical(config, name): (handle, name)
    for handle in handles
    for name in handle.keys()  # noqa: SIM118 (a handle is no dict)
  }
  tensors = {tensor.path: tensor for tensor in names.classifier_tensors(config, 1)}
  output = tensors['output', 'kernel'].name
  there = [tensor.name for tensor in tensors.values() if tensor.name in raw]
  if output in raw:
    handle, name = raw[output]
    shape = handle.get_slice(name).get_shape()
    labels = shape[0] if shape else 0
    if labels not in (1, 2):
      raise InputError(
        f'{folder}: {output} has {labels} labels; a cross-encoder has 1 (relevance) or 2 '
        '(irrelevant, relevant)'
      )
    said = hf_config.get('id2label')
    if isinstance(said, dict) and len(said) != labels:
      raise InputError(
        f'{folder}: {output} has {labels} label{"s" if labels > 1 else ""}, but the id2label of '
        f'config.json has {len(said)}'
      )
    tensors = {tensor.path: tensor for tensor in names.classifier_tensors(config, labels)}
  elif not any(name.startswith('classifier.') for name in there):
    # A model without such a head; the pooler, where BERT has one, is half of it.
    tensors = {path: tensor for path, tensor in tensors.items() if there and path[0] == 'dense'}
  if not tensors:
    return None
  problems = [
    problem
    for tensor in tensors.values()
    if tensor.name in raw
    for problem in _wrong(*raw[tensor.name], tensor.name, tensor.shape)
  ]
  if missing := [tensor.name for tensor in tensors.values() if tensor.name not in raw]:
    problems.append(
      f'{_listed(there)} {"is" if len(there) == 1 else "are"} there, but missing {_listed(missing)}'
    )
  if problems:
    raise InputError(
      f'{folder}: the sequence-classification head does not fit the encoder: '
      f'{_listed(problems, "; ")}; to start with a fresh one, '
      'save the encoder alone, as transformers.AutoModel does'
    )
  params: Params = {}
  for tensor in tensors.values():
    names.place(params, tensor, _get(raw[tensor.name]))
  return params


def read_condenser(
  config: EncoderConfig, file: epath.Path, stack: contextlib.ExitStack
) -> tuple[Params | None, int | None]:
  """The layers of Condenser's head and the split of the encoder that they were trained on; None
  where there is no such file.

  Raises:
    InputError: it is cut off, or not of this encoder's shape.
  """
  if not file.exists():
    return None, None
  handle = _open(file, stack)
  metadata = handle.metadata() or {}
  layers, split = (
    int(value) if (value := metadata.get(key, '')).isdecimal() else 0
    for key in ('num_layers', 'split')
  )
  if layers < 1 or not 0 < split < config.num_layers:
    raise InputError(
      f'{file}: its metadata says num_layers {metadata.get("num_layers")!r} and split '
      f'{metadata.get("split")!r}; expected 1 layer or more, '
      f"and a split of the encoder's {config.num_layers} layers"
    )
  expected = {tensor.name: tensor for tensor in names.layer_tensors(config, layers)}
  stored = set(handle.keys())
  problems = [
    problem
    for name, tensor in expected.items()
    if name in stored
    for problem in _wrong(handle, name, name, tensor.shape)
  ]
  for word, wrong in (
    ('missing', [name for name in expected if name not in stored]),
    ('unknown', sorted(stored - set(expected))),
  ):
    if wrong:
      problems.append(f'{word} {_listed(wrong)}')
  if problems:
    raise InputError(
      f'{file}: not a Condenser head of {layers} layers for this encoder: {_listed(problems, "; ")}'
    )
  params: Params = {}
  for name, tensor in expected.items():
    names.place(params, tensor, handle.get_tensor(name))
  return params, split


def _weight_files(folder: epath.Path, name: str, class_name: str) -> list[epath.Path]:
  """The files of weights in a model's folder, which the user called ``name``, and which that class
  of transformers converts whole.
  """
  if (folder / WEIGHTS).exists():
    return [folder / WEIGHTS]
  if (folder / _INDEX).exists():
    index = read_json(folder / _INDEX, 'index of weights')
    shards = index.get('weight_map') if isinstance(index, dict) else None
    if (
      not isinstance(shards, dict)
      or not shards
      or not all(isinstance(name, str) for name in shards.values())
    ):
      raise InputError(f'{folder / _INDEX}: expected a weight_map of tensor names to file names')
    files = [folder / name for name in sorted(set(shards.values()))]
    if missing := [file.name for file in files if not file.exists()]:
      raise InputError(
        f'{folder}: weights named in {_INDEX} are missing: {_listed(missing)}; fetch them again'
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


def _open(file: epath.Path, stack: contextlib.ExitStack) -> Any:
  try:
    return stack.enter_context(safetensors.safe_open(_local(file, stack), framework='np'))
  except (safetensors.SafetensorError, OSError) as error:
    raise InputError(
      f'{file}: cut off, damaged or not a safetensors file ({error}); fetch it again'
    ) from error


def _get(stored: tuple[Any, str]) -> np.ndarray:
  handle, name = stored
  return handle.get_tensor(name)


def _wrong(handle: Any, raw: str, name: str, shape: tuple[int, ...]) -> list[str]:
  """What is wrong with a stored tensor's shape and type."""
  found, dtype = handle.get_slice(raw).get_shape(), handle.get_slice(raw).get_dtype()
  problems = []
  if tuple(found) != shape:
    problems.append(f'{name} has shape {list(found)}, by config.json it is {list(shape)}')
  if dtype not in names.DTYPES.values():
    problems.append(f'{name} is of type {dtype}, not one of {", ".join(names.DTYPES.values())}')
  return problems


def _local(file: epath.Path, stack: contextlib.ExitStack) -> str:
  """The file's path, if need be of a copy: safetensors maps files into memory."""
  if '://' not in str(file):
    return os.fspath(file)
  copy = epath.Path(stack.enter_context(tempfile.TemporaryDirectory())) / file.name
  file.copy(copy)
  return os.fspath(copy)


def sha256(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
  """Of each tensor's name, type, shape and bytes, in the order given (sorted by name)."""
  digest = hashlib.sha256()
  for name, array in tensors:
    digest.update(json.dumps([name, names.DTYPES[array.dtype.name], list(array.shape)]).encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()


def _listed(names: list[str], separator: str = ', ') -> str:
  shown = separator.join(names[:8])
  return f'{shown}{separator}and {len(names) - 8} more' if len(names) > 8 else shown
