"""Corpora given as Python values."""

from collections.abc import Iterable, Mapping
from typing import Any

from dprjax.base import given
from dprjax.base.errors import InputError
from dprjax.formats.texts import Passage, PassageRecord

Corpus = Mapping[Any, Any] | Iterable[Any]

_IDS = ('_id', 'id')


def passages(corpus: Corpus) -> list[Passage]:
  """Reads a corpus.

  Args:
    corpus: one of
      - texts: a list, another iterable, or a column of pandas, pyarrow, polars or numpy;
      - passages: mappings with ``text`` and optional ``title`` and ``_id`` or ``id``;
      - a mapping of ids to texts or passages;
      - a table of these columns: a mapping of lists, or one of pandas, pyarrow or polars.

      The default id is the passage number, from 0. A title may be None, NaN or NA.

  Raises:
    InputError: a value that is no text, or an id that is no text or whole number, or repeated.
  """
  ids: dict[str, int] = {}
  found = []
  for number, (own, text) in enumerate(_pairs(corpus)):
    where = f'corpus: the id of passage {number}'
    id_ = given.identifier(number if own is None else own, where)
    if ids.setdefault(id_, number) != number:
      raise InputError(f'{where} is {id_!r:.40}, as that of passage {ids[id_]}; ids must be unique')
    found.append(Passage(id_, text))
  return found


def texts(corpus: Corpus) -> list[str]:
  """The texts of a corpus."""
  return [text for _, text in _pairs(corpus)]


def _pairs(corpus: Corpus) -> list[tuple[Any, str]]:
  """Each passage's id (or None) and text."""
  if (columns := _columns(corpus)) is not None:
    return _from_columns(columns)
  if isinstance(corpus, Mapping):
    return [(id_, _read(value, i)[1]) for i, (id_, value) in enumerate(corpus.items())]
  return [_read(value, i) for i, value in enumerate(given.values(corpus, 'corpus'))]


def _columns(corpus: Corpus) -> Mapping[str, Any] | None:
  if not isinstance(corpus, Mapping):
    return given.table(corpus)
  text = corpus.get('text')
  if isinstance(text, str) and corpus.keys() <= {'text', 'title', *_IDS}:
    raise InputError('corpus: expected a list of passages, not one passage')
  return None if text is None or isinstance(text, str | Mapping) else corpus


def _from_columns(columns: Mapping[str, Any]) -> list[tuple[Any, str]]:
  if 'text' not in columns:
    raise InputError(
      f'corpus: no column text in a table of {", ".join(columns)}; rename the column of passages'
    )
  texts = given.texts(columns['text'], 'text')
  none = [None] * len(texts)

  def column(*names: str) -> list[Any]:
    name = next((name for name in names if columns.get(name) is not None), None)
    values = none if name is None else given.values(columns[name], name)
    if len(values) != len(texts):
      raise InputError(f'corpus: {len(values):,} values of {name} for {len(texts):,} of text')
    return values

  titles = given.titles(column('title'))
  joined = [PassageRecord('', *row).joined for row in zip(titles, texts, strict=True)]
  return list(zip(column(*_IDS), joined, strict=True))


def _read(value: Any, number: int) -> tuple[Any, str]:
  """The id (or None) and text of passage ``number``."""
  if not isinstance(value, Mapping):
    return None, given.check_text(value, number)
  if 'text' not in value:
    raise InputError(
      f'corpus: passage {number} has {", ".join(map(str, value)) or "nothing"}; expected text '
      '(and title, _id)'
    )
  title = value.get('title')
  title = '' if given.is_missing(title) else given.check_text(title, number, 'title')
  text = given.check_text(value['text'], number)
  id_ = next((value[key] for key in _IDS if value.get(key) is not None), None)
  return id_, PassageRecord('', title, text).joined
