"""Prompts on the device, in slots that are allocated once, and the programs that use them.

The bank is ``[L, K, 2, P, N, D]``, the layers' axis first, as the layers read it. Slot 0 holds no
prompt: its length is 0. A slot is written in place (a donated ``dynamic_update_slice``), all of its
P vectors, so nothing of an earlier prompt stays. Nothing is compiled after `compile`.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dprjax.base.errors import InputError
from dprjax.formats.vector_spec import VectorSpec
from dprjax.models import encoder as models
from dprjax.models import encoder_config
from dprjax.models import pooling as poolings
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.serving.metrics import Metrics

# Columns of a batch's numbers, one row a text: slot, tokens, and how they become a vector.
SLOT, LENGTH, WAY = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
  """What one text takes of a prompt: a prefix and how its tokens become a vector.

  Attributes:
    key: names the content. Equal keys share a slot; None is no prompt.
    vectors: [L, 2, P, N, D]; None is no prompt.
    shift: the position of the first token.
    spec: how its states become a vector.
  """

  key: Hashable | None
  vectors: np.ndarray | None
  shift: int
  spec: VectorSpec


class Lease(NamedTuple):
  """A slot, and how often it was written before: later it may hold another prompt."""

  slot: int
  generation: int


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The shapes of batches: rows by padded lengths, within a budget of padded tokens."""

  rows: tuple[int, ...]
  lengths: tuple[int, ...]
  budget: int

  def most_rows(self, length: int) -> int:
    """The rows of the largest batch of this padded length."""
    return max([rows for rows in self.rows if rows * length <= self.budget], default=self.rows[0])

  def __iter__(self) -> Iterator[tuple[int, int]]:
    for rows, length in itertools.product(self.rows, self.lengths):
      if rows <= self.most_rows(length):
        yield rows, length

  def bucket(self, tokens: int) -> int:
    """The padded length of a row; ``tokens`` is at most the longest."""
    return next(length for length in self.lengths if tokens <= length)

  def choose_rows(self, waiting: int, length: int) -> int:
    """The rows of a batch for so many waiting texts.

    A batch that would be more than a quarter empty is cut to the next smaller one: what is left
    follows at once.
    """
    fitting = [rows for rows in self.rows if rows <= self.most_rows(length)]
    larger = next((rows for rows in fitting if rows >= waiting), fitting[-1])
    smaller = max([rows for rows in fitting if rows <= waiting], default=fitting[0])
    return larger if waiting * 4 >= larger * 3 else smaller


