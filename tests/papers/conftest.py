"""The fixtures of trainings and models."""

from tests.models.conftest import golden, write_checkpoint  # noqa: F401
from tests.training.conftest import (  # noqa: F401
  bag,
  batches_of,
  devices,
  model,
  settings,
  tokenizer,
  words_of,
)
