"""What a seed draws, for each kind of data: held-out queries, dev sample, two epochs of batches.

Other draws make other results from the same seed, and the kept results of experiments/ledgers can
then not be had again. `python -m tests.training.test_draws` writes them anew; say so in the first
line of each ledger (`draws`).
"""

import json
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath

from dprjax.base import mesh as meshes
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import sources, vocabularies
from dprjax.training import dev_ranking, query_only, retrieval_data
from dprjax.training import method as methods
from dprjax.training.methods import names
from tests.options import with_options

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden' / 'draws.json'
COLUMNS = ('text1', 'text2', 'label')  # of pairs
COUNT = 30  # queries, each with a passage of its own; ten more passages have none
SHARED = {
  'seed': 0,
  'batch_size': 8,
  'data__hold_out': 0.2,
  'data__query_max_length': 8,
  'data__passage_max_length': 8,
  'data__query_buckets': (8,),
  'data__passage_buckets': (8,),
  'eval__corpus_limit': 12,
}
# The method and its options, by kind of data.
KINDS = {
  'queries': ('dpr', {'negatives': 1}),
  'some of the queries': ('dpr', {'data__max_queries': 16, 'data__hold_out': 0.0}),
  'a fold': ('dpr', {'data__folds': 3, 'data__fold': 2, 'data__folds_below': 100}),
  'mined negatives': ('dpr', {'negatives': 2, 'data__mined_negatives': 'mined.jsonl'}),
  'lists': ('cross_encoder', {'negatives': 2, 'data__mined_negatives': 'mined.jsonl'}),
  'corpus negatives': (
    'dpr',
    {'prompt__length': 2, 'prompt__sides': 'query', 'negatives': 0, 'corpus_negatives': 4},
  ),
  'papers': ('topic_dpr', {}),
  'tasks in turn': ('ft_retriever', {'arrangement': 'alternate', 'negatives': 1}),
  'mixed tasks': ('ft_retriever', {'arrangement': 'random', 'negatives': 1}),
  'pairs': ('ft_reranker', {'arrangement': 'balanced', 'negatives': 1}),
  'texts': ('pretrain', {'pretrain__views': 'one'}),
  'sentences': ('pretrain', {'pretrain__views': 'siblings', 'pretrain__unit': 'sentence'}),
  'spans': ('pretrain', {'pretrain__views': 'siblings', 'pretrain__unit': 'span'}),
  'inverse cloze': ('pretrain', {'pretrain__views': 'ict'}),
}
# The folder of a paper may be deleted.
THERE = [kind for kind, (method, _) in KINDS.items() if method in names()]


def write(folder):
  """A BEIR folder with categories and mined negatives, and a file of pairs."""
  (folder / 'qrels').mkdir(parents=True)

  def rows(prefix, count, **more):
    for n in range(count):
      text = '. '.join(' '.join(f'w{(n + k + i) % 50}' for i in range(9)) for k in range(4)) + '.'
      yield json.dumps({'_id': f'{prefix}{n}', 'text': f'{prefix} w{n % 50} {text}'} | more) + '\n'

  corpus = [
    json.dumps(json.loads(row) | {'categories': [f'c{n % 3}']}) + '\n'
    for n, row in enumerate(rows('d', COUNT + 10))
  ]
  (folder / 'corpus.jsonl').write_text(''.join(corpus))
  (folder / 'queries.jsonl').write_text(''.join(rows('q', COUNT)))
  judged = ''.join(f'q{n}\td{n}\t1\n' for n in range(COUNT))
  (folder / 'qrels' / 'train.tsv').write_text(f'query-id\tcorpus-id\tscore\n{judged}')
  with (folder / 'mined.jsonl').open('w') as file:
    for n, row in enumerate(rows('q', COUNT)):
      wrong = [
        {'docid': f'd{(n + k) % COUNT}', 'retriever': 'bm25', 'rank': k, 'score': 1.0}
        | {'sources': ['undenoised']}
        for k in range(1, 6)
      ]
      record = {'query_id': f'q{n}', 'query': json.loads(row)['text']}
      record |= {'positive_passages': [{'docid': f'd{n}'}], 'negative_passages': wrong}
      file.write(json.dumps(record) + '\n')
  (folder / 'pairs').mkdir()
  few = (
    dict(zip(COLUMNS, (f'q w{n}', f'd w{n + n % 2}', 1 - n % 2), strict=True)) for n in range(COUNT)
  )
  (folder / 'pairs' / 'train.jsonl').write_text(''.join(json.dumps(one) + '\n' for one in few))


