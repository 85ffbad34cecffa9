"""Fills the index of a retriever, or a collection of an engine, with passages.

    python -m dprjax.index --retriever=mine --input=corpus.jsonl
    python -m dprjax.index --uri=milvus:index.db --upsert=embeddings/corpus --texts=corpus.jsonl
    python -m dprjax.index --uri=qdrant:http://host:6333 --collection=passages --delete=ids.txt

A retriever is a folder of dprjax.export, which dprjax.search --retriever searches. The second
command makes a collection if it is missing. Stored ids are replaced; passages from
another backbone or prompt are refused. After an interruption, the same command continues where it
stopped. Engines are milvus, qdrant and pgvector (docs/engines.md). dprjax.search --uri searches the
collection.

--upsert also takes a retriever: its vectors, with its texts. The engine searches by vectors only.

--texts stores the title, text and other fields of each passage with its vector, for programs that
read the collection and for `search --where`.
"""

import contextlib
import dataclasses
import logging

from etils import epath

from dprjax import engines
from dprjax.base import cli, flags, machine, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress
from dprjax.encoding import embeddings
from dprjax.engines import engine as places
from dprjax.engines import storing
from dprjax.text import inputs, texts
from dprjax.text.fields import read_ids, report_ids

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(flags.CollectionFlags):
  upsert: str | None = flag(
    'embeddings of passages, or a retriever', None, metavar='DIR', either='action'
  )
  delete: str | None = flag('a file of ids, one a line', None, metavar='IDS', either='action')
  drop: bool = flags.switch('remove the whole collection', either='action')
  retriever: str | None = flag(
    'a folder of dprjax.export, whose index gets the passages of --input',
    None,
    metavar='DIR',
    either='action',
  )
  input: str | None = flags.file('with --retriever: passages, as for dprjax.encode')
  index_type: str = flag('of a new collection, by its name in docs/engines.md', 'auto')
  texts: str | None = flags.file(
    'texts to store with the passages of --upsert: the encoded file; a retriever has its own'
  )
  column: dict[str, str] = flags.columns('id, title or text of --texts or --input')


def _command(args: Flags) -> None:
  if args.retriever is not None:
    flags.refuse(args, ('uri', 'collection', 'texts', 'index_type'), 'upsert=DIR')
    _fill(args.retriever, args)
    return
  flags.refuse(args, ('input',), 'retriever=DIR')
  if args.uri is None:
    raise InputError('--uri=ENGINE:PLACE, the place of the collection, is missing')
  address = places.address_of(args.uri)
  engines.check_name(args.collection)
  if not args.upsert:
    flags.refuse(args, ('texts',), 'upsert=DIR')
  if not args.texts:
    flags.refuse(args, ('column',), 'texts=FILE')
  with contextlib.ExitStack() as stack:
    if address.is_local:
      claimed = outputs.claim_folder(
        address.place,
        flags.paths(args, 'upsert', 'delete', 'texts'),
        what='a local index',
        ours=lambda folder: bool(places.class_of(address).is_index(folder)),
        flag='--uri',
      )
      stack.enter_context(claimed)
    if args.upsert:
      # Before a folder is made.
      vectors, texts = _parts(args.upsert, args.texts)
      corpus = embeddings.load_embeddings(vectors)
      corpus.check_side('passage', '--upsert')
      places.check_index_type(address, args.index_type)
      if texts:
        storing.read_documents(texts, args.column)  # finds the file
    ids = read_ids(args.delete) if args.delete else []
    engine = stack.enter_context(
      contextlib.closing(engines.connect(address, new=bool(args.upsert)))
    )
    if args.upsert:
      storing.upsert(engine, args.collection, corpus, args.index_type, texts, args.column)
      return
    collection = engines.open_collection(engine, args.collection)
    if args.drop:
      collection.drop()
      logger.info('%s: removed', collection.where)
      return
    missing = collection.delete(ids, Progress('passages', len(ids), 'deleting'))
    report_ids(counted(len(missing), 'ids that were missing'), missing)
    logger.info(
      '%s: %s deleted; it has %s',
      collection.where,
      counted(len(ids) - len(missing), 'passages'),
      f'{len(collection):,}',
    )


def _fill(retriever: str, args: Flags) -> None:
  """Encodes the passages into the folder of a retriever, and indexes their words for a fusion."""
  if args.input is None:
    raise InputError('--retriever needs --input, the passages')
  columns = texts.columns_of('passage', args.column)
  machine.keep_programs()
  with cli.loading():
    from dprjax.retrieval import folder
  inputs.check_again([args.input], 'passage', '--input')
  passages = texts.Texts(args.input, 'passage', columns=columns)
  with folder.claim_index(retriever, flags.paths(args, 'input')) as index:
    parts, encoder = folder.load_encoder(retriever)
    folder.fill(index, encoder, passages, args.input, parts.fusion)


def _parts(upsert: str, texts: str | None) -> tuple[str, str | None]:
  """The folder of embeddings, and the file of texts."""
  if not (epath.Path(upsert) / 'retriever.json').exists():
    return upsert, texts
  with cli.loading():  # imports JAX
    from dprjax.retrieval import folder

  folder.check_index(upsert, '--upsert')
  return str(folder.vectors_of(upsert)), texts or str(folder.passages_of(upsert))


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
