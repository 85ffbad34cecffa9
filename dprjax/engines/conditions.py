"""Conditions on fields of documents, such as ``year>=2020``, in one syntax for all engines."""

import json
import math
import re
from typing import NamedTuple

from dprjax.base.errors import InputError

Value = str | int | float | bool

RESERVED = ('id', 'vector', 'words', 'counts', 'payload')
"""Names that engines reserve."""

_PATTERN = re.compile(r'([A-Za-z_][A-Za-z0-9_]{0,62})(>=|<=|=|>|<)(.*)', re.S)


class Condition(NamedTuple):
  """A condition on a field.

  Attributes:
    field: a name; documents without the field do not match.
    operator: '=', '<', '<=', '>' or '>='.
    values: one, or several after '='. A list field matches '=' if it contains one of them.
  """

  field: str
  operator: str
  values: tuple[Value, ...]


def parse(text: str) -> Condition:
  """Reads ``NAME=VALUE``, ``NAME=VALUE,VALUE``, or ``NAME>=NUMBER`` (also >, <, <=).

  Numbers, true and false are parsed; a value in double quotes is a string.
  """
  found = _PATTERN.fullmatch(text)
  if found is None or found[1] in RESERVED or not found[3]:
    raise _error(text)
  name, operator, rest = found.groups()
  values = tuple(_value(one) for one in (_split(rest) if operator == '=' else [rest]))
  if operator != '=' and not _is_number(values[0]):
    raise _error(text)
  return Condition(name, operator, values)


def _error(text: str) -> InputError:
  return InputError(
    f'{text!r:.80}: expected a condition on a field of the texts such as lang=en, lang=en,de or, '
    'for numbers, year>=2020'
  )


def _split(text: str) -> list[str]:
  # Commas inside double quotes do not separate.
  return re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^,])+', text)


def _value(text: str) -> Value:
  try:
    value = json.loads(text)
  except ValueError:
    return text
  usable = isinstance(value, str | bool) or _is_number(value)
  return value if usable else text


def _is_number(value: object) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and math.isfinite(float(value))  # type: ignore[arg-type]
