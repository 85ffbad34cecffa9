"""A tokenizer that was read once is read from the cache, and as it was."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from dprjax.text import tokenizing

TEXTS = ['How do planes fly?', 'naïve café 北京 [MASK]', '']


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The folder of the cache, empty."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'dprjax' / 'tokenizers'


def assert_same(one, other):
  for left, right in zip(one.encode(TEXTS, 12)[0], other.encode(TEXTS, 12)[0], strict=True):
    np.testing.assert_array_equal(left, right)
  for name in ('sha256', 'vocab_size', 'pad_id', 'mask_id', 'opening', 'closing', 'typed'):
    assert getattr(one, name) == getattr(other, name)
  assert one.pair_format == other.pair_format and one.special_ids == other.special_ids
  assert one.backend.to_str() == other.backend.to_str()


def test_without_transformers_in_the_process(minilm, cache):
  tokenizing.load_tokenizer(minilm)
  program = 'import sys; from dprjax.text import tokenizing\n'
  program += 'tokenizing.load_tokenizer(sys.argv[1]); '
  program += 'assert "transformers" not in sys.modules'
  subprocess.run([sys.executable, '-c', program, str(minilm)], check=True)


@pytest.mark.parametrize('name', ['tokenizer.json', 'x.txt'])
def test_a_change_of_any_file_is_seen(minilm, tmp_path, name):
  folder = tmp_path / 'model'
  shutil.copytree(minilm, folder)
  before = tokenizing._key_of(folder)
  assert before == tokenizing._key_of(minilm)
  with (folder / name).open('a') as file:
    file.write(' ')
  assert tokenizing._key_of(folder) != before


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
  'damage',
  [
    lambda data: data[: len(data) // 2],
    lambda data: data.replace(b'"pad_id": 0', b'"pad_id": 7'),
  ],
)
def test_a_damaged_file_is_made_again(minilm, cache, damage):
  first = tokenizing.load_tokenizer(minilm)
  [path] = cache.iterdir()
  sound = path.read_bytes()
  assert damage(sound) != sound
  path.write_bytes(damage(sound))
  assert_same(tokenizing.load_tokenizer(minilm), first)
  assert path.read_bytes() == sound


def test_a_cache_that_cannot_be_written_costs_nothing_else(minilm, tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  assert tokenizing.load_tokenizer(minilm).vocab_size == 30522
