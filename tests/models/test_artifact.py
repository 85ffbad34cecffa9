import io
import json
import os
import re
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.models.artifact import (
  Prompt,
  check_head,
  check_prompt,
  check_template,
  load_prompt,
  save_prompt,
)
from dprjax.models.encoder_config import EncoderConfig

TOKENIZER = 'b' * 64
CONFIG = EncoderConfig('bert', 50, 24, 2, 3, 40)
META = {
  'format': 'dprjax.prompt',
  'version': 1,
  'kind': 'prefix',
  'backbone': 'tiny',
  'backbone_sha256': 'a' * 64,
  'tokenizer_sha256': 'b' * 64,
  'pooling': 'mean',
  'normalize': True,
  'temperature': 0.05,
  'shift_positions': False,
  'query_max_length': 32,
  'passage_max_length': 128,
  'dprjax_version': '0.1.0',
  'task': 'zwölf Fragen',
}


GAIN = {
  'measure': 'nDCG@10',
  'baseline': 0.5,
  'best': 0.53,
  'difference': 0.03,
  'low': -0.01,
  'high': 0.07,
  'queries': 40,
  'better': True,
  'folds': 0,
}


def prefix(*leading, length=5, seed=0):
  return (
    np.random.default_rng(seed).standard_normal((*leading, 2, 2, length, 3, 8)).astype(np.float32)
  )


@pytest.fixture
def write(tmp_path):
  """Writes an npz without checks; returns its path."""

  def write(arrays=None, *, drop=(), text=None, **change):
    meta = {key: value for key, value in (META | change).items() if key not in drop}
    path = tmp_path / 'prompt.npz'
    np.savez(
      path,
      meta=np.array(json.dumps(meta) if text is None else text),
      **({'prefix': prefix()} if arrays is None else arrays),
    )
    return path

  return write


def test_round_trip(tmp_path):
  path = tmp_path / 'deep' / 'prompt.npz'
  save_prompt(path, Prompt(META, {'prefix': prefix()}))
  prompt = load_prompt(path)
  assert prompt.meta == META and prompt.tied and prompt.path == str(path)
  np.testing.assert_array_equal(prompt.prefix('query'), prefix())
  np.testing.assert_array_equal(prompt.prefix('passage'), prefix())
  # The form that DESIGN promises to others.
  with np.load(path, allow_pickle=False) as npz:
    assert sorted(npz.files) == ['meta', 'prefix'] and npz['prefix'].dtype == np.float32
    assert npz['meta'].shape == () and json.loads(npz['meta'].item()) == META
  first = path.read_bytes()
  save_prompt(path, prompt)
  assert path.read_bytes() == first and list(path.parent.iterdir()) == [path]


def test_untied(tmp_path):
  arrays = {'query/prefix': prefix(length=4, seed=1), 'passage/prefix': prefix(length=6, seed=2)}
  save_prompt(tmp_path / 'p.npz', Prompt(META, arrays))
  prompt = load_prompt(tmp_path / 'p.npz')
  assert not prompt.tied
  for kind in ('query', 'passage'):
    np.testing.assert_array_equal(prompt.prefix(kind), arrays[f'{kind}/prefix'])
  with pytest.raises(InputError, match="expected 'query' or 'passage', not 'title'"):
    prompt.prefix('title')


def test_for_queries_alone(tmp_path):
  path = tmp_path / 'p.npz'
  save_prompt(path, Prompt(META | {'sides': 'query'}, {'query/prefix': prefix()}))
  prompt = load_prompt(path)
  assert prompt.query_only and not prompt.tied
  np.testing.assert_array_equal(prompt.prefix('query'), prefix())
  assert prompt.prefix('passage') is None and prompt.prefixes('passage') == [None]
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  assert not Prompt(META, {'prefix': prefix()}).query_only


@pytest.mark.parametrize(
  'arrays, meta, message',
  [
    (('query/prefix',), {}, 'passage/prefix is missing'),
    (('prefix',), {'sides': 'query'}, 'needs query/prefix; query/prefix is missing'),
    (('query/prefix', 'passage/prefix'), {'sides': 'query'}, 'unexpected arrays .* passage/prefix'),
    (('query/prefix',), {'sides': 'passage'}, "sides is 'passage'; .* has 'both' or 'query'"),
    (('prefix',), {'sides': 1}, 'sides is 1, expected str'),
    (('prefix',), {'sides': 'query', 'kind': 'topic'}, "kind 'topic' has 'both'"),
    (('prefix',), {'matryoshka': 8}, 'matryoshka is 8, expected list'),
    (('prefix',), {'matryoshka': [8, 0]}, 'matryoshka holds 0, expected whole numbers'),
    (('prefix',), {'matryoshka': ['8']}, "matryoshka holds '8', expected whole numbers"),
  ],
)
def test_sides_and_arrays_agree(tmp_path, arrays, meta, message):
  with pytest.raises(InputError, match=message):
    save_prompt(tmp_path / 'p.npz', Prompt(META | meta, dict.fromkeys(arrays, prefix())))


