"""Sentence similarity on the STS benchmark, by regression on the cosine.

It shows how much of a sentence a vector of the backbone can be taught to hold.

    export PYTHONPATH=experiments
    python -m dprjax.train --config=experiments/lab/configs/stsb.py --workdir=runs/stsb \\
      --config.backbone.path=DIR --config.data.dir=FOLDER
    python -m dprjax.export --workdir=runs/stsb --method=lab.similarity --out=tuned
    python -m lab.inspection --backbone=tuned --sts=FOLDER/stsb-en-test.csv

FOLDER holds the files named below, with two sentences and a score of 0 to 5 in each row. The
settings come from Condenser (appendix A.1). The argument `local` shrinks it to seconds on a CPU, on
the same files.
"""

import os

from dprjax.training import config as defaults

DATA = os.environ.get('DPRJAX_DATA', '../shared/data')


def get_config(arg: str = ''):
  if arg not in ('', 'local'):
    raise ValueError(f'configs/stsb.py:{arg}: there is only local')
  c = defaults.default()
  c.method = 'lab.similarity'
  c.task = 'stsb'
  c.backbone.path = 'bert-base-uncased'
  c.trainable = ('backbone/.*',)
  c.batch_size = 16
  c.epochs = 4.0
  c.optim.learning_rate, c.optim.weight_decay = 2e-5, 0.01
  c.pooling, c.normalize = 'cls', False
  c.data.query_max_length = c.data.passage_max_length = 128
  c.data.query_prefix = c.data.passage_prefix = ''
  c.eval.measure = 'spearman'
  if arg == 'local':
    c = defaults.local(c)
  c.data.format = 'similarity'
  c.data.dir = f'{DATA}/stsb/raw'
  c.data.train_split, c.data.dev_split = 'stsb-en-train.csv', 'stsb-en-dev.csv'
  return c
