"""Writes passages to a Milvus collection, replaces and deletes them.

    python -m dprjax.index --uri=index.db --upsert=embeddings/corpus
    python -m dprjax.index --uri=http://host:19530 --collection=passages --delete=ids.txt

The first command makes the collection if it is missing. Stored ids are replaced; passages of
another backbone or prompt are refused. After an interruption, run the same command again. A folder
that ends in .db is a local index (milvus-lite, in this process); an address is a Milvus server.
dprjax.search --index=milvus searches the collection.

--texts=corpus.jsonl makes a collection that BM25 searches, too (`search --index=milvus --hybrid`).
Every later --upsert then needs --texts.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dprjax import milvus
from dprjax.base import outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.formats.fields import read_ids
from dprjax.formats.texts import read_texts
from dprjax.retrieval import bm25_index, embeddings
from dprjax.runtime import cli, flags
from dprjax.runtime.flags import flag

logger = logging.getLogger('dprjax')

_BLOCK = 10_000  # rows read at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(flags.CollectionFlags):
  uri: str = flag('a local folder whose name ends in .db, or http://host:port')
  upsert: str | None = flag('embeddings of passages', None, metavar='DIR', either='action')
  delete: str | None = flag('a file of ids, one a line', None, metavar='IDS', either='action')
  drop: bool = flags.switch('remove the whole collection', either='action')
  index_type: str = flag(
    'of a new collection; auto is SCANN or, on milvus-lite, FLAT',
    'auto',
    choices=milvus.INDEX_TYPES,
  )
  texts: str | None = flag(
    'texts of the passages of --upsert, the file that was encoded, for BM25', None, metavar='FILE'
  )
  k1: float = flags.k1()
  b: float = flags.b()
  language: str = flags.language()


def upsert(
  server: milvus.Server,
  name: str,
  corpus: embeddings.Embeddings,
  index_type: str = 'auto',
  texts: str | None = None,
  settings: Mapping[str, Any] | None = None,
) -> None:
  """Writes all of ``corpus`` into a collection, which is made if it is missing.

  Args:
    server, name: of the collection.
    corpus: embeddings of passages.
    index_type: of a new collection.
    texts: the file that was encoded, for BM25.
    settings: of BM25.

  Raises:
    InputError: another backbone, prompt, setting or index type than the collection has; texts of
      other passages, missing texts or those that a collection cannot hold; or an error of Milvus.
  """
  space = corpus.meta.space()
  if name in server:
    collection = server.open(name)
    collection.check_space(space, '--upsert')
    if index_type not in ('auto', collection.index_type):
      raise InputError(
        f'{server.uri}: collection {name!r} has an index {collection.index_type}, not '
        f'{index_type}: choose another --collection, or --drop it first'
      )
    if collection.bm25 != settings:
      raise InputError(
        f'{server.uri}: collection {name!r} has BM25 with {collection.bm25 or "no texts"}, '
        f'--upsert comes with {settings or "no --texts"}: give the same, or --drop it first'
      )
  else:
    collection = server.create(name, space, index_type=index_type, rows=len(corpus), bm25=settings)
  if corpus.meta.dtype != 'float32':
    logger.info(
      '%s: %s vectors become float32; --index_type=IVF_SQ8 makes an index of 8 bits a number',
      server.uri,
      corpus.meta.dtype,
    )
  progress = Progress('passages', len(corpus), 'writing')
  passages = read_texts(texts, 'passage') if texts else iter(())
  for ids, vectors in corpus.blocks(_BLOCK):
    own = [*itertools.islice(passages, len(ids))] if texts else []
    if texts and [passage.id for passage in own] != list(ids):
      raise InputError(f'--texts={texts} has other passages than --upsert={corpus.folder}')
    collection.upsert(ids, vectors, progress, [one.text for one in own] if texts else None)
    progress.advance(len(ids))
  collection.flush()
  logger.info(
    '%s, collection %s: %s written%s; it has %s, index %s',
    server.uri,
    name,
    counted(len(corpus), 'passages'),
    pace(len(corpus), progress.seconds),
    f'{len(collection):,}',
    collection.index_type,
  )


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  milvus.check_uri(args.uri)
  milvus.check_name(args.collection)
  if not args.upsert:
    flags.refuse(args, ('texts',), 'upsert=DIR')
  if not args.texts:
    flags.refuse(args, ('k1', 'b', 'language'), 'texts=FILE')
  with contextlib.ExitStack() as stack:
    if milvus.is_local(args.uri):
      inputs = flags.paths(args, 'upsert', 'delete', 'texts')
      stack.enter_context(
        outputs.claim_folder(
          args.uri, inputs, what='a local index', ours=milvus.is_index, flag='--uri'
        )
      )
    if args.upsert:
      # Before the local index is made.
      corpus = embeddings.load_embeddings(args.upsert)
      corpus.check_side('passage', '--upsert')
      milvus.check_index_type(args.uri, args.index_type)
      bm25_index.check_settings(args.k1, args.b, args.language)
    ids = read_ids(args.delete) if args.delete else []
    server = stack.enter_context(
      contextlib.closing(milvus.Server(args.uri, args.token, new=bool(args.upsert)))
    )
    if args.upsert:
      settings = {'k1': args.k1, 'b': args.b, 'language': args.language}
      upsert(
        server,
        args.collection,
        corpus,
        args.index_type,
        args.texts,
        settings if args.texts else None,
      )
      return
    collection = server.open(args.collection)  # refuses collections of others
    if args.drop:
      server.drop(args.collection)
      logger.info('%s, collection %s: removed', server.uri, args.collection)
      return
    missing = collection.delete(ids, Progress('passages', len(ids), 'deleting'))
    cli.report_ids(counted(len(missing), 'ids that were not there'), missing, strict=False)
    logger.info(
      '%s, collection %s: %s deleted; it has %s',
      server.uri,
      args.collection,
      counted(len(ids) - len(missing), 'passages'),
      f'{len(collection):,}',
    )


if __name__ == '__main__':
  main()
