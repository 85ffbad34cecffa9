"""Rescores the best passages of a run with a cross-encoder.

    python -m dprjax.rerank --backbone=DIR --run=bm25.trec --queries=queries.jsonl
    --corpus=corpus.jsonl --out=reranked.trec

The new run holds each query's first --depth passages of the old one, by their new scores; what lay
deeper is dropped. A score's sigmoid is the probability of relevance. Scores that are done are kept
in OUT.parts, so that the same command after an interruption goes on; beside the run, OUT.json says
how it was made.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.formats import trec
from dprjax.formats.texts import read_texts
from dprjax.inference.reranker import CrossEncoder
from dprjax.runtime import cli, compiled

logger = logging.getLogger('dprjax')

TAG = 'dprjax-rerank'
_PARTS, _FORMAT = 'parts.json', 1


def rerank(
  reranker: CrossEncoder,
  run: str,
  queries: Sequence[str],
  corpus: Sequence[str],
  out: str,
  *,
  depth: int = 100,
  strict: bool = False,
  shard_pairs: int = 10_000,
) -> dict[str, Any]:
  """Rescores ``run`` into ``out``; returns what is written to ``out``.json.

  Args:
    reranker: the cross-encoder.
    run: a TREC run.
    queries, corpus: files of texts, see ``formats.texts.read_texts``. Of the corpus, the texts that
      are scored are held in memory.
    out: the new run.
    depth: passages a query.
    strict: fail where the run names an unknown query or passage, instead of leaving it out.
    shard_pairs: pairs scored between two saves; an interruption loses no more.

  Raises:
    InputError: bad files; nothing is left to score; a score is not finite.
  """
  kept = trec.read_run(run).top(depth)
  settings = {
    'format': _FORMAT,
    'reranker_sha256': reranker.sha256,
    'max_length': reranker.max_length,
    'dtype': reranker.dtype,
    'depth': depth,
    'shard_pairs': shard_pairs,
    'run_sha256': files.sha256_file(run),
    'queries_sha256': [files.sha256_file(path) for path in queries],
    'corpus_sha256': [files.sha256_file(path) for path in corpus],
  }
  done = _finished(out, settings)
  if done is not None and not (strict and done['unknown_queries'] + done['unknown_passages']):
    logger.info('%s is there already, of just these inputs', out)
    return done
  wanted = set(kept.query_ids)
  query_texts = read_wanted(queries, 'query', wanted)
  unknown_queries = [query_id for query_id in kept.query_ids if query_id not in query_texts]
  cli.tell(
    f'{run}: {len(unknown_queries)} of {len(kept)} queries are not in {", ".join(queries)}',
    unknown_queries,
    strict,
    'left out',
  )
  texts = read_wanted(
    corpus, 'passage', {kept.doc_ids[doc] for doc in np.unique(kept.docs).tolist()}
  )
  known_queries = np.array([query_id in query_texts for query_id in kept.query_ids], bool)
  known_docs = np.array([doc_id in texts for doc_id in kept.doc_ids], bool)
  unknown_docs = [kept.doc_ids[doc] for doc in np.unique(kept.docs).tolist() if not known_docs[doc]]
  cli.tell(
    f'{run}: {len(unknown_docs)} passages are not in {", ".join(corpus)}',
    unknown_docs,
    strict,
    'left out',
  )
  kept = kept.keep(known_queries[kept.query_of_row()] & known_docs[kept.docs])
  if not len(kept.docs):
    raise InputError(
      f'{run}: no query and passage of it are in {", ".join((*queries, *corpus))}: there is '
      'nothing to score'
    )

  began, cut = time.monotonic(), reranker.truncated
  scores = _score(
    reranker, kept, query_texts, texts, _Parts(out, settings, len(kept.docs), shard_pairs)
  )
  seconds = time.monotonic() - began
  trec.write_run(out, kept.rescored(scores), TAG)
  if cut := reranker.truncated - cut:
    logger.info(
      '%s of the pairs scored now were longer than %d tokens and were cut there',
      f'{cut:,}',
      reranker.max_length,
    )
  report = {
    'settings': settings,
    'out_sha256': files.sha256_file(out),
    'queries': int(np.count_nonzero(np.diff(kept.offsets))),
    'pairs': len(kept.docs),
    'unknown_queries': len(unknown_queries),
    'unknown_passages': len(unknown_docs),
    'seconds': seconds,
  }
  files.write_json(f'{out}.json', report)
  _Parts.folder_of(out).rmtree()
  return report


def read_wanted(paths: Iterable[str], kind: str, wanted: set[str]) -> dict[str, str]:
  """Id -> text of those wanted, from one or more files; the others are read over.

  Raises:
    InputError: a bad file, or an id that two files have.
  """
  found: dict[str, str] = {}
  for path in paths:
    here = {one.id: one.text for one in read_texts(path, kind, wanted)}
    if twice := next((id_ for id_ in here if id_ in found), None):
      raise InputError(
        f'{path}: {kind} id {twice!r} is in another of the files too; ids must be unique'
      )
    found |= here
  return found


class _Parts:
  """Scores that are done, a file a shard, in a folder beside the run to be."""

  def __init__(self, out: str, settings: dict[str, Any], pairs: int, shard_pairs: int):
    self._folder = self.folder_of(out)
    self.shards = [
      range(start, min(start + shard_pairs, pairs)) for start in range(0, pairs, shard_pairs)
    ]
    fingerprint = json.dumps([settings, pairs])
    if (
      files.read_sidecar(self._folder, _PARTS, 'set of scores of dprjax.rerank', fingerprint)
      is None
    ):
      with files.atomic_path(self._folder) as aside:
        aside.mkdir(parents=True)
        files.write_json(aside / _PARTS, {'fingerprint': fingerprint})

  @staticmethod
  def folder_of(out: str) -> epath.Path:
    return epath.Path(f'{out}.parts')

  def load(self, number: int) -> Float[np.ndarray, ' n'] | None:
    """A shard's scores; None where it is yet to be scored, or its file is damaged."""
    path = self._file(number)
    if not path.exists():
      return None
    try:
      with path.open('rb') as file:
        scores = np.load(file, allow_pickle=False)
    except (ValueError, EOFError):
      return None
    return (
      scores if scores.shape == (len(self.shards[number]),) and scores.dtype == np.float32 else None
    )

  def save(self, number: int, scores: Float[np.ndarray, ' n']) -> None:
    with files.atomic_write(self._file(number), 'wb') as file:
      np.save(file, scores, allow_pickle=False)

  def _file(self, number: int) -> epath.Path:
    return self._folder / f'scores-{number:05d}.npy'


