"""Figures: points with intervals, values by update."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.retrieval import comparison

# Colours of Okabe and Ito, distinguishable with colour blindness, without yellow, which vanishes on
# white paper.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#8C564B', '#777777')
_NAMED = 40  # characters of a label
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')


class Bar(NamedTuple):
  """A value, its whisker, and whether it has a star."""

  mean: float
  low: float
  high: float
  starred: bool = False


def dots(
  panels: Mapping[str, Mapping[str, Bar]],
  xlabel: str,
  foot: str,
  path: files.PathLike,
  *,
  title: str = '',
  differences: bool = True,
  colour_of: Callable[[str, str], str] | None = None,
) -> None:
  """Points with whiskers: a panel for each group, a row for each system.

  Args:
    panels: values by panel and row. A panel may lack rows.
    differences: panels share an axis with a line at 0; an exact 0 without a whisker is hollow.
    colour_of: the colour of a row and a panel; by default of the place of the row.
  """
  names = list(dict.fromkeys(name for by_name in panels.values() for name in by_name))
  across = 2 if len(panels) == 4 else min(len(panels), 3)
  down = -(-len(panels) // across)
  width = 0.5 + 0.085 * max(len(short(name)) for name in names) + across * 1.9
  height = 0.6 + 0.3 * bool(title) + down * (0.35 + 0.27 * len(names))
  with canvas(max(width, 6.4), max(height, 1.8), foot, path) as drawing:
    grids = drawing.subplots(down, across, sharey=True, sharex=differences, squeeze=False)
    for axes, (group, by_name) in zip(grids.flat, panels.items(), strict=False):
      for place, name in enumerate(names):
        if name in by_name:
          shade = colour(place) if colour_of is None else colour_of(name, group)
          _dot(axes, place, by_name[name], shade, differences)
      axes.set_title(group, fontsize=9)
      axes.locator_params(axis='x', nbins=4)
      axes.tick_params(axis='x', labelsize=8)
      axes.margins(x=0.12)
      grid(axes, 'x')
      if differences:
        axes.axvline(0, color='#333333', linewidth=0.8, zorder=0)
    for axes in grids.flat[len(panels) :]:
      axes.set_visible(False)
    grids.flat[0].set_yticks(range(len(names)), [short(name) for name in names])
    grids.flat[0].set_ylim(len(names) - 0.4, -0.75)
    if differences:
      _cut(grids.flat[0], [bar for by_name in panels.values() for bar in by_name.values()])
    label_below(drawing, xlabel)
    if title:
      drawing.suptitle(title, fontsize=11, fontweight='bold')


def _dot(axes: Any, place: int, bar: Bar, colour: str, differences: bool) -> None:
  hollow = differences and bar[:3] == (0, 0, 0)
  axes.plot([bar.low, bar.high], [place, place], color=colour, linewidth=1.6)
  axes.plot([bar.mean], [place], 'o', color=colour, markersize=6, mfc='white' if hollow else colour)
  if not hollow:
    label = f'{bar.mean:{"+" if differences else ""}.3f}{"*" if bar.starred else ""}'
    style = {'textcoords': 'offset points', 'ha': 'center', 'fontsize': 7.5, 'color': '#222222'}
    box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.2}
    axes.annotate(label, (bar.mean, place), xytext=(0, 6), annotation_clip=True, bbox=box, **style)


def label_below(drawing: Any, text: str) -> None:
  """The label of the x axes of all panels, above the foot."""
  height = drawing.get_figheight()
  strip = 0.4 / height
  drawing.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
  drawing.text(0.5, 0.2 / height, text, ha='center', va='bottom', fontsize=9)


def _cut(axes: Any, bars: Sequence[Bar]) -> None:
  """Limits the axis if a few long whiskers would hide all points that differ."""
  means = [bar.mean for bar in bars]
  usual = float(np.median([bar.high - bar.low for bar in bars]))
  low, high = min(0, *means) - 1.5 * usual, max(0, *means) + 1.5 * usual
  if low < high:
    now = axes.get_xlim()
    axes.set_xlim(max(low, now[0]), min(high, now[1]))


def compared(
  systems: dict[str, dict[str, Any]], measures: Sequence[str], path: files.PathLike
) -> None:
  """Draws results of ``comparison.compare``: differences from the first system, or its values."""
  results = {measure: comparison.compare(systems, measure) for measure in measures}
  first, *others = systems
  if not others:
    values = {measure: {first: Bar(*by_name[first][:3])} for measure, by_name in results.items()}
    foot = '95 % bootstrap intervals'
    dots(values, 'mean over queries', foot, path, differences=False)
    return
  values = {
    name: {
      f'{measure} ({by_name[first].mean:.3f})': Bar(*difference, by_name[name].significant)
      for measure, by_name in results.items()
      if (difference := by_name[name].difference) is not None
    }
    for name in others
  }
  if len(others) > len(measures):
    values = {row: {name: values[name][row] for name in others} for row in values[others[0]]}
  xlabel = f'difference from {short(first)} (mean of {short(first)} in brackets)'
  foot = '95 % intervals, paired bootstrap over queries;  *: the interval excludes 0'
  dots(values, xlabel, foot, path, title=_finding(others[-1], results[measures[0]], measures[0]))


def _finding(name: str, by_name: Mapping[str, comparison.Compared], measure: str) -> str:
  """The title of a comparison: what the last system gains or loses; '' without a difference."""
  row = by_name[name]
  if row.difference is None:
    return ''
  name = short(name).removeprefix('+ ')
  if not row.significant:
    return f'{name}: no significant difference in {measure}'
  mean = row.difference.mean
  return f'{name} {"gains" if mean > 0 else "loses"} {abs(mean):.3f} {measure}'


def curves(
  series: Mapping[str, Sequence[tuple[int, float]]], ylabel: str, path: files.PathLike
) -> None:
  with canvas(6.4, 3.2, '', path) as drawing:
    axes = drawing.subplots()
    for number, (name, points) in enumerate(series.items()):
      steps, values = zip(*points, strict=True)
      axes.plot(steps, values, label=short(name), markersize=4, linewidth=1, **line(number))
    axes.set_xlabel('updates')
    axes.set_ylabel(ylabel, fontsize=9)
    grid(axes, 'y')
    if len(series) > 1:
      legend(drawing, [short(name) for name in series])


def short(name: str) -> str:
  """A name for a legend; legends leave out names that begin with an underscore."""
  name = ' '.join(name.split())
  return (name if len(name) <= _NAMED else f'{name[: _NAMED - 3]}...').lstrip('_') or '?'


@contextlib.contextmanager
def canvas(width: float, height: float, foot: str, path: files.PathLike) -> Iterator[Any]:
  """A figure to draw into; written at the end of the block."""
  # Not needed for tables.
  import matplotlib.figure
  import matplotlib.layout_engine

  with matplotlib.rc_context({'text.parse_math': False}):  # '$x$' may be a name
    strip = 0.16 / height  # for the foot
    layout = matplotlib.layout_engine.ConstrainedLayoutEngine(
      rect=(0, strip, 1, 1 - strip), w_pad=0.12
    )
    drawing = matplotlib.figure.Figure(figsize=(width, height), dpi=150, layout=layout)
    yield drawing
    drawing.text(0.995, 0.005, foot, ha='right', va='bottom', fontsize=7, color='#555555')
    kind = check_name(path)
    with files.atomic_write(path, 'wb') as file, warnings.catch_warnings():
      warnings.filterwarnings('ignore', 'Glyph .* missing')  # other scripts
      drawing.savefig(file, format=kind)


def colour(number: int) -> str:
  return _COLOURS[number % len(_COLOURS)]


def line(number: int) -> dict[str, Any]:
  return {
    'color': colour(number),
    'marker': _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)],
  }


def grid(axes: Any, axis: str) -> None:
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(True, axis=axis, color='#dddddd', linewidth=0.6)
  axes.set_axisbelow(True)


def legend(drawing: Any, names: Sequence[str], title: str = '') -> None:
  """One legend above all panels, below the title of the figure."""
  handles: dict[str, Any] = {}
  for axes in drawing.axes:
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
      handles.setdefault(name, handle)
  # About 0.075 inches a letter, and 0.65 for the patch.
  fitting = int(drawing.get_figwidth() / (0.65 + 0.075 * max(map(len, names))))
  drawing.legend(
    [handles[name] for name in names if name in handles],
    [name for name in names if name in handles],
    loc='outside upper center',
    ncols=max(1, min(len(names), fitting)),
    frameon=False,
    fontsize=9,
    title=title or None,
    title_fontproperties={'weight': 'bold', 'size': 11},
  )


def check_name(path: files.PathLike, flag: str = '--figure') -> str:
  """The format by the suffix of a figure: 'png' for 'a.png'."""
  import matplotlib.backends.backend_agg

  kind = epath.Path(path).suffix.removeprefix('.').lower()
  if kind not in matplotlib.backends.backend_agg.FigureCanvasAgg.get_supported_filetypes():
    raise InputError(f'{flag}={path}: the name must end in .png, .pdf or .svg')
  return kind
