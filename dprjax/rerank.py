"""Rescores the best passages of a run with a cross-encoder, or with a prompt that judges pairs.

    python -m dprjax.rerank --backbone=DIR [--prompt=qa.npz] --run=bm25.trec \\
        --queries=queries.jsonl --corpus=corpus.jsonl --out=reranked.trec

The new run holds each query's first --depth passages of the old one, ordered by their new scores.
A score's sigmoid is the probability of relevance (of a prompt whose meta's score is probability,
the score is P(yes) - P(no)). OUT.parts keeps the scores that are computed, so
that the same command continues after an interruption; another command does not replace them.
OUT.json says how the run was made.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, outputs, reading, sidecars
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.formats import seen, trec
from dprjax.formats.fields import Record
from dprjax.formats.texts import read_texts
from dprjax.runtime import cli, compiled

if TYPE_CHECKING:
  from dprjax.inference.reranker import Reranker

logger = logging.getLogger('dprjax')

TAG = 'dprjax-rerank'
_PARTS, _FORMAT = 'parts.json', 1
_PART_FORMAT = 'dprjax.scores'
_DIGEST = hashlib.sha256().digest_size  # bytes


def rerank(
  reranker: Reranker,
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
    reranker: the cross-encoder, or the backbone with its prompt.
    run: a TREC run.
    queries, corpus: files of texts, see ``formats.texts.read_texts``. Only the passages that are
      scored are held in memory.
    out: the new run.
    depth: passages a query.
    strict: fail where the run names an unknown query or passage, instead of leaving it out.
    shard_pairs: pairs scored between two saves; an interruption loses no more.

  Raises:
    InputError: bad files; nothing is left to score; a score is not finite; ``out`` is a pipe, or
      OUT.parts holds scores of other settings or inputs.
  """
  inputs = {
    '--run': run,
    '--queries': queries,
    '--corpus': corpus,
    '--backbone, --prompt': reranker.files,
  }
  if files.is_stream(out):
    raise InputError(
      f'--out={out} is a pipe or a device, and what is computed is kept beside the run; give the '
      'name of a file'
    )
  check_inputs(run, queries, corpus)
  with outputs.claim(out, inputs, endings=('', '.json', '.parts'), folders=('.parts',)):
    # Beside what a link points to, as OUT.json.
    final = str(files.resolved(out))
    return _rerank(reranker, run, queries, corpus, final, depth, strict, shard_pairs)


def check_inputs(run: str, queries: Sequence[str], corpus: Sequence[str]) -> None:
  """Raises InputError for a missing or empty file, or one that cannot be read twice."""
  for paths, what in (([run], 'run'), (queries, 'queries'), (corpus, 'corpus')):
    for path in paths:
      files.regular_file(path, what)


