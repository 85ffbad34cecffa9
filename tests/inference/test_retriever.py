import doctest
import pathlib

import numpy as np
import pytest

from dprjax import Retriever, export, load_prompt
from dprjax.base.errors import InputError
from dprjax.inference import retriever
from dprjax.inference.retriever import Settings, resolve_settings
from dprjax.models import artifact, hub

TEXTS = [
  'Decode a JSON document.',
  'Send a message over HTTP.',
  'Parse an XML file into a tree.',
  'Run a coroutine.',
  'json',
  '',
]


@pytest.fixture(scope='session')
def prompt(trained, tmp_path_factory):
  return export.export(trained, tmp_path_factory.mktemp('prompt') / 'prompt.npz')


@pytest.fixture(scope='session')
def small(trained, prompt):
  """The small backbone with its prompt."""
  return Retriever.load(trained / 'backbone', prompt)


def by_hand(retriever, queries, texts, k):
  scores = (
    retriever.encode(queries, 'query').astype(np.float64)
    @ retriever.encode(texts, 'passage').astype(np.float64).T
  )
  order = np.argsort(-scores, axis=1)[:, :k]
  return order, np.take_along_axis(scores, order, axis=1)


def test_search_equals_numpy(small):
  small.index(TEXTS)
  queries = ['read json', 'fetch a page']
  order, scores = by_hand(small, queries, TEXTS, 3)
  for hits, rows, values in zip(small.search(queries, k=3), order, scores, strict=True):
    assert [hit.id for hit in hits] == [str(row) for row in rows]
    assert [hit.text for hit in hits] == [TEXTS[row] for row in rows]
    np.testing.assert_allclose([hit.score for hit in hits], values, atol=1e-5)


def test_more_than_there_is_gives_all(small):
  small.index(TEXTS[:3])
  [hits] = small.search(['json'], k=10)
  assert sorted(hit.id for hit in hits) == ['0', '1', '2']
  assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_ids_come_from_the_mapping_or_the_file(small, tmp_path):
  small.index({'a': 'Decode a JSON document.', 'b': 'Run a coroutine.'})
  mapped = small.search(['json'], k=2)
  path = tmp_path / 'corpus.jsonl'
  path.write_text(
    '{"_id": "a", "title": "Decode a", "text": "JSON document."}\n{"_id": "b", "title": "", '
    '"text": "Run a coroutine."}\n'
  )
  for corpus in (path, str(path)):
    small.index(corpus)
    found = small.search(['json'], k=2)
    assert [(hit.id, hit.text) for hit in found[0]] == [(hit.id, hit.text) for hit in mapped[0]]
  assert {hit.id for hit in found[0]} == {'a', 'b'}
  small.index(text for text in TEXTS[:2])  # any iterable
  assert {hit.id for hit in small.search(['json'])[0]} == {'0', '1'}


def test_what_cannot_be_asked(trained, prompt, small, tmp_path):
  fresh = Retriever.load(trained / 'backbone', prompt)
  with pytest.raises(InputError, match=r'call index\(corpus\) before search'):
    fresh.search(['json'])
  with pytest.raises(InputError, match='the corpus is empty'):
    fresh.index([])
  with pytest.raises(InputError, match=r'not found: .*none\.jsonl'):
    fresh.index(tmp_path / 'none.jsonl')
  with pytest.raises(InputError, match="kind: expected 'query' or 'passage', not 'document'"):
    fresh.encode(['x'], 'document')
  with pytest.raises(InputError, match='not one string'):
    fresh.encode('x')
  with pytest.raises(InputError, match="pooling: expected 'cls' or 'mean', not 'max'"):
    Retriever.load(trained / 'backbone', pooling='max')
  with pytest.raises(InputError, match='query_max_length 513 exceeds the 512 positions'):
    Retriever.load(trained / 'backbone', query_max_length=513)
  with pytest.raises(InputError, match='backbone not found'):
    Retriever.load(tmp_path / 'none')
  with pytest.raises(InputError, match="no package 'no_such_package_here'"):
    Retriever.load('package:no_such_package_here')
  assert fresh.encode([]).shape == (0, 128)


def test_shifted_positions_need_room(trained, prompt, tmp_path):
  loaded = load_prompt(prompt)
  artifact.save_prompt(
    tmp_path / 'shifted.npz',
    artifact.Prompt(loaded.meta | {'shift_positions': True}, loaded.arrays),
  )
  with pytest.raises(InputError, match='passage_max_length 510 exceeds the 508 positions'):
    Retriever.load(trained / 'backbone', tmp_path / 'shifted.npz', passage_max_length=510)


