"""Writes the passages of a corpus into a collection of an engine."""

import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dprjax.base import files
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.encoding import embeddings
from dprjax.engines.collection import create, exists, open_collection
from dprjax.engines.engine import RESERVED, Engine
from dprjax.text import texts as text_files

logger = logging.getLogger('dprjax')

_BLOCK, _BLOCK_BYTES = 10_000, 1 << 27  # rows read at a time, and bytes of their vectors
_STORED = re.compile(r'(?!\s)[^\x00-\x1f.]{1,63}(?<!\s)')  # names of fields


class Document(text_files.Text):
  """A passage.

  Attributes:
    id, text: as in `text_files.Text`.
    payload: ``title`` and ``text``, unless empty, and other fields: strings, numbers, booleans and
      lists of strings. Fields of an object ``metadata`` count as fields of the passage.
    omitted: names of fields of other types, or with a name that engines reserve.
  """

  payload: dict[str, Any]
  omitted: list[str]


def read_documents(
  path: files.PathLike, columns: Mapping[str, str] | None = None
) -> Iterator[Document]:
  """The passages of an input, with the arguments of `dprjax.text.texts.read_texts`."""
  return map(_document, text_files.Texts(path, 'passage', columns=columns).entries())


def _document(entry: text_files.Entry) -> Document:
  record, fields = entry.record, dict(entry.values)
  metadata = fields.get('metadata')
  if isinstance(metadata, dict):
    del fields['metadata']
    fields = metadata | fields
  document = Document(record.id, record.joined)
  document.payload, document.omitted = {}, []
  for name, value in (('title', record.title), ('text', record.text)):
    if value:
      document.payload[name] = value
  for name, value in fields.items():
    if name in entry.roles.values() or value is None:
      continue
    storable = _STORED.fullmatch(name) and name not in ('title', 'text', *RESERVED)
    if storable and _is_plain(value):
      document.payload[name] = value
    else:
      document.omitted.append(name)
  return document


def _is_plain(value: Any) -> bool:
  if isinstance(value, list):
    return all(isinstance(item, str) for item in value)
  return isinstance(value, str | int | float | bool)


def upsert(
  engine: Engine,
  name: str,
  corpus: embeddings.Embeddings,
  index_type: str = 'auto',
  texts: str | None = None,
  columns: Mapping[str, str] | None = None,
) -> None:
  """Writes ``corpus`` into a collection, which is made if it is missing.

  Args:
    texts: the encoded file, to store with the vectors.
    columns: of ``texts``, as in `dprjax.text.texts.Texts`.
  """
  space = corpus.meta.space()
  documents = None
  if texts:  # before anything is made
    documents = _opened(read_documents(texts, columns), texts, corpus)
  if exists(engine, name):
    collection = open_collection(engine, name)
    collection.check_space(space, '--upsert')
    if index_type not in ('auto', collection.kind):
      raise InputError(
        f'{collection.where} has an index {collection.kind}, not {index_type}: choose another '
        '--collection, or --drop it first'
      )
  else:
    collection = create(engine, name, space, index_type=index_type, rows=len(corpus))
  if corpus.meta.dtype != 'float32':
    logger.info(
      '%s: %s vectors become float32; docs/engines.md names the indexes of 8 bits a number',
      engine.address,
      corpus.meta.dtype,
    )
  job = {'sha256': corpus.fingerprint, 'texts': texts is not None}
  before = collection.record.loading or {}
  done = int(before['rows']) if job.items() <= before.items() else 0
  if done:
    logger.info('%s: continues after %s', collection.where, counted(done, 'passages'))
  collection.note({**job, 'rows': done})
  progress = Progress('passages', len(corpus), 'writing')
  size = min(_BLOCK_BYTES // (4 * corpus.meta.dimension) + 1, max(_BLOCK, engine.request_rows))
  at, omitted = 0, dict[str, None]()
  for ids, vectors in corpus.blocks(size):
    block = None if documents is None else _own(documents, ids, str(texts), corpus)
    at += len(ids)
    omitted |= dict.fromkeys(name for one in block or () for name in one.omitted)
    if at > done:
      collection.upsert(
        ids,
        vectors,
        progress,
        payloads=[one.payload for one in block] if block else None,
      )
      collection.note({**job, 'rows': at})
    progress.advance(len(ids))
  if omitted:
    logger.info('--texts=%s: fields not stored: %s', texts, ', '.join(omitted))
  logger.info('%s: the engine builds its index', collection.where)
  collection.flush()
  collection.note(None)
  logger.info(
    '%s: %s written%s; it has %s, index %s',
    collection.where,
    counted(len(corpus) - done, 'passages'),
    pace(len(corpus) - done, progress.seconds),
    f'{len(collection):,}',
    collection.kind,
  )


def _opened(
  documents: Iterator[Document], texts: str, corpus: embeddings.Embeddings
) -> Iterator[Document]:
  """The documents of a file, after a check that its first one matches the embeddings."""
  first = _own(documents, corpus.ids_at(np.arange(1)), texts, corpus)
  return itertools.chain(first, documents)


def _own(
  documents: Iterator[Document], ids: Sequence[str], texts: str, corpus: embeddings.Embeddings
) -> list[Document]:
  """The documents of these ids, which come next."""
  block = [*itertools.islice(documents, len(ids))]
  if [document.id for document in block] != list(ids):
    raise InputError(f'--texts={texts} has other passages than --upsert={corpus.folder}')
  return block
