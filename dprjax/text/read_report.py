"""Counts of the items read from files and of the items skipped."""

import collections
from collections.abc import Sequence

from dprjax.base.counts import counted
from dprjax.base.errors import InputError

_LISTED = 5  # examples shown with each count


class ReadReport:
  """Counts, in the order of their first mention, with a few examples of each."""

  def __init__(self, strict: bool = False) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.examples: dict[str, list[str]] = {}
    self._strict = strict

  def count(self, what: str, example: str | None = None) -> None:
    """Counts one item."""
    self.add(what, 1, () if example is None else (example,), trouble=False)

  def add(self, what: str, number: int, examples: Sequence[str] = (), trouble: bool = True) -> None:
    """Counts several items; raises InputError for trouble if ``strict`` is set."""
    self.counts[what] += number
    if examples:
      shown = self.examples.setdefault(what, [])
      shown += examples[: _LISTED - len(shown)]
    if number and trouble and self._strict:
      raise InputError(
        f'{counted(self.counts[what], what)}: {", ".join(self.examples.get(what, ()))}; correct '
        'the files, or run without --strict'
      )

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
