"""Prompts to a generator about passages, and the file of its answers."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text.texts import PassageRecord

TEMPLATE = """\
Write {count} different search queries that a person would type to find the passage below. Do not \
copy its sentences, and do not mention the passage. Write one query a line and nothing else.
{examples}
Passage: {passage}
Queries:
"""
_WORDS = 200  # of a passage in a prompt
_EXAMPLE = '\nPassage: {passage}\nQueries:\n{query}\n'
_SLOTS = re.compile(r'\{(passage|title|examples|count)\}')
_BYTES_OF_TOKEN = 4
_MOST_LINES = 200  # of an answer


class Example(msgspec.Struct):
  """A passage with one or several queries for it."""

  passage: str
  query: str | list[str]

  @property
  def queries(self) -> list[str]:
    return [self.query] if isinstance(self.query, str) else self.query


class Answer(msgspec.Struct):
  """The answer of a generator about a passage.

  Attributes:
    key: of the request (`key_of`).
    tokens: of the prompt and of the answer, as counted by the endpoint.
  """

  id: str
  answer: str
  key: str
  model: str
  prompt: str
  settings: dict[str, Any]
  finish: str = ''
  tokens: tuple[int, int] | None = None

  def lines(self) -> list[str]:
    """The queries, unchanged."""
    return self.answer.splitlines()[:_MOST_LINES]


class Request(NamedTuple):
  """A prompt about a passage."""

  id: str
  prompt: str
  key: str


def read_template(path: files.PathLike | None) -> str:
  """The template of a file, or ``TEMPLATE``."""
  if path is None:
    return TEMPLATE
  with reading.open_text(path, 'template') as file:
    text = file.read()
  if '{passage}' not in text:
    raise InputError(
      f'--template={path}: no {{passage}} in it, where the text of a passage goes; {{title}}, '
      '{examples} and {count} are optional'
    )
  return text


def read_examples(path: files.PathLike | None) -> list[Example]:
  """The task examples, ``{"passage", "query"}`` a line; query may be a list."""
  if path is None:
    return []
  return [example for _, example in reading.read_jsonl(path, 'examples', Example)]


def fill(template: str, passage: PassageRecord, examples: Sequence[Example], count: int) -> str:
  """The prompt about a passage, of which it has 200 words. Braces in texts are kept."""
  shown = ''.join(
    _fill(_EXAMPLE, {'passage': _cut(one.passage), 'query': '\n'.join(one.queries)}, _PAIR)
    for one in examples
  )
  text = passage.text if '{title}' in template else passage.joined
  values = {
    'passage': _cut(text),
    'title': passage.title,
    'examples': shown,
    'count': str(count),
  }
  return _fill(template, values, _SLOTS)


_PAIR = re.compile(r'\{(passage|query)\}')


def _fill(template: str, values: dict[str, str], slots: re.Pattern[str]) -> str:
  # In one pass, so that text that spells a slot stays text.
  return slots.sub(lambda slot: values[slot[1]], template)


def _cut(text: str) -> str:
  return ' '.join(text.split()[:_WORDS])


def key_of(prompt: str, model: str, settings: dict[str, Any]) -> str:
  """A key for a prompt, model and settings."""
  content = json.dumps([prompt, model, settings], sort_keys=True)
  return hashlib.sha256(content.encode()).hexdigest()[:32]


def tokens_in(text: str) -> int:
  """A rough count of tokens: four bytes each."""
  return -(-len(text.encode(errors='replace')) // _BYTES_OF_TOKEN)


def encode(answer: Answer) -> bytes:
  """A line of the file of answers, without its newline."""
  return msgspec.json.encode(answer)


def read_kept(path: files.PathLike) -> dict[str, Answer]:
  """The answers of earlier commands by key, without a last line cut off by a kill."""
  try:
    with open(path, 'rb') as file:
      lines = file.read().split(b'\n')
  except FileNotFoundError:
    return {}
  answers = {}
  for number, line in enumerate(lines[:-1], 1):  # the last line has no newline
    if line.strip():
      where = f'{path}, line {number}'
      answer = reading.parse(line.decode('utf-8', 'replace'), where, Answer)
      answers[answer.key] = answer
  return answers
