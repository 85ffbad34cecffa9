"""A cross-encoder by the commands: train, resume, export, score, continue from the export."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from dprjax import CrossEncoder, bm25, export, train
from dprjax.base import tree
from dprjax.models import hub
from dprjax.retrieval import measures
from dprjax.text import sources, token_cache, trec
from dprjax.training import cross_encoder
from tests.workdirs import (
  assert_backbone_moved,
  assert_goes_on,
  assert_same_bits,
  files_of,
  metrics_of,
  trainable_of,
)

ROOT = pathlib.Path(__file__).parent.parent
# In one worker, which makes the first run for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('cross_encoder')]
OWN = [
  *('--config.cross_encoder.loss=pointwise', '--config.cross_encoder.labels=2'),
  *('--config.grad_cache=2', '--config.backbone.dropout=0.2', '--config.batch_size=8'),
  *('--config.distillation.loss=kl', '--config.distillation.weight=0.5'),
  '--config.optim.learning_rate=1e-3',
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Of the token cache and a workdir."""
  return tmp_path_factory.mktemp('cross_encoder')


@pytest.fixture(scope='module')
def usual(reuse, word_scores, folder):
  """Flags of every training."""
  given = [f'--config.data.token_cache={folder}/token_cache']
  return [*reuse, *given, *OWN, f'--config.distillation.scores={word_scores}']


@pytest.fixture(scope='module')
def first_run(one_device, usual, folder):
  """The workdir of a whole run."""
  config = f'--config={ROOT}/configs/cross_encoder.py:local'
  train.main([config, f'--workdir={folder}/run', *usual])
  return folder / 'run'


@pytest.fixture
def go(command, first_run, usual, tmp_path):
  """``go(*flags, workdir='run')`` -> (exit status, standard error), likewise; flags come last and
  so override.
  """

  def run(*flags, workdir='run'):
    config = f'--config={ROOT}/configs/cross_encoder.py:local'
    return command(train, config, f'--workdir={tmp_path / workdir}', *usual, *flags)

  return run


@pytest.fixture(scope='module')
def word_scores(trained, tmp_path_factory):
  """The BM25 run of the training queries."""
  out, data = tmp_path_factory.mktemp('word_scores') / 'bm25.trec', trained / 'data'
  texts = [f'--corpus={data}/corpus.jsonl', f'--queries={data}/queries.jsonl']
  bm25.main([*texts, f'--qrels={data}/qrels/train.tsv', f'--out={out}'])
  return out


def test_trains_and_resumes_bit_for_bit(go, trained, first_run, tmp_path):
  before, run = files_of(trained / 'backbone'), tmp_path / 'run'
  shutil.copytree(first_run, run)
  step, trainable = trainable_of(run)
  assert step == 12 and {name.split('/')[0] for name in trainable} == {'backbone', 'head'}
  assert trainable['head/classifier/output/kernel'].shape == (128, 2)
  assert_backbone_moved(trainable, trained / 'backbone')
  rows = metrics_of(run)
  assert [row['step'] for row in rows if 'loss' in row] == [2, 4, 6, 8, 10, 12]
  assert all('distillation' in row for row in rows if 'loss' in row)
  assert [row['step'] for row in rows if 'dev/RR@10' in row and 'dev/nDCG@10' in row] == [0, 6, 12]

  log = assert_goes_on(run, go)
  assert 'random passages replace' in log  # docstrings have no mined negatives, and the run says so
  assert files_of(trained / 'backbone') == before


