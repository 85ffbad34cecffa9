"""The encoder that a training has to beat: the one that people run without a prompt."""

import json
import math

import jax
import numpy as np
import pytest
from etils import epath

from dprjax.base import provenance
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import hub, model_folders, scratch
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import tokenizing, vocabularies
from dprjax.text.vector_spec import same_length
from dprjax.training import baseline, dev_ranking, train
from dprjax.training import retrieval_data as retrieval
from dprjax.training import workdir as workdirs
from tests import beir
from tests.options import with_options
from tests.training.conftest import WORDS

LONGEST = 24


@pytest.fixture(scope='module')
def backbone(tmp_path_factory):
  """A random encoder whose folder says mean, unit length, 24 tokens and a text before queries."""
  folder = tmp_path_factory.mktemp('backbone')
  made = vocabularies.train_wordpiece(
    [f'{one} {other}.' for one in WORDS for other in WORDS], 200, folder / 'words'
  )
  model = EncoderConfig('bert', made.vocab_size, 8, 2, 2, 16, max_positions=32)
  sentence = same_length(LONGEST, 'mean', True, query_prefix='oak ')
  params = scratch.init_params(model, jax.random.key(3))
  model_folders.save_backbone(
    folder / 'model', model, params, source=folder / 'words', spec=sentence
  )
  return folder / 'model'


@pytest.fixture
def folder(tmp_path):
  """Texts of 5 to 30 words: a query has the first words of its passage, in another order."""
  rng = np.random.default_rng(0)
  passages = {f'd{i}': rng.choice(WORDS, rng.integers(5, 31)).tolist() for i in range(40)}
  queries = {f'q{i}': rng.permutation(passages[f'd{i}']).tolist() for i in range(20)}
  texts = ({id_: ' '.join(words) for id_, words in some.items()} for some in (passages, queries))
  train, dev = ({f'q{i}': [f'd{i}'] for i in some} for some in (range(10), range(10, 20)))
  return beir.write(tmp_path / 'beir', *texts, train=train, dev=dev)


@pytest.fixture
def start(folder, backbone, tmp_path, devices):
  """``start(option=value)`` -> the data of a training on the folder."""

  def run(workdir='run', **changes):
    config = with_options(
      **{
        'backbone__path': str(backbone),
        'data__dir': str(folder),
        'data__format': 'beir',
        'data__dev_split': 'dev',
        'data__query_max_length': 6,
        'data__passage_max_length': 8,
        'batch_size': 4,
        'negatives': 0,
      }
      | changes
    )
    found = retrieval.find_splits(config.data, config, epath.Path(tmp_path / workdir), devices)
    loaded = hub.load_backbone(str(backbone))
    return found.open(tokenizing.load_tokenizer(str(backbone)), loaded.config)

  return run


def as_encode_runs_it(backbone, folder, **lengths):
  """nDCG@10 of the dev queries, by `Encoder.load`; one passage is relevant."""
  texts = {
    side: {
      record['_id']: record['text']
      for record in map(json.loads, (folder / f'{file}.jsonl').read_text().splitlines())
    }
    for side, file in (('query', 'queries'), ('passage', 'corpus'))
  }
  encoder = Encoder.load(backbone, **lengths)
  queries = encoder.encode([texts['query'][f'q{i}'] for i in range(10, 20)], 'query')
  passages = encoder.encode(list(texts['passage'].values()), 'passage')
  ranks = [
    int((scores > scores[10 + number]).sum()) + 1
    for number, scores in enumerate(queries @ passages.T)
  ]
  return float(np.mean([1 / math.log2(rank + 1) if rank <= 10 else 0.0 for rank in ranks]))


@pytest.mark.slow
def test_a_prompt_for_queries_has_the_baseline_that_encode_gives(start, backbone, folder):
  changes = {
    'prompt__sides': 'query',
    'prompt__length': 2,
    'pooling': 'mean',
    'normalize': True,
    'data__passage_max_length': LONGEST,  # then the passages are those of the training
  }
  expected = as_encode_runs_it(backbone, folder)
  assert 0.1 < expected < 0.9
  found = start(**changes).frozen()
  assert found.means['nDCG@10'] == pytest.approx(expected, abs=1e-6)
  assert found.values[''].mean() == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_a_training_that_cuts_texts_has_a_second_baseline(folder, backbone, tmp_path, caplog):
  def run(**changes):
    options = {
      **{'backbone__path': str(backbone), 'data__dir': str(folder), 'data__format': 'beir'},
      **{'data__dev_split': 'dev', 'data__query_max_length': 6, 'data__passage_max_length': 8},
      **{'pooling': 'mean', 'normalize': True, 'data__query_prefix': 'oak ', 'steps': 2},
      **{'prompt__length': 2, 'trainable': ('prompt/.*',), 'batch_size': 4, 'negatives': 0},
    }
    workdir = epath.Path(tmp_path / f'run-{len(changes)}')
    with caplog.at_level('INFO', 'dprjax'):
      result = train.train(with_options(**options | changes), workdir)
    return result, workdir

  result, workdir = run()
  first = baseline.read(workdir).means['nDCG@10']
  second = baseline.read(workdir / workdirs.SHORTER).means['nDCG@10']
  assert first == pytest.approx(as_encode_runs_it(backbone, folder), abs=1e-6)
  lengths = {'query_max_length': 6, 'passage_max_length': 8}
  assert second == pytest.approx(as_encode_runs_it(backbone, folder, **lengths), abs=1e-6)
  assert abs(first - second) > 1e-3
  gain = f'{result.best - second:+.4f}'
  (last,) = (line for line in caplog.messages if line.startswith('done at step 2'))
  assert f'on {second:.4f} of the encoder with equal lengths' in last and gain in last
  assert f'against {first:.4f} before' in last  # the verdict

  # As the first and only one.
  result, workdir = run(eval__baseline='equal')
  assert baseline.read(workdir).means['nDCG@10'] == pytest.approx(second, abs=1e-6)
  assert not (workdir / workdirs.SHORTER).exists()


@pytest.mark.slow
def test_folds_and_alternatives_share_the_vectors(backbone, tmp_path):
  run = epath.Path(tmp_path / 'run')
  below = run / 'alternatives' / 'both' / 'folds' / '2'
  below.mkdir(parents=True)
  for folder in (run, run / 'alternatives' / 'both'):
    provenance.write_mark(folder, workdirs.TRAINING)
  config = with_options(backbone__path=str(backbone))
  tokenizer = tokenizing.load_tokenizer(str(backbone))
  made = np.eye(3, 8, dtype=np.float32)
  first = dev_ranking.Frozen(config, run, tokenizer)
  np.testing.assert_array_equal(first.vectors('passage', ['oak', 'elm', 'fir'], made), made)
  again = dev_ranking.Frozen(config, below, tokenizer).vectors('passage', ['fir', 'ash', 'oak'])
  np.testing.assert_array_equal(again[[0, 2]], made[[2, 0]])
  own = Encoder.load(backbone).encode(['ash'], 'passage')
  np.testing.assert_allclose(again[1:2], own, atol=1e-6)
  # Other arithmetic gives other vectors: they are made anew.
  config.backbone.dtype = 'bfloat16'
  other = dev_ranking.Frozen(config, below, tokenizer).vectors('passage', ['fir'])
  assert np.abs(other - made[2]).max() > 0.01


def test_a_workdir_in_a_folder_called_folds_is_its_own(tmp_path):
  run = epath.Path(tmp_path / 'folds' / 'run')
  assert workdirs.top(run) == run
