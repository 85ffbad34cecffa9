"""Templates: what an encoder reads, made of literal tokens, learned vectors and texts.

A learned vector is a token id from the vocabulary's size on, see ``encoder.encode``. A
cross-encoder's pair, ``[CLS] query [SEP] passage [SEP]``, is a template with two texts.

    host      pack   cuts the texts and lays them side by side, a row of tokens for each example
    device    fill   puts the pieces of the template around them
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from dprjax.base.errors import InputError


class Piece(NamedTuple):
  """A piece of a template: ``tokens``, or a text where they are None; and its token type."""

  tokens: tuple[int, ...] | None
  token_type: int = 0


class Text(NamedTuple):
  """The texts of one piece: ``lengths`` tokens of each row, from ``start`` on."""

  tokens: Int[Array, 'B S']
  lengths: Int[Array, ' B']
  start: int | Int[Array, ' B'] = 0


class Filled(NamedTuple):
  """Templates with their texts.

  Attributes:
    tokens: padded on the right.
    mask: True at real tokens.
    token_types: padding has the last piece's.
    pieces: which piece each token belongs to; the number of pieces at padding.
  """

  tokens: Int[Array, 'B T']
  mask: Bool[Array, 'B T']
  token_types: Int[Array, 'B T']
  pieces: Int[Array, 'B T']


class Packed(NamedTuple):
  """Texts as one row of tokens for each example.

  Attributes:
    rows: the example's texts side by side, then padding up to the length of the filled template.
    lengths: how many tokens each text keeps.
    cut: how many examples lost tokens.
  """

  rows: list[Int32[np.ndarray, '_']]
  lengths: Int32[np.ndarray, 'n texts']
  cut: int


@dataclasses.dataclass(frozen=True)
class Template:
  """Pieces in their order, one or two of them texts."""

  pieces: tuple[Piece, ...]

  def __post_init__(self) -> None:
    if self.num_texts not in (1, 2):
      raise InputError(f'a template has one text or two, not {self.num_texts}')

  @classmethod
  def pair(
    cls,
    opening: tuple[int, ...],
    middle: tuple[int, ...],
    closing: tuple[int, ...],
    second_type: int,
  ) -> Self:
    """A cross-encoder's pair, from ``Tokenizer.pair_format``."""
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
    """How many tokens it adds to the texts."""
    return sum(len(piece.tokens or ()) for piece in self.pieces)

  def cut(
    self, lengths: Int32[np.ndarray, 'n texts'], max_length: int
  ) -> Int32[np.ndarray, 'n texts']:
    """How many tokens the texts keep, so that the filled template has at most ``max_length``.

    Of two texts the second is cut, as transformers' ``only_second`` does. A first text that leaves
    the second no token is cut as well, so that the second keeps half of the room, or all that it
    has.

    Raises:
      InputError: ``max_length`` leaves no room for a token of each text.
    """
    room = max_length - self.num_tokens
    if room < self.num_texts:
      raise InputError(
        f'a maximum length of {max_length} tokens leaves no room for '
        f'{"a text" if self.num_texts == 1 else "two texts"} beside the {self.num_tokens} tokens '
        'around it'
      )
    if self.num_texts == 1:
      return np.minimum(lengths, room)
    first, second = lengths.T
    too_long = (first >= room) & (first + second > room)
    first = np.where(too_long, room - np.minimum(second, (room + 1) // 2), first)
    return np.stack([first, np.minimum(second, room - first)], axis=1)

  def pack(
    self, texts: Sequence[Sequence[Int32[np.ndarray, '_']]], max_length: int, pad_id: int
  ) -> Packed:
    """The texts of each example, cut and side by side.

    Args:
      texts: of each of the template's texts, the tokens of every example, without special tokens.
      max_length: of a filled template.
      pad_id: the padding token.

    Raises:
      InputError: see ``cut``.
    """
    before = np.array([[len(row) for row in rows] for rows in texts], np.int32).T
    lengths = self.cut(before.reshape(-1, self.num_texts), max_length)
    padding = np.full(self.num_tokens, pad_id, np.int32)
    rows = [
      np.concatenate([*(row[:kept] for row, kept in zip(example, counts, strict=True)), padding])
      for *example, counts in zip(*texts, lengths.tolist(), strict=True)
    ]
    return Packed(rows, lengths, int((lengths != before).any(axis=1).sum()))


def unpack(rows: Int[Array, 'B T'], lengths: Int[Array, 'B texts']) -> list[Text]:
  """The texts in packed rows, for ``fill``."""
  starts = jnp.cumsum(lengths, axis=1) - lengths
  return [Text(rows, lengths[:, i], starts[:, i]) for i in range(lengths.shape[1])]


def fill(
  templates: Sequence[Template],
  texts: Sequence[Text],
  length: int,
  pad_id: int,
  template_ids: Int[Array, ' B'] | None = None,
) -> Filled:
  """Templates with their texts, on the device.

  Args:
    templates: one, or several that ``template_ids`` choose from, with texts at the same places.
    texts: of each text of a template, in their order.
    length: T, static; no filled template is longer.
    pad_id: the padding token.
    template_ids: the template of each example; None: the first.
  """
  kinds = {tuple(piece.tokens is None for piece in template.pieces) for template in templates}
  if len(kinds) > 1:
    raise InputError('templates of one batch have their texts at the same places')
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
