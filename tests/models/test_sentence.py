import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.mesh import make_mesh
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import hub, model_folders
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.model_folders import write_sentence_files
from dprjax.models.sentence import read_folder
from dprjax.text import sentence_files
from dprjax.text.tokenizing import load_tokenizer
from dprjax.text.vector_spec import same_length
from tests.refusals import named_in, refused

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
  return read_folder(epath.Path(folder), CONFIG)


def test_old_form(tmp_path):
  write(
    tmp_path,
    (OLD + 'Transformer', OLD + 'Pooling', OLD + 'Normalize'),
    sentence_bert_config={'max_seq_length': 256, 'do_lower_case': False},
    config_sentence_transformers={'prompts': {'query': 'query: ', 'document': 'passage: '}},
  )
  assert read(tmp_path) == same_length(256, 'mean', True, 'query: ', 'passage: ')
  write(
    tmp_path,
    **{'1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False}},
  )
  assert read(tmp_path).pooling == 'cls' and not read(tmp_path).normalize


@pytest.mark.parametrize('name', ['max', 'lasttoken', 'weightedmean', 'mean_sqrt_len_tokens'])
def test_every_pooling_is_read_and_written(tmp_path, name):
  (tmp_path / 'written').mkdir()
  settings = same_length(40, name, True)
  write_sentence_files(tmp_path / 'written', CONFIG, {}, settings)
  assert read(tmp_path / 'written') == settings
  write(tmp_path, **{'1_Pooling/config': {'pooling_mode': name}})
  assert read(tmp_path).pooling == name


def test_new_form(tmp_path):
  write(
    tmp_path,
    ('sentence_transformers.base.modules.transformer.Transformer', NEW + 'pooling.Pooling'),
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
      'sentence_bert_config': {
        'transformer_task': 'feature-extraction',
        'modality_config': {
          'text': {'method': 'forward', 'method_output_name': 'last_hidden_state'}
        },
        'module_output_name': 'token_embeddings',
      },
      'tokenizer_config': {'model_max_length': 300},
    },
  )
  assert read(tmp_path) == same_length(300, 'cls', False, 'Q: ', 'D: ')
  write(tmp_path, **{'1_Pooling/config': {'pooling_mode': ['mean']}})
  assert read(tmp_path).pooling == 'mean'


def test_default_prompt_and_longest_input(tmp_path):
  prompts = {'query': 'find: ', 'document': '', 'other': 'text: '}
  write(
    tmp_path,
    sentence_bert_config={'max_seq_length': 100_000},
    config_sentence_transformers={'prompts': prompts, 'default_prompt_name': 'other'},
  )
  assert read(tmp_path) == same_length(512, 'mean', False, 'find: ', '')


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    (
      {'1_Pooling/config': {'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': True}},
      ('config.json', 'mean_sqrt_len_tokens'),
    ),
    (
      {
        '1_Pooling/config': {'pooling_mode': 'mean', 'include_prompt': False},
        'config_sentence_transformers': {'prompts': {'query': 'q'}},
      },
      'include_prompt',
    ),
    ({'modules': [{'path': 3, 'type': 'Pooling'}]}, 'path'),
    ({'adapter_config': {}}, 'adapter_config.json'),
    ({'modules': [{'path': 'a/../../b', 'type': 'Pooling'}]}, 'modules.json'),
  ],
)
def test_unsupported(tmp_path, files, message):
  write(tmp_path, **files)
  with refused(message):
    read(tmp_path)


