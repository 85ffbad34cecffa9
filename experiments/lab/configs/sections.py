"""Distinction of Wikipedia sections, by triplets of sentences.

It shows how much of the theme of a text a vector of the backbone can be taught to hold.

    export PYTHONPATH=experiments
    python -m dprjax.train --config=experiments/lab/configs/sections.py --workdir=runs/sections \\
      --config.backbone.path=DIR --config.data.dir=enwiki.xml.bz2
    python -m dprjax.export --workdir=runs/sections --method=lab.sections --out=tuned

`--config.data.dir` may name several dumps, separated by commas, and `--config.data.hold_out` is a
fraction of their articles. The last line of the run has the accuracy on these. Settings come from
Condenser (appendix A.1) and SBERT (section 4.4): its triplet loss has margin 1 and Euclidean
distance. `--config.data.max_queries=1000` trains on as many triplets (Condenser Table 2). The
argument `local` shrinks it to seconds on a CPU, on the same kind of file.
"""

import os

from dprjax.training import config as defaults

DATA = os.environ.get('DPRJAX_DATA', '../shared/data')


def get_config(arg: str = ''):
  if arg not in ('', 'local'):
    raise ValueError(f'configs/sections.py:{arg}: there is only local')
  c = defaults.default()
  c.method = 'lab.sections'
  # `OPTIONS` in lab/sections.py explains each
  c.sections = {'margin': 1.0, 'per_article': 4, 'dev_triplets': 200_000}
  c.task = 'sections'
  c.backbone.path = 'bert-base-uncased'
  c.trainable = ('backbone/.*',)
  c.batch_size = 16
  c.epochs = 1.0
  c.optim.learning_rate, c.optim.weight_decay = 2e-5, 0.01
  c.pooling, c.normalize = 'cls', False
  c.data.query_max_length = c.data.passage_max_length = 128
  c.data.query_prefix = c.data.passage_prefix = ''
  c.data.max_queries = 1_800_000  # as many as the published set has
  if arg == 'local':
    c = defaults.local(c)
    c.sections.dev_triplets = 200
  c.eval.measure = 'accuracy'
  c.data.format = 'mediawiki'
  c.data.dir = f'{DATA}/text/enwiki/enwiki-shortened.xml.bz2'
  c.data.train_split, c.data.dev_split, c.data.hold_out = 'train', '', 0.1
  return c