def test_topic_and_template(write):
  topic = load_prompt(
    write(
      {'prefix': prefix(7), 'words': np.array(['a', 'b']), 'counts': np.arange(3)}, kind='topic'
    )
  )
  check_prompt(topic, CONFIG, 'a' * 64, TOKENIZER)
  with pytest.raises(InputError, match="kind 'topic' has no single prefix"):
    topic.prefix('query')


VECTORS = {'segments/query/P1': np.ones((6, 24), np.float32)}
TEMPLATE = {
  'kind': 'template',
  'template': {'query': '[CLS] P1 text [MASK] [SEP]', 'passage': '[CLS] text P2 [MASK] [SEP]'},
  'words': {'passage/P2': 'A passage:'},
  'fixed_layers': 1,
  'pooling': 'mask',
}
PAIR = TEMPLATE | {
  'template': {'pair': '[CLS] first [SEP] second [SEP] P1 [MASK] [SEP]'},
  'words': {'pair/P1': 'Do these two sentences match?'},
  'label_words': ['yes', 'no'],
  'score': 'logit',
  'head_sha256': 'e' * 64,
}


def test_templates(write):
  prompt = load_prompt(write(VECTORS, **TEMPLATE))
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  check_template(prompt, ('query', 'passage'), CONFIG)
  assert prompt.spec == (TEMPLATE['template'], TEMPLATE['words'], {'query/P1': 6})
  np.testing.assert_array_equal(prompt.vectors['query/P1'], VECTORS['segments/query/P1'])
  words = load_prompt(write({}, **PAIR))  # a template of words alone has no arrays
  assert words.spec.lengths == {} and words.vectors == {}
  check_prompt(words, CONFIG, 'a' * 64, TOKENIZER)
  check_template(words, ('pair',), CONFIG)
  check_head(words, 'e' * 64)
  with pytest.raises(InputError, match=f'head with SHA-256 {"e" * 64}, this backbone has one with'):
    check_head(words, 'f' * 64)
  with pytest.raises(InputError, match=r'a prompt of pair; a prompt .* for query and passage is'):
    check_template(words, ('query', 'passage'), CONFIG)
  with pytest.raises(InputError, match="a prompt of kind 'prefix'; a prompt of kind 'template'"):
    check_template(load_prompt(write()), ('pair',), CONFIG)
  deep = load_prompt(write(VECTORS, **TEMPLATE | {'fixed_layers': 3}))
  with pytest.raises(InputError, match='fixed_layers is 3, and this backbone has 2 layers'):
    check_template(deep, ('query', 'passage'), CONFIG)


def _forms(query):
  return TEMPLATE | {'template': TEMPLATE['template'] | {'query': query}}


@pytest.mark.parametrize(
  ('arrays', 'change', 'message'),
  [
    (VECTORS, TEMPLATE | {'template': 'P1 text'}, "meta's template is 'P1 text', expected forms"),
    (VECTORS, TEMPLATE | {'template': {'query': 'text'}}, 'expected forms for query and passage'),
    (VECTORS, _forms(3), "meta's template of a query is 3, expected a text"),
    (VECTORS, _forms('[CLS] P1 text [SEP]'), r'a query: a template has one \[MASK\], and'),
    ({}, TEMPLATE, 'neither words nor an array for segments/query/P1; found: no arrays'),
    ({'prefix': prefix()}, TEMPLATE, 'for segments/query/P1; found: prefix'),
    (VECTORS | {'prefix': prefix()}, TEMPLATE, "arrays in a prompt of kind 'template': prefix"),
    (
      {'segments/query/P1': np.ones((6, 2, 24), np.float32)},
      TEMPLATE,
      r'array segments/query/P1: expected shape \[P, H\], found \[6, 2, 24\]',
    ),
    (VECTORS, TEMPLATE | {'words': {'query/P3': 'x'}}, "words of 'query/P3' are 'x'; expected a"),
    (VECTORS, TEMPLATE | {'words': {'passage/P2': 7}}, "words of 'passage/P2' are 7; expected a"),
    (VECTORS, TEMPLATE | {'fixed_layers': -1}, 'fixed_layers is -1, expected 0 to'),
    (VECTORS, TEMPLATE | {'fixed_layers': True}, 'fixed_layers is True, expected int'),
    (VECTORS, TEMPLATE | {'pooling': 'max'}, "pooling is 'max', expected one of: mask, cls, mean"),
    (VECTORS, TEMPLATE | {'drop': ['words']}, 'meta lacks words; export the prompt again'),
    ({}, PAIR | {'drop': ['head_sha256']}, 'meta lacks head_sha256; export the prompt again'),
    ({}, PAIR | {'pooling': 'mean'}, "pooling is 'mean', expected one of: .*; of a pair mask"),
    ({}, PAIR | {'label_words': ['yes']}, r"label_words are \['yes'\], expected two words"),
    ({}, PAIR | {'score': 'odds'}, "score is 'odds', expected one of: logit, probability"),
  ],
)
def test_bad_templates(write, arrays, change, message):
  with pytest.raises(InputError, match=message):
    load_prompt(write(arrays, **change))