def _score(
  reranker: CrossEncoder,
  run: trec.Run,
  query_texts: dict[str, str],
  texts: dict[str, str],
  parts: _Parts,
) -> Float[np.ndarray, ' rows']:
  """The scores of the run's rows, those that an earlier run of this command left included."""
  scores = np.zeros(len(run.docs), np.float32)
  pending = []
  for number, shard in enumerate(parts.shards):
    found = parts.load(number)
    if found is None:
      pending.append(number)
    else:
      scores[shard.start : shard.stop] = found
  todo = sum(len(parts.shards[number]) for number in pending)
  if todo < len(scores):
    logger.info('%s of %s pairs are scored already', f'{len(scores) - todo:,}', f'{len(scores):,}')
  query_of_row = run.query_of_row()
  progress = Progress('pairs', todo, 'scoring')
  for number in pending:
    shard = parts.shards[number]
    pairs = [(run.query_ids[query_of_row[row]], run.doc_ids[run.docs[row]]) for row in shard]
    values = reranker.score([(query_texts[query], texts[doc]) for query, doc in pairs], progress)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
      query, doc = pairs[bad[0]]
      raise InputError(
        f'the score of query {query} and passage {doc} is not finite ({bad.size} of {len(pairs)} '
        'pairs): '
        f'the weights of {reranker.backbone.path} are damaged, or overflow as they are computed'
      )
    parts.save(number, values)
    scores[shard.start : shard.stop] = values
    progress.advance(len(shard))
  seconds = progress.seconds
  logger.info(
    '%s pairs of %s queries in %s (%.0f a second)',
    f'{todo:,}',
    f'{len(run):,}',
    duration(seconds),
    todo / max(seconds, 1e-9),
  )
  return scores


def _finished(out: str, settings: dict[str, Any]) -> dict[str, Any] | None:
  """The report beside a run that is just what these settings make."""
  if not (epath.Path(out).exists() and epath.Path(f'{out}.json').exists()):
    return None
  report = files.read_json(f'{out}.json', 'report of a run')
  if (
    not isinstance(report, dict)
    or report.get('settings') != settings
    or report.get('out_sha256') != files.sha256_file(out)
  ):
    return None
  return report


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('rerank', __doc__ or '')
  parser.add_argument(
    '--backbone',
    required=True,
    help='the cross-encoder: a Hugging Face directory, a hub id, or package:NAME',
  )
  parser.add_argument('--run', required=True, metavar='run.trec', help='what a retriever found')
  parser.add_argument(
    '--queries',
    required=True,
    action='append',
    metavar='FILE',
    help='jsonl with _id and text, or a tsv of id and text; .gz and .xz too; may be given several '
    'times',
  )
  parser.add_argument(
    '--corpus',
    required=True,
    action='append',
    metavar='FILE',
    help='likewise, with _id, title and text',
  )
  parser.add_argument(
    '--out',
    required=True,
    metavar='reranked.trec',
    help='the new run; its report goes to the same name with .json behind it',
  )
  parser.add_argument(
    '--depth',
    type=cli.positive,
    default=100,
    help='passages a query that are scored; deeper ones are dropped (default: 100)',
  )
  parser.add_argument(
    '--max_length',
    type=cli.positive,
    help="tokens of a pair, the passage is cut first; default: the tokenizer's, at most 512",
  )
  parser.add_argument(
    '--batch_size',
    type=cli.positive,
    default=64,
    help='pairs at a time over all devices (default: 64)',
  )
  parser.add_argument(
    '--dtype',
    choices=('float32', 'bfloat16'),
    default='float32',
    help='of the arithmetic (default: float32)',
  )
  parser.add_argument(
    '--shard_pairs',
    type=cli.positive,
    default=10_000,
    help='pairs scored between two saves (default: 10000)',
  )
  parser.add_argument(
    '--strict',
    action='store_true',
    help='fail where the run names an unknown query or passage, instead of leaving it out',
  )

  def command(args: argparse.Namespace) -> None:
    # Before the model is read: a wrong name should not cost a minute.
    files.output_file(args.out)
    for path, what in (
      (args.run, 'run'),
      *((path, 'queries') for path in args.queries),
      *((path, 'corpus') for path in args.corpus),
    ):
      files.existing(path, what)
    compiled.keep()
    reranker = CrossEncoder.load(
      args.backbone, max_length=args.max_length, batch_size=args.batch_size, dtype=args.dtype
    )
    report = rerank(
      reranker,
      args.run,
      args.queries,
      args.corpus,
      args.out,
      depth=args.depth,
      strict=args.strict,
      shard_pairs=args.shard_pairs,
    )
    logger.info(
      '%s: %s passages for %s queries', args.out, f'{report["pairs"]:,}', f'{report["queries"]:,}'
    )

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
