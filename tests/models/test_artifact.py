import json

import numpy as np
import pytest

from dprjax.models.artifact import Prompt, check_prompt, load_prompt, save_prompt
from dprjax.models.encoder_config import EncoderConfig
from tests.refusals import refused

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
  np.testing.assert_array_equal(prompt.of_side('query')['prefix'], prefix())
  np.testing.assert_array_equal(prompt.of_side('passage')['prefix'], prefix())
  # The form that DESIGN promises to others.
  with np.load(path, allow_pickle=False) as npz:
    assert sorted(npz.files) == ['meta', 'prefix'] and npz['prefix'].dtype == np.float32
    assert npz['meta'].shape == () and json.loads(npz['meta'].item()) == META
  first = path.read_bytes()
  save_prompt(path, prompt)
  assert path.read_bytes() == first and list(path.parent.iterdir()) == [path]


def test_for_queries_alone(tmp_path):
  path = tmp_path / 'p.npz'
  save_prompt(path, Prompt(META | {'sides': 'query'}, {'query/prefix': prefix()}))
  prompt = load_prompt(path)
  assert prompt.query_only and not prompt.tied
  np.testing.assert_array_equal(prompt.of_side('query')['prefix'], prefix())
  assert prompt.of_side('passage') == {} and prompt.adapters('passage') == [None]
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  assert not Prompt(META, {'prefix': prefix()}).query_only


@pytest.mark.parametrize(
  'arrays, meta, message',
  [
    (('query/prefix',), {}, 'passage/prefix'),
    (('query/prefix', 'passage/prefix'), {'sides': 'query'}, 'passage/prefix'),
  ],
)
def test_sides_and_arrays_agree(tmp_path, arrays, meta, message):
  with refused(message):
    save_prompt(tmp_path / 'p.npz', Prompt(META | meta, dict.fromkeys(arrays, prefix())))


@pytest.mark.parametrize(
  ('arrays', 'change', 'message'),
  [
    (None, {'text': 'not JSON'}, 'meta: not JSON'),
    (
      None,
      {'version': 2},
      ('prompt.npz', '2', '1'),
    ),
    (None, {'kind': 'suffix'}, 'suffix'),
    (
      {},
      {},
      ('prompt.npz', 'prefix'),
    ),
    ({'query/prefix': prefix()}, {}, 'passage/prefix'),
    ({'prefix': prefix().astype(np.float64)}, {}, ('float32', 'float64')),
    (
      {'prefix': prefix()[:, :1]},
      {},
      ('[L, 2, P, N, D]', '[2, 1, 5, 3, 8]'),
    ),
    ({'prefix': prefix(3), 'x': np.array([np.nan])}, {'kind': 'topic'}, 'prompt.npz'),
    ({'words': np.array('a')}, {'kind': 'topic'}, 'topic'),
  ],
)
def test_bad_content(write, arrays, change, message):
  path = write(arrays, **change)
  with refused(message) as info:
    load_prompt(path)
  assert str(path) in str(info.value) and '\n' not in str(info.value)


def test_bad_files(write, tmp_path):
  whole = write().read_bytes()
  bad = tmp_path / 'bad.npz'

  def check(content, *names):
    bad.write_bytes(content)
    with refused(bad, *names):
      load_prompt(bad)

  for cut in (1, 100, len(whole) // 2, len(whole) - 1):
    check(whole[:cut])
  # One flipped bit in the data of the prefix.
  at = whole.index(prefix().tobytes()) + 40
  check(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], 'prefix')
  with refused('absent.npz'):
    load_prompt(tmp_path / 'absent.npz')
  (tmp_path / 'folder').mkdir()
  with refused('prompt.npz'):
    load_prompt(tmp_path / 'folder')
  np.savez(bad, prefix=prefix())
  with refused('bad.npz'):
    load_prompt(bad)


def test_nothing_bad_is_saved(tmp_path):
  path = tmp_path / 'p.npz'
  with refused('p.npz'):
    save_prompt(path, Prompt(META, {'prefix': prefix() * np.float32(np.inf)}))
  with refused('p.npz', 'kind'):
    save_prompt(path, Prompt({'format': 'dprjax.prompt', 'version': 1}, {'prefix': prefix()}))
  assert not list(tmp_path.iterdir())


def test_check_prompt_names_both_sides():
  prompt = Prompt(META, {'prefix': prefix()}, 'p.npz')
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  with refused('p.npz', 'a' * 64, 'c' * 64):
    check_prompt(prompt, CONFIG, 'c' * 64, TOKENIZER)
  with refused('b' * 64, 'c' * 64):
    check_prompt(prompt, CONFIG, 'a' * 64, 'c' * 64)
  other = EncoderConfig('bert', 50, 32, 2, 4, 40)
  with refused('[2, 2, 5, 3, 8]', '[L, 2, P, N, D]', '[2, 2, P, 4, 8]'):
    check_prompt(prompt, other, 'a' * 64, TOKENIZER)


def test_two_encoders():
  prompt = Prompt(
    META | {'backbone_sha256': {'query': 'a' * 64, 'passage': 'c' * 64}}, {'prefix': prefix()}
  )
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  check_prompt(prompt, CONFIG, 'c' * 64, TOKENIZER)
  with refused('query', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'):
    check_prompt(prompt, CONFIG, 'd' * 64, TOKENIZER)


def test_pickled_objects_are_never_loaded(write):
  class Trap:
    def __reduce__(self):
      return (pytest.fail, ('the prompt file ran code',))

  path = write({'prefix': np.array([Trap()], dtype=object)})
  with refused('prompt.npz'):
    load_prompt(path)
