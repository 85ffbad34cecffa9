"""Prefix adapters as PEFT has them, in and out, without PyTorch.

    adapter_config.json         the method, and the shape of the backbone
    adapter_model.safetensors   prompt_embeddings [P, L * 2 * H]: of each layer keys, then values

PEFT passes no positions on, so under its adapters a text's tokens count from P
(``shift_positions``). An adapter is for all texts; where queries and passages have a prompt each,
there are two, in the folders ``query`` and ``passage``.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import safetensors.numpy
from etils import epath
from jaxtyping import Float

from dprjax.base import files, version
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, write_json
from dprjax.base.reading import convert, parse_object, read, read_json_object
from dprjax.formats.texts import KINDS
from dprjax.models import artifact, weights
from dprjax.models import checkpoint_names as names
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.hub import Backbone

CONFIG = 'adapter_config.json'
WEIGHTS = 'adapter_model.safetensors'
_PICKLE = 'adapter_model.bin'
_TENSOR = 'prompt_embeddings'
_META = 'dprjax'  # key of the weights' metadata: the prompt's meta, which PEFT has no place for
_LONGEST = 2**20  # vectors of a prompt, characters of its meta


def check(prompt: artifact.Prompt) -> dict[str, Float[np.ndarray, 'L 2 P N D']]:
  """The prefixes of a prompt that PEFT can express, by the names of their arrays.

  Raises:
    InputError: it is not of kind prefix, or was trained without ``shift_positions``.
  """
  prefixes = artifact.check_prefix(prompt, 'PEFT')
  if not prompt.meta['shift_positions']:
    raise InputError(
      f'{prompt.path}: PEFT counts the positions of a text from the length of the prompt, and this '
      'prompt was trained with positions from 0: its vectors would differ there; train with '
      '--config.prompt.shift_positions=True (configs/dptdr.py:beir,peft), or export it with '
      '--format=sentence-transformers'
    )
  return prefixes


def write_adapters(folder: epath.Path, prompt: artifact.Prompt, base_model: str | None) -> None:
  """Writes the adapters of a prompt into a folder of this command's own.

  Args:
    folder: is there.
    prompt: one that `check` takes.
    base_model: the backbone on the hub, which AutoPeftModel fetches; None is not known.

  Raises:
    InputError: as `check`.
  """
  for name, prefix in check(prompt).items():
    kind = name.removesuffix('prefix').rstrip('/')
    place = folder / kind if kind else folder
    place.mkdir(parents=True, exist_ok=True)
    layers, _, length, heads, size = prefix.shape
    write_json(
      place / CONFIG,
      {
        'base_model_name_or_path': base_model,
        'encoder_hidden_size': heads * size,
        'inference_mode': True,
        'num_attention_heads': heads,
        'num_layers': layers,
        'num_transformer_submodules': 1,
        'num_virtual_tokens': length,
        'peft_type': 'PREFIX_TUNING',
        'prefix_projection': False,
        'task_type': 'FEATURE_EXTRACTION',
        'token_dim': heads * size,
      },
    )
    # One key: safetensors writes several in any order.
    metadata = {_META: json.dumps(prompt.meta, ensure_ascii=False)}
    tensors = {_TENSOR: flatten(prefix)}
    (place / WEIGHTS).write_bytes(safetensors.numpy.save(tensors, metadata))


def flatten(prefix: Float[np.ndarray, 'L 2 P N D']) -> Float[np.ndarray, 'P L*2*N*D']:
  """A prefix in PEFT's layout."""
  return np.ascontiguousarray(prefix.transpose(2, 0, 1, 3, 4).reshape(prefix.shape[2], -1))


def unflatten(
  embeddings: Float[np.ndarray, 'P L*2*N*D'], config: EncoderConfig
) -> Float[np.ndarray, 'L 2 P N D']:
  """A prefix from PEFT's layout."""
  shape = len(embeddings), config.num_layers, 2, config.num_kv_heads, config.head_dim
  return np.ascontiguousarray(embeddings.reshape(shape).transpose(1, 2, 0, 3, 4))


class _Named(msgspec.Struct):
  base_model_name_or_path: str | None = None


class _Prefix(msgspec.Struct):
  num_virtual_tokens: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST)]


def is_adapter(folder: PathLike) -> bool:
  """Whether a folder holds an adapter, or one for queries or passages."""
  root = epath.Path(folder)
  return any((root / kind / CONFIG).exists() for kind in ('', *KINDS))


def base_model(folder: PathLike) -> str | None:
  """The backbone that an adapter names.

  Raises:
    InputError: the folder holds no adapter, or its config.json cannot be read.
  """
  root = epath.Path(folder)
  places = [root / kind for kind in ('', *KINDS) if (root / kind / CONFIG).exists()]
  if not places:
    raise InputError(f'{root} holds no {CONFIG}: it is no adapter of PEFT')
  path = files.regular_file(places[0] / CONFIG, 'adapter')
  return read(path, 'adapter', _Named).base_model_name_or_path or None


