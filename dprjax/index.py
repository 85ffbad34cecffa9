"""Writes passages to a Milvus collection, replaces and deletes them.

    python -m dprjax.index --uri=index.db --upsert=embeddings/corpus
    python -m dprjax.index --uri=http://host:19530 --collection=passages --delete=ids.txt

The first command makes the collection if it is missing. A passage whose id is stored already is
replaced; one of another backbone or prompt than the collection's is refused. After an interruption,
run the same command again. A folder that ends in .db is a local index (milvus-lite, in this
process); an address is a Milvus server's. dprjax.search --index=milvus searches the collection.
"""

import argparse
import contextlib
import logging
from collections.abc import Sequence

from dprjax.base import outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.formats.fields import read_ids
from dprjax.retrieval import embeddings, milvus
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

_BLOCK = 10_000  # rows read at a time


def upsert(
  server: milvus.Server, name: str, corpus: embeddings.Embeddings, index_type: str | None = None
) -> milvus.Collection:
  """Writes all of ``corpus`` into a collection, which is made if it is missing.

  Args:
    server, name: where the collection is.
    corpus: embeddings of passages.
    index_type: of a new collection, see `milvus.Server.create`; None: 'auto'.

  Raises:
    InputError: embeddings of queries, or of another backbone, prompt or settings than the
      collection's; another ``index_type`` than the collection has; an error of Milvus.
  """
  corpus.check_kind('passage', '--upsert')
  space = corpus.meta.space()
  server.recover(name)
  if name in server:
    collection = server.open(name)
    collection.check_space(space, '--upsert')
    if index_type not in (None, 'auto', collection.index_type):
      raise InputError(
        f'{server.uri}: collection {name!r} has an index {collection.index_type}; '
        f'--index_type={index_type} is for a new one: '
        'choose another --collection, or --drop this one first'
      )
  else:
    collection = server.create(name, space, index_type=index_type or 'auto', rows=len(corpus))
  if corpus.meta.dtype != 'float32':
    logger.info(
      '%s: the %s vectors of %s are stored as float32 values; --index_type=IVF_SQ8 makes an index '
      'of 8 bits a number',
      server.uri,
      corpus.meta.dtype,
      corpus.folder,
    )
  progress = Progress('passages', len(corpus), 'writing')
  for ids, vectors in corpus.blocks(_BLOCK):
    collection.upsert(ids, vectors, progress)
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
  return collection


def delete(collection: milvus.Collection, ids: Sequence[str]) -> None:
  """Deletes passages, and logs which ids were not there."""
  missing = collection.delete(ids, Progress('passages', len(ids), 'deleting'))
  cli.report_ids(counted(len(missing), 'ids that were not there'), missing, strict=False)
  logger.info(
    '%s, collection %s: %s deleted; it has %s',
    collection.server.uri,
    collection.name,
    counted(len(ids) - len(missing), 'passages'),
    f'{len(collection):,}',
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('index', __doc__ or '')
  milvus.add_arguments(parser, required=True)
  action = parser.add_mutually_exclusive_group(required=True)
  action.add_argument('--upsert', metavar='DIR', help='embeddings of passages')
  action.add_argument('--delete', metavar='IDS', help='a file of ids, one a line')
  action.add_argument('--drop', action='store_true', help='remove the whole collection')
  parser.add_argument(
    '--index_type',
    choices=milvus.INDEX_TYPES,
    help='of a new collection (default: auto, which is SCANN; on milvus-lite, FLAT)',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  with contextlib.ExitStack() as stack:
    if milvus.is_local(args.uri):
      inputs = {'--upsert': args.upsert, '--delete': args.delete}
      stack.enter_context(
        outputs.claim_folder(
          args.uri, inputs, what='a local index', ours=milvus.is_index, flag='--uri'
        )
      )
    _index(args)


def _index(args: argparse.Namespace) -> None:
  if args.upsert:
    # Before an index is made for it.
    corpus = embeddings.load_embeddings(args.upsert)
    corpus.check_kind('passage', '--upsert')
    milvus.check_index_type(args.uri, args.index_type)
    with contextlib.closing(milvus.Server(args.uri, args.token, new=True)) as server:
      upsert(server, args.collection, corpus, args.index_type)
    return
  ids = read_ids(args.delete) if args.delete else []
  with contextlib.closing(milvus.Server(args.uri, args.token)) as server:
    collection = server.open(args.collection)  # fails for a collection that dprjax did not make
    if args.delete:
      delete(collection, ids)
    else:
      server.drop(args.collection)
      logger.info('%s, collection %s: removed', server.uri, args.collection)


if __name__ == '__main__':
  main()
