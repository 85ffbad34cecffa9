"""Exports of a run: prompts, adapters and Hugging Face directories."""

import logging
from typing import Any

from etils import epath

from dprjax.base import files, outputs, provenance, repository, tree, version
from dprjax.base.errors import InputError
from dprjax.base.progress import rounded
from dprjax.exports import card, prompt_folders
from dprjax.exports.card import Draft, ExportOptions
from dprjax.models import artifact, hub, model_folders
from dprjax.retrieval import choosing, folder
from dprjax.text import seen, tokenizing
from dprjax.text.vector_spec import SIDES, VectorSpec, of_meta
from dprjax.training import baseline, checkpoint
from dprjax.training import choice as choices
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training import workdir as workdirs

logger = logging.getLogger('dprjax')

_LIKELY = 0.05  # warn if the chance of a loss is larger


def export(
  workdir: epath.PathLike,
  out: epath.PathLike,
  step: int | None = None,
  method: str | None = None,
  options: ExportOptions = ExportOptions(),  # noqa: B008 (immutable)
  force: bool = False,
) -> epath.Path:
  """Writes the trained parameters of ``workdir`` to ``out``, atomically.

  Args:
    out: a ``.npz`` file for a prompt only; a directory for an encoder, another format or a card. An
      encoder directory has ``query/`` and ``passage/`` if the sides differ, and ``prompt.npz`` if
      there is a prompt.
    step: the checkpoint step; by default the best on the dev split, else the latest.
    method: the module of the method, if it is outside this package, see ``method.load_named``.
    force: export even if no checkpoint scored above the baseline. Intermediate stages
      (``Method.intermediate``) do not need it.
  """
  out, config = epath.Path(out), workdirs.load_workdir(workdir)
  # A run without a choice, such as that of a cross-encoder, may start from no retriever.
  untrained = config.eval.choose and workdirs.why_untrained(workdir) and _as_retriever(out, options)
  workdir = epath.Path(workdir) if untrained else workdirs.trained(workdir)
  config = workdirs.load_workdir(workdir)
  trained_by = methods.load_named(config.method, method)
  path = workdirs.backbone_path(config, workdir)
  inputs = {
    '--workdir': workdir,
    '--metrics': list(options.metrics.values()),
    'config.backbone.path': path,
    'config.prompt.init_from': config.prompt.init_from,
    **configs.inputs(config),
  }
  check_out(out, inputs, options)
  backbone = hub.load_backbone(path, heads=trained_by.parts, on_disk=True)
  if untrained:
    return _write_untrained(out, inputs, None, config.backbone.path, backbone, workdir)
  saved = checkpoint.Checkpoints(workdir, backbone.sha256, read_only=True)
  try:
    step = saved.best() if step is None else step
    if step is None:
      raise InputError(
        f'{workdir} has no checkpoint yet; train first: python -m dprjax.train '
        f'--workdir={workdir} ...'
      )
    trained, extra = saved.restore_trainable(step), saved.extra(step)
    decision = choices.read(workdirs.top(workdir)) if config.eval.choose else None
    force = force or trained_by.intermediate(config, trained)
    model = choices.trained_model(workdir, config)
    lost = decision is not None and decision.choice.candidate.model != model and not force
    if decision is None:
      check_gain(saved, workdir, force)
    elif not (lost and _as_retriever(out, options)):
      check_choice(decision, model, workdir, force)
  finally:
    saved.close()
  if extra['backbone_sha256'] != backbone.sha256:
    raise InputError(
      f'{backbone.path} is not the backbone of the training in {workdir} (its sha256 has changed)'
    )
  if decision is not None and lost:
    return _write_untrained(out, inputs, decision, config.backbone.path, backbone, workdir)
  product = trained_by.export(config, epath.Path(workdir), backbone, trained)
  scored = extra.get('best') is not None and extra['best_step'] == step
  meta: dict[str, Any] = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': product.meta.get('kind'),
    'backbone': config.backbone.path,
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizing.load_tokenizer(backbone.path).sha256,
    **product.meta,
    'dprjax_version': version.__version__,
    'task': product.meta.get('task', config.task),
    'metrics': {f'dev/{config.eval.measure}': extra['best']} if scored else {},
  }
  gain = baseline.Gain.read(extra.get('gain'), f'{saved.folder}/{step}')
  if gain is not None and (scored or gain.folds):
    meta['gain'] = gain._asdict()
  how, choice = None, None
  if decision is not None:
    if decision.choice.candidate.model == model:  # not by force
      choice = decision.choice.record(decision.weights)
    candidate, estimate = decision.best_of(model)
    meta['expected'] = {
      'over': choosing.FROZEN.model,
      'gain': estimate.expected,
      'loss': choosing.LOSS,
      'chance_of_loss': estimate.loss,
      'with_bm25': candidate.fused,
      'queries': decision.choice.queries,
    }
    if candidate == decision.choice.candidate and candidate.fused:
      how = decision.fusion
  stamped = provenance.read_mark(workdir).get('inputs')
  began_with = stamped if isinstance(stamped, dict) else None
  training = card.Training(config.to_dict(), step, began_with, meta['metrics'])
  values = rounded(tree.count(trained))
  done = f'step {step}, {values} {"parameters" if product.encoders else "values"}'
  if product.meta.get('sides') == 'query':
    done += ', for queries only: passages have no prompt'
  known = workdirs.seen_queries(epath.Path(workdir))
  draft = Draft(product, meta, backbone, done, known, training, choice, workdir, how)
  return _write(out, inputs, draft, options)


