"""Templates: inputs made of literal tokens, learned vectors and texts.

The pair of a cross-encoder, ``[CLS] query [SEP] passage [SEP]``, is a template with two texts.
Token ids from the vocabulary size on are learned vectors. On the host, ``Template.pack`` cuts the
texts of an example and joins them into one row. On the device, ``fill`` adds the literal tokens and
learned vectors.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from dprjax.base.errors import InputError


class Piece(NamedTuple):
  """Literal tokens and their type; a text if ``tokens`` is None."""

  tokens: tuple[int, ...] | None
  token_type: int = 0


class TextRows(NamedTuple):
  """A text of each row: ``lengths`` tokens from ``start`` on."""

  tokens: Int[Array, 'B S']
  lengths: Int[Array, ' B']
  start: int | Int[Array, ' B'] = 0


class Filled(NamedTuple):
  """Filled templates, padded on the right.

  Attributes:
    token_types: padding has the type of the last piece.
    pieces: the index of the piece of each token; the number of pieces at padding.
  """

  tokens: Int[Array, 'B T']
  mask: Bool[Array, 'B T']
  token_types: Int[Array, 'B T']
  pieces: Int[Array, 'B T']


class Packed(NamedTuple):
  """The texts of each example in one row.

  Attributes:
    rows: the texts side by side, padded to the length of the filled template.
  """

  rows: list[Int32[np.ndarray, ' _']]
  lengths: Int32[np.ndarray, 'n texts']
  cut: int


@dataclasses.dataclass(frozen=True)
class Template:
  """An input of pieces, one or two of them texts."""

  pieces: tuple[Piece, ...]

  @classmethod
  def pair(
    cls,
    opening: tuple[int, ...],
    middle: tuple[int, ...],
    closing: tuple[int, ...],
    second_type: int,
  ) -> Self:
    """The pair of a cross-encoder, from the fields of ``Tokenizer.pair_format``."""
    return cls(
      (
        Piece(opening),
        Piece(None),
        Piece(middle),
        Piece(None, second_type),
        Piece(closing, second_type),
      )
    )

  @property
  def num_texts(self) -> int:
    return sum(piece.tokens is None for piece in self.pieces)

  @property
  def num_tokens(self) -> int:
    return sum(len(piece.tokens or ()) for piece in self.pieces)

  def cut(
    self, lengths: Int32[np.ndarray, 'n texts'], max_length: int
  ) -> Int32[np.ndarray, 'n texts']:
    """The lengths of the texts in a filled template of at most ``max_length`` tokens.

    The second of two texts is cut (``only_second`` in transformers). If the first leaves no room
    for it, the first is cut too, and the second keeps up to half of the room.
    """
    room = max_length - self.num_tokens
    if room < self.num_texts:
      raise InputError(
        f'a maximum length of {max_length} tokens leaves no room for text beside the '
        f'{self.num_tokens} tokens of the template'
      )
    if self.num_texts == 1:
      return np.minimum(lengths, room)
    first, second = lengths.T
    too_long = (first >= room) & (first + second > room)
    first = np.where(too_long, room - np.minimum(second, (room + 1) // 2), first)
    return np.stack([first, np.minimum(second, room - first)], axis=1)

  def pack(
    self, texts: Sequence[Sequence[Int32[np.ndarray, ' _']]], max_length: int, pad_id: int
  ) -> Packed:
    """Packs the texts of each example into one row.

    Args:
      texts: for each text of the template, the tokens of all examples without special tokens.
    """
    before = np.array([[len(row) for row in rows] for rows in texts], np.int32).T
    lengths = self.cut(before.reshape(-1, self.num_texts), max_length)
    padding = np.full(self.num_tokens, pad_id, np.int32)
    rows = [
      np.concatenate([*(row[:count] for row, count in zip(example, counts, strict=True)), padding])
      for *example, counts in zip(*texts, lengths.tolist(), strict=True)
    ]
    return Packed(rows, lengths, int((lengths != before).any(axis=1).sum()))


def unpack(rows: Int[Array, 'B T'], lengths: Int[Array, 'B texts']) -> list[TextRows]:
  starts = jnp.cumsum(lengths, axis=1) - lengths
  return [TextRows(rows, lengths[:, i], starts[:, i]) for i in range(lengths.shape[1])]


def fill(
  templates: Sequence[Template],
  texts: Sequence[TextRows],
  length: int,
  pad_id: int,
  template_ids: Int[Array, ' B'] | None = None,
) -> Filled:
  """Fills templates, on the device.

  Args:
    templates: one or more, with texts at the same places.
    length: T, static; at least the length of the longest filled template.
  """
  batch = texts[0].tokens.shape[0]
  number = jnp.zeros(batch, jnp.int32) if template_ids is None else template_ids
  place = jnp.arange(length, dtype=jnp.int32)[None, :]
  start = jnp.zeros((batch, 1), jnp.int32)
  tokens = jnp.full((batch, length), pad_id, jnp.int32)
  pieces = jnp.full((batch, length), len(templates[0].pieces), jnp.int32)
  types = np.zeros((len(templates), len(templates[0].pieces) + 1), np.int32)
  remaining = iter(texts)
  for index in range(len(templates[0].pieces)):
    alternatives = [template.pieces[index] for template in templates]
    types[:, index:] = np.array([[piece.token_type] for piece in alternatives], np.int32)
    if alternatives[0].tokens is None:
      source, lengths, offset = next(remaining)
    else:
      rows = [piece.tokens or () for piece in alternatives]
      table = np.full((len(rows), max(1, *map(len, rows))), pad_id, np.int32)
      for row, literal in zip(table, rows, strict=True):
        row[: len(literal)] = literal
      source = jnp.take(jnp.asarray(table), number, axis=0)
      lengths = jnp.take(jnp.array([len(row) for row in rows], jnp.int32), number)
      offset = 0
    if not isinstance(offset, int):
      offset = offset[:, None]
    inside = (place >= start) & (place < start + lengths[:, None])
    chosen = jnp.clip(place - start + offset, 0, source.shape[1] - 1)
    tokens = jnp.where(inside, jnp.take_along_axis(source, chosen, axis=1), tokens)
    pieces = jnp.where(inside, index, pieces)
    start += lengths[:, None]
  of_pieces = jnp.take(jnp.asarray(types), number, axis=0)  # [B, pieces + 1]
  return Filled(tokens, place < start, jnp.take_along_axis(of_pieces, pieces, axis=1), pieces)


def bare(
  tokens: Int[Array, 'B S'], mask: Bool[Array, 'B S'], opening: int, closing: int
) -> TextRows:
  """Strips ``opening`` and ``closing`` special tokens from rows ``[CLS] text [SEP]``."""
  lengths = jnp.sum(mask, axis=1, dtype=jnp.int32) - opening - closing
  return TextRows(tokens, jnp.maximum(lengths, 0), opening)