# For each key: values that are applied or change no vector, and values that are refused.
@pytest.mark.parametrize(
  ('file', 'key', 'taken', 'others'),
  [
    ('sentence_bert_config', 'max_seq_length', [16, None], [0, '16', True]),
    ('sentence_bert_config', 'do_lower_case', [False, True], ['yes']),
    ('sentence_bert_config', 'transformer_task', ['feature-extraction'], ['fill-mask']),
    ('sentence_bert_config', 'module_output_name', ['token_embeddings'], ['sentence_embedding']),
    (
      'sentence_bert_config',
      'modality_config',
      [{'text': {'method': 'forward'}, 'message': {'method': 'forward', 'format': 'flat'}}],
      [{'text': {'method': 'get_text_features', 'method_output_name': 'pooler_output'}}, []],
    ),
    ('sentence_bert_config', 'processing_kwargs', [{'text': {}}], [{'text': {'max_length': 8}}]),
    ('sentence_bert_config', 'query_length', [None], [32]),
    ('sentence_bert_config', 'tokenizer_args', [{'use_fast': True}], [{'subfolder': 'x'}, []]),
    (
      'sentence_bert_config',
      'processor_kwargs',
      [{'model_max_length': 16}, {'do_lower_case': True}],
      [{'model_max_length': 0}, {'do_lower_case': 'x'}, {'max_length': 5}],
    ),
    (
      'sentence_bert_config',
      'model_args',
      [{'torch_dtype': 'float16', 'attn_implementation': 'sdpa'}],
      [{'quantization_config': {'bits': 4}}],
    ),
    ('sentence_bert_config', 'config_args', [{}], [{'num_hidden_layers': 2}]),
    ('sentence_bert_config', 'unheard_of', [None], [False]),
    ('1_Pooling/config', 'embedding_dimension', [24, None, 25], []),
    ('1_Pooling/config', 'pooling_mode', ['cls', ['lasttoken']], ['middle', ['cls', 'mean'], 1]),
    ('1_Pooling/config', 'pooling_mode_max_tokens', [True], [1]),
    ('1_Pooling/config', 'include_prompt', [False], ['no']),
    ('1_Pooling/config', 'unheard_of', [None], [1]),
    ('2_Normalize/config', 'module_input_name', ['sentence_embedding'], ['token_embeddings']),
    (
      'config_sentence_transformers',
      'model_type',
      ['SentenceTransformer'],
      ['SparseEncoder', 'MultiVectorEncoder', 'CLIP'],
    ),
    ('config_sentence_transformers', 'similarity_fn_name', ['cosine'], ['euclidean', 1]),
    ('config_sentence_transformers', 'truncate_dim', [24, 768], [8, '24']),
    ('config_sentence_transformers', 'default_prompt_name', [None, 'gone'], [['query']]),
    (
      'config_sentence_transformers',
      'prompts',
      [{'query': 'q'}, {'query': None, 'document': None}, {'passage': ''}],
      [{'query': 'q: ', 'passage': 'p: '}, {'corpus': 'c: '}, {'query': 5}],
    ),
    ('config_sentence_transformers', 'unheard_of', [None], [1]),
    ('modules', 'name', ['7'], []),
    ('modules', 'kwargs', [[]], [['task']]),
    ('modules', 'unheard_of', [None], [1]),
  ],
)
def test_every_key_is_applied_or_refused(tmp_path, file, key, taken, others):
  types = (OLD + 'Transformer', OLD + 'Pooling', OLD + 'Normalize')
  for number, value in enumerate([*taken, *others]):
    folder = tmp_path / str(number)
    folder.mkdir()
    write(folder, types)
    path = folder / f'{file}.json'
    path.parent.mkdir(exist_ok=True)
    if file == 'modules':
      modules = json.loads(path.read_text())
      modules[1][key] = value
      path.write_text(json.dumps(modules))
    else:
      path.write_text(json.dumps({key: value}))
    if number < len(taken):
      read(folder)
      continue
    with pytest.raises(InputError) as raised:
      read(folder)
    # Flags of one pooling or several are told by its name.
    expected = 'pooling' if key.startswith('pooling_mode') else key
    assert named_in(raised.value, path.name) and expected in str(raised.value)


def test_the_table_has_every_key_that_sentence_transformers_writes(golden):
  tables = {
    'modules.json': sentence_files.MODULE,
    'sentence_bert_config.json': sentence_files.ENCODER,
    '1_Pooling/config.json': sentence_files.POOLING,
    '2_Normalize/config.json': sentence_files.NORMALIZE,
    'config_sentence_transformers.json': sentence_files.MODEL,
  }
  written = json.loads(golden('sentence_files')['keys'].item())
  assert written.keys() == tables.keys() and len(written['sentence_bert_config.json']) == 8
  for file, keys in written.items():
    assert set(keys) <= tables[file].keys(), file


def test_every_module_is_applied_or_refused(tmp_path, golden):
  taken = set()
  for number, kind in enumerate(golden('sentence_files')['types'].tolist()):
    folder = tmp_path / str(number)
    folder.mkdir()
    write(folder)
    modules = json.loads((folder / 'modules.json').read_text())
    modules.append({'idx': 2, 'name': '2', 'path': '2', 'type': kind})
    (folder / 'modules.json').write_text(json.dumps(modules))
    try:
      read(folder)
      taken.add(kind.rpartition('.')[2])
    except InputError as error:
      assert named_in(str(error), 'modules.json') and kind.rpartition('.')[2] in str(error)
  assert taken == {'Dense', 'Normalize', 'Dropout'}


