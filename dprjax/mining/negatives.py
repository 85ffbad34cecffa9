"""Unified negative mining (DPTDR section 3.3): makes a training file from runs and judgements.

Large data stays on disk. Rows of the runs (32 bytes and an id each) are sorted into buckets of some
thousand queries; `dprjax.mining.passages` indexes the corpus. Each bucket becomes pools
(`dprjax.mining.pools`) and then lines of the file. The queries, their judgements and one bucket are
in memory. docs/mining.md describes the steps and the file.
"""

import collections
import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from etils import epath
from jaxtyping import Bool, Float64, Int64, Shaped, UInt64
from scipy.special import expit

from dprjax.base import files, outofcore, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.formats import runs
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import read_texts
from dprjax.mining import mined, passages, pools
from dprjax.mining.passages import Loader, Passages
from dprjax.mining.pools import Pool

Score = Callable[[Sequence[tuple[str, str]], Callable[[int], None]], np.ndarray]
"""Maps (query, passage) texts to logits [n] of relevance; calls the second with the number done."""

logger = logging.getLogger('dprjax')

_BUCKET = 1 << 20  # rows
_KEPT = 1 << 17  # limit of passage texts in memory
_LISTED = 5
_SCRATCH = re.compile(r'corpus|reranked|run-\d+|\.lock')
_PAIRS = 4096  # pairs in a call of the reranker
_SKIPPED, _UNKNOWN = -1, -2  # in place of a query number


@dataclasses.dataclass(frozen=True)
class MiningOptions:
  """Options of mining.

  Attributes:
    depth: rows used of each run, per query.
    sample: negatives of each source, per query.
    threshold: denoised negatives have a probability of relevance below this.
    seed: of the samples.
    texts: write titles and texts of passages, not only ids.
    drop_same_id: the BEIR rule: a passage with the same id as the query is not a candidate.
    score_positives: also write reranker scores of positives.
    strict: whether unknown ids, tied ranks and queries without candidates are errors; otherwise
      they are counted and listed.
    scratch: the folder for temporary files, by default that of the output; see `scratch_folder`.
  """

  depth: int = 200
  sample: int = 30
  threshold: float = 0.1
  seed: int = 0
  texts: bool = True
  drop_same_id: bool = False
  score_positives: bool = False
  strict: bool = False
  scratch: str | None = None


