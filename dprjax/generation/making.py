"""Makes training queries for a corpus: a BEIR folder (docs/no-labels.md)."""

import heapq
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from dprjax.base import files, hashes, words
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, rounded
from dprjax.generation import endpoint, filters, prompts
from dprjax.generation.filters import Query
from dprjax.generation.prompts import Answer, Request
from dprjax.text.qrels import write_lines, write_qrels
from dprjax.text.texts import PassageRecord, Texts

logger = logging.getLogger('dprjax')

_SHORT = 8  # words; shorter passages are not asked about


def make(
  corpus: str,
  folder: epath.Path,
  server: endpoint.Server,
  report: ReadReport,
  *,
  answer_file: str,
  most: int,
  per_passage: int,
  template: str,
  examples: Sequence[prompts.Example],
  concurrency: int,
) -> dict[str, Any]:
  """Asks ``server`` for queries of a sample of passages, and writes those that are usable.

  Args:
    corpus: a corpus, a BEIR folder or a table.
    folder: for corpus.jsonl, queries.jsonl and qrels/train.tsv.
    report: counts what is left out, and why.
    answer_file: the file of all answers, where an interrupted call goes on.
    most: passages that are asked about, a sample by the seed in ``server.settings``.
    per_passage: the most queries of a passage.
    concurrency: requests at a time.

  Returns:
    Counts, for report.json.

  Raises:
    InputError: the corpus has no text, or no query is usable.
  """
  folder.mkdir(parents=True)
  written = folder / 'corpus.jsonl'
  if not write_lines(written, map(_row, read_passages(corpus))):
    raise InputError(f'--corpus={corpus}: it has no text')
  seed = server.settings['seed']
  sample = sample_passages(read_passages(written), most, seed, report)
  if not sample:
    raise InputError(f'{corpus}: no passages to ask about: {report}')
  requests = []
  for passage in sample:
    prompt = prompts.fill(template, passage, examples, per_passage)
    requests.append(
      Request(passage.id, prompt, prompts.key_of(prompt, server.model, server.settings))
    )
  answers = _ask(server, requests, answer_file, concurrency)
  cut = sum(one.finish == 'length' for one in answers.values())
  report.counts['answers that ended at --max_tokens'] = cut
  chosen = filters.choose(
    _queries({one.id: answers[one.id].lines() for one in sample}),
    {one.id: one.joined for one in sample},
    report,
    per_passage,
  )
  if not chosen:
    raise InputError(f'{corpus}: no query is usable: {report}')
  _write(folder, chosen)
  report.counts['queries'] = len(chosen)
  counts = {what: count for what, count in report.counts.items() if count}
  return {'counts': counts, 'asked_about': len(sample)}


def read_passages(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages at a path, read as in all commands (`text.inputs`).

  Passages of documents have the headings above them as titles.
  """
  progress = Progress('passages', task=f'reading {path}')
  for entry in Texts(path, 'passage').entries():
    yield entry.record
    progress.advance()


def sample_passages(
  passages: Iterable[PassageRecord], count: int, seed: int, report: ReadReport
) -> list[PassageRecord]:
  """At most ``count`` passages, drawn by a hash of their ids, in little memory."""
  heap: list[tuple[int, int, PassageRecord]] = []
  for number, passage in enumerate(passages):
    report.count('passages')
    if len(passage.text.split()) < _SHORT and len(words.words(passage.text)) < _SHORT:
      report.count(f'passages below {_SHORT} words: not asked about', passage.id)
      continue
    lot = int.from_bytes(hashes.draw(passage.id, seed, 'asking')[:8])
    # The largest lot kept is the first to go.
    entry = -lot, -number, passage
    if len(heap) < count:
      heapq.heappush(heap, entry)
    else:
      heapq.heappushpop(heap, entry)
  return [passage for _, _, passage in sorted(heap, reverse=True)]


def _row(passage: PassageRecord) -> dict[str, str]:
  return {'_id': passage.id, 'title': passage.title, 'text': passage.text}


def _queries(lines: Mapping[str, Sequence[str]]) -> list[Query]:
  """The lines of answers by passage, as queries; an answer without lines is an empty query."""
  tidied = (
    (id_, filters.tidy(line)) for id_, answer in lines.items() for line in answer if line.strip()
  )
  empty = [Query(id_, '') for id_, answer in lines.items() if not any(map(str.strip, answer))]
  return [*(Query(id_, text) for id_, text in tidied), *empty]


def _ask(
  server: endpoint.Server, requests: Sequence[Request], answer_file: str, concurrency: int
) -> dict[str, Answer]:
  """The answers by passage, including those of earlier calls."""
  answers = prompts.read_kept(answer_file)
  todo = [request for request in requests if request.key not in answers]
  logger.info(
    '%s: about %s tokens (of 4 bytes each), and answers of at most %s; %s kept from before',
    counted(len(todo), 'prompts'),
    rounded(sum(prompts.tokens_in(request.prompt) for request in todo)),
    rounded(server.settings['max_tokens'] * len(todo)),
    counted(len(requests) - len(todo), 'answers'),
  )
  if todo:
    progress = Progress('answers', len(todo), 'asking')
    with files.no_room(answer_file), open(answer_file, 'ab') as file:
      _end_line(file)
      for answer in endpoint.ask(server, todo, concurrency):
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
  write_lines(folder / 'queries.jsonl', ({'_id': id_, 'text': query.text} for id_, query in named))
  (folder / 'qrels').mkdir()
  write_qrels(folder / 'qrels' / 'train.tsv', {id_: {query.passage: 1} for id_, query in named})
