"""Counts of the items read from files and of the items skipped."""

import collections
from collections.abc import Sequence

from dprjax.base.counts import counted

_LISTED = 5  # examples shown with each count


class ReadReport:
  """Counts, in the order of their first mention, with a few examples of each."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.examples: dict[str, list[str]] = {}

  def count(self, what: str, example: str | None = None) -> None:
    """Counts one item."""
    self.add(what, 1, () if example is None else (example,))

  def add(self, what: str, number: int, examples: Sequence[str] = ()) -> None:
    """Counts several items."""
    self.counts[what] += number
    if examples:
      shown = self.examples.setdefault(what, [])
      shown += examples[: _LISTED - len(shown)]

  def forget(self, *kinds: str) -> None:
    for what in kinds:
      self.counts.pop(what, None)
      self.examples.pop(what, None)

  def __str__(self) -> str:
    lines = []
    for what, count in self.counts.items():
      examples = ', '.join(self.examples.get(what, []) + ['...'] * (count > _LISTED))
      if count:
        lines.append(
          f'  {counted(count, what)}' + (f' ({examples})' if what in self.examples else '')
        )
    return '\n'.join(lines)
