"""One backbone with many prompts, without a network: texts in, vectors out, thread-safe.

tokeniser threads -> bounded queue -> one device thread (`batcher`) -> futures; tenants in turn

engine = Engine('backbone', 'prompts')
engine.ready.result()
engine.submit('qa', 'query', ['a question']).result()     # float32 [1, H]
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.base import machine
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.encoding import embedder
from dprjax.encoding.text_encoder import config_sha256
from dprjax.models import encoder_config, hub
from dprjax.serving import turns
from dprjax.serving.bank import AdapterChoice, Bank
from dprjax.serving.batcher import Batcher, QueuedText
from dprjax.serving.library import Library, Version
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.options import ServerOptions
from dprjax.serving.turns import Work
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES

_BUDGET = 8192  # padded tokens of a batch
_CORE_TOKENS = 512  # of it, for each core of a CPU (docs/performance.md)
_TOPIC_CHARACTERS = 100_000
_DEFAULTS = ServerOptions()


class Tokens(NamedTuple):
  """The tokenised texts of a request.

  Attributes:
    truncated: numbers of the texts that were cut.
    total: tokens, special ones included.
  """

  version: Version
  texts: list[QueuedText]
  truncated: list[int]
  total: int


class Engine:
  """A backbone and the prompts of a folder.

  Attributes:
    ready: done when every shape is compiled, or its error.
  """

  def __init__(
    self,
    backbone: PathLike,
    prompts: PathLike,
    *,
    name: str | None = None,
    options: ServerOptions = _DEFAULTS,
    mesh: Mesh | None = None,
  ):
    """Loads a backbone; compilation goes on in the background, see ``ready``.

    Args:
      name: of the backbone without a prompt; by default that of its folder or package.
      mesh: devices that split the backbone by the axis ``model`` (`mesh.make_mesh`). Default: the
        first local one, or as many as hold the backbone in half of their memory.
    """
    folder = epath.Path(hub.package_path(str(backbone)))
    if all((folder / side / 'config.json').exists() for side in SIDES):
      raise InputError(f'{backbone} has two encoders; a server takes one backbone')
    self.backbone = loaded = hub.load_backbone(backbone, on_disk=True)
    self.tokenizer = tokenizing.load_tokenizer(loaded.path)
    hub.check_vocabulary(loaded, self.tokenizer.vocab_size, loaded.path)
    self.config_sha256 = config_sha256(loaded.config)
    if mesh is None:
      arithmetic = encoder_config.arithmetic(options.dtype)
      mesh = embedder.server_mesh(embedder.local_parts(arithmetic, loaded.params))
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    self.options = dataclasses.replace(
      options,
      rows=tuple(sorted({*options.rows})),
      lengths=tuple(sorted({min(length, loaded.config.max_tokens) for length in options.lengths})),
      # The prompt of each row takes as much of the caches as its tokens.
      budget=options.budget or (_CORE_TOKENS * machine.cores() if on_cpu else _BUDGET),
    )
    self.metrics = ServerMetrics()
    name = name or str(backbone).rstrip('/').rpartition('/')[2].removeprefix('package:')
    self.library = Library(
      prompts, loaded, self.tokenizer, name=name, options=self.options, metrics=self.metrics
    )
    self.bank = Bank(
      loaded.config,
      loaded.params,
      options=self.options,
      rows=self.library.rows,
      pad_id=self.tokenizer.pad_id,
      metrics=self.metrics,
      mesh=mesh,
    )
    self.batcher = Batcher(self.bank, loaded.config.vector_size, 1 if on_cpu else 2, self.metrics)
    self.ready = self.batcher.ready
    self.pool = turns.FairPool(options.threads, 'tokenise')

  def tokenize(self, name: str, side: str, texts: Sequence[str]) -> Tokens:
    """Tokenises texts, at least one, under the settings of a prompt. Raises as ``Library.get``."""
    return turns.finish(self.tokenize_steps(name, side, texts))

  def tokenize_steps(self, name: str, side: str, texts: Sequence[str]) -> turns.Steps:
    """``tokenize`` in slices, which cost characters."""
    yield 1.0  # do nothing in the thread of the caller
    seconds = 0.0
    version = self.library.get(name)
    rows: list[np.ndarray] = []
    choices: list[AdapterChoice] = []
    for numbers in turns.slices(range(len(texts)), lambda number: len(texts[number])):
      yield sum(len(texts[number]) for number in numbers)
      started = time.monotonic()
      chunk = [texts[number] for number in numbers]
      rows += self._tokenize(version, name, side, chunk)
      choices += version.choose(chunk, side)
      seconds += time.monotonic() - started
    longest = version.spec.max_length(side)
    truncated = [number for number, row in enumerate(rows) if len(row) > longest]
    rows = [self.tokenizer.cut(row, longest) for row in rows]
    self.metrics.stage_seconds.labels('tokenise').observe(seconds)
    return Tokens(
      version,
      [QueuedText(row, choice) for row, choice in zip(rows, choices, strict=True)],
      truncated,
      sum(map(len, rows)),
    )

  def _tokenize(
    self, version: Version, name: str, side: str, texts: Sequence[str]
  ) -> list[np.ndarray]:
    if version.topic_model is not None and (most := max(map(len, texts))) > _TOPIC_CHARACTERS:
      raise InputError(
        f'input: a text of {most:,} characters; prompt {name} chooses topics by all words of a '
        f'text, of {_TOPIC_CHARACTERS:,} characters at most'
      )
    prefixed = [version.spec.prefix(side) + one for one in texts]
    shortened = self.tokenizer.shorten(prefixed, version.spec.max_length(side))
    encodings = self.tokenizer.backend.encode_batch_fast(shortened)
    return [np.array(one.ids, np.int32) for one in encodings]

  def estimate(self, name: str, side: str, texts: Sequence[str]) -> Work:
    most = self.options.lengths[-1]
    if (version := self.library.kept(name)) is not None:
      most = min(most, version.spec.max_length(side))
    return self.work(min(len(one) // 4 + 3, most) for one in texts)

  def work(self, lengths: Iterable[int]) -> Work:
    each = [*lengths]
    return Work(float(sum(each)), sum(map(self.batcher.seconds, each)))

  def submit(self, name: str, side: str, texts: Sequence[str]) -> concurrent.futures.Future:
    """The vectors of texts; see `tokenize` and `Batcher.submit`."""
    return self.batcher.submit(self.tokenize(name, side, texts).texts)

  def close(self) -> None:
    """Ends the threads after all queued texts."""
    self.batcher.close()
    self.pool.close()
