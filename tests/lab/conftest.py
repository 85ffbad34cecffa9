"""Methods of experiments/lab are tested with the fixtures of those of dprjax."""

from tests.training.conftest import (  # noqa: F401, fixtures
  bag,
  batches_of,
  devices,
  model,
  settings,
  tokenizer,
  words_of,
)
