"""FT: full fine-tuning of a dual encoder (DPR; coCondenser), the baseline of every prompt.

    python -m dprjax.train --config=configs/ft.py:beir --workdir=runs/mine --config.data.dir=DIR

The recipes are those of configs/dptdr.py, with the whole backbone trained and no prompt. `msmarco`
and `nq` have the fine-tuning settings of coCondenser, as in Table 3 of DPTDR.

coCondenser trains two rounds on MS MARCO, both from the same backbone: `msmarco` with negatives
from BM25, `msmarco,round2` with negatives from the model of the first round:

    python -m dprjax.train --config=configs/ft.py:msmarco --workdir=runs/round1 \\
      --config.data.dir=DIR --config.data.mined_negatives=bm25.jsonl
    ... export, encode, search and mine from both runs (docs/recipes.md) -> mined.jsonl
    python -m dprjax.train --config=configs/ft.py:msmarco,round2 --workdir=runs/round2 \\
      --config.data.dir=DIR --config.data.mined_negatives=mined.jsonl
"""

from dprjax.training import config as defaults


def get_config(arg: str = 'beir'):
  recipes = ('beir', 'scifact', 'medquad', 'msmarco', 'nq', 'local')
  options = ('round2', 'local') if (arg or '').startswith('msmarco') else ('local',)
  recipe, words = defaults.split_argument(__file__, arg, recipes, options)
  second, local = 'round2' in words, 'local' in (recipe, *words)
  c = defaults.sibling(__file__, 'dptdr').get_config(f'{recipe},both' + ',local' * local)
  c.trainable = ('backbone/.*',)
  c.prompt.length = 0
  c.optim.learning_rate = 2e-5
  c.optim.weight_decay = 0.01
  if c.task in ('beir', 'local', 'scifact', 'medquad'):
    c.epochs = min(c.epochs, 3.0)
  elif c.task == 'msmarco':
    # Fine-tuning as in coCondenser: 8 passages a query.
    c.optim.learning_rate, c.optim.weight_decay = 5e-6, 0.0
    c.epochs = 2.0 if second else 3.0
    c.negatives = 7
  elif c.task == 'nq':
    # As in Dense, the toolkit of the coCondenser authors: separate encoders of questions and
    # passages.
    c.optim.learning_rate, c.optim.weight_decay = 1e-5, 0.0
    c.data.passage_max_length = 156
    c.backbone.two_encoders = True
    c.epochs = 40.0
  return defaults.local(c) if local else c
