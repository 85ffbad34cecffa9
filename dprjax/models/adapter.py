"""What adapts a frozen encoder: vectors in front of its keys, tokens of its input, and so on.

    config.prompt.kind = 'prefix'    dprjax/models/adapters/prefix.py
    DPRJAX_EXTENSIONS=lab.bias       a module of your own (`base.extensions`)

A kind of adapter is one value, `ADAPTER`, in one module. The loop, the exporter, the server and the
baseline know it only by this value.

An adapter itself is an argument of ``encoder.encode`` and no parameter of a module, so that a
gradient with respect to it computes no gradient of a weight. The encoder calls its hooks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dprjax.base import extensions
from dprjax.base.errors import InputError
from dprjax.models import dropout


@flax.struct.dataclass
class Adapter:
  """The adapter that changes nothing. A kind is a subclass, again a ``flax.struct.dataclass``.

  Arrays of a kind hold one adapter for all examples, one for each example, or the rows of a bank
  that `choose` takes examples' adapters from.

  Attributes:
    by_layer: the fields whose arrays have the layers' axis first, and that of examples behind it.
      Other arrays have that of examples first. In a layer's hooks the layers' axis is gone.
  """

  by_layer: ClassVar[tuple[str, ...]] = ()

  def choose(self, rows: Int[Array, ' B']) -> Self:
    """Each example's adapter of a bank. A row that is not there gives NaN."""
    return self._change(lambda array, axis: jnp.take(array, rows, axis=axis))

  def drop(self, rate: float, key: Array) -> Self:
    """The adapter with a share of its numbers left out, the same of all examples."""
    dropped = {name: dropout.drop(getattr(self, name), rate, key) for name in self.by_layer}
    return dataclasses.replace(self, **dropped)

  def size(self) -> int:
    """The length in which adapters of a bank may differ, P of a prefix; 0: in none."""
    return 0

  def row(self, size: int) -> Self:
    """One row of a bank for adapters up to this size. A row of zeros must change nothing."""
    return self

  def _change(self, change: Callable[..., Any], *others: Self) -> Self:
    """``change(array, ..., axis)`` of each array, and the axis of its examples."""
    return dataclasses.replace(
      self,
      **{
        field.name: jax.tree.map(
          functools.partial(change, axis=int(field.name in self.by_layer)),
          *(getattr(one, field.name) for one in (self, *others)),
        )
        for field in dataclasses.fields(self)
        if field.metadata.get('pytree_node', True)
      },
    )

  def layered(self) -> Any:
    """The arrays ``by_layer``, as a pytree."""
    return {name: getattr(self, name) for name in self.by_layer}

  def of_layer(self, arrays: Any) -> Self:
    """The adapter in one layer, where `layered` gives these arrays."""
    return dataclasses.replace(self, **arrays)

  def at(self, config: Any, tokens: Int[Array, 'B T']) -> 'Adapter':
    """The adapter for these tokens. Raises InputError where it does not fit the encoder."""
    return self

  def shift_positions(self) -> int | Int[Array, '*B']:
    """The position of the first token."""
    return 0

  def embed_tokens(
    self, tokens: Int[Array, 'B T'], embed: Callable[[Array], Array]
  ) -> Float[Array, 'B T H']:
    """The embeddings of tokens, without their positions; ``embed`` gives a word's."""
    return embed(tokens)

  def seen(self, mask: Bool[Array, 'B T']) -> Bool[Array, 'B S']:
    """The keys that tokens attend to: the tokens', behind those of `prefix` if some are masked."""
    return mask

  def enter_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    """A layer's input."""
    return x

  def project(
    self, name: str, x: Float[Array, 'B T I'], y: Float[Array, 'B T O']
  ) -> Float[Array, 'B T O']:
    """The result of a layer's linear projection, ``attention/query`` for instance.

    Args:
      name: of the projection in the layer's parameters.
      x: what is projected.
      y: the result without an adapter.
    """
    return y

  def prefix(self) -> Float[Array, '*B 2 P N D'] | None:
    """A layer's key and value vectors in front of those of tokens. Keys have index 0."""
    return None

  def leave_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    """A layer's output."""
    return x


BARE = Adapter()