class MiningReport:
  """Counts, each with a few examples."""

  def __init__(self, strict: bool):
    self.counts: collections.Counter[str] = collections.Counter()
    self._names: dict[str, list[str]] = collections.defaultdict(list)
    self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    self._strict = strict

  def count(self, what: str, number: int, names: Sequence[str] = (), trouble: bool = True) -> None:
    """Adds a number; raises InputError for trouble if ``strict`` is set."""
    self.counts[what] += number
    self._names[what] += names[: _LISTED - len(self._names[what])]
    if number and trouble and self._strict:
      raise InputError(
        f'{counted(self.counts[what], what)}: {", ".join(self._examples(what))}; correct the '
        'files, or run without --strict'
      )

  def count_rows(
    self, what: str, path: str, queries: UInt64[np.ndarray, ' n'], docs: UInt64[np.ndarray, ' n']
  ) -> None:
    """Like `count`, for rows of a run, given by keys; names are read from the run when needed."""
    _, pairs = self._rows.setdefault(what, (path, []))
    new = slice(_LISTED - len(pairs))
    pairs += zip(queries[new].tolist(), docs[new].tolist(), strict=True)
    self.count(what, len(docs))

  def _examples(self, what: str) -> list[str]:
    path, pairs = self._rows.get(what, ('', []))
    return runs.name_rows(path, pairs) if pairs else self._names[what]

  def lines(self) -> Iterator[str]:
    for what, number in self.counts.items():
      if number:
        names = self._examples(what)
        more = ', ...' if number > len(names) else ''
        yield f'  {counted(number, what)}' + (f': {", ".join(names)}{more}' if names else '')


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The queries for mining, and their positives as rows.

  Attributes:
    keys: of ``ids``; ``order`` sorts them into ``ascending``.
    skipped: keys of known queries without mining, ascending.
    positive_own: False for positives taken from another query with the same text.
  """

  ids: list[str]
  texts: list[str]
  keys: UInt64[np.ndarray, ' queries']
  order: Int64[np.ndarray, ' queries']
  ascending: UInt64[np.ndarray, ' queries']
  skipped: UInt64[np.ndarray, ' skipped']
  positive_ids: list[str]
  positive_query: Int64[np.ndarray, ' positives']
  positive_key: UInt64[np.ndarray, ' positives']
  positive_own: Bool[np.ndarray, ' positives']

  def numbers(self, keys: UInt64[np.ndarray, ' n']) -> Int64[np.ndarray, ' n']:
    """The numbers of queries, `_SKIPPED` or `_UNKNOWN`."""
    # Most rows of a query are consecutive and need one search.
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    places = outofcore.positions(self.ascending, keys[first])
    skipped = outofcore.positions(self.skipped, keys[first]) >= 0
    numbers = np.where(places >= 0, self.order[places], np.where(skipped, _SKIPPED, _UNKNOWN))
    return np.repeat(numbers, np.diff(first, append=len(keys)))


class _Sorted(NamedTuple):
  """The rows of a run, sorted into buckets."""

  name: str
  path: str
  buckets: outofcore.Buckets
  ids: outofcore.Ids


def mine(
  *,
  queries: str,
  corpus: str,
  qrels: str,
  retrievers: Mapping[str, str],
  out: str,
  reranked: str | None = None,
  score: Score | None = None,
  options: MiningOptions | None = None,
) -> dict[str, Any]:
  """Writes the training file: a line for every judged query with a positive.

  Args:
    queries, corpus: files of texts, see ``formats.texts.read_texts``.
    qrels: judgements; grades above 0 are positives.
    retrievers: name -> TREC run.
    reranked: a TREC run with the logits of a reranker as scores.
    score: the reranker. Without it or ``reranked`` there are no denoised negatives.

  Returns:
    The settings and counts.

  Raises:
    InputError: bad files, or problems that ``options.strict`` forbids.
  """
  options = options or MiningOptions()
  if reranked and score:
    raise InputError('score and reranked both give reranker scores; use one')
  report = MiningReport(options.strict)
  asked = _read_queries(queries, qrels, report)
  for path in [*retrievers.values(), *([reranked] if reranked else [])]:
    files.regular_file(path, 'run')  # read again for line numbers in messages
  began = time.monotonic()
  with _scratch(scratch_folder(out, options.scratch)) as root:
    indexed = passages.index_corpus(
      corpus, root / 'corpus', Progress('passages', task=f'reading {corpus}')
    )
    width = max(min(_BUCKET // (options.depth * len(retrievers)), _KEPT // (2 * options.sample)), 1)
    # One more, since the query itself may be among them.
    depth = options.depth + options.drop_same_id
    ranked = [
      _sort(name, path, asked, root / f'run-{number}', width, depth, report)
      for number, (name, path) in enumerate(retrievers.items())
    ]
    given = None
    if reranked:
      name = 'the reranked run'
      given = _sort(name, reranked, asked, root / 'reranked', width, None, report)
    scoring = Progress('pairs', task='scoring')
    miner = _Miner(asked, indexed, ranked, given, score, options, report, scoring)
    progress = Progress('queries', len(asked.ids), 'mining')
    written = 0
    with files.atomic_write(out, 'wb') as file:
      for bucket, first in enumerate(range(0, len(asked.ids), width)):
        stop = min(first + width, len(asked.ids))
        for line in miner.bucket(bucket, first, stop):
          file.write(line)
          written += 1
        progress(stop)
      if not report.counts['candidates']:
        raise InputError(
          f'no run has a candidate for any of {len(asked.ids):,} queries: search these queries '
          f'first ({", ".join(report.lines())})'
        )
  seconds = time.monotonic() - began
  counts = '\n'.join(report.lines())
  logger.info('%s: %s, %s\n%s', out, counted(written, 'queries'), duration(seconds), counts)
  return {
    'settings': dataclasses.asdict(options),
    'retrievers': dict(retrievers),
    'reranked': reranked,
    'queries': written,
    'counts': dict(report.counts),
    'seconds': seconds,
  }


def scratch_folder(out: str, scratch: str | None) -> pathlib.Path:
  """The folder for temporary files of mining into ``out``; after a crash the next run clears it."""
  if files.is_stream(out) or files.is_remote(out):
    name, beside = f'{out} {os.getpid()}', tempfile.gettempdir()
  else:
    name = str(files.resolved(out))
    beside = os.path.dirname(name)
  digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
  return pathlib.Path(os.path.realpath(scratch or beside)) / f'.mining-{digest}'


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  def ours(path: epath.Path) -> bool:
    return all(_SCRATCH.fullmatch(child.name) for child in path.iterdir())

  with outputs.claim_folder(
    folder, {}, what='temporary files of dprjax.mine', ours=ours, flag='--tmp_dir', grows=True
  ):
    try:
      _empty(folder)
      yield folder
    finally:
      _empty(folder)
  with contextlib.suppress(OSError):
    folder.rmdir()


def _empty(folder: pathlib.Path) -> None:
  for child in folder.iterdir():
    if child.is_dir():
      shutil.rmtree(child)


def _read_queries(queries: str, qrels: str, report: MiningReport) -> _Queries:
  judged = read_qrels(qrels)
  texts = {query.id: query.text for query in read_texts(queries, 'query')}
  unknown = [query_id for query_id in judged if query_id not in texts]
  report.count('judged queries that are not in the queries: left out', len(unknown), unknown)
  positives = {
    query_id: [doc for doc, grade in judged[query_id].items() if grade > 0]
    for query_id in texts
    if query_id in judged
  }
  ids = [query_id for query_id, docs in positives.items() if docs and texts[query_id]]
  mined_for = set(ids)
  idle = [query_id for query_id in positives if query_id not in mined_for]
  what = 'queries without a positive or without text: left out'
  report.count(what, len(idle), idle, trouble=False)
  if not ids:
    raise InputError(
      f'{qrels}: no query of {queries} has a passage graded above 0, so there is nothing to mine'
    )
  by_text: dict[str, list[int]] = collections.defaultdict(list)
  for number, query_id in enumerate(ids):
    by_text[' '.join(texts[query_id].split())].append(number)
  rows = [
    (number, doc, twin == number)
    for twins in by_text.values()
    for number in twins
    for twin in twins
    for doc in positives[ids[twin]]
  ]
  rows.sort(key=lambda row: row[0])  # stable: positives of the query itself keep file order
  numbers, positive_ids, own = zip(*rows, strict=True)
  keys = outofcore.keys_of(ids)
  order = np.argsort(keys)
  return _Queries(
    ids,
    [texts[query_id] for query_id in ids],
    keys,
    order,
    keys[order],
    np.sort(outofcore.keys_of([query_id for query_id in texts if query_id not in mined_for])),
    list(positive_ids),
    np.array(numbers),
    outofcore.keys_of(positive_ids),
    np.array(own),
  )


def _sort(
  name: str,
  path: str,
  asked: _Queries,
  folder: pathlib.Path,
  width: int,
  depth: int | None,
  report: MiningReport,
) -> _Sorted:
  """Sorts the rows of a run into buckets of ``width`` queries, without rows below ``depth``."""
  buckets = outofcore.Buckets(folder, pools.ROW)
  ids = outofcore.Ids(folder / 'ids')
  progress, done = Progress('rows', task=f'reading {path}'), 0
  for block in runs.read_blocks(path):
    queries = runs.keys(block.query_ids)
    numbers = asked.numbers(queries)
    unknown = np.flatnonzero(numbers == _UNKNOWN)
    if len(unknown):
      some = list(
        dict.fromkeys(runs.decode(block.query_ids[row].as_py()) for row in unknown[:1000].tolist())
      )
      what = f'rows of {name} whose query is not in the queries: ignored'
      report.count(what, len(unknown), some)
    keep = numbers >= 0
    if depth:
      keep &= pools.shallow(queries, block.scores, depth)
    rows = np.empty(np.count_nonzero(keep), pools.ROW)
    rows['query'], rows['rank'] = numbers[keep], block.ranks[keep]
    rows['score'], rows['doc'] = block.scores[keep], runs.keys(block.doc_ids)[keep]
    rows['id'] = ids.append(block.doc_ids.filter(pa.array(keep)))
    buckets.append(rows, rows['query'] // width)
    done += len(keep)
    progress(done, block.fraction)
  return _Sorted(name, path, buckets, ids)


@dataclasses.dataclass(frozen=True)
class _Miner:
  """Makes the lines of the file, bucket by bucket."""

  asked: _Queries
  indexed: Passages
  ranked: Sequence[_Sorted]
  given: _Sorted | None
  score: Score | None
  options: MiningOptions
  report: MiningReport
  scoring: Progress

  def bucket(self, number: int, first: int, stop: int) -> Iterator[bytes]:
    """Yields the lines of the queries in a bucket, ``first`` to ``stop``."""
    asked, options = self.asked, self.options
    tables = [self._read(run, number, options.depth) for run in self.ranked]
    rows = np.concatenate(tables)
    row_run = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    given = self._read(self.given, number, None) if self.given else rows[:0]
    # Offsets of passages, and a code for each distinct text.
    own = slice(*np.searchsorted(asked.positive_query, [first, stop]).tolist())
    named = [asked.positive_key[own], rows['doc'], given['doc']]
    keys, inverse = np.unique(np.concatenate(named), return_inverse=True)
    offsets, digests = self.indexed.look_up(keys)
    codes = np.unique(digests, return_inverse=True)[1]
    codes = np.where((offsets >= 0) & (digests != passages.EMPTY), codes, -1)
    borders = np.cumsum([len(column) for column in named])[:-1]
    positive_text, row_text, given_text = np.split(codes[inverse], borders)
    positive_offset, row_offset, _ = np.split(offsets[inverse], borders)
    for place, run in enumerate(self.ranked):
      unknown = rows[(row_run == place) & (row_offset < 0)]
      what = f'rows of {run.name} with a passage that is not in the corpus: ignored'
      self.report.count_rows(what, run.path, asked.keys[unknown['query']], unknown['doc'])
    self._count_positives(own, positive_text, positive_offset)
    known = positive_text >= 0
    positives = asked.positive_query[own][known], positive_text[known]
    pool = pools.make_pool(rows, row_run, row_text, *positives, asked.keys, options.seed)
    loader = Loader(self.indexed, keys, offsets)
    if self.score:
      logits = self._score_in_rounds(pool, loader, self.score)
    else:
      logits = pools.join_scores(pool.query, pool.text, given, given_text)
    chosen = pools.select(pool, expit(logits), options.sample, options.threshold)
    self._count_pool(first, stop, rows, pool, chosen, logits)
    known &= asked.positive_own[own]
    positives = asked.positive_query[own][known], asked.positive_key[own][known]
    of_positives = np.full(len(positives[0]), np.nan)
    if options.score_positives and self.score:
      loader.read(np.unique(positives[1]))
      of_positives = self._score_pairs(*positives, loader, self.score)
    elif options.score_positives:
      of_positives = pools.join_scores(positives[0], positive_text[known], given, given_text)
    scores = of_positives, logits
    yield from self._lines(range(first, stop), *positives, pool, chosen, scores, loader)

  def _lines(
    self,
    queries: range,
    positive_query: Int64[np.ndarray, ' positives'],
    positive_key: UInt64[np.ndarray, ' positives'],
    pool: Pool,
    chosen: pools.Selection,
    scores: tuple[Float64[np.ndarray, ' positives'], Float64[np.ndarray, ' candidates']],
    loader: Loader,
  ) -> Iterator[bytes]:
    of_positives, logits = scores
    kept = np.flatnonzero(chosen.kept)
    keys = np.unique(np.concatenate([positive_key, pool.doc[kept]]))
    loader.read(keys)
    passage = {
      key: mined.passage(loader.passages[key], self.options.texts) for key in keys.tolist()
    }
    positives: dict[int, list[str]] = collections.defaultdict(list)
    for query, key, logit in zip(
      positive_query.tolist(), positive_key.tolist(), of_positives.tolist(), strict=True
    ):
      positives[query].append(passage[key] + mined.scored(logit) + '}')
    negatives: dict[int, list[str]] = collections.defaultdict(list)
    names = [mined.to_json(run.name) for run in self.ranked]
    run, rank, score = pool.run.tolist(), pool.rows['rank'].tolist(), pool.rows['score'].tolist()
    places = (pool.query, pool.doc, pool.start, pool.stop)
    columns = (*places, chosen.undenoised, chosen.denoised, logits)
    for query, key, start, stop, *pools_and_logit in zip(
      *(column[kept].tolist() for column in columns), strict=True
    ):
      rows = [(names[run[row]], rank[row], score[row]) for row in range(start, stop)]
      negatives[query].append(passage[key] + mined.origin(rows, *pools_and_logit))
    for query in queries:
      if query in positives:
        texts = self.asked.ids[query], self.asked.texts[query]
        yield mined.line(*texts, positives[query], negatives[query])

  def _read(self, run: _Sorted, number: int, depth: int | None) -> Shaped[np.ndarray, ' rows']:
    """The rows of a run in this bucket, in order.

    Raises InputError if rank and score contradict each other, or a document is repeated.
    """
    keys = self.asked.keys
    rows = run.buckets.pop(number)
    if self.options.drop_same_id:
      rows = rows[rows['doc'] != keys[rows['query']]]
    ranking = pools.rank_rows(rows, depth or len(rows), run.ids.at)

    def name(row: np.void, times: int) -> str:
      pair = int(keys[row['query']]), int(row['doc'])
      return ', '.join(runs.name_rows(run.path, [pair] * times))

    if len(ranking.contrary):
      raise InputError(
        f'{run.path}, {name(ranking.contrary[0], 1)}: a document with a higher score has a worse '
        'rank; ranks must follow falling scores (is the score a distance?)'
      )
    if len(ranking.repeated):
      raise InputError(
        f'{run.path}: a document occurs twice for a query: {name(ranking.repeated[0], 2)}'
      )
    what = f'rows of {run.name} that share their rank with another of their query: ordered by score'
    tied = ranking.tied
    self.report.count_rows(what, run.path, keys[tied['query']], tied['doc'])
    return ranking.rows

  def _score_in_rounds(
    self, pool: Pool, loader: Loader, score: Score
  ) -> Float64[np.ndarray, ' candidates']:
    """Scores candidates in order of their lots until every query has its denoised sample."""
    sample, threshold = self.options.sample, self.options.threshold
    logits = np.full(len(pool.query), np.nan)
    size = len(self.asked.ids)
    unfinished = np.ones(size, bool)
    for scored in range(0, int(pool.place.max(initial=-1)) + 1, sample):
      in_round = (pool.place >= scored) & (pool.place < scored + sample)
      rows = np.flatnonzero(unfinished[pool.query] & in_round)
      loader.read(pool.doc[rows])
      logits[rows] = self._score_pairs(pool.query[rows], pool.doc[rows], loader, score)
      denoised = np.bincount(pool.query[expit(logits) < threshold], minlength=size)
      unfinished = denoised < sample
    return logits

  def _score_pairs(
    self,
    queries: Int64[np.ndarray, ' n'],
    passages: UInt64[np.ndarray, ' n'],
    loader: Loader,
    score: Score,
  ) -> Float64[np.ndarray, ' n']:
    """Scores pairs whose passages ``loader`` has read."""
    pairs = [
      (self.asked.texts[query], loader.passages[key].joined)
      for query, key in zip(queries.tolist(), passages.tolist(), strict=True)
    ]
    logits = np.empty(len(pairs))
    for start in range(0, len(pairs), _PAIRS):
      some = pairs[start : start + _PAIRS]
      scores = np.asarray(score(some, self.scoring), np.float64)
      self.scoring.advance(len(some))
      if not np.isfinite(scores).all():
        query, text = pairs[start + int(np.flatnonzero(~np.isfinite(scores))[0])]
        raise InputError(
          f'the reranker score is not finite for query {query!r:.80} and passage {text!r:.80}'
        )
      logits[start : start + _PAIRS] = scores
    return logits

  def _count_positives(
    self, own: slice, text: Int64[np.ndarray, ' positives'], offset: Int64[np.ndarray, ' positives']
  ) -> None:
    asked, count = self.asked, self.report.count
    query, is_own = asked.positive_query[own], asked.positive_own[own]
    unknown = np.flatnonzero(is_own & (offset < 0))
    names = [
      f'{asked.ids[query[row]]} {asked.positive_ids[own.start + row]}'
      for row in unknown[:_LISTED].tolist()
    ]
    count('positives that are not in the corpus: ignored', len(unknown), names)
    empty = np.count_nonzero(is_own & (offset >= 0) & (text < 0))
    count('positives without text: ignored', int(empty), trouble=False)
    idle = np.setdiff1d(query, query[is_own & (text >= 0)])
    what = 'queries whose positives are not in the corpus or have no text: left out'
    count(what, len(idle), [asked.ids[number] for number in idle[:_LISTED].tolist()])

  def _count_pool(
    self,
    first: int,
    stop: int,
    rows: Shaped[np.ndarray, ' rows'],
    pool: Pool,
    chosen: pools.Selection,
    logits: Float64[np.ndarray, ' candidates'],
  ) -> None:
    report, asked, sample = self.report, self.asked, self.options.sample

    def by_query(numbers: np.ndarray) -> np.ndarray:
      return np.bincount(numbers - first, minlength=stop - first)

    found, candidates = by_query(rows['query']), by_query(pool.query)
    for what, where in (
      ('queries that no run has: kept, without negatives', found == 0),
      (
        'queries with no candidate but positives: kept, without negatives',
        (found > 0) & (candidates == 0),
      ),
    ):
      numbers = first + np.flatnonzero(where)
      report.count(what, len(numbers), [asked.ids[row] for row in numbers[:_LISTED].tolist()])
    counts: dict[str, Any] = {
      'candidates': len(pool.query),
      'rows with the text of a positive: left out': pool.positives,
      'rows with a text that the run has before under another id: ignored': pool.copies,
      'queries with fewer candidates than the sample': (candidates > 0) & (candidates < sample),
      'un-denoised negatives': chosen.undenoised,
    }
    for number, run in enumerate(self.ranked):
      counts[f'candidates of {run.name}'] = pool.run == number
    if self.score or self.given:
      counts |= {
        'candidates with a reranker score': ~np.isnan(logits),
        'denoised negatives': chosen.denoised & chosen.kept,
        'queries with fewer denoised negatives than the sample': by_query(
          pool.query[chosen.denoised]
        )
        < sample,
      }
    counts['negatives in the file'] = chosen.kept
    for what, value in counts.items():
      report.count(what, int(np.sum(value)), trouble=False)
