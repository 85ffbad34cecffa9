"""Rescores the best passages of a run, in parts that outlast an interruption."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, outputs, provenance, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.text import trec
from dprjax.text.fields import report_ids
from dprjax.text.texts import Texts, read_several

if TYPE_CHECKING:
  from dprjax.retrieval.reranker import Reranker

logger = logging.getLogger('dprjax')

TAG = 'dprjax-rerank'
_PARTS, _FORMAT = 'parts.json', 1
_PART_FORMAT = 'dprjax.scores'
_DIGEST = 32  # bytes of a SHA-256


def rescore(
  reranker: Reranker,
  run: str,
  queries: Sequence[str],
  corpus: Sequence[str],
  out: str,
  *,
  depth: int = 100,
  shard_pairs: int = 10_000,
) -> dict[str, Any]:
  """Rescores the best ``depth`` passages of each query in a run; returns a report.

  ``OUT.parts`` has the scores so far, ``shard_pairs`` pairs a file. The same call continues
  after an interruption.
  """
  ranked = trec.read_run(run).top(depth)
  settings = {
    'format': _FORMAT,
    **reranker.settings,
    'depth': depth,
    'shard_pairs': shard_pairs,
    'run_sha256': files.sha256_file(run),
    'queries_sha256': [Texts(path, 'query').sha256() for path in queries],
    'corpus_sha256': [Texts(path, 'passage').sha256() for path in corpus],
  }
  done = _finished(out, settings)
  if done is not None:
    logger.info('%s is already complete', out)
    parts_folder = epath.Path(f'{out}.parts')
    if (_read_parts(parts_folder) or {}).get('settings') == settings:  # left by a killed command
      files.discard(parts_folder)
    return done
  query_texts = read_several(queries, 'query', set(ranked.query_ids))
  known_queries = np.array([query_id in query_texts for query_id in ranked.query_ids], bool)
  unknown_queries = [id_ for id_ in ranked.query_ids if id_ not in query_texts]
  report_ids(
    f'{run}: {len(unknown_queries):,} of {counted(len(ranked), "queries")} not in '
    f'{", ".join(queries)}',
    unknown_queries,
    'left out',
  )
  doc_ids = [ranked.doc_ids[doc] for doc in np.unique(ranked.docs).tolist()]
  doc_texts = read_several(corpus, 'passage', set(doc_ids))
  known_docs = np.array([doc_id in doc_texts for doc_id in ranked.doc_ids], bool)
  unknown_docs = [id_ for id_ in doc_ids if id_ not in doc_texts]
  report_ids(
    f'{run}: {counted(len(unknown_docs), "passages")} not in {", ".join(corpus)}',
    unknown_docs,
    'left out',
  )
  ranked = ranked.keep(known_queries[ranked.query_of_row()] & known_docs[ranked.docs])
  if not len(ranked.docs):
    raise InputError(
      f'{run}: none of its pairs is in {", ".join((*queries, *corpus))}: nothing to score'
    )

  began, cut_before = time.monotonic(), reranker.truncated
  parts = _Parts(epath.Path(f'{out}.parts'), settings, len(ranked.docs), shard_pairs)
  scores = _score(reranker, ranked, query_texts, doc_texts, parts)
  seconds = time.monotonic() - began
  trec.write_run(out, ranked.rescored(scores), TAG)
  if cut := reranker.truncated - cut_before:
    logger.info('%s of these pairs were cut at %d tokens', f'{cut:,}', reranker.max_length)
  report = {
    'settings': settings,
    'out_sha256': files.sha256_file(out),
    'queries': int(np.count_nonzero(np.diff(ranked.offsets))),
    'pairs': len(ranked.docs),
    'unknown_queries': len(unknown_queries),
    'unknown_passages': len(unknown_docs),
    'seconds': seconds,
  }
  outputs.write_report(out, report)
  files.discard(parts.folder)
  return report


class _Parts:
  """Computed scores in a folder beside the run, a file a shard, until the run is complete."""

  def __init__(self, folder: epath.Path, settings: dict[str, Any], pairs: int, shard_pairs: int):
    self.folder = folder
    self.shards = [
      range(start, min(start + shard_pairs, pairs)) for start in range(0, pairs, shard_pairs)
    ]
    about = {'format': _PART_FORMAT, 'settings': settings, 'pairs': pairs}
    self._about = provenance.digest(about)
    before = _read_parts(folder)
    if before == about:
      return
    if before is not None and any(folder.glob('scores-*')):
      settings_before = before.get('settings', {})
      changed = [name for name, value in settings.items() if settings_before.get(name) != value]
      raise InputError(
        f'{folder} has scores of an interrupted run with another '
        f'{" and ".join(changed) or "number of pairs"}; finish that run, choose another --out, or '
        f'remove {folder}'
      )
    with files.atomic_path(folder) as aside:
      aside.mkdir(parents=True)
      files.write_json(aside / _PARTS, about)

  def load(self, number: int) -> Float[np.ndarray, ' n'] | None:
    """The scores of a shard; None if missing or damaged."""
    path = self._file(number)
    if not path.exists():
      return None
    content = path.read_bytes()
    digest, values = content[:_DIGEST], content[_DIGEST:]
    scores = None
    if digest == self._digest(number, values):
      scores = np.frombuffer(values, '<f4')
    if scores is None or not np.isfinite(scores).all():
      logger.info('%s is damaged: its pairs are scored again', path)
      return None
    return scores

  def save(self, number: int, scores: Float[np.ndarray, ' n']) -> None:
    values = scores.astype('<f4').tobytes()
    with files.atomic_write(self._file(number), 'wb') as file:
      file.write(self._digest(number, values) + values)

  def _digest(self, number: int, values: bytes) -> bytes:
    return hashlib.sha256(f'{self._about} {number} '.encode() + values).digest()

  def _file(self, number: int) -> epath.Path:
    return self.folder / f'scores-{number:05d}.f32'


def _read_parts(folder: epath.Path) -> dict[str, Any] | None:
  if not folder.exists() or (folder.is_dir() and outputs.is_vacant(folder)):
    return None
  if (folder / _PARTS).exists():
    about = reading.read_json_object(files.regular_file(folder / _PARTS, 'scores'), 'scores')
    if about.get('format') == _PART_FORMAT:
      return about
  raise InputError(f'{folder} has no scores of dprjax.rerank; move it elsewhere')


def _score(
  reranker: Reranker,
  run: trec.Run,
  query_texts: dict[str, str],
  doc_texts: dict[str, str],
  parts: _Parts,
) -> Float[np.ndarray, ' rows']:
  """Scores of the rows of the run; computes those missing in ``parts``."""
  scores = np.zeros(len(run.docs), np.float32)
  pending = []
  for number, shard in enumerate(parts.shards):
    stored = parts.load(number)
    if stored is None:
      pending.append((number, shard))
    else:
      scores[shard.start : shard.stop] = stored
  todo = sum(len(shard) for _, shard in pending)
  if todo < len(scores):
    logger.info('%s of %s pairs already have scores', f'{len(scores) - todo:,}', f'{len(scores):,}')
  query_of_row = run.query_of_row()
  progress = Progress('pairs', todo, 'scoring')
  for number, shard in pending:
    pairs = [(run.query_ids[query_of_row[row]], run.doc_ids[run.docs[row]]) for row in shard]
    values = reranker.score(
      [(query_texts[query], doc_texts[doc]) for query, doc in pairs], progress
    )
    parts.save(number, values)
    scores[shard.start : shard.stop] = values
    progress.advance(len(shard))
  logger.info(
    '%s of %s scored%s',
    counted(todo, 'pairs'),
    counted(len(run), 'queries'),
    pace(todo, progress.seconds),
  )
  return scores


class _Counts(msgspec.Struct):
  queries: int
  pairs: int
  unknown_queries: int
  unknown_passages: int


def _finished(out: str, settings: dict[str, Any]) -> dict[str, Any] | None:
  """The report of an unchanged run with these settings, if there is one."""
  if not (epath.Path(out).exists() and epath.Path(f'{out}.json').exists()):
    return None
  try:
    report = reading.read_json_object(f'{out}.json', 'report of a run')
    reading.convert(report, f'{out}.json', _Counts)
  except InputError:  # incomplete, or from another command
    return None
  same = report.get('settings') == settings
  same = same and report.get('out_sha256') == files.sha256_file(out)
  return report if same else None
