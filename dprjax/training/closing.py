"""The end of a training: its choice among candidates, its verdict and the next command."""

import shlex

import jax
from etils import epath

from dprjax.training import baseline, selection
from dprjax.training import method as methods
from dprjax.training import workdir as workdirs
from dprjax.training.loop import Setup
from dprjax.training.selection import Trial


def settle(setup: Setup, part: Trial) -> None:
  """Chooses among candidates in a run without alternatives, with ``config.eval.choose``."""
  workdir, config = setup.workdir, setup.config
  alone = part.whole and workdirs.top(workdir) == workdir
  measured = alone and config.eval.choose and jax.process_index() == 0
  if measured and (workdir / workdirs.BASELINE).exists():
    selection.decide(workdir, {workdirs.model_name(config): workdir})


def last_words(setup: Setup, part: Trial, gain: baseline.Gain | None, ended: str) -> str:
  """What was chosen, how the training ``ended``, and the next command."""
  config = setup.config
  if not part.whole and gain is not None:  # not the final model
    return f'{ended}. {gain.verdict}.'
  only_prompts = all(name.startswith('prompt/') for name in config.trainable)
  out = 'prompt.npz' if config.prompt.length or only_prompts else 'DIR'
  workdir = shlex.quote(str(setup.workdir))
  command = f'python -m dprjax.export --workdir={workdir} --out={out}{_method(setup)}'
  if gain is None:
    return f'{ended}. Next: {command}'
  if config.eval.choose and (workdirs.top(setup.workdir) / workdirs.CHOSEN).exists():
    return f'{_chosen(setup)}. {ended[0].upper()}{ended[1:]}. {next_of_choice(setup)}'
  if gain.difference > 0 or methods.load(config.method).intermediate(config, setup.trainable):
    return f'{ended}. {gain.verdict}. Next: {command}'
  return (
    f'{ended}. {gain.verdict}. Keep the model as it was; to export this one anyway: {command} '
    '--force'
  )


def _chosen(setup: Setup) -> str:
  from dprjax.training import choice  # imports BM25

  kept = choice.read(workdirs.top(setup.workdir))
  assert kept is not None
  return f'Chosen of {len(kept.choice.estimates) + 1}: {kept.choice.verdict}'


def _method(setup: Setup) -> str:
  method = setup.config.method
  return f' --method={method}' if methods.outside(method) else ''


def next_of_choice(setup: Setup) -> str:
  """The commands from a choice among candidates to a search; without a choice ''."""
  if not setup.config.eval.choose:
    return ''
  top = workdirs.top(setup.workdir)
  name = shlex.quote(top.name or 'mine')
  folders = (epath.Path(setup.config.data.dir), setup.workdir / 'data')

  def place(name: str) -> str:
    paths = (folder / f'{name}.jsonl' for folder in folders)
    return next((shlex.quote(str(path)) for path in paths if path.exists()), name.upper())

  return f"""Next:
  dprjax export --workdir={shlex.quote(str(top))} --out={name}{_method(setup)}
  dprjax index --retriever={name} --input={place('corpus')}
  dprjax search --retriever={name} --queries={place('queries')} --out=run.trec"""
