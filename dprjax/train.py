"""The one training loop: every system trains here.

    python -m dprjax.train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=DIR

The workdir holds config.json, the token store, checkpoints, metrics.jsonl and TensorBoard files.
The same command again goes on where it stopped, bit for bit. SIGTERM has it save and end with
status 143 (that of a process which SIGTERM ended): it is not done.

On several hosts the same command runs on each, with a workdir that all of them see; config.mesh
says over how many devices the batch ('data'), the weights ('model') or both ('fsdp') are split.
"""

import argparse
import functools
import logging
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration, size
from dprjax.data import text
from dprjax.methods import cross_encoder, dpr, pretrain, similarity
from dprjax.methods import cross_encoder_data as reranking
from dprjax.methods import document_data as documents
from dprjax.methods import retrieval_data as retrieval
from dprjax.methods import similarity_data as pairs
from dprjax.methods.feed import Feed
from dprjax.methods.method import System
from dprjax.models import artifact, hub
from dprjax.runtime import checkpoint, cli, compiled, distributed, log, mesh, optim, stopping, tree
from dprjax.runtime import config as configs

logger = logging.getLogger('dprjax')

# What is trained, and on what.
SYSTEMS = {
  'dpr': (dpr, retrieval),
  'pretrain': (pretrain, documents),
  'similarity': (similarity, pairs),
  'cross_encoder': (cross_encoder, reranking),
}
# The heads of a checkpoint that a method goes on with.
HEADS = {'pretrain': ('mlm', 'condenser'), 'cross_encoder': ('classifier',)}
# What a backbone from scratch may begin with, and the architecture that goes with it.
VOCABULARIES = {
  'wordpiece': (text.train_wordpiece, 'bert'),
  'sentencepiece': (text.train_sentencepiece, 'xlm-roberta'),
}


class Result(NamedTuple):
  """How a run ended: its last step, the best score on the dev split (None where there is none) and
  its step; whether it is done, or was stopped.
  """

  step: int
  best: float | None
  best_step: int | None
  done: bool = True


class State(NamedTuple):
  """What a step changes."""

  trainable: dict[str, jax.Array]
  opt_state: Any


