"""Training with any method."""

import functools
import logging
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
import numpy as np
from etils import epath

from dprjax.base import distributed, machine, mesh, tree
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.models import adapter as adapters
from dprjax.models import hub, model_folders, scratch
from dprjax.text import seen, tokenizing, vocabularies
from dprjax.training import (
  baseline,
  dual_encoder,
  log,
  updates,
)
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training import workdir as workdirs
from dprjax.training.loop import Loop, Result, Setup, Trial

if TYPE_CHECKING:
  from dprjax.models.artifact import Prompt

logger = logging.getLogger('dprjax')

# For a backbone from scratch: the kind of vocabulary, by architecture.
VOCABULARIES = {
  'wordpiece': (vocabularies.train_wordpiece, 'bert'),
  'sentencepiece': (vocabularies.train_sentencepiece, 'xlm-roberta'),
}


def train(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> Result:
  """Trains ``config`` in ``workdir``, from its latest checkpoint if there is one."""
  methods.load(config.method)
  experiments = configs.resolve(config)
  log.check(config.log.to)
  devices = mesh.make_mesh(config.mesh)
  for experiment in experiments.values():
    methods.of(experiment)
    mesh.check_batch(devices, experiment.batch_size, experiment.grad_cache)
  with distributed.turn():
    begun, load = workdirs.begun_options(workdir), functools.cache(dual_encoder.load_settings)
    (config, resolved), *rest = (
      dual_encoder.resolve_settings(one, begun, load) for one in (config, *experiments.values())
    )
  experiments = dict(zip(experiments, (one for one, _ in rest), strict=True))
  text = configs.to_json(config)
  if distributed.agree(text) != text:
    raise InputError(
      f'process {jax.process_index()} has another --config than process 0; give all processes the '
      'same'
    )
  workdirs.check_folders(config, workdirs.inputs(config))
  main = jax.process_index() == 0
  say = logger.info if main else logger.debug
  if resolved:
    say(resolved)
  run = functools.partial(train_one, devices, say)
  if '' in experiments:
    return run(Trial(experiments[''], epath.Path(workdir)))
  from dprjax.training import selection

  with workdirs.claim(workdir, workdirs.TRAINING, workdirs.inputs(config), lock=main) as claimed:
    (workdirs.claim_workdir if main else workdirs.check_workdir)(config, claimed)
    return selection.choose_alternative(experiments, claimed, run, say)


def train_one(devices: jax.sharding.Mesh, say: Callable[[str], None], part: Trial) -> Result:
  """Trains one experiment: prepare, fold, restore, loop, finish."""
  lock, inputs = jax.process_index() == 0, workdirs.inputs(part.config)
  with workdirs.claim(part.workdir, workdirs.TRAINING, inputs, lock=lock) as workdir:
    setup = prepare(part._replace(workdir=workdir), devices, say)
    start = choice = None
    if setup.data.frozen is not None:
      start = baseline.scores(workdir, setup.data.frozen)
      if nothing_left(setup, start):
        return Result(0, None, None, saturated=True)
    if setup.folds is not None:
      from dprjax.training import selection

      fold = functools.partial(train_one, devices, say)
      choice = selection.choose_steps(setup.config, workdir, setup.folds, fold, say)
      if choice is None:
        return Result(0, None, None, done=False)
      if not part.whole:
        return Result(0, None, None, gain=choice.gain)
    with Loop(setup, part, choice) as run:
      if run.evaluates and start is None:
        start = baseline.scores(workdir, run.baseline)
        if nothing_left(setup, start):
          return Result(0, None, None, saturated=True)
      run.begin(start)
      if warning := workdirs.seen_before(workdir):
        logger.warning('%s', warning)
      while run.goes_on:
        run.advance()
        if run.save(run.evaluate()):
          return run.result()
      run.finish()
      settle(setup, part)
      say(last_words(setup, part, run.standing.gain, run.ended))
      return run.result()


def prepare(part: Trial, devices: jax.sharding.Mesh, say: Callable[[str], None]) -> Setup:
  """Prepares text, backbone and parameters: everything that can fail before training."""
  experiment, workdir, main = part.config, part.workdir, jax.process_index() == 0
  method = methods.load(experiment.method)
  config = configs.settle(experiment, devices.devices.flat[0].platform)
  workdirs.check_workdir(experiment, workdir)
  machine.keep_programs()
  path = workdirs.backbone_path(config, workdir)
  with distributed.turn():
    texts = method.data(config.data, config, workdir, devices)
    if path == config.backbone.path:
      hub.check_readable(path)
    if main:
      workdirs.claim_workdir(experiment, workdir)
    make_backbone(config, workdir, texts.read, method.needs)
  if texts.folds is not None:
    from dprjax.training import selection

    if changes := selection.fit(config, texts.folds, mesh.batch_devices(devices)):
      config = configs.replace(config, changes)
      queries = counted(texts.folds.queries, 'training queries')
      say(f'a fold leaves {queries}: config.batch_size is {config.batch_size}')
      texts = method.data(config.data, config, workdir, devices)
  backbone = hub.load_backbone(path, heads=method.parts, on_disk=True)
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
  model = method.build(config, backbone.config, devices, tokenizer)
  prompt = None
  if config.prompt.init_from:
    from dprjax.models import artifact

    prompt = artifact.load_prompt_for(config.prompt.init_from, tokenizer.sha256, backbone)
  elif 'prompt.init_text' in method.declared and (start := start_text(config, backbone.config)):
    prompt = prompt_of_text(config, backbone, tokenizer, start)
  parts = methods.Parts(backbone.params, backbone.heads, prompt, texts.parts, backbone.sha256)
  key = jax.random.fold_in(jax.random.key(config.seed), 0)
  params = tree.flatten(model.init(parts, key))
  trainable = tree.trainable_names(config.trainable, list(params))
  updates.match_rules(config.optim, trainable)
  known: seen.Seen = {} if prompt is None else prompt.queries
  files = {**texts.files, **workdirs.model_files(config, backbone.path)}
  if main:
    workdirs.begin(workdir, files)
    if known:
      seen.write(workdir / workdirs.SEEN_BEFORE, known)
  data = texts.open(tokenizer, backbone.config)
  return Setup(config, workdir, devices, backbone, model, params, trainable, data, say, texts.folds)


def start_text(config: ml_collections.ConfigDict, model: Any) -> str:
  settings = config.prompt
  if settings.init_text != 'auto':
    return settings.init_text
  training = adapters.find(settings.kind, 'config.prompt.kind').training
  can = training is not None and training.of_text is not None and settings.reparam == 'none'
  return configs.START if settings.length and can and model.causal else ''


def prompt_of_text(
  config: ml_collections.ConfigDict,
  backbone: hub.Backbone,
  tokenizer: tokenizing.Tokenizer,
  start: str,
) -> 'Prompt':
  """The adapter initialized from a text, without special tokens."""
  settings = config.prompt
  training = adapters.find(settings.kind, 'config.prompt.kind').training
  (tokens,) = tokenizer.encode_bare([start]).values()
  if training is None or training.of_text is None or not len(tokens):
    raise InputError(
      f'config.prompt.init_text: {start!r:.60} has no tokens, or a prompt of kind '
      f'{settings.kind!r} cannot start from text'
    )
  tokens = np.resize(tokens, settings.length)  # cut, or repeated
  from dprjax.models.artifact import Prompt

  arrays = training.of_text(config, backbone.config, backbone.params, tokens)
  return Prompt({'kind': settings.kind}, arrays, 'config.prompt.init_text')


def nothing_left(setup: Setup, start: methods.Scores) -> bool:
  """Whether no gain over ``start`` could be significant; if so, logs it and writes a file. All
  processes call it. A training that has begun continues.
  """
  config, workdir, why = setup.config, setup.workdir, ''
  if config.eval.skip_saturated and not config.data.fold and not workdirs.begun(workdir):
    why = distributed.agree(baseline.saturated(config.eval.measure, start))
  if jax.process_index() == 0:
    workdirs.write_saturated(workdir, why)
  if why:
    setup.say(f'nothing is trained: {why}')
    if commands := next_of_choice(setup):
      setup.say(commands)
  return bool(why)


def make_backbone(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  read: Callable[[], Iterator[str]],
  needs: Sequence[str],
) -> None:
  """Makes a backbone from scratch in the workdir, if the config asks for one.

  Its vocabulary is trained on the texts of ``read``; ``needs`` names its heads.
  """
  path = workdirs.backbone_path(config, workdir)
  if config.backbone.path.startswith('scratch:') and not epath.Path(path).exists():
    with tempfile.TemporaryDirectory() as folder:
      learn, model_type = VOCABULARIES[config.backbone.vocabulary]
      tokenizer = learn(read(), config.backbone.vocab_size, folder)
      model = scratch.shape(
        config.backbone.path.removeprefix('scratch:'),
        tokenizer.vocab_size,
        model_type=model_type,
        pad_token_id=tokenizer.pad_id,
      )
      params = scratch.init_params(model, jax.random.key(config.seed))
      heads = {}
      if needs:
        from dprjax.models.head_specs import HEADS, Head  # few methods have one

        head_params = {name: HEADS[name].init(model, jax.random.key(config.seed)) for name in needs}
        heads = {name: Head(jax.device_get(head)) for name, head in head_params.items()}
      model_folders.save_backbone(path, model, params, source=folder, heads=heads)


def settle(setup: Setup, part: Trial) -> None:
  """Chooses among candidates in a run without alternatives, with ``config.eval.choose``."""
  workdir, config = setup.workdir, setup.config
  alone = part.whole and workdirs.top(workdir) == workdir
  measured = alone and config.eval.choose and jax.process_index() == 0
  if measured and (workdir / workdirs.BASELINE).exists():
    from dprjax.training import choice  # imports BM25

    choice.write(workdir, choice.decide({workdirs.model_name(config): workdirs.scored(workdir)}))


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
    from dprjax.training import choice  # imports BM25

    decision = choice.read(workdirs.top(setup.workdir))
    assert decision is not None
    chosen = f'Chosen of {len(decision.choice.estimates) + 1}: {decision.choice.verdict}'
    return f'{chosen}. {ended[0].upper()}{ended[1:]}. {next_of_choice(setup)}'
  if gain.difference > 0 or methods.load(config.method).intermediate(config, setup.trainable):
    return f'{ended}. {gain.verdict}. Next: {command}'
  return (
    f'{ended}. {gain.verdict}. Keep the model as it was; to export this one anyway: {command} '
    '--force'
  )


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
