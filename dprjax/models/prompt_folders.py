"""Prompts as folders of PEFT, read and written, and of sentence-transformers, without PyTorch.

    adapter_config.json         the method, and the shape of the backbone
    adapter_model.safetensors   the tensors, for instance prompt_embeddings [P, L * 2 * H]

Each kind of adapter defines its PEFT format (`models.adapter.Peft`). Separate adapters for queries
and passages are in the folders ``query`` and ``passage``.

    modules.json                names PromptedTransformer as the transformer
    dprjax_prompt.py            that class, in PyTorch
    prompt.npz                  the prompt
    config.json and so on       files of the backbone

Loading such a folder runs its code: ``SentenceTransformer(DIR, trust_remote_code=True)``.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
from etils import epath

from dprjax.base import files, version
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, write_json
from dprjax.base.reading import parse_object, read, read_json_object
from dprjax.models import adapter as adapters
from dprjax.models import artifact, hub, sentence, weights
from dprjax.models.adapter import Kind
from dprjax.models.family import Config
from dprjax.models.hub import Backbone
from dprjax.text.vector_spec import SIDES, of_meta

CONFIG = 'adapter_config.json'
WEIGHTS = 'adapter_model.safetensors'
CODE = 'dprjax_prompt.py'
_META = 'dprjax'  # key of the prompt meta in the metadata of the weights


def write_adapters(
  folder: epath.Path, prompt: artifact.Prompt, model: Config, base_model: str | None
) -> None:
  """Writes the adapters of a prompt into an existing folder.

  Args:
    base_model: the backbone on the hub, for AutoPeftModel; None: unknown.
  """
  form = prompt.kind.peft
  if form is None:
    raise artifact.unsupported(prompt, 'PEFT')
  for side in ('',) if prompt.tied else SIDES:
    if not (arrays := prompt.of_side(side)):
      continue
    config, tensors = form.write(prompt.path, model, prompt.meta, arrays)
    place = folder / side
    place.mkdir(parents=True, exist_ok=True)
    config |= {
      'base_model_name_or_path': base_model,
      'inference_mode': True,
      'peft_type': form.type,
      'task_type': 'FEATURE_EXTRACTION',
    }
    write_json(place / CONFIG, dict(sorted(config.items())))
    # Only one key: safetensors writes several in arbitrary order.
    metadata = {_META: json.dumps(prompt.meta, ensure_ascii=False)}
    (place / WEIGHTS).write_bytes(safetensors.numpy.save(tensors, metadata))


class _Named(msgspec.Struct):
  base_model_name_or_path: str | None = None


def is_adapter(folder: PathLike) -> bool:
  """Whether a folder has an adapter, or one for queries or passages."""
  return bool(_sides(epath.Path(folder)))


def _sides(root: epath.Path) -> list[str]:
  return [side for side in ('', *SIDES) if (root / side / CONFIG).exists()]


def base_model(folder: PathLike) -> str | None:
  root = epath.Path(folder)
  path = files.regular_file(root / _sides(root)[0] / CONFIG, 'adapter')
  return read(path, 'adapter', _Named).base_model_name_or_path or None


def read_prompt(
  folder: PathLike, backbone: Backbone, tokenizer_sha256: str, name: str, settings: dict[str, Any]
) -> artifact.Prompt:
  """Reads an adapter, or one for queries and one for passages.

  Args:
    settings: keys of the prompt meta that replace those in the file. None keeps those of the file;
      an adapter from another tool gets those of the backbone.
  """
  root = epath.Path(folder)
  sides = _sides(root)
  found = {side: _read(root / side, backbone) for side in (sides[:1] if '' in sides else sides)}
  first = next(iter(found.values()))
  if any((one.kind, one.stored) != (first.kind, first.stored) for one in found.values()):
    raise InputError(f'{root}: the adapters of query and passage belong to different prompts')
  own = first.stored or {
    **backbone.spec.to_meta(),
    'temperature': 1.0,  # unknown; only training reads it
    'dprjax_version': version.__version__,
  }
  given = {key: value for key, value in settings.items() if value is not None}
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'backbone': name,
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizer_sha256,
    **own,
    **given,
    'kind': first.kind.name,
    **first.meta,
    **({'sides': 'query'} if [*found] == ['query'] else {}),
  }
  arrays = {
    f'{side}/{key}' if side else key: array
    for side, one in found.items()
    for key, array in one.arrays.items()
  }
  prompt = artifact.Prompt(meta, arrays, str(root))
  shift = max(
    int(adapter.shift_positions())
    for side in SIDES
    for adapter in prompt.adapters(side)
    if adapter is not None
  )
  room, window = backbone.config.max_tokens - shift, backbone.config.window
  if window is not None and shift:  # PEFT hides the prompt outside the window
    room = min(room, window - shift)
  artifact.check_content(prompt)
  artifact.check_prompt(prompt, backbone.config, backbone.sha256, tokenizer_sha256)
  for key in ('query_max_length', 'passage_max_length'):
    if room < 1 or (key in given and meta[key] > room):
      raise InputError(
        f'--{key}={meta[key]}: {root} has room for {room} tokens beside {shift} virtual ones'
      )
    meta[key] = min(meta[key], room)
  return prompt


class _Found(NamedTuple):
  kind: Kind
  arrays: dict[str, np.ndarray]
  meta: dict[str, Any]  # of the kind
  stored: dict[str, Any]  # the whole meta; empty if dprjax did not write the adapter


def _read(folder: epath.Path, backbone: Backbone) -> _Found:
  files.refuse_special(folder)
  path = folder / CONFIG
  config = read_json_object(path, 'adapter')
  kinds = {kind.peft.type: kind for kind in adapters.every().values() if kind.peft is not None}
  named = config.get('peft_type')
  if not isinstance(named, str) or named not in kinds:
    raise InputError(f'{path}: peft_type is {named!r:.40}, expected {" or ".join(kinds)}')
  # A pickle, adapter_model.bin, is never loaded.
  file = files.regular_file(folder / WEIGHTS, 'weights of the adapter')
  with contextlib.ExitStack() as stack:
    handle = weights.open_file(file, stack)
    stored = {name: weights.Stored(handle, name) for name in sorted(handle.keys())}
    metadata: Mapping[str, str] = handle.metadata() or {}
    form = kinds[named].peft
    assert form is not None
    arrays, meta = form.read(folder, backbone.config, config, stored)
  text = metadata.get(_META)
  whole = {} if text is None else parse_object(text, f'{os.fspath(file)}, metadata {_META!r}')
  return _Found(kinds[named], arrays, meta, whole)


def write_prompted(folder: epath.Path, prompt: artifact.Prompt, backbone: hub.Backbone) -> None:
  """Fills a folder for sentence-transformers with a prompt and its frozen backbone."""
  _code(prompt)
  hub.copy_files(backbone, folder)
  kept = sentence.tokenizer_keys(epath.Path(backbone.path))
  sentence.write_folder(folder, backbone.config, backbone.params, of_meta(prompt.meta), kept)
  add_prompt(folder, prompt)


def add_prompt(folder: epath.Path, prompt: artifact.Prompt) -> None:
  code = _code(prompt)
  modules = read(folder / 'modules.json', 'modules.json', list[dict[str, Any]])
  modules[0]['type'] = sentence.PROMPTED_TYPE
  write_json(folder / 'modules.json', modules)
  (folder / CODE).write_text(code)
  artifact.save_prompt(folder / artifact.FILE, prompt)


def _code(prompt: artifact.Prompt) -> str:
  if prompt.kind.code is None:
    raise artifact.unsupported(prompt, 'sentence-transformers')
  return prompt.kind.code.read_text(encoding='utf-8')
