"""Moves vectors of judged passages towards their training queries, without training (NUDGE).

    python -m dprjax.nudge --corpus=embeddings/corpus --queries=embeddings/train \\
        --qrels=qrels/train.tsv --out=embeddings/nudged

--out is a folder of embeddings like --corpus, for the same queries and commands. Only passages
judged relevant in --qrels move, by at most a common distance. Cross-validation on the queries
chooses the distance and measures the gain separately on queries that share passages with other
queries and on the rest. Without a gain, nothing is written.

Unit vectors keep unit length. A later query gains only if a training query had the same passages.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence

import numpy as np

from dprjax.analysis import comparison
from dprjax.base import draws, files, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.formats.qrels import read_qrels
from dprjax.retrieval import embeddings, manifest, nudging
from dprjax.runtime import cli, flags
from dprjax.runtime.flags import flag

logger = logging.getLogger('dprjax')

_ROWS = 4096  # of a block
_LEAST = 10  # queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str = flag('passages of dprjax.encode, in float32 or float16', metavar='DIR')
  queries: str = flag('training queries of dprjax.encode', metavar='DIR')
  qrels: str = flag('judgements of these queries', metavar='FILE')
  out: str = flag('the folder of moved passages', metavar='DIR')


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  inputs = flags.paths(args, 'corpus', 'queries', 'qrels')
  with outputs.claim_folder(
    args.out, inputs, what='embeddings', ours=manifest.is_embeddings
  ) as out:
    corpus = embeddings.load_embeddings(args.corpus)
    queries = embeddings.load_embeddings(args.queries)
    _check(args, corpus, queries)
    rows = {id_: row for row, id_ in enumerate(corpus.ids)}
    qrels, places, judged = read_qrels(args.qrels), [], []
    for place, id_ in enumerate(queries.ids):
      grades = {rows[doc]: grade for doc, grade in qrels.get(id_, {}).items() if doc in rows}
      if grades := {row: grade for row, grade in grades.items() if grade > 0}:
        places.append(place)
        judged.append(grades)
    if len(judged) < _LEAST:
      raise InputError(
        f'--qrels={args.qrels}: {counted(len(judged), "queries")} of --queries with a relevant '
        f'passage in --corpus; at least {_LEAST} are needed'
      )
    asked = queries.take(np.array(places))
    names = [queries.ids[place] for place in places]
    moved, sums = nudging.towards(asked, judged)
    old, unit = corpus.take(moved), corpus.meta.normalize
    length = 1.0 if unit else float(np.linalg.norm(old, axis=1).mean())
    bounds = [length * bound for bound in nudging.BOUNDS]
    scores = nudging.cross_validate(
      asked,
      (vectors for _, vectors in corpus.blocks(_ROWS)),
      old,
      judged,
      np.array([_fold(name) for name in names]),
      bounds,
      unit,
    )
    bound = bounds[scores.best()]
    _tell(scores, bound)
    if not bound or scores.held_out().mean() <= scores.by_bound[:, 0].mean():
      raise InputError(
        f'no distance gains on held-out queries of {args.qrels}; keep --corpus={args.corpus} as it '
        'is'
      )
    new = nudging.move(old, sums, bound, unit)
    made_of = f'{corpus.sha256} {queries.sha256} {files.sha256_file(args.qrels)} {bound!r}'
    meta = dataclasses.replace(
      corpus.meta, nudged_sha256=hashlib.sha256(made_of.encode()).hexdigest()
    )
    seen = {'train': names, **{role: ids for role, ids in corpus.seen.items() if role != 'train'}}
    _write(out, corpus, meta, moved, new, seen)
    logger.info('%s: %s moved by at most %.3g', out, counted(len(moved), 'passages'), bound)


def _check(args: Flags, corpus: embeddings.Embeddings, queries: embeddings.Embeddings) -> None:
  corpus.check_side('passage', f'--corpus={args.corpus}')
  queries.check_side('query', f'--queries={args.queries}')
  manifest.check_same_space('--queries', queries.meta.space(), '--corpus', corpus.meta.space())
  if corpus.meta.dtype not in ('float32', 'float16'):
    raise InputError(
      f'--corpus={args.corpus} has {corpus.meta.dtype} codes; encode passages in float32 or float16'
    )
  if corpus.meta.nudged_sha256:
    raise InputError(f'--corpus={args.corpus} was already moved; give the folder of dprjax.encode')


def _fold(query_id: str) -> int:
  return int(draws.fraction(query_id, 0, 'nudge') * nudging.FOLDS)


def _tell(scores: nudging.Scores, bound: float) -> None:
  """Logs the cross-validated gain, separately for queries that share passages with others."""
  gain = scores.held_out() - scores.by_bound[:, 0]
  for which, what in (
    (np.ones(len(gain), bool), 'in all'),
    (scores.known, 'that share passages with other training queries'),
    (~scores.known, 'that share no passage with another training query'),
  ):
    if which.any():
      found = comparison.difference([gain[which]])
      logger.info(
        'distance %.3g: nDCG@%d %+.4f, 95 %% interval %+.4f to %+.4f, over %s %s',
        bound,
        nudging.CUTOFF,
        found.mean,
        found.low,
        found.high,
        counted(int(which.sum()), 'held-out queries'),
        what,
      )


def _write(out, corpus, meta, moved, new, seen) -> None:
  shard_rows = max(len(shard) for shard in corpus.shards)
  writer = embeddings.EmbeddingsWriter(out, meta, corpus.ids, shard_rows, seen=seen)
  for shard in writer.pending():
    vectors = corpus.take(np.arange(shard.start, shard.stop))
    first, stop = np.searchsorted(moved, (shard.start, shard.stop))
    vectors[moved[first:stop] - shard.start] = new[first:stop]
    writer.write(shard, vectors)
  writer.finish()


if __name__ == '__main__':
  main()
