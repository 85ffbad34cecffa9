"""Adapters of a frozen encoder, such as a prefix of keys and values or learned tokens.

    config.prompt.kind = 'prefix'    dprjax/models/adapters/prefix.py
    DPRJAX_EXTENSIONS=lab.bias       a module of your own (`base.extensions`)

A kind of adapter is a value `ADAPTER` in a module of its own. Training, export and server use only
this value.

An adapter is an argument of ``encoder.encode``, which calls its hooks, and not a parameter of a
module, so its gradient does not need gradients of weights.
"""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
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
  """The adapter that changes nothing. Each kind is a subclass, a ``flax.struct.dataclass``.

  Its arrays are one adapter for all examples, one for each example, or a bank of rows (`choose`).

  Attributes:
    by_layer: fields whose arrays begin with an axis of layers, before the axis of examples. Hooks
      of a layer get them without it. Other arrays begin with the axis of examples.
    undropped: fields without dropout.
  """

  by_layer: ClassVar[tuple[str, ...]] = ()
  undropped: ClassVar[tuple[str, ...]] = ()

  def choose(self, rows: Int[Array, ' B']) -> Self:
    """Takes the adapter of each example from a bank. A missing row gives NaN."""
    return self._change(lambda array, axis: jnp.take(array, rows, axis=axis))

  def drop(self, rate: float, key: Array) -> Self:
    """Applies dropout with one mask for the whole batch."""
    return self._change(
      lambda array, axis: dropout.drop(array, rate, key) if _is_float(array) else array,
      but=self.undropped,
    )

  def drop_examples(self, rate: float, key: Array, count: int) -> Self:
    """Applies dropout to a shared adapter with a mask for each of ``count`` examples."""

    def drop(array, axis):
      if not _is_float(array):
        return array
      each = jnp.broadcast_to(array, (count, *array.shape))
      return jnp.moveaxis(dropout.drop(each, rate, key, rows=True), 0, axis)

    return self._change(drop, but=self.undropped)

  def size(self) -> int:
    """The length that may differ between adapters of a kind, such as P; 0: none."""
    return 0

  def row(self) -> Self:
    """A row of a bank. Padding with zeros, or a row of zeros, must not change any vector."""
    return self

  def _change(self, change: Callable[..., Any], *others: Self, but: Collection[str] = ()) -> Self:
    """Maps ``change(array, ..., axis)`` over arrays except ``but``; ``axis`` counts examples."""
    return dataclasses.replace(
      self,
      **{
        field.name: jax.tree.map(
          functools.partial(change, axis=int(field.name in self.by_layer)),
          *(getattr(one, field.name) for one in (self, *others)),
        )
        for field in _array_fields(self)
        if field.name not in but
      },
    )

  def layered(self) -> Any:
    """The arrays ``by_layer``, as a pytree."""
    return {name: getattr(self, name) for name in self.by_layer}

  def of_layer(self, arrays: Any) -> Self:
    """The adapter of one layer, with the arrays of `layered` for it."""
    return dataclasses.replace(self, **arrays)

  def at(self, config: Any, tokens: Int[Array, 'B T']) -> 'Adapter':
    """The adapter for these tokens."""
    return self

  def shift_positions(self) -> int | Int[Array, '*B']:
    """The position of the first token."""
    return 0

  def embed_tokens(
    self, tokens: Int[Array, 'B T'], embed: Callable[[Array], Array]
  ) -> Float[Array, 'B T H']:
    """Embeds tokens without positions; ``embed`` embeds words."""
    return embed(tokens)

  def seen(self, mask: Bool[Array, 'B T']) -> Bool[Array, 'B S']:
    """The visible keys, including those of `prefix` if some of these are masked."""
    return mask

  def enter_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    """Changes the input of a layer."""
    return x

  def project(
    self, name: str, x: Float[Array, 'B T I'], y: Float[Array, 'B T O']
  ) -> Float[Array, 'B T O']:
    """Changes the output ``y`` of a linear projection of ``x``.

    ``name`` is the name of its parameters in the layer, such as ``attention/query``.
    """
    return y

  def prefix(self) -> Float[Array, '*B 2 P N D'] | None:
    """Keys (index 0) and values of a layer, put before those of tokens."""
    return None

  def leave_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    """Changes the output of a layer."""
    return x

  def finish(self, x: Float[Array, 'B D']) -> Float[Array, 'B D']:
    """Changes the vectors of texts before they get unit length."""
    return x


def _array_fields(adapter: Adapter) -> list[dataclasses.Field[Any]]:
  fields = dataclasses.fields(adapter)
  return [field for field in fields if field.metadata.get('pytree_node', True)]


def _is_float(array: Any) -> bool:
  return jnp.issubdtype(jnp.result_type(array), jnp.floating)


BARE = Adapter()


