"""The number of updates by cross-validation, where too few queries are there to hold some out.

Each part of the training queries is held out once, in a training of its own below ``folds`` in the
workdir. All are measured after the same numbers of updates. The number that is best over all
queries, each measured by the training that had not seen it, is that of the training on all queries;
its learning rate falls as theirs did. (A fold alone has too few queries to say what is best. Where
nothing in it was better than before the first step, its best step is 0.)

The best of some numbers of updates looks better than it is on the queries that chose it. So the
gain that is told is cross-fitted: each part's queries are measured after the number of updates that
is best on all others' queries.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.formats.fields import Record
from dprjax.methods import baseline, query_only
from dprjax.methods.method import Folds, Scores
from dprjax.runtime import checkpoint, distributed
from dprjax.runtime import config as configs
from dprjax.runtime import workdir as workdirs

FOLDER = 'folds'  # of the workdir
_FORMAT = 'dprjax.folds'


class Plan(NamedTuple):
  """What the folds found.

  Attributes:
    steps: updates of the training on all queries.
    schedule: updates over which its learning rate falls.
    best_steps: of the folds alone.
    gain: over all queries, each measured by the training that had not seen it, after the number
      of updates that is best on other parts' queries.
  """

  steps: int
  schedule: int
  best_steps: tuple[int, ...]
  gain: baseline.Gain


def fit(
  config: ml_collections.FrozenConfigDict, folds: Folds, parts: int
) -> ml_collections.FrozenConfigDict:
  """The experiment with batches that the queries of a fold's training can fill.

  Args:
    config: the experiment.
    folds: how many queries a fold leaves.
    parts: devices that split a batch.

  Raises:
    InputError: a fold leaves fewer queries than the devices need.
  """
  if folds.queries >= config.batch_size * config.accumulate:
    return config
  least = parts * config.grad_cache
  if (size := folds.queries // (config.accumulate * least) * least) == 0:
    raise InputError(
      f'config.batch_size: an update of {config.accumulate * least} queries, one for each device '
      f'and chunk, is more than the {folds.queries} that one of {folds.parts} folds leaves; use '
      'config.data.folds=0, or fewer devices'
    )
  fitted = ml_collections.ConfigDict(config.to_dict())
  fitted.batch_size = size
  return ml_collections.FrozenConfigDict(fitted)


def config_of(
  config: ml_collections.FrozenConfigDict, workdir: epath.Path, folds: Folds, number: int
) -> ml_collections.ConfigDict:
  """The experiment that holds out one part, counted from 1.

  All have as many updates, are measured at the same ones, and share what the workdir has made: the
  backbone and the vectors of passages that no training changes.
  """
  one = ml_collections.ConfigDict(config.to_dict())
  epoch = max(folds.queries // (config.batch_size * config.accumulate), 1)
  one.data.fold = number
  one.steps = config.steps or max(round(config.epochs * epoch), 1)
  one.eval.every = configs.evaluate_every(config, epoch)
  if config.data.store:
    one.data.store = str(epath.Path(config.data.store) / f'fold-{number}')
  one.backbone.path = configs.backbone_path(config, workdir)
  if config.prompt.sides == 'query' and not config.data.passage_embeddings:
    one.data.passage_embeddings = str(workdir / query_only.FOLDER)
  return one


def find(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  folds: Folds,
  train: Callable[[ml_collections.ConfigDict, epath.Path, int], int | None],
) -> Plan | None:
  """The plan of a run: kept in its workdir, or found and then kept. All processes call it.

  Args:
    config: the experiment, with batches that `fit`.
    workdir: of the run.
    folds: how many parts.
    train: ``(config, workdir, number) -> best step``, a training in a workdir of its own, which
      goes on where it stopped; None where it was asked to stop. A step that does not beat the
      baseline is 0.

  Returns:
    None where a training was asked to stop.

  Raises:
    InputError: what is kept there cannot be read; whatever ``train`` raises.
  """
  path, main = workdir / workdirs.FOLDS, jax.process_index() == 0
  plan = _read(path) if main and path.exists() else None
  folders = [epath.Path(workdir) / FOLDER / str(n + 1) for n in range(folds.parts)]
  if not distributed.agree(plan is not None):
    best_steps = []
    for number, folder in enumerate(folders, start=1):
      best = train(config_of(config, workdir, folds, number), folder, number)
      if best is None:
        return None
      best_steps.append(best)
    schedule = config_of(config, workdir, folds, 1).steps
    if main:
      steps, gain = best_of(folders, config.eval.measure)
      plan = Plan(steps, schedule, tuple(best_steps), gain)
      files.write_json(path, _asdict(plan))
  if main:  # what was measured is all that is needed of them; encoders are large
    for folder in folders:
      (folder / checkpoint.FOLDER).rmtree(missing_ok=True)
  told = None if plan is None else _asdict(plan)
  return _plan(distributed.agree(told), str(path))


def best_of(folders: Sequence[epath.Path], measure: str) -> tuple[int, baseline.Gain]:
  """The number of updates that is best over all folds' queries, and the cross-fitted gain.

  Of equal ones the smallest. A fold that stopped early has fewer evaluations; only those that all
  have are compared.
  """
  common = set.intersection(*(set(baseline.measured(folder)) for folder in folders))
  before = [baseline.read(folder, measure) for folder in folders]
  after = {
    step: [baseline.read(folder, measure, step) for folder in folders]
    for step in sorted(common - {0})
  }

  def best(without: int | None = None) -> int:
    def score(step: int) -> float:
      parts = [part for number, part in enumerate(after[step]) if number != without]
      return _joined(parts, measure).means[measure]

    return max(after, key=score)

  fitted = [after[best(number)][number] for number in range(len(folders))]
  gain = baseline.compare(measure, _joined(before, measure), _joined(fitted, measure))
  return best(), gain._replace(folds=len(folders))


def metrics(plan: Plan) -> dict[str, float]:
  """A plan's row of metrics.jsonl."""
  found = {name: getattr(plan.gain, name) for name in ('baseline', 'best', 'low', 'high')}
  found |= {'gain': plan.gain.difference, 'steps': plan.steps}
  return {f'folds/{name}': float(value) for name, value in found.items() if value is not None}


def _joined(parts: Sequence[Scores], measure: str) -> Scores:
  """Evaluations on parts of one set of queries as one on all of them."""
  values = np.concatenate([part.values[''] for part in parts])
  return Scores({measure: float(values.mean())}, {'': values})


def _asdict(plan: Plan) -> dict[str, Any]:
  return {
    'format': _FORMAT,
    **plan._asdict(),
    'best_steps': list(plan.best_steps),
    'gain': plan.gain._asdict(),
  }


def _read(path: epath.Path) -> Plan:
  """The file of `find`. Raises InputError where it is something else."""
  try:
    return _plan(reading.read_json_object(path, 'folds'), str(path))
  except InputError as error:
    raise InputError(f'{error}; remove that file, and the folds are looked at again') from error


def _plan(value: dict[str, Any], where: str) -> Plan:
  record = Record(value, where)
  record.choice('format', _FORMAT)
  most = 10**9
  steps, schedule = (record.whole(name, 1, most) for name in ('steps', 'schedule'))
  best = value.get('best_steps')
  if not isinstance(best, list) or not all(type(n) is int and 0 <= n <= most for n in best):
    raise InputError(f"{where}: 'best_steps' is {best!r:.40}; expected a list of steps")
  gain = baseline.Gain.read(record.record('gain').values, where)
  assert gain is not None
  return Plan(steps, schedule, tuple(best), gain)