def _as_retriever(out: epath.Path, options: ExportOptions) -> bool:
  return out.suffix != '.npz' and options.format is None and not options.card


def _write_untrained(
  out: epath.Path,
  inputs: outputs.Inputs,
  decision: choices.Decision | None,
  name: str,
  backbone: hub.Backbone,
  workdir: epath.Path,
) -> epath.Path:
  """Writes the retriever of a choice without the trained model, or of an untrained run."""
  with model_folders.claim(out, inputs), files.atomic_path(out) as aside:
    aside.mkdir(parents=True)
    folder.describe(
      aside,
      _name_of(name, backbone),
      backbone.sha256,
      name=out.name,
      choice=None if decision is None else decision.choice.record(decision.weights),
      data=_data_of(workdir),
      how=None if decision is None else decision.fusion,
    )
    others = workdirs.top(workdir) / workdirs.ALTERNATIVES
    folders = [one / workdirs.PASSAGES for one in [workdir, *sorted(others.glob('*'))]]
    folder.take(aside, next((one for one in folders if one.exists()), folders[0]))
    model_folders.mark(aside)
  chosen = choosing.FROZEN if decision is None else decision.choice.candidate
  logger.info('%s: the retriever that was chosen: %s', out, chosen)
  return out


def _describe(aside: epath.Path, draft: Draft, name: str) -> None:
  sha256, encoders, settings = draft.meta['backbone_sha256'], draft.product.encoders, {}
  if isinstance(sha256, dict):
    sha256 = '+'.join(dict.fromkeys(sha256[side] for side in SIDES))
  if '' in encoders:  # such a folder has one length
    lengths = ('query_max_length', 'passage_max_length')
    settings = {key: getattr(encoders['']['spec'], key) for key in lengths}
  folder.describe(
    aside,
    folder.HERE if encoders else _name_of(draft.meta['backbone'], draft.backbone),
    sha256,
    name=name,
    settings=settings,
    choice=draft.choice,
    data=_data_of(draft.workdir),
    how=draft.bm25,
  )


def _data_of(workdir: epath.Path | None) -> dict[str, str] | None:
  """The SHA-256 of the files of data, by role."""
  if workdir is None:
    return None
  stamps = provenance.read_mark(workdir).get('inputs') or {}
  return {role: one['sha256'] for role, one in stamps.items() if not role.startswith('backbone')}


def _name_of(name: str, backbone: hub.Backbone) -> str:
  """A name of the backbone that does not depend on the working folder."""
  local = name.startswith('scratch:') or epath.Path(name).exists()
  return str(files.resolved(backbone.path)) if local else name


def check_gain(saved: checkpoint.Checkpoints, workdir: epath.PathLike, force: bool) -> None:
  """Warns if the gain recorded in the latest checkpoint may be chance."""
  latest = saved.latest()
  if latest is None:
    return
  gain = baseline.Gain.read(saved.extra(latest).get('gain'), f'{saved.folder}/{latest}')
  if gain is None or gain.better:
    return
  if gain.difference <= 0 and not force:
    raise InputError(f'{workdir}: {gain.verdict}; to export it anyway: --force, or force=True')
  logger.warning('%s', gain.verdict)


