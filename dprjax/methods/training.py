"""The training loop: one for all methods."""

import functools
import logging
import shlex
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration, size
from dprjax.data import text
from dprjax.data.batches import open_batches
from dprjax.formats import seen
from dprjax.methods import alternatives, baseline, folds, updates
from dprjax.methods import method as methods
from dprjax.models import artifact, hub
from dprjax.models.head_specs import HEADS, Head
from dprjax.runtime import checkpoint, compiled, distributed, log, mesh, optim, stopping, tree
from dprjax.runtime import config as configs
from dprjax.runtime import workdir as workdirs

logger = logging.getLogger('dprjax')

# Vocabularies for a backbone from scratch, and the architecture that goes with each.
VOCABULARIES = {
  'wordpiece': (text.train_wordpiece, 'bert'),
  'sentencepiece': (text.train_sentencepiece, 'xlm-roberta'),
}


class Result(NamedTuple):
  """How a run ended.

  Attributes:
    step: the last one.
    best: the best score on the dev split; None where there is no such split.
    best_step: its step.
    done: False where the run was stopped before its end.
    gain: the best score beside that before the first step.
    saturated: whether nothing was trained, since no gain could be told from chance.
  """

  step: int
  best: float | None
  best_step: int | None
  done: bool = True
  gain: baseline.Gain | None = None
  saturated: bool = False


