"""The recipes of NIR-Prompt: what their arguments set."""

import pathlib
import re

import pytest

from dprjax.training import config as configs
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parents[3]
RETRIEVER = ('dialogue', 'qa', 'retrieval')
RERANKER = ('dialogue', 'inference', 'paraphrase', 'qa', 'retrieval')


def parse(recipe, *flags):
  return configs.parse([f'--config={ROOT}/configs/nir_{recipe}', *flags])


@pytest.mark.parametrize(
  ('recipe', 'tasks', 'expected'),
  [
    (
      'retriever.py',
      RETRIEVER,
      ('nir_retriever', 'continuous', 'mask', 'alternate', 16, ('backbone',)),
    ),
    (
      'retriever.py:mdm=qa',
      ('qa',),
      ('nir_retriever', 'continuous', 'mask', 'alternate', 16, ('prompt',)),
    ),
    (
      'retriever.py:emm=qa+legal,manual',
      ('legal', 'qa'),
      ('nir_retriever', 'manual', 'mask', 'alternate', 16, ('backbone',)),
    ),
    (
      'reranker.py',
      RERANKER,
      ('nir_reranker', 'continuous', 'cls', 'balanced', 20, ('backbone', 'head')),
    ),
    (
      'reranker.py:adapt=inference',
      ('inference',),
      ('nir_reranker', 'continuous', 'cls', 'balanced', 16, ('backbone', 'prompt', 'head')),
    ),
  ],
)
def test_what_an_argument_sets(recipe, tasks, expected):
  c = parse(recipe)
  assert tuple(sorted(c.tasks)) == tasks
  trained = tuple(name.split('/')[0] for name in c.trainable)
  template = c.template.kind
  assert (c.method, template, c.pooling, c.arrangement, c.batch_size, trained) == expected
  for name, entry in c.tasks.items():
    assert entry.form == ('pairs' if name in ('paraphrase', 'inference') else 'retrieval')
    assert entry.measure == ('accuracy' if entry.form == 'pairs' else 'RR@10')
    entry.data.dir = 'x'
  assert c.adapt.fusion == ('adapt' in recipe)
  # Later stages start from it, so it is trained on easy data too.
  assert c.eval.skip_saturated == (recipe.partition(':')[2].partition('=')[0] in ('adapt', 'ft'))
  configs.check(c)
  # The word embeddings stay as they are.
  for pattern in c.trainable:
    assert not re.fullmatch(pattern, 'backbone/embeddings/word/embedding')
    if pattern.startswith('backbone'):
      for name in ('embeddings/position/embedding', 'layers/attention/query/kernel'):
        assert re.fullmatch(pattern, f'backbone/{name}')


def test_settings_of_the_released_code():
  for recipe in ('retriever.py:emm,paper', 'reranker.py:mdm=qa,paper'):
    c = parse(recipe)
    assert (c.backbone.path, c.batch_size, c.per_task) == ('bert-base-uncased', 16, 40_000)
    assert (c.optim.learning_rate, c.optim.decay, c.optim.warmup) == (1e-5, 'none', 0.0)
    assert (c.eval.patience, c.template.fixed_layers, c.template.lengths) == (3, -1, (6, 6, 7))


@pytest.mark.parametrize(('stage', 'options'), [('retriever', ''), ('reranker', ',paper')])
def test_the_dev_split_chooses_the_rate_of_the_weights(stage, options):
  c = parse(f'{stage}.py:adapt=qa{options}')
  c.tasks.qa.data.dir = 'x'
  rates = []
  for one in configs.resolve(c).values():
    (own, factor), *others = one.optim.learning_rate_rules
    assert (
      re.fullmatch(own, 'prompt/qa/weights') and tuple(others) == (c.optim.learning_rate_rules[1:])
    )
    rates.append(factor * one.optim.learning_rate)
  assert rates == pytest.approx([0.01, 0.05, 0.2])
  # Without such weights, or with a rate on the command line, there is no choice.
  for recipe, *flags in (
    (f'{stage}.py:adapt=qa,unfused{options}',),
    (f'{stage}.py:adapt=qa{options}', "--config.optim.learning_rate_rules=(('.*', 1.0),)"),
  ):
    assert not parse(recipe, *flags).alternatives


@pytest.mark.parametrize(
  ('recipe', 'message'),
  [
    ('retriever.py:mdm', 'mdm=retrieval'),
    ('retriever.py:tune', ('mdm=TASK', 'adapt=TASK')),
  ],
)
def test_arguments_that_cannot_be(recipe, message):
  with refused(message):
    parse(recipe)
