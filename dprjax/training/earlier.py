"""Starts a training from the result of another: ``config.init_from``.

The new run begins with the trained parameters of the best checkpoint, but has its own workdir, data
order, learning-rate schedule and optimiser state. `dprjax.json` records the step and SHA-256 of the
checkpoint.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from etils import epath

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text import seen
from dprjax.training import checkpoint, stored_config
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs

QUERIES = 'queries-init_from.npz'  # in the workdir: queries seen by the earlier model
# Options that change the meaning of parameters.
_SAME = ('method', 'prompt.kind', 'prompt.sides', 'prompt.tied', 'prompt.reparam')


class Earlier(NamedTuple):
  """The result of an earlier training.

  Attributes:
    params: trained parameters by flat names.
    files: for the record of inputs.
    queries: that the earlier model has seen.
  """

  params: Mapping[str, np.ndarray]
  files: Mapping[str, epath.Path]
  queries: seen.Seen


def load(
  config: ml_collections.FrozenConfigDict, backbone_sha256: str, wanted: Mapping[str, Any]
) -> Earlier:
  """Reads the result of the training in ``config.init_from``.

  Args:
    wanted: its trained parameters by flat names, with shapes.
  """
  where = f'config.init_from={config.init_from}'
  folder = workdirs.trained(config.init_from)
  stored = stored_config.load_workdir(folder)
  for name in _SAME:
    there, here = configs.option(stored, name), configs.option(config, name)
    if there != here:
      raise InputError(f'{where}: config.{name} is {there!r} there and {here!r} here')
  saved = checkpoint.Checkpoints(folder, backbone_sha256, read_only=True)
  try:
    step = saved.best()
    if step is None:
      raise InputError(f'{where} has no checkpoint; name the workdir of a finished training')
    params, extra = saved.restore_trainable(step), saved.extra(step)
  finally:
    saved.close()
  if extra['backbone_sha256'] != backbone_sha256:
    raise InputError(f'{where} was trained on another backbone')
  shapes, here = ({name: tuple(x.shape) for name, x in some.items()} for some in (params, wanted))
  for name in sorted(shapes.keys() | here.keys()):
    if shapes.get(name) != here.get(name):
      raise InputError(
        f'{where}: the trained {name} has the shape {shapes.get(name)} there and {here.get(name)} '
        'here; set the options alike'
      )
  sums = epath.Path(folder) / checkpoint.FOLDER / str(step) / checkpoint.SUMS
  return Earlier(params, {f'config.init_from (step {step})': sums}, workdirs.seen_queries(folder))


def seen_before(workdir: epath.Path) -> str:
  """A warning if the earlier training used dev queries of this one; else ''."""
  trained = seen.read(workdir / QUERIES).get('train', np.zeros(0))
  held_out = seen.read(workdir / seen.FILE).get('dev', np.zeros(0))
  count = int(np.isin(held_out, trained).sum())
  if not count:
    return ''
  return (
    f'config.init_from was trained on {count:,} of {counted(len(held_out), "dev queries")}: the '
    'gain here is too high; hold out the same queries in both trainings'
  )
