"""Options of the methods that learn from queries and their passages."""

import types
from typing import Any

import ml_collections

from dprjax.training.options import SET, choice, number, switch, text, whole


def local(c: ml_collections.ConfigDict) -> None:
  c.negatives = min(c.negatives, 2)
  c.data.folds = 0


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    'config.distillation.scores': config.distillation.scores,
    'config.data.passage_embeddings': config.data.passage_embeddings,
  }


def table() -> types.SimpleNamespace:
  c = types.SimpleNamespace()
  c.backbone = types.SimpleNamespace()
  # one encoder each for queries and passages (DPR), or one for both
  c.backbone.two_encoders = switch(False).only(optional=True)

  c.in_batch = switch(True)  # passages of other queries on all devices are negatives
  # the positive of a query: 'rotate', the next one in each epoch; 'first', always the first
  c.positive = choice('rotate', 'first')
  c.negatives = whole(1, least=0, most=4096)  # hard negatives per query; 0: in-batch only
  # with prompt.sides='query', further negatives: 0, none; a number, drawn for each update; -1, the
  # whole corpus, kept on every device
  c.corpus_negatives = whole(0, least=0, most=2**20, also=-1).only(prompt__sides='query')
  # fraction of hard negatives from each source; they add up to 1
  c.mix = types.SimpleNamespace()
  c.mix.denoised = number(0.0, least=0, most=1)  # of mined negatives that a reranker passed
  # of all mined negatives, and of those in a file without sources
  c.mix.undenoised = number(1.0, least=0, most=1)
  c.mix.random = number(0.0, least=0, most=1)  # of passages drawn from the whole corpus

  # for c.method = 'dpr' and 'cross_encoder': learn the scores of a teacher for the passages of each
  # query.
  c.distillation = types.SimpleNamespace()
  # 'margin_mse': score of the positive minus that of each negative; 'kl': the softmax over the list
  c.distillation.loss = choice('none', 'margin_mse', 'kl').only(optional=True, negatives=SET)
  # a run, such as one of dprjax.rerank or dprjax.fuse, or a jsonl of dprjax.mine with scores;
  # '': data.mined_negatives
  c.distillation.scores = text('')
  # of this loss; the loss on labels has weight 1 - this
  c.distillation.weight = number(1.0, above=0, most=1)
  c.distillation.temperature = number(1.0, above=0, most=1e4)  # divides the teacher scores

  c.data = types.SimpleNamespace()
  # k-fold cross-validation when hold_out would leave too few dev queries: each fold is held out
  # once, and a final training on all queries uses the best mean number of updates; 0: never. A
  # hold_out on the command line sets 0, unless folds_below is also set there
  c.data.folds = whole(0, least=2, most=100, also=0).only(optional=True)
  # cross-validate below this many training queries; with folds on the command line, always
  c.data.folds_below = whole(200, least=1, most=10**9)
  # with prompt.sides='query': passage vectors by the frozen backbone, a folder of dprjax.encode;
  # '': encoded into workdir/passages
  c.data.passage_embeddings = text('').only(prompt__sides='query')
  return c