def read_prompt(
  folder: PathLike, backbone: Backbone, tokenizer_sha256: str, name: str, settings: dict[str, Any]
) -> artifact.Prompt:
  """The prompt of an adapter, or of one for queries and one for passages.

  An adapter that dprjax wrote also says how it was trained; of another one ``settings`` say so.

  Args:
    folder: of the adapter.
    backbone: the encoder that it was trained for.
    tokenizer_sha256: of the backbone's tokenizer.
    name: the backbone's.
    settings: keys of a prompt's meta; None stands for what the adapter or the backbone says.

  Raises:
    InputError: it is no prefix adapter, or not one of this backbone; it is damaged or pickled, or
      holds trained parts that a prompt has no place for.
  """
  root = epath.Path(folder)
  metas: list[dict[str, Any]] = []
  arrays: dict[str, np.ndarray] = {}
  for kind in ('', *KINDS) if not (root / CONFIG).exists() else ('',):
    place = root / kind if kind else root
    if (place / CONFIG).exists():
      prefix, stored = _read(place, backbone.config)
      arrays[f'{kind}/prefix' if kind else 'prefix'] = prefix
      metas.append(stored)
  if not arrays:
    raise InputError(f'{root} holds no {CONFIG}: it is no adapter of PEFT')
  if any(stored != metas[0] for stored in metas):
    raise InputError(f'{root}: the adapters of query and passage are not of one prompt')
  own = metas[0] or {
    **backbone.spec.to_meta(),
    'temperature': 1.0,  # not known; nothing but training reads it
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
    'kind': 'prefix',
    'shift_positions': True,
    **({'sides': 'query'} if set(arrays) == {'query/prefix'} else {}),
  }
  longest = max(prefix.shape[2] for prefix in arrays.values())
  room = backbone.config.max_tokens - longest
  if room < 1:
    raise InputError(
      f'{root}: {longest} virtual tokens leave no positions for a text; the backbone has '
      f'{backbone.config.max_tokens}'
    )
  if not metas[0]:
    for key in ('query_max_length', 'passage_max_length'):
      meta[key] = min(meta[key], room) if key not in given else meta[key]
  prompt = artifact.Prompt(meta, arrays, str(root))
  artifact.check_content(prompt)
  artifact.check_prompt(prompt, backbone.config, backbone.sha256, tokenizer_sha256)
  return prompt


def _read(folder: epath.Path, config: EncoderConfig) -> tuple[np.ndarray, dict[str, Any]]:
  """The prefix of one adapter, and its meta, which is empty where dprjax did not write it."""
  files.refuse_special(folder)
  path = folder / CONFIG
  values = read_json_object(path, 'adapter')
  if values.get('peft_type') != 'PREFIX_TUNING':
    raise InputError(
      f'{path}: peft_type is {values.get("peft_type")!r:.40}; only PREFIX_TUNING gives keys and '
      'values to every layer, as a prompt does'
    )
  length = convert(values, str(path), _Prefix).num_virtual_tokens
  expected = {
    'num_layers': config.num_layers,
    'token_dim': config.num_kv_heads * config.head_dim,
    'num_attention_heads': config.num_kv_heads,
    'num_transformer_submodules': 1,
  }
  for key, value in expected.items():
    if values.get(key) not in (None, value):
      raise InputError(
        f'{path}: {key} is {values[key]!r:.40}, and the backbone has {value}; give the backbone '
        'that it was trained for, --backbone=DIR'
      )
  embeddings, meta = _read_weights(folder)
  shape = [length, config.num_layers * 2 * config.num_kv_heads * config.head_dim]
  if list(embeddings.shape) != shape:
    raise InputError(
      f'{folder / WEIGHTS}: {_TENSOR} has shape {list(embeddings.shape)}, by {CONFIG} and the '
      f'backbone it is {shape}'
    )
  return unflatten(embeddings.astype(np.float32), config), meta


def _read_weights(folder: epath.Path) -> tuple[np.ndarray, dict[str, Any]]:
  file = folder / WEIGHTS
  if not file.exists():
    pickled = f', only {_PICKLE}' if (folder / _PICKLE).exists() else ''
    raise InputError(
      f'{folder}: no {WEIGHTS} to load{pickled}; pickled weights can run code and are never '
      'loaded. Where PyTorch is installed, save the adapter again with a newer PEFT'
    )
  with contextlib.ExitStack() as stack:
    handle = weights.open_file(file, stack)
    found = sorted(handle.keys())
    if found != [_TENSOR]:
      raise InputError(
        f'{file}: holds {weights.listed(found) or "no tensors"}; expected {_TENSOR} alone: a '
        'prompt has no place for other trained parts'
      )
    stored = weights.Stored(handle, _TENSOR)
    if stored.dtype not in names.DTYPES.values():
      raise InputError(
        f'{file}: {_TENSOR} is of type {stored.dtype}, not one of '
        f'{", ".join(names.DTYPES.values())}'
      )
    metadata: Mapping[str, str] = handle.metadata() or {}
    text = metadata.get(_META)
    embeddings = stored.read()
  if text is None:
    return embeddings, {}
  return embeddings, parse_object(text, f'{os.fspath(file)}, metadata {_META!r}')
