"""What the methods of experiments/lab are tested with is what those of dprjax are tested with."""

from tests.methods.conftest import (  # noqa: F401, fixtures
  bag,
  batches_of,
  devices,
  model,
  settings,
  tokenizer,
  words_of,
)
