"""Sizes of batches, of the bank and of requests."""

import dataclasses
import itertools
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class ServerOptions:
  """Options of an `Engine`.

  Attributes:
    rows, lengths: row counts and padded lengths of batches; an engine sorts them, and limits the
      lengths by the positions of the backbone.
    budget: padded tokens of a batch; 0: 8,192, on CPUs 512 for each core.
    deadline: seconds that a text waits for others.
    slots: prompts on the device, and one slot for none; more than the rows of the largest batch.
    prompt_length: vectors of a slot.
    host_bytes: memory of the host for prompts.
    threads: for tokenising.
    dtype: of the arithmetic, as for ``Encoder``.
  """

  rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
  lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
  budget: int = 0
  deadline: float = 0.003
  slots: int = 256
  prompt_length: int = 32
  host_bytes: int = 2 << 30
  threads: int = 2
  dtype: str = 'auto'

  def shapes(self) -> Iterator[tuple[int, int]]:
    """The shapes of batches within the budget, and those of the fewest rows."""
    for rows, length in itertools.product(self.rows, self.lengths):
      if rows == self.rows[0] or rows * length <= self.budget:
        yield rows, length

  def most_rows(self, length: int, most: int) -> int:
    """The most rows of this padded length, up to ``most`` if possible."""
    fitting = [rows for rows in self.rows if rows <= most and rows * length <= self.budget]
    return max(fitting, default=self.rows[0])

  def bucket(self, tokens: int) -> int:
    """The padded length of a row."""
    return next(length for length in self.lengths if tokens <= length)

  def choose_rows(self, waiting: int, most: int) -> int:
    """The rows of a batch for this many waiting texts, ``most`` at most.

    A batch more than an eighth empty shrinks to the next smaller one; the rest follows at once.
    """
    fitting = [rows for rows in self.rows if rows <= most]
    larger = next((rows for rows in fitting if rows >= waiting), fitting[-1])
    smaller = max([rows for rows in fitting if rows <= waiting], default=fitting[0])
    return larger if waiting * 8 >= larger * 7 else smaller


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a request, and of all requests together.

  Attributes:
    bytes, prompt_bytes: of a body, and of an uploaded prompt file.
    inputs: texts, queries or documents.
    tokens: of all texts, after truncation.
    requests: answered at a time.
    seconds: for the request to arrive, and again for the answer.
    wait: the most seconds before the work on a request begins, by a prediction.
    memory: bytes of bodies and answers of all requests.
  """

  bytes: int = 8 << 20
  prompt_bytes: int = 256 << 20
  inputs: int = 2048
  tokens: int = 300_000
  requests: int = 512
  seconds: float = 60
  wait: float = 10
  memory: int = 1 << 30
