"""Shared by experiments on BEIR folders: passages encoded once, and scores of the test queries."""

import time

import jax
import numpy as np

from dprjax.base import tree
from dprjax.encoding import embeddings, folders
from dprjax.encoding.embedder import Embedder, place
from dprjax.encoding.text_encoder import Encoder
from dprjax.retrieval import best, bm25_index, exact, measures
from dprjax.text import texts, trec
from dprjax.text.qrels import read_qrels
from dprjax.training import method as methods
from dprjax.training.method import Parts

MEASURES = ('nDCG@10', 'RR@10', 'R@100')
DEPTH = 100


def encode_passages(path, folder, out, query_length, passage_length, pooling='mean', dtype='auto'):
  """The corpus of a BEIR folder under the bare backbone: seconds and passages."""
  began = time.monotonic()
  encoder = Encoder.load(
    path,
    pooling=pooling,
    normalize=True,
    query_max_length=query_length,
    passage_max_length=passage_length,
    dtype=dtype,
  )
  corpus = folder / 'corpus.jsonl'
  found = list(texts.read_texts(corpus, 'passage'))
  folders.fill_folder(encoder, 'passage', found, out, source=str(corpus))
  return {'encode_s': time.monotonic() - began, 'passages': len(found)}


def embedder(backbone, tokenizer, devices, config, trained):
  """A function that embeds texts of a side under a model; arguments as of ``search``."""
  model = methods.load(config.method).build(config, backbone.config, devices, None)
  params = tree.flatten(model.init(Parts(backbone.params), jax.random.key(0))) | trained
  params = place(devices, params)

  def embed(side, texts):
    length = config.data[f'{side}_max_length']

    def run(params, *batch):
      return model.embed(tree.unflatten(params), side, *batch)

    rows = tokenizer.encode(texts, length)[0]
    return Embedder(run, devices, 64, length, tokenizer.pad_id)(params, rows)

  return embed


def search(backbone, tokenizer, devices, config, trained, folder, passages=None):
  """The test queries of a BEIR folder among all its passages.

  Args:
    backbone, tokenizer, devices, config: of the model.
    trained: its trained parameters, by name.
    folder: the BEIR folder.
    passages: a folder of embeddings; None: the model encodes them.

  Returns:
    Means, nDCG@10 of each query as 'scores', and the seconds of encoding passages again.
  """
  embed = embedder(backbone, tokenizer, devices, config, trained)
  qrels, queries = tested(folder)
  began = time.monotonic()
  if passages is None:
    found = list(texts.read_texts(folder / 'corpus.jsonl', 'passage'))
    ids, vectors = [one.id for one in found], embed('passage', [one.text for one in found])
  else:
    stored = embeddings.load_embeddings(passages)
    ids, vectors = stored.ids, stored.vectors()
  seconds = time.monotonic() - began
  asked = embed('query', [one.text for one in queries])
  top = exact.search(asked, vectors, min(DEPTH, len(ids)), ids_at=best.ids_of(ids))
  measured = score(qrels, queries, ids, top)
  return measured | {'reencode_s': round(seconds, 1) if passages is None else 0.0}


def search_words(folder):
  """As ``search``, by BM25."""
  qrels, queries = tested(folder)
  found = list(texts.read_texts(folder / 'corpus.jsonl', 'passage'))
  index = bm25_index.build([one.id for one in found], [one.text for one in found])
  top = index.search([one.text for one in queries], min(DEPTH, len(found)))
  return score(qrels, queries, [one.id for one in found], top)


def tested(folder):
  """The judgements of a BEIR folder to test on, and their queries."""
  qrels = read_qrels(folder / 'qrels' / 'test.tsv')
  queries = texts.read_texts(folder / 'queries.jsonl', 'query')
  return qrels, [one for one in queries if one.id in qrels]


def score(qrels, queries, ids, top):
  """Means over the queries, and nDCG@10 of each query in the order of their ids."""
  run = trec.run_from_rows([one.id for one in queries], ids, top.rows, top.scores)
  values = measures.measure(run, qrels, MEASURES)
  per_query = values['per_query']['nDCG@10']
  return values['mean'] | {
    'scores': {'nDCG@10': [per_query[query] for query in sorted(per_query)]},
  }


def unseen(folder):
  """By id of each test query: whether no passage is relevant to both it and a training query."""
  train, test = (
    {
      query: {doc for doc, grade in docs.items() if grade > 0}
      for query, docs in read_qrels(folder / 'qrels' / f'{split}.tsv').items()
    }
    for split in ('train', 'test')
  )
  seen = set().union(*train.values())
  return np.array([not docs & seen for _, docs in sorted(test.items())])
