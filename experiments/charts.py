"""Figures of experiments: differences with their intervals, lines through points, matrices."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base import files
from dprjax.retrieval import figures

# Each system has the same colour in all figures.
_SYSTEMS = (
  ('chosen', '#B03060'),
  ('lora', '#56B4E9'),
  (r'linear', '#009E73'),
  (r'fine-tun|\bft\b|^dpr\b', '#D55E00'),
  (r'frozen|as it is|zero-shot', '#777777'),
  (r'^bm25', '#E69F00'),
  (r'prompt|:beir|\bdptdr|\bdpt\b|\bp = \d|topic-dpr', '#0072B2'),
)


def system_colour(name: str, group: str = '') -> str:
  """The colour of a system, the same in all figures, by the name of its row or panel."""
  for words in (name, group):
    for pattern, found in _SYSTEMS:
      if re.search(pattern, words, re.IGNORECASE):
        return found
  return figures.colour(0)


def dots(*args: Any, **options: Any) -> None:
  """`figures.dots`, with the colours of systems."""
  figures.dots(*args, **options, colour_of=system_colour)


def differences(
  values: Mapping[str, Mapping[str, figures.Bar]],
  xlabel: str,
  foot: str,
  path: files.PathLike,
  title: str = '',
) -> None:
  """Differences from zero with their intervals; a panel for each group or system, if fewer.

  Args:
    values: group -> system -> its point and the ends of its whisker. A group may lack systems.
    xlabel: the label of the x axes.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.
    title: the finding that the figure shows.

  Raises:
    InputError: the suffix is of another format.
  """
  systems = list(dict.fromkeys(name for by_name in values.values() for name in by_name))
  if len(systems) < len(values):
    values = {
      name: {group: by_name[name] for group, by_name in values.items() if name in by_name}
      for name in systems
    }
  dots(values, xlabel, foot, path, title=title)


def paths(
  panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
  xlabel: str,
  foot: str,
  path: files.PathLike,
  title: str = '',
) -> None:
  """Lines through points in their order: a panel for each measure, a name at the end of each line.

  Args:
    panels: label of the y axis -> system -> its points.
    xlabel: the label of the x axis.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.
    title: the finding that the figure shows.

  Raises:
    InputError: the suffix is of another format.
  """
  names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
  colours = [system_colour(name) for name in names]
  if len(set(colours)) < len(names):
    colours = [figures.colour(number) for number in range(len(names))]
  with figures.canvas(0.8 + 3.6 * len(panels), 3.6, foot, path) as drawing:
    for (ylabel, lines), axes in zip(
      panels.items(), drawing.subplots(1, len(panels), squeeze=False)[0], strict=True
    ):
      for name, points in lines.items():
        shade = colours[names.index(name)]
        axes.plot(*zip(*points, strict=True), 'o-', markersize=5, color=shade)
        style = {'textcoords': 'offset points', 'va': 'center', 'fontsize': 8.5, 'color': shade}
        box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5}
        axes.annotate(figures.short(name), points[-1], xytext=(7, 0), bbox=box, **style)
      axes.set_xlabel(xlabel)
      axes.set_ylabel(ylabel)
      axes.margins(x=0.05)
      figures.grid(axes, 'both')
    if title:
      drawing.suptitle(title, fontsize=11, fontweight='bold')


class Matrix(NamedTuple):
  """A panel of numbers: its title, the names of rows and columns, and the values; NaN: none."""

  title: str
  rows: tuple[str, ...]
  columns: tuple[str, ...]
  values: Float[np.ndarray, 'R C']


def matrices(panels: Sequence[Matrix], foot: str, path: files.PathLike) -> None:
  """Matrices of numbers, coloured by their values, side by side.

  Args:
    panels: one or more.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.

  Raises:
    InputError: the suffix is of another format.
  """
  columns = [len(panel.columns) for panel in panels]
  height = max(2.4, 1.4 + 0.5 * max(len(panel.rows) for panel in panels))
  with figures.canvas(sum(1.8 + 0.7 * count for count in columns), height, foot, path) as drawing:
    for axes, panel in zip(
      drawing.subplots(1, len(panels), squeeze=False, width_ratios=columns)[0], panels, strict=True
    ):
      # Around 0, so that a sign is a colour.
      largest = float(np.nanmax(np.abs(panel.values), initial=0.05))
      axes.imshow(panel.values, cmap='RdBu', vmin=-largest, vmax=largest, aspect='auto')
      for (row, column), value in np.ndenumerate(panel.values):
        if np.isfinite(value):
          dark = abs(value) > 0.7 * largest
          axes.text(
            column,
            row,
            f'{value:.2f}',
            ha='center',
            va='center',
            fontsize=7.5,
            color='white' if dark else '#222222',
          )
      axes.set_xticks(
        np.arange(len(panel.columns)), [figures.short(name) for name in panel.columns], rotation=90
      )
      axes.set_yticks(np.arange(len(panel.rows)), [figures.short(name) for name in panel.rows])
      axes.set_title(panel.title, fontsize=9)
