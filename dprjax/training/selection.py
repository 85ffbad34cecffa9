"""Model selection by held-out queries.

Trainings in workdirs below that of the run answer two questions:

- Which of ``config.alternatives``? Each is trained below ``alternatives``. The highest score wins,
  with preference for alternatives that beat their baseline. An alternative that falls behind the
  best so far is stopped.
- How many updates, with too few queries to hold some out? Each fold of the training queries is held
  out once, in a training below ``folds``. The number of updates with the best score over all
  held-out queries is used for the training on all queries, with the same learning-rate schedule.
  The gain is cross-fitted, because the queries that chose the best number overrate it: each fold is
  scored after the number of updates that is best on the other folds.

Alternatives with folds are compared by their folds, and only the best is trained on all queries.
`selection.json` keeps the answers for resumed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax
import ml_collections
import msgspec
from etils import epath

from dprjax.base import distributed, files, reading
from dprjax.base.errors import InputError
from dprjax.models import artifact
from dprjax.training import baseline, checkpoint, stored_config
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from dprjax.training.method import Folds, Scores

if TYPE_CHECKING:
  from dprjax.training import choice as choices

_RACED = 1 / 5  # of the updates; earlier, slow learners would seem worse
_Steps = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Trial(NamedTuple):
  """A training, perhaps one of several in a comparison.

  Attributes:
    whole: whether its parameters are the result of the run; if not, it may end once its gain is
      known.
    rival: the alternative that ends this one if it is ahead.
  """

  config: ml_collections.FrozenConfigDict
  workdir: epath.Path
  whole: bool = True
  rival: Rival | None = None


class Result(NamedTuple):
  """The end of a training.

  Attributes:
    best, best_step: None without a dev split.
    done: False if it was interrupted.
    saturated: whether nothing was trained, since no gain could be significant.
  """

  step: int
  best: float | None
  best_step: int | None
  done: bool = True
  gain: baseline.Gain | None = None
  saturated: bool = False


Train = Callable[[Trial], Result]
"""Trains in the workdir of the part, or continues there."""


class Rival(NamedTuple):
  """The best alternative so far; values of single queries may exist only on process 0."""

  name: str
  scores: Scores

  def beats(self, measure: str, found: Scores, step: int, total: int) -> bool:
    """Whether to stop a training with the scores ``found``. All processes call it.

    True after a fifth of its updates, if the 95 % interval of the lead of the rival lies above 0.
    """
    low = baseline.compare(measure, found, self.scores).low
    return distributed.agree(step >= _RACED * total and low is not None and low > 0)


class _Written(msgspec.Struct):
  format: Literal['dprjax.selection']
  gains: dict[str, dict[str, Any]]
  chosen: str
  steps: _Steps
  schedule: _Steps
  best_steps: tuple[_Steps, ...]


class Chosen(NamedTuple):
  """The selection by held-out queries, kept in `selection.json`.

  Attributes:
    gains: by alternative; under '' the cross-fitted gain of the folds.
    chosen: the alternative; '' without any.
    steps, schedule: after folds, the updates of the training on all queries, and the length of its
      learning-rate schedule.
    best_steps: the best number of updates in each fold; 0 if it gained nothing.
  """

  gains: Mapping[str, baseline.Gain]
  chosen: str = ''
  steps: int = 0
  schedule: int = 0
  best_steps: tuple[int, ...] = ()

  @property
  def gain(self) -> baseline.Gain:
    return self.gains[self.chosen]

  def metrics(self) -> dict[str, float]:
    """The row of the folds in metrics.jsonl."""
    values = {name: getattr(self.gain, name) for name in ('baseline', 'best', 'low', 'high')}
    values |= {'gain': self.gain.difference, 'steps': self.steps}
    return {f'folds/{name}': float(value) for name, value in values.items() if value is not None}

  def write(self) -> dict[str, Any]:
    gains = {name: gain._asdict() for name, gain in self.gains.items()}
    return {'format': workdirs.CHOICE, **self._asdict(), 'gains': gains}

  @classmethod
  def read(cls, value: Mapping[str, Any], where: str) -> Chosen:
    """The inverse of ``write``."""
    found = reading.convert(value, where, _Written)
    gains = {}
    for name, gain in found.gains.items():
      artifact.check_gain(where, gain)
      gains[name] = baseline.Gain(**gain)
    return cls(gains, found.chosen, found.steps, found.schedule, found.best_steps)


def choose_alternative(
  experiments: Mapping[str, ml_collections.FrozenConfigDict],
  workdir: epath.Path,
  train: Train,
  say: Callable[[str], None],
) -> Result:
  """Trains the alternatives, then finishes the best one; returns the last result.

  All processes call it.
  """
  gains: dict[str, baseline.Gain] = {}
  rival: Rival | None = None
  choice = _read(workdir)
  if choice is None:
    for number, (name, config) in enumerate(experiments.items(), start=1):
      folder = workdirs.alternative(workdir, name)
      say(f'alternative {number} of {len(experiments)}, {name}: {folder}')
      result = train(Trial(config, folder, False, rival))
      if not result.done or result.saturated:
        return result
      if result.gain is None:
        raise InputError(f'config.alternatives: {config.method} has no evaluation for a comparison')
      gains[name] = result.gain
      scores = baseline.kept(folder, result.best_step) if result.best_step else None
      if scores is not None and (rival is None or gains[rival.name].best < result.gain.best):
        rival = Rival(name, scores)
    best = max(gains, key=lambda name: (gains[name].better, gains[name].best))
    if jax.process_index() == 0 and all(one.eval.choose for one in experiments.values()):
      folders = {name: workdirs.alternative(workdir, name) for name in experiments}
      kept = decide(workdir, folders)
      best = kept.best_model([*experiments])
    best = distributed.agree(best)
    choice = _keep(workdir, Chosen(gains, best))
    shown = ', '.join(f'{name} {gain.best:.4f} ({gain.shown})' for name, gain in gains.items())
    say(f'chosen: {best}, by {choice.gain.measure} on held-out queries: {shown}')
  chosen = choice.chosen
  result = train(Trial(experiments[chosen], workdirs.alternative(workdir, chosen)))
  if jax.process_index() == 0:
    workdirs.show_held_out(workdir, chosen)
  return result


def decide(workdir: epath.Path, trainings: Mapping[str, epath.Path]) -> choices.Kept:
  """Chooses among all candidates of these trainings and writes the choice. Process 0 calls it."""
  from dprjax.training import choice  # imports BM25

  kept = choice.decide({name: _scored(folder) for name, folder in trainings.items()})
  choice.write(workdir, kept)
  return kept


def _scored(folder: epath.Path) -> list[epath.Path]:
  """The workdirs with the held-out scores of a training: its folds, or its own."""
  folds = folder / workdirs.FOLDS
  if not folds.exists():
    return [folder]
  return sorted(
    (path for path in folds.iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
  )


def choose_steps(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  folds: Folds,
  train: Train,
  say: Callable[[str], None],
) -> Chosen | None:
  """Picks the number of updates by cross-validation; None if interrupted. All processes call it.

  ``config`` has the batch size of `fit`.
  """
  folders = [workdir / workdirs.FOLDS / str(n + 1) for n in range(folds.parts)]
  choice = _read(workdir)
  if choice is None:
    best_steps = []
    for number, folder in enumerate(folders, start=1):
      say(f'fold {number} of {folds.parts}: {folder}')
      result = train(Trial(fold_of(config, workdir, folds, number), folder, False))
      if not result.done:
        return None
      gained = result.gain is not None and result.gain.difference > 0
      best_steps.append((result.best_step or 0) if gained else 0)
    if jax.process_index() == 0:
      steps, gain = best_of(folders, config.eval.measure)
      schedule = fold_of(config, workdir, folds, 1).steps
      choice = Chosen({'': gain}, '', steps, schedule, tuple(best_steps))
    choice = _keep(workdir, choice)
  if jax.process_index() == 0:  # only the evaluations are needed
    for folder in folders:
      (folder / checkpoint.FOLDER).rmtree(missing_ok=True)
  return choice


def fit(config: ml_collections.FrozenConfigDict, folds: Folds, parts: int) -> dict[str, int]:
  """Changes to the config so that the queries of a fold fill the batches of ``parts`` devices."""
  if folds.queries >= config.batch_size:
    return {}
  least = parts * config.grad_cache
  if (size := folds.queries // least * least) == 0:
    raise InputError(
      f'config.batch_size: one of {folds.parts} folds leaves {folds.queries} queries, fewer than '
      f'the {least} of an update (devices by chunks); set config.data.folds=0, or use fewer devices'
    )
  return {'batch_size': size}


def fold_of(
  config: ml_collections.FrozenConfigDict, workdir: epath.Path, folds: Folds, number: int
) -> ml_collections.FrozenConfigDict:
  """The experiment that holds out fold ``number``, from 1.

  All folds have the same updates and evaluations, and share the workdir backbone and constant
  passage vectors.
  """
  epoch = max(folds.queries // (config.batch_size), 1)
  changes: dict[str, Any] = {
    'data.fold': number,
    'steps': config.steps or max(round(config.epochs * epoch), 1),
    'eval.every': configs.evaluate_every(config, epoch),
    'backbone.path': stored_config.backbone_path(config, workdir),
  }
  if config.data.token_cache:
    changes['data.token_cache'] = str(epath.Path(config.data.token_cache) / f'fold-{number}')
  if config.prompt.sides == 'query' and not config.data.passage_embeddings:
    changes['data.passage_embeddings'] = str(workdir / workdirs.PASSAGES)
  return configs.replace(config, changes)


def best_of(folders: Sequence[epath.Path], measure: str) -> tuple[int, baseline.Gain]:
  """The best number of updates over the queries of all folds (the smallest of equals), and the
  cross-fitted gain. Only numbers evaluated in all folds count.
  """
  common = set.intersection(*(set(baseline.measured(folder)) for folder in folders))
  before = [baseline.read(folder) for folder in folders]
  after = {
    step: [baseline.read(folder, step) for folder in folders] for step in sorted(common - {0})
  }

  def best(without: int | None = None) -> int:
    def score(step: int) -> float:
      parts = [part for number, part in enumerate(after[step]) if number != without]
      return float(baseline.join(parts).values[''].mean())

    return max(after, key=score)

  def whole(parts: Sequence[Scores]) -> Scores:
    joined = baseline.join(parts)
    return joined._replace(means={measure: float(joined.values[''].mean())})

  fitted = [after[best(number)][number] for number in range(len(folders))]
  gain = baseline.compare(measure, *map(whole, (before, fitted)))
  return best(), gain._replace(folds=len(folders))


def _read(workdir: epath.Path) -> Chosen | None:
  """Reads the choice in a workdir, on all processes."""
  path, found = workdir / workdirs.SELECTION, None
  if jax.process_index() == 0 and path.exists():
    found = reading.read_json_object(path, 'selection')
    Chosen.read(found, str(path))
  found = distributed.agree(found)
  return None if found is None else Chosen.read(found, str(path))


def _keep(workdir: epath.Path, choice: Chosen | None) -> Chosen:
  """Writes the choice of process 0; returns it on all processes."""
  path, told = workdir / workdirs.SELECTION, None
  if jax.process_index() == 0:
    assert choice is not None
    files.write_json(path, told := choice.write())
  return Chosen.read(distributed.agree(told), str(path))
