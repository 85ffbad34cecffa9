"""Unified negative mining (DPTDR section 3.3): runs, judgements and a corpus in, a training file
out.

Everything that is large is on disk: the rows of the runs (24 bytes each) are sorted into buckets of
some thousand queries, the corpus is an index of where each passage lies (`dprjax.mining.passages`),
and one bucket after the other becomes pools (`dprjax.mining.pools`) and lines of the file. In
memory are the queries, their judgements and one bucket. docs/mining.md describes the steps and the
file.
"""

import collections
import dataclasses
import logging
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64
from scipy.special import expit

from dprjax.base import files, outofcore
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.formats import runs
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import read_texts
from dprjax.mining import mined, passages, pools
from dprjax.mining.passages import Passages
from dprjax.mining.pools import Pool

Score = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""(query, passage) texts -> logits [n]; their sigmoid is the probability of relevance."""

logger = logging.getLogger('dprjax')

_BUCKET = 1 << 20  # rows, about, that are looked at together
_KEPT = 1 << 17  # passages, at most, whose texts are held together
_LISTED = 5
_PAIRS = 4096  # scored between two looks at the clock


@dataclasses.dataclass(frozen=True)
class Options:
  """What is mined.

  Attributes:
    depth: rows of every run that are looked at, a query.
    sample: negatives a query of each pool.
    threshold: candidates whose probability is below it make the denoised pool.
    seed: of the samples.
    texts: whether the file holds the passages' titles and texts, or their ids alone.
    drop_same_id: BEIR's rule: a passage with the query's own id is no candidate.
    strict: whether an unknown id, a rank given twice or a query without a candidate is an error;
      else they are counted and listed.
    scratch: the folder for what is kept on disk meanwhile; by default the output's.
  """

  depth: int = 200
  sample: int = 30
  threshold: float = 0.1
  seed: int = 0
  texts: bool = True
  drop_same_id: bool = False
  strict: bool = False
  scratch: str | None = None


class Report:
  """Counts by what was counted, and a few names of each."""

  def __init__(self, strict: bool):
    self.counts: collections.Counter[str] = collections.Counter()
    self._names: dict[str, list[str]] = {}
    self._rows: dict[str, tuple[str, list[tuple[int, int]]]] = {}
    self._strict = strict

  def count(self, what: str, number: int, names: Sequence[str] = (), trouble: bool = True) -> None:
    """Adds so many. Raises InputError if they are trouble and that is forbidden."""
    self.counts[what] += number
    listed = self._names.setdefault(what, [])
    listed += names[: _LISTED - len(listed)]
    self._refuse(what, trouble)

  def count_rows(
    self, what: str, path: str, queries: UInt64[np.ndarray, 'n'], docs: UInt64[np.ndarray, 'n']
  ) -> None:
    """`count` of rows of a run, of which the keys alone are known: their names are looked up in the
    run when they are told.
    """
    self.counts[what] += len(docs)
    _, listed = self._rows.setdefault(what, (path, []))
    listed += list(zip(queries.tolist(), docs.tolist(), strict=True))[: _LISTED - len(listed)]
    self._refuse(what, True)

  def _refuse(self, what: str, trouble: bool) -> None:
    if self.counts[what] and trouble and self._strict:
      raise InputError(
        f'{self.counts[what]:,} {what}: {", ".join(self._listed(what))}; mend the files, or run it '
        'without --strict'
      )

  def _listed(self, what: str) -> list[str]:
    path, rows = self._rows.get(what, ('', []))
    return [*self._names.get(what, []), *(runs.name_rows(path, rows) if rows else [])]

  def lines(self) -> Iterator[str]:
    for what, number in self.counts.items():
      if number:
        names = self._listed(what)
        yield f'  {number:,} {what}' + (
          f': {", ".join(names)}{", ..." if number > len(names) else ""}' if names else ''
        )


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The queries to mine for, and their positives as rows.

  Attributes:
    keys: of ``ids``; ``order`` sorts them.
    others: keys of the queries that are not mined for, ascending.
    positive_own: False for the positives of another query of the same text.
  """

  ids: list[str]
  texts: list[str]
  keys: UInt64[np.ndarray, 'queries']
  others: UInt64[np.ndarray, 'others']
  positive_ids: list[str]
  positive_query: Int64[np.ndarray, 'positives']
  positive_key: UInt64[np.ndarray, 'positives']
  positive_own: Bool[np.ndarray, 'positives']
  order: Int64[np.ndarray, 'queries']

  def numbers(self, keys: UInt64[np.ndarray, 'n']) -> Int64[np.ndarray, 'n']:
    """The queries' numbers; -1 for one that is not to be mined for, -2 for an unknown one."""
    # The same query's rows lie together as a rule: one look-up for all of them.
    first = np.flatnonzero(
      np.concatenate([np.ones(min(len(keys), 1), bool), keys[1:] != keys[:-1]])
    )
    order, wanted = self.order, keys[first]
    places = np.minimum(np.searchsorted(self.keys, wanted, sorter=order), len(order) - 1)
    found = np.where(
      self.keys[order[places]] == wanted,
      order[places],
      np.where(np.isin(wanted, self.others), -1, -2),
    )
    return np.repeat(found, np.diff(first, append=len(keys)))


