"""Counts of the items read from files and of the items skipped."""

import collections

from etils import epath

from dprjax.base.counts import counted
from dprjax.base.errors import InputError

_LISTED = 5  # examples shown with each count


class ReadReport:
  """Counts, in the order of their first mention, with a few examples of each."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.examples: dict[str, list[str]] = {}

  def count(self, what: str, example: str | None = None) -> None:
    self.counts[what] += 1
    if example is not None and len(examples := self.examples.setdefault(what, [])) < _LISTED:
      examples.append(example)

  def forget(self, *kinds: str) -> None:
    for what in kinds:
      self.counts.pop(what, None)
      self.examples.pop(what, None)

  def refuse(self, what: str, path: epath.Path) -> None:
    """Raises InputError if anything was counted under ``what``."""
    if self.counts[what]:
      raise InputError(
        f'{path}: {counted(self.counts[what], what.split(":")[0])}, for example '
        f'{", ".join(self.examples[what])}; fix the file, or read it without strict'
      )

  def __str__(self) -> str:
    lines = []
    for what, count in self.counts.items():
      examples = ', '.join(self.examples.get(what, []) + ['...'] * (count > _LISTED))
      if count:
        lines.append(
          f'  {counted(count, what)}' + (f' ({examples})' if what in self.examples else '')
        )
    return '\n'.join(lines)
