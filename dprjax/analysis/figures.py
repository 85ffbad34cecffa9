"""Figures for ``dprjax.report``: bars with intervals for systems, three small ones side by side for
backbones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base import files
from dprjax.base.errors import InputError

# Okabe and Ito's colours, which differ for every kind of colour vision, the darker first; hatches
# tell them apart in print.
_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999')
_HATCHES = ('', '//', '..', 'xx', '\\\\', 'oo', '++', '--')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')


class Bar(NamedTuple):
  """One bar: its height, the ends of its whisker, and whether it gets a star."""

  mean: float
  low: float
  high: float
  starred: bool


class Looks(NamedTuple):
  """What the backbones' figure shows of one of them; None where there is nothing to show."""

  entropy: Float[np.ndarray, 'L N'] | None
  alignment: float | None
  uniformity: float | None
  shares: dict[str, float]  # by what is under the bar: numbers of at most 1


def bars(
  values: Mapping[str, Mapping[str, Bar]], ylabel: str, foot: str, path: files.PathLike
) -> None:
  """Grouped bars: a group a measure, in it a bar a system. The format goes by the name (png, pdf,
  svg).

  Args:
    values: measure -> system -> its bar; the systems are the same in all.
    ylabel: beside the axis.
    foot: a line in small print.
    path: where it goes.

  Raises:
    InputError: the name has no ending that can be drawn.
  """
  names = list(next(iter(values.values())))
  width = 0.82 / len(names)
  drawing = _drawing(max(6.4, 1.5 + len(values) * max(1.2, 0.42 * len(names))), 4.4)
  axes = drawing.subplots()
  for number, name in enumerate(names):
    some = [by_name[name] for by_name in values.values()]
    places = np.arange(len(values)) + (number - (len(names) - 1) / 2) * width
    means = np.array([one.mean for one in some])
    spread = np.array(
      [[one.mean - one.low for one in some], [one.high - one.mean for one in some]]
    ).clip(0)
    axes.bar(
      places,
      means,
      width * 0.92,
      yerr=spread,
      error_kw={'elinewidth': 1, 'capsize': 2, 'ecolor': '#333333'},
      **_fill(number, name),
    )
    for place, one in zip(places, some, strict=True):
      _number(axes, place, one.high, f'{one.mean:.3f}{"*" if one.starred else ""}')
  top = max(one.high for by_name in values.values() for one in by_name.values())
  axes.set_ylim(0, max(top, 0.05) * 1.18)  # room for the numbers above the bars
  axes.set_xlim(-0.6, len(values) - 0.4)
  axes.set_xticks(np.arange(len(values)), list(values))
  axes.set_ylabel(ylabel)
  _grid(axes, 'y')
  _legend(drawing, names)
  _foot(drawing, foot)
  _save(drawing, path)


def backbones(looks: Mapping[str, Looks], foot: str, path: files.PathLike) -> None:
  """Side by side: attention entropy over the layers, alignment against uniformity, and bars; a part
  with nothing in it is left out.

  The line is the mean over heads, the band from the lowest to the highest head. Nearer to the lower
  left corner is better in the second part, as in Gao et al. 2021 (SimCSE), Figure 2.

  Args:
    looks: by backbone.
    foot: a line in small print.
    path: where it goes; the format by the name (png, pdf, svg).

  Raises:
    InputError: the name has no ending that can be drawn.
  """
  parts = []
  if any(one.entropy is not None for one in looks.values()):
    parts.append(_entropies)
  if any(one.alignment is not None for one in looks.values()):
    parts.append(_hypersphere)
  if any(one.shares for one in looks.values()):
    parts.append(_shares)
  drawing = _drawing(1.0 + 3.9 * len(parts), 4.0)
  for part, axes in zip(parts, drawing.subplots(1, len(parts), squeeze=False)[0], strict=True):
    part(axes, looks)
  _legend(drawing, list(looks))
  _foot(drawing, foot)
  _save(drawing, path)


