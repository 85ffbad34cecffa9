"""Indexes and rerankers of a server; both compile before use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.formats.texts import read_texts
from dprjax.inference import reranker
from dprjax.retrieval import best, codes, embeddings, exact, hybrid, manifest
from dprjax.serving.engine import Engine
from dprjax.serving.library import Version
from dprjax.serving.messages import Hit

# Queries searched at a time: few shapes, compiled beforehand.
_QUERIES = (1, 16, 64)


class ServedIndex:
  """Embeddings of passages on the devices; ``most`` limits the hits of a query."""

  def __init__(
    self,
    name: str,
    folder: PathLike,
    most: int = 100,
    texts: PathLike | None = None,
    weights: PathLike | None = None,
    bm25_index: PathLike | None = None,
  ):
    """Reads a folder of dprjax.encode.

    Args:
      name: of the index.
      folder: with embeddings of passages.
      most: hits of a query.
      texts: their corpus.jsonl, to answer with.
      weights, bm25_index: of a hybrid search, see ``hybrid.load``.

    Raises:
      InputError: a file cannot be read or is of something else.
    """
    found = embeddings.load_embeddings(folder)
    found.check_side('passage', f'--index={name}={folder}')
    self.name, self.meta, self.most = name, found.meta, most
    self._ids = found.ids
    self._texts: dict[str, str] = {}
    if texts is not None:
      own = set(self._ids)
      self._texts = {one.id: one.text for one in read_texts(texts, 'passage', own)}
    self._hybrid = None
    if weights is not None and bm25_index is not None:
      self._hybrid = hybrid.load(weights, bm25_index, self._ids)
    # Found on the devices for each query.
    self._depth = most if self._hybrid is None else self._hybrid.fusion.depth
    self._vectors = exact.ExactIndex(found.shards, ids_at=best.ids_of(self._ids))

  def __len__(self) -> int:
    return len(self._ids)

  def compile(self) -> None:
    """Compiles every shape."""
    random = np.random.default_rng(0)
    for count in _QUERIES:
      vectors = random.standard_normal((count, self.meta.dimension), np.float32)
      self.search(vectors, [''] * count, 1)

  def check(self, version: Version, engine: Engine) -> None:
    """Raises InputError if queries under this prompt cannot be compared with the passages.

    A query-only prompt searches the bare backbone's passages. A prompt whose meta names this index
    may differ from the passages' prompt, but in nothing else.
    """
    query_only = version.meta.get('sides') == 'query'
    space = self.meta.space()
    own: dict[str, Any] = {
      # Queries are cut to the index's dimension.
      'dimension': min(engine.backbone.config.vector_size, self.meta.dimension),
      'backbone_sha256': engine.backbone.sha256,
      'config_sha256': engine.config_sha256,
      'tokenizer_sha256': engine.tokenizer.sha256,
      'prompt_sha256': None if query_only else version.sha256 or None,
      'shift_positions': version.shift_positions and not query_only,
      'pooling': version.spec.pooling,
      'normalize': version.spec.normalize,
    }
    if version.meta.get('index') == self.name:
      for field in ('prompt_sha256', 'shift_positions'):
        own[field] = space[field]
    manifest.check_same_space(f'index {self.name}', space, f'prompt {version.name}', own)

  def search(
    self, queries: Float[np.ndarray, 'n H'], texts: Sequence[str], k: int
  ) -> list[list[Hit]]:
    """The best k passages of each query, at most ``most``, by exact inner product.

    Args:
      queries: their vectors.
      texts: the queries, for BM25 in a hybrid search.
      k: passages a query.
    """
    hits = []
    queries = codes.cut(queries, self.meta.dimension, self.meta.normalize)
    for start in range(0, len(queries), _QUERIES[-1]):
      block = queries[start : start + _QUERIES[-1]]
      count = next(n for n in _QUERIES if n >= len(block))
      # Zeros would tie all passages, and ties are slow.
      padded = np.resize(block, (count, block.shape[1])).astype(np.float32)
      found = self._vectors.search(padded, self._depth, block_queries=count)
      ranked = best.rankings(best.TopK(*(array[: len(block)] for array in found)), self._ids)
      if self._hybrid is not None:
        ranked = self._hybrid.rank(texts[start : start + len(block)], ranked, k)
      hits += [
        [
          Hit(id_, score, self._texts.get(id_))
          for id_, score in zip(one.ids[:k], one.scores[:k].tolist(), strict=True)
        ]
        for one in ranked
      ]
    return hits


class ServedReranker:
  """A cross-encoder, or a backbone with a prompt of pairs, under a name."""

  def __init__(
    self,
    name: str,
    path: PathLike,
    dtype: str = 'auto',
    prompt: PathLike | None = None,
  ):
    """Loads the model, as ``inference.reranker.load``."""
    self.name = name
    options: dict[str, Any] = {'batch_size': 16, 'dtype': dtype}
    if prompt is not None:
      options['score'] = 'logit'  # its sigmoid is the probability
    self._model = reranker.load(path, prompt, **options)

  def compile(self) -> None:
    """Compiles every padded length."""
    self._model.compile()

  def score(self, query: str, documents: Sequence[str]) -> Float[np.ndarray, ' n']:
    """The probability that each document is relevant.

    Raises:
      InputError: a score is not finite.
    """
    scores = self._model.score([(query, document) for document in documents])
    if not np.isfinite(scores).all():
      raise InputError(f'reranker {self.name}: a score is not finite; its weights are damaged')
    # exp(-x) would overflow for large negative logits.
    small = np.exp(-np.abs(scores.astype(np.float64)))
    return np.where(scores >= 0, 1 / (1 + small), small / (1 + small))