class Bank:
  """K slots of prompts on one device. One thread uses it.

  Attributes:
    slots: K, the empty one included.
    length: P, the most vectors of a prompt.
    generations: how often each slot was written.
  """

  def __init__(
    self,
    config: EncoderConfig,
    params: Any,
    *,
    slots: int,
    length: int,
    shapes: Shapes,
    pad_id: int,
    metrics: Metrics,
    dtype: str = 'auto',
    device: jax.Device | None = None,
  ):
    """Allocates the bank.

    Args:
      config: the encoder's shape.
      params: its parameters.
      slots, length: K and P.
      shapes: of batches; the slots exceed the rows of the largest.
      pad_id: the padding token.
      metrics: where loads and evictions are counted.
      dtype: of the arithmetic and of the bank, as an ``Encoder`` takes it.
      device: the first local one by default.

    Raises:
      InputError: too few slots, or no memory for them.
    """
    if slots <= max(shapes.rows):
      raise InputError(
        f'--slots={slots} holds fewer prompts than a batch of {max(shapes.rows)} rows may need, '
        f'and one slot stays empty; give at least {max(shapes.rows) + 1}'
      )
    self.slots, self.length, self.shapes = slots, length, shapes
    self._config, self._pad_id, self._arithmetic, self._metrics = (
      config,
      pad_id,
      encoder_config.arithmetic(dtype, 'dtype'),
      metrics,
    )
    self._ways = [VectorSpec(name, scaled) for name in poolings.every() for scaled in (False, True)]
    self._device = jax.local_devices()[0] if device is None else device
    self._params = jax.device_put(params, self._device)
    self._shape = (config.num_layers, slots, 2, length, config.num_kv_heads, config.head_dim)

    @jax.jit
    def allocate() -> models.LayeredBank:
      return models.LayeredBank(
        jnp.zeros(self._shape, self._arithmetic.activations),
        jnp.zeros(slots, jnp.int32),
        jnp.zeros(slots, jnp.int32),
      )

    with jax.default_device(self._device):
      self._bank = jax.block_until_ready(allocate())
    self.generations = [0] * slots
    self._slot_of: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
    self._free = list(range(slots - 1, 0, -1))
    self._programs: dict[tuple[int, int], Any] = {}
    self._write: Any = None

  @property
  def prompt_bytes(self) -> int:
    """Device memory that one slot takes."""
    return int(np.prod(self._shape)) // self.slots * self._arithmetic.activations.itemsize

  def compile(self) -> None:
    """Compiles the program of every shape, and the one that writes a slot."""
    one = jax.ShapeDtypeStruct((), jnp.int32)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._bank)
    layers, _, *core = self._shape
    prefix = jax.ShapeDtypeStruct((layers, *core), jnp.float32)
    with jax.default_device(self._device):
      self._write = (
        jax.jit(_write, donate_argnums=0).lower(abstract, prefix, one, one, one).compile()
      )
      embed = jax.jit(self._embed)
      for rows, length in self.shapes:
        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        numbers = jax.ShapeDtypeStruct((rows, 3), jnp.int32)
        self._programs[rows, length] = embed.lower(
          self._params, abstract, tokens, numbers
        ).compile()
        # The first run of a program may still allocate and load.
        np.asarray(self.run([], [], [], rows, length))

  def assign(self, prefixes: Sequence[Prefix], wanted: Mapping[Hashable, int]) -> list[Lease]:
    """The slots of the prefixes, which are written where they are not there yet.

    The least recently used go first, those that no queued text needs before the others, and never
    one of these prefixes.

    Args:
      prefixes: of one batch.
      wanted: how many queued texts need a key.
    """
    needed = {prefix.key for prefix in prefixes}
    leases = []
    for prefix in prefixes:
      if prefix.key is None:
        leases.append(Lease(0, 0))
        continue
      slot = self._slot_of.get(prefix.key)
      if slot is None:
        slot = self._free.pop() if self._free else self._evict(needed, wanted)
        self._fill(slot, prefix)
        self._slot_of[prefix.key] = slot
        self._metrics.loads.labels('device').inc()
      self._slot_of.move_to_end(prefix.key)
      leases.append(Lease(slot, self.generations[slot]))
    self._metrics.resident.labels('device').set(len(self._slot_of))
    return leases

  def run(
    self,
    rows: Sequence[Int[np.ndarray, ' T']],
    prefixes: Sequence[Prefix],
    leases: Sequence[Lease],
    count: int,
    length: int,
  ) -> Float[Array, 'B H']:
    """Starts a batch, and returns its vectors before they are computed.

    Args:
      rows: token ids, at most ``count`` rows of at most ``length``.
      prefixes, leases: of each row.
      count, length: a shape of ``shapes``.

    Raises:
      RuntimeError: a slot was written since its lease.
    """
    tokens = np.full((count, length), self._pad_id, np.int32)
    numbers = np.zeros((count, 3), np.int32)
    for i, (ids, prefix, lease) in enumerate(zip(rows, prefixes, leases, strict=True)):
      if self.generations[lease.slot] != lease.generation:
        raise RuntimeError(f'slot {lease.slot} holds another prompt by now')
      tokens[i, : len(ids)] = ids
      way = self._ways.index(VectorSpec(prefix.spec.pooling, prefix.spec.normalize))
      numbers[i] = lease.slot, len(ids), way
    program = self._programs[count, length]
    return program(self._params, self._bank, *jax.device_put((tokens, numbers), self._device))

  def _embed(
    self, params: Any, bank: models.LayeredBank, tokens: jax.Array, numbers: jax.Array
  ) -> jax.Array:
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    mask = places[None, :] < numbers[:, LENGTH, None]
    return embed_text(
      self._config,
      params,
      tokens,
      mask,
      self._ways,
      numbers[:, WAY],
      prompt=bank,
      prompt_ids=numbers[:, SLOT],
      options=EncoderOptions.of(self._arithmetic),
    )

  def _fill(self, slot: int, prefix: Prefix) -> None:
    layers, _, two, length, heads, size = self._shape
    vectors = np.zeros((layers, two, length, heads, size), np.float32)
    assert prefix.vectors is not None
    used = prefix.vectors.shape[2]
    vectors[:, :, :used] = prefix.vectors
    with jax.default_device(self._device):
      self._bank = self._write(
        self._bank,
        jax.device_put(vectors, self._device),
        *jax.device_put([np.int32(x) for x in (slot, used, prefix.shift)], self._device),
      )
    self.generations[slot] += 1

  def _evict(self, needed: set[Hashable | None], wanted: Mapping[Hashable, int]) -> int:
    free = (key for key in self._slot_of if key not in needed and not wanted.get(key))
    key = next(free, None) or next(key for key in self._slot_of if key not in needed)
    self._metrics.evictions.labels('device').inc()
    return self._slot_of.pop(key)


def _write(
  bank: models.LayeredBank, prefix: jax.Array, slot: jax.Array, length: jax.Array, shift: jax.Array
) -> models.LayeredBank:
  zero = jnp.zeros((), jnp.int32)
  return models.LayeredBank(
    jax.lax.dynamic_update_slice(
      bank.prefixes,
      prefix.astype(bank.prefixes.dtype)[:, None],
      (zero, slot, zero, zero, zero, zero),
    ),
    jax.lax.dynamic_update_slice(bank.lengths, length[None], (slot,)),
    jax.lax.dynamic_update_slice(bank.shifts, shift[None], (slot,)),
  )
