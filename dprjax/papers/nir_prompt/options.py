"""Options of the methods of NIR-Prompt: several data sets, templates and their adaptation."""

import types
from typing import Any

import ml_collections

from dprjax.training import config as configs
from dprjax.training import options
from dprjax.training.options import choice, lines, several, switch, text, whole

TASK_DATA = (
  'format',
  'dir',
  'columns',
  'mined_negatives',
  'train_split',
  'dev_split',
  'hold_out',
  'max_queries',
  'query_prefix',
  'passage_prefix',
)
"""Options of ``config.data`` that each entry of ``config.tasks`` sets itself."""


def table() -> types.SimpleNamespace:
  c = types.SimpleNamespace()
  # several data sets in one run: NAME = an entry of `task_table`; c.data.dir stays empty. Tasks are
  # numbered in sorted order of names.
  c.tasks = types.SimpleNamespace()
  # Batches (NIR-Prompt, Table 13): 'alternate', from one task, in turn; 'random_task', from one
  # task, in random order; 'balanced', equal rows of each task; 'random', rows of all tasks shuffled
  c.arrangement = choice('alternate', 'random_task', 'balanced', 'random')
  # examples of a task in an epoch; large sets continue in the next epoch, small ones repeat; 0: the
  # size of the smallest set
  c.per_task = whole(0, least=0, most=10**9)

  c.template = types.SimpleNamespace()
  # Slots P1, P2, P3: 'continuous', learned vectors; 'manual', words of c.tasks.NAME.words;
  # 'hybrid', for pairs, only P3 in words; 'none', empty
  c.template.kind = choice('continuous', 'manual', 'hybrid', 'none')
  # of P1, P2, P3, in vectors
  c.template.lengths = several(6, 6, 7, each=whole(1, least=1, most=10**4))
  # layers whose inputs keep the learned vectors unchanged; 0: none; -1: all but the last
  c.template.fixed_layers = whole(-1, least=0, most=1000, also=-1)
  c.template.verbalizer = several('yes', 'no')  # answers at [MASK] of a pair; one token each
  # the score of a pair: 'logit', logit(yes) - logit(no), as in the released code; 'probability',
  # P(yes) - P(no), as in the paper
  c.template.score = choice('logit', 'probability')

  # for a new task: its prompt is a weighted sum of trained prompts.
  c.adapt = types.SimpleNamespace()
  c.adapt.fusion = switch(False)  # False: new prompt encoders, or the prompt file
  # prompt files of trained tasks or their folders, separated by commas; '': the folder prompts
  # beside the backbone
  c.adapt.prompts = text('')
  return c


def _words() -> options.Option:
  """Literal words of slots."""
  each = text('')
  short = each._replace(
    fits=lambda v: each.fits(v) and len(v) <= 1000, expected='a text of up to 1000 characters'
  )
  return several(each=short, least=0, most=9)


def task(**data: Any) -> ml_collections.ConfigDict:
  """An entry of ``config.tasks`` with these values in its ``data``."""
  entry = ml_collections.ConfigDict(configs.values(task_table()))
  entry.data.update(data)
  return entry


def task_table() -> types.SimpleNamespace:
  t = types.SimpleNamespace()
  # 'retrieval': queries and passages; 'pairs': two texts and a label
  t.form = choice('retrieval', 'pairs')
  # of 'nir_retriever' and 'nir_reranker': the task prompt file, kept fixed; '': a new prompt
  t.prompt = text('')
  # words of P1, P2, ... around each text, for c.template.kind = 'manual'; (): the words of the
  # paper, for 'retrieval', 'qa', 'dialogue', 'paraphrase' and 'inference'.
  t.words = types.SimpleNamespace()
  t.words.query, t.words.passage, t.words.pair = _words(), _words(), _words()
  # on the dev split: for a ranking, such as 'RR@10'; for pairs 'accuracy' or 'F1'
  t.measure = text('RR@10')
  # as in c.data, which has the settings shared by all tasks; prefixes precede first and second
  # texts
  shared = vars(options.table().data)
  t.data = types.SimpleNamespace(**{name: shared[name] for name in TASK_DATA})
  t.data.query_prefix, t.data.passage_prefix = lines(''), lines('')
  return t


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    'config.adapt.prompts': [part.strip() for part in config.adapt.prompts.split(',')],
    **{f'config.tasks.{name}.prompt': entry.prompt for name, entry in config.tasks.items()},
    **{
      f'config.tasks.{name}.data.{option}': entry.data[option]
      for name, entry in config.tasks.items()
      for option in ('dir', 'mined_negatives')
      if option == 'mined_negatives' or entry.data.format != 'docstrings'
    },
  }