def train(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> Result:
  """Trains as ``config`` says, in ``workdir``, from its latest checkpoint if there is one.

  Raises:
    InputError: the config, the data or the workdir cannot be used as they are, or the loss is not
      finite.
  """
  main = jax.process_index() == 0
  configs.check(config)
  devices = mesh.make_mesh(config.mesh)
  for name, one in alternatives.resolve(config).items():
    try:
      method = check(one, devices)
    except InputError as error:
      raise InputError(f'alternative {name}: {error}' if name else str(error)) from error
  if distributed.agree(configs.to_json(config)) != configs.to_json(config):
    raise InputError(
      f'process {jax.process_index()} was started with another --config than process 0; give all '
      'of them the same'
    )
  inputs = workdirs.inputs(config)
  workdirs.check_folders(config, inputs)
  with workdirs.claim(workdir, workdirs.TRAINING, inputs, lock=main) as claimed:
    if config.alternatives:
      return _train_best(config, claimed, devices)
    return _train(ml_collections.FrozenConfigDict(config), claimed, method, devices)


def check(config: ml_collections.ConfigDict, devices: jax.sharding.Mesh) -> methods.Method:
  """The method of an experiment; raises InputError for knobs that do not go together."""
  configs.check(config)
  method = methods.load(config.method)
  method.check(config)
  update_size = config.batch_size * config.accumulate
  mesh.check_batch(devices, update_size, config.grad_cache * config.accumulate)
  return method


def _train_best(
  config: ml_collections.ConfigDict, workdir: epath.Path, devices: jax.sharding.Mesh
) -> Result:
  """``train`` with alternatives: all of them, then the best one to its end."""
  main = jax.process_index() == 0
  (configs.claim_workdir if main else configs.check_workdir)(config, workdir)
  results: list[Result] = []

  def train_one(
    one: ml_collections.ConfigDict,
    folder: epath.Path,
    whole: bool,
    rival: alternatives.Rival | None = None,
  ) -> alternatives.Trained:
    method, inputs = methods.load(one.method), workdirs.inputs(one)
    with workdirs.claim(folder, workdirs.TRAINING, inputs, lock=main) as claimed:
      frozen = ml_collections.FrozenConfigDict(one)
      results.append(_train(frozen, claimed, method, devices, whole, rival))
    last = results[-1]
    scores = baseline.kept(folder, one.eval.measure, last.best_step) if last.best_step else None
    return alternatives.Trained(last.done and not last.saturated, last.gain, scores)

  say = logger.info if main else logger.debug
  best = alternatives.choose(config, workdir, train_one, say)
  if best is not None:
    one = alternatives.resolve(config)[best]
    train_one(one, workdirs.alternative(workdir, best), True)
  if main and results:
    workdirs.show_held_out(workdir, config)
  return results[-1]


def _train(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  method: methods.Method,
  devices: jax.sharding.Mesh,
  whole: bool = True,
  rival: alternatives.Rival | None = None,
) -> Result:
  """``train`` in a workdir that this command holds.

  If it is not to be the ``whole`` of it, it is one of some alternatives. Where the number of
  updates is found by folds, it then ends where that is known; elsewhere, where the ``rival`` beats
  it.
  """
  given, platform = config, devices.devices.flat[0].platform
  config = ml_collections.FrozenConfigDict(configs.settle(given, platform))
  main = jax.process_index() == 0
  say = logger.info if main else logger.debug
  update_size = config.batch_size * config.accumulate
  configs.check_workdir(given, workdir)
  compiled.keep(config.compilation_cache)

  # Text, backbone, parameters: all that can be checked before anything is kept.
  path = configs.backbone_path(config, workdir)
  with distributed.turn():
    texts = method.data(config.data, config, workdir, devices)
    if path == config.backbone.path:
      hub.check_readable(path)
    if main:
      configs.claim_workdir(given, workdir)
    make_backbone(config, workdir, texts.read, method.needs)
  if texts.folds is not None:
    config = folds.fit(config, texts.folds, mesh.batch_devices(devices))
    if config.batch_size < given.batch_size:
      say(
        f'a fold leaves {counted(texts.folds.queries, "training queries")}: config.batch_size is '
        f'{config.batch_size}'
      )
      update_size = config.batch_size * config.accumulate
  backbone = hub.load_backbone(path, heads=method.parts)
  tokenizer = text.load_tokenizer(backbone.path)
  hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
  model = method.build(config, backbone.config, devices, tokenizer)
  key = jax.random.key(config.seed)
  prompt = None
  if config.prompt.init_from:
    prompt = artifact.load_prompt_for(config.prompt.init_from, tokenizer.sha256, backbone)
  parts = methods.Parts(backbone.params, backbone.heads, prompt, texts.parts, backbone.sha256)
  params = tree.flatten(model.init(parts, jax.random.fold_in(key, 0)))
  names = tree.trainable_names(config.trainable, list(params))
  optim.match_rules(config.optim, names)
  if main:
    workdirs.begin(workdir, {**texts.files, **workdirs.model_files(config, backbone.path)})
    if prompt is not None and prompt.queries:
      seen.write(workdir / 'queries-init_from.npz', prompt.queries)

  # Token arrays.
  data = texts.open(tokenizer, backbone.config)
  epoch = len(data.batches)
  schedule_steps = total = config.steps or max(round(config.epochs * epoch), 1)
  plan = start = None
  if data.frozen is not None:
    start = baseline.scores(workdir, config.eval.measure, data.frozen)
    if nothing_left(config, workdir, start, say):
      return Result(0, None, None, saturated=True)
  if texts.folds is not None:
    plan = folds.find(
      config, workdir, texts.folds, functools.partial(train_fold, method, devices, say)
    )
    if plan is None:
      return Result(0, None, None, done=False)
    if not whole:
      return Result(0, None, None, gain=plan.gain)
    schedule_steps, total = plan.schedule, plan.steps
  every = configs.evaluate_every(config, epoch)
  save_every = config.checkpoint.every or epoch

  # The trainable parameters go to the optimiser, the frozen ones stay apart.
  layout = updates.lay_out(
    config,
    params,
    names,
    devices,
    schedule_steps,
    epoch * update_size,
    (*model.sharding, *backbone.config.family.sharding),
  )
  state, frozen = layout.place(params)
  untrained = {**frozen, **state.trainable}
  schedule = optim.make_schedule(config.optim, schedule_steps)
  update = updates.make_update(
    model, layout.optimizer, list(frozen), layout.ema, layout.interpolate
  )
  constants = frozen | {
    name: mesh.put(array, mesh.replicated(devices)) for name, array in data.arrays.items()
  }

  # Where an earlier run of this command stopped.
  batches = open_batches(data.batches, config.data.threads)
  saved = checkpoint.Checkpoints(workdir, backbone.sha256, config.checkpoint.keep)
  step = 0
  best, best_step, stale, stopped, beaten, spent = None, None, 0, False, '', 0.0
  gain = None if plan is None else plan.gain  # of the best, or of the folds
  latest = saved.latest()
  if latest is not None:
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = saved.restore(latest, target.model, target.rest)
    step, state = restored.step, state.restored(restored.trainable, restored.opt_state)
    batches.set_state(restored.extra['data'])
    best, best_step, stale, stopped = (
      restored.extra[name] for name in ('best', 'best_step', 'stale', 'stopped')
    )
    gain = baseline.Gain.read(restored.extra.get('gain'), f'{saved.folder}/{step}')
    beaten, spent = restored.extra.get('beaten', ''), restored.extra.get('seconds', 0.0)

  describe(config, say, state, frozen, devices, data, total)
  if step:
    done = ', the last one' if step == total else ', where training ended' if stopped else ''
    say(f'resuming after step {step} of {total}{done}')
  evaluate = data.evaluation(model) if data.evaluation else None
  # Without a checkpoint the baseline's row, that of step 0, is written again too.
  metric_log = log.MetricLog(workdir, -1 if latest is None else step, active=main)
  progress = Progress('steps', total, skip_first=True)
  began_at = time.monotonic() - spent
  stop = stopping.Stop(devices)
  # A step's loss is read while the next step runs, and always before anything is saved.
  unread: deque[tuple[int, Any, Any]] = deque()

  def read_one() -> None:
    number, metrics, batch = unread.popleft()
    values = {name: float(value) for name, value in metrics.items()}
    wrong = [
      name for name in ('loss', 'gradient_norm', 'update_norm') if not np.isfinite(values[name])
    ]
    if wrong:
      saved.wait()
      raise InputError(
        f'step {number}: the {wrong[0].replace("_", " ").replace(" norm", "")} is not finite (loss '
        f'{values["loss"]:g}, gradient norm {values["gradient_norm"]:g}); the last good checkpoint '
        f'is step {saved.latest() or "none"} in {saved.folder}; lower config.optim.learning_rate, '
        f'or look at these texts: {data.ids(batch)}'
      )
    if number % config.log_every and number != total:
      return
    progress.update(number)
    rate = progress.rate * update_size
    values |= {'learning_rate': float(schedule(number - 1)), f'{data.unit}_per_second': rate}
    metric_log.write(number, values)
    say(
      f'step {number}/{total}  loss {values["loss"]:.4f}  '
      + ''.join(f'{label} {values[name]:.3f}  ' for name, label in model.shown.items())
      + f'|gradient| {values["gradient_norm"]:.3g}  lr {values["learning_rate"]:.2e}'
      + (f'  {rate:.0f} {data.unit}/s  {duration(progress.left or 0)} left' if rate else '')
    )

  def read_all() -> None:
    while unread:
      read_one()

  def save(score: float | None = None) -> None:
    read_all()
    extra = {
      'data': batches.get_state(),
      'best': best,
      'best_step': best_step,
      'stale': stale,
      'stopped': stopped,
      'beaten': beaten,
      'gain': None if gain is None else gain._asdict(),
      'seconds': time.monotonic() - began_at,
      'seed': config.seed,
    }
    saved.save(step, state.model, state.rest, extra, score)

  try:
    shapes: set[str] = set()
    if plan is not None:
      if latest is None:
        metric_log.write(0, folds.metrics(plan))
      alone = ', '.join(str(best) if best else 'no gain' for best in plan.best_steps)
      say(
        f'folds: {counted(total, "updates")} are best over all {len(plan.best_steps)} (by each '
        f'alone: {alone}); gain {plan.gain.shown} on {plan.gain.baseline:.4f} before, where the '
        f"number of updates is the other folds' choice; now {total} of {schedule_steps} updates on "
        'all queries'
      )
    if evaluate is not None:
      whose = 'before the training' if start is None else 'dprjax encode without a prompt'
      if start is None:
        start = baseline.scores(
          workdir, config.eval.measure, lambda: evaluate(model.baseline(untrained))
        )
        if nothing_left(config, workdir, start, say):
          return Result(0, None, None, saturated=True)
      if latest is None:
        metric_log.write(0, baseline.metrics(start))
        say(f'step 0/{total}  dev {shown_scores(start)}  ({whose})')
    while step < total and not stopped:
      batch = next(batches)
      if (shape := data.shape(batch)) not in shapes:
        shapes.add(shape)
        say(f'step {step + 1}: compiling for {shape}')
      state, metrics = update(state, constants, mesh.put_batch(devices, batch), key, step + 1)
      step += 1
      indices = {name: rows for name, rows in batch.items() if name.endswith('_index')}
      unread.append((step, metrics, indices))
      if len(unread) > 1:
        read_one()
      score = None
      if evaluate is not None and (step % every == 0 or step == total):
        began = time.monotonic()
        read_all()
        assert start is not None
        found = evaluate({**frozen, **state.model})
        compared = baseline.compare(config.eval.measure, start, found)
        # Process 0's scores, so that all stop at the same step, however their hardware rounds.
        means, numbers = distributed.agree([dict(found.means), compared._asdict()])
        found, compared = found._replace(means=means), baseline.Gain(**numbers)
        score = means[config.eval.measure]
        better = best is None or score > best
        best, best_step, stale = (score, step, 0) if better else (best, best_step, stale + 1)
        gain = compared if better else gain
        if rival is not None and rival.beats(config.eval.measure, found, step, total):
          beaten = rival.name
        stopped = bool(beaten) or 0 < config.eval.patience <= stale
        progress.pause(time.monotonic() - began)
        metric_log.write(step, baseline.metrics(found, compared))
        if main and (config.data.fold or not whole):
          baseline.write(workdir, found, step)
        standing = 'best so far' if better else f'best {best:.4f} at step {best_step}'
        if gain is not None and gain.difference <= 0:
          standing = 'none better than before'
        say(
          f'step {step}/{total}  dev {shown_scores(found)}  ({standing})  {compared.shown} on '
          f'{compared.baseline:.4f} before  {duration(time.monotonic() - began)}'
        )
      if step % save_every == 0 or step == total or score is not None or stopped:
        save(score)
      if stop():
        save(score)
        saved.wait()
        say(f'asked to stop (SIGTERM): saved step {step}; run the same command to go on')
        return Result(step, best, best_step, step == total or stopped, gain)
    read_all()
    saved.wait()
    spent = time.monotonic() - began_at if step != latest else spent
    if data.whole is not None and best_step and whole and not config.data.fold:
      chosen = layout.put(saved.restore_trainable(best_step))
      score_whole = functools.partial(data.whole, model, {**frozen, **chosen}, spent / 10)
      whole_corpus(workdir, config.eval.measure, best_step, score_whole, say)
    waited = counted(stale, 'evaluations')
    reason = f'behind {beaten}' if beaten else f'no gain in the last {waited}'
    say(
      (f'stopped early: {reason}; ' if stopped else '')
      + f'done at step {step}'
      + (f'; best dev {config.eval.measure} {best:.4f} at step {best_step}' if best_step else '')
      + f'. {what_next(config, workdir, gain, whole, method.intermediate(config, names))}'
    )
    return Result(step, best, best_step, gain=gain)
  except BaseException as error:  # whatever ends this process ends the others, before it waits
    distributed.leave(error)
    raise
  finally:
    stop.restore()
    metric_log.close()
    batches.close()
    saved.close()


def nothing_left(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  start: methods.Scores,
  say: Callable[[str], None],
) -> bool:
  """Whether no gain over these scores could be told from chance; then a file says so, and a line.

  A training that has begun goes on. All processes call this.
  """
  why = ''
  if config.eval.skip_saturated and not config.data.fold and not workdirs.begun(workdir):
    why = distributed.agree(baseline.saturated(config.eval.measure, start))
  if jax.process_index() == 0:
    workdirs.write_saturated(workdir, why)
  if why:
    say(f'nothing is trained: {why}')
  return bool(why)


def whole_corpus(
  workdir: epath.Path,
  measure: str,
  step: int,
  score: Callable[[], tuple[methods.Scores, methods.Scores] | None],
  say: Callable[[str], None],
) -> None:
  """Shows the gain in the whole corpus after a step: kept in the workdir, or measured now."""
  main = jax.process_index() == 0
  gain = baseline.read_whole(workdir, step) if main else None
  if not distributed.agree(gain is not None):
    scores = score()
    if scores is None:
      say('the whole corpus is not searched: that would take more than a tenth of the training')
      return
    if main:
      gain = baseline.compare(measure, *scores)
      baseline.write_whole(workdir, step, gain)
  if gain is not None:
    say(
      f'in the whole corpus: {measure} {gain.best:.4f} after step {step}, {gain.shown} on '
      f'{gain.baseline:.4f} before'
    )


def train_fold(
  method: methods.Method,
  devices: jax.sharding.Mesh,
  say: Callable[[str], None],
  config: ml_collections.ConfigDict,
  folder: epath.Path,
  number: int,
) -> int | None:
  """Trains with one part of the queries held out; returns what ``folds.find`` asks of ``train``."""
  say(f'fold {number} of {config.data.folds}: {folder}')
  inputs = workdirs.inputs(config)
  lock = jax.process_index() == 0
  with workdirs.claim(folder, workdirs.TRAINING, inputs, lock=lock) as claimed:
    result = _train(ml_collections.FrozenConfigDict(config), claimed, method, devices)
  if not result.done:
    return None
  return result.best_step if result.gain is not None and result.gain.difference > 0 else 0


def shown_scores(scores: methods.Scores) -> str:
  """An evaluation for the console."""
  return '  '.join(f'{name} {value:.4f}' for name, value in scores.means.items())


def what_next(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  gain: baseline.Gain | None,
  whole: bool,
  intermediate: bool,
) -> str:
  """How good a finished run is beside its start, and what to do with it."""
  prompts_alone = all(name.startswith('prompt/') for name in config.trainable)
  out = 'prompt.npz' if config.prompt.length or prompts_alone else 'DIR'
  command = f'python -m dprjax.export --workdir={shlex.quote(str(workdir))} --out={out}'
  if methods.outside(config.method):
    command += f' --method={config.method}'
  if (config.data.fold or not whole) and gain is not None:  # which is no model to use, or not yet
    return f'{gain.verdict}.'
  if gain is None:
    return f'Next: {command}'
  if not gain.better and not intermediate:
    return (
      f'{gain.verdict}. Better keep the model as it was before; to export this one all the same: '
      f'{command} --force'
    )
  return f'{gain.verdict}. Next: {command}'


def make_backbone(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  read: Callable[[], Iterator[str]],
  needs: Sequence[str] = (),
) -> None:
  """Makes a backbone from scratch in the workdir, if the config asks for one.

  Its vocabulary is trained on the texts that ``read`` streams. It has the heads that ``needs``
  names, of ``head_specs.HEADS``.
  """
  path = configs.backbone_path(config, workdir)
  if config.backbone.path.startswith('scratch:') and not epath.Path(path).exists():
    with tempfile.TemporaryDirectory() as folder:
      learn, model_type = VOCABULARIES[config.backbone.vocabulary]
      tokenizer = learn(read(), config.backbone.vocab_size, folder)
      model = hub.scratch_config(
        config.backbone.path.removeprefix('scratch:'),
        tokenizer.vocab_size,
        model_type=model_type,
        pad_token_id=tokenizer.pad_id,
      )
      params = hub.init_params(model, jax.random.key(config.seed))
      heads = {
        name: Head(jax.device_get(HEADS[name].init(model, jax.random.key(config.seed))))
        for name in needs
      }
      hub.save_backbone(path, model, params, source=folder, heads=heads)


def describe(
  config: ml_collections.FrozenConfigDict,
  say: Callable[[str], None],
  state: updates.State,
  frozen: Mapping[str, Any],
  devices: jax.sharding.Mesh,
  data: methods.Data,
  total: int,
) -> None:
  """Logs what is trained, on what, before the first step."""
  trained, held = tree.count(state.trainable), tree.count(frozen)
  device = devices.devices.flat[0]
  axes = ' x '.join(f'{axis} {count}' for axis, count in devices.shape.items())
  processes = jax.process_count()
  name = device.device_kind
  kind = f'{device.platform} devices' + (f' ({name})' if name != device.platform else '')
  say(
    f'{config.method}{f" ({config.task})" if config.task else ""}: {size(trained)} trained '
    f'parameters ({100 * trained / (trained + held):.2f} %, '
    f'{size(tree.nbytes(state.trainable), "B")}; optimiser '
    f'{size(tree.nbytes(state.opt_state), "B")}), {size(held)} frozen '
    f'({size(tree.nbytes(frozen), "B")})'
  )
  say(f'{counted(devices.size, kind)}, mesh {axes}, {counted(processes, "processes")}')
  say(
    f'{data.description}; {counted(config.batch_size * config.accumulate, data.unit)} an update'
    + (f' ({config.accumulate} batches of {config.batch_size})' if config.accumulate > 1 else '')
    + f', {counted(len(data.batches), "updates")} an epoch, {total} in all'
  )
