"""Batches from several data sets, mixed by an arrangement.

Each data set is an endless stream: the seed shuffles all examples, again and again. An arrangement
gives the data set and the place in its stream for each row of a batch. So large sets continue where
the last epoch ended, and small ones repeat within an epoch.

| arrangement | a batch (NIR-Prompt, Table 13) |
|---|---|
| alternate | from one data set; the data sets take turns |
| random_task | from one data set, in a new random order each epoch |
| balanced | equally many rows of each data set, side by side |
| random | rows of all data sets, in a new random order each epoch |
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grain
import jaxtyping as jt
import numpy as np

from dprjax.base.errors import InputError
from dprjax.text.batches import Batch, process_rows, random_passages, smallest_bucket

# Uses of random numbers, besides those in `batches`.
_STREAM, _ARRANGE = 10, 11

Plan = Callable[[int], tuple[jt.Int32[np.ndarray, ' B'], jt.Int64[np.ndarray, ' B']]]
"""Maps a step to the data set of each row of its batch and the place in the stream of that."""


class Examples(Protocol):
  """A data set for batches: `batches.Feed`, and the feeds of `papers.nir_prompt.pairs`.

  ``counts`` has the number of rows that each key of indices in a batch refers to.
  """

  @property
  def size(self) -> int: ...

  @property
  def counts(self) -> Mapping[str, int]: ...

  def draw(
    self,
    rows: jt.Int32[np.ndarray, ' B'],
    epochs: jt.Int64[np.ndarray, ' B'],
    random: np.random.Generator,
  ) -> Any:
    """Draws examples, each for its own epoch."""

  def lengths(self, drawn: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the first and the second texts."""

  def read(
    self, drawn: Any, rows: jt.Int[np.ndarray, ' own'], first_length: int, second_length: int
  ) -> Batch:
    """Reads some of the drawn examples, padded to these lengths."""

  def names(self, batch: Batch) -> list[str]:
    """Names of examples, for messages."""


