"""One backbone with many prompts, without a network: texts in, vectors out, thread-safe.

tokeniser threads -> bounded queue -> one device thread (`batcher`) -> futures; tenants in turn

engine = Engine.load('backbone', 'prompts')
engine.ready.result()
engine.submit('qa', 'query', ['a question']).result()     # float32 [1, H]
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.base import given, machine
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.programs import Programs
from dprjax.encoding import embedder
from dprjax.encoding.text_encoder import config_sha256
from dprjax.models import encoder_config, hub
from dprjax.serving import turns
from dprjax.serving.bank import AdapterChoice, Bank, Shapes
from dprjax.serving.batcher import Batcher, QueuedText, Spent
from dprjax.serving.library import Library, Version
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.turns import NOBODY, Tenant, Work
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES

Ids = Sequence[int]
_BUDGET = 8192  # padded tokens of a batch
_CORE_TOKENS = 512  # of it, for each core of a CPU (docs/performance.md)
_TOPIC_CHARACTERS = 100_000
_HINT = (
  '; send texts, or ids of its own tokenizer (LangChain sends those of another one: '
  'OpenAIEmbeddings(check_embedding_ctx_length=False) sends texts)'
)


@dataclasses.dataclass(frozen=True)
class ServerOptions:
  """Sizes of batches and of the bank.

  Attributes:
    rows, lengths: row counts and padded lengths of batches; lengths are limited by the positions of
      the backbone.
    budget: padded tokens of a batch; None: 8,192, on CPUs 512 for each core.
    deadline: seconds that a text waits for others.
    most_queued: texts that may wait.
    slots: prompts on the device, and one slot for none.
    prompt_length: vectors of a slot.
    host_bytes: memory of the host for prompts.
    threads: for tokenising.
    dtype: of the arithmetic, as for ``Encoder``.
  """

  rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
  lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
  budget: int | None = None
  deadline: float = 0.003
  most_queued: int = 4096
  slots: int = 256
  prompt_length: int = 32
  host_bytes: int = 2 << 30
  threads: int = 2
  dtype: str = 'auto'


class ForeignIds(InputError):
  """Token ids that the backbone tokenizer never gives."""


class Tokens(NamedTuple):
  """The tokenised texts of a request.

  Attributes:
    version: of the prompt.
    texts: token ids and prompts.
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
    backbone, tokenizer: of all prompts.
    library: the prompts.
    metrics: counts and times.
    options: with the lengths that the backbone takes.
    ready: done when every shape is compiled, or its error.
    batcher: has the device, for searches and reranking too.
    pool: threads that tokenise.
  """

  def __init__(
    self,
    backbone: hub.Backbone,
    tokenizer: tokenizing.Tokenizer,
    prompts: PathLike,
    name: str,
    options: ServerOptions = ServerOptions(),
    mesh: Mesh | None = None,
    programs: Programs | None = None,
  ):
    """See ``load``."""
    for option, value in dataclasses.asdict(options).items():
      if option in ('deadline', 'dtype') or value is None:
        continue
      for size in (value or (None,)) if isinstance(value, tuple) else (value,):
        embedder.check_size(option, size)
    room = backbone.config.max_tokens
    lengths = tuple(sorted({min(length, room) for length in options.lengths}))
    if mesh is None:
      arithmetic = encoder_config.arithmetic(options.dtype, 'dtype')
      mesh = embedder.server_mesh(embedder.local_parts(arithmetic, backbone.params))
    platform = mesh.devices.flat[0].platform
    # The prompt of each row takes as much of the caches as its tokens.
    tokens = _CORE_TOKENS * machine.cores() if platform == 'cpu' else _BUDGET
    self.options = options = dataclasses.replace(
      options,
      rows=tuple(sorted(set(options.rows))),
      lengths=lengths,
      budget=tokens if options.budget is None else options.budget,
    )
    self.backbone, self.tokenizer, self.metrics = backbone, tokenizer, ServerMetrics()
    self.library = Library(
      prompts,
      backbone,
      tokenizer,
      name=name,
      most_vectors=options.prompt_length,
      most_tokens=lengths[-1],
      host_bytes=options.host_bytes,
      metrics=self.metrics,
    )
    self._bank = Bank(
      backbone.config,
      backbone.params,
      slots=options.slots,
      rows=self.library.rows,
      shapes=Shapes(options.rows, lengths, options.budget or _BUDGET),
      pad_id=tokenizer.pad_id,
      metrics=self.metrics,
      mesh=mesh,
      dtype=options.dtype,
    )
    self.batcher = Batcher(
      self._bank,
      backbone.config.vector_size,
      deadline=options.deadline,
      most_queued=options.most_queued,
      ahead=1 if platform == 'cpu' else 2,
      metrics=self.metrics,
      programs=programs,
    )
    self.ready = self.batcher.ready
    self.pool = turns.FairPool(options.threads, 'tokenise')

  @classmethod
  def load(
    cls,
    backbone: PathLike,
    prompts: PathLike,
    *,
    name: str | None = None,
    options: ServerOptions = ServerOptions(),
    mesh: Mesh | None = None,
    programs: Programs | None = None,
  ) -> Self:
    """Loads a backbone; compilation goes on in the background, see ``ready``.

    Args:
      backbone: a Hugging Face directory, a hub id, or ``package:NAME``.
      prompts: a folder of ``NAME.npz``, made if it is missing.
      name: of the backbone without a prompt; by default that of its folder or package.
      options: see `ServerOptions`.
      mesh: devices that split the backbone by the axis ``model`` (`mesh.make_mesh`). Default: the
        first local one, or as many as hold the backbone in half of their memory.
      programs: compiled for an earlier process; on one device.

    Raises:
      InputError: unreadable files, two encoders, or an option out of range.
    """
    folder = epath.Path(hub.package_path(str(backbone)))
    if all((folder / side / 'config.json').exists() for side in SIDES):
      raise InputError(f'{backbone} has two encoders; a server takes one backbone')
    loaded = hub.load_backbone(backbone, on_disk=True)
    tokenizer = tokenizing.load_tokenizer(loaded.path)
    hub.check_vocabulary(loaded, tokenizer.vocab_size, loaded.path)
    name = name or str(backbone).rstrip('/').rpartition('/')[2].removeprefix('package:')
    return cls(loaded, tokenizer, prompts, name, options, mesh, programs)

  @property
  def config_sha256(self) -> str:
    """Identifies the backbone shape."""
    return config_sha256(self.backbone.config)

  @property
  def bank_bytes(self) -> int:
    """Device memory of all slots."""
    return self._bank.nbytes

  @property
  def backbone_bytes(self) -> int:
    """Device memory of one copy of the backbone."""
    return self._bank.backbone_bytes

  def tokenize(self, name: str, side: str, texts: Sequence[str] | Sequence[Ids]) -> Tokens:
    """Tokenises texts under the settings of a prompt.

    Args:
      side: 'query' or 'passage'.
      texts: at least one; or token ids with special ones, which are not changed.

    Raises:
      UnknownPrompt, InputError: as ``Library.get``; or not a text, or ids under a prompt
        that chooses topics.
      ForeignIds: ids that are no tokens, or without the special tokens.
    """
    return turns.finish(self.tokenize_steps(name, side, texts))

  def tokenize_steps(
    self, name: str, side: str, texts: Sequence[str] | Sequence[Ids]
  ) -> turns.Steps:
    """``tokenize`` in slices, which cost characters."""
    yield 1.0  # do nothing in the thread of the caller
    seconds = 0.0
    version = self.library.get(name)
    rows: list[np.ndarray] = []
    choices: list[AdapterChoice] = []
    for numbers in turns.slices(range(len(texts)), lambda number: _size(texts[number])):
      yield sum(_size(texts[number]) for number in numbers)
      started = time.monotonic()
      own, chosen = self._tokenize(version, name, side, [texts[n] for n in numbers], numbers[0])
      rows += own
      choices += chosen
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
    self, version: Version, name: str, side: str, texts: Sequence[Any], start: int
  ) -> tuple[list[np.ndarray], list[AdapterChoice]]:
    """Token ids and adapters of a slice, whose first text is number ``start`` of its request."""
    spec = version.spec
    if isinstance(texts[0], str):
      checked = [given.check_text(one, start + number) for number, one in enumerate(texts)]
      if version.topic_model is not None and (most := max(map(len, checked))) > _TOPIC_CHARACTERS:
        raise InputError(
          f'input: a text of {most:,} characters; prompt {name} chooses topics by all words of a '
          f'text, of {_TOPIC_CHARACTERS:,} characters at most'
        )
      prefixed = [spec.prefix(side) + one for one in checked]
      shortened = self.tokenizer.shorten(prefixed, spec.max_length(side))
      encodings = self.tokenizer.backend.encode_batch_fast(shortened)
      return [np.array(one.ids, np.int32) for one in encodings], version.choose(checked, side)
    if version.topic_model is not None:
      raise InputError(f'input: prompt {name} chooses topics by words; send texts, not token ids')
    rows = [self._check_ids(one, start + number) for number, one in enumerate(texts)]
    return rows, version.choose([''] * len(rows), side)

  def estimate(self, name: str, side: str, texts: Sequence[str] | Sequence[Ids]) -> Work:
    """An estimate of the work of these texts."""
    most = self.options.lengths[-1]
    if (kept := self.library.kept(name)) is not None:
      most = min(most, kept.spec.max_length(side))
    return self.work(
      min(len(one) // 4 + 3 if isinstance(one, str) else _size(one), most) for one in texts
    )

  def work(self, lengths: Iterable[int]) -> Work:
    """The work of texts of so many tokens."""
    each = [*lengths]
    return Work(float(sum(each)), sum(map(self.batcher.seconds, each)))

  def queue(
    self, tokens: Tokens, tenant: Tenant = NOBODY, spent: Spent = lambda seconds: None
  ) -> concurrent.futures.Future:
    """Queues tokenised texts; see ``Batcher.submit``."""
    return self.batcher.submit(tokens.texts, tenant, spent)

  def submit(self, name: str, side: str, texts: Sequence[str]) -> concurrent.futures.Future:
    """``tokenize`` and ``queue``."""
    return self.queue(self.tokenize(name, side, texts))

  def close(self, drop: bool = False, seconds: float | None = None) -> bool:
    """Ends the threads after all queued texts; returns whether they ended.

    Args:
      drop: whether to cancel queued work.
      seconds: to wait for each thread at most.
    """
    ended = self.batcher.close(drop, seconds)
    self.pool.close(seconds)
    return ended

  def _check_ids(self, ids: object, number: int) -> np.ndarray:
    """The ids of a text. Vectors of ids from another tokenizer would be meaningless."""
    rows = self.tokenizer.vocab_size
    if (
      isinstance(ids, str)
      or not isinstance(ids, Sequence)
      or not ids
      or not all(type(one) is int and 0 <= one < rows for one in ids)
    ):
      raise ForeignIds(
        f'input: number {number} is not a list of token ids from 0 to {rows - 1}{_HINT}'
      )
    opening, closing = self.tokenizer.opening, self.tokenizer.closing
    text = ids[len(opening) : len(ids) - len(closing)]
    if (
      len(ids) < len(opening) + len(closing)
      or tuple(ids[: len(opening)]) != opening
      or tuple(ids[len(ids) - len(closing) :]) != closing
    ):
      raise ForeignIds(
        f'input: number {number} lacks the special tokens {list(opening)} at its beginning and '
        f'{list(closing)} at its end{_HINT}'
      )
    if inside := {*opening, *closing, self.tokenizer.pad_id}.intersection(text):
      raise ForeignIds(
        f'input: number {number} has the special token {min(inside)} inside; send each text as its '
        f'own list, without padding{_HINT}'
      )
    return np.array(ids, np.int32)


def _size(given: Any) -> int:
  """Characters of a text, or about those of token ids."""
  return len(given) if isinstance(given, str | list | tuple) else 1
