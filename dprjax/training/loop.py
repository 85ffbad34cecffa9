"""The loop of a training: setup, state and steps."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import ml_collections
import numpy as np
from etils import epath

from dprjax.base import distributed, mesh, stopping, tree
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import PASSING, Progress, duration, rounded
from dprjax.models import hub
from dprjax.text.batches import open_batches
from dprjax.training import baseline, checkpoint, log, updates
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training import workdir as workdirs

logger = logging.getLogger('dprjax')


_RACED = 1 / 5  # of the updates; earlier, slow learners would seem worse


class Rival(NamedTuple):
  """The best alternative so far; values of single queries may exist only on process 0."""

  name: str
  scores: methods.Scores

  def beats(self, measure: str, scores: methods.Scores, step: int, total: int) -> bool:
    """Whether to stop a training with these ``scores``. All processes call it.

    True after a fifth of its updates, if the 95 % interval of the lead of the rival lies above 0.
    """
    low = baseline.compare(measure, scores, self.scores).low
    return distributed.agree(step >= _RACED * total and low is not None and low > 0)


class Trial(NamedTuple):
  """A training, perhaps one of several in a comparison.

  Attributes:
    whole: whether its parameters are the result of the run; else it may end once its gain is known.
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

  @property
  def shown(self) -> str:
    """The choice of a number of updates, for the log."""
    of_folds = ', '.join(str(best) if best else 'no gain' for best in self.best_steps)
    return (
      f'folds: {counted(self.steps, "updates")} are best over all {len(self.best_steps)} (best '
      f'of each: {of_folds}); cross-fitted gain {self.gain.shown} on {self.gain.baseline:.4f} '
      f'before; now {self.steps} of {self.schedule} updates on all queries'
    )

  def metrics(self) -> dict[str, float]:
    values = {name: getattr(self.gain, name) for name in ('baseline', 'best', 'low', 'high')}
    values |= {'gain': self.gain.difference, 'steps': self.steps}
    return {f'folds/{name}': float(value) for name, value in values.items() if value is not None}


class Setup(NamedTuple):
  """A training before its first step.

  ``params`` are the initial parameters by flat names, ``trainable`` the names of trained ones.
  ``say`` logs a line, on process 0 for the user. ``folds`` are for few training queries.
  """

  config: ml_collections.FrozenConfigDict
  workdir: epath.Path
  devices: jax.sharding.Mesh
  backbone: hub.Backbone
  model: methods.Model
  params: Mapping[str, Any]
  trainable: set[str]
  data: methods.TrainingData
  say: Callable[[str], None]
  folds: methods.Folds | None = None


@dataclasses.dataclass
class Standing:
  """Dev results so far, kept in every checkpoint.

  Attributes:
    gain: of the best score over the baseline; before the first score, that of the folds.
    stale: evaluations since the best one.
    note: on the best scores.
    beaten: the rival in the lead.
  """

  best: float | None = None
  best_step: int | None = None
  gain: baseline.Gain | None = None
  stale: int = 0
  note: str = ''
  beaten: str = ''
  stopped: bool = False

  @classmethod
  def read(cls, extra: Mapping[str, Any], where: str) -> Self:
    gain = baseline.Gain.read(extra.get('gain'), where)
    names = ('best', 'best_step', 'stale', 'note', 'beaten', 'stopped')
    return cls(gain=gain, **{name: extra[name] for name in names if name in extra})

  def write(self) -> dict[str, Any]:
    gain = None if self.gain is None else self.gain._asdict()
    return dataclasses.asdict(self) | {'gain': gain}

  def take(self, score: float, step: int, gain: baseline.Gain, patience: int, beaten: str) -> bool:
    better = self.best is None or score > self.best
    if better:
      self.best, self.best_step, self.gain, self.stale = score, step, gain, 0
    else:
      self.stale += 1
    self.beaten = beaten or self.beaten
    self.stopped = bool(self.beaten) or 0 < patience <= self.stale
    return better


