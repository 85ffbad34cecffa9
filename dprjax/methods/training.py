"""The training loop: one for all methods."""

import functools
import logging
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import ml_collections
from etils import epath

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.data import text
from dprjax.formats import seen
from dprjax.methods import alternatives, baseline, folds
from dprjax.methods import method as methods
from dprjax.methods.loop import Loop, Setup, shown_scores
from dprjax.models import artifact, hub
from dprjax.models.head_specs import HEADS, Head
from dprjax.runtime import compiled, distributed, mesh, optim, tree
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

  With ``whole=False`` it is one of several alternatives: it ends where folds have found the number
  of updates, or where the ``rival`` beats it.
  """
  setup, parts = prepare(config, workdir, method, devices)
  config, say, data = setup.config, setup.say, setup.data
  schedule_steps = total = config.steps or max(round(config.epochs * len(data.batches)), 1)
  plan = start = None
  if data.frozen is not None:
    start = baseline.scores(workdir, config.eval.measure, data.frozen)
    if nothing_left(config, workdir, start, say):
      return Result(0, None, None, saturated=True)
  if parts is not None:
    plan = folds.find(config, workdir, parts, functools.partial(train_fold, method, devices, say))
    if plan is None:
      return Result(0, None, None, done=False)
    if not whole:
      return Result(0, None, None, gain=plan.gain)
    schedule_steps, total = plan.schedule, plan.steps

  run = Loop(
    setup,
    total=total,
    schedule_steps=schedule_steps,
    gain=None if plan is None else plan.gain,
    rival=rival,
    keep_scores=bool(config.data.fold) or not whole,
  )
  try:
    if plan is not None:
      if not run.resumed:
        run.metrics.write(0, folds.metrics(plan))
      say(chosen_by_folds(plan, total))
    if run.evaluates:
      whose = 'before the training' if start is None else 'dprjax encode without a prompt'
      if start is None:
        start = baseline.scores(workdir, config.eval.measure, run.baseline)
        if nothing_left(config, workdir, start, say):
          return Result(0, None, None, saturated=True)
      if not run.resumed:
        run.metrics.write(0, baseline.metrics(start))
        say(f'step 0/{total}  dev {shown_scores(start)}  ({whose})')
    while run.goes_on:
      run.advance()
      score = run.evaluate(start)
      if run.save(score):
        done = run.step == total or run.standing.stopped
        return Result(run.step, run.standing.best, run.standing.best_step, done, run.standing.gain)
    run.finish()
    if whole and not config.data.fold:
      run.whole_corpus()
    intermediate = method.intermediate(config, setup.trainable)
    say(
      f'{ended(run, config)}. {what_next(config, workdir, run.standing.gain, whole, intermediate)}'
    )
    return Result(run.step, run.standing.best, run.standing.best_step, gain=run.standing.gain)
  except BaseException as error:  # whatever ends this process ends the others, before it waits
    distributed.leave(error)
    raise
  finally:
    run.close()


def prepare(
  given: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  method: methods.Method,
  devices: jax.sharding.Mesh,
) -> tuple[Setup, methods.Folds | None]:
  """Text, backbone and parameters: all that can be checked before anything is trained.

  Returns them, and how queries are held out in turns, where there are too few to hold some out.

  Raises:
    InputError: as `train`.
  """
  main = jax.process_index() == 0
  say = logger.info if main else logger.debug
  config = ml_collections.FrozenConfigDict(configs.settle(given, devices.devices.flat[0].platform))
  configs.check_workdir(given, workdir)
  compiled.keep(config.compilation_cache)
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
  backbone = hub.load_backbone(path, heads=method.parts)
  tokenizer = text.load_tokenizer(backbone.path)
  hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
  model = method.build(config, backbone.config, devices, tokenizer)
  prompt = None
  if config.prompt.init_from:
    prompt = artifact.load_prompt_for(config.prompt.init_from, tokenizer.sha256, backbone)
  parts = methods.Parts(backbone.params, backbone.heads, prompt, texts.parts, backbone.sha256)
  key = jax.random.fold_in(jax.random.key(config.seed), 0)
  params = tree.flatten(model.init(parts, key))
  trainable = tree.trainable_names(config.trainable, list(params))
  optim.match_rules(config.optim, trainable)
  if main:
    workdirs.begin(workdir, {**texts.files, **workdirs.model_files(config, backbone.path)})
    if prompt is not None and prompt.queries:
      seen.write(workdir / 'queries-init_from.npz', prompt.queries)
  data = texts.open(tokenizer, backbone.config)
  setup = Setup(config, workdir, devices, backbone, model, params, trainable, data, say)
  return setup, texts.folds


def chosen_by_folds(plan: folds.Plan, total: int) -> str:
  """The number of updates that folds have found, and the gain that they tell."""
  alone = ', '.join(str(best) if best else 'no gain' for best in plan.best_steps)
  return (
    f'folds: {counted(total, "updates")} are best over all {len(plan.best_steps)} (by each alone: '
    f'{alone}); gain {plan.gain.shown} on {plan.gain.baseline:.4f} before, where the number of '
    f"updates is the other folds' choice; now {total} of {plan.schedule} updates on all queries"
  )


def ended(run: Loop, config: ml_collections.FrozenConfigDict) -> str:
  """Where a training ended, why, and its best score."""
  standing = run.standing
  reason = f'no gain in the last {counted(standing.stale, "evaluations")}'
  if standing.beaten:
    reason = f'behind {standing.beaten}'
  return (
    (f'stopped early: {reason}; ' if standing.stopped else '')
    + f'done at step {run.step}'
    + (
      f'; best dev {config.eval.measure} {standing.best:.4f} at step {standing.best_step}'
      if standing.best_step
      else ''
    )
  )


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
