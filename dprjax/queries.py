"""Makes training queries for a corpus without judgements, by a server with the OpenAI interface.

    python -m dprjax.queries --corpus=corpus.jsonl --out=made --endpoint=http://127.0.0.1:8000/v1 \\
        --model=NAME --examples=examples.jsonl
    python -m dprjax.queries --run=frozen.trec --qrels=made/qrels/train.tsv \\
        --out=made/qrels/found.tsv

The server is asked about a sample of passages. Unusable queries are left out and counted
(docs/no-labels.md).

OUT is a BEIR folder for training, and OUT/report.json has the counts. OUT.answers.jsonl has each
answer with its prompt; after an interruption the same command continues from there.

With --run, the round-trip filter: OUT has the judgements of queries that find their own passage.
"""

import dataclasses
import logging
import os

from dprjax.base import cli, files, flags, outputs, provenance
from dprjax.base.counts import ReadReport
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.generation import endpoint, filters, making, prompts
from dprjax.text.qrels import read_qrels, write_qrels

logger = logging.getLogger('dprjax')

FORMAT = 'dprjax.queries'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  endpoint: str | None = flag(
    'a server with the OpenAI interface for chat completions', None, metavar='URL'
  )
  model: str | None = flag('the name of the model', None)
  key_env: str = flag(
    'environment variable with the key of the server', 'OPENAI_API_KEY', metavar='NAME'
  )
  template: str | None = flags.file(
    'a prompt with {passage} and perhaps {title}, {examples} and {count}'
  )
  examples: str | None = flags.file(
    'examples of the task for the prompt: jsonl with passage and query'
  )
  concurrency: int = flag('requests at a time', 4, most=256)
  timeout: int = flag('limit for an answer', 120, most=3600, metavar='SECONDS')
  temperature: float = flag('of the answers; 0 is most likely text', 0.7, read=float)
  max_tokens: int = flag('of an answer', 128, most=8192)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str | None = flag('a corpus, a BEIR folder or a table', None, metavar='PATH')
  out: str = flag('the BEIR folder; with --run, the judgements')
  passages: int = flag('most passages to ask about', 2000, most=10**7)
  per_passage: int = flag('most queries of a passage', 3, most=100)
  seed: int = flag('of the sample', 0, least=0, most=2**31 - 1)
  server: Server = flags.group(Server, 'the generator')
  run: str | None = flag(
    'a run of the queries, to keep those that find their passages', None, metavar='run.trec'
  )
  qrels: str | None = flags.file('judgements of the queries, for --run')
  within: int = flag('how many passages of a query in --run count', 20, most=10**6)


_OF_CORPUS = ('passages', 'per_passage', 'seed')


def _command(args: Flags) -> None:
  if args.run is not None:
    flags.refuse(args, [*_OF_CORPUS, 'corpus'], 'corpus, not with --run')
    flags.refuse(args.server, ['endpoint'], 'corpus, not with --run')
    _filter(args)
    return
  flags.refuse(args, ['qrels', 'within'], 'run')
  server = args.server
  if args.corpus is None:
    raise InputError('--corpus is missing: the passages to ask about (or --run, to filter queries)')
  if not (server.endpoint and server.model):
    raise InputError('--endpoint and --model are missing: the server that writes the queries')
  endpoint.check_url(server.endpoint, endpoint.key_from(server.key_env))
  if not 0 <= server.temperature <= 2:
    raise InputError(f'--temperature: expected 0 to 2, not {server.temperature}')
  inputs = flags.paths(args, 'corpus') | flags.paths(args.server, 'template', 'examples')
  with outputs.claim_folder(
    args.out,
    inputs,
    what='queries of dprjax.queries',
    ours=lambda folder: provenance.read_mark(folder).get('format') == FORMAT,
  ):
    _make(args)


def _make(args: Flags) -> None:
  server = args.server
  assert args.corpus and server.endpoint and server.model
  settings = {'temperature': server.temperature, 'max_tokens': server.max_tokens, 'seed': args.seed}
  key = endpoint.key_from(server.key_env)
  report = ReadReport()
  with files.atomic_path(args.out) as folder:
    counts = making.make(
      args.corpus,
      folder,
      endpoint.Server(server.endpoint, server.model, settings, key, server.timeout),
      report,
      answer_file=f'{files.resolved(args.out)}.answers.jsonl',
      most=args.passages,
      per_passage=args.per_passage,
      template=prompts.read_template(server.template),
      examples=prompts.read_examples(server.examples),
      concurrency=server.concurrency,
    )
    about = {name: getattr(args, name) for name in (*_OF_CORPUS, 'corpus')}
    files.write_json(folder / 'report.json', counts | {'settings': about | {'model': server.model}})
    provenance.write_mark(folder, FORMAT)
  logger.info('%s:\n%s', args.out, report)


def _filter(args: Flags) -> None:
  if args.qrels is None:
    raise InputError('--run needs --qrels, the judgements of its queries')
  assert args.run is not None
  report = ReadReport()
  with outputs.claim(args.out, flags.paths(args, 'run', 'qrels')):
    qrels = filters.found(read_qrels(args.qrels), args.run, args.within, report)
    logger.info('%s:\n%s', args.run, report)
    if not qrels:
      raise InputError(
        f'--run={args.run}: no query finds its passage among the first {args.within}; is it a run '
        f'of the queries of {args.qrels}?'
      )
    write_qrels(args.out, qrels)
    outputs.write_report(args.out, {'counts': dict(report.counts), 'within': args.within})


main = cli.main(Flags, _command)

if __name__ == '__main__':
  # Importing bm25s for its function words starts JAX, which must not take the accelerator.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
