"""Numbers with their nouns."""

import re

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