def test_kinds_differ_where_their_settings_do(trained, prompt, tmp_path):
  loaded = load_prompt(prompt)
  path = tmp_path / 'prefixed.npz'
  artifact.save_prompt(
    path,
    artifact.Prompt(
      loaded.meta | {'query_prefix': 'query: ', 'query_max_length': 8}, loaded.arrays
    ),
  )
  prefixed, plain = (
    Retriever.load(trained / 'backbone', path),
    Retriever.load(trained / 'backbone', prompt, query_max_length=8),
  )
  np.testing.assert_allclose(
    prefixed.encode(['json'], 'query'), plain.encode(['query: json'], 'query'), atol=1e-6
  )
  np.testing.assert_array_equal(
    prefixed.encode(['json'], 'passage'), plain.encode(['json'], 'passage')
  )
  prefixed.encode(['a b c d e f g h i j', 'a'], 'query')
  assert prefixed.truncated == {'query': 1, 'passage': 0}


def test_settings_come_from_prompt_then_backbone_then_defaults():
  sentence = hub.SentenceSettings('mean', True, 128, 'q: ', 'p: ')
  assert resolve_settings(hub.SentenceSettings(), None) == Settings(
    'cls', False, 512, 512, '', '', False
  )
  assert resolve_settings(sentence, None) == Settings('mean', True, 128, 128, 'q: ', 'p: ', False)
  meta = {
    'pooling': 'cls',
    'normalize': False,
    'query_max_length': 16,
    'passage_max_length': 32,
    'shift_positions': True,
    'passage_prefix': '',
  }
  prompt = artifact.Prompt(meta, {})
  assert resolve_settings(sentence, prompt) == Settings('cls', False, 16, 32, 'q: ', '', True)
  assert resolve_settings(
    sentence, prompt, pooling='mean', normalize=None, query_max_length=20
  ) == Settings('mean', False, 20, 32, 'q: ', '', True)
  # An override of False is one.
  assert resolve_settings(sentence, None, normalize=False).normalize is False


def test_without_a_prompt_it_is_the_plain_backbone(trained):
  import jax.numpy as jnp

  from dprjax.models import encoder

  plain = Retriever.load(trained / 'backbone')
  some = [TEXTS[0], TEXTS[-1]]
  rows = plain.tokenize(some, 'passage')
  backbone = hub.load_backbone(trained / 'backbone')
  vectors = plain.encode(some)
  for row, vector in zip(rows, vectors, strict=True):
    tokens = jnp.asarray(row, jnp.int32)[None]
    # Each text alone, without padding: the first token's hidden state, as a directory with no
    # settings of its own says.
    expected = encoder.encode(
      backbone.config, backbone.params, tokens, jnp.ones(tokens.shape, bool)
    )[0, 0]
    np.testing.assert_allclose(vector, expected, atol=2e-5)


@pytest.mark.slow
def test_equals_transformers_with_and_without_a_prompt(minilm, tmp_path):
  from dprjax.data import text

  with np.load(pathlib.Path(__file__).parent / 'golden' / 'minilm.npz', allow_pickle=False) as npz:
    golden = dict(npz)
  sentences = golden['sentences'].tolist()
  np.testing.assert_allclose(
    Retriever.load(minilm).encode(sentences), golden['plain/embedding'], rtol=0, atol=2e-6
  )
  backbone = hub.load_backbone(minilm)
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'minilm',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': text.load_tokenizer(backbone.path).sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 1.0,
    'query_max_length': 64,
    'passage_max_length': 64,
    'dprjax_version': '0',
  }
  for case, shift in (('prefix', False), ('shifted', True)):
    path = tmp_path / f'{case}.npz'
    artifact.save_prompt(
      path,
      artifact.Prompt(
        meta | {'shift_positions': shift}, {'prefix': golden['prompt'].astype(np.float32)}
      ),
    )
    vectors = Retriever.load(minilm, path).encode(sentences)
    np.testing.assert_allclose(vectors, golden[f'{case}/embedding'], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_the_docstring_of_retriever(minilm):
  assert minilm.is_dir()  # the package that the example names
  assert doctest.testmod(retriever) == doctest.TestResults(0, 6)
