"""The score of a pair does not depend on the other pairs."""

import json
import shutil

import jax
import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from dprjax import CrossEncoder
from dprjax.base import mesh
from dprjax.models import hub, model_folders
from dprjax.models.head_specs import Head
from dprjax.retrieval import reranker
from dprjax.text import tokenizing
from tests import reference
from tests.refusals import refused

WORDS = [
  'json',
  'decodes',
  'a',
  'string',
  'into',
  'objects',
  'an',
  'http',
  'server',
  'sends',
  'message',
  'parse',
  'the',
  'xml',
  'tree',
]
QUERIES = ['json', 'an http server', 'parse the xml tree into objects', '']
PAIRS = [(QUERIES[i % 4], ' '.join(WORDS[i % 7 : i % 7 + 1 + i % 9])) for i in range(30)]
NEAR = {'rtol': 0, 'atol': 5e-5}


def alone(path, pairs, max_length=16):
  """Each pair by itself, without padding, in float64."""
  loaded, tokenizer = hub.load_backbone(path, ('classifier',)), tokenizing.load_tokenizer(path)
  params, head = jax.tree.map(
    lambda leaf: leaf.astype(np.float64), (loaded.params, loaded.heads['classifier'].params)
  )
  scores = []
  for query, passage in pairs:
    ids = tokenizer.encode_bare([query, passage])
    row = reference.pair_row(tokenizer.pair_format, ids[query], ids[passage], max_length)
    scores.append(reference.pair_score(loaded.config, params, head, *row))
  return np.array(scores)


def test_scores_are_those_of_each_pair_alone(small_cross_encoder, make_cross_encoder):
  small, counts = small_cross_encoder, []
  scores = small.score(PAIRS, counts.append)
  assert (
    scores.dtype == np.float32 and scores.shape == (30,) and small.max_length == 16
  )  # as in the files of its tokenizer
  assert scores.std() > 0.05
  np.testing.assert_allclose(scores, alone(make_cross_encoder(), PAIRS), **NEAR)
  assert counts == sorted(counts) and counts[-1] == 30
  # The order of query and passage matters.
  assert (
    abs(small.score([('json', 'the xml tree')]) - small.score([('the xml tree', 'json')])) > 1e-3
  )
  assert small.score([]).shape == (0,)


@pytest.mark.slow
def test_pairs_of_columns_and_what_is_no_pair(small_cross_encoder):
  queries, passages = ['json', 'run'], ['Decode a JSON document.', 'Run a coroutine.']
  expected = small_cross_encoder.score(list(zip(queries, passages, strict=True)))
  for pairs in (
    zip(queries, pa.array(passages).to_pylist(), strict=True),
    np.array([queries, passages]).T,
    [list(pair) for pair in zip(queries, passages, strict=True)],
  ):
    np.testing.assert_array_equal(small_cross_encoder.score(pairs), expected)
  for bad in (
    *('json', 5, {'json': 'x'}, ['json'], [('a', None)]),
    *([('a', float('nan'))], [(b'a', 'b')], [('a', 5)], pa.table({'query': queries})),
  ):
    with refused('pairs'):
      small_cross_encoder.score(bad)


@pytest.mark.slow
def test_one_device_and_eight_give_the_same(small_cross_encoder):
  small = small_cross_encoder
  one = CrossEncoder(
    small.backbone, small.tokenizer, 16, mesh=mesh.make_mesh({'data': -1}, jax.local_devices()[:1])
  )
  np.testing.assert_allclose(one.score(PAIRS), small.score(PAIRS), **NEAR)
  rough = CrossEncoder(small.backbone, small.tokenizer, 16, dtype='bfloat16')
  assert 0 < np.abs(rough.score(PAIRS) - small.score(PAIRS)).mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize('labels', [1, 2])
def test_pairs_of_several_lengths(make_cross_encoder, labels):
  path = make_cross_encoder(labels)
  model = CrossEncoder.load(path, max_length=40)
  assert model.labels == labels
  np.testing.assert_allclose(model.score(PAIRS), alone(path, PAIRS, 40), **NEAR)
  assert model.truncated == 0


def test_long_pairs_are_cut_and_counted(small_cross_encoder, make_cross_encoder):
  before = small_cross_encoder.truncated
  long = ('json string', 'an http server sends a message ' * 5)
  scores = small_cross_encoder.score([long, ('json', 'xml')])
  assert small_cross_encoder.truncated == before + 1
  np.testing.assert_allclose(scores[:1], alone(make_cross_encoder(), [long]), **NEAR)


def test_sha256_names_model_and_head(small_cross_encoder, make_cross_encoder, tmp_path):
  small = small_cross_encoder
  again = CrossEncoder.load(make_cross_encoder())
  assert again.sha256 == small.sha256
  head = jax.tree.map(lambda leaf: leaf * 2, small.backbone.heads['classifier'].params)
  model_folders.save_backbone(
    tmp_path / 'other',
    small.backbone.config,
    small.backbone.params,
    source=small.backbone.path,
    heads={'classifier': Head(head)},
  )
  (tmp_path / 'other' / 'tokenizer_config.json').write_text('{"tokenizer_class": "BertTokenizer"}')
  other = CrossEncoder.load(tmp_path / 'other')
  assert (
    other.sha256 != small.sha256 and other.max_length == 48
  )  # no maximum is named: as many as there are positions


def edited(path, to, **tensors):
  shutil.copytree(path, to)
  stored = safetensors.numpy.load_file(to / 'model.safetensors') | tensors
  safetensors.numpy.save_file(
    {name: value for name, value in stored.items() if value is not None},
    to / 'model.safetensors',
    {'format': 'pt'},
  )
  return to


@pytest.mark.parametrize(('name', 'value'), [('max_length', 0), ('batch_size', 2.5)])
def test_sizes_are_whole_numbers_from_1(make_cross_encoder, name, value):
  with refused(name, f'{value!r}'):
    CrossEncoder.load(make_cross_encoder(), **{name: value})


def test_models_that_are_not_cross_encoders(make_cross_encoder, tmp_path):
  path = make_cross_encoder()
  reranker.check(path)
  plain = edited(path, tmp_path / 'plain', **{'classifier.weight': None, 'classifier.bias': None})
  for use in (CrossEncoder.load, reranker.check):
    with refused('plain', 'dprjax.train'):
      use(plain)
  three = edited(
    path,
    tmp_path / 'three',
    **{
      'classifier.weight': np.zeros((3, 16), np.float32),
      'classifier.bias': np.zeros(3, np.float32),
    },
  )
  for use in (CrossEncoder.load, reranker.check):
    with refused('three', '3'):
      use(three)
  with refused('max_length', '49', '48'):
    CrossEncoder.load(path, max_length=49)
  shutil.copytree(path, tmp_path / 'words')
  value = json.loads((tmp_path / 'words' / 'tokenizer.json').read_text())
  size = len(value['model']['vocab'])
  value['model']['vocab'] |= {'##zzz': size}
  (tmp_path / 'words' / 'tokenizer.json').write_text(json.dumps(value))
  with refused(size + 1, size):
    CrossEncoder.load(tmp_path / 'words')
