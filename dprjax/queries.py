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
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from dprjax.base import cli, files, flags, outputs, provenance
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress, rounded
from dprjax.generation import endpoint, filters, passages, prompts
from dprjax.generation.filters import Query
from dprjax.generation.prompts import Answer, Request
from dprjax.text import beir
from dprjax.text.qrels import read_qrels, write_qrels
from dprjax.text.read_report import ReadReport
from dprjax.text.texts import PassageRecord

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
  template: str | None = flag(
    'a prompt with {passage} and perhaps {title}, {examples} and {count}',
    None,
    metavar='FILE',
  )
  examples: str | None = flag(
    'examples of the task for the prompt: jsonl with passage and query', None, metavar='FILE'
  )
  prompt_words: int = flag('most words of a passage in a prompt', 200, most=10**5)
  concurrency: int = flag('requests at a time', 4, most=256)
  retries: int = flag('of a failed request', 5, least=0, most=100)
  timeout: int = flag('limit for an answer', 120, most=3600, metavar='SECONDS')
  temperature: float = flag('of the answers; 0 is most likely text', 0.7, read=float)
  max_tokens: int = flag('of an answer', 128, most=8192)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str | None = flag(
    'a corpus, a BEIR folder, a table, or a folder of documents', None, metavar='PATH'
  )
  out: str = flag('the BEIR folder; with --run, the judgements')
  passages: int = flag('most passages to ask about', 2000, most=10**7)
  per_passage: int = flag('most queries of a passage', 3, most=100)
  min_words: int = flag('fewest words of a query', 2, most=100)
  max_words: int = flag('most words of a query', 32, most=1000)
  seed: int = flag('of the sample', 0, least=0, most=2**31 - 1)
  server: Server = flags.group(Server, 'the generator')
  run: str | None = flag(
    'a run of the queries, to keep those that find their passages', None, metavar='run.trec'
  )
  qrels: str | None = flag('judgements of the queries, for --run', None, metavar='FILE')
  within: int = flag('how many passages of a query in --run count', 20, most=10**6)


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


_OF_CORPUS = ('passages', 'per_passage', 'min_words', 'max_words', 'seed')


def _command(args: Flags) -> None:
  if args.run is not None:
    flags.refuse(args, [*_OF_CORPUS, 'corpus'], 'corpus, not with --run')
    flags.refuse(args.server, ['endpoint'], 'corpus, not with --run')
    _filter(args)
    return
  flags.refuse(args, ['qrels', 'within'], 'run')
  _check(args)
  inputs = flags.paths(args, 'corpus') | flags.paths(args.server, 'template', 'examples')
  with outputs.claim_folder(
    args.out,
    inputs,
    what='queries of dprjax.queries',
    ours=lambda folder: provenance.read_mark(folder).get('format') == FORMAT,
  ):
    _make(args)


def _check(args: Flags) -> None:
  asked = args.server
  if args.corpus is None:
    raise InputError('--corpus is missing: the passages to ask about (or --run, to filter queries)')
  if not (asked.endpoint and asked.model):
    raise InputError('--endpoint and --model are missing: the server that writes the queries')
  endpoint.check_url(asked.endpoint, endpoint.key_from(asked.key_env))
  if args.min_words > args.max_words:
    raise InputError(f'--min_words={args.min_words} is above --max_words={args.max_words}')
  if not 0 <= asked.temperature <= 2:
    raise InputError(f'--temperature: expected 0 to 2, not {asked.temperature}')


def _make(args: Flags) -> None:
  assert args.corpus is not None
  report = ReadReport()
  with files.atomic_path(args.out) as folder:
    folder.mkdir(parents=True)
    corpus = folder / 'corpus.jsonl'
    if not beir.write_lines(corpus, map(_row, passages.read_passages(args.corpus))):
      raise InputError(f'--corpus={args.corpus}: it has no text')
    sample = passages.sample(passages.read_passages(corpus), args.passages, args.seed, report)
    if not sample:
      raise InputError(f'{args.corpus}: no passages to ask about: {report}')
    answers = _ask(args, sample)
    cut = sum(one.finish == 'length' for one in answers.values())
    report.counts['answers that ended at --max_tokens'] = cut
    chosen = filters.choose(
      _queries({one.id: answers[one.id].lines() for one in sample}),
      {one.id: one.joined for one in sample},
      report,
      fewest=args.min_words,
      most=args.max_words,
      per_passage=args.per_passage,
    )
    if not chosen:
      raise InputError(f'{args.corpus}: no query is usable: {report}')
    _write(folder, chosen)
    report.counts['queries'] = len(chosen)
    files.write_json(
      folder / 'report.json',
      {
        'counts': {what: count for what, count in report.counts.items() if count},
        'asked_about': len(sample),
        'settings': {name: getattr(args, name) for name in (*_OF_CORPUS, 'corpus')}
        | {'model': args.server.model},
      },
    )
    provenance.write_mark(folder, FORMAT)
  logger.info('%s:\n%s', args.out, report)


