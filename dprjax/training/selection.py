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
from typing import Annotated, Any, Literal

import jax
import ml_collections
import msgspec
from etils import epath

from dprjax.base import distributed, files, reading
from dprjax.base.errors import InputError
from dprjax.models import artifact
from dprjax.training import baseline, checkpoint
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from dprjax.training.loop import Chosen, Result, Rival, Trial
from dprjax.training.method import Folds, Scores

_Steps = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


Train = Callable[[Trial], Result]
"""Trains in the workdir of the part, or continues there."""


class _Written(msgspec.Struct):
  format: Literal['dprjax.selection']
  gains: dict[str, dict[str, Any]]
  chosen: str
  steps: _Steps
  schedule: _Steps
  best_steps: tuple[_Steps, ...]


def _parse(value: Mapping[str, Any], where: str) -> Chosen:
  stored = reading.convert(value, where, _Written)
  gains = {}
  for name, gain in stored.gains.items():
    artifact.check_gain(where, gain)
    gains[name] = baseline.Gain(**gain)
  return Chosen(gains, stored.chosen, stored.steps, stored.schedule, stored.best_steps)


def choose_alternative(
  experiments: Mapping[str, ml_collections.FrozenConfigDict],
  workdir: epath.Path,
  train: Train,
  say: Callable[[str], None],
) -> Result:
  """Trains the alternatives, then finishes the best one. All processes call it."""
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
      from dprjax.training import choice as choices  # imports BM25

      folders = {name: workdirs.alternative(workdir, name) for name in experiments}
      decision = choices.decide({name: workdirs.scored(folder) for name, folder in folders.items()})
      choices.write(workdir, decision)
      best = decision.best_model([*experiments])
    best = distributed.agree(best)
    choice = _keep(workdir, Chosen(gains, best))
    shown = ', '.join(f'{name} {gain.best:.4f} ({gain.shown})' for name, gain in gains.items())
    say(f'chosen: {best}, by {choice.gain.measure} on held-out queries: {shown}')
  chosen = choice.chosen
  result = train(Trial(experiments[chosen], workdirs.alternative(workdir, chosen)))
  if jax.process_index() == 0:
    workdirs.show_held_out(workdir, chosen)
  return result


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
    'backbone.path': workdirs.backbone_path(config, workdir),
  }
  if config.data.token_cache:
    changes['data.token_cache'] = str(epath.Path(config.data.token_cache) / f'fold-{number}')
  if config.prompt.sides == 'query' and not config.data.passage_embeddings:
    changes['data.passage_embeddings'] = str(workdir / workdirs.PASSAGES)
  return configs.replace(config, changes)


def best_of(folders: Sequence[epath.Path], measure: str) -> tuple[int, baseline.Gain]:
  """The best number of updates over the queries of all folds, and the cross-fitted gain."""
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
  path, record = workdir / workdirs.SELECTION, None
  if jax.process_index() == 0 and path.exists():
    record = reading.read_json_object(path, 'selection')
    _parse(record, str(path))
  record = distributed.agree(record)
  return None if record is None else _parse(record, str(path))


def _keep(workdir: epath.Path, choice: Chosen | None) -> Chosen:
  path, told = workdir / workdirs.SELECTION, None
  if jax.process_index() == 0:
    assert choice is not None
    gains = {name: gain._asdict() for name, gain in choice.gains.items()}
    told = {'format': workdirs.CHOICE, **choice._asdict(), 'gains': gains}
    files.write_json(path, told)
  return _parse(distributed.agree(told), str(path))
