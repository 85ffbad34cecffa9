"""Views: one or two texts from a passage for a pretraining step, drawn anew each time.

| views | unit | first | second |
|---|---|---|---|
| one | | the passage, or a window that starts at a random sentence | |
| siblings | sentence | a random sentence (DPTDR section 3.2) | another one |
| siblings | span | a random span (coCondenser; DPTDR Table 7) | another one without overlap |
| ict | | a random sentence | the other sentences; in a tenth of the draws all of them |

ict follows Lee et al. (2019). As in `dprjax.text.batches`, a batch depends only on the step, and
every process works out the whole global batch.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import jaxtyping as jt
import numpy as np

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.papers.condenser import segments
from dprjax.papers.condenser.segments import PassageCache
from dprjax.text import table
from dprjax.text.batches import Batch, longest_bucket, process_rows, shuffle_rows, smallest_bucket
from dprjax.text.table import Integers, Lists
from dprjax.text.tokenizing import Tokenizer

# How often an ict passage keeps its sentence (Lee et al., 2019, section 9.2: 90 % removed).
KEEP = 0.1
MIN_SPAN = 16  # tokens

# One stream of random numbers for each use.
_SHUFFLE, _DRAW = range(2)
_log = logging.getLogger(__name__)


class Views(NamedTuple):
  batches: grain.MapDataset[Batch]
  eligible: int


def make_view_batches(
  texts: PassageCache,
  tokenizer: Tokenizer,
  *,
  batch_size: int,
  views: str,
  unit: str = 'sentence',
  span_length: int = 64,
  max_length: int,
  buckets: Sequence[int],
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> Views:
  """A data set of the rows of this process; `batches.open_batches` opens it.

  Each epoch shuffles the passages anew, drops those that do not fill a batch, and draws new views.
  Keys: `first_tokens` [B, T] int32, with special tokens; `first_mask` [B, T] bool; `first_words`
  [B, T] int32, -1 for special tokens and padding; `second_...` likewise with its own T, unless
  views='one'; `passage_index` [B] int32, rows of ``texts``.

  Args:
    span_length: the most tokens of a span. Passages shorter than two spans are halved; those
      shorter than two spans of ``MIN_SPAN`` are skipped. Spans start at words if they can without
      overlap, so the second may lose the end of its last word.
    max_length: tokens of a text, with special ones. A longer sentence is cut; a longer passage is
      cut to a window, for ict of whole sentences around the first text.
  """
  spans = views == 'siblings' and unit == 'span'
  room = max_length - tokenizer.num_specials
  longest = min(max_length, int(texts.num_tokens.max()) + tokenizer.num_specials)
  longest_bucket(longest, buckets, 'buckets')
  own_rows = process_rows(batch_size, process_index, process_count)
  rows, lacking = np.arange(texts.num_passages, dtype=np.int32), ''
  if spans:
    shortest = 2 * min(MIN_SPAN, span_length)
    rows, lacking = rows[texts.num_tokens >= shortest], f'fewer than {shortest} tokens'
  elif views != 'one':
    rows, lacking = rows[texts.num_sentences >= 2], 'fewer than two sentences'
  skipped = texts.num_passages - len(rows)
  if skipped:
    _log.info(
      '%s of %s have %s: skipped', f'{skipped:,}', counted(texts.num_passages, 'passages'), lacking
    )
  if batch_size > len(rows):
    raise InputError(
      f'config.batch_size: {counted(batch_size, "passages")} an update, but {texts.path} has '
      f'{len(rows):,} usable; lower config.batch_size, or give more text'
    )
  rows_of = shuffle_rows(rows, batch_size, [seed, _SHUFFLE])

  def draw(
    passages: _Passages, words: Integers, chances: jt.Float[np.ndarray, '3 B']
  ) -> list[list[_Piece]]:
    if views == 'one':
      return [[_window(passages, chances[0], room)]]
    if spans:
      return [[span] for span in _two_spans(passages.sizes, words, chances, min(span_length, room))]
    counts = passages.sentences.counts
    first = _choose(chances[0], counts)
    sentence = passages.sentence(first).limit(room)
    if views == 'ict':
      return [[sentence], _rest(passages, first, chances[1] < KEEP, room)]
    # Another sentence: numbers from the first on move up by one.
    second = _choose(chances[1], counts - 1)
    second += second >= first
    return [[sentence], [passages.sentence(second).limit(room)]]

  def make(step: int, _: Any = None) -> Batch:
    _, index = rows_of(step)
    columns = texts.passages.read(index, segments.COLUMNS)
    words, ends = map(table.lists, columns[1:])
    passages = _Passages(ends, texts.num_tokens[index])
    # For the whole global batch, so that rows do not depend on the number of processes.
    chances = np.random.default_rng([seed, _DRAW, step]).random((3, len(index)))
    tokens = table.lists(columns[0][own_rows])
    skipped = int(passages.sizes[: own_rows.start].sum())
    own_words = words.flat[skipped : skipped + len(tokens.flat)]
    batch = {'passage_index': index[own_rows]}
    for name, pieces in zip(('first', 'second'), draw(passages, words.flat, chances), strict=False):
      lengths = np.sum([piece.lengths for piece in pieces], axis=0) + tokenizer.num_specials
      width = smallest_bucket(lengths, buckets)
      own_pieces = [_Piece(piece.starts[own_rows], piece.lengths[own_rows]) for piece in pieces]
      text, numbers, mask = _assemble(tokenizer, own_pieces, tokens, own_words, width)
      batch |= {f'{name}_tokens': text, f'{name}_words': numbers, f'{name}_mask': mask}
    return batch

  return Views(grain.MapDataset.range(len(rows) // batch_size).map_with_index(make), len(rows))


class _Piece(NamedTuple):
  """A stretch of the tokens of each passage."""

  starts: jt.Int[np.ndarray, ' B']
  lengths: jt.Int[np.ndarray, ' B']

  def limit(self, room: int) -> '_Piece':
    return _Piece(self.starts, np.minimum(self.lengths, room))


class _Passages(NamedTuple):
  """Passages of a global batch: the ends of sentences, and the number of tokens."""

  sentences: Lists
  sizes: Integers

  def sentence(self, number: jt.Int[np.ndarray, ' B']) -> _Piece:
    at = self.sentences.starts + number
    starts = np.where(number > 0, self.sentences.flat[at - 1], 0)
    return _Piece(starts, self.sentences.flat[at] - starts)


def _window(passages: _Passages, chances: jt.Float[np.ndarray, ' B'], room: int) -> _Piece:
  """The passage, or a window that starts at one of its sentences.

  The last possible start is the first sentence from which the rest fits.
  """
  sentences, owners = passages.sentences, passages.sentences.owners
  starts = np.concatenate([[0], sentences.flat[:-1]])
  starts[sentences.starts] = 0
  too_long = owners[passages.sizes[owners] - starts > room]
  count = np.bincount(too_long, minlength=len(sentences.counts)) + 1
  # A last sentence that is too long by itself is the last start.
  chosen = passages.sentence(_choose(chances, np.minimum(count, sentences.counts)))
  return _Piece(chosen.starts, passages.sizes - chosen.starts).limit(room)


def _two_spans(
  sizes: Integers, words: Integers, chances: jt.Float[np.ndarray, '3 B'], span_length: int
) -> tuple[_Piece, _Piece]:
  """Two spans of similar length that do not overlap, in random order."""
  length = np.minimum(span_length, sizes // 2)
  # Two places among the tokens outside both spans; all pairs are equally likely.
  low, high = np.sort(_choose(chances[:2], sizes - 2 * length + 1), axis=0)
  high = high + length
  # Move to word starts: the first span back, the second on, so they stay apart.
  begins = np.concatenate([[True], words[1:] != words[:-1]])
  offsets = np.cumsum(sizes) - sizes
  begins[offsets] = True
  places = np.flatnonzero(begins)
  low = places[np.searchsorted(places, offsets + low, side='right') - 1] - offsets
  following = np.append(places, len(words))[np.searchsorted(places, offsets + high)] - offsets
  # No word starts after the last word of the passage.
  high = np.where(following < sizes, following, high)
  second_length = np.minimum(length, sizes - high)
  swap = chances[2] < 0.5
  return (
    _Piece(np.where(swap, high, low), np.where(swap, second_length, length)),
    _Piece(np.where(swap, low, high), np.where(swap, length, second_length)),
  )


def _rest(
  passages: _Passages, number: Integers, keep: jt.Bool[np.ndarray, ' B'], room: int
) -> list[_Piece]:
  """The text before and after a sentence (which ``keep`` includes), in at most ``room`` tokens."""
  start, length = passages.sentence(number)
  low, high = np.zeros_like(start), passages.sizes.copy()
  offsets = passages.sentences.starts
  for row in np.flatnonzero(high - np.where(keep, 0, length) > room):
    ends = passages.sentences.flat[offsets[row] :][: passages.sentences.counts[row]]
    low[row], high[row] = _around(ends, int(number[row]), bool(keep[row]), room)
  stop = start + length
  # Cuts only a kept sentence that is too long by itself.
  before = np.minimum(np.where(keep, stop, start) - low, room)
  return [_Piece(low, before), _Piece(stop, np.minimum(high - stop, room - before))]


def _assemble(
  tokenizer: Tokenizer, pieces: list[_Piece], tokens: Lists, words: Integers, width: int
) -> tuple[
  jt.Int32[np.ndarray, 'B T'],
  jt.Int32[np.ndarray, 'B T'],
  jt.Bool[np.ndarray, 'B T'],
]:
  rows = np.arange(len(tokens.counts))
  text = np.full((len(rows), width), tokenizer.pad_id, np.int32)
  numbers = np.full((len(rows), width), -1, np.int32)
  opening, closing = tokenizer.opening, tokenizer.closing
  text[:, : len(opening)] = opening
  filled = np.full(len(rows), len(opening), np.int64)
  for starts, lengths in pieces:
    row = np.repeat(rows, lengths)
    place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target, source = (row, filled[row] + place), (tokens.starts + starts)[row] + place
    text[target] = tokens.flat[source]
    numbers[target] = words[source]
    filled += lengths
  text[rows[:, None], filled[:, None] + np.arange(len(closing))] = closing
  return text, numbers, np.arange(width) < filled[:, None] + len(closing)


def _around(ends: Integers, number: int, keep: bool, room: int) -> tuple[int, int]:
  """The bounds of a window of whole sentences around a sentence, whose length counts only if kept.

  Sentences are added on either side in turn, until one does not fit. If no neighbour fits, the
  window has the start of the next sentence, or else the end of the one before.
  """
  borders = [0, *ends.tolist()]
  low, high = number, number + 1
  left = room - (borders[high] - borders[low] if keep else 0)
  sides = [-1, 1]
  while sides:
    side = sides.pop(0)
    neighbour = low - 1 if side < 0 else high
    if 0 <= neighbour < len(ends) and (size := borders[neighbour + 1] - borders[neighbour]) <= left:
      left -= size
      low, high = min(low, neighbour), max(high, neighbour + 1)
      sides.append(side)
  if keep or high - low > 1:
    return borders[low], borders[high]
  if high < len(ends):
    return borders[low], borders[high] + left
  return borders[low] - left, borders[high]


def _choose(
  chances: jt.Float[np.ndarray, '*B'], counts: jt.Int[np.ndarray, '*B']
) -> jt.Int[np.ndarray, '*B']:
  return (chances * counts).astype(np.int64)