class Loop:
  """A training, from its latest checkpoint or its start. A context that closes its files.

  ``step`` is the last finished step of ``total``.
  """

  def __init__(self, setup: Setup, part: Trial, choice: Chosen | None = None):
    """``choice`` is the result of cross-validation."""
    config, data = setup.config, setup.data
    self._setup, self._part, self._choice = setup, part, choice
    self._main = jax.process_index() == 0
    epoch = len(data.batches)
    schedule_steps = self.total = config.steps or max(round(config.epochs * epoch), 1)
    if choice is not None:
      schedule_steps, self.total = choice.schedule, choice.steps
    self._schedule = updates.make_schedule(config.optim, schedule_steps)
    self._every = configs.evaluate_every(config, epoch)
    self._save_every = config.checkpoint.every or epoch

    layout = updates.lay_out(
      config,
      setup.params,
      setup.trainable,
      setup.devices,
      schedule_steps,
      epoch * setup.config.batch_size,
      (*setup.model.sharding, *setup.backbone.config.family.sharding),
    )
    self._state, self._frozen = layout.place(setup.params)
    self._untrained = {**self._frozen, **self._state.trainable}
    self._update = updates.make_update(setup.model, layout)
    whole = mesh.replicated(setup.devices)
    self._constants = self._frozen | {
      name: mesh.put(array, whole) for name, array in data.arrays.items()
    }
    self._key = jax.random.key(config.seed)

    self._batches = open_batches(data.batches)
    self._saved = checkpoint.Checkpoints(setup.workdir, setup.backbone.sha256)
    self.step, self.standing = 0, Standing(gain=choice and choice.gain)
    self._resumed = self._restore()
    describe(setup, self._state, self._frozen, self.total)
    if self.step:
      done = ', the last one' if self.step == self.total else ''
      done = done or (', where training ended' if self.standing.stopped else '')
      setup.say(f'resuming after step {self.step} of {self.total}{done}')
    self._evaluate = data.evaluation(setup.model) if data.evaluation else None
    # Without a checkpoint, metrics of step 0 are written again.
    self._metrics = log.MetricLog(
      setup.workdir, self.step if self._resumed else -1, config, active=self._main
    )
    self._progress = Progress('steps', self.total, _part_of(setup.workdir), skip_first=True)
    self._stop = stopping.Stop(setup.devices)
    self._lengths: set[tuple[int, ...]] = set()
    # The loss of a step is read while the next step runs, but before anything is saved.
    self._unread: deque[tuple[int, Any, Any]] = deque()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
    if error is not None:  # other processes must not wait for this one
      distributed.leave(error)
    self._stop.restore()
    self._metrics.close()
    self._batches.close()
    self._saved.close()

  @property
  def evaluates(self) -> bool:
    return self._evaluate is not None

  @property
  def goes_on(self) -> bool:
    return self.step < self.total and not self.standing.stopped

  def baseline(self) -> methods.Scores:
    """The dev scores of the baseline, by the evaluation of this training."""
    assert self._evaluate is not None
    scores = self._evaluate(self._setup.model.baseline(self._untrained))
    return self._setup.data.floor(scores)

  def begin(self, start: methods.Scores | None) -> None:
    """Logs the baseline ``start``, if there is a dev split."""
    self._start, say = start if self.evaluates else None, self._setup.say
    if self._choice is not None:
      if not self._resumed:
        self._metrics.write(0, self._choice.metrics())
      say(self._choice.shown)
    if self._start is not None and not self._resumed:
      self._metrics.write(0, baseline.metrics(self._start))
      by_training = self._setup.data.frozen is None
      whose = 'before the training' if by_training else 'dprjax encode without a prompt'
      say(f'step 0/{self.total}  dev {shown_scores(self._start)}  ({whose})')
    self._shorter: methods.Scores | None = None
    if self._start is not None and self._setup.data.shorter():
      self._shorter = baseline.scores(self._setup.workdir / workdirs.SHORTER, self.baseline)
      if not self._resumed:
        say(
          f'step 0/{self.total}  dev {shown_scores(self._shorter)}  (the same with equal lengths)'
        )

  def advance(self) -> None:
    batch = next(self._batches)
    lengths = tuple(rows.shape[-1] for name, rows in batch.items() if name.endswith('_tokens'))
    if lengths not in self._lengths:
      self._lengths.add(lengths)
      words = ' and '.join(map(str, lengths))
      self._setup.say(f'step {self.step + 1}: compiling for texts of {words} tokens')
    placed = mesh.put_batch(self._setup.devices, batch)
    self.step += 1
    self._progress.show(self.step)
    self._state, metrics = self._update(self._state, self._constants, placed, self._key, self.step)
    indices = {name: rows for name, rows in batch.items() if name.endswith('_index')}
    self._unread.append((self.step, metrics, indices))
    if len(self._unread) > 1:
      self._read_one()

  def evaluate(self) -> float | None:
    """Scores the dev split if it is due, and compares with the baseline."""
    if self._evaluate is None or (self.step % self._every and self.step != self.total):
      return None
    assert self._start is not None
    config, began = self._setup.config, time.monotonic()
    self._read_all()
    scores = self._evaluate({**self._frozen, **self._state.model})
    gain = baseline.compare(config.eval.measure, self._start, scores)
    # Process 0 decides, so that all stop at the same step.
    means, numbers = distributed.agree([dict(scores.means), gain._asdict()])
    scores, gain = scores._replace(means=means), baseline.Gain(**numbers)
    score = means[config.eval.measure]
    beaten, rival = '', self._part.rival
    if rival is not None and rival.beats(config.eval.measure, scores, self.step, self.total):
      beaten = rival.name
    better = self.standing.take(score, self.step, gain, config.eval.patience, beaten)
    if better:
      notes = [scores.note]
      if self._shorter is not None:
        equal = baseline.compare(config.eval.measure, self._shorter, scores)
        notes.append(f'{equal.shown} on {equal.baseline:.4f} of the encoder with equal lengths')
      self.standing.note = '; '.join(filter(None, notes))
    self._progress.pause(time.monotonic() - began)
    self._metrics.write(self.step, baseline.metrics(scores, gain))
    if self._main and (config.eval.choose or not self._part.whole):  # kept for comparisons
      baseline.write(self._setup.workdir, scores, self.step)
    best = self.standing
    words = 'best so far' if better else f'best {best.best:.4f} at step {best.best_step}'
    if best.gain is not None and best.gain.difference <= 0:
      words = 'none better than before'
    self._setup.say(
      f'step {self.step}/{self.total}  dev {shown_scores(scores)}  ({words})  {gain.shown} on '
      f'{gain.baseline:.4f} before  {duration(time.monotonic() - began)}'
    )
    return score

  def save(self, score: float | None) -> bool:
    """Saves if it is due or the process is asked to stop; returns whether to stop."""
    due = self.step % self._save_every == 0 or self.step == self.total
    if due or score is not None or self.standing.stopped:
      self._save(score)
    if not self._stop():
      return False
    self._save(score)
    self._saved.wait()
    why = ' (SIGTERM)' if self._stop.signalled else ''
    self._setup.say(f'asked to stop{why}: saved step {self.step}; run the same command to continue')
    return True

  def result(self) -> Result:
    standing = self.standing
    done = self.step == self.total or standing.stopped
    return Result(self.step, standing.best, standing.best_step, done, standing.gain)

  @property
  def ended(self) -> str:
    """The last step, the reason for stopping, and the best score."""
    standing, words = self.standing, f'done at step {self.step}'
    if standing.beaten:
      words = f'stopped early: behind {standing.beaten}; {words}'
    elif standing.stopped:
      stale = counted(standing.stale, 'evaluations')
      words = f'stopped early: no gain in the last {stale}; {words}'
    if standing.best_step:
      measure = self._setup.config.eval.measure
      words += f'; best dev {measure} {standing.best:.4f} at step {standing.best_step}'
    if standing.note:
      words += f' ({standing.note})'
    return words

  def finish(self) -> None:
    self._read_all()
    self._saved.wait()

  def _restore(self) -> bool:
    latest = self._saved.latest()
    if latest is None:
      return False
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
    )
    restored = self._saved.restore(latest, target.model, target.rest)
    self.step = latest
    self._state = self._state.restored(restored.trainable, restored.opt_state)
    self._batches.set_state(restored.extra['data'])
    self.standing = Standing.read(restored.extra, f'{self._saved.folder}/{self.step}')
    return True

  def _save(self, score: float | None) -> None:
    self._read_all()
    extra = {
      'data': self._batches.get_state(),
      'seed': self._setup.config.seed,
      **self.standing.write(),
    }
    self._saved.save(self.step, self._state.model, self._state.rest, extra, score)

  def _read_all(self) -> None:
    while self._unread:
      self._read_one()

  def _read_one(self) -> None:
    number, metrics, batch = self._unread.popleft()
    setup, values = self._setup, {name: float(value) for name, value in metrics.items()}
    wrong = [
      name for name in ('loss', 'gradient_norm', 'update_norm') if not np.isfinite(values[name])
    ]
    if wrong:
      self._saved.wait()
      raise InputError(
        f'step {number}: the {wrong[0].replace("_", " ").replace(" norm", "")} is not finite '
        f'(loss {values["loss"]:g}, gradient norm {values["gradient_norm"]:g}); the last good '
        f'checkpoint is step {self._saved.latest() or "none"} in {self._saved.folder}; lower '
        f'config.optim.learning_rate, or look at {setup.data.ids(batch)}'
      )
    if number % setup.config.log_every and number != self.total:
      return
    self._progress.update(number)
    rate, unit = self._progress.rate * setup.config.batch_size, setup.data.unit
    values |= {'learning_rate': float(self._schedule(number - 1)), f'{unit}_per_second': rate}
    self._metrics.write(number, values)
    named = setup.model.shown.items()
    shown = ''.join(f'  {label} {values[name]:.3f}' for name, label in named if name in values)
    left = f'  {rate:.0f} {unit}/s  {duration(self._progress.left or 0)} left' if rate else ''
    line = f'step {number}/{self.total}  loss {values["loss"]:.4f}{shown}{left}'
    logger.log(logging.INFO if self._main else logging.DEBUG, '%s', line, extra=PASSING)