def test_cosine_is_an_inner_product_of_unit_vectors(tmp_path, caplog):
  write(tmp_path, config_sentence_transformers={'similarity_fn_name': 'cosine'})
  assert read(tmp_path).normalize
  write(tmp_path, config_sentence_transformers={'similarity_fn_name': 'dot'})
  assert not read(tmp_path).normalize
  write(
    tmp_path,
    (OLD + 'Transformer', OLD + 'Pooling', OLD + 'Normalize'),
    config_sentence_transformers={'similarity_fn_name': 'dot'},
  )
  assert read(tmp_path).normalize and not caplog.records
  write(tmp_path, config_sentence_transformers={'similarity_fn_name': None})
  assert not read(tmp_path).normalize
  assert '--normalize=true' in caplog.text


@pytest.mark.parametrize(
  ('old', 'applied'), [(None, True), ({}, False), ({'strip_accents': True}, False)], ids=str
)
def test_old_names_of_arguments_replace_new_ones(tmp_path, old, applied):
  keys = {'processor_kwargs': {'do_lower_case': True}, 'tokenizer_args': old}
  write(tmp_path, sentence_bert_config=keys)
  found = sentence_files.tokenizer_settings(epath.Path(tmp_path)).arguments
  assert found == ({'do_lower_case': True} if applied else old)


def test_a_bare_encoder_has_the_length_of_its_tokenizer(tmp_path):
  (tmp_path / 'tokenizer_config.json').write_text('{"model_max_length": 77}')
  assert read(tmp_path) == same_length(77, 'mean', True)
  (tmp_path / 'config_sentence_transformers.json').write_text('{"similarity_fn_name": "dot"}')
  with refused('config_sentence_transformers.json', 'modules.json'):
    read(tmp_path)


def test_cross_encoder_of_version_6(tmp_path):
  write(
    tmp_path,
    (NEW + 'transformer.Transformer',),
    sentence_bert_config={
      'transformer_task': 'sequence-classification',
      'modality_config': {'text': {'method': 'forward', 'method_output_name': 'logits'}},
      'module_output_name': 'scores',
      'max_seq_length': 99,
    },
    config_sentence_transformers={
      'model_type': 'CrossEncoder',
      'activation_fn': 'torch.nn.modules.activation.Sigmoid',
      'prompts': {},
    },
  )
  assert read(tmp_path) == same_length(length=99)
  model = tmp_path / 'config_sentence_transformers.json'
  model.write_text('{"model_type": "CrossEncoder", "prompts": {"query": "q: "}}')
  with refused('config_sentence_transformers.json'):
    read(tmp_path)


def variant(minilm, folder, files):
  """The folder of MiniLM with changed files, as `make_sentence_golden.py` writes it."""
  weights = 'model.safetensors'  # 90 MB, which no variant changes
  shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns(weights))
  (folder / weights).symlink_to(minilm / weights)
  for name, changes in files.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(changes, list):
      changes = [
        {'idx': i, 'name': str(i), 'path': where, 'type': f'sentence_transformers.{kind}'}
        for i, (where, kind) in enumerate(changes)
      ]
    elif path.exists():
      changes = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(changes))
  return folder


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers(minilm, golden, tmp_path):
  one = make_mesh({'data': 1}, jax.devices()[:1])
  arrays = golden('sentence_files')
  texts = arrays['texts'].tolist()
  for number, (name, files) in enumerate(json.loads(arrays['applied'].item()).items()):
    folder = variant(minilm, tmp_path / str(number), files)
    encoder = Encoder.load(folder, batch_size=4, mesh=one)
    for side in ('query', 'passage'):
      stored = arrays[f'{name}/{side}']
      vectors = encoder.encode(texts, side)[:, : stored.shape[1]]
      scale = np.abs(stored).max()
      np.testing.assert_allclose(vectors, stored, rtol=0, atol=2e-5 * scale, err_msg=name)


@pytest.mark.slow
def test_what_would_give_other_vectors_is_refused(minilm, golden, tmp_path):
  for name, files in json.loads(golden('sentence_files')['refused'].item()).items():
    if name == 'padding_side':  # padding on either side does not change the vector of a text
      continue
    with pytest.raises(InputError) as raised:
      Encoder.load(variant(minilm, tmp_path / name, files))
    assert next(iter(files)).rpartition('/')[2] in str(raised.value), name


@pytest.mark.slow
def test_a_saved_model_keeps_its_tokenizer(minilm, tmp_path):
  cased = {'do_lower_case': True, 'tokenizer_args': {'strip_accents': False}}
  source = variant(minilm, tmp_path / 'source', {'sentence_bert_config.json': cased})
  backbone = hub.load_backbone(source)
  for name, sentence in (('settings', backbone.spec), ('bare', None)):
    model_folders.save_backbone(
      tmp_path / name,
      backbone.config,
      backbone.params,
      source=source,
      spec=sentence,
    )
    kept = load_tokenizer(tmp_path / name)
    assert kept.sha256 == load_tokenizer(source).sha256 != load_tokenizer(minilm).sha256
