"""Sizes of batches, of the bank and of requests, with their flags."""

import dataclasses
import itertools
from collections.abc import Iterator

from dprjax.base import flags
from dprjax.base.flags import flag

_MB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServerOptions:
  """Options of an `Engine`, which sorts rows and lengths."""

  rows: tuple[int, ...] = flag(
    'row counts of batches', (1, 2, 4, 8, 16, 32, 64), most=4096, split=',', metavar='N,N,...'
  )
  lengths: tuple[int, ...] = flag(
    'padded lengths of batches, as far as the backbone has positions',
    (16, 32, 64, 128, 256, 512),
    most=2**15,
    split=',',
    metavar='N,N,...',
  )
  budget: int = flag(
    'padded tokens of a batch; 0: 8192, on CPUs 512 for each core',
    0,
    name='batch_tokens',
    least=0,
    most=2**24,
  )
  deadline: float = flag('milliseconds that a text waits for others', 0.003, unit=0.001, most=1000)
  slots: int = flag('prompts on the device, and one for none', 256, most=10**6)
  prompt_length: int = flag('vectors a layer of a slot; longer prompts are refused', 32, most=4096)
  host_bytes: int = flag(
    'megabytes of prompts that the host keeps', 2048 * _MB, name='host_memory', unit=_MB, most=2**20
  )
  threads: int = flag('threads that tokenise', 2, name='tokenizer_threads', most=256)
  dtype: str = flags.dtype()
  weight_parts: int | None = flags.weight_parts()

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """Where a server listens, to whom, and how it ends."""

  host: str = flag('the address to listen on', '127.0.0.1')
  port: int = flag('0: any free one', 8000, least=0, most=65535)
  keys: str | None = flags.file('API keys; without a file no key is needed')
  drain: int = flag('seconds for the last requests after SIGTERM', 30, most=3600)
  lame_duck: int = flag(
    'seconds after SIGTERM in which requests are still accepted, while balancers turn away',
    2,
    least=0,
    most=3600,
  )
  allowed_hosts: tuple[str, ...] = flag(
    'names of this server in requests, such as *.example.org; default: with --keys any, else '
    'those of this machine',
    (),
    split=',',
    metavar='NAME,NAME,...',
  )


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a request, and of all requests together; tokens count after truncation."""

  seconds: float = flag(
    'seconds for a request to arrive, and to be answered', 60, name='timeout', most=3600
  )
  wait: float = flag(
    'most seconds of waiting before the work on a request, by a prediction',
    10,
    name='max_wait',
    most=3600,
  )
  requests: int = flag('requests at a time', 512, name='max_requests', most=10**6)
  inputs: int = flag('texts of a request', 2048, name='max_inputs', most=10**6)
  tokens: int = flag('tokens of a request', 300_000, name='max_tokens', most=10**9)
  bytes: int = flag('megabytes of a request', 8 * _MB, name='max_body', unit=_MB, most=2048)
  prompt_bytes: int = flag(
    'megabytes of a prompt file', 256 * _MB, name='max_prompt', unit=_MB, most=2048
  )
  memory: int = flag(
    'megabytes of all bodies and answers', 1024 * _MB, name='max_memory', unit=_MB, most=2**20
  )