class Nothing:
  """In place of the vectors of passages."""

  @staticmethod
  def take(rows):
    return np.zeros((*rows.shape, 8), np.float32)


def draws(kind, folder, tokenizer):
  """The draws of a kind of data, as JSON."""
  name, options = KINDS[kind]
  retrieval = name in ('dpr', 'cross_encoder', 'topic_dpr')
  options = {'data__dir': str(folder), 'data__format': 'beir'} | options
  if 'data__mined_negatives' in options:
    options['data__mined_negatives'] = str(folder / options['data__mined_negatives'])
  if name == 'pretrain':
    options |= {'data__dir': str(folder / 'corpus.jsonl'), 'data__format': 'corpus'}
  config = with_options(method=name, **SHARED | options)
  if name.startswith('ft_'):
    from dprjax.papers.nir_prompt import options as nir_options

    config.data.dir, config.data.format = '', 'auto'
    config.eval.measure = 'mean'
    for task in ('one', 'two'):
      config.tasks[task] = nir_options.task(dir=str(folder), format='beir', hold_out=0.2)
    if name == 'ft_reranker':
      config.tasks.two = nir_options.task(dir=str(folder / 'pairs'), hold_out=0.2)
      config.tasks.two.form, config.tasks.two.measure = 'pairs', 'accuracy'
  devices = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  workdir = epath.Path(folder) / 'runs' / kind
  model = EncoderConfig('bert', tokenizer.vocab_size, 8, 1, 1, 8, max_positions=128)
  method = methods.load(name)
  # Vectors of passages are not drawn.
  with mock.patch.object(query_only, 'open_passages', lambda *_: Nothing):
    data = method.data(config.data, config, workdir, devices).open(tokenizer, model)
  found = {'batches': []}
  for step in range(2 * len(data.batches)):
    batch = data.batches[step]
    shown = [data.ids(batch)]
    # Rows of the corpus, and the tokens of drawn texts.
    shown += [
      f'{key} {np.asarray(batch[key]).reshape(-1).tolist()}'
      for key in ('passage_index', 'corpus_index', 'second_index')
      if key in batch and np.size(batch[key]) > 1 and name != 'pretrain'
    ]
    if name == 'pretrain':
      views = (key for key in batch if key.endswith('_mask'))
      shown += [f'{key} {batch[key].sum(axis=1).tolist()}' for key in sorted(views)]
    found['batches'].append('; '.join(shown))
  if retrieval:
    type_ = retrieval_data.Retrieval
    if name == 'topic_dpr':
      from dprjax.papers.topic_dpr.topic_dpr import TopicData as type_
    splits = retrieval_data.find_splits(config.data, config, workdir, devices, kind=type_)
    if splits.dev is not None:
      held_out = sources.load_dataset(splits.dev).queries
      ranking = dev_ranking.DevRanking(splits, tokenizer, ['RR@10'])
      found['held out'] = ' '.join(query.id for query in held_out)
      found['dev sample'] = ' '.join(ranking.passage_ids)
  return found


def make_tokenizer(folder):
  words = [f'{prefix} w{n}.' for prefix in 'qd' for n in range(50)]
  return vocabularies.train_wordpiece(words, 300, folder)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp('draws')
  write(made)
  return made


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp('words'))


@pytest.mark.parametrize('kind', THERE)
def test_a_seed_draws_what_it_drew(kind, folder, words):
  expected = json.loads(GOLDEN.read_text())[kind]
  found = draws(kind, folder, words)
  assert found == expected
  assert len(set(found['batches'])) == len(found['batches'])


def main():
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
    write(pathlib.Path(folder))
    tokenizer = make_tokenizer(other)
    found = {kind: draws(kind, pathlib.Path(folder), tokenizer) for kind in KINDS}
  GOLDEN.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
