"""Model cards: the README.md of a published model, in the format of the Hugging Face hub."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import huggingface_hub
from etils import epath

from dprjax.base import files, repository, version
from dprjax.models import adapter, pooling
from dprjax.retrieval import comparison
from dprjax.text.vector_spec import SIDES

FILE = 'README.md'
_MOST = 60  # limit of listed options, data files and measures


class TrainingSummary(NamedTuple):
  """A summary of a training, from its workdir.

  Attributes:
    method: its name.
    config: the experiment.
    step: of the published checkpoint.
    inputs: stamps of input files, by role.
    metrics: of the dev split at this step.
  """

  method: str
  config: Mapping[str, Any]
  step: int
  inputs: Mapping[str, Any] | None
  metrics: Mapping[str, float]


class Card(NamedTuple):
  """Facts for a card beyond those in the files.

  Attributes:
    format: 'npz', 'peft' or 'sentence-transformers'; None for the directory of an encoder.
    base_model: the backbone on the hub.
    licence: its name on the hub.
    metrics: (metrics of ``dprjax.evaluate``, SHA-256 of the file), by name of the data.
    training: None without a workdir.
    name: the repository.
    folder: name of the published folder, the title if there is no repository.
  """

  format: str | None
  base_model: repository.Reference | None
  licence: str | None
  metrics: Mapping[str, tuple[dict[str, Any], str]]
  training: TrainingSummary | None
  name: str | None = None
  folder: str | None = None


class Subject(NamedTuple):
  """The model of a card.

  Attributes:
    meta: of the prompt or encoder.
    prompt: shapes of the prompt arrays by name; empty without a prompt.
    encoders: folders of trained encoders; empty for a frozen backbone.
    embeds: whether texts become vectors; False for cross-encoders and for backbones before tuning.
    backbone: folder of the initial backbone.
    class_name: of its family, see `Family`.
  """

  meta: Mapping[str, Any]
  prompt: Mapping[str, tuple[int, ...]]
  encoders: tuple[str, ...]
  embeds: bool
  backbone: epath.Path
  class_name: str = ''


def hub_name(backbone: str) -> str | None:
  """The hub repository of a backbone name; None for a local path or a package."""
  reference = repository.parse(backbone)
  if reference is None or '/' not in reference.name or epath.Path(backbone).exists():
    return None
  return reference.name


def write(card: Card, subject: Subject) -> str:
  """The card: YAML for the hub, Markdown for people."""
  base = card.base_model.name if card.base_model else hub_name(str(subject.meta['backbone']))
  head = huggingface_hub.ModelCardData(
    base_model=base,
    base_model_relation=('finetune' if subject.encoders else 'adapter') if base else None,
    library_name=_library(card, subject),
    license=card.licence,
    pipeline_tag='sentence-similarity' if subject.embeds else None,
    tags=['dprjax', 'dense-retrieval', *_tags(subject)],
  )
  parts = [
    f'---\n{head}\n---',
    f'# {_plain(card.name or card.folder or subject.meta.get("task") or "A prompt")}',
    _about(subject, base),
    '## How to use it\n\n' + '\n\n'.join(_usage(card, subject, base)),
    '## What it was trained on\n\n' + '\n'.join(_data(card.training)),
    *(['## How it was trained\n\n' + _training(card.training)] if card.training else []),
    '## How good it is\n\n' + '\n'.join(_metrics(card, subject)),
    '## Limits\n\n' + '\n'.join(_limits(subject)),
    '## Licence\n\n' + _licence(card, subject),
    f'Written by dprjax {version.__version__}.',
  ]
  return '\n\n'.join(parts) + '\n'


def _tags(subject: Subject) -> list[str]:
  known = {'prefix': ['prefix-tuning'], 'lora': ['lora']}
  return known.get(_kind(subject).name, []) if subject.prompt else []


def _kind(subject: Subject) -> adapter.Kind:
  return adapter.find(subject.meta.get('kind') or 'prefix', 'a card')


def _library(card: Card, subject: Subject) -> str:
  if card.format == 'npz':
    return 'dprjax'
  return card.format or ('sentence-transformers' if subject.embeds else 'transformers')


def _about(subject: Subject, base: str | None) -> str:
  local = str(subject.meta['backbone']).rstrip('/').rpartition('/')[2]
  name = f'[{base}](https://huggingface.co/{base})' if base else _code(local)
  digest = subject.meta['backbone_sha256']
  tensors = (
    f'Its encoder has the SHA-256 {_code(digest)}.'
    if isinstance(digest, str)
    else ' '.join(
      f'The encoder of {side} has the SHA-256 {_code(d)}.' for side, d in digest.items()
    )
  )
  if subject.encoders:
    return f'{name}, fine-tuned for retrieval. {tensors}'
  shapes = ', '.join(f'{_code(name)} {list(shape)}' for name, shape in subject.prompt.items())
  kind = _kind(subject)
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


def _usage(card: Card, subject: Subject, base: str | None) -> Iterator[str]:
  here = card.name or 'DIR'
  if card.format == 'peft':
    sides = [side for side in SIDES if any(name.startswith(f'{side}/') for name in subject.prompt)]
    pooled = pooling.find(subject.meta['pooling']).text
    scaled = ', scaled to length 1' if subject.meta['normalize'] else ''
    yield f'With `transformers` and `peft`. The vector of a text is {pooled}{scaled}.'
    # AutoModel of T5 has the decoder, too.
    model = 'T5EncoderModel' if subject.class_name == 'T5Encoder' else 'AutoModel'
    for place in [f"'{here}', subfolder='{side}'" for side in sides] or [f"'{here}'"]:
      yield _block(
        'python',
        'from peft import PeftModel\n'
        f'from transformers import AutoTokenizer, {model}\n\n'
        f"tokenizer = AutoTokenizer.from_pretrained('{here}')  # must pad on the right\n"
        f'backbone = {model}.from_pretrained({base or "BACKBONE"!r})\n'
        f'model = PeftModel.from_pretrained(backbone, {place}).eval()',
      )
  elif not subject.embeds:
    yield 'With `transformers`, as any model of its class; `dprjax` reads the folder too.'
    return
  elif card.format != 'npz' and set(subject.encoders) <= {''}:
    trust = ', trust_remote_code=True' if subject.prompt and card.format else ''
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
  if card.format != 'peft':
    if subject.encoders:
      arguments = f"'{here}'" + (f", prompt='{here}/prompt.npz'" if subject.prompt else '')
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
  else:
    yield 'For `dprjax` it becomes a prompt file:'
    yield _block(
      'sh',
      f'python -m dprjax.export --from={here} --backbone={base or "BACKBONE"} --out=prompt.npz',
    )


def _data(training: TrainingSummary | None) -> Iterator[str]:
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


def _metrics(card: Card, subject: Subject) -> Iterator[str]:
  training = card.training
  for name, (metrics, digest) in card.metrics.items():
    counts = {measure: len(values) for measure, values in metrics['per_query'].items()}
    yield f'{_plain(name)}, means over queries with their 95 % bootstrap intervals:'
    yield ''
    yield '| measure | mean | 95 % interval | queries |'
    yield '| --- | ---: | ---: | ---: |'
    for measure in list(metrics['mean'])[:_MOST]:
      found = comparison.compare({name: metrics}, measure)[name]
      yield (
        f'| {_plain(measure)} | {found.mean:.4f} | {found.low:.4f} to {found.high:.4f} | '
        f'{counts[measure]:,} |'
      )
    yield ''
    command = metrics.get('command', 'python -m dprjax.evaluate')
    yield f'Made by {_code(command)}; its file has the SHA-256 {_code(digest)}.'
    yield ''
  gain = subject.meta.get('gain')
  if gain is not None:
    yield from _gain(gain)
    yield from _expected(subject.meta.get('expected'))
  elif training is not None:
    for measure, value in training.metrics.items():
      yield (
        f'On the dev split, which chose the checkpoint: {_plain(measure)} {value:.4f}. It was not '
        'compared with the initial model.'
      )
  if not card.metrics and gain is None and not (training and training.metrics):
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


def _training(training: TrainingSummary) -> str:
  settings = json.dumps(_public(training.config), indent=1, sort_keys=True, default=list)
  return (
    f'By `python -m dprjax.train`, method {_code(training.method)}, up to step {training.step}.\n\n'
    f'<details><summary>All settings</summary>\n\n{_block("json", settings)}\n\n</details>'
  )


def _limits(subject: Subject) -> Iterator[str]:
  meta = subject.meta
  if subject.prompt and not subject.encoders:
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
  if subject.prompt:
    yield (
      '- Queries and passages are both embedded with it.'
      if meta.get('sides') != 'query'
      else '- It is for queries only: passages are embedded by the bare backbone.'
    )
  yield (
    '- It is good at text like its training text. On other text it may be worse than its '
    'backbone: measure before use.'
  )


def _licence(card: Card, subject: Subject) -> str:
  own = f'{_code(card.licence)}.' if card.licence else 'Not stated by its author.'
  base = backbone_licence(subject.backbone)
  return own + (f' The card of the backbone says {_code(base)}.' if base else '')


def backbone_licence(folder: epath.Path) -> str | None:
  """The licence in the card of a backbone folder, if it can be read."""
  path = folder / FILE
  if not path.exists() or files.is_special(path):
    return None
  try:
    found = huggingface_hub.ModelCard.load(path, ignore_metadata_errors=True).data.license
  except Exception:  # anyone may have written this card, and a licence is optional
    return None
  return found if isinstance(found, str) else None


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