@pytest.mark.parametrize(
  ('arrays', 'change', 'message'),
  [
    (None, {'drop': ['backbone', 'pooling']}, 'meta lacks backbone, pooling'),
    (None, {'text': 'not JSON'}, 'meta: not JSON'),
    (None, {'text': ['{}']}, 'meta is not JSON in a single string'),
    (None, {'text': '[1]'}, 'meta: Expected `object`, got `array`'),
    (None, {'format': 'other'}, "meta's format is 'other', expected 'dprjax.prompt'"),
    (
      None,
      {'version': 2},
      r'version 2 of the prompt format is newer than this dprjax reads \(1\): upgrade dprjax',
    ),
    (None, {'version': '1'}, "meta's version is '1', expected 1"),
    (None, {'kind': 'suffix'}, "meta's kind is 'suffix', expected one of: prefix, topic, template"),
    (None, {'pooling': 'median'}, "meta's pooling: expected one of cls, mean, .*, not 'median'"),
    (None, {'normalize': 'yes'}, "meta's normalize is 'yes', expected bool"),
    (None, {'query_max_length': True}, "meta's query_max_length is True, expected int"),
    (None, {'query_prefix': 3}, "meta's query_prefix is 3, expected str"),
    (
      {},
      {},
      r'needs prefix, or query/prefix and passage/prefix; query/prefix is missing \(found: no '
      r'arrays\)',
    ),
    ({'query/prefix': prefix()}, {}, r'passage/prefix is missing \(found: query/prefix\)'),
    ({'prefix': prefix(), 'extra': prefix()}, {}, 'unexpected arrays .*: extra'),
    ({'prefix': prefix().astype(np.float64)}, {}, 'array prefix: expected float32, found float64'),
    (
      {'prefix': prefix()[0]},
      {},
      r'array prefix: expected shape \[L, 2, P, N, D\], found \[2, 5, 3, 8\]',
    ),
    (
      {'prefix': prefix()[:, :1]},
      {},
      r'array prefix: expected shape \[L, 2, P, N, D\], found \[2, 1, 5, 3, 8\]',
    ),
    ({'prefix': prefix(length=0)}, {}, r'found \[2, 2, 0, 3, 8\]'),
    (
      {'prefix': np.where(np.arange(8) == 0, np.float32(np.nan), prefix())},
      {},
      'array prefix: 60 of its values are not finite',
    ),
    ({'query/prefix': prefix(), 'passage/prefix': prefix()[:1]}, {}, 'may differ in P only'),
    ({'prefix': prefix()}, {'kind': 'topic'}, r'array prefix: expected shape \[K, L, 2, P, N, D\]'),
    (
      {'prefix': prefix(3), 'x': np.array([np.nan])},
      {'kind': 'topic'},
      'array x: holds values that are not finite',
    ),
    ({'words': np.array('a')}, {'kind': 'topic'}, "kind 'topic' needs prefix; prefix is missing"),
  ],
)
def test_bad_content(write, arrays, change, message):
  path = write(arrays, **change)
  with pytest.raises(InputError, match=message) as info:
    load_prompt(path)
  assert str(path) in str(info.value) and '\n' not in str(info.value)


def test_a_gain(write):
  for change in (
    {},
    {'low': None, 'high': None},
    {'best': 0.4, 'difference': -0.1, 'better': False},
  ):
    assert load_prompt(write(gain=GAIN | change)).meta['gain'] == GAIN | change


