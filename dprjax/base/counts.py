"""Numbers with their nouns, and counts of what was read."""

import collections
import re
from collections.abc import Sequence

_LISTED = 5  # examples shown with each count
# The first word with a plural ending (queries, batches, passages), and the verb after it.
_NOUN = re.compile(r'\b(\w+?)(ies|(?<=[sx])es|(?<=[cs]h)es|(?<!s)s)\b')
_VERB = re.compile(r'\bthat (are|were|have)\b')
_SINGULAR = {'are': 'is', 'were': 'was', 'have': 'has'}


def counted(count: int, what: str) -> str:
  """A count with its noun; ``what`` is in the plural.

  >>> counted(2000, 'queries that are not judged')
  '2,000 queries that are not judged'
  >>> counted(1, 'queries that are not judged')
  '1 query that is not judged'
  """
  if count == 1:
    what = _NOUN.sub(lambda word: word[1] + ('y' if word[2] == 'ies' else ''), what, count=1)
    what = _VERB.sub(lambda verb: f'that {_SINGULAR[verb[1]]}', what, count=1)
  return f'{count:,} {what}'


def rate(value: float) -> str:
  """A number a second: ``1,234``, ``12`` or ``0.34``."""
  return f'{value:,.0f}' if value >= 10 else f'{value:.2g}'


class ReadReport:
  """Counts of items read and skipped, in the order of their first mention, with a few examples."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.examples: dict[str, list[str]] = {}

  def count(self, what: str, example: str | None = None) -> None:
    self.add(what, 1, () if example is None else (example,))

  def add(self, what: str, number: int, examples: Sequence[str] = ()) -> None:
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
