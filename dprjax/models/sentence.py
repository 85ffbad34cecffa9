"""The sentence-transformers files of a model directory, which say how it embeds a text.

modules.json                        Transformer, Pooling, and Normalize or not
1_Pooling/config.json               which pooling: one flag each, or (since version 5.4) its name
sentence_bert_config.json           the maximum length
config_sentence_transformers.json   text to put before queries and passages
"""

import dataclasses
import re

from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import refuse_special, write_json
from dprjax.base.reading import read_json, read_json_object
from dprjax.formats.fields import Record
from dprjax.models.embed import POOLINGS
from dprjax.models.encoder_config import EncoderConfig

_FLAGS = {
  'pooling_mode_cls_token': 'cls',
  'pooling_mode_max_tokens': 'max',
  'pooling_mode_mean_tokens': 'mean',
  'pooling_mode_mean_sqrt_len_tokens': 'mean_sqrt_len_tokens',
  'pooling_mode_weightedmean_tokens': 'weightedmean',
  'pooling_mode_lasttoken': 'lasttoken',
}
_TRANSFORMER_CONFIGS = (
  'sentence_bert_config.json',
  'sentence_roberta_config.json',
  'sentence_xlm-roberta_config.json',
)
PROMPTED = 'PromptedTransformer'  # the class of `prompted`: a transformer under a prompt of ours
_TRANSFORMERS = ('Transformer', PROMPTED)
# The first one present counts, as in SentenceTransformer.encode_query and encode_document.
_PROMPT_NAMES = {'query': ('query',), 'passage': ('document', 'passage', 'corpus')}


@dataclasses.dataclass(frozen=True)
class SentenceSettings:
  """How texts become vectors, unless a prompt's meta or the user says otherwise."""

  pooling: str = 'cls'
  normalize: bool = False
  max_length: int = 512
  query_prefix: str = ''
  passage_prefix: str = ''


def transformer_folder(root: epath.Path) -> epath.Path:
  """The model's folder: ``root``, or one in it in old sentence-transformers directories."""
  for module in _modules(root):
    if module['type'] in _TRANSFORMERS and (root / module['path'] / 'config.json').exists():
      return root / module['path']
  return root


def read_sentence_settings(root: epath.Path, config: EncoderConfig) -> SentenceSettings:
  """The directory's settings, or the defaults where it has no sentence-transformers files.

  Raises:
    InputError: an unsupported pooling or module, or an unreadable file.
  """
  modules = _modules(root)
  if not modules:
    return SentenceSettings(max_length=min(512, config.max_tokens))
  if unknown := [
    module['type']
    for module in modules
    if module['type'] not in (*_TRANSFORMERS, 'Pooling', 'Normalize')
  ]:
    raise InputError(
      f'{root / "modules.json"}: {", ".join(unknown)} after the encoder is not supported; remove '
      'the file to use the bare encoder'
    )
  prompts = _prompts(root)
  pooling = 'cls'
  for module in modules:
    if module['type'] == 'Pooling':
      pooling = _pooling(root / module['path'] / 'config.json', any(prompts.values()))
  return SentenceSettings(
    pooling,
    any(module['type'] == 'Normalize' for module in modules),
    min(max_length(transformer_folder(root)), config.max_tokens),
    query_prefix=prompts['query'],
    passage_prefix=prompts['passage'],
  )


def max_length(folder: epath.Path) -> int:
  """The maximum length in a model's files, or 512. It may exceed the model's positions."""
  for name, key in (
    *((name, 'max_seq_length') for name in _TRANSFORMER_CONFIGS),
    ('tokenizer_config.json', 'model_max_length'),
  ):
    if (folder / name).exists():
      length = read_json_object(folder / name, name).get(key)
      if isinstance(length, int) and not isinstance(length, bool) and length > 0:
        return length
  return 512


def write_sentence_settings(
  folder: epath.Path, config: EncoderConfig, sentence: SentenceSettings
) -> None:
  """Writes the files into a new model directory, in the format that every version reads."""
  modules = [('Transformer', ''), ('Pooling', '1_Pooling')] + (
    [('Normalize', '2_Normalize')] if sentence.normalize else []
  )
  write_json(
    folder / 'modules.json',
    [
      {'idx': i, 'name': str(i), 'path': path, 'type': f'sentence_transformers.models.{name}'}
      for i, (name, path) in enumerate(modules)
    ],
  )
  for _, path in modules[1:]:
    (folder / path).mkdir()
  flags = {flag: mode == sentence.pooling for flag, mode in _FLAGS.items()}
  write_json(
    folder / '1_Pooling' / 'config.json',
    {'word_embedding_dimension': config.hidden_size, **flags, 'include_prompt': True},
  )
  write_json(
    folder / 'sentence_bert_config.json',
    {'max_seq_length': sentence.max_length, 'do_lower_case': False},
  )
  write_json(
    folder / 'config_sentence_transformers.json',
    {
      'prompts': {'query': sentence.query_prefix, 'document': sentence.passage_prefix},
      'default_prompt_name': None,
      'similarity_fn_name': 'cosine' if sentence.normalize else 'dot',
    },
  )


def _modules(root: epath.Path) -> list[dict[str, str]]:
  """``type`` (class name) and ``path`` of each module; empty without modules.json."""
  file = root / 'modules.json'
  if not file.exists():
    return []
  modules = read_json(file, 'modules.json')
  found = []
  for module in modules if isinstance(modules, list) else [None]:
    if not isinstance(module, dict):
      raise InputError(f'{file}: expected a list of objects with type and path')
    record = Record(module, f'{file}: expected a list of objects with type and path')
    kind, path = record.text('type').rsplit('.', 1)[-1], record.text('path')
    if path and not re.fullmatch(r'[\w-][\w.-]*', path):
      raise InputError(f'{file}: {path!r:.80} is no name of a folder beside it')
    refuse_special(root / path)
    found.append({'type': kind, 'path': path})
  return found


def _pooling(file: epath.Path, prefixed: bool) -> str:
  settings = read_json_object(file, 'pooling')
  modes = (
    settings.get('pooling_mode')
    or [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    or 'mean'
  )
  modes = modes if isinstance(modes, list) else [modes]
  if len(modes) != 1 or modes[0] not in POOLINGS:
    raise InputError(
      f'{file}: pooling {" + ".join(map(str, modes))} is not supported; use one of: '
      f'{", ".join(POOLINGS)}'
    )
  if prefixed and settings.get('include_prompt') is False:
    raise InputError(
      f'{file}: include_prompt false (the prefix text left out of the pooling) is not supported'
    )
  return modes[0]


def _prompts(root: epath.Path) -> dict[str, str]:
  file = root / 'config_sentence_transformers.json'
  settings = read_json_object(file, file.name) if file.exists() else {}
  texts = settings.get('prompts') or {}
  if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
    raise InputError(f'{file}: prompts is not an object of strings')
  default_name = settings.get('default_prompt_name')
  default = texts.get(default_name, '') if isinstance(default_name, str) else ''
  return {
    kind: next((texts[name] for name in names if name in texts), default)
    for kind, names in _PROMPT_NAMES.items()
  }
