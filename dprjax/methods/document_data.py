"""Plain text to pretrain a backbone on."""

import functools
from collections.abc import Iterator

import jax
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.data import docstrings, documents, views
from dprjax.data.batches import open_batches
from dprjax.data.text import Tokenizer
from dprjax.formats.documents import read_documents
from dprjax.formats.report import Report
from dprjax.methods.feed import Batch, Feed, Text
from dprjax.models.encoder import EncoderConfig
from dprjax.runtime import mesh


def find(config: ml_collections.FrozenConfigDict, workdir: epath.Path, devices: Mesh) -> Text:
  """The text that ``config.data.dir`` names: files and folders, separated by commas.

  Raises:
    InputError: one of them is not there, or the form is none of plain text's.
  """
  knobs = config.data
  if knobs.format == 'docstrings':
    folder = workdir / 'data'
    if not folder.exists():
      docstrings.build(folder, packages=knobs.dir.split(','))
    paths = [folder / 'corpus.jsonl']
  elif knobs.format in ('auto', 'corpus'):
    paths = [files.existing(path.strip(), 'text') for path in knobs.dir.split(',')]
  else:
    raise InputError(
      "config.data.format: expected 'corpus' (each file's own form is told by looking) or "
      f"'docstrings', not {knobs.format!r}"
    )

  def read() -> Iterator[str]:
    return (document.text for document in read_documents(paths, Report()))

  return Text(read, functools.partial(_open, config, workdir, devices, paths))


def _open(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  paths: list[epath.Path],
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> Feed:
  knobs = config.pretrain
  room = model.max_tokens - (config.prompt.length if config.prompt.shift_positions else 0)
  if knobs.max_length > room:
    raise InputError(
      f'config.pretrain.max_length: {knobs.max_length} exceeds the {room} positions of '
      f'{config.backbone.path}'
    )
  folder = epath.Path(config.data.store) if config.data.store else workdir / 'store'
  texts = documents.build_documents(
    paths,
    tokenizer,
    folder / 'documents',
    passage_length=knobs.passage_length,
    language=knobs.language,
    process_index=jax.process_index(),
  )
  update = config.batch_size * config.accumulate
  share, shares = mesh.batch_rank(devices)
  dataset, eligible = views.make_view_batches(
    texts,
    batch_size=update,
    views=knobs.views,
    unit=knobs.unit,
    span_length=knobs.span_length,
    max_length=knobs.max_length,
    buckets=knobs.buckets,
    seed=config.seed,
    process_index=share,
    process_count=shares,
  )

  def ids(batch: Batch) -> str:
    names = texts.passage_ids(np.asarray(batch['passage_index'])[:8])
    return f'passages {", ".join(names)}{"..." if len(batch["passage_index"]) > 8 else ""}'

  def shape(batch: Batch) -> str:
    return (
      ' and '.join(
        f'texts of {batch[f"{view}_tokens"].shape[1]}'
        for view in ('first', 'second')
        if f'{view}_tokens' in batch
      )
      + ' tokens'
    )

  said = f'{eligible} passages of {texts.num_passages}'
  if knobs.views != 'one':
    said += f'; {2 * update - 2 if knobs.views == "siblings" else update - 1} negatives a text'
  return Feed(
    loader=open_batches(dataset, config.data.threads),
    epoch=len(dataset),
    unit='passages',
    said=said,
    ids=ids,
    shape=shape,
    evaluation=None,
  )