def _part_of(workdir: epath.Path) -> str:
  """The name of a training for progress: 'training', or 'training query fold 2' of several."""
  inside = workdir.relative_to(workdirs.top(workdir)).parts
  names = {workdirs.FOLDS: 'fold', workdirs.ALTERNATIVES: ''}
  return ' '.join(['training', *(word for part in inside if (word := names.get(part, part)))])


def shown_scores(scores: methods.Scores) -> str:
  return '  '.join(f'{name} {value:.4f}' for name, value in scores.means.items())


def describe(setup: Setup, state: updates.State, frozen: Mapping[str, Any], total: int) -> None:
  config, devices, say = setup.config, setup.devices, setup.say
  trained, held = tree.count(state.trainable), tree.count(frozen)
  device = devices.devices.flat[0]
  axes = ' x '.join(f'{axis} {count}' for axis, count in devices.shape.items())
  processes = jax.process_count()
  name = device.device_kind
  kind = f'{device.platform} devices' + (f' ({name})' if name != device.platform else '')
  say(
    f'{config.method}{f" ({config.task})" if config.task else ""}: {rounded(trained)} trained '
    f'parameters ({100 * trained / (trained + held):.2f} %, '
    f'{rounded(tree.nbytes(state.trainable), "B")}; optimiser '
    f'{rounded(tree.nbytes(state.opt_state), "B")}), {rounded(held)} frozen '
    f'({rounded(tree.nbytes(frozen), "B")})'
  )
  say(f'{counted(devices.size, kind)}, mesh {axes}, {counted(processes, "processes")}')
  say(
    f'{setup.data.description}; {counted(setup.config.batch_size, setup.data.unit)} an update'
    + f', {counted(len(setup.data.batches), "updates")} an epoch, {total} in all'
  )