def check_choice(
  decision: choices.Decision, model: str, workdir: epath.PathLike, force: bool
) -> None:
  """Raises InputError if another candidate was chosen; warns if the model may score lower."""
  candidate, estimate = decision.best_of(model)
  words = (
    f'{workdir}: {candidate}: expected gain {estimate.expected:+.3f}, chance of a loss over '
    f'{choosing.LOSS:g}: {choosing.percent(estimate.loss)}'
  )
  if decision.choice.candidate.model != model:
    words += f'; held-out queries chose {decision.choice.verdict}'
    if not force:
      raise InputError(f'{words}; to export it anyway: --force, or force=True')
  if decision.choice.candidate.model != model or estimate.loss > _LIKELY:
    logger.warning('%s', words)


def convert(
  source: epath.PathLike,
  out: epath.PathLike,
  backbone: str | None = None,
  options: ExportOptions = ExportOptions(),  # noqa: B008 (immutable)
) -> epath.Path:
  """Writes an exported prompt in another format.

  Args:
    source: a prompt.npz, a folder or a hub repository with one, USER/NAME or USER/NAME@REVISION.
    backbone: the frozen encoder; by default the one named in ``source``.
  """
  out, path = epath.Path(out), artifact.locate(source)
  inputs = {'--from': path, '--backbone': backbone, '--metrics': list(options.metrics.values())}
  check_out(out, inputs, options)
  prompt = artifact.load_prompt(path)
  loaded = hub.load_backbone(backbone or prompt.meta['backbone'], on_disk=True)
  tokenizer = tokenizing.load_tokenizer(loaded.path).sha256
  artifact.check_prompt(prompt, loaded.config, loaded.sha256, tokenizer)
  product = methods.Product({}, prompt.arrays, prompt.meta)
  draft = Draft(product, prompt.meta, loaded, f'of {path}', prompt.queries)
  return _write(out, inputs, draft, options)


def _write(
  out: epath.Path, inputs: outputs.Inputs, draft: Draft, options: ExportOptions
) -> epath.Path:
  if options.base_model is not None:  # a public name, unlike a local path
    _check_base(options.base_model, draft.backbone, options.format == 'peft')
    draft = draft._replace(meta=draft.meta | {'backbone': str(options.base_model)})
  if options.format == 'sentence-transformers' and not draft.product.encoders:
    draft = _merge(draft)
  product, meta = draft.product, draft.meta
  check_ending(out, product, options)
  if out.suffix == '.npz':
    with outputs.claim(out, inputs, endings=('',)):
      artifact.save_prompt(out, artifact.Prompt(meta, dict(product.prompt), queries=draft.queries))
    stored = '' if files.is_special(out) else f', {rounded(out.stat().length, "B")}'
    logger.info('%s: %s%s', out, draft.done, stored)
    return out
  with model_folders.claim(out, inputs), files.atomic_path(out) as aside:
    if product.encoders:
      _write_encoders(aside, draft, options)
    else:
      _write_prompt(aside, draft, options)
    if options.card:
      with files.atomic_write(aside / card.FILE) as file:
        file.write(card.write(options, draft, out.name))
    if _as_retriever(out, options) and draft.embeds and not product.prompts:
      _describe(aside, draft, out.name)
      if draft.workdir is not None and draft.product.meta.get('sides') == 'query':
        folder.take(aside, draft.workdir / workdirs.PASSAGES)
    model_folders.mark(aside)
  logger.info('%s: %s', out, draft.done)
  return out


def _merge(draft: Draft) -> Draft:
  """Merges an adapter, where possible (`Kind.merge`), into the encoders of each side."""
  prompt = _prompt(draft)
  merge, backbone = prompt.kind.merge, draft.backbone
  if merge is None:
    return draft
  spec, encoders = of_meta(draft.meta, backbone.spec), {}
  for side in ('',) if prompt.tied else SIDES:
    model, params = backbone.config, backbone.params
    for adapter in prompt.adapters(side or 'query'):
      if adapter is not None:
        model, params = merge(model, params, adapter)
    side_spec = spec.only(side) if side else spec
    encoders[side] = {'config': model, 'params': params, 'spec': side_spec}
  return draft._replace(product=methods.Product(encoders, {}, {}))


def _prompt(draft: Draft) -> artifact.Prompt:
  return artifact.Prompt(draft.meta, dict(draft.product.prompt), queries=draft.queries)


def _write_prompt(out: epath.Path, draft: Draft, options: ExportOptions) -> None:
  out.mkdir(parents=True)
  prompt, model = _prompt(draft), draft.backbone.config
  if options.format == 'peft':
    name = options.base_model.name if options.base_model else card.hub_name(draft.meta['backbone'])
    prompt_folders.write_adapters(out, prompt, model, name)
    # On the left, padding would come between a prefix and the text.
    model_folders.copy_tokenizer(draft.backbone.path, out, padding_side='right')
  elif options.format == 'sentence-transformers':
    if not model.family.prompted_by:
      raise InputError(
        f'--format=sentence-transformers: {model.model_type} models take no prompt there; use npz'
      )
    prompt_folders.write_prompted(out, prompt, draft.backbone)
  else:
    artifact.save_prompt(out / hub.PROMPT, prompt)


