"""Views: the texts of one passage that pretraining sees in a step, one or two of them, drawn anew
each time.

| views | unit | first | second | |---|---|---|---| | one | | the passage, or a window that starts
at a random sentence | | | siblings | sentence | a random sentence (DPTDR section 3.2) | another one
| | siblings | span | a random span (coCondenser; DPTDR Table 7) | another one that does not overlap
it | | ict | | a random sentence | the others, in order; in a tenth of the draws that one too (Lee
et al., 2019) |

As in `dprjax.data.batches`, a batch follows from its step's number alone, and every process works
out the whole global batch.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import jaxtyping as jt
import numpy as np

from dprjax.base.errors import InputError
from dprjax.data import documents, table
from dprjax.data.batches import Batch
from dprjax.data.documents import Documents

KEEP = (
  0.1  # how often an ict passage keeps its sentence (Lee et al., 2019, section 9.2: 90 % removed)
)
MIN_SPAN = 16  # tokens

_SHUFFLE, _DRAW = range(2)  # what a random number is for, so that no two uses share a stream
_log = logging.getLogger(__name__)


class Views(NamedTuple):
  """The batches, a data set as long as an epoch, and how many passages take part in them."""

  batches: grain.MapDataset[Batch]
  eligible: int


def make_view_batches(
  texts: Documents,
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
  """This process's rows of the global batch of any step; `batches.open_batches` opens them.

  Each epoch shuffles the passages anew, leaves out what does not fill a batch, and draws other
  views. Keys, ``T`` for each view its own: `first_tokens` [B, T] int32, `[CLS] text [SEP]`;
  `first_mask` [B, T] bool; `first_words` [B, T] int32, the number of the word that a token belongs
  to, -1 at special tokens and padding; but with views='one' also `second_...`; `passage_index` [B]
  int32, rows of ``texts``.

  Args:
    batch_size: passages of the global batch; process i has the i-th of ``process_count`` equal
      blocks.
    views: 'one', 'siblings' or 'ict'. Siblings and ict skip passages of one sentence; what is left
      out is counted and logged.
    unit: what siblings are: 'sentence' or 'span'.
    span_length: tokens of a span, at most; half the passage where it is shorter than two, and no
      less than ``MIN_SPAN``: passages that hold no two such spans are skipped. Spans start where
      words do, if that can be without overlap; a second one may therefore lose the last tokens of
      its last word at the end of a passage.
    max_length: tokens of a text, special ones included. A longer sentence loses its end; of a
      longer passage a window is taken, for ict one of whole sentences around the place of the
      first.
    buckets: the lengths a text may have; the smallest that holds the whole global batch is taken.

  Raises:
    InputError: no passage can serve; sizes that the passages, the buckets or the processes do not
      allow; an unknown name.
  """
  if views not in ('one', 'siblings', 'ict') or unit not in ('sentence', 'span'):
    raise InputError(
      f"views {views!r} of unit {unit!r}: expected 'one', 'siblings' or 'ict', and 'sentence' or "
      "'span'"
    )
  spans = views == 'siblings' and unit == 'span'
  room = max_length - 2
  if room < 1 or (spans and min(span_length, room) < 1):
    raise InputError(
      f'max_length {max_length} and span_length {span_length}: no room for text beside the two '
      'special tokens'
    )
  longest = min(max_length, int(texts.num_tokens.max()) + 2)
  if not buckets or max(buckets) < longest:
    raise InputError(
      f'buckets {list(buckets)}: a text has up to {longest} tokens; add a bucket that holds it'
    )
  if batch_size % process_count:
    raise InputError(
      f'a batch of {batch_size} passages cannot be divided among {process_count} processes'
    )
  rows, lacking = np.arange(texts.num_passages, dtype=np.int32), ''
  if spans:
    shortest = 2 * min(MIN_SPAN, span_length)
    rows, lacking = rows[texts.num_tokens >= shortest], f'fewer than {shortest} tokens'
  elif views != 'one':
    rows, lacking = rows[texts.num_sentences >= 2], 'fewer than two sentences'
  skipped = texts.num_passages - len(rows)
  if not len(rows):
    raise InputError(
      f'{texts.path}: all {skipped:,} passages have {lacking}; views={views!r} needs longer texts, '
      'or longer passages'
    )
  if skipped:
    _log.info(
      '%s of %s passages have %s: skipped', f'{skipped:,}', f'{texts.num_passages:,}', lacking
    )
  if batch_size > len(rows):
    raise InputError(
      f'a batch of {batch_size:,} passages is more than the {len(rows):,} that can be used of '
      f'{texts.path}'
    )
  plan = _Plan(
    texts,
    rows,
    batch_size,
    'spans' if spans else views,
    min(span_length, room),
    room,
    sorted(buckets),
    seed,
    process_index,
    process_count,
  )
  return Views(
    grain.MapDataset.range(len(rows) // batch_size).map_with_index(plan.batch), len(rows)
  )


class _Piece(NamedTuple):
  """Stretches of the passages' tokens, one a row."""

  starts: jt.Int[np.ndarray, 'B']
  lengths: jt.Int[np.ndarray, 'B']