def _row(passage: PassageRecord) -> dict[str, str]:
  return {'_id': passage.id, 'title': passage.title, 'text': passage.text}


def _queries(lines: Mapping[str, Sequence[str]]) -> list[Query]:
  """The lines of answers by passage, as queries; an answer without lines is an empty query."""
  tidied = ((id_, filters.tidy(line)) for id_, own in lines.items() for line in own if line.strip())
  empty = [Query(id_, '') for id_, own in lines.items() if not any(map(str.strip, own))]
  return [*(Query(id_, text) for id_, text in tidied), *empty]


def _ask(args: Flags, sample: Sequence[PassageRecord]) -> dict[str, Answer]:
  """The answers by passage, including those of earlier commands."""
  asked, path = args.server, f'{files.resolved(args.out)}.answers.jsonl'
  assert asked.endpoint and asked.model
  template, examples = prompts.read_template(asked.template), prompts.read_examples(asked.examples)
  settings: dict[str, Any] = {
    'temperature': asked.temperature,
    'max_tokens': asked.max_tokens,
    'seed': args.seed,
  }
  requests = []
  for passage in sample:
    prompt = prompts.fill(template, passage, examples, args.per_passage, asked.prompt_words)
    requests.append(Request(passage.id, prompt, prompts.key_of(prompt, asked.model, settings)))
  answers = prompts.read_kept(path)
  todo = [request for request in requests if request.key not in answers]
  logger.info(
    '%s: about %s tokens (of 4 bytes each), and answers of at most %s; %s kept from before',
    counted(len(todo), 'prompts'),
    rounded(sum(prompts.tokens_in(request.prompt) for request in todo)),
    rounded(asked.max_tokens * len(todo)),
    counted(len(requests) - len(todo), 'answers'),
  )
  server = endpoint.Server(
    asked.endpoint,
    asked.model,
    settings,
    endpoint.key_from(asked.key_env),
    asked.timeout,
    asked.retries,
  )
  if todo:
    progress = Progress('answers', len(todo), 'asking')
    with files.no_room(path), open(path, 'ab') as file:
      _end_line(file)
      for answer in endpoint.ask(server, todo, asked.concurrency):
        file.write(prompts.encode(answer) + b'\n')
        file.flush()
        answers[answer.key] = answer
        progress.advance()
  return {request.id: answers[request.key] for request in requests}


def _end_line(file: Any) -> None:
  """Removes a last line without newline, left by a kill."""
  if file.tell() == 0:
    return
  with open(file.name, 'rb') as before:
    whole = before.read().rfind(b'\n') + 1
  file.truncate(whole)


def _write(folder: epath.Path, chosen: Sequence[Query]) -> None:
  """Writes the queries and judgements of the BEIR folder."""
  numbers: dict[str, Iterator[int]] = {query.passage: itertools.count() for query in chosen}
  named = [(f'{query.passage}?{next(numbers[query.passage])}', query) for query in chosen]
  beir.write_lines(
    folder / 'queries.jsonl', ({'_id': id_, 'text': query.text} for id_, query in named)
  )
  (folder / 'qrels').mkdir()
  write_qrels(folder / 'qrels' / 'train.tsv', {id_: {query.passage: 1} for id_, query in named})


def _filter(args: Flags) -> None:
  if args.qrels is None:
    raise InputError('--run needs --qrels, the judgements of its queries')
  assert args.run is not None
  report = ReadReport()
  with outputs.claim(args.out, flags.paths(args, 'run', 'qrels')):
    found = filters.found(read_qrels(args.qrels), args.run, args.within, report)
    logger.info('%s:\n%s', args.run, report)
    if not found:
      raise InputError(
        f'--run={args.run}: no query finds its passage among the first {args.within}; is it a run '
        f'of the queries of {args.qrels}?'
      )
    write_qrels(args.out, found)
    outputs.write_report(args.out, {'counts': dict(report.counts), 'within': args.within})


if __name__ == '__main__':
  # Importing bm25s for its function words starts JAX, which must not take the accelerator.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
