import json

import pytest
from etils import epath

from dprjax.base.errors import InputError
from dprjax.models import hub
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.sentence import SentenceSettings, read_sentence_settings, write_sentence_settings

CONFIG = EncoderConfig('bert', 50, 24, 1, 3, 40)
OLD = 'sentence_transformers.models.'
NEW = 'sentence_transformers.sentence_transformer.modules.'


def write(folder, types=(OLD + 'Transformer', OLD + 'Pooling'), **files):
  paths = {
    'Transformer': '',
    'Pooling': '1_Pooling',
    'Normalize': '2_Normalize',
    'Dense': '2_Dense',
  }
  modules = [
    {'idx': i, 'name': str(i), 'path': paths[name.rsplit('.', 1)[-1]], 'type': name}
    for i, name in enumerate(types)
  ]
  files = {'modules': modules, '1_Pooling/config': {'pooling_mode_mean_tokens': True}} | files
  for name, content in files.items():
    path = folder / f'{name}.json'
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def read(folder):
  return read_sentence_settings(epath.Path(folder), CONFIG)


def test_without_files(tmp_path):
  assert read(tmp_path) == SentenceSettings('cls', False, 512, '', '')
  short = EncoderConfig('roberta', 50, 24, 1, 3, 40, max_positions=130, pad_token_id=1)
  assert read_sentence_settings(epath.Path(tmp_path), short).max_length == 128


def test_old_form(tmp_path):
  write(
    tmp_path,
    (OLD + 'Transformer', OLD + 'Pooling', OLD + 'Normalize'),
    sentence_bert_config={'max_seq_length': 256, 'do_lower_case': False},
    config_sentence_transformers={'prompts': {'query': 'query: ', 'passage': 'passage: '}},
  )
  assert read(tmp_path) == SentenceSettings('mean', True, 256, 'query: ', 'passage: ')
  write(
    tmp_path,
    **{'1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False}},
  )
  assert read(tmp_path).pooling == 'cls' and not read(tmp_path).normalize


def test_new_form(tmp_path):
  write(
    tmp_path,
    (NEW + 'transformer.Transformer', NEW + 'pooling.Pooling'),
    **{
      '1_Pooling/config': {
        'embedding_dimension': 24,
        'pooling_mode': 'cls',
        'include_prompt': True,
      },
      'config_sentence_transformers': {
        'prompts': {'query': 'Q: ', 'document': 'D: ', 'corpus': 'C: '},
        'default_prompt_name': None,
      },
      'sentence_bert_config': {'transformer_task': 'feature-extraction'},
      'tokenizer_config': {'model_max_length': 300},
    },
  )
  assert read(tmp_path) == SentenceSettings('cls', False, 300, 'Q: ', 'D: ')
  write(tmp_path, **{'1_Pooling/config': {'pooling_mode': ['mean']}})
  assert read(tmp_path).pooling == 'mean'


def test_default_prompt_and_longest_input(tmp_path):
  write(
    tmp_path,
    sentence_bert_config={'max_seq_length': 100_000},
    config_sentence_transformers={
      'prompts': {'query': 'find: ', 'other': 'text: '},
      'default_prompt_name': 'other',
    },
  )
  assert read(tmp_path) == SentenceSettings('mean', False, 512, 'find: ', 'text: ')


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    (
      {'1_Pooling/config': {'pooling_mode_max_tokens': True}},
      'pooling max is not supported; use one of: cls, mean',
    ),
    ({'1_Pooling/config': {'pooling_mode': 'lasttoken'}}, 'pooling lasttoken is not supported'),
    (
      {'1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': True}},
      r'pooling cls \+ mean is not supported',
    ),
    (
      {
        '1_Pooling/config': {'pooling_mode': 'mean', 'include_prompt': False},
        'config_sentence_transformers': {'prompts': {'query': 'q'}},
      },
      'include_prompt false',
    ),
    ({'1_Pooling/config': []}, 'expected a JSON object, found list'),
    ({'modules': [{'path': ''}]}, 'expected a list of objects with type and path'),
    ({'modules': '{'}, 'modules.json: not JSON'),
    ({'modules': {}}, 'expected a list of objects with type and path'),
    ({'modules': ['Pooling']}, 'expected a list of objects with type and path'),
    ({'modules': [{'path': 3, 'type': 'Pooling'}]}, "'path' is 3; expected text"),
    ({'modules': [{'path': '', 'type': None}]}, "'type' is missing; expected text"),
    (
      {'modules': [{'path': '../1_Pooling', 'type': 'Pooling'}]},
      'is no name of a folder beside it',
    ),
    ({'modules': [{'path': '/etc', 'type': 'Transformer'}]}, 'is no name of a folder beside it'),
    ({'modules': [{'path': '..', 'type': 'Transformer'}]}, 'is no name of a folder beside it'),
    ({'modules': [{'path': 'a/../../b', 'type': 'Pooling'}]}, 'is no name of a folder beside it'),
    ({'modules': '[' * 3000 + ']' * 3000}, 'nested deeper'),
    ({'1_Pooling/config': {'pooling_mode': 5}}, 'pooling 5 is not supported'),
    ({'1_Pooling/config': {'pooling_mode': [[]]}}, 'is not supported'),
    ({'1_Pooling/config': {'pooling_mode': {'cls': 1}}}, 'is not supported'),
    (
      {'1_Pooling/config': {'pooling_mode': ['cls', 'cls']}},
      r'pooling cls \+ cls is not supported',
    ),
    ({'1_Pooling/config': 'null'}, 'expected a JSON object, found NoneType'),
    ({'config_sentence_transformers': {'prompts': {'query': 5}}}, 'is not an object of strings'),
    ({'sentence_bert_config': '[]'}, 'expected a JSON object, found list'),
    ({'config_sentence_transformers': {'prompts': ['q']}}, 'prompts is not an object of strings'),
  ],
)
def test_unsupported(tmp_path, files, message):
  write(tmp_path, **files)
  with pytest.raises(InputError, match=message):
    read(tmp_path)


def test_other_modules(tmp_path):
  write(tmp_path, (OLD + 'Transformer', OLD + 'Pooling', OLD + 'Dense'))
  with pytest.raises(InputError, match=r'modules\.json: Dense after the encoder is not supported'):
    read(tmp_path)


@pytest.mark.parametrize(
  'settings', [SentenceSettings(), SentenceSettings('mean', True, 128, 'q: ', 'p: ')], ids=str
)
def test_round_trip(tmp_path, settings):
  write_sentence_settings(epath.Path(tmp_path), CONFIG, settings)
  assert read(tmp_path) == settings


def test_model_in_a_folder_of_its_own(write_checkpoint, tmp_path):
  # As sentence-transformers 0.x wrote them.
  path = write_checkpoint('bert', 1, folder='0_BERT')
  (path / 'sentence_bert_config.json').write_text('{"max_seq_length": 10}')
  write(
    tmp_path,
    modules=[
      {'path': '0_BERT', 'type': OLD + 'Transformer'},
      {'path': '1_Pooling', 'type': OLD + 'Pooling'},
    ],
  )
  backbone = hub.load_backbone(tmp_path)
  assert backbone.path == str(path) and backbone.sentence == SentenceSettings('mean', False, 10)
