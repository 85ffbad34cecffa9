"""Figures: bars with intervals, alignment against uniformity, words of topics."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from etils import epath

from dprjax.analysis import comparison
from dprjax.base import files
from dprjax.base.errors import InputError

if TYPE_CHECKING:  # it imports JAX, which bars do not need
  from dprjax.analysis.inspection import Findings

# Okabe and Ito's colours, the darker ones first: distinguishable with colour blindness. Hatches
# distinguish the bars in print.
_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999')
_NAMED = 40  # characters of a label
_HATCHES = ('', '//', '..', 'xx', '\\\\', 'oo', '++', '--')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')


class Bar(NamedTuple):
  """The height of a bar, the ends of its whisker, and whether it has a star."""

  mean: float
  low: float
  high: float
  starred: bool


def bars(
  values: Mapping[str, Mapping[str, Bar]], ylabel: str, foot: str, path: files.PathLike
) -> None:
  """Bars grouped by measure, one for each system.

  Args:
    values: bars by measure and system; all measures have the same systems.
    ylabel: the label of the y axis.
    foot: a line in small print.
    path: the file; png, pdf or svg.

  Raises:
    InputError: another format.
  """
  names = list(next(iter(values.values())))
  width = 0.82 / len(names)
  with canvas(
    max(6.4, 1.5 + len(values) * max(1.2, 0.42 * len(names))), 4.4, foot, path
  ) as drawing:
    axes = drawing.subplots()
    for number, name in enumerate(names):
      group = [by_name[name] for by_name in values.values()]
      places = np.arange(len(values)) + (number - (len(names) - 1) / 2) * width
      means, lows, highs = (np.array([bar[i] for bar in group]) for i in range(3))
      spread = np.array([means - lows, highs - means]).clip(0)
      axes.bar(
        places,
        means,
        width * 0.92,
        yerr=spread,
        error_kw={'elinewidth': 1, 'capsize': 2, 'ecolor': '#333333'},
        **fill(number, name),
      )
      for place, bar in zip(places, group, strict=True):
        number_at(axes, place, bar.high, f'{bar.mean:.3f}{"*" if bar.starred else ""}')
    top = max(bar.high for by_name in values.values() for bar in by_name.values())
    axes.set_ylim(0, max(top, 0.05) * 1.18)  # room for numbers above the bars
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.set_xticks(np.arange(len(values)), list(values))
    axes.set_ylabel(ylabel)
    grid(axes, 'y')
    legend(drawing, names)


def compared(
  systems: dict[str, dict[str, Any]], measures: Sequence[str], path: files.PathLike
) -> None:
  """Draws what ``comparison.compare`` finds."""
  values = {
    measure: {
      name: Bar(*result[:3], result.significant)
      for name, result in comparison.compare(systems, measure).items()
    }
    for measure in measures
  }
  foot = 'whiskers: 95 % bootstrap intervals' + (
    ';  * differs from the first system (paired)' if len(systems) > 1 else ''
  )
  several = any('datasets' in metrics for metrics in systems.values())
  ylabel = f'mean over {"data sets" if several else "queries"}'
  bars(values, ylabel, foot, path)


def curves(
  series: Mapping[str, Sequence[tuple[int, float]]], ylabel: str, path: files.PathLike
) -> None:
  """Draws values by update, a line for each name.

  Raises:
    InputError: a format other than png, pdf or svg.
  """
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


def backbones(findings: 'Mapping[str, Findings]', path: files.PathLike) -> None:
  """Draws alignment against uniformity, of unit vectors and raw ones, by backbone.

  The lower left corner is best, as in Gao et al. 2021 (SimCSE), Figure 2.

  Raises:
    InputError: a format other than png, pdf or svg.
  """
  panels = spaces(findings)
  with canvas(1.0 + 3.9 * len(panels), 4.0, '', path) as drawing:
    for draw, axes in zip(panels, drawing.subplots(1, len(panels), squeeze=False)[0], strict=True):
      draw(axes)
    legend(drawing, list(findings))


def spaces(findings: 'Mapping[str, Findings]') -> list[Callable[[Any], None]]:
  """Functions that draw the panels with content into axes."""
  titles = {
    'on the unit sphere': [(one.uniformity, one.alignment) for one in findings.values()],
    'raw vectors': [(one.raw_uniformity, one.raw_alignment) for one in findings.values()],
  }
  return [
    functools.partial(_scatter, points=dict(zip(findings, values, strict=True)), title=title)
    for title, values in titles.items()
    if any(None not in value for value in values)
  ]


class TopicPanel(NamedTuple):
  """The words of a topic, most probable first, with their probabilities in it and elsewhere."""

  title: str
  words: Sequence[str]
  own: Sequence[float]
  background: Sequence[float]


def topics(panels: Sequence[TopicPanel], foot: str, path: files.PathLike) -> None:
  """Draws a panel for each topic: bars for its words, dots for the background.

  Args:
    panels: the topics.
    foot: a line in small print.
    path: the file; png, pdf or svg.

  Raises:
    InputError: another format.
  """
  columns = min(len(panels), 5)
  rows = -(-len(panels) // columns)
  most = max(len(panel.words) for panel in panels)
  with canvas(0.6 + 2.6 * columns, rows * (0.7 + 0.2 * most), foot, path) as drawing:
    for number, panel in enumerate(panels):
      axes = drawing.add_subplot(rows, columns, number + 1)
      places = np.arange(len(panel.words))
      axes.barh(places, panel.own, 0.8, **fill(number, ''))
      axes.plot(panel.background, places, 'o', color='#333333', markersize=3)
      axes.set_yticks(places, panel.words, fontsize=8)
      axes.set_ylim(most - 0.4, -0.6)
      axes.locator_params(axis='x', nbins=4)
      axes.tick_params(axis='x', labelsize=7)
      axes.set_title(panel.title, fontsize=9)
      grid(axes, 'x')


def short(name: str) -> str:
  """A name for a legend, which would leave out one that begins with an underscore."""
  name = ' '.join(name.split())
  return (name if len(name) <= _NAMED else f'{name[: _NAMED - 3]}...').lstrip('_') or '?'


def _scatter(
  axes: Any, points: Mapping[str, tuple[float | None, float | None]], title: str
) -> None:
  for number, (name, (uniformity, alignment)) in enumerate(points.items()):
    if alignment is not None and uniformity is not None:
      axes.plot([uniformity], [alignment], label=name, markersize=9, **line(number))
  axes.margins(0.2)
  axes.set_xlabel('uniformity (more even to the left)')
  axes.set_ylabel('alignment (nearer further down)')
  axes.set_title(title, fontsize=9)
  grid(axes, 'both')


@contextlib.contextmanager
def canvas(width: float, height: float, foot: str, path: files.PathLike) -> Iterator[Any]:
  """A figure to draw into, which is written at the end."""
  # Tables do not need it.
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


def fill(number: int, name: str) -> dict[str, Any]:
  return {
    'label': name,
    'color': colour(number),
    'edgecolor': 'white',
    'linewidth': 0,
    'hatch_linewidth': 0.6,
    'hatch': _HATCHES[(number + number // len(_COLOURS)) % len(_HATCHES)],
  }


def line(number: int) -> dict[str, Any]:
  return {
    'color': colour(number),
    'marker': _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)],
  }


def number_at(axes: Any, x: float, y: float, text: str) -> None:
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


def grid(axes: Any, axis: str) -> None:
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(True, axis=axis, color='#dddddd', linewidth=0.6)
  axes.set_axisbelow(True)


def legend(drawing: Any, names: Sequence[str]) -> None:
  """One legend above all panels."""
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
  )


def check_name(path: files.PathLike, flag: str = '--figure') -> str:
  """The format by the suffix of a figure: 'png' for 'a.png'.

  Raises:
    InputError: an unknown format.
  """
  import matplotlib.backends.backend_agg

  kind = epath.Path(path).suffix.removeprefix('.').lower()
  if kind not in matplotlib.backends.backend_agg.FigureCanvasAgg.get_supported_filetypes():
    raise InputError(f'{flag}={path}: the name must end in .png, .pdf or .svg')
  return kind
