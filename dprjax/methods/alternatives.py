"""Which of several experiments is best, where ``config.alternatives`` has some.

Each is a training in a workdir of its own below ``alternatives``. On how many updates, and whether
that is a gain over what it began with, each decides as it does alone. Of those that are a gain, or
of all where none is, the one with the highest score on held-out queries is chosen. Where the number
of updates is found by folds, only that one is then trained on all queries.
"""

from collections.abc import Callable

import jax
import ml_collections
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.methods import baseline
from dprjax.runtime import config as configs
from dprjax.runtime import distributed
from dprjax.runtime import workdir as workdirs

Train = Callable[[ml_collections.ConfigDict, epath.Path, bool], tuple[bool, baseline.Gain | None]]


def resolve(config: ml_collections.ConfigDict) -> dict[str, ml_collections.ConfigDict]:
  """The experiments by name; the config itself, under no name, where it has no alternatives.

  Raises:
    InputError: there is one alternative, or no held-out queries to choose by.
  """
  if not config.alternatives:
    return {'': config}
  if len(config.alternatives) == 1:
    [name] = config.alternatives
    raise InputError(f'config.alternatives: {name} is the only one; name two or more, or none')
  if not (config.data.hold_out or config.data.dev_split):
    raise InputError(
      'config.alternatives: held-out queries choose one of '
      f'{", ".join(config.alternatives)}, and there are none; set config.data.hold_out=0.2, for '
      'instance'
    )
  found = {name: configs.alternative(config, name) for name in config.alternatives}
  if config.data.store:
    for name, one in found.items():
      one.data.store = str(epath.Path(config.data.store) / name)
  return found


def choose(
  config: ml_collections.ConfigDict, workdir: epath.Path, train: Train, say: Callable[[str], None]
) -> str | None:
  """The name of the best alternative: kept in the workdir, or found and then kept.

  All processes call it.

  Args:
    config: an experiment with alternatives.
    workdir: of the run.
    train: ``(config, workdir, to the end) -> (whether it is done, its gain)``, which goes on where
      it stopped. Not to its end, it may stop when the gain is known.
    say: takes a line about what is done.

  Returns:
    None where a training was asked to stop.

  Raises:
    InputError: what is kept there cannot be read; one measures nothing; whatever ``train`` raises.
  """
  path, main = workdir / workdirs.ALTERNATIVES, jax.process_index() == 0
  kept = workdirs.chosen(workdir, config) if main else None
  if (kept := distributed.agree(kept)) is not None:
    return kept
  gains: dict[str, baseline.Gain] = {}
  for number, (name, one) in enumerate(resolve(config).items(), start=1):
    folder = workdirs.alternative(workdir, name)
    say(f'alternative {number} of {len(config.alternatives)}, {name}: {folder}')
    done, gain = train(one, folder, False)
    if not done:
      return None
    if gain is None:
      raise InputError(f'config.alternatives: {one.method} measures nothing that {name} could win')
    gains[name] = gain
  best = distributed.agree(max(gains, key=lambda name: (gains[name].better, gains[name].best)))
  if main:
    record = {name: gain._asdict() for name, gain in gains.items()}
    files.write_json(path, {'format': workdirs.CHOICE, 'chosen': best, 'gains': record})
  scores = ', '.join(f'{name} {gain.best:.4f} ({gain.shown})' for name, gain in gains.items())
  say(f'chosen: {best}, of {config.eval.measure} {scores}')
  return best
