"""The baseline of a training: dev scores before the first step.

They are kept in the workdir, so a resumed run compares with the same numbers. A checkpoint *beats*
the baseline if the 95 % interval of its difference in ``config.eval.measure`` lies above 0. Even
useless training usually yields one checkpoint above the baseline.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import msgspec
import numpy as np
from etils import epath

from dprjax.base import distributed, files, reading
from dprjax.base.counts import counted
from dprjax.retrieval import comparison
from dprjax.training import workdir
from dprjax.training.method import Scores

_FORMAT = 'dprjax.scores'
_LATER = 'dev'  # folder of later evaluations

_HIGH = 0.95  # above this score a gain may be too small to show
_LIKELY = 0.25  # share of the distance to 1; prompts gain less (docs/experiments/gain.md)


class _Scores(msgspec.Struct):
  format: Literal['dprjax.scores']
  means: dict[str, float]
  values: dict[str, list[float]]
  new: dict[str, list[bool]] = {}
  fused: dict[str, list[list[float]]] = {}


class Gain(NamedTuple):
  """A dev score ``best`` and the score of the baseline; also in the meta of a prompt file.

  Attributes:
    measure: ``config.eval.measure``.
    low, high: 95 % interval of ``difference`` by the paired bootstrap over dev queries; None
      without values of single queries.
    queries: the number of dev queries; 0 if unknown.
    better: whether the model beats the baseline.
    folds: number of folds of a cross-validated gain; 0: measured on the dev split.
    new, new_queries: the difference on dev queries without an answer of a training query, and their
      number; None if unknown.
  """

  measure: str
  baseline: float
  best: float
  difference: float
  low: float | None
  high: float | None
  queries: int
  better: bool
  folds: int = 0
  new: float | None = None
  new_queries: int | None = None

  @classmethod
  def read(cls, value: Any, where: str) -> 'Gain | None':
    if value is None:
      return None
    from dprjax.models import artifact

    artifact.check_gain(where, value)
    return cls(**{name: value[name] for name in cls._fields if name in value})

  @property
  def shown(self) -> str:
    """The difference and its interval, ``+0.0123 [-0.0010, +0.0250]``."""
    if self.low is None or self.high is None:
      return f'{self.difference:+.4f}'
    return f'{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]'

  @property
  def verdict(self) -> str:
    interval = ''
    if self.low is not None and self.high is not None:
      queries = counted(self.queries, 'queries')
      interval = f', 95 % interval {self.low:+.4f} to {self.high:+.4f} over {queries}'
    numbers = (
      f'{self.measure} {self.best:.4f} against {self.baseline:.4f} before the training '
      f'({self.difference:+.4f}{interval}){self._on_new_answers}'
    )
    where = f'in cross-validation over {self.folds} folds' if self.folds else 'on the dev split'
    if self.difference <= 0:
      return f'Nothing was gained: no checkpoint is better {where}, {numbers}'
    if not self.better:
      return f'No clear gain {where} (it may be chance): {numbers}'
    return f'A gain {where}: {numbers}'

  @property
  def _on_new_answers(self) -> str:
    if self.new_queries in (None, self.queries):
      return ''
    if self.new is None:
      return '; all of them share an answer with a training query, so new answers are untested'
    queries = counted(self.new_queries, 'queries')
    if self.new <= 0 < self.difference:
      return (
        f'; the gain is on answers seen in training, with {self.new:+.4f} on the {queries} with '
        'new answers'
      )
    return f'; {self.new:+.4f} on the {queries} with new answers'


def compare(measure: str, baseline: Scores, result: Scores) -> Gain:
  before, now = baseline.means[measure], result.means[measure]
  pairs = [
    values - baseline.values[name]
    for name, values in result.values.items()
    if name in baseline.values and len(baseline.values[name]) == len(values) > 0
  ]
  interval: tuple[float | None, float | None] = (None, None)
  better = now > before
  if pairs and len(pairs) == len(result.values):
    _, low, high = comparison.difference(pairs)
    interval, better = (low, high), low > 0
  else:
    pairs = []
  gain = Gain(measure, before, now, now - before, *interval, sum(map(len, pairs)), better)
  if not pairs or result.new.keys() != result.values.keys():
    return gain
  fresh = np.concatenate(pairs)[np.concatenate([result.new[name] for name in result.values])]
  return gain._replace(new=float(fresh.mean()) if len(fresh) else None, new_queries=len(fresh))


def saturated(measure: str, scores: Scores) -> str:
  """The reason why no training could show a gain over these scores; '' if it could.

  The score is at least .95, and a quarter of its distance to 1 is smaller than half of the 95 %
  bootstrap interval of that distance.
  """
  mean, values = scores.means[measure], list(scores.values.values())
  if not _HIGH <= mean <= 1 or not values or any(each.max() > 1 for each in values):
    return ''
  _, low, high = comparison.difference([1 - each for each in values])
  likely, queries = _LIKELY * (1 - mean), sum(map(len, values))
  if likely > (high - low) / 2:
    return ''
  small = f'a gain of {likely:.4f}, a quarter of the distance to 1, would not be significant'
  return (
    f'{measure} is {mean:.4f} on the {queries:,} dev queries before the training, and '
    f'{small if mean < 1 else "no score is higher"}. Use the encoder as it is; to train all the '
    'same: --config.eval.skip_saturated=False'
  )


def scores(folder: epath.Path, evaluate: Callable[[], Scores]) -> Scores:
  """The baseline of a run, as `kept` in its workdir, or measured and written there."""
  result = kept(folder)
  if result is None:
    result = evaluate()
    if jax.process_index() == 0:
      write(folder, result)
    result = result._replace(means=distributed.agree(dict(result.means)))
  return result


def kept(folder: epath.Path, step: int = 0) -> Scores | None:
  """The evaluation from `write`, or None: means on all processes, values on process 0.

  All processes call it.
  """
  main = jax.process_index() == 0
  result = read(folder, step) if main and _path(folder, step).exists() else None
  means = distributed.agree(None if result is None else dict(result.means))
  return None if means is None else (result or Scores({}))._replace(means=means)


def write(folder: epath.Path, scores: Scores, step: int = 0) -> None:
  path = _path(folder, step)
  path.parent.mkdir(exist_ok=True)
  values = {name: each.tolist() for name, each in scores.values.items()}
  new = {name: each.tolist() for name, each in scores.new.items()}
  fused = {name: each.round(6).tolist() for name, each in scores.fused.items()}
  record = {'format': _FORMAT, 'means': dict(scores.means), 'values': values, 'new': new}
  files.write_json(path, record | ({'fused': fused} if fused else {}))


def measured(folder: epath.Path) -> list[int]:
  """The steps with evaluations in a workdir; 0 is the baseline."""
  later = [path.stem for path in (folder / _LATER).glob('*.json')]
  return [0, *sorted(int(name) for name in later if name.isdecimal())]


def _path(folder: epath.Path, step: int) -> epath.Path:
  return folder / _LATER / f'{step}.json' if step else folder / workdir.BASELINE


def read(folder: epath.Path, step: int = 0) -> Scores:
  stored = reading.read(_path(folder, step), 'scores', _Scores)
  return Scores(
    stored.means,
    {name: np.array(each, np.float64) for name, each in stored.values.items()},
    {name: np.array(each, np.bool_) for name, each in stored.new.items()},
    {name: np.array(each, np.float64) for name, each in stored.fused.items()},
  )


def join(parts: Sequence[Scores]) -> Scores:
  """Joins evaluations on parts of a set of queries, without means."""
  values, new, fused = (
    {name: np.concatenate([one[name] for one in several]) for name in several[0]}
    for several in zip(*((part.values, part.new, part.fused) for part in parts), strict=True)
  )
  return Scores({}, values, new, fused)


def metrics(scores: Scores, gain: Gain | None = None) -> Mapping[str, float]:
  values = {f'dev/{name}': value for name, value in scores.means.items()}
  if gain is not None:
    values['dev/gain'] = gain.difference
    if gain.low is not None and gain.high is not None:
      values |= {'dev/gain_low': gain.low, 'dev/gain_high': gain.high}
    if gain.new is not None:
      values['dev/gain_new'] = gain.new
  return values
