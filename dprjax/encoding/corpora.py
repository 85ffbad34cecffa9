"""Corpora and queries given as Python values."""

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dprjax.base import given
from dprjax.base.errors import InputError
from dprjax.text import records
from dprjax.text.texts import USUAL, Passage, PassageRecord, Query, Text

Corpus = Mapping[Any, Any] | Iterable[Any]

_NONE: Mapping[str, str] = types.MappingProxyType({})
_WHAT = {'passage': 'corpus', 'query': 'queries'}  # in messages


def passages(corpus: Corpus, columns: Mapping[str, str] = _NONE) -> list[Passage]:
  """Reads a corpus.

  Args:
    corpus: one of
      - texts: a list, another iterable, or a column of pandas, pyarrow, polars or numpy;
      - passages: mappings with ``text`` and optional ``title`` and ``_id`` or ``id``;
      - a mapping of ids to texts or passages;
      - a table of these columns: a mapping of lists, or one of pandas, pyarrow, polars or datasets.

      Without a column of ids, they are the index of pandas, else the passage numbers from 0. A
      title may be None, NaN or NA. Columns and keys may have the other names of
      `dprjax.text.texts.USUAL`, such as ``passage`` and ``doc_id``.
    columns: other names of columns and keys by role: id, title, text.
  """
  return _with_ids(corpus, 'passage', columns)


def queries(given_queries: Corpus, columns: Mapping[str, str] = _NONE) -> list[Query]:
  """Reads queries, as `passages` reads a corpus; a text is ``text``, ``query`` or ``question``."""
  return _with_ids(given_queries, 'query', columns)


def texts(corpus: Corpus) -> list[str]:
  return [text for _, text in _pairs(corpus, 'passage')]


def _with_ids(corpus: Corpus, side: str, columns: Mapping[str, str]) -> list[Text]:
  ids: dict[str, int] = {}
  entries = []
  for number, (raw_id, text) in enumerate(_pairs(corpus, side, columns)):
    where = f'{_WHAT[side]}: the id of {side} {number}'
    id_ = given.identifier(number if raw_id is None else raw_id, where)
    if ids.setdefault(id_, number) != number:
      number_them = '; reset_index(drop=True) numbers rows' if given.index_of(corpus) else ''
      raise InputError(
        f'{where} is {id_!r:.40}, the same as of {side} {ids[id_]}; ids must be unique{number_them}'
      )
    entries.append(Text(id_, text))
  return entries


def _pairs(corpus: Corpus, side: str, columns: Mapping[str, str] = _NONE) -> list[tuple[Any, str]]:
  """The id (or None) and the text of each value."""
  table = given.table(corpus)
  if isinstance(corpus, Mapping):
    roles = _roles(corpus, side, columns)
    text = corpus.get(roles.get('text'))
    if isinstance(text, str) and corpus.keys() <= {*roles.values()}:
      raise InputError(f'{_WHAT[side]}: expected a list of texts, not one {side}')
    if text is None or isinstance(text, str | Mapping):
      rows = enumerate(corpus.items())
      return [(id_, _read(value, number, side, columns)[1]) for number, (id_, value) in rows]
    table = dict(corpus)
  if table is not None:
    return _from_columns(table, side, columns)
  values = given.values(corpus, _WHAT[side])
  read = [_read(value, number, side, columns) for number, value in enumerate(values)]
  if (index := given.index_of(corpus)) is None:
    return read
  return [(id_, text) for id_, (_, text) in zip(index, read, strict=True)]


def _roles(
  row: Mapping[Any, Any],
  side: str,
  columns: Mapping[str, str],
  needed: Sequence[str] = (),
  where: str = '',
) -> dict[str, str]:
  """The column of each role among those that are present."""
  texts = USUAL[side]['text']
  names = [str(name) for name, value in row.items() if value is not None or name in texts]
  return records.find_roles(names, USUAL[side], columns, where or _WHAT[side], needed, needed)


def _from_columns(
  table: Mapping[str, Any], side: str, columns: Mapping[str, str]
) -> list[tuple[Any, str]]:
  roles = _roles(table, side, columns, ('text',), _WHAT[side])
  values = {role: given.values(table[name], name) for role, name in roles.items()}
  name, none = roles['text'], [None] * len(values['text'])
  rows = zip(values.get('id', none), values.get('title', none), values['text'], strict=True)
  return [
    (id_, _joined(title, text, number, name)) for number, (id_, title, text) in enumerate(rows)
  ]


def _read(value: Any, number: int, side: str, columns: Mapping[str, str]) -> tuple[Any, str]:
  """The id (or None) and text of a value, the ``number``-th."""
  if not isinstance(value, Mapping):
    return None, given.check_text(value, number)
  roles = _roles(value, side, columns, ('text',), f'{_WHAT[side]}: {side} {number}')
  joined = _joined(value.get(roles.get('title')), value[roles['text']], number)
  return value.get(roles.get('id')), joined


def _joined(title: Any, text: Any, number: int, what: str = 'texts') -> str:
  title = '' if given.is_missing(title) else given.check_text(title, number, 'title')
  return PassageRecord('', title, given.check_text(text, number, what)).joined
