"""BM25 by bm25s: the Lucene variant, with stemmed words (`dprjax.base.words`), no stop words.

With k1 = 1.5, b = 0.75 and English stemming, nDCG@10 on SciFact is .686 (published: .687).
"""

import functools
import logging
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from etils import epath

from dprjax.base import given, outputs, provenance, reading, words
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_path, atomic_write
from dprjax.base.ranking import Ranking
from dprjax.retrieval import best
from dprjax.retrieval.best import TopK
from dprjax.text import trec
from dprjax.text.fields import read_ids, report_ids
from dprjax.text.texts import Text, Texts, columns_of, read_texts

_FORMAT = 'dprjax.bm25'
WORDS = 2
"""Increase this when the words of texts change, so that stored indexes are made again."""

K1, B, LANGUAGE = 1.5, 0.75, 'english'  # by default
SETTINGS = {'k1': K1, 'b': B, 'language': LANGUAGE}
_NONE: Mapping[str, str] = types.MappingProxyType({})
_LARGEST_K1 = 1000  # float32 cannot represent scores beyond it
_SIDECAR, _IDS = 'dprjax_index.json', 'ids.txt'


def languages() -> list[str]:
  import Stemmer

  return sorted(Stemmer.algorithms())


@functools.cache
def _bm25s() -> Any:
  # Importing bm25s runs a JAX operation and so starts the JAX backend.
  import bm25s

  logging.getLogger('bm25s').setLevel(logging.WARNING)  # bm25s sets DEBUG
  return bm25s


def _tokens(texts: Iterable[str], language: str, as_ids: bool) -> Any:
  """The tokens of bm25s; ``language`` 'none' keeps every word."""
  import Stemmer

  stemmer = None if language == 'none' else Stemmer.Stemmer(language)
  make = functools.partial(
    _bm25s().tokenization.Tokenizer,
    lower=False,
    splitter=functools.partial(words.words, turkish=language == 'turkish'),
    stemmer=stemmer,
  )
  try:
    tokenizer = make(stopwords=None if language == 'none' else language)
  except ValueError:  # a stemmer without stop words
    tokenizer = make(stopwords=None)
  return tokenizer.tokenize(
    texts,
    length=0,  # for a progress bar that is not shown
    return_as='tuple' if as_ids else 'string',
    show_progress=False,
    allow_empty=False,
  )


def words_of(texts: Sequence[str], language: str) -> list[list[str]]:
  return _tokens(given.texts(texts), language, as_ids=False)


class Bm25Index(NamedTuple):
  index: Any
  ids: list[str]
  language: str

  @property
  def settings(self) -> dict[str, Any]:
    return {'k1': self.index.k1, 'b': self.index.b, 'language': self.language}

  def search(self, queries: Sequence[str], k: int) -> TopK:
    """The best ``min(k, n)`` passages that share a word with the query, equal scores by id.

    Unused places have row -1 and score -inf.
    """
    queries = given.texts(queries, 'queries')
    k = min(k, len(self.ids))
    rows = np.full((len(queries), k), -1, np.int32)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    for number, tokens in enumerate(words_of(queries, self.language)):
      if not tokens:
        continue
      all_scores = self.index.get_scores(tokens)
      matches = np.flatnonzero(all_scores > 0)
      if len(matches) > k:
        # The argpartition of bm25s does not order ties.
        least = np.partition(all_scores[matches], len(matches) - k)[len(matches) - k]
        matches = matches[all_scores[matches] >= least]
      if len(matches):
        alone = TopK(all_scores[None, matches].astype(np.float32), matches[None].astype(np.int32))
        ranked = best.order(alone, k, best.ids_of(self.ids))
        count = ranked.rows.shape[1]
        rows[number, :count], scores[number, :count] = ranked.rows[0], ranked.scores[0]
    return TopK(scores, rows)

  def rankings(self, queries: Sequence[str], k: int) -> list[Ranking]:
    return best.rankings(self.search(queries, k), self.ids)


def build(ids: Sequence[str], texts: Sequence[str], **settings: Any) -> Bm25Index:
  """`build_texts` of passages in memory."""
  return build_texts(map(Text, ids, given.texts(texts)), **settings)


def build_texts(
  passages: Iterable[Text], *, k1: float = K1, b: float = B, language: str = LANGUAGE
) -> Bm25Index:
  """Indexes a stream of passages: ids and word numbers are in memory, texts are not.

  Args:
    k1: saturation of repeated words.
    b: discount of long passages, 0 to 1.
    language: of the stemmer and stop words, or 'none'.
  """
  check_settings(k1, b, language)
  ids: list[str] = []

  def texts() -> Iterator[str]:
    for passage in passages:
      ids.append(passage.id)
      yield passage.text

  tokens = _tokens(texts(), language, as_ids=True)
  if not any(tokens.ids):
    raise InputError(f'nothing to index: no words in {counted(len(ids), "passages")}')
  index = _bm25s().BM25(k1=k1, b=b)
  index.index(tokens, show_progress=False)
  return Bm25Index(index, ids, language)


