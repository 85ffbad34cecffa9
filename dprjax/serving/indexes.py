"""Indexes of a server, which compile before use."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dprjax.base.files import PathLike
from dprjax.encoding import codes, embeddings, manifest
from dprjax.retrieval import best, exact
from dprjax.retrieval import folder as retrievers
from dprjax.serving import turns
from dprjax.serving.engine import Engine
from dprjax.serving.library import Version

# Queries searched at a time: few shapes, compiled beforehand.
_QUERIES = (1, 16, 64)
_HIT_COST = 1000  # characters tokenised in the time of the hits of a query


class ServedIndex:
  """Embeddings of passages on the devices; ``most`` limits the hits of a query."""

  def __init__(self, name: str, folder: PathLike, most: int = 100):
    """Reads a folder of dprjax.encode, or the index of a retriever, which has its texts."""
    self._texts: dict[str, str] = {}
    self._hybrid = None
    if retrievers.is_folder(folder):
      retrievers.check_index(folder, f'--index={name}')
      stored, passages, self._hybrid = retrievers.open_index(folder, retrievers.read(folder).fusion)
      self._texts = dict(zip(stored.ids, passages, strict=True))
    else:
      stored = embeddings.load_embeddings(folder)
    stored.check_side('passage', f'--index={name}={folder}')
    self.name, self.meta, self.most = name, stored.meta, most
    self._ids = stored.ids
    # Found on the devices for each query.
    self._depth = most if self._hybrid is None else self._hybrid.fusion.depth
    self._vectors = exact.ExactIndex(stored.shards, ids_at=best.ids_of(self._ids))
    self._costs: dict[int, float] = {}  # seconds by the number of queries, once compiled

  def __len__(self) -> int:
    return len(self._ids)

  def compile(self) -> None:
    """Compiles the numbers of queries at a time that take at most a slice, or one query."""
    random = np.random.default_rng(0)
    for count in _QUERIES:
      vectors = random.standard_normal((count, self.meta.dimension), np.float32)
      for _ in range(2):  # the first run compiles
        began = time.monotonic()
        self._search(vectors, count)
        seconds = time.monotonic() - began
      if self._costs and seconds > turns.SLICE_S:
        break
      self._costs[count] = seconds

  def seconds(self, queries: int) -> float:
    most = max(self._costs)
    return -(-queries // most) * self._costs[most]

  def check(self, version: Version, engine: Engine) -> None:
    """Raises InputError if queries with this prompt cannot be compared with the passages.

    A query-only prompt searches passages of the bare backbone. A prompt with this index in its meta
    may differ from the prompt of the passages, but not in other settings.
    """
    manifest.check_same_space(
      f'index {self.name}', self.meta.space(), f'prompt {version.name}', self._own(version, engine)
    )

  def takes(self, prompt: Version, engine: Engine) -> bool:
    return not manifest.differences(self.meta.space(), self._own(prompt, engine))

  def _own(self, prompt: Version, engine: Engine) -> dict[str, Any]:
    """The space of the passages that this prompt was made for, as far as it decides it."""
    query_only = prompt.meta.get('sides') == 'query'
    space: dict[str, Any] = {
      # Queries are cut to the index dimension.
      'dimension': min(engine.backbone.config.vector_size, self.meta.dimension),
      'backbone_sha256': engine.backbone.sha256,
      'config_sha256': engine.config_sha256,
      'tokenizer_sha256': engine.tokenizer.sha256,
      **manifest.of_prompt(
        prompt.spec,
        None if query_only else prompt.sha256 or None,
        prompt.shift_positions,
      ),
    }
    if prompt.meta.get('index') == self.name:
      for field in ('prompt_sha256', 'shift_positions'):
        space[field] = getattr(self.meta, field)
    return space

  def find(self, queries: Float[np.ndarray, 'n H']) -> turns.Steps:
    tops = []
    queries = codes.cut(queries, self.meta.dimension, self.meta.normalize)
    most = max(self._costs)
    for start in range(0, len(queries), most):
      block = queries[start : start + most]
      count = next(n for n in self._costs if n >= len(block))
      yield self._costs[count]
      began = time.monotonic()
      tops.append(self._search(block, count))
      turns.learn(self._costs, count, time.monotonic() - began)
    return tops

  def _search(self, queries: Float[np.ndarray, 'n H'], count: int) -> best.TopK:
    # Zeros would tie all passages, and ties are slow.
    padded = np.resize(queries, (count, queries.shape[1])).astype(np.float32)
    top = self._vectors.search(padded, self._depth, block_queries=count)
    return best.TopK(*(array[: len(queries)] for array in top))

  def rank(self, tops: Sequence[best.TopK], texts: Sequence[str], k: int) -> turns.Steps:
    """The best k passages of each query, at most ``most``; a slice costs characters.

    Args:
      texts: the queries, for BM25 in a hybrid search.
    """
    hits, start = [], 0
    for top in tops:
      queries = texts[start : start + len(top.scores)]
      start += len(queries)
      yield sum(map(len, queries)) + _HIT_COST * len(queries)
      ranked = best.rankings(top, self._ids)
      if self._hybrid is not None:
        ranked = self._hybrid.rank(queries, ranked, k)
      hits += [
        [
          {'id': id_, 'score': score, 'text': self._texts.get(id_)}
          for id_, score in zip(one.ids[:k], one.scores[:k].tolist(), strict=True)
        ]
        for one in ranked
      ]
    return hits