def test_exported_scored_and_trained_on(go, command, trained, first_run, tmp_path):
  out = tmp_path / 'model'
  status, err = command(export, '--force', f'--workdir={first_run}', f'--out={out}', '--step=12')
  assert status == 0, err
  trainable = trainable_of(first_run)[1]
  loaded = hub.load_backbone(out, ('classifier',))
  head = {'classifier': loaded.heads['classifier'].params}
  assert_same_bits(tree.flatten({'backbone': loaded.params, 'head': head}), trainable)
  assert loaded.hf_config['architectures'] == ['BertForSequenceClassification']
  assert not (out / 'modules.json').exists()
  model = CrossEncoder.load(out)
  # Texts of 16 and 32 tokens, with one special token less between them.
  assert model.max_length == 47 and model.labels == 2

  # Measures on the way equal those of the exported model on the same candidates.
  tokens = token_cache.open_cache(first_run.parent / 'token_cache' / 'dev_candidates')
  queries = np.arange(tokens.num_queries)
  source = sources.Source(str(trained / 'data'), 'beir', 'dev')
  dataset = sources.load_dataset(source)
  texts, passages = (
    {query.id: query.text for query in dataset.queries},
    {passage.id: passage.text for passage in dataset.passages},
  )
  chosen = cross_encoder.candidates(tokens, queries, 5, 42)
  run = {}
  for query, rows in zip(tokens.query_ids(queries), chosen, strict=True):
    ids = tokens.passage_ids(rows)
    # The cache cuts texts before they are paired, at 16 and 32 tokens; here the pair is put
    # together of such texts.
    pairs = [(cut(model, texts[query], 16), cut(model, passages[id_], 32)) for id_ in ids]
    run[query] = dict(zip(ids, model.score(pairs).tolist(), strict=True))
  records = tokens.query_rows(queries)
  qrels = {
    query: dict.fromkeys(tokens.passage_ids(row.relevant), 1)
    for query, row in zip(run, records, strict=True)
  }
  expected = measures.measure(trec.run_from_dict(run), qrels, ['nDCG@10', 'RR@10'])['mean']
  said = next(row for row in metrics_of(first_run) if row['step'] == 12 and 'dev/RR@10' in row)
  for name, value in expected.items():
    assert said[f'dev/{name}'] == pytest.approx(value, abs=1e-6)

  # On from there, only the head.
  status, err = go(
    f'--config.backbone.path={out}', "--config.trainable=('head/.*',)", workdir='more'
  )
  assert status == 0, err
  more = trainable_of(tmp_path / 'more')[1]
  assert more.keys() == {name for name in trainable if name.startswith('head/')}
  flags = ('--force', f'--workdir={tmp_path}/more', f'--out={tmp_path}/tuned', '--step=12')
  assert command(export, *flags)[0] == 0
  tuned = hub.load_backbone(tmp_path / 'tuned', ('classifier',))
  assert tuned.sha256 == loaded.sha256
  assert_same_bits(tree.flatten({'head': {'classifier': tuned.heads['classifier'].params}}), more)
  assert all((leaf != trainable[name]).any() for name, leaf in more.items())


def cut(model, text, length):
  """The text that a cache of this length keeps, as text: words of this vocabulary can be put
  together again.
  """
  backend = model.tokenizer.backend
  encoding = backend.encode(text, add_special_tokens=False)
  offsets = encoding.offsets[: length - 2]
  return text[: offsets[-1][1]] if offsets and len(encoding.ids) > length - 2 else text


def test_mined_negatives_are_used(go, trained, tmp_path):
  # Two of each query's own, on all queries: nothing is random, and those of held-out queries are
  # its candidates.
  lines = (trained / 'data' / 'queries.jsonl').read_text().splitlines()
  corpus = [
    json.loads(line)['_id'] for line in (trained / 'data' / 'corpus.jsonl').read_text().splitlines()
  ]
  with (tmp_path / 'mined.jsonl').open('w') as file:
    for i, line in enumerate(lines):
      names = [{'docid': corpus[(7 * i + j) % len(corpus)]} for j in range(6)]
      file.write(
        json.dumps({'query_id': json.loads(line)['_id'], 'negative_passages': names}) + '\n'
      )
  status, err = go(
    f'--config.data.mined_negatives={tmp_path}/mined.jsonl',
    '--config.data.dev_split=',
    '--config.data.hold_out=0.2',
    f'--config.data.token_cache={tmp_path}/token_cache',
    '--config.steps=1',
  )
  assert status == 0 and 'stand in' not in err, err
  tokens = token_cache.open_cache(tmp_path / 'token_cache' / 'dev_candidates')
  assert (tokens.negative_counts >= 5).all()
  for row, chosen in zip(
    tokens.query_rows(np.arange(4)),
    cross_encoder.candidates(tokens, np.arange(4), 5, 0),
    strict=True,
  ):
    assert chosen.tolist() == [*row.relevant, *row.negatives[:5]]


def test_candidates_without_negatives_are_random_and_not_relevant(first_run):
  tokens = token_cache.open_cache(first_run.parent / 'token_cache' / 'dev_candidates')
  queries = np.arange(tokens.num_queries)
  chosen = cross_encoder.candidates(tokens, queries, 20, 1)
  for row, rows in zip(tokens.query_rows(queries), chosen, strict=True):
    assert rows[: len(row.relevant)].tolist() == row.relevant.tolist()
    others = rows[len(row.relevant) :].tolist()
    assert len(set(others)) == len(others) == 20 and not set(others) & set(row.relevant.tolist())
  again, other = (cross_encoder.candidates(tokens, queries, 20, seed) for seed in (1, 2))
  np.testing.assert_array_equal(np.concatenate(chosen), np.concatenate(again))
  assert any(set(a) != set(b) for a, b in zip(chosen, other, strict=True))
