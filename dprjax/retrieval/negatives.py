"""Unified negative mining (DPTDR section 3.3): makes a training file from runs and judgements.

DuckDB holds the passages, the rows of the runs and the pools in temporary files; only the queries
are in memory. A candidate of a query is a text that a run found and that differs from all
positives. Its origins are the rows of all runs that found it, under any id. A random number (its
lot), from the seed and the ids of query and passage, orders the candidates of a query. The first
few are a sample that does not depend on other candidates. docs/mining.md describes the steps and
the file.

Every ORDER BY ends in a unique column, so that the number of threads does not change the file.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import UInt64

from dprjax.base import cli, files, flags, hashes
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress, duration
from dprjax.text import runs, texts
from dprjax.text.examples import MINED_SOURCES
from dprjax.text.qrels import read_qrels
from dprjax.text.texts import PassageRecord, read_texts

if TYPE_CHECKING:
  from duckdb import DuckDBPyConnection

Score = Callable[[Sequence[tuple[str, str]], Callable[[int], None]], np.ndarray]
"""Maps (query, passage) texts to logits [n] of relevance; calls the second with the number done."""

logger = logging.getLogger('dprjax')

_LISTED = 5
_MEMORY = '1GB'  # of tables and operators; more goes to the disk
_CHUNK = 1 << 14  # passages inserted at a time
_PAIRS = 4096  # pairs in a call of the reranker

# Queries without a number are known and not mined. `same` is the number of the first query with the
# same text. `digest` stands for a text: 64 bits of a hash of its words, NULL for no words.
_SCHEMA = """
CREATE TABLE queries (id VARCHAR, number INTEGER, same INTEGER);
CREATE TABLE passages (number INTEGER, id VARCHAR, title VARCHAR, text VARCHAR, digest UBIGINT);
CREATE TABLE positives (query INTEGER, place INTEGER, doc VARCHAR);
CREATE TABLE ranked (
  run INTEGER, query INTEGER, doc VARCHAR, given INTEGER, score DOUBLE, line BIGINT, lot UBIGINT,
  rank INTEGER);
CREATE TABLE logits (query INTEGER, digest UBIGINT, logit DOUBLE);
"""
_ROWS = """
CREATE OR REPLACE TABLE rows (
  query INTEGER, doc VARCHAR, given INTEGER, score DOUBLE, line BIGINT, lot UBIGINT)
