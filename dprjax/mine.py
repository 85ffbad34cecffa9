"""Mines hard negatives from runs, and writes a training file (unified negative mining, DPTDR
section 3.3).

    python -m dprjax.mine --queries=queries.jsonl --corpus=corpus.jsonl --qrels=qrels/train.tsv \\
        --run=bm25.trec --run=dpt=dpt.trec --out=train.jsonl

The pool of a query is the best 200 passages of every run, without positives and their copies; 30
random ones go to the file as un-denoised negatives. With --reranker=DIR (a cross-encoder) or
--reranked=FILE (a run of dprjax.rerank), passages with a probability below 0.1 are denoised, and up
to 30 of them also go to the file. Every negative has its retrievers, ranks and scores
(docs/mining.md). The same inputs and seed give the same bytes. train.jsonl.json has the counts.

Train with --config.data.mined_negatives=train.jsonl; --config.mix sets the share of each source.
"""

import dataclasses
from collections.abc import Sequence

from etils import epath

from dprjax.base import cli, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import negatives as mining
from dprjax.text import inputs as inputs_of
from dprjax.text import runs
from dprjax.text.fields import check_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(mining.MiningOptions):
  queries: str = flags.texts_file('_id and text')
  corpus: str = flags.texts_file('_id, title and text')
  qrels: str = flag('judgements; a grade above 0 is a positive', metavar='FILE')
  run: tuple[tuple[str, str], ...] = flags.runs(
    'a TREC run, and the name of its retriever; may be repeated'
  )
  out: str = flag('the training file', metavar='train.jsonl')
  reranker: str | None = flags.folder('a cross-encoder that finds the denoised negatives')
  reranker_prompt: str | None = flag(
    'a prompt of pairs for --reranker, its backbone with a masked-LM head; scores are differences '
    'of logits',
    None,
    metavar='prompt.npz',
  )
  reranked: str | None = flag(
    'in place of --reranker, a run with logits of a reranker', None, metavar='run.trec'
  )
  max_length: int | None = flag(
    'tokens of a pair, for --reranker (default: that of the cross-encoder or prompt)', None
  )
  batch_size: int = flags.batch_size('for --reranker, pairs')
  dtype: str = flags.dtype(', for --reranker')


def name_retrievers(entries: Sequence[tuple[str, str]]) -> dict[str, str]:
  """Files of runs by name of their retriever.

  An empty name becomes the tag of the run or, if runs share the tag, the stem of the file.
  """
  for _, path in entries:
    files.regular_file(path, 'run')  # read twice
  tags = [name or runs.read_tag(path) for name, path in entries]
  named: dict[str, str] = {}
  for (name, path), tag in zip(entries, tags, strict=True):
    chosen = name or (tag if tags.count(tag) == 1 else epath.Path(path).name.split('.')[0])
    check_id(chosen, f'--run={path}: the name of the retriever')
    if chosen in named:
      raise InputError(
        f'--run={path}: {named[chosen]} is also called {chosen}; give --run=NAME={path}'
      )
    named[chosen] = path
  return named


def mine(args: Flags) -> None:
  if args.reranker and args.reranked:
    raise InputError('--reranker and --reranked both give reranker scores; use one')
  if args.reranker_prompt and not args.reranker:
    raise InputError(f'--reranker_prompt={args.reranker_prompt} needs its backbone, --reranker=DIR')
  if args.score_positives and not (args.reranker or args.reranked):
    raise InputError('--score_positives=true needs scores: give --reranker=DIR or --reranked=FILE')
  inputs_of.find(args.queries, 'query')
  files.existing(args.qrels, 'qrels')
  inputs_of.find(args.corpus, 'passage')
  retrievers = name_retrievers(args.run)
  inputs = flags.paths(
    args, 'queries', 'corpus', 'qrels', 'reranker', 'reranker_prompt', 'reranked'
  ) | {'--run': retrievers.values()}
  with outputs.claim(args.out, inputs):
    _mine(args, retrievers)


def _mine(args: Flags, retrievers: dict[str, str]) -> None:
  score = None
  if args.reranker:
    # Takes seconds to load.
    from dprjax.base import machine
    from dprjax.retrieval import reranker

    machine.keep_programs()
    # Compares the sigmoid of a logit with the threshold.
    kind = {'score': 'logit'} if args.reranker_prompt else {}
    score = reranker.load(
      args.reranker,
      args.reranker_prompt,
      max_length=args.max_length,
      batch_size=args.batch_size,
      dtype=args.dtype,
      **kind,
    ).score
  report = mining.mine(
    queries=args.queries,
    corpus=args.corpus,
    qrels=args.qrels,
    retrievers=retrievers,
    out=args.out,
    reranked=args.reranked,
    score=score,
    options=args,
  )
  used = {'reranker_prompt': args.reranker_prompt} if args.reranker_prompt else {}
  outputs.write_report(args.out, report | used | {'reranker': args.reranker})


main = cli.main(Flags, mine)

if __name__ == '__main__':
  main()