def mine(
  *,
  queries: str,
  corpus: str,
  qrels: str,
  retrievers: Mapping[str, str],
  out: str,
  reranked: str | None = None,
  score: Score | None = None,
  options: Options | None = None,
) -> dict[str, Any]:
  """Writes the training file, a line for every query of the judgements that has a positive.

  Args:
    queries, corpus: files of texts, see ``formats.texts.read_texts``.
    qrels: judgements; above 0 is a positive.
    retrievers: name -> TREC run.
    out: the jsonl file.
    reranked: a TREC run whose scores are a reranker's logits; or
    score: the reranker. Without either there is no denoised pool.

  Returns:
    What was counted, and of what.

  Raises:
    InputError: bad files, or what ``options.strict`` forbids.
  """
  options = options or Options()
  files.output_file(out)
  if reranked and score:
    raise InputError(
      'a reranker and a reranked run were given: the scores can come from one of them'
    )
  report = Report(options.strict)
  asked = _read_queries(queries, qrels, report)
  for path in [*retrievers.values(), *([reranked] if reranked else [])]:
    files.existing(path, 'run')
  began = time.monotonic()
  scratch = options.scratch or (str(pathlib.Path(out).parent) if '://' not in out else None)
  if scratch:
    pathlib.Path(scratch).mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='.mining-', dir=scratch) as folder:
    indexed = passages.index_corpus(
      corpus, pathlib.Path(folder, 'corpus'), Progress('passages', task=f'reading {corpus}')
    )
    width = max(min(_BUCKET // (options.depth * len(retrievers)), _KEPT // (2 * options.sample)), 1)
    # One more than is needed, where one may be the query itself.
    depth = options.depth + options.drop_same_id
    ranked = {
      name: _spill(name, path, asked, pathlib.Path(folder, f'run-{number}'), width, depth, report)
      for number, (name, path) in enumerate(retrievers.items())
    }
    given = (
      _spill(
        'the reranked run', reranked, asked, pathlib.Path(folder, 'reranked'), width, None, report
      )
      if reranked
      else None
    )
    miner = _Miner(asked, indexed, ranked, given, score, options, report)
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
          f'no candidate is left for any of {len(asked.ids):,} queries: {", ".join(report.lines())}'
        )
  seconds = time.monotonic() - began
  logger.info(
    '%s: %s queries, %s\n%s', out, f'{written:,}', duration(seconds), '\n'.join(report.lines())
  )
  return {
    'settings': dataclasses.asdict(options),
    'retrievers': dict(retrievers),
    'reranked': reranked,
    'queries': written,
    'counts': dict(report.counts),
    'seconds': seconds,
  }


def _read_queries(queries: str, qrels: str, report: Report) -> _Queries:
  judged = read_qrels(qrels)
  texts = {query.id: query.text for query in read_texts(queries, 'query')}
  unknown = [query_id for query_id in judged if query_id not in texts]
  report.count('judged queries that are not in the queries: left out', len(unknown), unknown)
  positives = {
    query_id: [doc for doc, grade in judged[query_id].items() if grade > 0]
    for query_id in texts
    if query_id in judged
  }
  idle = [
    query_id for query_id, documents in positives.items() if not documents or not texts[query_id]
  ]
  report.count(
    'queries without a positive or without text: left out', len(idle), idle, trouble=False
  )
  ids = [query_id for query_id, documents in positives.items() if documents and texts[query_id]]
  if not ids:
    raise InputError(
      f'{qrels}: no query of {queries} has a passage graded above 0; there is nothing to mine for'
    )
  by_text: dict[str, list[int]] = collections.defaultdict(list)
  for number, query_id in enumerate(ids):
    by_text[' '.join(texts[query_id].split())].append(number)
  rows = [
    (number, document, twin == number)
    for twins in by_text.values()
    for number in twins
    for twin in twins
    for document in positives[ids[twin]]
  ]
  rows.sort(key=lambda row: row[0])  # stable: a query's own in the order of the file
  keys, positive_ids = outofcore.keys_of(ids), [document for _, document, _ in rows]
  others = outofcore.keys_of(
    [*(query_id for query_id in texts if query_id not in positives), *idle]
  )
  return _Queries(
    ids,
    [texts[query_id] for query_id in ids],
    keys,
    np.sort(others),
    positive_ids,
    np.array([number for number, _, _ in rows]),
    outofcore.keys_of(positive_ids),
    np.array([own for _, _, own in rows]),
    np.argsort(keys),
  )


@dataclasses.dataclass(frozen=True)
class _Spilled:
  """A run's rows, in buckets."""

  name: str
  path: str
  buckets: outofcore.Buckets


def _spill(
  name: str,
  path: str,
  asked: _Queries,
  folder: pathlib.Path,
  width: int,
  depth: int | None,
  report: Report,
) -> _Spilled:
  """Sorts a run's rows into buckets of ``width`` queries; those beyond ``depth`` are left out where
  that is plain to see.
  """
  buckets = outofcore.Buckets(folder, pools.ROW)
  progress = Progress('rows', task=f'reading {path}')
  done = 0
  for block in runs.read_blocks(path):
    done += len(block.docs)
    number = asked.numbers(block.queries)
    unknown = np.flatnonzero(number == -2)
    if len(unknown):
      ids = list(dict.fromkeys(block.query_id(row) for row in unknown[:1000].tolist()))
      report.count(
        f'rows of {name} of queries that are not in the queries: ignored', len(unknown), ids
      )
    keep = number >= 0
    if depth:
      keep &= pools.shallow(block.queries, block.scores, depth)
    rows = np.empty(np.count_nonzero(keep), pools.ROW)
    for field, column in (
      ('query', number),
      ('rank', block.ranks),
      ('score', block.scores),
      ('doc', block.docs),
    ):
      rows[field] = column[keep]
    buckets.append(rows, rows['query'] // width)
    progress(done, block.share)
  return _Spilled(name, path, buckets)


class _Miner:
  """Makes the lines of one bucket after the other."""

  def __init__(
    self,
    asked: _Queries,
    indexed: Passages,
    ranked: Mapping[str, _Spilled],
    given: _Spilled | None,
    score: Score | None,
    options: Options,
    report: Report,
  ):
    self._asked, self._indexed, self._ranked, self._given, self._score = (
      asked,
      indexed,
      ranked,
      given,
      score,
    )
    self._options, self._report = options, report

  def bucket(self, number: int, first: int, stop: int) -> Iterator[bytes]:
    """Yields the lines of the queries ``first`` to ``stop``, which are in this bucket."""
    asked, options, report = self._asked, self._options, self._report
    tables = [self._read(spilled, number, options.depth) for spilled in self._ranked.values()]
    given = [self._read(self._given, number, None)] if self._given else []
    # Where the passages lie that are named here; a code for what each says.
    own = slice(*np.searchsorted(asked.positive_query, [first, stop]).tolist())
    named = [asked.positive_key[own], *(rows['doc'] for rows in (*tables, *given))]
    keys, inverse = np.unique(np.concatenate(named), return_inverse=True)
    offsets, digests = self._indexed.look_up(keys)
    codes = np.where(
      (offsets >= 0) & (digests != np.uint64(passages.EMPTY)),
      np.unique(digests, return_inverse=True)[1],
      -1,
    )
    borders = np.cumsum([len(column) for column in named])[:-1]
    positive_text, *texts = np.split(codes[inverse], borders)
    for spilled, rows, where in zip(
      self._ranked.values(), tables, np.split(offsets[inverse], borders)[1:], strict=False
    ):
      lost = rows[where < 0]
      report.count_rows(
        f'rows of {spilled.name} with a passage that is not in the corpus: ignored',
        spilled.path,
        asked.keys[lost['query']],
        lost['doc'],
      )
    self._count_positives(own, positive_text, offsets[inverse[: own.stop - own.start]])
    known = positive_text >= 0
    pool = pools.make_pool(
      tables,
      texts[: len(tables)],
      asked.positive_query[own][known],
      positive_text[known],
      asked.keys,
      options.seed,
    )
    load = mined.Loader(self._indexed, keys, offsets)
    logits = np.full(len(pool.query), np.nan)
    if given:
      logits = pools.join_scores(pool, given[0], texts[-1])
    elif self._score:
      logits = self._rounds(pool, load)
    chosen = pools.select(pool, expit(logits), options.sample, options.threshold)
    self._count_pool(first, stop, tables, pool, chosen, logits)
    known &= asked.positive_own[own]
    yield from self._lines(
      range(first, stop),
      asked.positive_query[own][known],
      asked.positive_key[own][known],
      pool,
      chosen,
      logits,
      load,
    )

  def _lines(
    self,
    queries: range,
    positive_query: Int64[np.ndarray, 'positives'],
    positive_key: UInt64[np.ndarray, 'positives'],
    pool: Pool,
    chosen: pools.Selection,
    logits: Float64[np.ndarray, 'candidates'],
    load: mined.Loader,
  ) -> Iterator[bytes]:
    kept = np.flatnonzero(chosen.kept)
    passage = load.fragments(np.concatenate([positive_key, pool.doc[kept]]), self._options.texts)
    positives: dict[int, list[str]] = collections.defaultdict(list)
    for query, key in zip(positive_query.tolist(), positive_key.tolist(), strict=True):
      positives[query].append(passage[key] + '}')
    negatives: dict[int, list[str]] = collections.defaultdict(list)
    names = [mined.to_json(name) for name in self._ranked]
    run, rank, score = (column.tolist() for column in pool.origins)
    columns = (
      pool.query,
      pool.doc,
      pool.start,
      pool.stop,
      chosen.undenoised,
      chosen.denoised,
      logits,
    )
    for query, key, start, stop, undenoised, denoised, logit in zip(
      *(column[kept].tolist() for column in columns), strict=True
    ):
      found = [(names[run[row]], rank[row], score[row]) for row in range(start, stop)]
      negatives[query].append(passage[key] + mined.origin(found, undenoised, denoised, logit))
    for query in queries:
      if query in positives:
        yield mined.line(
          self._asked.ids[query], self._asked.texts[query], positives[query], negatives[query]
        )

  def _read(self, spilled: _Spilled, number: int, depth: int | None) -> np.ndarray:
    """A run's rows of the bucket, in order.

    Raises InputError where rank and score contradict each other, or a document comes twice.
    """
    keys = self._asked.keys
    rows = spilled.buckets.read(number)
    spilled.buckets.drop(number)
    if self._options.drop_same_id:
      rows = rows[rows['doc'] != keys[rows['query']]]
    ranking = pools.rank_rows(rows, depth or len(rows))
    if len(ranking.contrary):
      worst = ranking.contrary[:1]
      (name,) = runs.name_rows(
        spilled.path, [(int(keys[worst['query'][0]]), int(worst['doc'][0]))]
      )[:1]
      raise InputError(
        f'{spilled.path}, {name}: another document of the query has a higher score and a worse '
        'rank; ranks must follow falling '
        'scores (is the score a distance?)'
      )
    if len(ranking.repeated):
      twice = ranking.repeated[:1]
      names = runs.name_rows(
        spilled.path, [(int(keys[twice['query'][0]]), int(twice['doc'][0]))] * 2
      )
      raise InputError(f'{spilled.path}: a document comes twice for a query: {", ".join(names)}')
    self._report.count_rows(
      f'rows of {spilled.name} that share their rank with another of their query: ordered by score',
      spilled.path,
      keys[ranking.doubtful['query']],
      ranking.doubtful['doc'],
    )
    return ranking.rows

  def _rounds(self, pool: Pool, load: mined.Loader) -> Float64[np.ndarray, 'candidates']:
    """Scores candidates in the order of their lots until every query has its denoised sample: what
    comes after is in no sample.
    """
    assert self._score is not None
    sample, threshold = self._options.sample, self._options.threshold
    logits = np.full(len(pool.query), np.nan)
    size = len(self._asked.ids)
    more = np.ones(size, bool)
    for scored in range(0, int(pool.place.max(initial=-1)) + 1, sample):
      rows = np.flatnonzero(
        more[pool.query] & (pool.place >= scored) & (pool.place < scored + sample)
      )
      load.read(pool.doc[rows])
      pairs = [
        (self._asked.texts[query], load.passages[key].joined)
        for query, key in zip(pool.query[rows].tolist(), pool.doc[rows].tolist(), strict=True)
      ]
      for start in range(0, len(pairs), _PAIRS):
        found = np.asarray(self._score(pairs[start : start + _PAIRS]), np.float64)
        if not np.isfinite(found).all():
          query, text = pairs[start + int(np.flatnonzero(~np.isfinite(found))[0])]
          raise InputError(
            f'the reranker gives no finite score for the query {query!r:.80} and the passage '
            f'{text!r:.80}'
          )
        logits[rows[start : start + _PAIRS]] = found
      more = np.bincount(pool.query[expit(logits) < threshold], minlength=size) < sample
    return logits

  def _count_positives(
    self, own: slice, text: Int64[np.ndarray, 'positives'], offsets: Int64[np.ndarray, 'positives']
  ) -> None:
    asked, mine = self._asked, self._asked.positive_own[own]
    names = [
      f'{asked.ids[asked.positive_query[own.start + row]]} {asked.positive_ids[own.start + row]}'
      for row in np.flatnonzero(mine & (offsets < 0))[:_LISTED].tolist()
    ]
    self._report.count(
      'positives that are not in the corpus: ignored',
      int(np.count_nonzero(mine & (offsets < 0))),
      names,
    )
    self._report.count(
      'positives without text: ignored',
      int(np.count_nonzero(mine & (offsets >= 0) & (text < 0))),
      trouble=False,
    )
    idle = np.setdiff1d(asked.positive_query[own], asked.positive_query[own][mine & (text >= 0)])
    self._report.count(
      'queries whose positives are not in the corpus or have no text: left out',
      len(idle),
      [asked.ids[query] for query in idle[:_LISTED].tolist()],
    )

  def _count_pool(
    self,
    first: int,
    stop: int,
    tables: list[np.ndarray],
    pool: Pool,
    chosen: pools.Selection,
    logits: np.ndarray,
  ) -> None:
    report, asked, sample = self._report, self._asked, self._options.sample
    size = stop - first

    def a_query(queries: np.ndarray) -> np.ndarray:
      return np.bincount(queries - first, minlength=size)

    rows = sum(a_query(table['query']) for table in tables)
    candidates, denoised = a_query(pool.query), a_query(pool.query[chosen.denoised])
    for what, which in (
      ('queries that no run has: kept, without negatives', rows == 0),
      (
        'queries with no candidate left beside their positives: kept, without negatives',
        (rows > 0) & (candidates == 0),
      ),
    ):
      report.count(
        what,
        int(np.count_nonzero(which)),
        [asked.ids[first + row] for row in np.flatnonzero(which)[:_LISTED].tolist()],
      )
    found = {
      'candidates': len(pool.query),
      'rows with the text of a positive: no candidates': pool.positives,
      'rows with a text that the run has before under another id: ignored': pool.copies,
      'queries with fewer candidates than the sample': int(
        np.count_nonzero((candidates > 0) & (candidates < sample))
      ),
      'un-denoised negatives': int(np.count_nonzero(chosen.undenoised)),
    }
    for number, name in enumerate(self._ranked):
      found[f'candidates of {name}'] = int(np.count_nonzero(pool.origins[0] == number))
    if self._score or self._given:
      found |= {
        'candidates with a reranker score': int(np.count_nonzero(~np.isnan(logits))),
        'denoised negatives': int(np.count_nonzero(chosen.denoised & chosen.kept)),
        'queries with fewer denoised negatives than the sample': int(
          np.count_nonzero(denoised < sample)
        ),
      }
    found['negatives in the file'] = int(np.count_nonzero(chosen.kept))
    for what, count in found.items():
      report.count(what, count, trouble=False)
