"""Rescores the best passages of a run with a cross-encoder or a pair prompt.

    python -m dprjax.rerank --backbone=DIR [--prompt=qa.npz] --run=bm25.trec \\
        --queries=queries.jsonl --corpus=corpus.jsonl --out=reranked.trec
    python -m dprjax.rerank --backbone=DIR --retriever=mine --run=run.trec \\
        --queries=queries.jsonl --out=reranked.trec

The new run has the first --depth passages of each query, ordered by their new scores. The sigmoid
of a score is the probability of relevance; a prompt with score='probability' in its meta gives
P(yes) - P(no). OUT.parts has computed scores: the same command continues after an interruption, and
other commands refuse the folder. OUT.json has the settings.
"""

import dataclasses
import logging

from dprjax.base import cli, files, flags, machine, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.text import inputs as inputs_of

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  backbone: str = flags.backbone(
    more=': the cross-encoder or, with --prompt, a backbone with a masked-LM head'
  )
  prompt: str | None = flag('its prompt.npz of pairs, or USER/NAME[@COMMIT] on the hub', None)
  run: str = flag('a run of a retriever', metavar='run.trec')
  queries: tuple[str, ...] = flags.texts_file('_id and text', several=True)
  corpus: tuple[str, ...] = flags.texts_file('_id, title and text', several=True, either='passages')
  retriever: str | None = flag(
    'the retriever of the run, with its passages', None, metavar='DIR', either='passages'
  )
  out: str = flag('the new run; its report goes to reranked.trec.json', metavar='reranked.trec')
  depth: int = flag('passages scored per query; deeper ones are dropped', 100)
  max_length: int | None = flag(
    'tokens of a pair, cutting the passage first (default: that of the tokenizer, at most 512; '
    'with --prompt each text is cut as in training)',
    None,
  )
  batch_size: int = flags.batch_size('pairs')
  dtype: str = flags.dtype()
  weight_parts: int | None = flags.weight_parts()
  shard_pairs: int = flag('pairs scored between saves', 10_000)


def _command(args: Flags) -> None:
  if files.is_stream(args.out):
    raise InputError(f'--out={args.out} is a pipe or a device; name a file')
  corpus = args.corpus
  if args.retriever is not None:
    with cli.loading():
      from dprjax.retrieval import folder
    folder.check_index(args.retriever, '--retriever')
    corpus = (str(folder.passages_of(args.retriever)),)
  # Before loading the model, which takes long. Each is read twice.
  files.regular_file(args.run, 'run')
  for paths, side, what in ((args.queries, 'query', 'queries'), (corpus, 'passage', 'corpus')):
    inputs_of.check_again(paths, side, what)
  with cli.loading():
    from dprjax.encoding import embedder
    from dprjax.models import artifact
    from dprjax.retrieval import reranker as rerankers
    from dprjax.retrieval import rescoring
  prompt = args.prompt and files.existing(artifact.locate(args.prompt), 'prompt')
  machine.keep_programs()
  reranker = rerankers.load(
    args.backbone,
    prompt,
    max_length=args.max_length,
    mesh=embedder.local_mesh(args.weight_parts) if args.weight_parts else None,
    batch_size=args.batch_size,
    dtype=args.dtype,
  )
  inputs = flags.paths(args, 'run', 'queries', 'corpus', 'retriever')
  inputs |= {'--backbone, --prompt': reranker.files}
  with outputs.claim(args.out, inputs, endings=('', '.json', '.parts'), folders=('.parts',)):
    report = rescoring.rescore(
      reranker,
      args.run,
      args.queries,
      corpus,
      str(files.resolved(args.out)),  # OUT.parts is beside the target of a link
      depth=args.depth,
      shard_pairs=args.shard_pairs,
    )
  logger.info(
    '%s: %s for %s',
    args.out,
    counted(report['pairs'], 'passages'),
    counted(report['queries'], 'queries'),
  )


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