@flax.struct.dataclass
class Several(Adapter):
  """Adapters applied in order. At most one has a prefix."""

  adapters: tuple[Adapter, ...]

  def choose(self, rows: Int[Array, 'B n']) -> Self:
    """Takes the adapters of each example; each bank has a column of ``rows``."""
    return self._each(lambda adapter, place: adapter.choose(rows[:, place]))

  def drop_examples(self, rate: float, key: Array, count: int) -> Self:
    keys = jax.random.split(key, len(self.adapters))
    return self._each(lambda adapter, place: adapter.drop_examples(rate, keys[place], count))

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
    prefixes = [prefix for adapter in self.adapters if (prefix := adapter.prefix()) is not None]
    if not prefixes:
      return None
    [prefix] = prefixes
    return prefix

  def leave_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    for adapter in self.adapters:
      x = adapter.leave_layer(x)
    return x

  def finish(self, x: Float[Array, 'B D']) -> Float[Array, 'B D']:
    for adapter in self.adapters:
      x = adapter.finish(x)
    return x

  def _each(self, change: Callable[[Adapter, int], Adapter]) -> Self:
    changed = (change(adapter, place) for place, adapter in enumerate(self.adapters))
    return dataclasses.replace(self, adapters=tuple(changed))


def stack(adapters: Sequence[Adapter | None]) -> Adapter | None:
  """The bank of adapters of one kind. None becomes a row that changes nothing."""
  rows = [None if adapter is None else adapter.row() for adapter in adapters]
  some = [row for row in rows if row is not None]
  if not some:
    return None
  empty = blank(some)
  first, *others = (empty if row is None else pad(row, empty) for row in rows)
  return first._change(lambda *arrays, axis: np.stack(arrays, axis), *others)


def blank(rows: Sequence[Adapter]) -> Adapter:
  """The smallest row of zeros with room for each of these rows.

  Fields of the rows are arrays, or dicts of arrays whose keys may differ.
  """

  def joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
      keys = sorted({key for value in values for key in value})
      return {key: joined([value[key] for value in values if key in value]) for key in keys}
    shape = np.max([np.shape(value) for value in values], axis=0)
    return np.zeros(shape.astype(int), jnp.result_type(values[0]))

  fields = [field.name for field in _array_fields(rows[0])]
  return dataclasses.replace(
    rows[0], **{name: joined([getattr(row, name) for row in rows]) for name in fields}
  )


def pad(row: Adapter, empty: Adapter) -> Adapter:
  """The row padded with zeros to the shapes of ``empty`` (`blank`)."""

  def padded(value: Any, zeros: Any) -> Any:
    if isinstance(zeros, Mapping):
      return {key: padded(value[key], of) if key in value else of for key, of in zeros.items()}
    out = np.zeros_like(zeros)
    out[tuple(slice(size) for size in np.shape(value))] = value
    return out

  return dataclasses.replace(
    row,
    **{
      field.name: padded(getattr(row, field.name), getattr(empty, field.name))
      for field in _array_fields(row)
    },
  )


def same_shapes(first: Adapter, second: Adapter) -> bool:
  """Whether the arrays of two adapters have the same names, shapes and types."""
  return jax.tree.map(np.shape, first) == jax.tree.map(np.shape, second)


def allocate(row: Adapter, count: int, dtype: Any) -> Adapter:
  """A bank of ``count`` zero rows of this shape, on the device, with floats of ``dtype``."""

  def zeros(array, axis):
    shape = list(array.shape)
    shape.insert(axis, count)
    return jnp.zeros(shape, dtype if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype)

  return row._change(zeros)


def write(bank: Adapter, row: Adapter, slot: Int[Array, '']) -> Adapter:
  """The bank with a row replaced."""

  def put(array, one, axis):
    one = jnp.expand_dims(one.astype(array.dtype), axis)
    return jax.lax.dynamic_update_slice_in_dim(array, one, slot, axis)

  return bank._change(put, row)


class AdapterTraining(NamedTuple):
  """How methods train a kind of adapter.

  Attributes:
    init: ``(config, model, key) -> params``, for ``config.prompt.length`` above 0.
    expand: ``(config, model, params) -> Adapter``.
    export: ``(config, Adapter) -> (arrays, meta)`` of a prompt file.
    of_text: ``(config, model, encoder params, P tokens) -> params`` that act like this text
      (``config.prompt.init_text``); None: not possible.
  """

  init: Callable[[Any, Any, Array], dict[str, Any]]
  expand: Callable[[Any, Any, Mapping[str, Any]], Adapter]
  export: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]]
  of_text: Callable[[Any, Any, Mapping[str, Any], np.ndarray], dict[str, Any]] | None = None