def _entropies(axes: Any, looks: Mapping[str, Looks]) -> None:
  deepest = 1
  for number, (name, one) in enumerate(looks.items()):
    if one.entropy is not None:
      layers = np.arange(1, len(one.entropy) + 1)
      deepest = max(deepest, len(layers))
      axes.fill_between(
        layers,
        one.entropy.min(axis=1),
        one.entropy.max(axis=1),
        color=_colour(number),
        alpha=0.15,
        linewidth=0,
      )
      axes.plot(layers, one.entropy.mean(axis=1), label=name, markersize=5, **_line(number))
  axes.set_xticks(np.arange(1, deepest + 1, max(1, deepest // 8)))
  axes.set_ylim(bottom=0)
  axes.set_xlabel('layer')
  axes.set_ylabel('entropy of CLS attention (nats)')
  axes.set_title('attention: mean and range of the heads', fontsize=9)
  _grid(axes, 'y')


def _hypersphere(axes: Any, looks: Mapping[str, Looks]) -> None:
  for number, (name, one) in enumerate(looks.items()):
    if one.alignment is not None and one.uniformity is not None:
      axes.plot([one.uniformity], [one.alignment], label=name, markersize=9, **_line(number))
  axes.margins(0.2)
  axes.set_xlabel('uniformity (more even to the left)')
  axes.set_ylabel('alignment (nearer further down)')
  axes.set_title('on the unit sphere', fontsize=9)
  _grid(axes, 'both')


def _shares(axes: Any, looks: Mapping[str, Looks]) -> None:
  titles = list(dict.fromkeys(title for one in looks.values() for title in one.shares))
  width = 0.82 / len(looks)
  lowest = 0.0
  for number, (name, one) in enumerate(looks.items()):
    for group, title in enumerate(titles):
      value = one.shares.get(title, float('nan'))
      if not np.isnan(value):
        place = group + (number - (len(looks) - 1) / 2) * width
        axes.bar(place, value, width * 0.92, **_fill(number, name))
        _number(axes, place, max(value, 0), f'{value:.3f}')
        lowest = min(lowest, value)
  axes.set_xlim(-0.6, len(titles) - 0.4)
  axes.set_xticks(np.arange(len(titles)), titles)
  axes.set_ylim(lowest * 1.1, 1.1)
  axes.set_title('sentences', fontsize=9)
  _grid(axes, 'y')


def _drawing(width: float, height: float) -> Any:
  # Here, because a table needs none of it.
  import matplotlib.figure
  import matplotlib.layout_engine

  # A strip at the foot is left for the note.
  layout = matplotlib.layout_engine.ConstrainedLayoutEngine(rect=(0, 0.035, 1, 0.965), w_pad=0.12)
  return matplotlib.figure.Figure(figsize=(width, height), dpi=150, layout=layout)


def _colour(number: int) -> str:
  return _COLOURS[number % len(_COLOURS)]


def _fill(number: int, name: str) -> dict[str, Any]:
  return {
    'label': name,
    'color': _colour(number),
    'edgecolor': 'white',
    'linewidth': 0,
    'hatch_linewidth': 0.6,
    'hatch': _HATCHES[(number + number // len(_COLOURS)) % len(_HATCHES)],
  }


def _line(number: int) -> dict[str, Any]:
  return {
    'color': _colour(number),
    'marker': _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)],
  }


def _number(axes: Any, x: float, y: float, text: str) -> None:
  axes.annotate(
    text,
    (x, y),
    xytext=(0, 3),
    textcoords='offset points',
    ha='center',
    va='bottom',
    rotation=90,
    fontsize=7.5,
    color='#222222',
  )


def _grid(axes: Any, axis: str) -> None:
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(True, axis=axis, color='#dddddd', linewidth=0.6)
  axes.set_axisbelow(True)


def _legend(drawing: Any, names: Sequence[str]) -> None:
  """One above all parts, each name once."""
  handles: dict[str, Any] = {}
  for axes in drawing.axes:
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
      handles.setdefault(name, handle)
  # As many names in a row as fit: about 0.075 inches a letter at this size, and 0.65 for the patch.
  fitting = int(drawing.get_figwidth() / (0.65 + 0.075 * max(map(len, names))))
  drawing.legend(
    [handles[name] for name in names if name in handles],
    [name for name in names if name in handles],
    loc='outside upper center',
    ncols=max(1, min(len(names), fitting)),
    frameon=False,
    fontsize=9,
  )


def _foot(drawing: Any, text: str) -> None:
  drawing.text(0.995, 0.005, text, ha='right', va='bottom', fontsize=7, color='#555555')


def check_name(path: files.PathLike) -> str:
  """The kind of figure that a name asks for, 'png' of 'a.png'.

  Raises:
    InputError: no such kind can be drawn, or a folder is in its place.
  """
  import matplotlib.backends.backend_agg

  final = files.output_file(path)
  kind = final.suffix.removeprefix('.').lower()
  if kind not in matplotlib.backends.backend_agg.FigureCanvasAgg.get_supported_filetypes():
    raise InputError(f'--figure={final}: its name has to end in .png, .pdf, .svg')
  return kind


def _save(drawing: Any, path: files.PathLike) -> None:
  kind = check_name(path)
  with files.atomic_write(path, 'wb') as file:
    drawing.savefig(file, format=kind)
