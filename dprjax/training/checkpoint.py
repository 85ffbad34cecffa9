"""Checkpoints: everything that a restarted run needs to continue bit for bit.

A checkpoint holds the trainable parameters, the optimiser state, the data position, the state of
early stopping and the SHA-256 of the frozen backbone, but not the backbone. SHA256SUMS (for
``sha256sum -c``) is written last, before the folder gets its name, and compared before anything is
read. orbax rewrites its ``_CHECKPOINT_METADATA`` later, so that file has no sum, and restoring does
not depend on it.
"""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from dprjax.base import files, reading, tree
from dprjax.base.errors import InputError

FOLDER = 'checkpoints'  # of the workdir
SCORE = 'score'
SUMS = 'SHA256SUMS'
_METADATA = '_CHECKPOINT_METADATA'
_SUM = re.compile(r'([0-9a-f]{64})  ([^/].*)')
_PARAMS = 'live'  # folder of the trainable parameters, part of the format
# Old checkpoints are moved here before removal, since a kill would leave half a checkpoint.
_REMOVED = 'removed'


class Restored(NamedTuple):
  trainable: dict[str, Any]
  opt_state: Any
  extra: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run, in ``workdir/checkpoints``, saved in the background.

  Keeps the ``keep`` latest ones, and the best by score. ``read_only`` also ignores checkpoints that
  another process is saving.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    backbone_sha256: str,
    keep: int = 2,
    read_only: bool = False,
  ):
    _write_small_arrays_once()
    self.folder = epath.Path(workdir) / FOLDER
    self._sha256, self._removes = backbone_sha256, jax.process_index() == 0 and not read_only
    self._saving = -1
    if jax.process_index() == 0 and self.folder.is_dir():
      for step in _steps(self.folder):
        self._check_sums(step, 'metrics', 'extra')
    remedy = f'the {_METADATA} of a checkpoint is damaged; remove that file, nothing else needs it'
    with files.no_room(self.folder), _undamaged(self.folder, remedy):
      self._manager = ocp.CheckpointManager(
        self.folder.absolute() if not str(self.folder).startswith('gs://') else self.folder,
        # Named, so that a fresh process can ask for the shapes of saved arrays.
        item_handlers={
          _PARAMS: ocp.StandardCheckpointHandler(),
          'opt_state': ocp.StandardCheckpointHandler(),
          'extra': ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
          async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sums),
          # Removes half-written folders of a killed run.
          cleanup_tmp_directories=not read_only,
          todelete_subdir=None if read_only else _REMOVED,
          create=not read_only,
          read_only=read_only,
          # orbax needs this to read scores of checkpoints from an earlier process.
          best_fn=lambda metrics: metrics[SCORE],
          preservation_policy=policies.AnyPreservationPolicy(
            [
              policies.LatestN(keep),
              # The first of equal scores, since a later one is not a gain.
              policies.BestN(
                get_metric_fn=lambda metrics: (metrics[SCORE], -metrics['step']),
                n=1,
                keep_checkpoints_without_metrics=False,
              ),
            ]
          ),
        ),
      )

  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    return self._manager.latest_step()

  def best(self) -> int | None:
    scored = []
    for step in self.steps():
      score = (self._manager.metrics(step) or {}).get(SCORE)
      if score is not None:
        scored.append((score, -step))
    highest, latest = -max(scored)[1] if scored else None, self.latest()
    named = None if latest is None else self.extra(latest).get('best_step')
    if named is not None and named != highest:
      raise InputError(
        f'{self.folder}: step {latest} names step {named} as the best, but that step is missing or '
        f'has no score; put it back, or choose --step={latest}'
      )
    return latest if highest is None else highest

  def save(
    self,
    step: int,
    trainable: Mapping[str, Any],
    opt_state: Any,
    extra: Mapping[str, Any],
    score: float | None = None,
  ) -> None:
    if step in self._manager.all_steps():
      return
    self.wait()
    self._saving = step
    self._guard(
      lambda: self._manager.save(
        step,
        args=ocp.args.Composite(
          **{_PARAMS: ocp.args.StandardSave(tree.unflatten(trainable))},
          opt_state=ocp.args.StandardSave(opt_state),
          extra=ocp.args.JsonSave({**extra, 'backbone_sha256': self._sha256}),
        ),
        metrics=None if score is None else {SCORE: float(score), 'step': step},
      )
    )

  def wait(self) -> None:
    self._guard(self._manager.wait_until_finished)
    if self._removes:
      (self.folder / _REMOVED).rmtree(missing_ok=True)

  def restore(
    self, step: int, trainable: Mapping[str, jax.ShapeDtypeStruct], opt_state: Any
  ) -> Restored:
    """Reads a checkpoint, on any mesh and number of processes."""
    if jax.process_index() == 0:  # one process reads everything; the others fail with it
      self._check_sums(step)
    extra = self.extra(step)
    if extra['backbone_sha256'] != self._sha256:
      raise InputError(
        f'{self.folder}/{step} was trained on another backbone (sha256 '
        f'{extra["backbone_sha256"][:12]}..., not {self._sha256[:12]}...); set '
        'config.backbone.path to it, or use a fresh --workdir'
      )
    with self._undamaged(step):
      state = self._manager.restore(
        step,
        args=ocp.args.Composite(
          **{_PARAMS: ocp.args.StandardRestore(tree.unflatten(trainable))},
          opt_state=ocp.args.StandardRestore(opt_state),
        ),
      )
    return Restored(tree.flatten(state[_PARAMS]), state['opt_state'], extra)

  def restore_trainable(self, step: int) -> dict[str, np.ndarray]:
    """The trained parameters as whole numpy arrays, on any machine."""
    if step not in self.steps():
      raise InputError(
        f'{self.folder} has no step {step}; it has {", ".join(map(str, self.steps())) or "none"}'
      )
    self._check_sums(step, _PARAMS)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with self._undamaged(step):
      shapes = self._manager.item_metadata(step)[_PARAMS].tree
      target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), dict(shapes)
      )
      trainable = self._manager.restore(
        step, args=ocp.args.Composite(**{_PARAMS: ocp.args.StandardRestore(target)})
      )[_PARAMS]
    return {name: np.asarray(leaf) for name, leaf in tree.flatten(trainable).items()}

  def extra(self, step: int) -> dict[str, Any]:
    with self._undamaged(step):
      return self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))[
        'extra'
      ]

  def _undamaged(self, step: int) -> contextlib.AbstractContextManager[None]:
    remedy = 'remove it to continue from an earlier one, or export another step'
    return _undamaged(self.folder / str(step), remedy, KeyError, OSError)

  def close(self) -> None:
    try:
      self.wait()
    finally:
      self._manager.close()

  def _write_sums(self) -> None:
    """orbax calls this on process 0 after writing all files, before the folder gets its name."""
    name = str(self._saving)
    [folder] = [
      path
      for path in self.folder.iterdir()
      if path.name == name or path.name.startswith(f'{name}.orbax-checkpoint-tmp')
    ]
    # Only items, since orbax may still write other files.
    lines = [f'{files.sha256_file(folder / name)}  {name}\n' for name in sorted(_items(folder))]
    (folder / SUMS).write_text(''.join(lines))

  def _check_sums(self, step: int, *items: str) -> None:
    """Raises InputError for missing, damaged or added files of these items, or of all."""
    folder = self.folder / str(step)
    if not folder.is_dir():
      return  # orbax reports a missing step
    if not (folder / SUMS).exists():
      wrong = [f'{SUMS} is missing']
    else:
      lines = [line for _, line in reading.read_lines(folder / SUMS, 'checksums')]
      sums = {match[2]: match[1] for match in map(_SUM.fullmatch, lines) if match is not None}
      present, wrong = _items(folder), []
      for name in sorted(sums.keys() | present):
        if items and name.split('/')[0] not in items:
          continue
        if name not in present:
          wrong.append(f'{name} is missing')
        elif name not in sums:
          wrong.append(f'{name} was added')
        elif files.is_special(folder / name) or files.sha256_file(folder / name) != sums[name]:
          wrong.append(f'{name} is damaged')
    if wrong:
      others = set(_steps(self.folder)) - {step}
      raise InputError(
        f'{folder} cannot be used: '
        f'{"; ".join(wrong[:3])}{f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""}; '
        f'remove it to continue from {f"step {max(others)}" if others else "the beginning"}'
      )

  def _guard(self, action: Any) -> None:
    try:
      with files.no_room(self.folder):
        action()
    except (ValueError, RuntimeError) as error:
      # Words of TensorStore for a full disk.
      full = ('No space left', 'ENOSPC', 'File too large', 'Disk quota', 'RESOURCE_EXHAUSTED')
      if not any(words in str(error) for words in full):
        raise
      raise InputError(
        f'cannot save a checkpoint in {self.folder}: no space left; the last good one is step '
        f'{self._last_good()}. Free some space and run the same command again'
      ) from error

  def _last_good(self) -> str:
    whole = [step for step in _steps(self.folder) if (self.folder / str(step) / _METADATA).exists()]
    return str(max(whole)) if whole else 'none'


