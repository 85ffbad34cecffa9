"""Model cards: the README.md of a published model, in the format of the Hugging Face hub."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import huggingface_hub
from etils import epath

from dprjax.base import files, repository, version
from dprjax.models import adapter, hub, pooling
from dprjax.retrieval import comparison, fusion
from dprjax.text import seen
from dprjax.text.vector_spec import SIDES
from dprjax.training import method as methods

FILE = 'README.md'
_MOST = 60  # limit of listed options, data files and measures


class ExportOptions(NamedTuple):
  """The format of an export, and its model card.

  Attributes:
    format: 'npz', 'peft' or 'sentence-transformers'; None: an npz file, or the encoder directory
      if one was trained.
    base_model: of the backbone on the hub.
    metrics: files of ``dprjax.evaluate`` for the card, by name of the data.
    name: the repository of the card.
  """

  format: str | None = None
  base_model: repository.Reference | None = None
  card: bool = False
  licence: str | None = None
  metrics: Mapping[str, str] = types.MappingProxyType({})
  name: str | None = None


class Training(NamedTuple):
  """The training of an export: its config, step, stamps of input files by role, and dev metrics."""

  config: Mapping[str, Any]
  step: int
  inputs: Mapping[str, Any] | None
  metrics: Mapping[str, float]


class Draft(NamedTuple):
  """An export, before it is written.

  Attributes:
    meta: of the prompt or encoder.
    backbone: the initial one.
    done: for the log.
    training: None if it was made from an exported prompt.
    choice, bm25: the record of the choice among candidates, and the fusion with BM25 in it.
  """

  product: methods.Product
  meta: dict[str, Any]
  backbone: hub.Backbone
  done: str
  queries: seen.Seen = types.MappingProxyType({})
  training: Training | None = None
  choice: dict[str, Any] | None = None
  workdir: epath.Path | None = None
  bm25: fusion.Fusion | None = None

  @property
  def embeds(self) -> bool:
    """Whether texts become vectors, unlike for cross-encoders and backbones before tuning."""
    return all(one.get('spec') is not None for one in self.product.encoders.values())


def hub_name(backbone: str) -> str | None:
  """The hub repository of a backbone name; None for a local path or a package."""
  reference = repository.parse(backbone)
  if reference is None or '/' not in reference.name or epath.Path(backbone).exists():
    return None
  return reference.name


def write(options: ExportOptions, draft: Draft, folder: str) -> str:
  """The card of a published folder: YAML for the hub, Markdown for people."""
  encoders, library = draft.product.encoders, options.format
  if library is None:
    library = 'sentence-transformers' if draft.embeds else 'transformers'
  known = {'prefix': ['prefix-tuning'], 'lora': ['lora']}
  tags = known.get(_kind(draft).name, []) if draft.product.prompt else []
  base = options.base_model.name if options.base_model else hub_name(str(draft.meta['backbone']))
  head = huggingface_hub.ModelCardData(
    base_model=base,
    base_model_relation=('finetune' if encoders else 'adapter') if base else None,
    library_name='dprjax' if library == 'npz' else library,
    license=options.licence,
    pipeline_tag='sentence-similarity' if draft.embeds else None,
    tags=['dprjax', 'dense-retrieval', *tags],
  )
  parts = [
    f'---\n{head}\n---',
    f'# {_plain(options.name or folder)}',
    _about(draft, base),
    '## How to use it\n\n' + '\n\n'.join(_usage(options, draft, base)),
    '## What it was trained on\n\n' + '\n'.join(_data(draft.training)),
    *(['## How it was trained\n\n' + _training(draft.training)] if draft.training else []),
    '## How good it is\n\n' + '\n'.join(_metrics(options, draft)),
    '## Limits\n\n' + '\n'.join(_limits(draft)),
    '## Licence\n\n' + _licence(options, draft),
    f'Written by dprjax {version.__version__}.',
  ]
  return '\n\n'.join(parts) + '\n'


def _kind(draft: Draft) -> adapter.Kind:
  return adapter.find(draft.meta.get('kind') or 'prefix', 'a card')


def _about(draft: Draft, base: str | None) -> str:
  local = str(draft.meta['backbone']).rstrip('/').rpartition('/')[2]
  name = f'[{base}](https://huggingface.co/{base})' if base else _code(local)
  digest = draft.meta['backbone_sha256']
  tensors = (
    f'Its encoder has the SHA-256 {_code(digest)}.'
    if isinstance(digest, str)
    else ' '.join(
      f'The encoder of {side} has the SHA-256 {_code(d)}.' for side, d in digest.items()
    )
  )
  if draft.product.encoders:
    return f'{name}, fine-tuned for retrieval. {tensors}'
  arrays = draft.product.prompt.items()
  shapes = ', '.join(f'{_code(name)} {list(array.shape)}' for name, array in arrays)
  kind = _kind(draft)
  what, layout = f'An adapter for {name}: {kind.text}.', ''
  if kind.name == 'prefix':
    what = (
      f'A deep prompt for {name}: key and value vectors that every layer attends to beside those '
      'of the text.'
    )
    layout = '; a prefix is `[layers, 2, length, heads, head size]`, keys before values'
  return (
    f'{what} The backbone is unchanged. {tensors} The file: {shapes or "a template of words"}, '
    f'float32{layout}.'
  )


def _usage(options: ExportOptions, draft: Draft, base: str | None) -> Iterator[str]:
  here, prompt, encoders = options.name or 'DIR', draft.product.prompt, draft.product.encoders
  if options.format == 'peft':
    sides = [side for side in SIDES if any(name.startswith(f'{side}/') for name in prompt)]
    pooled = pooling.find(draft.meta['pooling']).text
    scaled = ', scaled to length 1' if draft.meta['normalize'] else ''
    yield f'With `transformers` and `peft`. The vector of a text is {pooled}{scaled}.'
    # AutoModel of T5 has the decoder, too.
    t5 = draft.backbone.config.family.class_name == 'T5Encoder'
    model = 'T5EncoderModel' if t5 else 'AutoModel'
    for place in [f"'{here}', subfolder='{side}'" for side in sides] or [f"'{here}'"]:
      yield _block(
        'python',
        'from peft import PeftModel\n'
        f'from transformers import AutoTokenizer, {model}\n\n'
        f"tokenizer = AutoTokenizer.from_pretrained('{here}')  # must pad on the right\n"
        f'backbone = {model}.from_pretrained({base or "BACKBONE"!r})\n'
        f'model = PeftModel.from_pretrained(backbone, {place}).eval()',
      )
  elif not draft.embeds:
    yield 'With `transformers`, as any model of its class; `dprjax` reads the folder too.'
    return
  elif options.format != 'npz' and set(encoders) <= {''}:
    trust = ', trust_remote_code=True' if prompt and options.format else ''
    code = ' This runs `dprjax_prompt.py`: read it first.' if trust else ''
    yield f'With `sentence-transformers` 6 or newer.{code}'
    yield _block(
      'python',
      'from sentence_transformers import SentenceTransformer\n\n'
      f"model = SentenceTransformer('{here}'{trust})\n"
      "queries = model.encode_query(['a question'])\n"
      "passages = model.encode_document(['a passage'])\n"
      'scores = model.similarity(queries, passages)',
    )
  if options.format != 'peft':
    if encoders:
      arguments = f"'{here}'" + (f", prompt='{here}/prompt.npz'" if prompt else '')
    else:
      arguments = f"{base or 'BACKBONE'!r}, prompt='{here}'"
    yield 'With `dprjax`:'
    yield _block(
      'python',
      'from dprjax import Retriever\n\n'
      f'retriever = Retriever.load({arguments})\n'
      "queries = retriever.encode(['a question'], side='query')\n"
      "passages = retriever.encode(['a passage'], side='passage')",
    )


def _data(training: Training | None) -> Iterator[str]:
  if training is None:
    yield 'Unknown: this was made from an exported prompt.'
    return
  data = training.config.get('data') or {}
  tasks = (training.config.get('tasks') or {}).values()
  names = [data.get('dir') or data.get('format') or '', *(task['data']['dir'] for task in tasks)]
  shown = ', '.join(_code(name.rstrip('/').rpartition('/')[2]) for name in names if name)
  yield f'Data: {shown or "not named"}. The input files of the training:'
  yield ''
  stamped = {
    role: entry
    for role, entry in (training.inputs or {}).items()
    if isinstance(entry, dict) and not role.startswith('backbone (')
  }
  if not stamped:
    yield 'The workdir has no record of these files.'
    return
  yield '| role | file | bytes | SHA-256 |'
  yield '| --- | --- | ---: | --- |'
  for role, entry in list(stamped.items())[:_MOST]:
    yield (
      f'| {_plain(role)} | {_code(entry.get("name", ""))} | {_plain(entry.get("bytes", ""))} | '
      f'{_code(entry.get("sha256", ""))} |'
    )
  if len(stamped) > _MOST:
    yield ''
    yield f'And {len(stamped) - _MOST} more.'


def _metrics(options: ExportOptions, draft: Draft) -> Iterator[str]:
  training = draft.training
  for name, path in options.metrics.items():
    metrics = comparison.read_metrics(files.regular_file(path, '--metrics'))
    counts = {measure: len(values) for measure, values in metrics['per_query'].items()}
    yield f'{_plain(name)}, means over queries with their 95 % bootstrap intervals:'
    yield ''
    yield '| measure | mean | 95 % interval | queries |'
    yield '| --- | ---: | ---: | ---: |'
    for measure in list(metrics['mean'])[:_MOST]:
      estimate = comparison.compare({name: metrics}, measure)[name]
      yield (
        f'| {_plain(measure)} | {estimate.mean:.4f} | {estimate.low:.4f} to {estimate.high:.4f} | '
        f'{counts[measure]:,} |'
      )
    yield ''
    command = metrics.get('command', 'python -m dprjax.evaluate')
    yield f'Made by {_code(command)}; its file has the SHA-256 {_code(files.sha256_file(path))}.'
    yield ''
  gain = draft.meta.get('gain')
  if gain is not None:
    yield from _gain(gain)
    yield from _expected(draft.meta.get('expected'))
  elif training is not None:
    for measure, value in training.metrics.items():
      yield (
        f'On the dev split, which chose the checkpoint: {_plain(measure)} {value:.4f}. It was not '
        'compared with the initial model.'
      )
  if not options.metrics and gain is None and not (training and training.metrics):
    yield 'Not measured here.'


def _gain(gain: Mapping[str, Any]) -> Iterator[str]:
  """Sentences on ``gain`` in meta, after `artifact.check_gain`."""
  interval = ''
  if gain['low'] is not None:
    interval = (
      f'; 95 % interval {gain["low"]:+.4f} to {gain["high"]:+.4f}, paired bootstrap over '
      f'{gain["queries"]:,} queries'
    )
  where = 'On the dev split, which chose the checkpoint and so flatters it'
  if gain['folds']:
    where = f'In cross-validation over {gain["folds"]} parts of the training queries'
  yield (
    f'{where}: {_plain(gain["measure"])} {gain["best"]:.4f}, against {gain["baseline"]:.4f} before '
    f'the training (difference {gain["difference"]:+.4f}{interval}).'
  )
  if gain.get('new') is not None and gain['new_queries'] < gain['queries']:
    yield (
      f'On the {gain["new_queries"]:,} queries with answers not seen in training, the difference '
      f'is {gain["new"]:+.4f}.'
    )
  if not gain['better']:
    chance = ', or better by chance' if gain['difference'] > 0 else ''
    yield ''
    yield f'**It is not better than the initial model{chance}.**'


def _expected(expected: Any) -> Iterator[str]:
  """A sentence on ``expected`` in meta; nothing if another tool wrote it."""
  try:
    gain, loss, chance = (float(expected[key]) for key in ('gain', 'loss', 'chance_of_loss'))
    words = ', fused with BM25' if expected['with_bm25'] else ''
  except (KeyError, TypeError, ValueError):
    return
  yield ''
  yield (
    f'Expected on other queries like these{words}: a gain of {gain:+.3f} over the frozen encoder, '
    f'and a chance of {chance:.0%} of losing more than {loss:g}.'
  )


def _training(training: Training) -> str:
  settings = json.dumps(_public(training.config), indent=1, sort_keys=True, default=list)
  method = _code(training.config['method'])
  return (
    f'By `python -m dprjax.train`, method {method}, up to step {training.step}.\n\n'
    f'<details><summary>All settings</summary>\n\n{_block("json", settings)}\n\n</details>'
  )


def _limits(draft: Draft) -> Iterator[str]:
  meta, prompt = draft.meta, draft.product.prompt
  if prompt and not draft.product.encoders:
    yield (
      '- It fits only this backbone, by the SHA-256 above. With another, even another version of '
      'the same model, its vectors mean nothing.'
    )
  if 'query_max_length' in meta:
    yield (
      f'- Queries are cut at {meta["query_max_length"]} tokens, passages at '
      f'{meta["passage_max_length"]}.'
    )
  if meta.get('query_prefix') or meta.get('passage_prefix'):
    yield (
      f'- Queries begin with {_code(repr(meta.get("query_prefix", "")))}, passages with '
      f'{_code(repr(meta.get("passage_prefix", "")))}.'
    )
  if 'normalize' in meta:
    yield f'- Vectors are compared by {"cosine" if meta["normalize"] else "inner product"}.'
  if prompt:
    yield (
      '- Queries and passages are both embedded with it.'
      if meta.get('sides') != 'query'
      else '- It is for queries only: passages are embedded by the bare backbone.'
    )
  yield (
    '- It is good at text like its training text. On other text it may be worse than its '
    'backbone: measure before use.'
  )


def _licence(options: ExportOptions, draft: Draft) -> str:
  sentence = f'{_code(options.licence)}.' if options.licence else 'Not stated by its author.'
  base = backbone_licence(epath.Path(draft.backbone.path))
  return sentence + (f' The card of the backbone says {_code(base)}.' if base else '')


def backbone_licence(folder: epath.Path) -> str | None:
  """The licence in the card of a backbone folder, if it can be read."""
  path = folder / FILE
  if not path.exists() or files.is_special(path):
    return None
  try:
    licence = huggingface_hub.ModelCard.load(path, ignore_metadata_errors=True).data.license
  except Exception:  # anyone may have written this card, and a licence is optional
    return None
  return licence if isinstance(licence, str) else None


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
  shown: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      shown[key] = _public(value)
    elif isinstance(value, str) and '/' in value and hub_name(value) is None:
      shown[key] = value.rstrip('/').rpartition('/')[2]
    else:
      shown[key] = value
  return shown


def _plain(value: Any) -> str:
  """Text for a line of Markdown or the cell of a table."""
  return re.sub(r'([\\`*_<>|\[\]#])', r'\\\1', ' '.join(str(value).split())[:200])


def _code(value: Any) -> str:
  return '`' + ' '.join(str(value).split()).replace('`', "'").replace('|', '/')[:200] + '`'


def _block(language: str, text: str) -> str:
  return f'```{language}\n{text}\n```'