def _rerank(
  reranker: Reranker,
  run: str,
  queries: Sequence[str],
  corpus: Sequence[str],
  out: str,
  depth: int,
  strict: bool,
  shard_pairs: int,
) -> dict[str, Any]:
  kept = trec.read_run(run).top(depth)
  settings = {
    'format': _FORMAT,
    **reranker.settings,
    'depth': depth,
    'shard_pairs': shard_pairs,
    'run_sha256': files.sha256_file(run),
    'queries_sha256': [files.sha256_file(path) for path in queries],
    'corpus_sha256': [files.sha256_file(path) for path in corpus],
  }
  done = _finished(out, settings)
  if done is not None and not (strict and done['unknown_queries'] + done['unknown_passages']):
    logger.info('%s is there already, of just these inputs', out)
    _discard_parts(out, settings)
    return done
  query_texts = read_wanted(queries, 'query', set(kept.query_ids))
  known_queries = np.array([query_id in query_texts for query_id in kept.query_ids], bool)
  unknown_queries = [id_ for id_ in kept.query_ids if id_ not in query_texts]
  cli.report_ids(
    f'{run}: {len(unknown_queries):,} of {counted(len(kept), "queries")} not in '
    f'{", ".join(queries)}',
    unknown_queries,
    strict,
    'left out',
  )
  doc_ids = [kept.doc_ids[doc] for doc in np.unique(kept.docs).tolist()]
  doc_texts = read_wanted(corpus, 'passage', set(doc_ids))
  known_docs = np.array([doc_id in doc_texts for doc_id in kept.doc_ids], bool)
  unknown_docs = [id_ for id_ in doc_ids if id_ not in doc_texts]
  cli.report_ids(
    f'{run}: {counted(len(unknown_docs), "passages")} not in {", ".join(corpus)}',
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

  began, cut_before = time.monotonic(), reranker.truncated
  parts = _Parts(out, settings, len(kept.docs), shard_pairs)
  scores = _score(reranker, kept, query_texts, doc_texts, parts)
  seconds = time.monotonic() - began
  trec.write_run(out, kept.rescored(scores), TAG)
  if cut := reranker.truncated - cut_before:
    logger.info(
      '%s of the pairs scored now were longer than %d tokens and were cut there',
      f'{cut:,}',
      reranker.max_length,
    )
  own = seen.read(epath.Path(reranker.backbone.path) / seen.FILE)
  known = seen.of_run(run)
  for role, ids in seen.ids([*query_texts.items()], own).items():
    known[role] = sorted({*known.get(role, ()), *ids})
  report = {
    'settings': settings,
    'out_sha256': files.sha256_file(out),
    'queries': int(np.count_nonzero(np.diff(kept.offsets))),
    'pairs': len(kept.docs),
    'unknown_queries': len(unknown_queries),
    'unknown_passages': len(unknown_docs),
    'seconds': seconds,
    **({'seen': known} if known else {}),
  }
  outputs.write_report(out, report)
  files.discard(parts.folder)
  return report


def read_wanted(paths: Iterable[str], kind: str, wanted: set[str]) -> dict[str, str]:
  """Id -> text of those wanted, from one or more files.

  Raises:
    InputError: a bad file, or an id in two of the files.
  """
  texts: dict[str, str] = {}
  for path in paths:
    added = {text.id: text.text for text in read_texts(path, kind, wanted)}
    if repeated := next((id_ for id_ in added if id_ in texts), None):
      raise InputError(
        f'{path}: {kind} id {repeated!r} is in another of the files too; ids must be unique'
      )
    texts |= added
  return texts


class _Parts:
  """Computed scores, a file a shard, in a folder beside the run.

  A file is a SHA-256 of what follows it (and of the settings and its number) and float32 scores.
  """

  def __init__(self, out: str, settings: dict[str, Any], pairs: int, shard_pairs: int):
    self.folder = epath.Path(f'{out}.parts')
    self.shards = [
      range(start, min(start + shard_pairs, pairs)) for start in range(0, pairs, shard_pairs)
    ]
    self._fingerprint = json.dumps([settings, pairs])
    what = 'set of scores of dprjax.rerank'
    if (
      sidecars.read_sidecar(self.folder, _PARTS, _PART_FORMAT, what, self._fingerprint) is not None
    ):
      return
    if self.folder.exists() and any(self.folder.glob('scores-*')):
      sidecar = reading.read_json_object(self.folder / _PARTS, what)
      before = sidecar.get('settings')
      before = before if isinstance(before, dict) else {}
      other = [name for name, value in settings.items() if before.get(name) != value]
      raise InputError(
        f'{self.folder} holds scores of an interrupted run with another '
        f'{" and ".join(other) or "number of pairs"}; finish that run with its own settings, or '
        f'choose another --out, or remove {self.folder}'
      )
    with files.atomic_path(self.folder) as aside:
      aside.mkdir(parents=True)
      sidecars.write_sidecar(aside, _PARTS, _PART_FORMAT, self._fingerprint, settings=settings)

  def load(self, number: int) -> Float[np.ndarray, ' n'] | None:
    """A shard's scores; None where there are none yet, or their file is damaged."""
    path = self._file(number)
    if not path.exists():
      return None
    content = path.read_bytes()
    digest, values = content[:_DIGEST], content[_DIGEST:]
    if digest != self._digest(number, values) or len(values) != 4 * len(self.shards[number]):
      logger.info('%s is damaged: its pairs are scored again', path)
      return None
    scores = np.frombuffer(values, '<f4').astype(np.float32)
    return scores if np.isfinite(scores).all() else None

  def save(self, number: int, scores: Float[np.ndarray, ' n']) -> None:
    values = scores.astype('<f4').tobytes()
    with files.atomic_write(self._file(number), 'wb') as file:
      file.write(self._digest(number, values) + values)

  def _digest(self, number: int, values: bytes) -> bytes:
    return hashlib.sha256(f'{self._fingerprint} {number} '.encode() + values).digest()

  def _file(self, number: int) -> epath.Path:
    return self.folder / f'scores-{number:05d}.f32'


def _discard_parts(out: str, settings: dict[str, Any]) -> None:
  """Removes the parts of a finished run, which was killed before it could."""
  folder = epath.Path(f'{out}.parts')
  with contextlib.suppress(InputError):
    sidecar = reading.read_json_object(folder / _PARTS, 'scores')
    if sidecar.get('format') == _PART_FORMAT and sidecar.get('settings') == settings:
      files.discard(folder)


def _score(
  reranker: Reranker,
  run: trec.Run,
  query_texts: dict[str, str],
  doc_texts: dict[str, str],
  parts: _Parts,
) -> Float[np.ndarray, ' rows']:
  """The scores of the run's rows; those in ``parts`` are not computed again."""
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
    logger.info('%s of %s pairs are scored already', f'{len(scores) - todo:,}', f'{len(scores):,}')
  query_of_row = run.query_of_row()
  progress = Progress('pairs', todo, 'scoring')
  for number, shard in pending:
    pairs = [(run.query_ids[query_of_row[row]], run.doc_ids[run.docs[row]]) for row in shard]
    values = reranker.score(
      [(query_texts[query], doc_texts[doc]) for query, doc in pairs], progress
    )
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
      query, doc = pairs[bad[0]]
      raise InputError(
        f'the score of query {query} and passage {doc} is not finite ({bad.size} of {len(pairs)} '
        f'pairs): the weights of {reranker.backbone.path} are damaged, or overflow in the '
        'arithmetic'
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


def _finished(out: str, settings: dict[str, Any]) -> dict[str, Any] | None:
  """The report of a run that was made with these settings and is unchanged, if there is one."""
  if not (epath.Path(out).exists() and epath.Path(f'{out}.json').exists()):
    return None
  try:
    report = Record(reading.read_json_object(f'{out}.json', 'report of a run'), f'{out}.json')
    for count in ('queries', 'pairs', 'unknown_queries', 'unknown_passages'):
      report.whole(count, 0, 2**63)
  except InputError:  # cut off, or not of this command: it is written anew
    return None
  same = report.values.get('settings') == settings
  same = same and report.values.get('out_sha256') == files.sha256_file(out)
  return report.values if same else None


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('rerank', __doc__ or '')
  parser.add_argument(
    '--backbone',
    required=True,
    help='the cross-encoder: a Hugging Face directory, a hub id, or package:NAME; with --prompt, '
    'a backbone with a masked-LM head',
  )
  parser.add_argument(
    '--prompt', help='a prompt.npz of pairs for that backbone, or USER/NAME[@COMMIT] on the hub'
  )
  parser.add_argument('--run', required=True, metavar='run.trec', help="a retriever's run")
  parser.add_argument(
    '--queries',
    required=True,
    action='append',
    metavar='FILE',
    help='jsonl with _id and text, or a tsv of id and text; .gz and .xz too; may be repeated',
  )
  parser.add_argument(
    '--corpus',
    required=True,
    action='append',
    metavar='FILE',
    help='the same, with _id, title and text',
  )
  parser.add_argument(
    '--out',
    required=True,
    metavar='reranked.trec',
    help='the new run; its report goes to reranked.trec.json',
  )
  parser.add_argument(
    '--depth',
    type=cli.positive,
    default=100,
    help='passages scored per query; deeper ones are dropped (default: 100)',
  )
  parser.add_argument(
    '--max_length',
    type=cli.positive,
    help="tokens of a pair, the passage is cut first; default: the tokenizer's, at most 512; with "
    '--prompt, each text is cut as in training',
  )
  parser.add_argument(
    '--batch_size',
    type=cli.positive,
    default=64,
    help='pairs at a time over all devices, at most (default: 64)',
  )
  cli.add_dtype(parser)
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
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  # First, because loading the model takes a while.
  check_inputs(args.run, args.queries, args.corpus)
  with cli.loading():
    from dprjax.inference import reranker as rerankers
    from dprjax.models import artifact
  prompt = args.prompt
  if prompt is not None:
    prompt = files.existing_file(artifact.locate(prompt), 'prompt')
  compiled.keep()
  reranker = rerankers.load(
    args.backbone,
    prompt,
    max_length=args.max_length,
    batch_size=args.batch_size,
    dtype=args.dtype,
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
    '%s: %s for %s',
    args.out,
    counted(report['pairs'], 'passages'),
    counted(report['queries'], 'queries'),
  )


if __name__ == '__main__':
  main()