def _steps(folder: epath.Path) -> list[int]:
  return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]


def _items(folder: epath.Path) -> set[str]:
  """The files of the items of a checkpoint."""
  items = [item for item in folder.iterdir() if item.is_dir()]
  return {str(path.relative_to(folder)) for item in items for path in files.below(item)}


@functools.cache
def _write_small_arrays_once() -> None:
  """Keeps orbax from slicing small arrays by device, which takes seconds a save for 320 arrays."""
  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.ERROR)  # hides a warning about the override
  try:
    ocp.type_handlers.register_type_handler(
      jax.Array,
      ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=1 << 20),
      override=True,
    )
  finally:
    logger.setLevel(level)


@functools.cache
def pass_over_closed_loops() -> None:
  """Keeps TensorStore threads from printing tracebacks after a failed read; only for commands.

  The first unreadable array closes the event loop inside orbax, to which other threads still
  report, so only the class can be patched. Checksums do not help, since an export reads metadata of
  arrays whose sums it does not compare. tests/fuzz fails without this.
  """
  before = asyncio.BaseEventLoop.call_soon_threadsafe

  def call_soon_threadsafe(self: Any, *args: Any, **kwargs: Any) -> Any:
    return None if self.is_closed() else before(self, *args, **kwargs)

  asyncio.BaseEventLoop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[assignment,method-assign]


@contextlib.contextmanager
def _undamaged(place: epath.Path, remedy: str, *more: type[Exception]) -> Iterator[None]:
  """Turns errors of orbax into an InputError that names the checkpoint."""
  faults: tuple[type[Exception], ...] = (ValueError, TypeError, RecursionError, *more)
  try:
    yield
  except faults as error:
    message = ' '.join(str(error).split())[:200]
    raise InputError(f'{place} cannot be read ({message}); {remedy}') from error
