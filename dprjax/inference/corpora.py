"""Corpora and queries given as Python values."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dprjax.base import given
from dprjax.base.errors import InputError
from dprjax.formats.texts import USUAL, Passage, PassageRecord, Query, Text

Corpus = Mapping[Any, Any] | Iterable[Any]


class _Kind(NamedTuple):
  """The name of texts in messages, and names of their columns or keys (the first found counts)."""

  what: str
  one: str
  ids: tuple[str, ...]
  texts: tuple[str, ...]


_CORPUS, _QUERIES = (
  _Kind(what, side, USUAL[side]['id'], USUAL[side]['text'])
  for what, side in (('corpus', 'passage'), ('queries', 'query'))
)


def passages(corpus: Corpus) -> list[Passage]:
  """Reads a corpus.

  Args:
    corpus: one of
      - texts: a list, another iterable, or a column of pandas, pyarrow, polars or numpy;
      - passages: mappings with ``text`` and optional ``title`` and ``_id`` or ``id``;
      - a mapping of ids to texts or passages;
      - a table of these columns: a mapping of lists, or one of pandas, pyarrow, polars or datasets.

      By default ids are passage numbers, from 0. A title may be None, NaN or NA. Columns and keys
      may have the other names of `dprjax.formats.texts.USUAL`, such as ``passage`` and ``doc_id``.

  Raises:
    InputError: a value that is not text, or an id that is repeated or neither text nor a whole
      number.
  """
  return _with_ids(corpus, _CORPUS)


def queries(given_queries: Corpus) -> list[Query]:
  """Reads queries, as `passages` reads a corpus; a text is ``text``, ``query`` or ``question``."""
  return _with_ids(given_queries, _QUERIES)


def texts(corpus: Corpus) -> list[str]:
  """The texts of a corpus."""
  return [text for _, text in _pairs(corpus, _CORPUS)]


def _with_ids(corpus: Corpus, kind: _Kind) -> list[Text]:
  ids: dict[str, int] = {}
  found = []
  for number, (own, text) in enumerate(_pairs(corpus, kind)):
    where = f'{kind.what}: the id of {kind.one} {number}'
    id_ = given.identifier(number if own is None else own, where)
    if ids.setdefault(id_, number) != number:
      raise InputError(
        f'{where} is {id_!r:.40}, the same as of {kind.one} {ids[id_]}; ids must be unique'
      )
    found.append(Text(id_, text))
  return found


def _pairs(corpus: Corpus, kind: _Kind) -> list[tuple[Any, str]]:
  """The id (or None) and the text of each value."""
  if (columns := _columns(corpus, kind)) is not None:
    return _from_columns(columns, kind)
  if isinstance(corpus, Mapping):
    return [(id_, _read(value, i, kind)[1]) for i, (id_, value) in enumerate(corpus.items())]
  return [_read(value, i, kind) for i, value in enumerate(given.values(corpus, kind.what))]


def _columns(corpus: Corpus, kind: _Kind) -> Mapping[str, Any] | None:
  if not isinstance(corpus, Mapping):
    return given.table(corpus)
  text = next((corpus[name] for name in kind.texts if name in corpus), None)
  if isinstance(text, str) and corpus.keys() <= {*kind.texts, 'title', *kind.ids}:
    raise InputError(f'{kind.what}: expected a list of texts, not one {kind.one}')
  return None if text is None or isinstance(text, str | Mapping) else corpus


def _from_columns(columns: Mapping[str, Any], kind: _Kind) -> list[tuple[Any, str]]:
  name = next((name for name in kind.texts if name in columns), None)
  if name is None:
    raise InputError(
      f'{kind.what}: no column {kind.texts[0]} in a table of {", ".join(columns)}; rename the '
      f'column of texts'
    )
  texts = given.texts(columns[name], name)
  none = [None] * len(texts)

  def column(*names: str) -> list[Any]:
    found = next((one for one in names if columns.get(one) is not None), None)
    values = none if found is None else given.values(columns[found], found)
    if len(values) != len(texts):
      raise InputError(
        f'{kind.what}: {len(values):,} values of {found} for {len(texts):,} of {name}'
      )
    return values

  titles = given.titles(column('title'))
  joined = [PassageRecord('', *row).joined for row in zip(titles, texts, strict=True)]
  return list(zip(column(*kind.ids), joined, strict=True))


def _read(value: Any, number: int, kind: _Kind) -> tuple[Any, str]:
  """The id (or None) and text of a value, the ``number``-th."""
  if not isinstance(value, Mapping):
    return None, given.check_text(value, number)
  name = next((name for name in kind.texts if name in value), None)
  if name is None:
    raise InputError(
      f'{kind.what}: {kind.one} {number} has {", ".join(map(str, value)) or "nothing"}; expected '
      f'{kind.texts[0]}{" (and title, _id)" if kind is _CORPUS else " (and _id)"}'
    )
  title = value.get('title')
  title = '' if given.is_missing(title) else given.check_text(title, number, 'title')
  text = given.check_text(value[name], number)
  id_ = next((value[key] for key in kind.ids if value.get(key) is not None), None)
  return id_, PassageRecord('', title, text).joined