"""
_PROBABILITY = '1 / (1 + exp(-logit))'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiningOptions:
  """Options of mining, with their flags."""

  depth: int = flag('rows of every run, a query', 200)
  sample: int = flag('negatives a query of each source', 30)
  threshold: float = flag(
    'candidates with a lower probability (sigmoid of the score) are denoised', 0.1, most=1
  )
  seed: int = flag('of the samples', 0, least=0)
  texts: bool = flag('write texts, not only ids; false if training reads the corpus', True)
  drop_same_id: bool = flags.drop_same_id('is not a negative of it')
  score_positives: bool = flag(
    'also write scores of positives, for config.distillation; with --reranker or --reranked', False
  )


class _Queries(NamedTuple):
  ids: list[str]
  texts: list[str]


def mine(
  *,
  queries: str,
  corpus: str,
  qrels: str,
  retrievers: Mapping[str, str],
  out: str,
  reranked: str | None = None,
  score: Score | None = None,
  options: MiningOptions = MiningOptions(),
) -> dict[str, Any]:
  """Writes the training file: a line for every judged query with a positive; returns a report.

  Args:
    qrels: judgements; grades above 0 are positives.
    reranked: a TREC run with the logits of a reranker as scores.
    score: the reranker, in place of ``reranked``. Without both there are no denoised negatives.
  """
  report = ReadReport()
  began = time.monotonic()
  with _database() as tables:
    judged = _add_queries(tables, queries, qrels, report)
    _add_passages(tables, corpus)
    for number, (name, path) in enumerate(retrievers.items()):
      _read_run(tables, name, path, options, report)
      _rank(tables, number, name, options.depth, report)
    if reranked:
      _read_run(tables, 'the reranked run', reranked, options, report)
      tables.execute(_JOIN_LOGITS)
    _make_pools(tables, list(retrievers), report)
    if score:
      _score_candidates(tables, judged, options, score)
    denoise = bool(score or reranked)
    _choose(tables, judged, options, report, denoise)
    if not report.counts['candidates']:
      raise InputError(
        f'no run has a candidate for any of {len(judged.ids):,} queries: search these queries '
        f'first ({" ".join(str(report).split())})'
      )
    scored = report.counts['candidates with a reranker score']
    if denoise and not options.score_positives and not report.counts['denoised negatives']:
      raise InputError(
        f'no denoised negative: the reranker gives none of {scored:,} candidates a probability '
        f'below --threshold={options.threshold:g}; raise it, train the reranker longer, or mine '
        'without it'
      )
    with files.atomic_write(out, 'wb') as file:
      written = 0
      for line in _lines(tables, judged, list(retrievers), options):
        file.write(line)
        written += 1
  seconds = time.monotonic() - began
  logger.info('%s: %s, %s\n%s', out, counted(written, 'queries'), duration(seconds), report)
  return {
    'settings': {one.name: getattr(options, one.name) for one in dataclasses.fields(MiningOptions)},
    'retrievers': dict(retrievers),
    'reranked': reranked,
    'queries': written,
    'counts': dict(report.counts),
    'seconds': seconds,
  }


@contextlib.contextmanager
def _database() -> Iterator['DuckDBPyConnection']:
  """The tables of `_SCHEMA`, in temporary files."""
  with cli.loading():  # an exception inside it would abort the process
    import duckdb  # takes .1 s

  with (
    tempfile.TemporaryDirectory(prefix='dprjax-') as folder,
    duckdb.connect(
      pathlib.Path(folder) / 'tables.duckdb',
      config={'memory_limit': _MEMORY, 'temp_directory': folder},
    ) as tables,
  ):
    tables.execute(_SCHEMA)
    yield tables


def _add_queries(
  tables: 'DuckDBPyConnection', queries: str, qrels: str, report: ReadReport
) -> _Queries:
  judged = read_qrels(qrels)
  known = {query.id: query.text for query in read_texts(queries, 'query')}
  unknown = [query_id for query_id in judged if query_id not in known]
  report.add('judged queries that are not in the queries: left out', len(unknown), unknown)
  positives = {
    query_id: [doc for doc, grade in judged[query_id].items() if grade > 0]
    for query_id in known
    if query_id in judged
  }
  ids = [query_id for query_id, docs in positives.items() if docs and known[query_id]]
  numbers = {query_id: number for number, query_id in enumerate(ids)}
  idle = [query_id for query_id in positives if query_id not in numbers]
  what = 'queries without a positive or without text: left out'
  report.add(what, len(idle), idle)
  if not ids:
    raise InputError(
      f'{qrels}: no query of {queries} has a passage graded above 0, so there is nothing to mine'
    )
  first: dict[bytes, int] = {}
  same = {id_: first.setdefault(hashes.sameness(known[id_]), numbers[id_]) for id_ in ids}
  columns = {
    'id': list(known),
    'number': [numbers.get(query_id) for query_id in known],
    'same': [same.get(query_id) for query_id in known],
  }
  _insert(tables, 'queries', columns)
  rows = [(numbers[id_], place, doc) for id_ in ids for place, doc in enumerate(positives[id_])]
  query, place, doc = zip(*rows, strict=True)
  _insert(tables, 'positives', {'query': query, 'place': place, 'doc': doc})
  return _Queries(ids, [known[query_id] for query_id in ids])


def _insert(tables: 'DuckDBPyConnection', name: str, columns: Mapping[str, Any]) -> None:
  tables.register('new', pa.table({key: pa.array(column) for key, column in columns.items()}))
  tables.execute(f'INSERT INTO {name} BY NAME FROM new')
  tables.unregister('new')


def _add_passages(tables: 'DuckDBPyConnection', path: str) -> None:
  progress, count = Progress('passages', task=f'reading {path}'), 0
  passages = (entry.record for entry in texts.Texts(path, 'passage').entries())
  while some := list(itertools.islice(passages, _CHUNK)):
    ids, titles, bodies = zip(*some, strict=True)
    columns = {
      'number': range(count, count + len(some)),
      'id': ids,
      'title': titles,
      'text': bodies,
      'digest': pa.array([digest(one.joined) for one in some], pa.uint64()),
    }
    _insert(tables, 'passages', columns)
    count += len(some)
    progress(count)


def digest(text: str) -> int | None:
  """64 bits of a hash of the `hashes.sameness` of a text; None without words."""
  words = hashes.sameness(text)
  return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) if words else None


def _read_run(
  tables: 'DuckDBPyConnection', name: str, path: str, options: MiningOptions, report: ReadReport
) -> None:
  """Replaces ``rows`` by a run."""
  tables.execute(_ROWS)
  progress, done = Progress('rows', task=f'reading {path}'), 0
  for block in runs.read_blocks(path):
    columns = {
      'query': block.query_ids,
      'doc': block.doc_ids,
      'given': block.ranks,
      'score': block.scores,
      'line': block.lines,
      'lot': lots(runs.keys(block.query_ids), runs.keys(block.doc_ids), options.seed),
    }
    tables.register('block', pa.table(columns))
    tables.execute(
      'INSERT INTO rows SELECT number, doc, given, score, line, lot FROM block JOIN queries '
      'ON id = query WHERE number IS NOT NULL AND NOT ($drop_same_id AND doc = query)',
      {'drop_same_id': options.drop_same_id},
    )
    unknown = tables.execute(
      'SELECT query, count(*) FROM block ANTI JOIN queries ON id = query GROUP BY query '
      'ORDER BY min(line)'
    ).fetchall()
    what = f'rows of {name} whose query is not in the queries: ignored'
    report.add(what, sum(count for _, count in unknown), [query for query, _ in unknown])
    done += len(block.scores)
    progress(done, block.fraction)
  tables.unregister('block')
  # The ranks of a query, by falling score.
  tables.execute(
    """
    CREATE OR REPLACE TEMP TABLE steps AS
    SELECT *, given - lag(given) OVER (
      PARTITION BY query ORDER BY score::FLOAT DESC, given, line) AS step
    FROM rows QUALIFY step <= 0
    """
  )
  twice = 'SELECT query, doc FROM rows GROUP BY ALL HAVING count(*) > 1 ORDER BY min(line) LIMIT 1'
  for fault, where in (
    ('ranks do not follow falling scores (is the score a distance?)', 'steps WHERE step < 0'),
    ('a document occurs twice for a query', f'rows SEMI JOIN ({twice}) USING (query, doc)'),
  ):
    if samples := _named(tables, where):
      raise InputError(f'{path}: {fault}: {", ".join(samples[:2])}')
  what = f'rows of {name} that share their rank with another of their query: ordered by score'
  report.add(what, _count(tables, 'steps'), _named(tables, 'steps'))


def lots(
  queries: UInt64[np.ndarray, ' n'], docs: UInt64[np.ndarray, ' n'], seed: int
) -> UInt64[np.ndarray, ' n']:
  """Random numbers that depend only on the seed and the keys of queries and documents."""
  stream = hashes.mix(np.random.default_rng(seed).integers(0, 2**63, 1, dtype=np.uint64))
  with np.errstate(over='ignore'):
    return hashes.mix(hashes.mix(queries + stream) ^ docs)


def _named(tables: 'DuckDBPyConnection', rows: str) -> list[str]:
  """'line 7: query q3 document d12 rank 4 score 0.5' of the first of some rows of a run."""
  return [
    f'line {line}: query {query} document {doc} rank {rank} score {score!r}'
    for line, query, doc, rank, score in tables.execute(
      f'SELECT line, id, doc, given, score FROM (FROM {rows}) JOIN queries ON number = query '
      f'ORDER BY line LIMIT {_LISTED}'
    ).fetchall()
  ]


def _count(tables: 'DuckDBPyConnection', rows: str) -> int:
  ((count,),) = tables.execute(f'SELECT count(*) FROM {rows}').fetchall()
  return count


def _rank(
  tables: 'DuckDBPyConnection', number: int, name: str, depth: int, report: ReadReport
) -> None:
  """Adds the best of ``rows`` to ``ranked``, in the order of `dprjax.base.ranking`."""
  tables.execute(
    """
    INSERT INTO ranked
    SELECT $number, *, row_number() OVER (
      PARTITION BY query ORDER BY score::FLOAT DESC, doc DESC) AS rank
    FROM rows QUALIFY rank <= $depth
    """,
    {'number': number, 'depth': depth},
  )
  unknown = f'(FROM ranked ANTI JOIN passages ON id = doc WHERE run = {number})'
  what = f'rows of {name} with a passage that is not in the corpus: ignored'
  report.add(what, _count(tables, unknown), _named(tables, unknown))


# The score of a text is the highest of its passages.
_JOIN_LOGITS = """
INSERT INTO logits
SELECT query, digest, max(score) FROM rows JOIN passages ON id = doc
WHERE digest IS NOT NULL GROUP BY ALL
"""


def _make_pools(tables: 'DuckDBPyConnection', names: Sequence[str], report: ReadReport) -> None:
  """Makes ``origins``, the rows that candidates come from, and ``candidates``."""
  tables.execute(
    """
    CREATE TABLE forbidden AS
    SELECT DISTINCT twin.number AS query, digest
    FROM positives JOIN queries own ON own.number = query JOIN queries twin USING (same)
    JOIN passages ON passages.id = doc WHERE digest IS NOT NULL;

    CREATE TABLE found AS
    SELECT run, query, digest, rank, score, lot, passages.number AS passage
    FROM ranked JOIN passages ON id = doc WHERE digest IS NOT NULL;

    CREATE TABLE origins AS
    SELECT run, query, digest, min(rank) AS rank, arg_min(score, rank) AS score,
      arg_min(lot, rank) AS lot, arg_min(passage, rank) AS passage
    FROM found ANTI JOIN forbidden USING (query, digest) GROUP BY ALL
    """
  )
  # The best row of a text, by rank and then run, gives its passage and its lot.
  tables.execute(
    f"""
    CREATE TABLE candidates AS
    SELECT *, row_number() OVER (PARTITION BY query ORDER BY lot, passage) - 1 AS place
    FROM (
      SELECT query, digest, arg_min(lot, rank * {len(names)} + run) AS lot,
        arg_min(passage, rank * {len(names)} + run) AS passage
      FROM origins GROUP BY ALL)
    """
  )
  positives = _count(tables, 'found SEMI JOIN forbidden USING (query, digest)')
  copies = _count(tables, 'found') - positives - _count(tables, 'origins')
  for what, number in (
    ('candidates', _count(tables, 'candidates')),
    ('rows with the text of a positive: left out', positives),
    ('rows with a text that the run has before under another id: ignored', copies),
    *(
      (f'candidates of {name}', _count(tables, f'origins WHERE run = {run}'))
      for run, name in enumerate(names)
    ),
  ):
    report.add(what, number)


def _score_candidates(
  tables: 'DuckDBPyConnection', judged: _Queries, options: MiningOptions, score: Score
) -> None:
  """Scores candidates in order of their lots until every query has its denoised sample."""
  progress = Progress('pairs', task='scoring')
  (deepest,) = tables.execute('SELECT coalesce(max(place), -1) FROM candidates').fetchall()[0]
  for first in range(0, deepest + 1, options.sample):
    pairs = f"""
      candidates JOIN passages ON number = passage
      WHERE place >= {first} AND place < {first + options.sample} AND query NOT IN (
        SELECT query FROM logits WHERE {_PROBABILITY} < {options.threshold!r} GROUP BY query
        HAVING count(*) >= {options.sample})
      ORDER BY query, place
    """
    _score_pairs(tables, judged, pairs, score, progress)
  if options.score_positives:
    pairs = """
      positives JOIN passages ON id = doc WHERE digest IS NOT NULL
      QUALIFY row_number() OVER (PARTITION BY query, digest ORDER BY place) = 1
      ORDER BY query, place
    """
    _score_pairs(tables, judged, pairs, score, progress)


def _score_pairs(
  tables: 'DuckDBPyConnection',
  judged: _Queries,
  pairs: str,
  score: Score,
  progress: Progress,
) -> None:
  cursor = tables.cursor().execute(f'SELECT query, passages.digest, title, text FROM {pairs}')
  while some := cursor.fetchmany(_PAIRS):
    queries, digests, titles, bodies = zip(*some, strict=True)
    joined = [PassageRecord('', *parts).joined for parts in zip(titles, bodies, strict=True)]
    asking = list(zip((judged.texts[query] for query in queries), joined, strict=True))
    scores = np.asarray(score(asking, progress), np.float64)
    progress.advance(len(some))
    columns = {'query': queries, 'digest': pa.array(digests, pa.uint64()), 'logit': scores}
    _insert(tables, 'logits', columns)


def _choose(
  tables: 'DuckDBPyConnection',
  judged: _Queries,
  options: MiningOptions,
  report: ReadReport,
  denoise: bool,
) -> None:
  """Makes ``chosen``: the first candidates of every query, and the first of the denoised ones."""
  tables.execute(
    f"""
    CREATE TABLE chosen AS
    SELECT *, undenoised OR (denoised AND $sample >= row_number() OVER (
      PARTITION BY query, denoised ORDER BY place)) AS kept
    FROM (
      SELECT *, place < $sample AS undenoised,
        coalesce({_PROBABILITY} < $threshold, false) AS denoised
      FROM candidates LEFT JOIN logits USING (query, digest))
    """,
    {'sample': options.sample, 'threshold': options.threshold},
  )
  _count_queries(tables, judged, options, report, denoise)
  counts = {'un-denoised negatives': 'undenoised', 'negatives in the file': 'kept'}
  if denoise:
    counts |= {
      'candidates with a reranker score': 'logit IS NOT NULL',
      'denoised negatives': 'denoised AND kept',
    }
  for what, rows in counts.items():
    report.add(what, _count(tables, f'chosen WHERE {rows}'))


def _count_queries(
  tables: 'DuckDBPyConnection',
  judged: _Queries,
  options: MiningOptions,
  report: ReadReport,
  denoise: bool,
) -> None:
  known = 'positives JOIN passages ON id = doc WHERE digest IS NOT NULL'

  def positives(where: str) -> list[str]:
    cursor = tables.execute(f'SELECT query, doc FROM positives {where} ORDER BY query, place')
    return [f'{judged.ids[query]} {doc}' for query, doc in cursor.fetchall()]

  absent = 'ANTI JOIN passages ON id = doc'
  if lost := positives(absent):
    forms = '(SELECT nfc_normalize(id) AS form FROM passages) ON form = nfc_normalize(doc)'
    others = positives(f'{absent} SEMI JOIN {forms}')
    what = 'positives whose ids have another Unicode form (NFC, NFD) in the corpus'
    report.add(what, len(others), others)
  report.add('positives that are not in the corpus: ignored', len(lost), lost)
  empty = _count(tables, 'positives JOIN passages ON id = doc WHERE digest IS NULL')
  report.add('positives without text: ignored', empty)
  enough = f'GROUP BY query HAVING count(*) >= {options.sample}'
  groups = {
    'queries whose positives are not in the corpus or have no text: left out': (
      f'number NOT IN (SELECT query FROM {known})'
    ),
    'queries that no run has: kept, without negatives': 'number NOT IN (SELECT query FROM ranked)',
    'queries with no candidate but positives: kept, without negatives': (
      'number IN (SELECT query FROM ranked) AND number NOT IN (SELECT query FROM candidates)'
    ),
    'queries with fewer candidates than the sample': (
      'number IN (SELECT query FROM candidates) AND number NOT IN '
      f'(SELECT query FROM candidates {enough})'
    ),
  }
  if denoise:
    groups['queries with fewer denoised negatives than the sample'] = (
      f'number NOT IN (SELECT query FROM chosen WHERE denoised {enough})'
    )
  for what, where in groups.items():
    rows = tables.execute(
      f'SELECT number FROM queries WHERE number IS NOT NULL AND {where} ORDER BY number'
    ).fetchall()
    report.add(what, len(rows), [judged.ids[number] for (number,) in rows[:_LISTED]])


def _lines(
  tables: 'DuckDBPyConnection', judged: _Queries, names: Sequence[str], options: MiningOptions
) -> Iterator[bytes]:
  """The lines of the queries that have a positive, in the order of the queries.

  A line has the format of Tevatron; a passage without texts has only its id. A negative also has
  the retriever, rank and score of the run that ranks it best, the same three of others (``also``),
  and its sources. `dprjax.text.examples` reads it.
  """
  cursor = tables.execute(
    """
    WITH sources AS (
      SELECT query, digest, list_sort(list({'rank': rank, 'run': run, 'score': score})) AS rows
      FROM origins SEMI JOIN (FROM chosen WHERE kept) USING (query, digest) GROUP BY ALL)
    SELECT query, side, id, if($texts, title, ''), if($texts, text, ''), logit, rows, undenoised,
      denoised
    FROM (
      SELECT 1 AS side, query, place, passage, rows, undenoised, denoised, logit
      FROM chosen JOIN sources USING (query, digest) WHERE kept
      UNION ALL BY NAME
      SELECT 0 AS side, query, place, number AS passage, if($score_positives, logit, NULL) AS logit
      FROM positives JOIN passages ON id = doc LEFT JOIN logits USING (query, digest)
      WHERE passages.digest IS NOT NULL)
    JOIN passages ON number = passage ORDER BY query, side, place
    """,
    {'texts': options.texts, 'score_positives': options.score_positives},
  )
  progress = Progress('queries', len(judged.ids), 'mining')
  encoder = json.JSONEncoder(ensure_ascii=False)
  rows = itertools.chain.from_iterable(iter(lambda: cursor.fetchmany(_PAIRS), []))
  for query, several in itertools.groupby(rows, key=lambda row: row[0]):
    positives: list[dict[str, Any]] = []
    negatives: list[dict[str, Any]] = []
    for _, side, id_, title, text, logit, origins, *drawn in several:
      passage = {'docid': id_} | ({'title': title, 'text': text} if options.texts else {})
      others: list[dict[str, Any]] = []
      if side:
        first, *others = (
          {'retriever': names[one['run']], 'rank': one['rank'], 'score': one['score']}
          for one in origins
        )
        sources = itertools.compress(MINED_SOURCES, drawn)
        passage |= {**first, 'sources': list(sources)}
      if logit is not None:
        passage['reranker_score'] = logit
      if others:
        passage['also'] = others
      (negatives if side else positives).append(passage)
    if positives:
      record = {
        'query_id': judged.ids[query],
        'query': judged.texts[query],
        'positive_passages': positives,
        'negative_passages': negatives,
      }
      yield f'{encoder.encode(record)}\n'.encode()
    progress(query + 1)