@pytest.mark.parametrize(
  ('gain', 'message'),
  [
    ([], 'gain is \\[\\], expected dict'),
    ({'best': 1.0}, 'expected an object of measure, baseline'),
    (GAIN | {'more': 1}, 'expected an object of measure, baseline'),
    (GAIN | {'baseline': '1'}, "gain's baseline is '1', expected int or float"),
    (GAIN | {'queries': True}, "gain's queries is True, expected int"),
    (GAIN | {'better': 1}, "gain's better is 1, expected bool"),
    (GAIN | {'low': None}, "gain's low and high are None and 0.07, no interval"),
    (GAIN | {'low': 0.2}, "gain's low and high are 0.2 and 0.07, no interval"),
    (GAIN | {'best': 1e300}, "gain's best is 1e\\+300, no score"),
    (GAIN | {'best': 0.5}, "gain's better is True, with best 0.5"),
    (GAIN | {'queries': -1}, "gain's queries is -1, expected 0 or more"),
  ],
)
def test_a_gain_that_cannot_be(write, gain, message):
  with pytest.raises(InputError, match=message):
    load_prompt(write(gain=gain))


def test_bad_files(write, tmp_path):
  whole = write().read_bytes()
  bad = tmp_path / 'bad.npz'

  def message(content):
    bad.write_bytes(content)
    with pytest.raises(InputError) as info:
      load_prompt(bad)
    assert str(bad) in str(info.value) and '\n' not in str(info.value)
    return str(info.value)

  for cut in (1, 100, len(whole) // 2, len(whole) - 1):
    assert 'cut off, damaged or not an npz file' in message(whole[:cut])
  assert 'cut off, damaged or not an npz file' in message(b'hello, world' * 10)
  # One flipped bit in the data of the prefix.
  at = whole.index(prefix().tobytes()) + 40
  assert re.search(
    'array prefix: cut off, damaged', message(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
  )
  assert 'is empty' in message(b'')
  with pytest.raises(InputError, match='prompt not found'):
    load_prompt(tmp_path / 'absent.npz')
  (tmp_path / 'folder').mkdir()
  with pytest.raises(InputError, match=r'folder holds no prompt\.npz; name a file, or a folder'):
    load_prompt(tmp_path / 'folder')
  np.save(tmp_path / 'array.npy', prefix())
  with pytest.raises(InputError, match='a single array'):
    load_prompt(tmp_path / 'array.npy')
  np.savez(bad, prefix=prefix())
  with pytest.raises(InputError, match='no meta inside'):
    load_prompt(bad)


def test_pickled_objects_are_never_loaded(write):
  class Trap:
    def __reduce__(self):
      return (pytest.fail, ('the prompt file ran code',))

  path = write({'prefix': np.array([Trap()], dtype=object)})
  with pytest.raises(
    InputError, match='array prefix: holds pickled Python objects, which are never loaded'
  ):
    load_prompt(path)


def _npy(shape, dtype='<f4', content=b'', version=(1, 0)):
  header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
  length = struct.pack('<H' if version == (1, 0) else '<I', len(header))
  return b'\x93NUMPY' + bytes(version) + length + header + content


def _rewrite(path, members, **options):
  with zipfile.ZipFile(path, 'w', **options) as archive, warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of names that are there twice
    for name, content in members:
      archive.writestr(name, content)


META_NPY = io.BytesIO()
np.save(META_NPY, np.array(json.dumps(META)))


@pytest.mark.parametrize(
  ('members', 'message'),
  [
    (
      [('prefix.npy', _npy('(1000000, 1000000)'))],
      'array prefix: declares 4,000,000,000,000',
    ),
    ([('prefix.npy', _npy('(1000000, 1000000)', version=(2, 0)))], 'array prefix: declares 4,000'),
    ([('prefix.npy', _npy('(1000000,)', '<U100000'))], 'array prefix: declares 400,000,000,000'),
    ([('prefix.npy', _npy('(-1, 4)'))], ''),
    ([('prefix.npy', _npy('(2, ' * 400 + ')' * 400))], 'array prefix: cut off, damaged'),
    ([('prefix.npy', _npy("'a'"))], 'array prefix: cut off, damaged'),
    ([('prefix.npy', _npy('(1,)', [('a', 'b' * 40)]))], 'array prefix: cut off, damaged'),
    ([('prefix.npy', b'no array')], 'array prefix: cut off, damaged'),
    ([('prefix.npy', b'')], 'array prefix: cut off, damaged'),
    ([('prefix.npy', bytes(50_000_000))], 'declare to hold many times as much'),
    ([('prefix.npy', _npy('(0,)'))] * 2, "'prefix.npy' is in it twice"),
    ([('prefix.npy', _npy('(0,)')), ('prefix', b'x')], 'is in it twice'),
    ([('../../prefix.npy', _npy('(0,)'))], 'prefix'),
  ],
  ids=range(13),
)
def test_a_file_that_declares_what_it_has_not(tmp_path, members, message):
  path = tmp_path / 'p.npz'
  members = [('meta.npy', META_NPY.getvalue()), *members]
  _rewrite(path, members, compression=zipfile.ZIP_DEFLATED)
  tracemalloc.start()
  with pytest.raises(InputError, match=message or 'p.npz') as info:
    load_prompt(path)
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert str(path) in str(info.value) and most < 20_000_000


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'text': '[' * 3000 + ']' * 3000}, 'meta: Expected `object`'),
    ({'text': '{"temperature": NaN}'}, 'meta: not JSON'),
    ({'text': '{"temperature": ' + '1' * 6000 + '}'}, 'meta: Integer value out of range'),
    ({'text': r'{"task": "\ud800"}'}, 'meta: .*surrogate pair'),
    ({'temperature': 0}, "meta's temperature is 0, expected"),
    ({'temperature': -1.5}, "meta's temperature is -1.5, expected"),
    ({'query_max_length': 10**12}, "meta's query_max_length is 1000000000000, expected"),
    ({'passage_max_length': -3}, "meta's passage_max_length is -3, expected"),
    ({'backbone_sha256': {'query': 3}}, "meta's backbone_sha256 holds 3"),
    ({'kind': ['prefix']}, "meta's kind is .'prefix'., expected str"),
    ({'backbone': None}, "meta's backbone is None, expected str"),
  ],
)
def test_a_meta_of_other_types(write, change, message):
  with pytest.raises(InputError, match=message):
    load_prompt(write(None, **change))