def train(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> Result:
  """Trains as ``config`` says, in ``workdir``, from its latest checkpoint if there is one.

  Raises:
    InputError: the config, the data or the workdir cannot be used as they are, or the loss is not
      finite.
  """
  workdir = epath.Path(workdir)
  main = jax.process_index() == 0
  say = logger.info if main else logger.debug
  check(config)
  devices = mesh.make_mesh(config.mesh)
  mesh.check_batch(
    devices, config.batch_size * config.accumulate, config.grad_cache * config.accumulate
  )
  if distributed.agree(configs.to_json(config)) != configs.to_json(config):
    raise InputError(
      f'process {jax.process_index()} was started with another --config than process 0; give all '
      'of them the same'
    )
  if main:
    configs.claim_workdir(config, workdir)
  config = ml_collections.FrozenConfigDict(config)
  compiled.keep(config.compilation_cache)

  # Text, backbone, token arrays.
  objective, feeds = SYSTEMS[config.method]
  with distributed.turn():
    found = feeds.find(config, workdir, devices)
    make_backbone(config, workdir, found.read)
  backbone = load_backbone(config, workdir)
  tokenizer = text.load_tokenizer(backbone.path)
  hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
  system = objective.build(config, backbone.config, devices, tokenizer)
  feed = found.open(tokenizer, backbone.config)
  total = config.steps or max(round(config.epochs * feed.epoch), 1)
  every = config.eval.every or feed.epoch
  save_every = config.checkpoint.every or feed.epoch

  # Parameters: the trainable ones on the optimiser's side, the frozen ones apart.
  key = jax.random.key(config.seed)
  parts = {
    'query': backbone.params,
    'passage': backbone.params,
    'heads': backbone.heads,
  }
  params = tree.flatten(system.init(parts, jax.random.fold_in(key, 0)))
  if config.prompt.init_from:
    params |= warm_start(config, params, backbone)
  trainable_names = tree.trainable_names(config.trainable, list(params))
  shardings = mesh.param_shardings(devices, params)
  frozen_dtype = jnp.dtype(config.backbone.frozen_dtype)
  trainable = {
    name: mesh.put(np.asarray(leaf, np.float32), shardings[name])
    for name, leaf in params.items()
    if name in trainable_names
  }
  frozen = {
    name: mesh.put(np.asarray(leaf).astype(frozen_dtype), shardings[name])
    for name, leaf in params.items()
    if name not in trainable_names
  }
  optimizer = optim.make_optimizer(config.optim, list(params), trainable_names, total)
  schedule = optim.make_schedule(config.optim, total)
  opt_state = init_optimizer(optimizer, trainable, list(frozen), shardings, devices)
  update = make_update(system, optimizer, list(frozen))

  # Where an earlier run of this command stopped.
  saved = checkpoint.Checkpoints(workdir, backbone.sha256, config.checkpoint.keep)
  state, step = State(trainable, opt_state), 0
  best, best_step, stale, stopped = None, None, 0, False
  latest = saved.latest()
  if latest is not None:
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (trainable, opt_state)
    )
    restored = saved.restore(latest, *target)
    step, state = restored.step, State(restored.trainable, restored.opt_state)
    feed.loader.set_state(restored.extra['data'])
    best, best_step, stale, stopped = (
      restored.extra[name] for name in ('best', 'best_step', 'stale', 'stopped')
    )

  describe(config, say, trainable, frozen, devices, feed, total, opt_state)
  if step:
    say(f'resuming after step {step} of {total}')
  evaluate = feed.evaluation(system) if feed.evaluation else None
  metric_log = log.MetricLog(workdir, step, active=main)
  progress = Progress('steps', total, skip_first=True)
  stop = stopping.Stop(devices)
  # The loss of a step is read while the next one runs. What is not read yet is checked before
  # anything is saved.
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
        f'{values["loss"]:g}, gradient norm '
        f'{values["gradient_norm"]:g}); {feed.ids(batch)}. The last good checkpoint is step '
        f'{saved.latest() or "none"} in '
        f'{saved.folder}; lower config.optim.learning_rate, or look at those texts'
      )
    if number % config.log_every and number != total:
      return
    progress.update(number)
    rate = progress.rate * config.batch_size * config.accumulate
    values |= {'learning_rate': float(schedule(number - 1)), f'{feed.unit}_per_second': rate}
    metric_log.write(number, values)
    say(
      f'step {number}/{total}  loss {values["loss"]:.4f}  '
      + ''.join(f'{label} {values[name]:.3f}  ' for name, label in system.shown.items())
      + f'|gradient| {values["gradient_norm"]:.3g}  lr {values["learning_rate"]:.2e}'
      + (f'  {rate:.0f} {feed.unit}/s  {duration(progress.left or 0)} left' if rate else '')
    )

  def save(score: float | None = None) -> None:
    while unread:
      read_one()
    saved.save(
      step,
      state.trainable,
      state.opt_state,
      {
        'data': feed.loader.get_state(),
        'best': best,
        'best_step': best_step,
        'stale': stale,
        'stopped': stopped,
        'seed': config.seed,
      },
      score,
    )

  try:
    shapes: set[str] = set()
    while step < total and not stopped:
      batch = next(feed.loader)
      if (shape := feed.shape(batch)) not in shapes:
        shapes.add(shape)
        say(f'step {step + 1}: compiling for {shape}')
      state, metrics = update(state, frozen, mesh.put_batch(devices, batch), key, step + 1)
      step += 1
      unread.append(
        (step, metrics, {name: rows for name, rows in batch.items() if name.endswith('_index')})
      )
      if len(unread) > 1:
        read_one()
      score = None
      if evaluate is not None and (step % every == 0 or step == total):
        began = time.monotonic()
        while unread:
          read_one()
        # Process 0's, so that all have the same best step and stop at the same, whatever their
        # hardware rounds to.
        found = distributed.agree(evaluate({**frozen, **state.trainable}))
        score = found[config.eval.measure]
        better = best is None or score > best
        best, best_step, stale = (score, step, 0) if better else (best, best_step, stale + 1)
        stopped = bool(config.eval.patience) and stale >= config.eval.patience
        progress.pause(time.monotonic() - began)
        metric_log.write(step, {f'dev/{name}': value for name, value in found.items()})
        say(
          f'step {step}/{total}  dev '
          + '  '.join(f'{name} {value:.4f}' for name, value in found.items())
          + ('  (best so far)' if better else f'  (best {best:.4f} at step {best_step})')
          + f'  {duration(time.monotonic() - began)}'
        )
      if step % save_every == 0 or step == total or score is not None or stopped:
        save(score)
      if stop():
        save(score)
        saved.wait()
        say(f'asked to stop (SIGTERM): saved step {step}; run the same command to go on')
        return Result(step, best, best_step, done=step == total or stopped)
    while unread:
      read_one()
    saved.wait()
    say(
      ('stopped early: no gain in the last ' + f'{stale} evaluations; ' if stopped else '')
      + f'done at step {step}'
      + (
        f'; best dev {config.eval.measure} {best:.4f} at step {best_step}'
        if best is not None
        else ''
      )
      + f'. Next: python -m dprjax.export --workdir={workdir} --out='
      + ('prompt.npz' if config.prompt.length else 'DIR')
    )
    return Result(step, best, best_step)
  except BaseException as error:
    distributed.leave(error)
    raise
  finally:
    stop.restore()
    metric_log.close()
    feed.loader.close()
    saved.close()


