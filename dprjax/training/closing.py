"""The end of a training: its choice among candidates, its verdict and the next command."""

import shlex

import jax
from etils import epath

from dprjax.retrieval import choosing
from dprjax.training import baseline, selection
from dprjax.training import choice as choices
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
    selection.decide(workdir, {choices.model_name(config): workdir})


def last_words(setup: Setup, part: Trial, gain: baseline.Gain | None, ended: str) -> str:
  """What was chosen, how the training ``ended``, and the next command."""
  config = setup.config
  if not part.whole and gain is not None:  # not the final model
    return f'{ended}. {gain.verdict}.'
  only_prompts = all(name.startswith('prompt/') for name in config.trainable)
  out = 'prompt.npz' if config.prompt.length or only_prompts else 'DIR'
  command = f'python -m dprjax.export --workdir={shlex.quote(str(setup.workdir))} --out={out}'
  if methods.outside(config.method):
    command += f' --method={config.method}'
  if gain is None:
    return f'{ended}. Next: {command}'
  if config.eval.choose and (kept := choices.read(workdirs.top(setup.workdir))) is not None:
    chosen = f'Chosen of {len(kept.choice.estimates) + 1}: {kept.choice.verdict}'
    return f'{chosen}. {ended[0].upper()}{ended[1:]}. {_next_of_choice(setup, kept, command, out)}'
  if gain.difference > 0 or methods.load(config.method).intermediate(config, setup.trainable):
    return f'{ended}. {gain.verdict}. Next: {command}'
  return (
    f'{ended}. {gain.verdict}. Keep the model as it was; to export this one anyway: {command} '
    '--force'
  )


def _next_of_choice(setup: Setup, kept: choices.Kept, command: str, out: str) -> str:
  """The next command after a choice among candidates."""
  top = workdirs.top(setup.workdir)
  chosen = kept.choice.candidate
  if chosen.model == choices.trained_model(setup.workdir, setup.config):
    hybrid = _hybrid(setup, choices.beside(epath.Path(out)), out) if chosen.fused else ''
    return f'Next: {command}{hybrid}'
  use = 'Use the encoder as it is'
  if chosen.model == choosing.BM25.model:
    use = 'Use only BM25'
  elif chosen.fused:
    use = f'{use}, with BM25:{_hybrid(setup, top / workdirs.FUSION)}\n'
  return f'{use}; to export the trained one anyway: {command} --force'


def _hybrid(setup: Setup, weights: epath.Path, model: str = '') -> str:
  """The commands of a search with an exported model (or none) and BM25."""
  path = setup.config.backbone.path
  backbone = shlex.quote(setup.backbone.path if path.startswith('scratch:') else path)
  encoder = f'{backbone} --prompt={model}' if model.endswith('.npz') else model or backbone
  corpus, queries = (
    shlex.quote(str(file)) if file.exists() else name.upper()
    for name in ('corpus', 'queries')
    for file in [epath.Path(setup.config.data.dir) / f'{name}.jsonl']
  )
  return f"""
  dprjax encode --backbone={encoder} --side=passage --input={corpus} --out=vectors/corpus
  dprjax encode --backbone={encoder} --side=query --input={queries} --out=vectors/queries
  dprjax bm25 --corpus={corpus} --queries={queries} --index_dir=bm25 --out=bm25.trec
  dprjax search --corpus=vectors/corpus --queries=vectors/queries --texts={queries} \
--bm25_index=bm25 --hybrid={shlex.quote(str(weights))} --out=run.trec"""
