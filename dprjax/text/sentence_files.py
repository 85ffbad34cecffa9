"""The settings files in a sentence-transformers folder, key by key.

Every key is applied, ignored because it changes no vector, or refused. null is an absent key.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.reading import read_json_object

# A directory with any of these has a tokenizer.
VOCABULARIES = (
  'tokenizer.json',
  'vocab.txt',
  'vocab.json',
  'sentencepiece.bpe.model',
  'spiece.model',
  'tokenizer.model',
)
TOKENIZER_FILES = (
  *VOCABULARIES,
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'merges.txt',
)

# The rule of a key: None if it is applied or changes no vector; a tuple of supported values; or the
# rules of the object under it.
Rules = Mapping[str, Any]
Rule = tuple[Any, ...] | Rules | None

_FLAG = (True, False)

# Arguments of classes of transformers, under their names since version 5.4 and before.
_OF_TOKENIZERS: Rules = {
  # Taken by `AutoTokenizer`.
  **dict.fromkeys(
    ('do_lower_case', 'strip_accents', 'tokenize_chinese_chars', 'add_prefix_space'), _FLAG
  ),
  **dict.fromkeys(('truncation_side', 'padding_side', 'split_special_tokens')),
  'model_max_length': None,
  # These change no token.
  **dict.fromkeys(('use_fast', 'clean_up_tokenization_spaces', 'trust_remote_code')),
}
_OF_MODELS: Rules = dict.fromkeys(
  (
    'dtype',
    'torch_dtype',
    'attn_implementation',
    'add_pooling_layer',
    'low_cpu_mem_usage',
    'device_map',
    'use_safetensors',
    'trust_remote_code',
  )
)
_ARGUMENTS: Rules = {
  **dict.fromkeys(('processor_kwargs', 'tokenizer_args'), _OF_TOKENIZERS),
  **dict.fromkeys(('model_kwargs', 'model_args'), _OF_MODELS),
  **{key: {'trust_remote_code': None} for key in ('config_kwargs', 'config_args')},
}

MODULE: Rules = {'idx': None, 'name': None, 'path': None, 'type': None, 'kwargs': ([], {})}
POOLING: Rules = {
  'embedding_dimension': None,
  'word_embedding_dimension': None,
  'pooling_mode': None,
  'pooling_mode_cls_token': _FLAG,
  'pooling_mode_max_tokens': _FLAG,
  'pooling_mode_mean_tokens': _FLAG,
  'pooling_mode_mean_sqrt_len_tokens': _FLAG,
  'pooling_mode_weightedmean_tokens': _FLAG,
  'pooling_mode_lasttoken': _FLAG,
  'include_prompt': _FLAG,
}
DENSE: Rules = {
  **dict.fromkeys(('in_features', 'out_features', 'activation_function')),
  'bias': _FLAG,
  'module_input_name': ('sentence_embedding',),
  'module_output_name': ('sentence_embedding',),
}
NORMALIZE: Rules = {
  'module_input_name': ('sentence_embedding',),
  'module_output_name': ('sentence_embedding',),
}
MODEL: Rules = {
  'model_type': ('SentenceTransformer', 'CrossEncoder'),
  '__version__': None,
  'requirements': None,  # versions of packages
  'prompts': None,
  'default_prompt_name': None,
  'similarity_fn_name': ('cosine', 'dot'),
  'truncate_dim': None,
  'activation_fn': None,  # of cross-encoder scores, which are logits here
}
_TRANSFORMER_FILES = tuple(
  f'sentence_{name}_config.json'
  for name in ('bert', 'roberta', 'distilbert', 'camembert', 'albert', 'xlm-roberta', 'xlnet')
)


_TRANSFORMER: dict[str, Rule] = {
  'max_seq_length': None,
  'do_lower_case': _FLAG,
  'processing_kwargs': {key: {} for key in ('common', 'text', 'audio', 'image', 'video')},
  'unpad_inputs': None,  # of speed
  **dict.fromkeys(('query_length', 'document_length', 'query_expansion'), ()),
  'tokenizer_name_or_path': (),
  **_ARGUMENTS,
}
ENCODER: dict[str, Rule] = _TRANSFORMER | {
  'transformer_task': ('feature-extraction',),
  'modality_config': {
    'text': {'method': ('forward',), 'method_output_name': ('last_hidden_state',)},
    'message': None,  # unlike texts
  },
  'module_output_name': ('token_embeddings',),
}
CLASSIFIER: dict[str, Rule] = _TRANSFORMER | {
  'transformer_task': ('sequence-classification',),
  'modality_config': {'text': {'method': ('forward',), 'method_output_name': ('logits',)}},
  'module_output_name': ('scores',),
}


class TokenizerSettings(NamedTuple):
  """Settings of the tokenizer in the files of a sentence-transformers folder.

  Attributes:
    lower: whether texts are made lower case first.
    max_length: of a text, in tokens; None if not given.
  """

  arguments: dict[str, Any]
  lower: bool
  max_length: int | None

  @property
  def kept(self) -> dict[str, Any]:
    """The same settings as keys of sentence_bert_config.json, without the length."""
    arguments = {key: self.arguments[key] for key in self.arguments if key != 'model_max_length'}
    return ({'do_lower_case': True} if self.lower else {}) | (
      {'tokenizer_args': arguments} if arguments else {}
    )


def read(file: epath.Path, rules: Rules) -> dict[str, Any]:
  """The keys of a file that are not null; empty if it is missing."""
  if not file.exists():
    return {}
  values = read_json_object(file, file.name)
  check(values, rules, f'{file}: ')
  return {key: value for key, value in values.items() if value is not None}


def check(value: Any, rule: Rule, where: str) -> None:
  """Raises InputError if a rule does not allow a value. ``where`` names the value."""
  if rule is None or value is None:
    return
  if isinstance(rule, tuple):
    if any(type(value) is type(one) and value == one for one in rule):
      return
    expected = ' or '.join(map(repr, rule)) or 'no such key; remove it if it changes no vector'
  elif isinstance(value, dict):
    for key, inner in value.items():
      check(inner, rule.get(key, ()), f'{where}{key!s:.80}.')
    return
  else:
    expected = 'a JSON object'
  raise InputError(
    f'{where.rstrip(": .")} is {value!r:.80}, which is not supported; expected {expected}'
  )


def transformer_file(folder: epath.Path) -> epath.Path:
  """The settings file of a transformer, under any of its names; it may be missing."""
  candidates = (folder / name for name in _TRANSFORMER_FILES)
  return next((file for file in candidates if file.exists()), folder / _TRANSFORMER_FILES[0])


def tokenizer_settings(folder: epath.Path) -> TokenizerSettings:
  """The tokenizer settings in the transformer settings of a folder."""
  file = transformer_file(folder)
  values = read_json_object(file, file.name) if file.exists() else {}
  names = ('do_lower_case', 'tokenizer_name_or_path', 'processor_kwargs', 'tokenizer_args')
  settings = {key: value for key, value in values.items() if key in names}
  check(settings, _TRANSFORMER, f'{file}: ')
  # In sentence-transformers the old name overrides the new one, even with null.
  named = 'processor_kwargs' if settings.get('tokenizer_args') is None else 'tokenizer_args'
  arguments = settings.get(named) or {}
  lengths = [
    length(arguments.get('model_max_length'), f'{file}: {named}.model_max_length'),
    length(values.get('max_seq_length'), f'{file}: max_seq_length'),
  ]
  return TokenizerSettings(
    {
      key: value
      for key, value in arguments.items()
      if value is not None and key not in ('use_fast', 'trust_remote_code')
    },
    bool(settings.get('do_lower_case')),
    next((one for one in lengths if one is not None), None),
  )


def length(value: Any, where: str) -> int | None:
  """A number of tokens, or None for null."""
  if value is None:
    return None
  # transformers writes 1e30, or its digits, for no limit.
  if type(value) not in (int, float) or not 1 <= value < float('inf') or value != int(value):
    raise InputError(f'{where} is {value!r:.40}; expected a whole number from 1')
  return int(value)