@flax.struct.dataclass
class Several(Adapter):
  """Adapters together, each upon the ones before it. One of them may have a prefix."""

  adapters: tuple[Adapter, ...]

  def choose(self, rows: Int[Array, 'B n']) -> Self:
    """Each example's adapters: a column of rows for each bank."""
    return self._each(lambda adapter, place: adapter.choose(rows[:, place]))

  def layered(self) -> Any:
    return tuple(adapter.layered() for adapter in self.adapters)

  def of_layer(self, arrays: Any) -> Self:
    return self._each(lambda adapter, place: adapter.of_layer(arrays[place]))

  def at(self, config: Any, tokens: Int[Array, 'B T']) -> Adapter:
    return self._each(lambda adapter, _: adapter.at(config, tokens))

  def shift_positions(self) -> int | Int[Array, '*B']:
    return sum((adapter.shift_positions() for adapter in self.adapters), start=0)

  def embed_tokens(
    self, tokens: Int[Array, 'B T'], embed: Callable[[Array], Array]
  ) -> Float[Array, 'B T H']:
    for adapter in self.adapters:
      embed = functools.partial(adapter.embed_tokens, embed=embed)
    return embed(tokens)

  def seen(self, mask: Bool[Array, 'B T']) -> Bool[Array, 'B S']:
    for adapter in self.adapters:
      mask = adapter.seen(mask)
    return mask

  def enter_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    for adapter in self.adapters:
      x = adapter.enter_layer(x)
    return x

  def project(
    self, name: str, x: Float[Array, 'B T I'], y: Float[Array, 'B T O']
  ) -> Float[Array, 'B T O']:
    for adapter in self.adapters:
      y = adapter.project(name, x, y)
    return y

  def prefix(self) -> Float[Array, '*B 2 P N D'] | None:
    found = [made for adapter in self.adapters if (made := adapter.prefix()) is not None]
    if len(found) > 1:
      raise InputError(f'{len(found)} adapters have prefixes, and an encoder takes one')
    return found[0] if found else None

  def leave_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    for adapter in self.adapters:
      x = adapter.leave_layer(x)
    return x

  def _each(self, change: Callable[[Adapter, int], Adapter]) -> Self:
    changed = (change(adapter, place) for place, adapter in enumerate(self.adapters))
    return dataclasses.replace(self, adapters=tuple(changed))


def stack(adapters: Sequence[Adapter | None]) -> Adapter | None:
  """The bank of adapters of one kind, in their order; None is a row that changes nothing."""
  some = [adapter for adapter in adapters if adapter is not None]
  if not some:
    return None
  size = max(adapter.size() for adapter in some)
  empty = jax.tree.map(np.zeros_like, some[0].row(size))
  first, *others = (empty if adapter is None else adapter.row(size) for adapter in adapters)
  return first._change(lambda *arrays, axis: np.stack(arrays, axis), *others)


def allocate(row: Adapter, count: int, dtype: Any) -> Adapter:
  """A bank of ``count`` rows such as this one, on the device, that change nothing.

  ``dtype`` is that of all floats.
  """

  def zeros(array, axis):
    shape = list(array.shape)
    shape.insert(axis, count)
    return jnp.zeros(shape, dtype if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype)

  return row._change(zeros)


def write(bank: Adapter, row: Adapter, slot: Int[Array, '']) -> Adapter:
  """The bank with another row at a place."""

  def put(array, one, axis):
    one = jnp.expand_dims(one.astype(array.dtype), axis)
    return jax.lax.dynamic_update_slice_in_dim(array, one, slot, axis)

  return bank._change(put, row)


class Training(NamedTuple):
  """How any method trains a kind of adapter.

  Attributes:
    init: ``(config, model, key) -> params``. ``config.prompt.length`` is the size, above 0.
    expand: ``(config, model, params) -> Adapter``.
    export: ``(config, Adapter) -> (arrays, meta)``, what a file holds of it.
  """

  init: Callable[[Any, Any, Array], dict[str, Any]]
  expand: Callable[[Any, Any, Mapping[str, Any]], Adapter]
  export: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]]


class Kind(NamedTuple):
  """A kind of adapter.

  A prompt file holds one adapter for all texts, one for queries and one for passages, or one for
  queries alone. Parameters, arrays and adapters below are those of one.

  Attributes:
    name: in ``config.prompt.kind`` and in a prompt file's meta.
    text: what it is, for messages.
    arrays: ``(where, meta) -> {name: axes}`` of the arrays in a file, ``{'prefix': 'L 2 P N D'}``
      for instance. `sizes` says which letters the backbone decides. Raises InputError, which begins
      with ``where``, for a meta that it cannot have.
    load: ``(meta, arrays) -> adapters``: one, or one of each topic. None: the adapter is a part of
      templates (`models.segments`).
    training: None: a method of its own trains it.
    sided: whether queries and passages may have one each.
    topics: whether a topic model, which chooses a text's adapter, is among the file's arrays.
    row: ``(model, size) -> Adapter``, a row of the bank that every server has. None: a server has
      a bank for the kind if it finds such a prompt when it starts.
  """

  name: str
  text: str
  arrays: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
  load: Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], list[Adapter]] | None = None
  training: Training | None = None
  sided: bool = True
  topics: bool = False
  row: Callable[[Any, int], Adapter] | None = None


# The subtree of every kind's parameters. Without it a model is the one that the adapter adapts.
SUBTREE = 'prompt'


def sizes(config: Any) -> dict[str, int]:
  """What letters of an array's axes stand for, by the backbone."""
  return {
    'L': config.num_layers,
    'N': config.num_kv_heads,
    'D': config.head_dim,
    'H': config.hidden_size,
    'V': config.vocab_size,
  }


def every() -> dict[str, Kind]:
  """All kinds by name, those of dprjax first."""
  return {kind.name: kind for kind in extensions.values('ADAPTER', 'dprjax.models.adapters')}


def find(name: str, where: str) -> Kind:
  """The kind of a name. Raises InputError, which begins with ``where``, for another word."""
  kinds = every()
  if name not in kinds:
    raise InputError(f'{where}: expected one of {", ".join(kinds)}, not {name!r:.60}')
  return kinds[name]
