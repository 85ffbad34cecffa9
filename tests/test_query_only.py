"""A prompt for queries only, from the training command to the search."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from etils import epath

from dprjax import Retriever, encode, load_prompt, search, train
from dprjax.base import mesh
from dprjax.base.files import sha256_file
from dprjax.encoding import embeddings
from dprjax.encoding.text_encoder import Encoder
from dprjax.exports import exporting
from dprjax.losses import contrastive
from dprjax.models import hub
from dprjax.text import token_cache, tokenizing
from dprjax.text.texts import read_texts
from dprjax.text.trec import read_run
from dprjax.training import config as configs
from dprjax.training import dpr
from tests import devices
from tests.refusals import command_refused, refused
from tests.workdirs import (
  assert_goes_on,
  assert_same_bits,
  files_of,
  metrics_of,
  trainable_of,
)

ROOT = pathlib.Path(__file__).parent.parent
# One worker makes the shared files, which takes a training.
pytestmark = [pytest.mark.xdist_group('query_only'), pytest.mark.slow]


@pytest.fixture(scope='module')
def flags(reuse):
  return [f'--config={ROOT}/configs/dptdr.py:local,query', *reuse]


@pytest.fixture(scope='module')
def folder(flags, trained, tmp_path_factory):
  """``run``, a workdir with 64 negatives of the corpus for each update, and ``query.npz``."""
  folder = tmp_path_factory.mktemp('query_only')
  with devices.one():
    train.main([*flags, f'--workdir={folder}/run', '--config.corpus_negatives=64'])
  exporting.export(folder / 'run', folder / 'query.npz', force=True)
  return folder


@pytest.fixture
def go(command, flags):
  """``go(workdir, *flags)`` -> (exit status, standard error)."""

  def run(workdir, *more):
    with devices.one():
      return command(train, *flags, f'--workdir={workdir}', *more)

  return run


def test_the_prompt_alone_is_trained(folder, trained):
  step, trainable = trainable_of(folder / 'run')
  assert step == 12 and list(trainable) == ['prompt/query/prefix']
  assert (trainable_of(folder / 'run', 8)[1]['prompt/query/prefix'] != trainable.popitem()[1]).any()
  rows = [row for row in metrics_of(folder / 'run') if 'loss' in row]
  # 16 rows of one positive each, and the sample; relevant ones may be among them.
  assert all(70 < row['negatives'] <= 15 + 64 for row in rows)
  prompt = load_prompt(folder / 'query.npz')
  assert list(prompt.arrays) == ['query/prefix'] and prompt.meta['sides'] == 'query'


def test_a_resumed_run_ends_with_the_same_bits(folder, go, tmp_path):
  shutil.copytree(folder / 'run', tmp_path / 'run')
  before = files_of(tmp_path / 'run' / 'passages')
  run = tmp_path / 'run'
  log = assert_goes_on(run, lambda: go(run, '--config.corpus_negatives=64'))
  assert 'texts already there' in log
  assert files_of(tmp_path / 'run' / 'passages') == before


def encode_queries(command, trained, prompt, out):
  paths = [f'--backbone={trained}/backbone', f'--prompt={prompt}', f'--out={out}', '--side=query']
  data = trained / 'data'
  texts = f'--input={data}/queries.jsonl', f'--qrels={data}/qrels/dev.tsv'
  result = command(encode, *paths, *texts)
  assert result[0] == 0, result


def test_one_index_serves_any_such_prompt(folder, command, trained, prompt, tmp_path):
  corpus = folder / 'run' / 'passages'
  encode_queries(command, trained, folder / 'query.npz', tmp_path / 'queries')
  flags = f'--corpus={corpus}', f'--out={tmp_path}/run.trec', '--index=exact', '--k=5'
  assert command(search, f'--queries={tmp_path}/queries', *flags)[0] == 0
  meta = embeddings.load_embeddings(tmp_path / 'queries').meta
  assert meta.prompt_sha256 is None and meta.query_prompt_sha256 == sha256_file(
    folder / 'query.npz'
  )
  # The same from Python, where the bare backbone encodes passages under the prompt too.
  records = [
    json.loads(line) for line in (trained / 'data' / 'corpus.jsonl').read_text().splitlines()
  ]
  texts = {one['_id']: f'{one.get("title", "")} {one["text"]}'.strip() for one in records}
  retriever = Retriever.load(
    trained / 'backbone',
    {'mine': folder / 'query.npz', 'both': prompt, 'bare': None},
    pooling='mean',
    normalize=True,
    query_max_length=16,
    passage_max_length=32,
  )
  retriever.index(texts, prompt='bare')
  queries = {
    one['_id']: one['text']
    for one in map(json.loads, (trained / 'data' / 'queries.jsonl').read_text().splitlines())
  }
  run = dict(read_run(tmp_path / 'run.trec'))
  chosen = list(run)[:8]
  hits = retriever.search([queries[id_] for id_ in chosen], k=5, prompt='mine')
  for id_, found in zip(chosen, hits, strict=True):
    np.testing.assert_allclose(
      [score for _, score in run[id_]], [hit.score for hit in found], atol=1e-5
    )
  passages = list(texts.values())[:9]
  np.testing.assert_allclose(
    retriever.encode(passages, prompt='mine'), retriever.encode(passages, prompt='bare'), atol=1e-6
  )
  assert not np.allclose(
    *(retriever.encode(passages, 'query', prompt=name) for name in ('mine', 'bare')), atol=1e-3
  )
  # Vectors that cannot be compared.
  with refused('both', 'bare'):
    retriever.search(['json'], prompt=['both'])
  encode_queries(command, trained, prompt, tmp_path / 'both')
  command_refused(command(search, f'--queries={tmp_path}/both', *flags), 'prompt_sha256', 'None')


def test_embeddings_that_are_there_train_the_same_prompt(folder, go, tmp_path):
  status, err = go(
    tmp_path / 'run',
    '--config.corpus_negatives=64',
    f'--config.data.passage_embeddings={folder}/run/passages',
  )
  assert status == 0, err
  assert not (tmp_path / 'run' / 'passages').exists()
  assert_same_bits(trainable_of(tmp_path / 'run')[1], trainable_of(folder / 'run')[1])
  assert metrics_of(tmp_path / 'run') == metrics_of(folder / 'run')


def test_the_frozen_encoders_vectors_come_with_a_batch(flags, trained, tmp_path):
  config = configs.parse([*flags, '--config.prompt.regularization=0.5'])
  backbone = hub.load_backbone(f'{trained}/backbone')
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  with devices.one():
    found = dpr.METHOD.data(config.data, config, epath.Path(tmp_path), mesh.make_mesh({'data': 1}))
    data = found.open(tokenizer, backbone.config)
    batch = data.batches[1]
    encoder = Encoder.load(
      backbone.path, pooling=config.pooling, normalize=config.normalize, query_max_length=16
    )
    queries = {one.id: one.text for one in read_texts(f'{trained}/data/queries.jsonl', 'query')}
    ids = token_cache.open_cache(f'{trained}/token_cache/train').query_ids(batch['query_index'])
    want = encoder.encode([queries[id_] for id_ in ids], 'query')
  assert len(set(ids)) == len(ids) == config.batch_size
  np.testing.assert_allclose(batch[contrastive.FROZEN], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'max_length': 65}, ('passage_embeddings', 'config.data.passage_max_length', '65')),
    ({'backbone_sha256': 'b' * 64}, ('backbone_sha256',)),
    ({'drop': 1}, ('passage', '1')),
  ],
  ids=str,
)
def test_embeddings_of_something_else_are_refused(
  folder, go, tmp_path, write_embeddings, changes, words
):
  found = embeddings.load_embeddings(folder / 'run' / 'passages')
  meta = {name: getattr(found.meta, name) for name in found.meta.__dataclass_fields__}
  del meta['dimension']
  rows = len(found) - changes.pop('drop', 0)
  write_embeddings(
    tmp_path / 'given', found.ids[:rows], found.vectors()[:rows], shard_rows=500, **meta | changes
  )
  result = go(tmp_path / 'run', f'--config.data.passage_embeddings={tmp_path}/given')
  command_refused(result, *words)


def test_more_negatives_than_passages_are_refused(go, tmp_path):
  command_refused(go(tmp_path / 'run', '--config.corpus_negatives=100000'), '-1')
