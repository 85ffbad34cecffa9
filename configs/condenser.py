"""Condenser and coCondenser (Gao and Callan 2021, 2022), and the baselines they are compared with.

    python -m dprjax.train --config=configs/condenser.py --workdir=runs/condenser \\
      --config.data.dir=corpus.jsonl,more.txt
    python -m dprjax.export --workdir=runs/condenser --out=backbone

Arguments:

- `condenser` (the default)
- `cocondenser`, best from a Condenser, --config.backbone.path=backbone; `cocondenser,sentence`
  draws sentences in place of spans (Table 7 of DPTDR compares both)
- `ict`, the inverse cloze task
- `mlm`, masked language modelling only
- `local` after any of them: a small trial

`--config.backbone.path=scratch:mini` starts from random weights and a vocabulary of the text.
"""

from dprjax.training import config as defaults


def get_config(arg: str = 'condenser'):
  recipes = ('condenser', 'cocondenser', 'ict', 'mlm', 'local')
  recipe, rest = defaults.split_argument(__file__, arg, recipes, ('local', 'sentence'))
  if 'sentence' in rest and recipe != 'cocondenser':
    raise ValueError(f'configs/condenser.py:{arg}: sentence may only follow cocondenser')
  local = 'local' in (recipe, *rest)
  if recipe == 'local':
    recipe = 'condenser'
  c = defaults.default('pretrain')
  c.task = recipe
  c.backbone.path = 'bert-base-uncased'
  c.trainable = ('backbone/.*', 'head/.*')
  c.pooling, c.normalize = 'cls', False
  # The released code of Condenser: AdamW 1e-4, weight decay 0.01, linear decay after a tenth of
  # warm-up, 1,024 to 2,048 texts a step, 8 epochs.
  c.batch_size, c.grad_cache = 1024, 16
  c.epochs = 8.0
  c.optim.learning_rate, c.optim.weight_decay = 1e-4, 0.01
  c.data.format = 'corpus'
  if recipe == 'condenser':
    c.pretrain.head_layers = 2
  elif recipe == 'cocondenser':
    c.pretrain.head_layers = 2
    c.pretrain.views, c.pretrain.unit = 'siblings', 'sentence' if 'sentence' in rest else 'span'
    c.batch_size, c.grad_cache = 2048, 32
  elif recipe == 'ict':
    # Lee et al. 2019: 4,096 sentences against as many passages, contrastive only.
    c.trainable = ('backbone/.*',)
    c.pretrain.views, c.pretrain.mlm_weight = 'ict', 0.0
    c.pretrain.max_length = 256
    c.batch_size, c.grad_cache = 4096, 64
  return defaults.local(c) if local else c