def test_a_pipe_is_no_prompt(tmp_path):
  os.mkfifo(tmp_path / 'p.npz')
  with pytest.raises(InputError, match='is a pipe or a device'):
    load_prompt(tmp_path / 'p.npz')


def test_nothing_bad_is_saved(tmp_path):
  path = tmp_path / 'p.npz'
  with pytest.raises(InputError, match='not finite'):
    save_prompt(path, Prompt(META, {'prefix': prefix() * np.float32(np.inf)}))
  with pytest.raises(InputError, match='meta lacks'):
    save_prompt(path, Prompt({'format': 'dprjax.prompt', 'version': 1}, {'prefix': prefix()}))
  assert not list(tmp_path.iterdir())


def test_check_prompt_names_both_sides():
  prompt = Prompt(META, {'prefix': prefix()}, 'p.npz')
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  with pytest.raises(
    InputError,
    match=f'p.npz: was made for backbone tiny with SHA-256 {"a" * 64}, this one has {"c" * 64}',
  ):
    check_prompt(prompt, CONFIG, 'c' * 64, TOKENIZER)
  with pytest.raises(
    InputError, match=f'made with a tokenizer with SHA-256 {"b" * 64}, this one has {"c" * 64}'
  ):
    check_prompt(prompt, CONFIG, 'a' * 64, 'c' * 64)
  other = EncoderConfig('bert', 50, 32, 2, 4, 40)
  with pytest.raises(
    InputError,
    match=re.escape(
      'prefix has shape [2, 2, 5, 3, 8], but as [L, 2, P, N, D] this backbone takes [2, 2, P, 4, 8]'
    ),
  ):
    check_prompt(prompt, other, 'a' * 64, TOKENIZER)
  template = Prompt(META | TEMPLATE, VECTORS)
  with pytest.raises(
    InputError,
    match=re.escape('segments/query/P1 has shape [6, 24], but as [P, H] this backbone takes [P, '),
  ):
    check_prompt(template, other, 'a' * 64, TOKENIZER)


def test_two_encoders():
  prompt = Prompt(
    META | {'backbone_sha256': {'query': 'a' * 64, 'passage': 'c' * 64}}, {'prefix': prefix()}
  )
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  check_prompt(prompt, CONFIG, 'c' * 64, TOKENIZER)
  with pytest.raises(InputError, match='SHA-256'):
    check_prompt(prompt, CONFIG, 'd' * 64, TOKENIZER)
