"""The sentence-transformers files of a model directory, with its settings for embedding texts.

modules.json                        Transformer, Pooling, then any Dense, and Normalize or not
1_Pooling/config.json               the pooling, by flags or (since version 5.4) by name
2_Dense/                            a layer after the pooling: config.json, model.safetensors
sentence_bert_config.json           the maximum length, and how to tokenise
config_sentence_transformers.json   text before queries and passages, and the similarity

`text.sentence_files` lists their keys. `text.tokenizing` applies the keys of the tokenizer.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from etils import epath

from dprjax.base import provenance
from dprjax.base.errors import InputError
from dprjax.base.files import refuse_special
from dprjax.base.reading import convert, read, read_json_object
from dprjax.models import pooling as poolings
from dprjax.models import weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.pooling import DENSE_ACTIVATIONS, Dense
from dprjax.text import sentence_files, vector_spec
from dprjax.text.vector_spec import VectorSpec

logger = logging.getLogger('dprjax')

PROMPTED = 'PromptedTransformer'  # the class in `prompt_folders`
PROMPTED_TYPE = f'dprjax_prompt.{PROMPTED}'
_TRANSFORMERS = ('Transformer', PROMPTED)
MODEL = 'config_sentence_transformers.json'
# Names in the documentation of SentenceTransformer.encode_query and encode_document.
_PROMPT_NAMES = {'query': ('query',), 'passage': ('document', 'passage', 'corpus')}
_NAME: Any = str | None
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # numbers of a vector


class _Entry(msgspec.Struct):
  type: str
  path: Annotated[str, msgspec.Meta(pattern=r'\A([\w-][\w.-]*)?\Z')]


class _Module(NamedTuple):
  type: str  # the class name
  folder: epath.Path


def transformer_folder(root: epath.Path) -> epath.Path:
  """The model folder: ``root``, or in old directories a folder in it."""
  for module in _modules(root):
    if module.type in _TRANSFORMERS and (module.folder / 'config.json').exists():
      return module.folder
  return root


def read_folder(root: epath.Path, config: EncoderConfig) -> VectorSpec:
  """How the model in a directory embeds texts.

  Without such files, by the mean of the states, or the last state of a causal model, of unit
  length; a model that dprjax wrote, by its first state.
  """
  folder = transformer_folder(root)
  model = sentence_files.read(root / MODEL, sentence_files.MODEL)
  classifier = model.get('model_type') == 'CrossEncoder'
  modules = _modules(root)
  rules = sentence_files.CLASSIFIER if classifier else sentence_files.ENCODER
  if any(module.type == PROMPTED for module in modules):
    # The prompt meta has them too.
    rules = rules | {'query_length': None, 'document_length': None}
  sentence_files.read(sentence_files.transformer_file(folder), rules)
  if (folder / 'adapter_config.json').exists():
    raise InputError(
      f'{folder / "adapter_config.json"}: adapters are not applied; merge it into the weights, or '
      'remove the file to use the bare encoder'
    )
  length = min(max_length(folder), config.max_tokens)
  prompts = _prompts(root / MODEL, model)
  if classifier:
    sentence_files.check(any(prompts.values()), (False,), f'{root / MODEL}: prompts')
    return vector_spec.same_length(length)
  if not modules:
    if model:
      raise InputError(
        f'{root / MODEL}: there is no modules.json with the pooling; remove the file to use the '
        'bare encoder'
      )
    if (root / provenance.MARK).exists():  # from scratch or pretrained here
      return vector_spec.same_length(length, 'lasttoken' if config.causal else 'cls')
    return vector_spec.same_length(length, 'lasttoken' if config.causal else 'mean', True)
  _check_order(root / 'modules.json', [module.type for module in modules])
  for module in modules:
    if module.type == 'Normalize':
      sentence_files.read(module.folder / 'config.json', sentence_files.NORMALIZE)
  dimension = sentence_files.length(model.get('truncate_dim'), f'{root / MODEL}: truncate_dim')
  if dimension is not None and dimension < config.vector_size:
    raise InputError(
      f'{root / MODEL}: truncate_dim is not applied; remove it and give --dimensions={dimension}'
    )
  normalize = any(module.type == 'Normalize' for module in modules)
  similarity = model.get('similarity_fn_name')
  if similarity is None and not normalize:
    logger.warning(
      '%s names no similarity: using the inner product; for the default of sentence-transformers, '
      'the cosine, give --normalize=true',
      root,
    )
  return vector_spec.same_length(
    length,
    pooling=_pooling(_folders(modules, 'Pooling')[0] / 'config.json', any(prompts.values())),
    normalize=normalize or similarity == 'cosine',  # the inner product of unit vectors
    query_prefix=prompts['query'],
    passage_prefix=prompts['passage'],
  )


_Activation: Any = Literal[tuple(DENSE_ACTIVATIONS)]  # type: ignore[valid-type]


class _DenseConfig(msgspec.Struct):
  in_features: _Size
  out_features: _Size
  activation_function: _Activation


def read_projection(root: epath.Path) -> tuple[Dense, ...]:
  layers: list[Dense] = []
  for folder in _folders(_modules(root), 'Dense'):
    file = folder / 'config.json'
    values = read_json_object(file, 'dense module')
    sentence_files.check(values, sentence_files.DENSE, f'{file}: ')
    dense = convert(values, str(file), _DenseConfig)
    layers.append(
      Dense(
        dense.in_features,
        dense.out_features,
        values.get('bias') is not False,
        dense.activation_function,
      )
    )
  return tuple(layers)


def read_projection_weights(root: epath.Path, shapes: Sequence[Dense]) -> dict[str, Any]:
  folders = _folders(_modules(root), 'Dense')
  with contextlib.ExitStack() as stack:
    return {
      str(number): weights.read_file(
        weights.weight_files(folder)[-1],
        'tensors differ from config.json',
        dense.tensors(),
        stack,
      )
      for number, (folder, dense) in enumerate(zip(folders, shapes, strict=True))
    }


def max_length(folder: epath.Path) -> int:
  """The maximum length in the files of a model, or 512. It may exceed the model positions."""
  length = sentence_files.tokenizer_settings(folder).max_length
  file = folder / 'tokenizer_config.json'
  if length is None and file.exists():
    value = read_json_object(file, file.name).get('model_max_length')
    length = sentence_files.length(value, f'{file}: model_max_length')
  return 512 if length is None else length


def _folders(modules: Sequence[_Module], kind: str) -> list[epath.Path]:
  return [module.folder for module in modules if module.type == kind]


def _modules(root: epath.Path) -> list[_Module]:
  file = root / 'modules.json'
  if not file.exists():
    return []
  modules: list[_Module] = []
  for module in read(file, 'modules.json', list[dict[str, Any]]):
    sentence_files.check(module, sentence_files.MODULE, f'{file}: ')
    entry = convert(module, str(file), _Entry)
    refuse_special(root / entry.path)
    package, _, name = entry.type.rpartition('.')
    # A class of the same name from another package is a custom class.
    known = package.startswith('sentence_transformers.') or entry.type == PROMPTED_TYPE
    modules.append(_Module(name if known else f'a custom {entry.type}', root / entry.path))
  return modules


def _check_order(file: epath.Path, types: Sequence[str]) -> None:
  order = ' '.join(name for name in types if name != 'Dropout')  # only for training
  expected = f'({"|".join(_TRANSFORMERS)}) Pooling( Dense)*( Normalize)*'
  if not re.fullmatch(expected, order):
    raise InputError(
      f'{file}: unsupported modules {", ".join(types)}; expected Transformer, Pooling, then any '
      'Dense and Normalize; remove the file to use the bare encoder'
    )


def _pooling(file: epath.Path, prefixed: bool) -> str:
  settings = read_json_object(file, 'pooling')
  sentence_files.check(settings, sentence_files.POOLING, f'{file}: ')
  modes = settings.get('pooling_mode')
  if modes is None:
    flagged = (one for one in poolings.every().values() if settings.get(one.flag))
    modes = [one.name for one in flagged] or 'mean'
  modes = modes if isinstance(modes, list) else [modes]
  if len(modes) != 1:
    raise InputError(
      f'{file}: pooling {" + ".join(map(str, modes)) or []} is not supported; use one of: '
      f'{", ".join(poolings.every())}'
    )
  poolings.find(modes[0], f'{file}: pooling')
  # null also means false.
  if prefixed and not settings.get('include_prompt', True):
    raise InputError(
      f'{file}: include_prompt false is not supported: it pools without the prefix text'
    )
  return modes[0]


def _prompts(file: epath.Path, model: dict[str, Any]) -> dict[str, str]:
  prompts = convert(model.get('prompts', {}), f'{file}: prompts', dict[str, str | None])
  texts = {name: text or '' for name, text in prompts.items()}
  default: Any = convert(model.get('default_prompt_name'), f'{file}: default_prompt_name', _NAME)
  by_kind = {}
  for kind, (name, *others) in _PROMPT_NAMES.items():
    # sentence-transformers documents these names but does not use them.
    doubtful = [alias for alias in (*others, default) if alias is not None and texts.get(alias)]
    if name not in texts and doubtful:
      method = {'query': 'encode_query', 'passage': 'encode_document'}[kind]
      raise InputError(
        f'{file}: prompts has {doubtful[0]!r} but no {name!r}, so {method} of '
        f"sentence-transformers adds no text; add {name!r} to prompts ('' for no text)"
      )
    by_kind[kind] = texts.get(name, '')
  return by_kind
