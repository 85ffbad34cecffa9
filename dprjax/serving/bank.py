"""Adapters on the devices, in slots allocated once, and the programs that use them.

Each kind of adapter has a bank of K rows (`Adapter.choose`). Slot s is row s of every bank, and
holds an adapter in one of them. Row 0 changes nothing. Writing replaces a whole row in place (a
donated ``dynamic_update_slice``). Nothing is compiled after `compile`.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.base.errors import InputError
from dprjax.encoding.embedder import place_backbone
from dprjax.models import encoder_config
from dprjax.models import pooling as poolings
from dprjax.models.adapter import Adapter, Several, allocate, pad, write
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.options import ServerOptions
from dprjax.text.vector_spec import VectorSpec

# Columns of the numbers of a batch: the length of each text, how it becomes a vector, its row in
# each bank.
LENGTH, WAY, ROWS = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterChoice:
  """The part of a prompt for a text.

  Attributes:
    key: identifies the adapter; equal keys share a slot. None: no adapter.
  """

  key: Hashable | None
  adapter: Adapter | None
  spec: VectorSpec


class Bank:
  """K slots of adapters on devices that share the backbone. One thread uses it.

  K, the number of slots, includes the empty slot 0.
  """

  def __init__(
    self,
    config: EncoderConfig,
    params: Any,
    *,
    options: ServerOptions,
    rows: Mapping[type[Adapter], Adapter],
    pad_id: int,
    metrics: ServerMetrics,
    mesh: Mesh,
  ):
    """Allocates the bank.

    Args:
      rows: of the bank of each kind, one that changes nothing.
      mesh: the devices; they split the backbone by the axis ``model``, and each has the whole bank.
    """
    if options.slots <= options.rows[-1]:
      raise InputError(
        f'--slots={options.slots}: a batch of {options.rows[-1]} rows needs more (one is empty)'
      )
    self.options, self._config, self._pad_id, self._metrics = options, config, pad_id, metrics
    arithmetic = encoder_config.arithmetic(options.dtype)
    self._ways = [VectorSpec(name, scaled) for name in poolings.every() for scaled in (False, True)]
    self._everywhere = meshes.replicated(mesh)
    self._encoder_options = EncoderOptions.of(arithmetic, mesh)
    self._params = place_backbone(mesh, config, params, arithmetic)
    self._kinds, self._rows = list(rows), list(rows.values())
    dtype = arithmetic.activations
    program = self._jit(lambda: [allocate(row, options.slots, dtype) for row in self._rows])
    self._banks = jax.block_until_ready(program())
    self._slot_of: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
    self._free = list(range(options.slots - 1, 0, -1))
    self._programs: dict[tuple[int, int], Any] = {}
    self._writes: list[Any] = []

  @property
  def nbytes(self) -> int:
    return tree.nbytes(self._banks)

  @property
  def backbone_bytes(self) -> int:
    """Device memory of one copy of the backbone."""
    return tree.nbytes(self._params)

  def _jit(self, run: Callable[..., Any], **options: Any) -> Any:
    return jax.jit(run, out_shardings=self._everywhere, **options)

  def _shapes(self, arrays: Any) -> Any:
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._everywhere), arrays
    )

  def compile(self) -> None:
    banks = self._shapes(self._banks)
    for bank, row in zip(banks, self._rows, strict=True):
      program = self._jit(write, donate_argnums=0)
      self._writes.append(program.lower(bank, *self._shapes((row, np.int32(0)))).compile())
    embed = self._jit(self._embed)
    for rows, length in self.options.shapes():
      batch = np.empty((rows, length), np.int32), np.empty((rows, ROWS + len(banks)), np.int32)
      program = embed.lower(self._params, banks, *self._shapes(batch)).compile()
      self._programs[rows, length] = program
      np.asarray(self.run([], [], rows, length))  # the first run may still allocate and load

  def run(
    self,
    rows: Sequence[Int[np.ndarray, ' T']],
    choices: Sequence[AdapterChoice],
    count: int,
    length: int,
  ) -> Float[Array, 'B H']:
    """Starts a batch and returns its vectors before they are computed.

    Missing adapters are written into slots. The least recently used are evicted, but none of this
    batch.
    """
    tokens = np.full((count, length), self._pad_id, np.int32)
    numbers = np.zeros((count, ROWS + len(self._kinds)), np.int32)
    needed = {one.key for one in choices}
    for i, (ids, choice) in enumerate(zip(rows, choices, strict=True)):
      tokens[i, : len(ids)] = ids
      way = self._ways.index(VectorSpec(choice.spec.pooling, choice.spec.normalize))
      numbers[i, :ROWS] = len(ids), way
      if choice.adapter is not None:
        slot = self._slot(choice, needed)
        numbers[i, ROWS + self._kinds.index(type(choice.adapter))] = slot
    program = self._programs[count, length]
    return program(self._params, self._banks, *jax.device_put((tokens, numbers), self._everywhere))

  def _embed(
    self, params: Any, banks: list[Adapter], tokens: jax.Array, numbers: jax.Array
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
      adapter=Several(tuple(banks)).choose(numbers[:, ROWS:]),
      options=self._encoder_options,
    )

  def _slot(self, choice: AdapterChoice, needed: set[Hashable | None]) -> int:
    """The slot of an adapter; it may not take that of one that is needed."""
    slot = self._slot_of.get(choice.key)
    if slot is None:
      if self._free:
        slot = self._free.pop()
      else:
        slot = self._slot_of.pop(next(key for key in self._slot_of if key not in needed))
        self._metrics.evictions.labels('device').inc()
      assert choice.adapter is not None
      kind = self._kinds.index(type(choice.adapter))
      row = pad(choice.adapter.row(), self._rows[kind])
      self._banks[kind] = self._writes[kind](
        self._banks[kind], *jax.device_put((row, np.int32(slot)), self._everywhere)
      )
      self._slot_of[choice.key] = slot
      self._metrics.loads.labels('device').inc()
      self._metrics.resident.labels('device').set(len(self._slot_of))
    self._slot_of.move_to_end(choice.key)
    return slot
