"""The small backbone and prompts of tests/serving, and inputs of mteb for a model."""

import enum
import json
from typing import NamedTuple

import pytest

from tests.serving.conftest import small  # noqa: F401 (a fixture)


class Task(NamedTuple):
  """The part of ``TaskMetadata`` of mteb that a model reads."""

  name: str = 'Toy'
  type: str = 'Retrieval'


class PromptType(enum.StrEnum):
  """As mteb has it."""

  query = 'query'
  document = 'document'


PASSAGES = {'d1': 'json decodes a string', 'd2': 'an http server sends', 'd3': 'parse the xml tree'}
QUERIES = {'q1': 'a string of json', 'q2': 'the server', 'q3': 'xml'}


@pytest.fixture
def beir(tmp_path):
  """A BEIR folder: the passage of a query has its number, but for q3, which has two."""
  folder = tmp_path / 'toy'
  (folder / 'qrels').mkdir(parents=True)
  for name, texts in (('corpus', PASSAGES), ('queries', QUERIES)):
    lines = (json.dumps({'_id': id_, 'text': text}) + '\n' for id_, text in texts.items())
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  (folder / 'qrels' / 'test.tsv').write_text(
    'query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\nq3\td3\t2\nq3\td1\t1\n'
  )
  return folder