def check(config: ml_collections.ConfigDict) -> None:
  """Raises InputError for knobs that cannot be as they are, before anything is read or written."""
  if config.method not in SYSTEMS:
    raise InputError(f'config.method: expected one of {", ".join(SYSTEMS)}, not {config.method!r}')
  if not config.backbone.path:
    raise InputError(
      'config.backbone.path is empty; name a Hugging Face directory, a hub id or scratch:tiny'
    )
  if config.backbone.vocabulary not in VOCABULARIES:
    raise InputError(
      f'config.backbone.vocabulary: expected one of {", ".join(VOCABULARIES)}, not '
      f'{config.backbone.vocabulary!r}'
    )
  if not config.data.dir and config.data.format != 'docstrings':
    raise InputError(
      'config.data.dir is empty; name the folder that holds the training text, '
      '--config.data.dir=DIR'
    )
  for name in (
    'batch_size',
    'accumulate',
    'grad_cache',
    'loss_rows',
    'log_every',
    'checkpoint.keep',
    'data.query_max_length',
    'data.passage_max_length',
  ):
    value = functools.reduce(getattr, name.split('.'), config)
    if value < 1:
      raise InputError(f'config.{name}: must be at least 1, not {value}')
  if config.steps <= 0 and config.epochs <= 0:
    raise InputError('config.epochs: must be above 0 where config.steps is 0')
  for name in ('frozen_dtype', 'dtype'):
    if config.backbone[name] not in ('float32', 'bfloat16'):
      raise InputError(
        f"config.backbone.{name}: expected 'float32' or 'bfloat16', not {config.backbone[name]!r}"
      )


def make_backbone(
  config: ml_collections.FrozenConfigDict, workdir: epath.Path, read: Callable[[], Iterator[str]]
) -> None:
  """Makes one from scratch in the workdir, if that is what the config asks for, with a vocabulary
  trained on the texts that ``read`` streams.
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
      hub.save_backbone(
        path, model, hub.init_params(model, jax.random.key(config.seed)), source=folder
      )


def load_backbone(config: ml_collections.FrozenConfigDict, workdir: epath.Path) -> hub.Backbone:
  """The backbone before training."""
  path = configs.backbone_path(config, workdir)
  return hub.load_backbone(path, HEADS.get(config.method, ()))


def warm_start(
  config: ml_collections.FrozenConfigDict, params: dict[str, Any], backbone: hub.Backbone
) -> dict[str, Any]:
  """The prompt's parameters from ``config.prompt.init_from``, in place of random ones."""
  loaded = artifact.load_prompt(config.prompt.init_from)
  artifact.check_prompt(loaded, backbone.config, backbone.sha256)
  wanted = {name: leaf for name, leaf in params.items() if name.startswith('prompt/')}
  kinds = {
    'prompt/prefix': 'query',
    'prompt/query/prefix': 'query',
    'prompt/passage/prefix': 'passage',
  }
  values = {name: loaded.prefix(kinds[name]) for name in wanted if name in kinds}
  for name, leaf in wanted.items():
    if name not in values or values[name].shape != leaf.shape:
      raise InputError(
        f'config.prompt.init_from: {config.prompt.init_from} does not fit {name} '
        f'{list(leaf.shape)}; '
        "set config.prompt.length to the file's, and config.prompt.reparam='none'"
      )
  return values


