"""Reads Hugging Face directories without PyTorch; ``model_folders`` writes them.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import read_json_object
from dprjax.models import family as families
from dprjax.models import pooling, sentence, weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.vector_spec import VectorSpec

if TYPE_CHECKING:
  from dprjax.models.head_specs import Head, HeadSpec

Params = dict[str, Any]

PROMPT = 'prompt.npz'  # the name of a prompt in a folder


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
      projection = weights.sha256(pooling.dense_tensors(shapes, params['projection']))
      sha256 = hashlib.sha256(f'{sha256}{projection}'.encode()).hexdigest()
    by_name = {name: head_kind(name).read(checkpoint, stack) for name in heads}
  return Backbone(
    checkpoint.config,
    params,
    sha256,
    os.fspath(checkpoint.folder),
    sentence.read_folder(root, checkpoint.config),
    checkpoint.hf_config,
    {name: head for name, head in by_name.items() if head is not None},
  )


def head_kind(name: str) -> HeadSpec:
  from dprjax.models import head_specs  # not for an encoder alone

  return head_specs.HEADS[name]


def load_head(path_or_hub_id: PathLike, name: str) -> Head | None:
  with _open(path_or_hub_id) as (_, checkpoint, stack):
    return head_kind(name).read(checkpoint, stack)


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
    auto_map = hf_config.get('auto_map')
    name = str(auto_map.get('AutoModel', '')) if isinstance(auto_map, dict) else ''
    if name.rpartition('.')[2] not in ('', f'{family.class_name}Model'):
      raise InputError(f'auto_map: the code of {name!r:.80} in the folder is never run')
    families.only(hf_config, quantization_config={})
    config = family.read_config(hf_config)
  except InputError as error:
    raise InputError(f'{path}: {error}') from error
  dense = sentence.read_projection(root)
  return dataclasses.replace(config, projection=dense) if dense else config
