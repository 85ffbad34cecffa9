"""Inspection: a small backbone against NumPy, all-MiniLM-L6-v2 against published numbers."""

import math

import jax
import numpy as np
import pytest
import scipy.stats

from dprjax import Retriever
from dprjax.models import artifact, encoder, hub, model_folders, scratch
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import vocabularies
from dprjax.text.qrels import write_dataset
from lab import inspection, sts
from tests.models.test_artifact import META

TOPICS = ('wool', 'iron', 'salt', 'milk')
# One worker makes the shared files.
pytestmark = [pytest.mark.xdist_group('inspection'), pytest.mark.slow]


def sentence(topic, part, point):
  return f'What is known of {topic} in part {part} is point number {point}.'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """A folder with sts.csv, dump.xml and a BEIR data set."""
  folder = tmp_path_factory.mktemp('texts')
  (folder / 'sts.csv').write_text(
    ''.join(
      f'{sentence(topic, 1, i)},{sentence(other, 1 + i % 2, 3)},'
      f'{(5 - 0.5 * (i % 3)) * (topic == other)}\n'
      for topic in TOPICS
      for other in TOPICS[:2]
      for i in range(3)
    )
  )
  pages = ''.join(
    f'<page><title>{topic}</title><ns>0</ns><revision><text>{topic} is a thing.\n'
    + ''.join(
      f'== Part {part} ==\n' + '\n\n'.join(sentence(topic, part, i) for i in range(3)) + '\n'
      for part in range(2)
    )
    + '== See also ==\nThere are more of such things to be seen.</text></revision></page>\n'
    for topic in TOPICS
  )
  (folder / 'dump.xml').write_text(f'<mediawiki>{pages}</mediawiki>')
  corpus = [
    {'_id': f'd{i}', 'title': topic, 'text': sentence(topic, 1, i) if topic else ''}
    for i, topic in enumerate([*TOPICS, ''])
  ]
  queries = [{'_id': f'q{i}', 'text': f'about {topic}'} for i, topic in enumerate(TOPICS)]
  # q1's second positive is not in the corpus, q2's has no text, and q3 has none.
  judged = {'q0': {'d0': 1}, 'q1': {'d1': 2, 'gone': 1}, 'q2': {'d4': 1}, 'q3': {'d3': 0}}
  write_dataset(folder / 'beir', corpus, queries, {'test': judged})
  return folder


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A folder: a backbone, ``deep2``, and a prompt for it."""
  folder = tmp_path_factory.mktemp('backbones')
  tokenizer = vocabularies.train_wordpiece(
    [sentence(topic, 1, 2) + ' about a thing' for topic in TOPICS], 200, folder / 'tokenizer'
  )
  config = EncoderConfig('bert', tokenizer.vocab_size, 32, 2, 4, 64, max_positions=64)
  # Weights far larger than initial ones, so that attention is not even and texts differ.
  params = scratch.init_params(config, jax.random.key(0))
  params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 2 else leaf, params)
  model_folders.save_backbone(folder / 'deep2', config, params, source=folder / 'tokenizer')
  backbone = hub.load_backbone(folder / 'deep2')
  prefix = np.random.default_rng(0).normal(size=(2, 2, 3, 4, 8)).astype(np.float32)
  meta = META | {
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizer.sha256,
    'pooling': 'mean',
    'normalize': False,
    'shift_positions': True,
    'query_max_length': 32,
    'passage_max_length': 48,
  }
  artifact.save_prompt(folder / 'prompt.npz', artifact.Prompt(meta, {'prefix': prefix}))
  return folder


def unit(vectors):
  return vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)


def test_inspect_equals_numpy(data, small):
  texts = inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir')
  retriever = Retriever.load(small / 'deep2', small / 'prompt.npz')
  found = inspection.inspect('deep2', retriever, texts)

  pairs = sts.read_pairs(data / 'sts.csv')
  first, second = (unit(retriever.encode([pair[i] for pair in pairs], 'query')) for i in (0, 1))
  cosines = np.sum(first * second, axis=1)
  assert found.spearman == pytest.approx(
    scipy.stats.spearmanr(cosines, [pair.score for pair in pairs]).statistic
  )

  anchor, positive, negative = (
    unit(retriever.encode([triplet[i] for triplet in texts.triplets], 'query')) for i in range(3)
  )
  assert found.accuracy == np.mean(
    np.sum(anchor * positive, axis=1) > np.sum(anchor * negative, axis=1)
  )

  raw_queries = np.float64(retriever.encode(['about wool', 'about iron'], 'query'))
  raw_passages = np.float64(
    retriever.encode([f'{topic} {sentence(topic, 1, i)}' for i, topic in enumerate(TOPICS)])
  )
  queries, passages = unit(raw_queries), unit(raw_passages)
  for x, y, alignment, uniformity in (
    (queries, passages, found.alignment, found.uniformity),
    (raw_queries, raw_passages, found.raw_alignment, found.raw_uniformity),
  ):
    assert alignment == pytest.approx(np.mean(np.sum((x - y[:2]) ** 2, axis=1)))
    distances = [np.sum((y[i] - y[j]) ** 2) for i in range(4) for j in range(i)]
    assert uniformity == pytest.approx(
      -2 * min(distances) + math.log(np.mean(np.exp(-2 * (np.array(distances) - min(distances)))))
    )

  # The attention of one text at a time, without padding; only two, as each length is compiled.
  backbone, entropies = retriever.encoder.backbones['passage'], []
  loaded = retriever.encoder.entry().prompt
  two = ['about wool', texts.attended[0]]
  for tokens in retriever.encoder.tokenize(two, 'passage'):
    weights = np.asarray(
      encoder.first_token_attention(
        backbone.config,
        jax.tree.map(np.asarray, backbone.params),
        tokens[None],
        np.ones((1, len(tokens)), bool),
        adapter=Prefix(loaded.of_side('passage')['prefix'], shift=3),
      )
    )[:, 0]  # [L, N, S]
    assert weights.shape == (2, 4, len(tokens) + 3)
    entropies.append(-np.sum(weights * np.log(np.maximum(weights, 1e-30)), axis=-1))
  np.testing.assert_allclose(inspection.first_token_entropies(retriever, two), entropies, rtol=1e-4)
  np.testing.assert_array_equal(
    found.entropy, inspection.first_token_entropies(retriever, texts.attended).mean(axis=0)
  )
  assert found.entropy.std() > 0.01


def test_the_command(data, small, tmp_path):
  inspection.main(
    [
      f'--backbone={small}/deep2/',
      f'--backbone=prompted={small}/deep2',
      f'--prompt=prompted={small}/prompt.npz',
      *(f'--sts={data}/sts.csv', f'--wikipedia={data}/dump.xml', f'--beir={data}/beir'),
      '--max_length=32',
      f'--out={tmp_path}/r.md',
      f'--figure={tmp_path}/r.svg',
    ]
  )
  lines = (tmp_path / 'r.md').read_text().splitlines()
  rows = [line.strip('| ').split(' | ') for line in lines[2:4]]
  assert [row[0] for row in rows] == ['deep2', 'prompted']
  assert all(len(row) == 10 and np.isfinite([*map(float, row[1:])]).all() for row in rows)
  assert rows[1][1:] != rows[0][1:]
  by_layer = lines.index('| CLS attention entropy | layer 1 | layer 2 |')
  assert lines[by_layer + 2].startswith('| deep2 |')
  assert (tmp_path / 'r.svg').read_text().count('<g id="axes_') == 4  # raw vectors have their own
