"""The small backbone and prompts of tests/serving, and inputs of mteb for a model."""

import enum
from typing import NamedTuple

from tests.serving.conftest import small  # noqa: F401 (a fixture)


class Task(NamedTuple):
  """The part of ``TaskMetadata`` of mteb that a model reads."""

  name: str = 'Toy'
  type: str = 'Retrieval'


class PromptType(enum.StrEnum):
  """As mteb has it."""

  query = 'query'
  document = 'document'
