"""What `make quickstart` trains: a prompt for queries on docstrings.

    python -m dprjax.quickstart

For text of your own, `--config=configs/dptdr.py:beir` trains longer.
"""

from dprjax.training import config as defaults


def get_config():
  c = defaults.sibling(__file__, 'dptdr').get_config('beir,query')
  c.task = 'quickstart'
  # One epoch over the 4,400 training queries is too short to overfit, so no query is held out.
  c.epochs, c.steps = 0.0, 275
  c.data.hold_out, c.data.folds = 0.0, 0
  # Three of four passages are longer; every token costs time.
  c.data.query_max_length, c.data.passage_max_length = 32, 96
  # One shape a batch: one program to compile.
  c.data.query_buckets = (32,)
  c.checkpoint.every = 100
  return c