class _Passages(NamedTuple):
  """A global batch's passages, read.

  Attributes:
    ends: of all their sentences, one passage after the other, each counting from its own start.
    counts: sentences of each; ``offsets``: where its own begin among ``ends``.
    sizes: tokens of each.
  """

  ends: table.Integers
  counts: table.Integers
  offsets: jt.Int[np.ndarray, 'B']
  sizes: table.Integers

  def sentence(self, number: jt.Int[np.ndarray, 'B']) -> _Piece:
    """The n-th sentence of each passage."""
    place = self.offsets + number
    starts = np.where(number > 0, self.ends[place - 1], 0)
    return _Piece(starts, self.ends[place] - starts)


class _Plan:
  """Makes the batch of any step.

  It holds no state that changes: step, seed and store decide everything.
  """

  def __init__(
    self,
    texts: Documents,
    rows: table.Integers,
    batch_size: int,
    views: str,
    span_length: int,
    room: int,
    buckets: list[int],
    seed: int,
    process_index: int,
    process_count: int,
  ):
    self._texts, self._rows, self._batch_size, self._views, self._seed = (
      texts,
      rows,
      batch_size,
      views,
      seed,
    )
    self._span_length, self._room, self._buckets = span_length, room, buckets
    share = batch_size // process_count
    self._mine = slice(process_index * share, (process_index + 1) * share)
    self._steps = len(rows) // batch_size
    self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

  def batch(self, step: int, _: Any = None) -> Batch:
    mine = self._mine
    epoch, place = divmod(step, self._steps)
    index = self._epoch(epoch)[place * self._batch_size : (place + 1) * self._batch_size]
    columns = dict(
      zip(documents.COLUMNS, self._texts.passages.read(index, documents.COLUMNS), strict=True)
    )
    ends, counts = table.lists(columns['ends'])
    words, _ = table.lists(columns['words'])
    passages = _Passages(ends, counts, np.cumsum(counts) - counts, self._texts.num_tokens[index])
    # Drawn for the whole global batch: what a row gets does not depend on how many processes there
    # are.
    chances = np.random.default_rng([self._seed, _DRAW, step]).random((3, len(index)))
    tokens, _ = table.lists(columns['tokens'][mine])
    mine_first = int(passages.sizes[: mine.start].sum())
    own_words = words[mine_first : mine_first + len(tokens)]
    batch = {'passage_index': index[mine]}
    for name, pieces in zip(
      ('first', 'second'), self._draw(passages, words, chances), strict=False
    ):
      width = _bucket(np.sum([piece.lengths for piece in pieces], axis=0) + 2, self._buckets)
      cut = [_Piece(piece.starts[mine], piece.lengths[mine]) for piece in pieces]
      batch |= self._assemble(name, cut, tokens, own_words, passages.sizes[mine], width)
    return batch

  def _shuffled(self, epoch: int) -> jt.Int32[np.ndarray, 'eligible']:
    return np.random.default_rng([self._seed, _SHUFFLE, epoch]).permutation(self._rows)

  def _draw(
    self, passages: _Passages, words: table.Integers, chances: jt.Float[np.ndarray, '3 B']
  ) -> list[list[_Piece]]:
    """The pieces that make up each view."""
    if self._views == 'one':
      return [[self._window(passages, chances[0])]]
    if self._views == 'spans':
      return [[piece] for piece in self._spans(passages.sizes, words, chances)]
    first = _choose(chances[0], passages.counts)
    if self._views == 'siblings':
      # One of the others: those from the first on move up by one.
      second = _choose(chances[1], passages.counts - 1)
      second += second >= first
      return [[self._limit(passages.sentence(number))] for number in (first, second)]
    return [[self._limit(passages.sentence(first))], self._rest(passages, first, chances[1] < KEEP)]

  def _limit(self, piece: _Piece) -> _Piece:
    return _Piece(piece.starts, np.minimum(piece.lengths, self._room))

  def _window(self, passages: _Passages, chances: jt.Float[np.ndarray, 'B']) -> _Piece:
    """The passage, or as much as there is room for from one of its sentences on.

    The last sentence to start from is the first one from which the rest fits: no text is out of
      reach, and no window short of need.
    """
    owner = np.repeat(np.arange(len(passages.counts)), passages.counts)
    starts = np.concatenate([[0], passages.ends[:-1]])
    starts[passages.offsets] = 0
    exceeding = np.bincount(
      owner[passages.sizes[owner] - starts > self._room], minlength=len(passages.counts)
    )
    # Where a last sentence exceeds the room by itself, no later one follows.
    choice = _choose(chances, np.minimum(exceeding + 1, passages.counts))
    start = passages.sentence(choice).starts
    return self._limit(_Piece(start, passages.sizes - start))

  def _spans(
    self, sizes: table.Integers, words: table.Integers, chances: jt.Float[np.ndarray, '3 B']
  ) -> tuple[_Piece, _Piece]:
    """Two spans of like length that do not overlap, the order of the two at random."""
    length = np.minimum(self._span_length, sizes // 2)
    # Two places among the tokens that are in neither span, as likely one way as another.
    low, high = np.sort(_choose(chances[:2], sizes - 2 * length + 1), axis=0)
    high = high + length
    # To the beginnings of words: the first back, the second on, so that they stay apart.
    begins = np.concatenate([[True], words[1:] != words[:-1]])
    offsets = np.cumsum(sizes) - sizes
    begins[offsets] = True
    places = np.flatnonzero(begins)
    low = places[np.searchsorted(places, offsets + low, side='right') - 1] - offsets
    following = np.append(places, len(words))[np.searchsorted(places, offsets + high)] - offsets
    # In a word that goes on to the passage's end, there is no other beginning.
    high = np.where(following < sizes, following, high)
    first, second = _Piece(low, length), _Piece(high, np.minimum(length, sizes - high))
    swap = chances[2] < 0.5
    return (
      _Piece(*(np.where(swap, b, a) for a, b in zip(first, second, strict=True))),
      _Piece(*(np.where(swap, a, b) for a, b in zip(first, second, strict=True))),
    )

  def _rest(
    self, passages: _Passages, number: table.Integers, keep: jt.Bool[np.ndarray, 'B']
  ) -> list[_Piece]:
    """What stands before and after that sentence, or, where it is kept, up to its end and after it;
    no more than there is room for.
    """
    start, length = passages.sentence(number)
    low, high = np.zeros_like(start), passages.sizes.copy()
    for row in np.flatnonzero(high - np.where(keep, 0, length) > self._room):
      ends = passages.ends[passages.offsets[row] : passages.offsets[row] + passages.counts[row]]
      low[row], high[row] = _around(ends, int(number[row]), bool(keep[row]), self._room)
    stop = start + length
    before = np.where(keep, stop, start) - low
    # Only a kept sentence that is too long by itself comes to be cut here.
    before = np.minimum(before, self._room)
    return [_Piece(low, before), _Piece(stop, np.minimum(high - stop, self._room - before))]

  def _assemble(
    self,
    name: str,
    pieces: list[_Piece],
    tokens: table.Integers,
    words: table.Integers,
    sizes: table.Integers,
    width: int,
  ) -> Batch:
    offsets = np.cumsum(sizes) - sizes
    shape = (len(sizes), width)
    batch: Batch = {
      f'{name}_tokens': np.full(shape, self._texts.pad_id, np.int32),
      f'{name}_words': np.full(shape, -1, np.int32),
    }
    batch[f'{name}_tokens'][:, 0] = self._texts.cls_id
    filled = np.ones(len(sizes), np.int64)
    for starts, lengths in pieces:
      row = np.repeat(np.arange(len(sizes)), lengths)
      turn = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
      there, here = (row, filled[row] + turn), (offsets + starts)[row] + turn
      batch[f'{name}_tokens'][there] = tokens[here]
      batch[f'{name}_words'][there] = words[here]
      filled += lengths
    batch[f'{name}_tokens'][np.arange(len(sizes)), filled] = self._texts.sep_id
    batch[f'{name}_mask'] = np.arange(width) <= filled[:, None]
    return batch


def _around(ends: table.Integers, number: int, keep: bool, room: int) -> tuple[int, int]:
  """The bounds of the window of whole sentences about that one that fits into ``room``, itself not
  counted unless it is kept.

  Sentences are added from either side in turn, each side until one does not fit. Where not even a
  neighbour does, the window holds as much of the next one as there is room for, else the end of the
  one before.
  """
  borders = [0, *ends.tolist()]
  low, high = number, number + 1
  left = room - (borders[high] - borders[low] if keep else 0)
  sides = [-1, 1]
  while sides:
    side = sides.pop(0)
    other = low - 1 if side < 0 else high
    if 0 <= other < len(ends) and (size := borders[other + 1] - borders[other]) <= left:
      left -= size
      low, high = min(low, other), max(high, other + 1)
      sides.append(side)
  if keep or high - low > 1:
    return borders[low], borders[high]
  if high < len(ends):
    return borders[low], borders[high] + left
  return borders[low] - left, borders[high]


def _choose(
  chances: jt.Float[np.ndarray, '*B'], counts: jt.Int[np.ndarray, '*B']
) -> jt.Int[np.ndarray, '*B']:
  """A number below each count, all equally likely, from a chance in [0, 1)."""
  return (chances * counts).astype(np.int64)


def _bucket(lengths: jt.Int[np.ndarray, 'B'], buckets: list[int]) -> int:
  return next(length for length in buckets if length >= lengths.max())