def make_batches(
  tasks: Sequence[Examples],
  *,
  arrangement: str,
  batch_size: int,
  per_task: int,
  buckets: tuple[Sequence[int], Sequence[int]],
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.MapDataset[Batch]:
  """A data set of the rows of this process, with the key `task` ``[B]`` int32.

  Row numbers (`passage_index` and so on) are offset by data set; `split_rows` removes the offset.

  Args:
    per_task: examples of a data set in an epoch; 0: the size of the smallest, at least its share of
      a batch.
  """
  own_rows = np.arange(batch_size)[process_rows(batch_size, process_index, process_count)]
  if not per_task:
    share = batch_size // len(tasks) if arrangement == 'balanced' else batch_size
    per_task = max(min(task.size for task in tasks), share)
  steps, plan = arrange(arrangement, len(tasks), batch_size, per_task, seed)
  offsets = row_offsets(tasks)

  @functools.lru_cache(maxsize=4 * len(tasks))
  def shuffled(task: int, epoch: int) -> jt.Int32[np.ndarray, ' n']:
    order = np.random.default_rng([seed, _STREAM, task, epoch])
    return order.permutation(tasks[task].size).astype(np.int32)

  def make(step: int, _: Any = None) -> Batch:
    numbers, places = plan(step)
    rows_of, drawn = {}, {}
    for task in np.unique(numbers).tolist():
      rows_of[task] = np.flatnonzero(numbers == task)
      epochs, within = np.divmod(places[rows_of[task]], tasks[task].size)
      examples = np.array(
        [shuffled(task, e)[w] for e, w in zip(epochs.tolist(), within.tolist(), strict=True)],
        np.int32,
      )
      drawn[task] = tasks[task].draw(examples, epochs, random_passages(seed, step, task))
    # Lengths for the whole global batch, so that all processes agree.
    lengths = zip(*(tasks[task].lengths(drawn[task]) for task in drawn), strict=True)
    padded = [
      smallest_bucket(np.array([array.max() for array in arrays]), allowed)
      for arrays, allowed in zip(lengths, buckets, strict=True)
    ]
    batch: Batch = {'task': numbers[own_rows]}
    for task in drawn:
      mine = np.flatnonzero(np.isin(rows_of[task], own_rows))
      if not len(mine):
        continue
      for key, values in tasks[task].read(drawn[task], mine, *padded).items():
        if key in offsets:
          values = np.where(values < 0, values, values + offsets[key][task])
        if key not in batch:
          batch[key] = np.empty((len(own_rows), *values.shape[1:]), values.dtype)
        batch[key][rows_of[task][mine] - own_rows[0]] = values
    return batch

  return grain.MapDataset.range(steps).map_with_index(make)


def arrange(
  arrangement: str, tasks: int, batch_size: int, per_task: int, seed: int
) -> tuple[int, Plan]:
  if arrangement == 'balanced' and batch_size % tasks:
    raise InputError(
      f'config.batch_size: an update of {batch_size} rows is not a multiple of the {tasks} tasks, '
      "as config.arrangement='balanced' needs"
    )
  share = batch_size if arrangement in ('alternate', 'random_task') else -(-batch_size // tasks)
  if per_task < share:
    raise InputError(
      f'config.per_task: {per_task} examples of a task in an epoch are fewer than the {share} of a '
      'batch'
    )
  turns = per_task // share  # batches with rows of a task, in an epoch
  rows = np.arange(batch_size)

  # One permutation an epoch, as in `batches.shuffle_rows`.
  @functools.lru_cache(maxsize=2)
  def shuffled(epoch: int, count: int) -> jt.Int64[np.ndarray, ' n']:
    return np.random.default_rng([seed, _ARRANGE, epoch]).permutation(count)

  def whole(task: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(batch_size, task, np.int32), turn * batch_size + rows

  def alternate(step: int) -> tuple[np.ndarray, np.ndarray]:
    return whole(step % tasks, step // tasks)

  def random_task(step: int) -> tuple[np.ndarray, np.ndarray]:
    epoch, place = divmod(step, tasks * turns)
    order = shuffled(epoch, tasks * turns) % tasks
    before = int(np.count_nonzero(order[:place] == order[place]))
    return whole(int(order[place]), epoch * turns + before)

  def balanced(step: int) -> tuple[np.ndarray, np.ndarray]:
    return (rows % tasks).astype(np.int32), step * share + rows // tasks

  def random(step: int) -> tuple[np.ndarray, np.ndarray]:
    epoch, place = divmod(step, tasks * per_task // batch_size)
    chosen = shuffled(epoch, tasks * per_task)[place * batch_size :][:batch_size]
    return (chosen // per_task).astype(np.int32), epoch * per_task + chosen % per_task

  if arrangement == 'random':
    return tasks * per_task // batch_size, random
  if arrangement == 'balanced':
    return turns, balanced
  return tasks * turns, {'alternate': alternate, 'random_task': random_task}[arrangement]


def row_offsets(tasks: Sequence[Examples]) -> dict[str, jt.Int32[np.ndarray, ' tasks']]:
  return {
    key: np.cumsum([0, *(task.counts[key] for task in tasks[:-1])]).astype(np.int32)
    for key in tasks[0].counts
  }


def split_rows(
  tasks: Sequence[Examples], batch: Mapping[str, np.ndarray]
) -> dict[int, dict[str, np.ndarray]]:
  offsets = row_offsets(tasks)
  keys = [key for key in offsets if key.endswith('_index')]
  first = np.asarray(batch[keys[0]])
  owner = np.searchsorted(offsets[keys[0]], first, side='right') - 1
  return {
    task: {key: np.asarray(batch[key])[owner == task] - offsets[key][task] for key in keys}
    for task in np.unique(owner).tolist()
  }