def init_optimizer(
  optimizer: optax.GradientTransformation,
  trainable: dict[str, jax.Array],
  frozen: Sequence[str],
  shardings: dict[str, Any],
  devices: jax.sharding.Mesh,
) -> Any:
  """The optimiser's state, its moments placed like the parameters they belong to."""
  shapes = jax.eval_shape(
    lambda trainable: optimizer.init(optim.with_placeholders(trainable, frozen)), trainable
  )

  def place(path: tuple[Any, ...], _: Any) -> Any:
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return shardings[names[-1]] if names and names[-1] in trainable else mesh.replicated(devices)

  out = jax.tree_util.tree_map_with_path(place, shapes)
  return jax.jit(
    lambda trainable: optimizer.init(optim.with_placeholders(trainable, frozen)), out_shardings=out
  )(trainable)


def make_update(
  system: System, optimizer: optax.GradientTransformation, frozen_names: Sequence[str]
) -> Any:
  """The jitted step: ``(state, frozen, batch, key, number) -> (state, metrics)``.

  The state's memory is reused.
  """

  @functools.partial(jax.jit, donate_argnums=0)
  def update(
    state: State,
    frozen: dict[str, jax.Array],
    batch: dict[str, jax.Array],
    key: jax.Array,
    number: int,
  ) -> tuple[State, dict[str, jax.Array]]:
    step_key = jax.random.fold_in(key, number)

    # Only the trainable leaves are differentiated: the frozen weights' gradients are never
    # computed.
    def loss(trainable: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
      return system.loss(tree.unflatten({**frozen, **trainable}), batch, step_key)

    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    updates, opt_state = optimizer.update(
      optim.with_placeholders(gradient, frozen_names),
      state.opt_state,
      optim.with_placeholders(state.trainable, frozen_names),
    )
    trainable = optax.apply_updates(
      state.trainable, {name: updates[name] for name in state.trainable}
    )
    return State(trainable, opt_state), metrics | {
      'gradient_norm': optax.tree.norm(gradient),
      'update_norm': optax.tree.norm({name: updates[name] for name in state.trainable}),
    }

  return update


def describe(
  config: ml_collections.FrozenConfigDict,
  say: Any,
  trainable: dict[str, Any],
  frozen: dict[str, Any],
  devices: jax.sharding.Mesh,
  feed: Feed,
  total: int,
  opt_state: Any,
) -> None:
  """What a run says before its first step."""
  trained, held = tree.count(trainable), tree.count(frozen)
  device = devices.devices.flat[0]
  say(
    f'{config.method}{f" ({config.task})" if config.task else ""}: {size(trained)} trained '
    'parameters '
    f'({100 * trained / (trained + held):.2f} %, {size(tree.nbytes(trainable), "B")}; '
    'optimiser '
    f'{size(tree.nbytes(opt_state), "B")}), '
    f'{size(held)} frozen ({size(tree.nbytes(frozen), "B")})'
  )
  say(
    f'mesh {" x ".join(f"{axis} {size}" for axis, size in devices.shape.items())} of '
    f'{device.platform} {device.device_kind}, '
    f'{jax.process_count()} process{"es" if jax.process_count() > 1 else ""}'
  )
  say(
    f'{feed.said}; {config.batch_size * config.accumulate} {feed.unit} an update'
    + (f' ({config.accumulate} batches of {config.batch_size})' if config.accumulate > 1 else '')
    + f', {feed.epoch} updates an epoch, {total} in all'
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('train', __doc__ or '', processes=True)
  parser.add_config(
    'an experiment, for instance configs/dptdr.py:local',
    'override a knob, for instance --config.prompt.length=32; dprjax/runtime/config.py lists and '
    'explains them all',
  )
  parser.add_argument(
    '--workdir', help='where everything of this run is kept; the same command again resumes it'
  )
  own, experiment = cli.split_config(argv)

  ended: list[Result] = []

  def command(args: argparse.Namespace) -> None:
    if not args.workdir:
      raise InputError('--workdir is missing; name the folder that this run is kept in')
    ended.append(train(configs.parse(experiment), args.workdir))

  cli.run(parser, distributed.together(command), own)
  if not ended[0].done:
    # Who started it must know: a later stage is not to take it for done, a cluster is to start it
    # again.
    sys.exit(128 + signal.SIGTERM)


if __name__ == '__main__':
  main()
