"""Makes training queries for a corpus without judgements.

    python -m dprjax.queries --corpus=corpus.jsonl --out=made
    python -m dprjax.queries --corpus=corpus.jsonl --out=made --endpoint=http://127.0.0.1:8000/v1 \\
        --model=NAME --examples=examples.jsonl
    python -m dprjax.queries --corpus=corpus.jsonl --out=made --answers=answers.jsonl
    python -m dprjax.queries --run=fused.trec --qrels=made/qrels/train.tsv \\
        --out=made/qrels/found.tsv

Queries are for a sample of passages, from each cluster of the corpus in proportion and without
near-duplicates. They are extracted from passages (titles, headings, questions, first sentences,
keyphrases, cropped sentences), answered by a server with the OpenAI interface, or read from a file
of answers. Unusable queries are left out and counted (docs/no-labels.md).

OUT is a BEIR folder for training, and OUT/report.json has the counts. OUT.answers.jsonl has each
answer of a server with its prompt; after an interruption the same command continues from there.

With --run, the round-trip filter: OUT has the judgements of queries that find their own passage.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from dprjax.asking import endpoint, extraction, filters, passages, prompts, round_trip, sampling
from dprjax.asking.filters import Query
from dprjax.asking.prompts import Answer, Request
from dprjax.base import files, outputs, provenance
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, rounded
from dprjax.formats import beir
from dprjax.formats.qrels import read_qrels, write_qrels
from dprjax.formats.read_report import ReadReport
from dprjax.formats.texts import PassageRecord
from dprjax.runtime import cli, flags
from dprjax.runtime.flags import flag

logger = logging.getLogger('dprjax')

FORMAT = 'dprjax.queries'
_REPORT = 'report.json'
_ANSWERS, _PROMPTS = '.answers.jsonl', '.prompts.jsonl'
_PRICED = 1_000_000  # prices are for this many tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  endpoint: str | None = flag(
    'a server with the OpenAI interface for chat completions', None, metavar='URL'
  )
  model: str | None = flag('the name of the model, for --endpoint', None)
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
  price_in: float | None = flag('of a million tokens of prompts', None, most=10**6)
  price_out: float | None = flag('of a million tokens of answers', None, most=10**6)
  budget: float | None = flag('refuse to start if the cost may be higher', None, most=10**9)
  prompts_only: bool = flags.switch(
    'print the cost and write OUT.prompts.jsonl, to be answered elsewhere (--answers)'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str | None = flag(
    'a corpus, a BEIR folder, a table, or a folder of documents', None, metavar='PATH'
  )
  out: str = flag('the BEIR folder; with --run, the judgements')
  passages: int = flag('most passages to ask about', 2000, most=10**7)
  per_passage: int = flag('most queries of a passage', 3, most=100)
  kinds: tuple[str, ...] = flag(
    'of queries without a generator, the preferred kind first',
    extraction.KINDS,
    split=',',
    metavar='KIND,...',
  )
  min_words: int = flag('fewest words of a query', 2, most=100)
  max_words: int = flag('most words of a query', 32, most=1000)
  keep: float = flag(
    'share of passages that keep the text of their queries', extraction.KEEP, read=float
  )
  language: str = flag('of the rules that split sentences (ISO 639)', 'en')
  seed: int = flag('of the sample', 0, least=0, most=2**31 - 1)
  server: Server = flags.group(Server, 'asking a generator')
  answers: str | None = flag(
    'answers made elsewhere: jsonl with id and answer, or id and queries', None, metavar='FILE'
  )
  run: str | None = flag(
    'a run of the queries, to keep those that find their passages', None, metavar='run.trec'
  )
  qrels: str | None = flag('judgements of the queries, for --run', None, metavar='FILE')
  within: int = flag('how many passages of a query in --run count', 20, most=10**6)


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


_OF_CORPUS = (
  *('passages', 'per_passage', 'kinds', 'min_words', 'max_words', 'keep'),
  *('language', 'seed', 'answers'),
)


def _command(args: Flags) -> None:
  if args.run is not None:
    flags.refuse(args, [*_OF_CORPUS, 'corpus'], 'corpus, not with --run')
    _filter(args)
    return
  flags.refuse(args, ['qrels', 'within'], 'run')
  if args.corpus is None:
    raise InputError('--corpus is missing: the passages to ask about (or --run, to filter queries)')
  _check(args)
  inputs = flags.paths(args, 'corpus', 'answers') | flags.paths(args.server, 'template', 'examples')
  with (
    outputs.claim_folder(
      args.out,
      inputs,
      what='queries of dprjax.queries',
      ours=lambda folder: provenance.read_mark(folder).get('format') == FORMAT,
    ),
    contextlib.suppress(_PromptsOnly),
  ):
    _make(args)


def _check(args: Flags) -> None:
  asked = args.server
  if unknown := [kind for kind in args.kinds if kind not in extraction.KINDS]:
    raise InputError(f'--kinds: {unknown[0]!r:.40} is not one of {", ".join(extraction.KINDS)}')
  if not args.kinds:
    raise InputError(f'--kinds is empty; choose among {", ".join(extraction.KINDS)}')
  if args.min_words > args.max_words:
    raise InputError(f'--min_words={args.min_words} is above --max_words={args.max_words}')
  if not 0 <= args.keep <= 1:
    raise InputError(f'--keep: expected a share from 0 to 1, not {args.keep}')
  if not 0 <= asked.temperature <= 2:
    raise InputError(f'--temperature: expected 0 to 2, not {asked.temperature}')
  if args.answers and asked.endpoint:
    raise InputError('--answers and --endpoint are both sources of queries; give one')
  if asked.prompts_only and args.answers:
    raise InputError('--prompts_only writes prompts, but --answers already has answers')
  if asked.endpoint or asked.prompts_only:
    flags.refuse(args, ['kinds', 'keep'], 'corpus, for queries without a generator')
  else:
    needs = ('model', 'template', 'examples', 'price_in', 'price_out', 'budget')
    flags.refuse(asked, needs, 'endpoint, or with --prompts_only')
  if asked.endpoint:
    if not asked.model:
      raise InputError('--endpoint needs --model, the name of the model on the server')
    endpoint.check_url(asked.endpoint, endpoint.key_from(asked.key_env))
  if asked.budget is not None and (asked.price_in is None or asked.price_out is None):
    raise InputError('--budget needs --price_in and --price_out, of a million tokens each')


class _PromptsOnly(Exception):
  """Ends the command before a folder is made."""


class _Asked(NamedTuple):
  """The queries of a command.

  Attributes:
    sample: the passages.
    queries: all, unchanged.
    replaced: passages without the text of their queries, by id.
    clusters: their number in the sample; 0 if the passages were given.
  """

  sample: list[PassageRecord]
  queries: list[Query]
  replaced: Mapping[str, PassageRecord] = types.MappingProxyType({})
  clusters: int = 0


def _make(args: Flags) -> None:
  report = ReadReport()
  with files.atomic_path(args.out) as folder:
    folder.mkdir(parents=True)
    corpus = _corpus(args, folder)
    asked = _from_answers(args, corpus, report) if args.answers else _sample(args, corpus, report)
    logger.info(
      '%s of %s',
      counted(len(asked.queries), 'queries'),
      counted(len(asked.sample), 'passages'),
    )
    chosen = filters.choose(
      asked.queries,
      {one.id: one.joined for one in asked.sample},
      report,
      fewest=args.min_words,
      most=args.max_words,
      per_passage=args.per_passage,
      own_words=not (args.answers or args.server.endpoint),
    )
    if not chosen:
      raise InputError(f'{args.corpus}: no query is usable: {report}')
    _write(folder, corpus, asked.replaced, chosen)
    report.counts['queries'] = len(chosen)
    kinds = collections.Counter(query.kind for query in chosen)
    files.write_json(
      folder / _REPORT,
      {
        'counts': {what: count for what, count in report.counts.items() if count},
        'kinds': kinds,
        'clusters': asked.clusters,
        'asked_about': len(asked.sample),
        'settings': {name: getattr(args, name) for name in (*_OF_CORPUS, 'corpus')}
        | {'model': args.server.model},
      },
    )
    provenance.write_mark(folder, FORMAT)
  logger.info('%s:\n%s', args.out, report)
  rows = [[kind, f'{count:,}'] for kind, count in kinds.items()]
  cli.print_table(['queries', ''], [*rows, ['all', f'{len(chosen):,}']])


def _from_answers(args: Flags, corpus: epath.Path, report: ReadReport) -> _Asked:
  """The queries in a file of answers."""
  assert args.answers is not None
  given: dict[str, list[str]] = {}
  for answer in prompts.read_answers(args.answers):  # several answers for a passage are joined
    given.setdefault(str(answer.id), []).extend(answer.lines())
  sample = [one for one in passages.read_passages(corpus) if one.id in given]
  report.counts['answers of unknown passages: ignored'] = len(given) - len(sample)
  if not sample:
    raise InputError(f'{args.answers}: none of its ids is a passage of {args.corpus}')
  return _Asked(sample, _queries({one.id: given[one.id] for one in sample}, 'answers'))


def _sample(args: Flags, corpus: epath.Path, report: ReadReport) -> _Asked:
  """The queries of a sample of passages, by a server or without one."""
  drawn = sampling.sample(passages.read_passages(corpus), args.passages, args.seed, report)
  if not drawn.passages:
    raise InputError(f'{args.corpus}: no passages to ask about: {report}')
  if args.server.endpoint or args.server.prompts_only:
    answers = _ask(args, drawn.passages)
    cut = sum(one.finish == 'length' for one in answers.values())
    report.counts['answers that ended at --max_tokens'] = cut
    lines = {one.id: answers[one.id].lines() for one in drawn.passages}
    queries = _queries(lines, args.server.model or '')
    return _Asked(drawn.passages, queries, clusters=drawn.clusters)
  made = list(_extract(args, corpus, drawn.passages))
  return _Asked(
    drawn.passages,
    [Query(one.passage.id, *reversed(query)) for one in made for query in one.queries],
    {one.passage.id: one.passage for one in made},
    drawn.clusters,
  )


def _corpus(args: Flags, folder: epath.Path) -> epath.Path:
  """The corpus file; passages of tables and documents are written to OUT/passages.jsonl."""
  assert args.corpus is not None
  if (found := passages.corpus_file(args.corpus)) is not None:
    return found
  corpus = folder / 'passages.jsonl'
  if not beir.write_lines(corpus, map(_row, passages.read_others(args.corpus))):
    raise InputError(f'--corpus={args.corpus}: it has no text')
  return corpus


def _row(passage: PassageRecord) -> dict[str, str]:
  return {'_id': passage.id, 'title': passage.title, 'text': passage.text}


def _queries(lines: Mapping[str, Sequence[str]], kind: str) -> list[Query]:
  """The lines of answers by passage, as queries; an answer without lines is an empty query."""
  tidied = ((id_, filters.tidy(line)) for id_, own in lines.items() for line in own if line.strip())
  empty = [Query(id_, '', kind) for id_, own in lines.items() if not any(map(str.strip, own))]
  return [*(Query(id_, text, kind) for id_, text in tidied), *empty]


def _extract(
  args: Flags, corpus: epath.Path, sample: Sequence[PassageRecord]
) -> Iterator[extraction.Asked]:
  rarity = extraction.Rarity(one.text for one in sample)
  # A title of several passages, as of a document cut into passages, is not a query for one of them.
  titles = collections.Counter({one.title: 0 for one in sample})
  if 'title' in args.kinds:
    titles.update(one.title for one in passages.read_passages(corpus) if one.title in titles)
  untitled = [kind for kind in args.kinds if kind != 'title']
  progress = Progress('passages', len(sample), 'extracting queries')
  for passage in sample:
    yield extraction.extract(
      passage,
      rarity,
      kinds=args.kinds if titles[passage.title] < 2 else untitled,
      most=args.per_passage,
      words_of_query=(args.min_words, args.max_words),
      seed=args.seed,
      language=args.language,
      keep=args.keep,
    )
    progress.advance()


def _ask(args: Flags, sample: Sequence[PassageRecord]) -> dict[str, Answer]:
  """The answers by passage, including those of earlier commands."""
  asked, path = args.server, f'{files.resolved(args.out)}{_ANSWERS}'
  template, examples = prompts.read_template(asked.template), prompts.read_examples(asked.examples)
  settings: dict[str, Any] = {
    'temperature': asked.temperature,
    'max_tokens': asked.max_tokens,
    'seed': args.seed,
  }
  requests = []
  for passage in sample:
    prompt = prompts.fill(template, passage, examples, args.per_passage, asked.prompt_words)
    key = prompts.key_of(prompt, asked.model or '', settings)
    requests.append(Request(passage.id, prompt, key))
  kept = prompts.read_kept(path)
  todo = [request for request in requests if request.key not in kept]
  _tell_cost(args, todo, len(requests) - len(todo))
  if asked.prompts_only:
    with files.atomic_write(f'{files.resolved(args.out)}{_PROMPTS}', 'wb') as file:
      for request in requests:
        row = {'id': request.id, 'prompt': request.prompt}
        file.write(json.dumps(row, ensure_ascii=False).encode() + b'\n')
    logger.info('%s: %s', f'{args.out}{_PROMPTS}', counted(len(requests), 'prompts'))
    raise _PromptsOnly
  assert asked.endpoint and asked.model
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
        kept[answer.key] = answer
        progress.advance()
  return {request.id: kept[request.key] for request in requests}


def _end_line(file: Any) -> None:
  """Removes a last line without newline, left by a kill."""
  if file.tell() == 0:
    return
  with open(file.name, 'rb') as before:
    whole = before.read().rfind(b'\n') + 1
  file.truncate(whole)


def _tell_cost(args: Flags, todo: Sequence[Request], before: int) -> None:
  """Logs the prompts and their cost. Raises InputError if the cost is above --budget."""
  asked = args.server
  tokens = sum(prompts.tokens_in(request.prompt) for request in todo)
  most = asked.max_tokens * len(todo)
  line = f'{counted(len(todo), "prompts")}: about {rounded(tokens)} tokens (of 4 bytes each)'
  line += f', and answers of at most {rounded(most)}'
  cost = None
  if asked.price_in is not None or asked.price_out is not None:
    cost = (tokens * (asked.price_in or 0) + most * (asked.price_out or 0)) / _PRICED
    line += f'; at most about {cost:,.2f} at the given prices'
  logger.info('%s%s', line, f'; {counted(before, "answers")} kept from before' if before else '')
  if cost is not None and asked.budget is not None and cost > asked.budget:
    raise InputError(
      f'--budget={asked.budget:g}: the prompts may cost {cost:,.2f}; lower --passages or '
      '--max_tokens'
    )


def _write(
  folder: epath.Path,
  corpus: epath.Path,
  replaced: Mapping[str, PassageRecord],
  chosen: Sequence[Query],
) -> None:
  """Writes the BEIR folder: the corpus without the text of queries, the queries and judgements."""
  asking = {query.passage for query in chosen}
  numbers: dict[str, Iterator[int]] = {id_: itertools.count() for id_ in asking}
  named = [(f'{query.passage}?{next(numbers[query.passage])}', query) for query in chosen]
  beir.write_lines(
    folder / 'corpus.jsonl',
    (
      _row(replaced[entry.id] if entry.id in replaced and entry.id in asking else entry)
      for entry in passages.read_passages(corpus)
    ),
  )
  beir.write_lines(
    folder / 'queries.jsonl',
    ({'_id': id_, 'text': query.text, 'kind': query.kind} for id_, query in named),
  )
  (folder / 'qrels').mkdir()
  judged = {id_: {query.passage: 1} for id_, query in named}
  write_qrels(folder / 'qrels' / 'train.tsv', judged)


def _filter(args: Flags) -> None:
  if args.qrels is None:
    raise InputError('--run needs --qrels, the judgements of its queries')
  assert args.run is not None
  report = ReadReport()
  with outputs.claim(args.out, flags.paths(args, 'run', 'qrels')):
    kept = round_trip.found(read_qrels(args.qrels), args.run, args.within, report)
    logger.info('%s:\n%s', args.run, report)
    if not kept:
      raise InputError(
        f'--run={args.run}: no query finds its passage among the first {args.within}; is it a run '
        f'of the queries of {args.qrels}?'
      )
    write_qrels(args.out, kept)
    outputs.write_report(args.out, {'counts': dict(report.counts), 'within': args.within})


if __name__ == '__main__':
  # Importing bm25s for its function words starts JAX, which must not take the accelerator.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
