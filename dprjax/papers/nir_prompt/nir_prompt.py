"""Both stages of NIR-Prompt: templates, prompts and export of tasks.

A task is an entry of ``config.tasks``. Its prompt is one of

- fresh prompt encoders, which are trained (matching description module)
- the vectors of a file, ``config.tasks.NAME.prompt`` (essential matching module)
- a weighted sum of the prompts of other tasks (``config.adapt.fusion``: a new task)
- words, or nothing

Parameters are ``prompt/NAME/query/P1/...`` by task and slot, and for a sum ``prompt/NAME/weights``
and its constant prompts, ``sources/NAME/...``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import files, tree
from dprjax.base.errors import InputError
from dprjax.losses.types import Params
from dprjax.models import artifact, head_specs, hub
from dprjax.models.artifact import Prompt
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.template import Template
from dprjax.papers.nir_prompt import learned_tokens, multitask, task_templates
from dprjax.papers.nir_prompt.learned_tokens import LearnedTokens
from dprjax.papers.nir_prompt.task_templates import Spec, TaskTemplates
from dprjax.text import vector_spec
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import dual_encoder
from dprjax.training.method import (
  BatchShapes,
  DataSource,
  Method,
  Model,
  Parts,
  Product,
  TrainingData,
)

_KEPT = 'prompts'  # folder in the workdir


class Files(NamedTuple):
  """Prompts from files, by task: ``own`` for trained tasks, ``sources`` for a sum."""

  own: Mapping[str, Prompt]
  sources: Mapping[str, Prompt]


class Prompts(NamedTuple):
  """The prompts of a run.

  Attributes:
    init: ``(parts, key) -> params``, the subtrees ``prompt`` and ``sources``.
    table: ``params ->`` the learned vectors of all tasks, or None.
  """

  templates: TaskTemplates
  init: Callable[[Parts, Array], dict[str, Any]]
  table: Callable[[Params], LearnedTokens | None]


def read_files(config: ConfigDict) -> Files:
  prompts = {
    name: artifact.load_prompt(config.tasks[name].prompt)
    for name in sorted(config.tasks)
    if config.tasks[name].prompt
  }
  for name, prompt in prompts.items():
    task = prompt.meta.get('task') or name
    if prompt.meta['kind'] == learned_tokens.NAME and task != name:  # refused later
      raise InputError(
        f'config.tasks.{name}.prompt: {prompt.path} is for the task {task}; name the file of '
        f'{name}, or call the task {task}'
      )
  return Files(prompts, _sources(config) if config.adapt.fusion else {})


def _sources(config: ConfigDict) -> dict[str, Prompt]:
  named = config.adapt.prompts or f'{hub.package_path(config.backbone.path)}/prompts'
  key = f'config.adapt.prompts: {named}'
  sources: dict[str, Prompt] = {}
  for part in named.split(','):
    path = files.existing(part.strip(), 'prompts')
    for file in sorted(path.glob('*.npz'), key=str) if path.is_dir() else [path]:
      prompt = artifact.load_prompt(file)
      if file.stem in sources or {file.stem, prompt.meta.get('task')} & set(config.tasks):
        raise InputError(f'{key}: {file.stem} is twice there, or the new task; leave it out')
      sources[file.stem] = prompt
  if not sources:
    raise InputError(f'{key}: no prompts (NAME.npz) found; name prompts of trained tasks')
  return dict(sorted(sources.items()))


def layers_fixed(config: ConfigDict, model: EncoderConfig) -> int:
  count = config.template.fixed_layers
  return model.num_layers - 1 if count == -1 else min(count, model.num_layers)


def specs(config: ConfigDict, kinds: Sequence[str], prompts: Files) -> list[Spec]:
  settings = config.template
  names = [name for kind in kinds for name in task_templates.PROMPTS[kind]]
  task_specs = []
  for task in sorted(config.tasks):
    entry, key = config.tasks[task], f'config.tasks.{task}'
    if task in prompts.own:
      task_specs.append(_spec_of(prompts.own[task], kinds))
    elif prompts.sources:
      several = [_spec_of(prompt, kinds) for prompt in prompts.sources.values()]
      for prompt, spec in zip(prompts.sources.values(), several, strict=True):
        if spec != several[0] or not spec.lengths:
          raise InputError(
            f'{prompt.path}: its slots are {_described(spec)}, but {_described(several[0])} in '
            f'{next(iter(prompts.sources.values())).path}; a sum needs equal slots of vectors'
          )
      task_specs.append(several[0])
    else:
      words = _words(settings.kind, names, entry, key)
      lengths = {name: _length(settings, name) for name in names if name not in words}
      task_specs.append(Spec(tuple(kinds), words, lengths))
  return task_specs


def _words(kind: str, names: Sequence[str], entry: ConfigDict, key: str) -> dict[str, str]:
  if kind == 'continuous':
    return {}
  if kind == 'none':
    return dict.fromkeys(names, '')
  if kind == 'hybrid':
    return {name: task_templates.HYBRID for name in names if name == 'pair/P3'}
  words = {}
  for name in names:
    side, slot = name.split('/')
    task = key.rpartition('.')[2]
    texts = tuple(entry.words[side]) or task_templates.WORDS.get(task, {}).get(side, ())
    place = int(slot[1:]) - 1
    if place >= len(texts):
      raise InputError(
        f"{key}.words.{side}: the template kind 'manual' needs words of {slot}; {texts!r:.60} "
        'has none'
      )
    words[name] = texts[place]
  return words


def _length(settings: ConfigDict, name: str) -> int:
  number, lengths = int(name.rpartition('P')[2]), tuple(settings.lengths)
  if number > len(lengths):
    raise InputError(f'config.template.lengths: {lengths!r:.60} has no length of P{number}')
  return lengths[number - 1]


def _spec_of(prompt: Prompt, kinds: Sequence[str]) -> Spec:
  learned_tokens.check_template(prompt, kinds)
  return learned_tokens.spec(prompt)


def _described(spec: Spec) -> str:
  return ', '.join(
    [f'{name} [{length}, H]' for name, length in spec.lengths.items()]
    + [f'{name} {words!r:.40}' for name, words in spec.words.items()]
  )


def make_templates(
  config: ConfigDict, kinds: Sequence[str], prompts: Files, tokenizer: Tokenizer, vocab_size: int
) -> TaskTemplates:
  return TaskTemplates.make(specs(config, kinds, prompts), tokenizer, vocab_size)


def build(
  config: ConfigDict, model: EncoderConfig, tokenizer: Tokenizer, kinds: Sequence[str]
) -> Prompts:
  prompts = read_files(config)
  count = layers_fixed(config, model)
  templates = make_templates(config, kinds, prompts, tokenizer, model.vocab_size)
  names = tuple(sorted(config.tasks))
  learned = {
    task: [name for number, name, _ in templates.rows if number == index]
    for index, task in enumerate(names)
  }
  lengths = {(number, name): length for number, name, length in templates.rows}

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    for prompt in (*prompts.own.values(), *prompts.sources.values()) if parts.sha256 else ():
      check_prompt(prompt, config, model, parts, tokenizer, kinds)
    params: dict[str, Any] = {}
    fresh: dict[str, int] = {}
    for number, task in enumerate(names):
      if prompts.sources:
        count = len(prompts.sources)
        params[f'{task}/weights'] = np.full(count, 1 / count, np.float32)
      elif task in prompts.own:
        for name, vectors in learned_tokens.vectors(prompts.own[task]).items():
          params[f'{task}/{name}'] = {'vectors': vectors}
      else:
        fresh |= {f'{task}/{name}': lengths[number, name] for name in learned[task]}
    keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(sorted(fresh))}
    params |= learned_tokens.init_prompt_encoders(model, keys, fresh)
    subtrees = {'prompt': tree.unflatten(params)} if params else {}
    if prompts.sources:
      subtrees['sources'] = tree.unflatten(_vectors(prompts.sources, '{task}/{name}'))
    return subtrees

  def table(params: Params) -> LearnedTokens | None:
    if not templates.rows or 'prompt' not in params:
      return None
    vectors = expand(params, learned)
    return LearnedTokens(templates.table([vectors[task] for task in names]), count)

  return Prompts(templates, init, table)


def _vectors(prompts: Mapping[str, Prompt], path: str) -> dict[str, np.ndarray]:
  return {
    path.format(task=task, name=name): vectors
    for task, prompt in prompts.items()
    for name, vectors in learned_tokens.vectors(prompt).items()
  }


def expand(
  params: Params, learned: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Float[Array, 'P H']]]:
  vectors: dict[str, dict[str, Any]] = {task: {} for task in learned}
  fresh = {}
  for task, names in learned.items():
    prompt = params['prompt'][task] if names else {}
    for name in names:
      kind, slot = name.split('/')
      if 'weights' in prompt:
        # In the order of weights.
        each = [params['sources'][source][kind][slot] for source in sorted(params['sources'])]
        vectors[task][name] = jnp.sum(prompt['weights'][:, None, None] * jnp.stack(each), axis=0)
      elif 'vectors' in prompt[kind][slot]:
        vectors[task][name] = prompt[kind][slot]['vectors']
      else:
        fresh[f'{task}/{name}'] = prompt[kind][slot]
  for name, array in learned_tokens.encode_prompts(fresh).items():
    task, _, slot = name.partition('/')
    vectors[task][slot] = array
  return vectors


def check_prompt(
  prompt: Prompt,
  config: ConfigDict,
  model: EncoderConfig,
  parts: Parts,
  tokenizer: Tokenizer,
  kinds: Sequence[str],
) -> None:
  artifact.check_prompt(prompt, model, parts.sha256, tokenizer.sha256)
  learned_tokens.check_template(prompt, kinds)
  if 'pair' in kinds:
    learned_tokens.check_head(prompt, head_specs.sha256('mlm', model, parts.heads['mlm']))
  if (there := prompt.meta['fixed_layers']) != (here := layers_fixed(config, model)):
    raise InputError(
      f'{prompt.path}: trained with {there} fixed layers, but config.template.fixed_layers is '
      f'{here}'
    )


def check_trained(config: ConfigDict, params: Params) -> None:
  """Raises InputError unless one fresh prompt is trained, and prompts from files are not."""
  names = list(tree.flatten(params))
  trained = tree.trainable_names(config.trainable, names)
  fixed = [one for one in names if one.startswith('sources/') or one.endswith('/vectors')]
  if both := [one for one in fixed if one in trained]:
    raise InputError(f'config.trainable: {both[0]} comes from a file and is constant; leave it out')
  prompts = {one for one in names if one.startswith('prompt/') and not one.endswith('/weights')}
  dual_encoder.check_fresh(config, params, sorted(prompts.difference(fixed)))
  several = sorted({name.split('/')[1] for name in trained if name.startswith('prompt/')})
  if len(several) > 1 and not any(name.startswith('backbone/') for name in trained):
    raise InputError(
      f'config.tasks: prompts are trained one task at a time, not {" and ".join(several)} '
      'together; leave one (mdm=NAME), or train the backbone too'
    )


def method(build: Callable[..., Model], form: str, kinds: Sequence[str], **more: Any) -> Method:
  """A method, by the form of its data, the kinds of its templates, and ``more`` fields."""
  return Method(
    build,
    functools.partial(find_data, form=form, kinds=kinds),
    functools.partial(export, kinds=kinds),
    shapes=functools.partial(shapes, form=form, kinds=kinds),
    # The matching description module.
    intermediate=lambda config, trained: (
      not config.adapt.fusion and all(name.startswith('prompt/') for name in trained)
    ),
    **more,
  )


def shapes(
  config: ConfigDict, model: EncoderConfig, tokenizer: Tokenizer, form: str, kinds: Sequence[str]
) -> BatchShapes:
  templates = make_templates(config, kinds, read_files(config), tokenizer, model.vocab_size)
  around = {kind: templates.extra(kind) for kind in kinds}
  return multitask.batch_shapes(config, model, tokenizer, form, around)


def find_data(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  form: str,
  kinds: Sequence[str],
) -> DataSource:
  prompts = read_files(config)
  # Fails before data are read.
  specs(config, kinds, prompts)

  def templates(tokenizer: Tokenizer) -> Mapping[str, Sequence[Template]]:
    return make_templates(config, kinds, prompts, tokenizer, tokenizer.vocab_size).templates

  texts = multitask.find_tasks(section, config, workdir, devices, form, templates)
  return _keep(texts, workdir, prompts)


def _keep(texts: DataSource, workdir: epath.Path, prompts: Files) -> DataSource:
  """Copies the prompt files into the workdir for the export."""

  def open_kept(tokenizer: Tokenizer, model: EncoderConfig) -> TrainingData:
    if jax.process_index() == 0:
      for folder, several in prompts._asdict().items():
        for name, prompt in several.items():
          path = workdir / _KEPT / folder / f'{name}.npz'
          if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            artifact.save_prompt(path, prompt)
    return texts.open(tokenizer, model)

  named = {
    f'{role} {name}': epath.Path(prompt.path)
    for role, several in (('prompt of', prompts.own), ('added prompt of', prompts.sources))
    for name, prompt in several.items()
  }
  return texts._replace(open=open_kept, files={**texts.files, **named})


def _kept(workdir: epath.Path, folder: str) -> dict[str, Prompt]:
  return {
    path.stem: artifact.load_prompt(path)
    for path in sorted((workdir / _KEPT / folder).glob('*.npz'), key=str)
  }


def export(
  config: ConfigDict,
  workdir: epath.Path,
  backbone: hub.Backbone,
  trained: Mapping[str, np.ndarray],
  kinds: Sequence[str],
) -> Product:
  """The prompt of a task, or the encoder with its head and the prompts of all tasks."""
  prompts = Files(_kept(workdir, 'own'), _kept(workdir, 'sources'))
  of_tasks = dict(zip(sorted(config.tasks), specs(config, kinds, prompts), strict=True))
  sources = _vectors(prompts.sources, 'sources/{task}/{name}')
  stored = _vectors(prompts.own, 'prompt/{task}/{name}/vectors')
  params = tree.unflatten({**sources, **stored, **trained})
  learned = {task: list(spec.lengths) for task, spec in of_tasks.items()}
  prompt = {name: params[name] for name in ('prompt', 'sources') if name in params}
  expanded = jax.device_get(jax.jit(functools.partial(expand, learned=learned))(prompt))
  heads = dual_encoder.export_heads(backbone, trained, {})
  shared: dict[str, Any] = {'fixed_layers': layers_fixed(config, backbone.config)}
  if 'pair' in kinds:
    shared |= {
      'pooling': 'mask',
      'verbalizer': list(config.template.verbalizer),
      'score': config.template.score,
      'head_sha256': head_specs.sha256('mlm', backbone.config, heads['mlm']),
    }
  written = {}
  for task, spec in of_tasks.items():
    section = {**config.data.to_dict(), **config.tasks[task].data.to_dict()}
    meta = dual_encoder.meta_of(config, vector_spec.of_config(config, section), 'template') | shared
    forms = {kind: task_templates.FORMS[kind] for kind in kinds}
    meta |= {'template': forms, 'words': dict(spec.words), 'task': task}
    if prompts.sources:
      values = params['prompt'][task]['weights'].tolist()
      meta['weights'] = dict(zip(prompts.sources, values, strict=True))
    written[task] = (
      {
        f'{learned_tokens.SLOTS}{name}': np.asarray(array, np.float32)
        for name, array in expanded[task].items()
      },
      meta,
    )
  if not dual_encoder.trains(trained, 'backbone') and not dual_encoder.trains(trained, 'head'):
    (only,) = [task for task in written if dual_encoder.trains(trained, f'prompt/{task}')]
    return Product({}, *written[only])
  checkpoint = {
    'params': dual_encoder.encoder_params(backbone, trained),
    'heads': heads,
    'max_length': backbone.config.max_tokens,
  }
  return Product({'': checkpoint}, {}, {}, prompts=written)
