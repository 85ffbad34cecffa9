"""What the training loop asks of a system's data; each module beside this one finds its text with
``find(config, workdir)``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dprjax.data.text import Tokenizer
from dprjax.methods.method import System
from dprjax.models.encoder import EncoderConfig

Batch = Mapping[str, np.ndarray]


class Feed(NamedTuple):
  """Token arrays, ready to be trained on.

  Attributes:
    loader: this process's rows of each global batch, without end; has ``get_state``, ``set_state``
      (JSON) and ``close``.
    epoch: updates in an epoch.
    unit: what a row of a batch is, in the plural.
    said: the data in a line, for the start of the run.
    ids: what a batch held, by name, for the message when its loss is not finite.
    shape: a batch's padded lengths, in words.
    evaluation: makes ``{name: array} -> {measure: value}`` on the dev split for a system; None
      where there is no such split.
  """

  loader: Any
  epoch: int
  unit: str
  said: str
  ids: Callable[[Batch], str]
  shape: Callable[[Batch], str]
  evaluation: Callable[[System], Callable[[Any], dict[str, float]]] | None


class Text(NamedTuple):
  """The text that a config names, found and not yet tokenised.

  Attributes:
    read: streams its texts, for a vocabulary.
    open: ``(tokenizer, model) -> Feed``: tokenised into the workdir's store, or the store that is
      there.
  """

  read: Callable[[], Iterator[str]]
  open: Callable[[Tokenizer, EncoderConfig], Feed]
