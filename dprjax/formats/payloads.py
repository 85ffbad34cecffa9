"""Passages with all that their file says of them: title, text and other fields."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.formats import texts
from dprjax.formats.fields import UniqueIds

Value = str | int | float | bool | list[str]

RESERVED = ('id', 'vector', 'words', 'counts', 'payload')
"""Names that engines keep for themselves."""


class Document(NamedTuple):
  """A passage.

  Attributes:
    id: of the passage.
    text: as it is encoded: its title, a space, its text.
    payload: ``title`` and ``text``, unless they are empty, and other fields: words, numbers, truth
      values and lists of words. Those of an object ``metadata`` count as the fields of a passage.
    omitted: names of fields that are none of these, or that engines keep for themselves.
  """

  id: str
  text: str
  payload: dict[str, Value]
  omitted: tuple[str, ...]


def is_field(name: str) -> bool:
  """Whether a field of a payload can have this name."""
  return re.fullmatch('[A-Za-z_][A-Za-z0-9_]{0,62}', name) is not None and name not in RESERVED


def read_documents(path: files.PathLike) -> Iterator[Document]:
  """Yields the passages of a file that `texts.read_texts` reads.

  Raises:
    InputError: a missing, empty or malformed file, or an id that comes twice.
  """
  found = files.existing(path, 'passage file')
  lines = reading.read_lines(found, 'corpus file', blank=True)
  layout, rows = texts.open_rows(lines, texts.format_of(found), str(found))
  ids, number = UniqueIds(found, 'passage'), 0
  for number, row in rows:
    where = f'{found}, line {number}'
    entry = layout.entry(row, where)
    ids.add(entry.id, number)
    other: dict[str, Any] = {}
    if isinstance(row, str):
      other = reading.parse_object(row, where)
      metadata = other.pop('metadata', None)
      if isinstance(metadata, dict):
        other = metadata | other
    elif 'url' in layout.names:
      other = {'url': row[layout.names.index('url')]}
    payload: dict[str, Value] = {
      name: value for name, value in (('title', entry.title), ('text', entry.text)) if value
    }
    omitted = []
    for name, value in other.items():
      if name in ('_id', 'title', 'text') or value is None:
        continue
      if is_field(name) and _is_plain(value):
        payload[name] = value
      else:
        omitted.append(name)
    yield Document(entry.id, entry.joined, payload, tuple(omitted))
  if not number:
    raise InputError(f'{found}: no passage in it')


def _is_plain(value: Any) -> bool:
  if isinstance(value, list):
    return all(isinstance(item, str) for item in value)
  return isinstance(value, str | int | float | bool)
