"""The fixtures of trainings."""

from tests.training.conftest import (  # noqa: F401
  bag,
  batches_of,
  devices,
  model,
  settings,
  tokenizer,
  words_of,
)
