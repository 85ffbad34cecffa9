"""The recipes of the papers: settings of configs/ against the papers and their released code."""

import pathlib

import pytest

from dprjax.base import tree
from dprjax.text import sources
from dprjax.training import config as configs
from dprjax.training import retrieval_data
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = [
  *(f'dptdr.py:{name}' for name in ('scifact', 'medquad', 'msmarco', 'nq', 'beir,text,thorough')),
  *(f'dptdr.py:{name}' for name in ('scifact,query,peft', 'scifact,both,lora', 'beir,linear')),
  *(f'ft.py:{name}' for name in ('scifact', 'msmarco', 'msmarco,round2', 'nq')),
  *(f'rip.py:{name}' for name in ('sentence', 'span', 'prompt', 'msmarco', 'prompt,nq')),
  *('condenser.py:condenser', 'condenser.py:cocondenser,sentence'),
  *('condenser.py:ict', 'condenser.py:mlm', 'quickstart.py'),
  *(f'../experiments/lab/configs/{name}.py' for name in ('sections', 'stsb')),
  *('cross_encoder.py:msmarco', 'cross_encoder.py:beir'),
  *(f'topic_dpr.py:{name}' for name in ('topic,tuned', 'topic,paper', 'dptdr', 'dpr', 'words')),
]
LARGE, BASE = 'roberta-large', 'bert-base-uncased'


def parse(recipe):
  if not (ROOT / 'configs' / recipe.partition(':')[0]).exists():
    pytest.skip('a paper that is not here')
  return configs.parse([f'--config={ROOT}/configs/{recipe}'])


def value(config, name):
  for key in name.split('.'):
    config = config[key]
  return config


@pytest.mark.parametrize('recipe', RECIPES)
def test_every_recipe_has_options_in_range_and_chooses_on_other_queries_than_it_reports(recipe):
  config = parse(recipe)
  config.data.dir = config.data.dir or 'x'
  configs.check(config)
  if config.data.format == 'msmarco':  # whose dev split papers report
    assert config.data.dev_split == '' and 0 < config.data.hold_out < 0.01
    assert (config.data.train_split, config.eval.measure) == ('train', 'RR@10')
  assert config.data.dev_split != 'test'


