"""Reads and writes Hugging Face directories without PyTorch.

``backbone_sha256`` covers the encoder tensors as stored, under the names of the family. Our own
layout and heads do not change it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import safetensors.numpy
from etils import epath
from jaxtyping import Array

from dprjax.base import files, outputs, provenance
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_path, write_json
from dprjax.base.reading import read_json_object
from dprjax.models import checkpoint_names as names
from dprjax.models import family as families
from dprjax.models import pooling, sentence, weights
from dprjax.models.encoder import init_encoder
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.sentence_files import TOKENIZER_FILES
from dprjax.text.vector_spec import VectorSpec

if TYPE_CHECKING:
  from dprjax.models.head_specs import Head, HeadSpec

Params = dict[str, Any]

FORMAT = 'dprjax.model'  # mark of folders written here
PROMPT = 'prompt.npz'  # the name of a prompt in a folder
OURS = 'an unchanged model exported by dprjax'

_LICENCES = ('LICENSE', 'LICENSE.txt', 'LICENSE.md', 'NOTICE')

# Layers and hidden size (Turc et al., 2019). The head size is 64, the MLP width 4 H.
SIZES = {'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'base': (12, 768)}


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
  """A loaded encoder.

  Attributes:
    params: numpy float32, for ``encoder.encode``.
    path: the folder of config.json and the tokenizer.
    spec: how it embeds texts, from its sentence-transformers files or the defaults.
    heads: the requested heads found in the checkpoint, by names of ``head_specs.HEADS``.
  """

  config: EncoderConfig
  params: Params
  sha256: str
  path: str
  spec: VectorSpec
  hf_config: dict[str, Any]
  heads: Mapping[str, Head] = dataclasses.field(default_factory=dict)


def load_backbone(
  path_or_hub_id: PathLike, heads: Collection[str] = (), on_disk: bool = False
) -> Backbone:
  """Loads an encoder from a Hugging Face directory, a package (``package:NAME``) or the hub.

  The directory has config.json and model.safetensors, or model.safetensors.index.json and its
  shards, from any class of a family (docs/backbones.md).

  Args:
    heads: names of ``head_specs.HEADS`` to read as well.
    on_disk: read parameters as `weights.OnDisk`, for models larger than memory.
  """
  with _open(path_or_hub_id) as (root, checkpoint, stack):
    params, sha256 = weights.read_encoder(checkpoint, on_disk)
    if shapes := checkpoint.config.projection:
      params['projection'] = sentence.read_projection_weights(root, shapes)
      sha256 = _with_projection(sha256, shapes, params)
    found = {name: _kind(name).read(checkpoint, stack) for name in heads}
  return Backbone(
    checkpoint.config,
    params,
    sha256,
    os.fspath(checkpoint.folder),
    sentence.read_folder(root, checkpoint.config),
    checkpoint.hf_config,
    {name: head for name, head in found.items() if head is not None},
  )


def _kind(name: str) -> HeadSpec:
  from dprjax.models import head_specs  # not for an encoder alone

  return head_specs.HEADS[name]


def load_head(path_or_hub_id: PathLike, name: str) -> Head | None:
  with _open(path_or_hub_id) as (_, checkpoint, stack):
    return _kind(name).read(checkpoint, stack)


def check_readable(path_or_hub_id: PathLike) -> None:
  """Raises InputError as ``load_backbone`` does, without reading tensors."""
  with _open(path_or_hub_id):
    pass


def load_spec(path_or_hub_id: PathLike, reserved: int = 0) -> VectorSpec:
  """``Backbone.spec``, without reading tensors; texts leave ``reserved`` positions free."""
  with _open(path_or_hub_id) as (root, checkpoint, _):
    spec = sentence.read_folder(root, checkpoint.config)
    return spec.at_most(checkpoint.config.max_tokens - reserved)


def read_shape(folder: PathLike) -> EncoderConfig:
  root = epath.Path(folder)
  files.refuse_special(root)
  path = sentence.transformer_folder(root) / 'config.json'
  return _encoder_config(root, read_json_object(path, 'config.json'), path)


def check_vocabulary(backbone: Backbone, vocab_size: int, path: PathLike) -> None:
  """Raises InputError if the tokenizer at ``path`` has more tokens than the backbone."""
  rows = backbone.config.vocab_size
  if vocab_size > rows:
    raise InputError(
      f'{path}: the tokenizer has {vocab_size} tokens, but the backbone {backbone.path} has only '
      f'{rows}; use the tokenizer of the backbone'
    )


def backbone_sha256(config: EncoderConfig, params: Mapping[str, Any]) -> str:
  """The SHA-256 of these parameters as a float32 checkpoint."""
  encoder = names.export(config.family.tensors(config), params)
  return _with_projection(weights.sha256(sorted(encoder.items())), config.projection, params)


def _with_projection(
  sha256: str, shapes: Sequence[pooling.Dense], params: Mapping[str, Any]
) -> str:
  if not shapes:
    return sha256
  projection_sha256 = weights.sha256(pooling.dense_tensors(shapes, params['projection']))
  return hashlib.sha256(f'{sha256}{projection_sha256}'.encode()).hexdigest()


def save_backbone(
  directory: PathLike,
  config: EncoderConfig,
  params: Mapping[str, Any],
  *,
  source: PathLike | None = None,
  spec: VectorSpec | None = None,
  hf_config: Mapping[str, Any] | None = None,
  heads: Mapping[str, Head] = types.MappingProxyType({}),
  max_length: int | None = None,
) -> None:
  """Writes a Hugging Face directory for ``transformers`` and ``sentence-transformers``, atomically.

  It replaces only an unchanged model written by dprjax (`is_ours`). Tensors have the names in the
  class of transformers for the head, if there is one; AutoModel also reads them. Only a classifier
  has the pooler. The Condenser head has its own file.

  Args:
    spec: how texts become vectors, for sentence-transformers files; None writes none.
    heads: by names of ``head_specs.HEADS``; at most one with a class of ``transformers``.
    max_length: tokens of an input, for the tokenizer ``model_max_length``.
  """
  tensors = {name: list(_kind(name).tensors(config, head)) for name, head in heads.items()}
  with (
    claim_model(directory, {'source': _tokenizer_files(source)}, 'directory') as final,
    atomic_path(final) as aside,
  ):
    aside.mkdir(parents=True)
    write_json(aside / 'config.json', _hf_config(config, hf_config or {}, heads))
    kept = sentence.tokenizer_keys(epath.Path(source)) if source is not None else {}
    if spec is not None:
      sentence.write_folder(aside, config, params, spec, kept)
    elif kept:
      write_json(aside / 'sentence_bert_config.json', kept)
    copy_tokenizer(
      source, aside, **({} if max_length is None else {'model_max_length': max_length})
    )
    arrays = names.export(config.family.tensors(config), params)
    for name, head in heads.items():
      kind, stored = _kind(name), names.export(tensors[name], head.params)
      if kind.model_class:
        # The pooler is part of the encoder model.
        pooler = {key for key in stored if key.startswith('pooler.')}
        arrays = {
          (config.family.prefix if key in pooler or key not in stored else '') + key: array
          for key, array in (arrays | stored).items()
        }
      else:
        metadata = {key: str(value) for key, value in kind.metadata(head).items()}
        (aside / kind.file).write_bytes(safetensors.numpy.save(stored, {'format': 'pt'} | metadata))
    # transformers refuses files without the name of the format.
    (aside / weights.WEIGHTS).write_bytes(safetensors.numpy.save(arrays, {'format': 'pt'}))
    mark(aside)


def copy_files(backbone: Backbone, folder: epath.Path) -> None:
  source = epath.Path(backbone.path)
  for file in (
    source / 'config.json',
    *weights.weight_files(source),
    *_tokenizer_files(source),
    *(source / name for name in _LICENCES if (source / name).exists()),
  ):
    file.copy(folder / file.name)


def copy_tokenizer(source: PathLike | None, folder: epath.Path, **settings: Any) -> None:
  """Copies a tokenizer; ``settings`` replace those of its tokenizer_config.json."""
  for file in _tokenizer_files(source):
    file.copy(folder / file.name)
  if settings:
    path = folder / 'tokenizer_config.json'
    stored = read_json_object(path, 'tokenizer_config.json') if path.exists() else {}
    write_json(path, stored | settings)


def _tokenizer_files(source: PathLike | None) -> list[epath.Path]:
  if source is None:
    return []
  paths = (epath.Path(source) / name for name in TOKENIZER_FILES)
  return [file for file in paths if file.exists()]


def claim_model(
  folder: PathLike, inputs: outputs.Inputs, flag: str = '--out'
) -> contextlib.AbstractContextManager[epath.Path]:
  return outputs.claim_folder(folder, inputs, what=OURS, ours=is_ours, flag=flag)


def mark(folder: epath.Path) -> None:
  """Marks a folder as a model written by dprjax, with the SHA-256 of its files."""
  (folder / provenance.MARK).unlink(missing_ok=True)
  provenance.write_mark(folder, FORMAT, files=provenance.sums(folder))


def is_ours(folder: epath.Path) -> bool:
  """Whether a folder has only an unchanged model written by dprjax."""
  marked = provenance.read_mark(folder)
  digests = marked.get('files')
  if marked.get('format') != FORMAT or not isinstance(digests, dict):
    return False
  found = 0
  for file in files.below(folder):
    name = str(file.relative_to(folder))
    if name == provenance.MARK:
      continue
    found += 1
    if name not in digests or files.is_special(file) or files.sha256_file(file) != digests[name]:
      return False
  return found == len(digests)


def init_params(config: EncoderConfig, key: Array) -> Params:
  return jax.device_get(init_encoder(config, key))


def scratch_config(
  size: str,
  vocab_size: int,
  *,
  model_type: str = 'bert',
  pad_token_id: int | None = None,
) -> EncoderConfig:
  """The shape of an encoder to train from scratch."""
  if size not in SIZES:
    raise InputError(f'size {size!r} is unknown; use one of: {", ".join(SIZES)}')
  layers, width = SIZES[size]
  if pad_token_id is None:
    pad_token_id = families.find(model_type).pad_token_id
  # The 0.02 of BERT suits a width of 768. Layers of narrower models would add almost nothing.
  config = EncoderConfig(
    model_type,
    vocab_size,
    width,
    layers,
    width // 64,
    4 * width,
    pad_token_id=pad_token_id,
    initializer_range=0.02 * (768 / width) ** 0.5,
  )
  return dataclasses.replace(config, max_positions=512 + config.first_position)


def package_path(path: str) -> str:
  """The folder ``model`` of the package in ``package:NAME``; any other path unchanged."""
  if not path.startswith('package:'):
    return path
  name = path.removeprefix('package:').replace('-', '_')  # pip's name has hyphens
  named = all(part.isidentifier() for part in name.split('.'))
  origin = _locate_package(name) if named else None
  folder = epath.Path(origin or '').parent / 'model'
  if origin is None or not folder.is_dir():
    raise InputError(
      f'{path[:200]}: expected package:NAME of an installed package with a folder model; run: pip '
      'install --no-deps NAME'
    )
  return os.fspath(folder)


def _locate_package(name: str) -> str | None:
  """The file of an installed package, without importing it or looking in the current folder."""
  here = os.path.realpath(os.curdir)
  where: Sequence[str] = [path for path in sys.path if path and os.path.realpath(path) != here]
  spec = None
  for part in name.split('.'):
    spec = importlib.machinery.PathFinder.find_spec(part, where)
    where = list(spec.submodule_search_locations or ()) if spec is not None else []
  return None if spec is None else spec.origin


@contextlib.contextmanager
def _open(
  path_or_hub_id: PathLike,
) -> Iterator[tuple[epath.Path, weights.Checkpoint, contextlib.ExitStack]]:
  root = _fetch(path_or_hub_id)
  files.refuse_special(root)
  folder = sentence.transformer_folder(root)
  files.refuse_special(folder)
  path = folder / 'config.json'
  hf_config = read_json_object(path, 'config.json')
  config = _encoder_config(root, hf_config, path)
  with contextlib.ExitStack() as stack:
    name = os.fspath(path_or_hub_id)
    yield root, weights.open_checkpoint(folder, name, config, hf_config, stack), stack


def _fetch(path_or_hub_id: PathLike) -> epath.Path:
  """The folder; an id is downloaded from the hub."""
  folder = epath.Path(package_path(os.fspath(path_or_hub_id)))
  if folder.is_dir():
    return folder
  from dprjax.base import repository  # not for a folder

  name = os.fspath(path_or_hub_id)
  reference = repository.parse(name) or repository.Reference(name)
  # No pickles, no ONNX.
  return repository.fetch(reference, ['*.json', '*.safetensors', '*.txt', '*.model'], 'backbone')


def _encoder_config(root: epath.Path, hf_config: dict[str, Any], path: epath.Path) -> EncoderConfig:
  try:
    family = families.find(hf_config.get('model_type'))
    own = hf_config.get('auto_map')
    name = str(own.get('AutoModel', '')) if isinstance(own, dict) else ''
    if name.rpartition('.')[2] not in ('', f'{family.class_name}Model'):
      raise InputError(f'auto_map: the code of {name!r:.80} in the folder is never run')
    families.only(hf_config, quantization_config={})
    config = family.read_config(hf_config)
  except InputError as error:
    raise InputError(f'{path}: {error}') from error
  dense = sentence.read_projection(root)
  return dataclasses.replace(config, projection=dense) if dense else config


def _hf_config(
  config: EncoderConfig, base: Mapping[str, Any], heads: Mapping[str, Head]
) -> dict[str, Any]:
  """``base`` with the shape of this encoder and the class of its head."""
  family = config.family
  classes = [_kind(name).model_class for name in heads if _kind(name).model_class] or ['Model']
  if len(classes) > 1:
    raise ValueError(f'one checkpoint cannot be {" and ".join(classes)}')
  # These keys describe the earlier checkpoint.
  stored = {
    key: value
    for key, value in base.items()
    if key not in ('_name_or_path', 'torch_dtype', 'transformers_version')
  }
  for name, head in heads.items():
    stored = _kind(name).hf_config(stored, head)
  return stored | {
    'architectures': [family.class_name + classes[0]],
    'model_type': family.model_type,
    **family.write_config(config),
    'dtype': 'float32',
  }
