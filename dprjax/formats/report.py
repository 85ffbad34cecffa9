"""What a reader of files counts and leaves out."""

import collections

from etils import epath

from dprjax.base.errors import InputError

_LISTED = 5  # examples of each kind of trouble that a report shows


class Report:
  """What was read and what was left out: counts, in the order of their first mention, and a few
  examples.
  """

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
        f'{path}: {self.counts[what]:,} {what.split(":")[0]}, for instance '
        f'{", ".join(self.examples[what])}; '
        'mend the file, or read it without strict'
      )

  def __str__(self) -> str:
    return '\n'.join(
      f'  {count:,} {what}'
      + (
        f' ({", ".join(self.examples[what])}{", ..." if count > _LISTED else ""})'
        if what in self.examples
        else ''
      )
      for what, count in self.counts.items()
      if count
    )
