"""FT: full fine-tuning of a dual encoder (DPR; coCondenser), the baseline of every prompt.

    python -m dprjax.train --config=configs/ft.py:beir --workdir=runs/mine --config.data.dir=DIR

The recipes are those of configs/dptdr.py, with the whole backbone trained and no prompt.
"""

from dprjax.runtime import config as defaults


def get_config(arg: str = 'beir'):
  c = defaults.sibling(__file__, 'dptdr').get_config(arg)
  c.trainable = ('backbone/.*',)
  c.prompt.length = 0
  c.optim.learning_rate = 2e-5
  c.optim.weight_decay = 0.01
  if c.task in ('scifact', 'medquad') and 'local' not in (arg or '').split(','):
    c.eval.every = 60  # as many updates as there are: evaluated at the end
  if c.task in ('beir', 'local', 'scifact', 'medquad'):
    c.epochs = min(c.epochs, 3.0)
  elif c.task == 'msmarco':
    # coCondenser's fine-tuning: 3 epochs at 5e-6.
    c.optim.learning_rate, c.epochs = 5e-6, 3.0
  elif c.task == 'nq':
    c.backbone.two_encoders = True  # as DPR has it
    c.epochs = 40.0
  return c
