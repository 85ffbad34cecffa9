"""Figures about backbones: attention, vectors and scores, and passages in two dimensions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from dprjax.base import files
from dprjax.retrieval import figures

if TYPE_CHECKING:  # it imports JAX, which maps do not need
  from lab.inspection import Findings

_HATCHES = ('', '//', '..', 'xx', '\\\\', 'oo', '++', '--')
_COLOURED = 7  # labels of a map; the last colour is grey, as are the others


def fill(number: int, name: str) -> dict[str, Any]:
  return {
    'label': name,
    'color': figures.colour(number),
    'edgecolor': 'white',
    'linewidth': 0,
    'hatch_linewidth': 0.6,
    'hatch': _HATCHES[(number + number // 8) % len(_HATCHES)],
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


def backbones(findings: 'Mapping[str, Findings]', foot: str, path: files.PathLike) -> None:
  """Panels of attention entropy by layer, alignment against uniformity, and scores on sentences.

  A panel without content is omitted. In the first, the line is the mean over heads, and the band
  reaches from the lowest to the highest head. In the second, of unit vectors, and the third, of
  raw ones, the lower left corner is best, as in Gao et al. 2021 (SimCSE), Figure 2.

  Args:
    findings: by backbone.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.

  Raises:
    InputError: the suffix is of another format.
  """
  parts: list[Any] = []
  if any(found.entropy is not None for found in findings.values()):
    parts.append(lambda axes: _entropies(axes, findings))
  parts += spaces(findings)
  if any(found.scores for found in findings.values()):
    parts.append(lambda axes: _scores(axes, findings))
  with figures.canvas(1.0 + 3.9 * len(parts), 4.0, foot, path) as drawing:
    for part, axes in zip(parts, drawing.subplots(1, len(parts), squeeze=False)[0], strict=True):
      part(axes)
    figures.legend(drawing, list(findings))


def spaces(findings: 'Mapping[str, Findings]') -> list[Callable[[Any], None]]:
  """Functions that draw the panels into axes."""
  titles = {
    'on the unit sphere': [(one.uniformity, one.alignment) for one in findings.values()],
    'raw vectors': [(one.raw_uniformity, one.raw_alignment) for one in findings.values()],
  }
  return [
    functools.partial(_scatter, points=dict(zip(findings, values, strict=True)), title=title)
    for title, values in titles.items()
    if any(None not in value for value in values)
  ]


def maps(
  points: Mapping[str, Float[np.ndarray, 'n 2']],
  labels: Mapping[str, Bool[np.ndarray, 'n C']],
  names: Mapping[str, Sequence[str]],
  foot: str,
  path: files.PathLike,
) -> None:
  """Passages in two dimensions: a row for each backbone, a column for each kind of label.

  A passage has the colour of its most frequent label; all but the 7 most frequent are grey.

  Args:
    points: backbone -> where its passages lie.
    labels: kind -> which passages have which label.
    names: kind -> names of the labels.
    foot: a line in small print.
    path: the file; its suffix (png, pdf, svg) decides the format.

  Raises:
    InputError: the suffix is of another format.
  """
  with figures.canvas(1.0 + 4.6 * len(labels), 0.8 + 3.6 * len(points), foot, path) as drawing:
    panels = drawing.subplots(len(points), len(labels), squeeze=False)
    for column, (kind, marked) in enumerate(labels.items()):
      sizes = marked.sum(axis=0)
      common = [int(i) for i in np.argsort(-sizes, kind='stable')[:_COLOURED] if sizes[i]]
      # The first of the most frequent labels that a passage has; none: the last number.
      first = np.where(marked[:, common].any(axis=1), marked[:, common].argmax(axis=1), len(common))
      for row, (name, where) in enumerate(points.items()):
        axes = panels[row][column]
        others = first == len(common)
        axes.scatter(*where[others].T, s=5, color='#dddddd', linewidths=0)
        for number, label in enumerate(common):
          axes.scatter(
            *where[first == number].T,
            s=7,
            color=figures.colour(number),
            linewidths=0,
            label=figures.short(names[kind][label]),
          )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f'{figures.short(name)}, by {kind}', fontsize=9)
        if row == len(points) - 1:
          axes.legend(
            loc='upper center',
            bbox_to_anchor=(0.5, -0.02),
            ncols=2,
            fontsize=7,
            frameon=False,
            markerscale=2,
          )


def _entropies(axes: Any, findings: 'Mapping[str, Findings]') -> None:
  deepest = 1
  for number, (name, found) in enumerate(findings.items()):
    if (entropy := found.entropy) is not None:
      layers = np.arange(1, len(entropy) + 1)
      deepest = max(deepest, len(layers))
      band = entropy.min(axis=1), entropy.max(axis=1)
      axes.fill_between(layers, *band, color=figures.colour(number), alpha=0.15, linewidth=0)
      axes.plot(layers, entropy.mean(axis=1), label=name, markersize=5, **figures.line(number))
  axes.set_xticks(np.arange(1, deepest + 1, max(1, deepest // 8)))
  axes.set_ylim(bottom=0)
  axes.set_xlabel('layer')
  axes.set_ylabel('entropy of CLS attention (nats)')
  axes.set_title('attention: mean and range of the heads', fontsize=9)
  figures.grid(axes, 'y')


def _scores(axes: Any, findings: 'Mapping[str, Findings]') -> None:
  titles = list(dict.fromkeys(title for found in findings.values() for title in found.scores))
  width = 0.82 / len(findings)
  lowest = 0.0
  for number, (name, found) in enumerate(findings.items()):
    for group, title in enumerate(titles):
      value = found.scores.get(title, float('nan'))
      if not np.isnan(value):
        place = group + (number - (len(findings) - 1) / 2) * width
        axes.bar(place, value, width * 0.92, **fill(number, name))
        number_at(axes, place, max(value, 0), f'{value:.3f}')
        lowest = min(lowest, value)
  axes.set_xlim(-0.6, len(titles) - 0.4)
  axes.set_xticks(np.arange(len(titles)), titles)
  axes.set_ylim(lowest * 1.1, 1.1)
  axes.set_title('sentences', fontsize=9)
  figures.grid(axes, 'y')


def _scatter(
  axes: Any, points: Mapping[str, tuple[float | None, float | None]], title: str
) -> None:
  for number, (name, (uniformity, alignment)) in enumerate(points.items()):
    if alignment is not None and uniformity is not None:
      axes.plot([uniformity], [alignment], label=name, markersize=9, **figures.line(number))
  axes.margins(0.2)
  axes.set_xlabel('uniformity (more even to the left)')
  axes.set_ylabel('alignment (nearer further down)')
  axes.set_title(title, fontsize=9)
  figures.grid(axes, 'both')