def _check_base(reference: repository.Reference, backbone: hub.Backbone, needed: bool) -> None:
  """Checks that a hub name refers to this backbone, if its weights are in the cache.

  A missing check is logged if the name is ``needed`` to load the export.
  """
  try:
    folder = repository.fetch(reference, ['*config.json', 'modules.json'], 'backbone', True)
    named = hub.load_backbone(str(folder), on_disk=True)
  except InputError:
    if needed:
      logger.warning(
        '--base_model=%s is not in the cache of the hub: not compared with the backbone (SHA-256 '
        '%s)',
        reference,
        backbone.sha256,
      )
    return
  if named.sha256 != backbone.sha256:
    raise InputError(
      f'--base_model={reference} has SHA-256 {named.sha256}, but the prompt was trained on '
      f'{backbone.sha256}'
    )


def _write_encoders(out: epath.Path, draft: Draft, options: ExportOptions) -> None:
  product, meta, backbone = draft.product, draft.meta, draft.backbone
  if '' in product.encoders and not product.prompt:
    _warn_of_lengths(product.encoders[''].get('spec'))
  sha256 = {}
  for name, arguments in product.encoders.items():
    model_folders.save_backbone(
      out / name,
      **{
        'config': backbone.config,
        'source': backbone.path,
        'hf_config': backbone.hf_config,
        **arguments,
      },
    )
    if known := seen.join(seen.read(epath.Path(backbone.path) / seen.FILE), draft.queries):
      seen.write(out / name / seen.FILE, known)
    sha256[name] = hub.load_backbone(str(out / name), on_disk=True).sha256
  meta['backbone_sha256'] = sha256.get('') or sha256
  if product.prompt:
    prompt = _prompt(draft)
    if options.format == 'sentence-transformers':
      prompt_folders.add_prompt(out, prompt)
    else:
      artifact.save_prompt(out / hub.PROMPT, prompt)
  for name, (arrays, prompt_meta) in product.prompts.items():
    path = out / 'prompts' / f'{name}.npz'
    path.parent.mkdir(exist_ok=True)
    prompt = artifact.Prompt({**meta, **prompt_meta}, dict(arrays), queries=draft.queries)
    artifact.save_prompt(path, prompt)


def _warn_of_lengths(spec: VectorSpec | None) -> None:
  """Warns if the single maximum length of a folder for both sides differs from ``spec``."""
  if spec is None:
    return
  short = min(SIDES, key=spec.max_length)
  if spec.max_length(short) < spec.longest:
    logger.warning(
      '%s were scored with at most %d tokens, but the folder has one length, %d; for the same '
      'vectors: dprjax encode --side=%s --max_length=%d',
      {'query': 'queries', 'passage': 'passages'}[short],
      spec.max_length(short),
      spec.longest,
      short,
      spec.max_length(short),
    )


def check_out(out: epath.Path, inputs: outputs.Inputs, options: ExportOptions) -> None:
  """Raises InputError if ``out`` cannot be written; called before anything is read."""
  if out.suffix == '.npz' and (options.card or options.format not in (None, 'npz')):
    raise InputError(f'--out={out}: a card, or another --format than npz, needs a folder')
  claim = (
    outputs.claim(out, inputs, endings=('',), lock=False)
    if out.suffix == '.npz'
    else outputs.claim_folder(
      out, inputs, what=model_folders.OURS, ours=model_folders.is_ours, lock=False
    )
  )
  with claim:
    pass


def check_ending(out: epath.Path, product: methods.Product, options: ExportOptions) -> None:
  """Raises InputError if ``out`` or the format does not fit the product."""
  noun = product.noun
  if not product.encoders:
    pairs = 'pair' in (product.meta.get('template') or {})
    fits, noun = not (pairs and _as_retriever(out, options)), 'the prompt of a reranker'
  else:
    several = product.prompts or (product.prompt and '' not in product.encoders)
    formats = (None,) if several else (None, 'sentence-transformers')
    fits = out.suffix != '.npz' and options.format in formats
  if not fits:
    raise InputError(
      f'--out={out}: this run trained {noun}; name {"a folder" if product.encoders else "NAME.npz"}'
      ', and leave out --format'
    )