class Peft(NamedTuple):
  """How PEFT stores a kind of adapter.

  Attributes:
    type: ``peft_type`` in adapter_config.json.
    write: ``(where, model, meta, arrays) -> (config, tensors)`` of one adapter. Raises InputError,
      which begins with ``where``, if PEFT would give other vectors.
  """

  type: str
  write: Callable[
    [str, Any, Mapping[str, Any], Mapping[str, np.ndarray]],
    tuple[dict[str, Any], dict[str, np.ndarray]],
  ]


class InTexts(NamedTuple):
  """How texts are encoded under prompts that change the texts.

  Attributes:
    embed: ``((backbone, adapter), tokens [B, T], mask [B, T], prompt numbers [B] or None) ->
      [B, H]``.
    length: the tokens of a row for a text of this many tokens.
  """

  embed: Callable[..., Any]
  adapter: Adapter | None
  length: Callable[[int], int]


class Kind(NamedTuple):
  """A kind of adapter.

  A prompt file has one adapter for all texts, one each for queries and passages, or one for queries
  only. Parameters, arrays and adapters below are those of one adapter.

  Attributes:
    name: in ``config.prompt.kind`` and in the meta of prompt files.
    arrays: ``(where, meta) -> {name: axes}`` of a file, such as ``{'prefix': 'L 2 P N D'}``. The
      backbone decides the axes in `sizes`. Raises InputError, which begins with ``where``, for
      an invalid meta.
    load: ``(meta, arrays) -> adapters``, one or one for each topic. None: the kind changes the
      texts, by `in_texts`.
    in_texts: ``(prompts, specs, side, tokenizer, backbone, options) -> InTexts``, with a spec for
      each prompt.
    reranker: ``(backbone, prompt, **options) -> Reranker``, of files for pairs.
    training: None: only its own methods train it.
    sided: whether queries and passages may differ.
    topics: ``prompt file -> topic model``, which chooses the adapter of each text. None: the file
      has none.
    row: ``(model, size) -> Adapter``, a row of the bank that every server has. None: a server has a
      bank only if its folder has such a prompt at the start.
    peft: its format in PEFT.
    merge: ``(model, params, adapter) -> (model, params)`` of an encoder with the same vectors
      without the adapter. None: cannot be merged.
    code: for kinds that cannot be merged, the PyTorch module that adapts the transformer in a
      sentence-transformers folder (`exports.prompt_folders`).
  """

  name: str
  text: str
  arrays: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
  load: Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], list[Adapter]] | None = None
  training: AdapterTraining | None = None
  sided: bool = True
  topics: Callable[[Any], Any] | None = None
  in_texts: Callable[..., InTexts] | None = None
  reranker: Callable[..., Any] | None = None
  row: Callable[[Any, int], Adapter] | None = None
  peft: Peft | None = None
  merge: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
  code: pathlib.Path | None = None


# The subtree of the parameters of every kind. Without it a model is the one that the adapter
# adapts.
SUBTREE = 'prompt'


@functools.lru_cache(16)
def sizes(config: Any) -> Mapping[str, int]:
  """The sizes of axes that depend on the backbone, by letter or name.

  ``attention/query/in`` and ``attention/query/out`` are the sizes of a projection.
  """
  by_axis = {
    'L': config.num_layers,
    'N': config.num_kv_heads,
    'D': config.head_dim,
    'H': config.hidden_size,
    'V': config.vocab_size,
    'vector': config.vector_size,
  }
  for tensor, names in projections(config):
    for name in names:
      by_axis |= {f'{name}/in': tensor.shape[1], f'{name}/out': tensor.shape[0] // len(names)}
  return types.MappingProxyType(by_axis)


def projections(config: Any) -> list[tuple[Any, list[str]]]:
  """The `checkpoint_names.Tensor` of every linear projection, and its names for `project`.

  A fused tensor has several names.
  """
  return [
    (tensor, ['/'.join(path[1:-1]) for path in tensor.paths])
    for tensor in config.family.tensors(config)
    if tensor.path[0] == 'layers' and tensor.kernel
  ]


_PLACES = {
  'linear': 'dprjax.models.adapters.linear.ADAPTER',
  'lora': 'dprjax.models.adapters.lora.ADAPTER',
  'prefix': 'dprjax.models.adapters.prefix.ADAPTER',
  'template': 'dprjax.papers.nir_prompt.adapter.ADAPTER',
  'topic': 'dprjax.papers.topic_dpr.topic.ADAPTER',
}


def every() -> dict[str, Kind]:
  """All kinds by name, those of dprjax first."""
  return {kind.name: kind for kind in extensions.values('ADAPTER', _PLACES)}


def find(name: str, where: str) -> Kind:
  """The kind of this name; ``where`` begins the message if there is none."""
  kind = extensions.find('ADAPTER', 'name', name, _PLACES)
  if kind is None:
    raise InputError(f'{where}: expected one of {", ".join(every())}, not {name!r:.60}')
  return kind
