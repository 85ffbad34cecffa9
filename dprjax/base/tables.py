"""Tables for Python programs and notebooks: of pandas where it is installed, else `Records`."""

import html
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import pandas

_SHOWN = 20  # rows of a printed table
_WIDTH = 60  # characters of a printed value


class Records(list[dict[str, Any]]):
  """The rows of a table: one dict a row, with the same keys in the same order.

  Stands in for a DataFrame where pandas is not installed. A notebook draws it as a table.
  """

  def __init__(self, columns: Mapping[str, Sequence[Any]]):
    super().__init__(
      dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    )
    self.columns = list(columns)

  def column(self, name: str) -> list[Any]:
    if name not in self.columns:
      raise KeyError(name)
    return [row[name] for row in self]

  def __repr__(self) -> str:
    cells = [self.columns, *([_cell(row[name]) for name in self.columns] for row in self[:_SHOWN])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return '\n'.join([*lines, *self._rest()])

  def _repr_html_(self) -> str:
    head = ''.join(f'<th>{html.escape(name)}</th>' for name in self.columns)
    rows = ''.join(
      f'<tr>{"".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in self.columns)}</tr>'
      for row in self[:_SHOWN]
    )
    rest = ''.join(f'<p>{line}</p>' for line in self._rest())
    return f'<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{rest}'

  def _rest(self) -> list[str]:
    return [f'{len(self):,} rows, the first {_SHOWN} are shown'] if len(self) > _SHOWN else []


def table(columns: Mapping[str, Sequence[Any]]) -> 'pandas.DataFrame | Records':
  if importlib.util.find_spec('pandas') is None:
    return Records(columns)
  import pandas  # takes half a second

  return pandas.DataFrame({name: list(values) for name, values in columns.items()})


def _cell(value: Any) -> str:
  text = ' '.join((f'{value:.4f}' if isinstance(value, float) else str(value)).split())
  return text if len(text) <= _WIDTH else f'{text[: _WIDTH - 3]}...'
