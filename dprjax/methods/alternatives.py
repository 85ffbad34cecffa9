"""Which of several experiments is best, where ``config.alternatives`` has some.

Each is a training in a workdir of its own below ``alternatives``. On how many updates, and whether
that is a gain over what it began with, each decides as it does alone. Of those that are a gain, or
of all where none is, the one with the highest score on held-out queries is chosen. Where the number
of updates is found by folds, only that one is then trained on all queries. Elsewhere they race: one
that has fallen behind the best of those before it is stopped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.methods import baseline
from dprjax.methods.method import Scores
from dprjax.runtime import config as configs
from dprjax.runtime import distributed
from dprjax.runtime import workdir as workdirs

_RACED = 1 / 3  # of the updates: before that, one that learns slowly would seem to lose


class Rival(NamedTuple):
  """The best of the alternatives so far.

  Attributes:
    name: its name.
    scores: its best evaluation; the values of single queries may be on process 0 alone.
  """

  name: str
  scores: Scores

  def beats(self, measure: str, found: Scores, step: int, total: int) -> bool:
    """Whether one with these scores after ``step`` of ``total`` updates is to stop.

    It is where a third of its updates is done and the 95 % interval of the rival's lead, over the
    same queries, lies above 0. All processes call it.
    """
    low = baseline.compare(measure, found, self.scores).low
    return distributed.agree(step >= _RACED * total and low is not None and low > 0)


class Trained(NamedTuple):
  """What a training found.

  Attributes:
    done: whether it came to its end.
    gain: of its best evaluation, or of its folds.
    scores: its best evaluation, where it has one on held-out queries.
  """

  done: bool
  gain: baseline.Gain | None
  scores: Scores | None


Train = Callable[[ml_collections.ConfigDict, epath.Path, bool, Rival | None], Trained]


def resolve(config: ml_collections.ConfigDict) -> dict[str, ml_collections.ConfigDict]:
  """The experiments by name; the config itself, under no name, where it has no alternatives.

  Those whose prompts are for queries alone come first: they encode passages once, and what is
  behind them stops early. The others are in alphabetical order.

  Raises:
    InputError: there is one alternative, or no held-out queries to choose by.
  """
  if not config.alternatives:
    return {'': config}
  if len(config.alternatives) == 1:
    [name] = config.alternatives
    raise InputError(f'config.alternatives: {name} is the only one; name two or more, or none')
  sections = {f'tasks.{name}.data': entry.data for name, entry in config.tasks.items()}
  for key, data in (sections or {'data': config.data}).items():
    if not (data.hold_out or data.dev_split or data.get('folds')):
      raise InputError(
        'config.alternatives: held-out queries choose one of '
        f'{", ".join(config.alternatives)}, and there are none; set config.{key}.hold_out=0.2, for '
        'instance'
      )
  found = {name: configs.alternative(config, name) for name in sorted(config.alternatives)}
  found = dict(sorted(found.items(), key=lambda item: item[1].prompt.sides != 'query'))
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
    train: ``(config, workdir, to the end, rival) -> what it found``, which goes on where it was
      stopped. Not to its end, it may end where the gain is known, or where the rival beats it.
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
  rival: Rival | None = None
  for number, (name, one) in enumerate(resolve(config).items(), start=1):
    folder = workdirs.alternative(workdir, name)
    say(f'alternative {number} of {len(config.alternatives)}, {name}: {folder}')
    found = train(one, folder, False, rival)
    if not found.done:
      return None
    if found.gain is None:
      raise InputError(f'config.alternatives: {one.method} measures nothing that {name} could win')
    gains[name] = found.gain
    if found.scores is not None and (rival is None or gains[rival.name].best < found.gain.best):
      rival = Rival(name, found.scores)
  best = distributed.agree(max(gains, key=lambda name: (gains[name].better, gains[name].best)))
  if main:
    record = {name: gain._asdict() for name, gain in gains.items()}
    files.write_json(path, {'format': workdirs.CHOICE, 'chosen': best, 'gains': record})
  scores = ', '.join(f'{name} {gain.best:.4f} ({gain.shown})' for name, gain in gains.items())
  say(f'chosen: {best}, by {config.eval.measure} on held-out queries: {scores}')
  return best
