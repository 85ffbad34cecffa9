"""Passages with all fields of their file: title, text and others."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.base import files
from dprjax.text import texts

Value = str | int | float | bool | list[str]

RESERVED = ('id', 'vector', 'words', 'counts', 'payload')
"""Names that engines reserve."""
_STORED = re.compile(r'(?!\s)[^\x00-\x1f.]{1,63}(?<!\s)')  # OpenSearch makes objects of dots


class Document(texts.Text):
  """A passage.

  Attributes:
    id, text: as in `texts.Text`.
    payload: ``title`` and ``text``, unless empty, and other fields: strings, numbers, booleans and
      lists of strings. Fields of an object ``metadata`` count as fields of the passage.
    omitted: names of fields of other types, or with a name that engines reserve.
  """

  payload: dict[str, Value]
  omitted: list[str]


def is_field(name: str) -> bool:
  """Whether a condition can name this field of a payload."""
  return re.fullmatch('[A-Za-z_][A-Za-z0-9_]{0,62}', name) is not None and name not in RESERVED


def read_documents(
  path: files.PathLike, columns: Mapping[str, str] | None = None
) -> Iterator[Document]:
  """The passages of an input. Takes the arguments and raises the errors of `texts.read_texts`."""
  return map(_document, texts.Texts(path, 'passage', columns=columns).entries())


def _document(entry: texts.Entry) -> Document:
  record, fields = entry.record, dict(entry.values)
  metadata = fields.get('metadata')
  if isinstance(metadata, dict):
    del fields['metadata']
    fields = metadata | fields
  made = Document(record.id, record.joined)
  made.payload, made.omitted = {}, []
  for name, value in (('title', record.title), ('text', record.text)):
    if value:
      made.payload[name] = value
  for name, value in fields.items():
    if name in entry.roles.values() or value is None:
      continue
    if _STORED.fullmatch(name) and name not in ('title', 'text', *RESERVED) and _is_plain(value):
      made.payload[name] = value
    else:
      made.omitted.append(name)
  return made


def _is_plain(value: Any) -> bool:
  if isinstance(value, list):
    return all(isinstance(item, str) for item in value)
  return isinstance(value, str | int | float | bool)