def check_settings(k1: float, b: float, language: str) -> None:
  """Raises InputError for an unknown language, or k1 or b out of range."""
  known = ('none', *languages())
  if language not in known or not (0 <= k1 <= _LARGEST_K1 and 0 <= b <= 1):  # nor NaN
    raise InputError(
      f'k1 = {k1}, b = {b}, language {language!r:.40}: k1 must be between 0 and {_LARGEST_K1}, b '
      f'between 0 and 1, and the language one of {", ".join(known)}'
    )


def is_index(folder: epath.Path) -> bool:
  return provenance.read_mark(folder, _SIDECAR).get('format') == _FORMAT


def save(index: Bm25Index, folder: PathLike, fingerprint: str) -> None:
  """Writes the index and the fingerprint of its passages and settings, whole or not at all."""
  with atomic_path(folder) as aside:
    aside.mkdir()
    index.index.save(aside, show_progress=False)
    with atomic_write(aside / _IDS) as file:
      file.writelines(f'{id_}\n' for id_ in index.ids)
    counts = {'count': len(index.ids), 'language': index.language}
    provenance.write(aside, _SIDECAR, format=_FORMAT, fingerprint=fingerprint, **counts)


class _Counts(msgspec.Struct):
  count: int
  language: str


def load(folder: PathLike, fingerprint: str) -> Bm25Index | None:
  """Opens an index; None if it is missing or has other passages or settings."""
  root = epath.Path(folder)
  sidecar = provenance.kept(root, _SIDECAR, fingerprint)
  return None if sidecar is None else _load(root, sidecar)


def open_index(folder: PathLike) -> Bm25Index:
  """Opens an index of any passages."""
  root = epath.Path(folder)
  sidecar = provenance.read(root, _SIDECAR)
  if sidecar is None:
    raise InputError(f'{root} is not a BM25 index: make one with dprjax.bm25 --index_dir={root}')
  provenance.check(root, _SIDECAR, sidecar)
  return _load(root, sidecar)


def _load(root: epath.Path, sidecar: dict[str, Any]) -> Bm25Index:
  counts = reading.convert(sidecar, str(root / _SIDECAR), _Counts)
  ids = read_ids(root / _IDS)
  index = _bm25s().BM25.load(root, show_progress=False)
  return Bm25Index(index, ids, counts.language)


INDEX_FOLDER: Any = {'what': 'a BM25 index', 'ours': is_index, 'flag': '--index_dir'}


def search_files(
  corpus: PathLike,
  queries: PathLike,
  k: int,
  *,
  columns: Mapping[str, str] = _NONE,
  qrels: PathLike | None = None,
  index_dir: PathLike | None = None,
  drop_same_id: bool = False,
  settings: Mapping[str, Any] = SETTINGS,
) -> tuple[trec.Run, dict[str, Any]]:
  """Searches a corpus for queries; returns the run and its report.

  Args:
    columns: names of columns, see `text.texts.columns_of`.
    qrels: judgements; only the queries judged here are searched for.
    index_dir: keeps the index for the same passages and settings.
    drop_same_id: leave out the passage with the id of its query.
  """
  check_settings(**settings)
  passages = Texts(corpus, 'passage', columns=columns_of('passage', columns))
  read = read_texts(queries, 'query', columns=columns_of('query', columns))
  texts = {query.id: query.text for query in read}
  unknown: list[str] = []
  if qrels is not None:
    from dprjax.text.qrels import read_qrels

    judged = read_qrels(qrels)
    unknown = [query_id for query_id in judged if query_id not in texts]
    sentence = f'{qrels}: {len(unknown):,} of {counted(len(judged), "queries")} not in {queries}'
    report_ids(sentence, unknown)
    texts = {query_id: text for query_id, text in texts.items() if query_id in judged}
    if not texts:
      raise InputError(f'{qrels}: it judges no query of {queries}')
  corpus_sha256 = passages.sha256()
  started = time.perf_counter()
  fingerprint = f'{corpus_sha256} {sorted(settings.items())} words {WORDS}'
  index = load(index_dir, fingerprint) if index_dir else None
  if index is None:
    index = build_texts(passages, **settings)
    if index_dir:
      with outputs.claim_folder(index_dir, {}, **INDEX_FOLDER):
        save(index, index_dir, fingerprint)
  elif index_dir:
    outputs.clear(index_dir)
  indexed = time.perf_counter()
  top = index.search(list(texts.values()), k + drop_same_id)
  seconds = {'index': indexed - started, 'search': time.perf_counter() - indexed}
  run = trec.run_from_rows(list(texts), index.ids, top.rows, top.scores)
  empty = [query_id for query_id, ranking in run if not ranking]
  sentence = f'{len(empty):,} of {counted(len(run), "queries")} share no word with a passage'
  report_ids(f'{queries}: {sentence}', empty)
  if drop_same_id:
    run = run.keep(~run.same_id()).top(k)
  return run, {
    'index': 'bm25s',
    'settings': dict(settings),
    'k': k,
    'drop_same_id': drop_same_id,
    'queries': len(run),
    'passages': len(index.ids),
    'unknown_queries': len(unknown),
    'queries_without_passages': len(empty),
    'seconds': seconds,
    'queries_per_second': len(run) / seconds['search'],
    'corpus_sha256': corpus_sha256,
  }
