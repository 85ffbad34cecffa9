"""Figures of experiments: differences with their intervals, lines through points, matrices."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.analysis import figures
from dprjax.base import files


def differences(
  values: Mapping[str, Mapping[str, figures.Bar]], xlabel: str, foot: str, path: files.PathLike
) -> None:
  """Differences from zero with their intervals: a row for each group, a point for each system.

  Args:
    values: group -> system -> its point and the ends of its whisker. A group may lack systems.
    xlabel: the label of the x axis.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.

  Raises:
    InputError: the suffix is of another format.
  """
  names = list(dict.fromkeys(name for by_name in values.values() for name in by_name))
  height = 1.2 + len(values) * (0.12 + 0.11 * len(names))
  with figures.canvas(7.2, height, foot, path) as drawing:
    axes = drawing.subplots()
    for number, name in enumerate(names):
      rows = [row for row, by_name in enumerate(values.values()) if name in by_name]
      group = [by_name[name] for by_name in values.values() if name in by_name]
      means, lows, highs = (np.array([bar[i] for bar in group]) for i in range(3))
      axes.errorbar(
        means,
        np.array(rows) + (number - (len(names) - 1) / 2) * 0.8 / len(names),
        xerr=np.array([means - lows, highs - means]).clip(0),
        label=name,
        linestyle='',
        markersize=4,
        elinewidth=1,
        **figures.line(number),
      )
    axes.axvline(0, color='#333333', linewidth=0.8)
    axes.set_yticks(np.arange(len(values)), [figures.short(name) for name in values])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlabel(xlabel)
    figures.grid(axes, 'x')
    figures.legend(drawing, names)


def paths(
  panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
  xlabel: str,
  foot: str,
  path: files.PathLike,
) -> None:
  """Lines through points in their order, as of a training's checkpoints: a panel for each measure.

  Args:
    panels: label of the y axis -> system -> its points.
    xlabel: the label of the x axis.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.

  Raises:
    InputError: the suffix is of another format.
  """
  names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
  with figures.canvas(1.0 + 3.9 * len(panels), 4.0, foot, path) as drawing:
    for (ylabel, lines), axes in zip(
      panels.items(), drawing.subplots(1, len(panels), squeeze=False)[0], strict=True
    ):
      for name, points in lines.items():
        number = names.index(name)
        axes.plot(*zip(*points, strict=True), label=name, markersize=5, **figures.line(number))
      axes.set_xlabel(xlabel)
      axes.set_ylabel(ylabel)
      figures.grid(axes, 'both')
    figures.legend(drawing, names)


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
        np.arange(len(panel.columns)), [figures.short(name) for name in panel.columns], rotation=30
      )
      axes.set_yticks(np.arange(len(panel.rows)), [figures.short(name) for name in panel.rows])
      axes.set_title(panel.title, fontsize=9)