@pytest.mark.parametrize(
  ('recipe', 'expected'),
  [
    (
      'dptdr.py:msmarco',
      {
        'backbone.path': LARGE,
        'eval.baseline': 'equal',
        'prompt.length': 128,
        'prompt.tied': True,
        'negatives': 29,
        'positive': 'rotate',
        'batch_size': 64,
        'epochs': 10.0,
        'optim.learning_rate': 7e-3,
        'optim.weight_decay': 0.0,
        'data.query_max_length': 32,
        'data.passage_max_length': 128,
      },
    ),
    (
      'dptdr.py:beir',
      {'prompt.shift_positions': False, 'prompt.sides': 'query', 'corpus_negatives': -1},
    ),
    ('dptdr.py:beir,both', {'prompt.sides': 'both', 'corpus_negatives': 0}),
    ('dptdr.py:beir,peft', {'prompt.shift_positions': True}),
    ('dptdr.py:beir,text', {'prompt.init_text': configs.START, 'prompt.sides': 'query'}),
    ('dptdr.py:beir,both,lora', {'prompt.kind': 'lora', 'prompt.sides': 'both'}),
    (
      'dptdr.py:nq',
      {
        'backbone.path': LARGE,
        'eval.baseline': 'equal',
        'prompt.length': 32,
        'prompt.tied': False,
        'positive': 'first',
        'negatives': 1,
        'batch_size': 128,
        'epochs': 60.0,
        'optim.learning_rate': 7e-3,
        'optim.weight_decay': 0.0,
        'data.passage_max_length': 128,
      },
    ),
    (
      'ft.py:nq',
      {
        'eval.baseline': 'equal',
        'prompt.length': 0,
        'positive': 'first',
        'backbone.two_encoders': True,
        'batch_size': 128,
        'epochs': 40.0,
        'optim.learning_rate': 1e-5,
        'optim.weight_decay': 0.0,
        'data.passage_max_length': 156,
      },
    ),
    (
      'ft.py:msmarco',
      {
        'prompt.length': 0,
        'positive': 'rotate',
        'backbone.two_encoders': False,
        'negatives': 7,
        'epochs': 3.0,
        'optim.learning_rate': 5e-6,
        'optim.weight_decay': 0.0,
      },
    ),
    (
      'ft.py:msmarco,round2',
      {
        'negatives': 7,
        'epochs': 2.0,
        'optim.learning_rate': 5e-6,
        'optim.weight_decay': 0.0,
      },
    ),
    ('ft.py:beir', {'optim.learning_rate': 2e-5, 'optim.weight_decay': 0.01, 'epochs': 3.0}),
    ('cross_encoder.py:msmarco', {'negatives': 7}),
    (
      'rip.py:prompt',
      {
        'backbone.path': BASE,
        'prompt.length': 32,
        'prompt.reparam': 'none',
        'trainable': ('prompt/.*', 'head/.*'),
        'optim.learning_rate': 7e-3,
        'optim.weight_decay': 0.0,
        'pretrain.unit': 'sentence',
      },
    ),
    ('rip.py:sentence', {'backbone.path': LARGE, 'pretrain.head_layers': 0}),
    (
      'condenser.py:cocondenser',
      {'pretrain.unit': 'span', 'pretrain.head_layers': 2, 'task': 'cocondenser'},
    ),
    (
      'condenser.py:cocondenser,sentence',
      {'pretrain.unit': 'sentence', 'pretrain.head_layers': 2, 'batch_size': 2048},
    ),
  ],
)
def test_a_recipe_is_as_published_or_released(recipe, expected):
  config = parse(recipe)
  assert {name: value(config, name) for name in expected} == expected


def test_ms_marco_chooses_on_training_queries_and_reads_titles(tmp_path):
  # No dev file is there: none is read.
  passages = [f'p{i}\tTitle {i}\ttext {i}' for i in range(2000)]
  (tmp_path / 'collection.tsv').write_text('\n'.join(passages) + '\n')
  for name, line in (('queries', 'q{0}\tquestion {0}'), ('qrels', 'q{0}\t0\tp{0}\t1')):
    lines = '\n'.join(line.format(i) for i in range(2000))
    (tmp_path / f'{name}.train.tsv').write_text(lines + '\n')
  config = parse('dptdr.py:msmarco')
  config.data.dir = str(tmp_path)
  splits = retrieval_data.find_splits(config.data, config, tmp_path / 'run', None)
  train, dev = (sources.load_dataset(source) for source in (splits.train, splits.dev))
  chosen = {query.id for query in dev.queries}
  assert 1 <= len(chosen) <= 12 and len(train.queries) + len(chosen) == 2000
  assert not chosen & {query.id for query in train.queries}
  assert next(iter(train.passages)).text == 'Title 0 text 0'


def test_rip_on_prompts_trains_the_head_at_the_rate_of_whole_models():
  config = parse('rip.py:prompt')
  names = ['prompt/prefix', 'head/mlm/bias', 'head/mlm/dense/kernel']
  factors = tree.first_match(config.optim.learning_rate_rules, names, 'rules')
  rates = {name: factor * config.optim.learning_rate for name, factor in factors.items()}
  assert rates['prompt/prefix'] == 7e-3
  assert rates['head/mlm/bias'] == rates['head/mlm/dense/kernel'] == pytest.approx(1e-4)
  assert parse('rip.py').optim.learning_rate == 1e-4


@pytest.mark.parametrize(
  ('recipe', 'words'),
  [
    ('ft.py:nq,round2', ('round2', 'nq', 'local')),
    ('condenser.py:ict,sentence', ('sentence', 'cocondenser')),
  ],
)
def test_what_may_follow_what(recipe, words):
  with refused(words):
    parse(recipe)
