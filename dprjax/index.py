"""Writes, replaces and deletes passages in a collection of an engine.

    python -m dprjax.index --uri=milvus:index.db --upsert=embeddings/corpus --texts=corpus.jsonl
    python -m dprjax.index --uri=qdrant:http://host:6333 --collection=passages --delete=ids.txt

The first command makes the collection if it is missing. Stored ids are replaced; passages from
another backbone or prompt are refused. After an interruption, the same command continues where it
stopped. Engines are milvus, qdrant, pgvector, opensearch, elasticsearch and parquet
(docs/engines.md). dprjax.search --uri searches the collection.

--texts stores the title, text and other fields of each passage with its vector, for programs that
read the collection and for `search --where`. --hybrid makes a collection that the engine also
searches by BM25 (`search --hybrid`). Every later --upsert then needs both.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dprjax import engines
from dprjax.base import cli, files, flags, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress, pace
from dprjax.encoding import embeddings
from dprjax.engines import Address, Engine
from dprjax.engines.payloads import Document, read_documents
from dprjax.retrieval import bm25_index
from dprjax.text.fields import read_ids, report_ids

logger = logging.getLogger('dprjax')

_BLOCK, _BLOCK_BYTES = 10_000, 1 << 27  # rows read at a time, and bytes of their vectors
_COUNTED = 1_000  # texts whose words are counted at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(flags.CollectionFlags):
  upsert: str | None = flag('embeddings of passages', None, metavar='DIR', either='action')
  delete: str | None = flag('a file of ids, one a line', None, metavar='IDS', either='action')
  drop: bool = flags.switch('remove the whole collection', either='action')
  index_type: str = flag('of a new collection, by its name in docs/engines.md', 'auto')
  texts: str | None = flag(
    'texts to store with the passages of --upsert: the encoded file', None, metavar='FILE'
  )
  column: dict[str, str] = flags.columns('id, title or text of --texts')
  hybrid: bool = flags.switch('with --texts: a new collection has BM25')
  k1: float = flags.k1()
  b: float = flags.b()
  language: str = flags.language()


def upsert(
  engine: Engine,
  name: str,
  corpus: embeddings.Embeddings,
  index_type: str = 'auto',
  texts: str | None = None,
  settings: Mapping[str, Any] | None = None,
  columns: Mapping[str, str] | None = None,
) -> None:
  """Writes ``corpus`` into a collection, which is made if it is missing.

  Args:
    texts: the encoded file, to store with the vectors.
    settings: of BM25, for a collection with BM25; needs ``texts``.
    columns: of ``texts``, as in `dprjax.text.texts.Texts`.
  """
  space = corpus.meta.space()
  documents = None
  if texts:  # before anything is made
    documents = _opened(read_documents(texts, columns), texts, corpus)
    if not files.is_special(texts):  # a pipe is read once, and checked block by block
      read = ((one.id, one.payload) for one in read_documents(texts, columns))
      engines.check_text(engine, read, f'--texts={texts}')
  if engines.exists(engine, name):
    collection = engines.open_collection(engine, name)
    collection.check_space(space, '--upsert')
    if index_type not in ('auto', collection.kind):
      raise InputError(
        f'{collection.where} has an index {collection.kind}, not {index_type}: choose another '
        '--collection, or --drop it first'
      )
    if collection.bm25 != settings:
      raise InputError(
        f'{collection.where} has {_shown(collection.bm25)}, but --upsert has {_shown(settings)}: '
        'give the same --hybrid, or --drop it first'
      )
  else:
    engines.check_index_type(engine, index_type)
    bm25 = settings and {
      **settings,
      'average_words': _average_words(
        read_documents(str(texts), columns), str(texts), settings['language'], len(corpus)
      ),
    }
    collection = engines.create(
      engine, name, space, index_type=index_type, rows=len(corpus), bm25=bm25
    )
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
    own = None if documents is None else _own(documents, ids, str(texts), corpus)
    at += len(ids)
    omitted |= dict.fromkeys(name for one in own or () for name in one.omitted)
    if at > done:
      collection.upsert(
        ids,
        vectors,
        progress,
        texts=[one.text for one in own] if own and settings else None,
        payloads=[one.payload for one in own] if own else None,
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


def _shown(settings: Mapping[str, Any] | None) -> str:
  if settings is None:
    return 'no BM25'
  return f'BM25 with {", ".join(f"{name}={value}" for name, value in settings.items())}'


def _opened(
  documents: Iterator[Document], texts: str, corpus: embeddings.Embeddings
) -> Iterator[Document]:
  """The documents of a file, after a check that its first one matches the embeddings."""
  first = next(documents)
  if first.id != corpus.ids_at(np.arange(1))[0]:
    raise InputError(f'--texts={texts} has other passages than --upsert={corpus.folder}')
  return itertools.chain([first], documents)


def _own(
  documents: Iterator[Document], ids: Sequence[str], texts: str, corpus: embeddings.Embeddings
) -> list[Document]:
  """The documents of these ids, which come next."""
  own = [*itertools.islice(documents, len(ids))]
  if [document.id for document in own] != list(ids):
    raise InputError(f'--texts={texts} has other passages than --upsert={corpus.folder}')
  return own


def _average_words(
  documents: Iterator[Document], texts: str, language: str, expected: int
) -> float:
  """The mean number of words of a passage."""
  words, count = 0, 0
  while part := [*itertools.islice(documents, _COUNTED)]:
    words += sum(map(len, bm25_index.words_of([one.text for one in part], language)))
    count += len(part)
  if count != expected:
    raise InputError(f'--texts={texts} has {count:,} passages, but --upsert has {expected:,}')
  return words / count


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  if args.uri is None:
    raise InputError('--uri=ENGINE:PLACE, the place of the collection, is missing')
  address = engines.address_of(args.uri)
  engines.check_name(args.collection)
  if not args.upsert:
    flags.refuse(args, ('texts',), 'upsert=DIR')
  if not args.texts:
    flags.refuse(args, ('hybrid', 'column'), 'texts=FILE')
  if not args.hybrid:
    flags.refuse(args, ('k1', 'b', 'language'), 'hybrid')
  with contextlib.ExitStack() as stack:
    if address.is_local:
      stack.enter_context(_claimed(args, address))
    if args.upsert:
      # Before a folder is made.
      corpus = embeddings.load_embeddings(args.upsert)
      corpus.check_side('passage', '--upsert')
      _check_type(address, args.index_type)
      bm25_index.check_settings(args.k1, args.b, args.language)
    ids = read_ids(args.delete) if args.delete else []
    engine = stack.enter_context(
      contextlib.closing(engines.connect(address, new=bool(args.upsert)))
    )
    if args.upsert:
      settings = {'k1': args.k1, 'b': args.b, 'language': args.language}
      upsert(
        engine,
        args.collection,
        corpus,
        args.index_type,
        args.texts,
        settings if args.hybrid else None,
        args.column,
      )
      return
    collection = engines.open_collection(
      engine, args.collection
    )  # refuses collections of other programs
    if args.drop:
      collection.drop()
      logger.info('%s: removed', collection.where)
      return
    missing = collection.delete(ids, Progress('passages', len(ids), 'deleting'))
    report_ids(counted(len(missing), 'ids that were missing'), missing, strict=False)
    logger.info(
      '%s: %s deleted; it has %s',
      collection.where,
      counted(len(ids) - len(missing), 'passages'),
      f'{len(collection):,}',
    )


def _check_type(address: Address, index_type: str) -> None:
  there = engines.index_types(address)
  if index_type not in ('auto', *there):
    raise InputError(f'{address} has no index {index_type}, only {", ".join(there)}')


def _claimed(args: Flags, address: Address) -> contextlib.AbstractContextManager[Any]:
  return outputs.claim_folder(
    address.place,
    flags.paths(args, 'upsert', 'delete', 'texts'),
    what='a local index',
    ours=lambda folder: engines.is_index(address, folder),
    flag='--uri',
  )


if __name__ == '__main__':
  main()
