"""Ranks passages by BM25, and writes a TREC run.

    python -m dprjax.bm25 --corpus=corpus.jsonl --queries=queries.jsonl --qrels=qrels/test.tsv \\
        --out=bm25.trec

Words are stemmed, and stop words left out. In scripts without spaces between words (Chinese,
Japanese, Thai, ...) and in Korean, each letter and each pair of neighbours is a word.
bm25.trec.json has the settings.
"""

import dataclasses
import os

from dprjax.base import cli, flags, outputs
from dprjax.base.flags import flag
from dprjax.retrieval import bm25_index
from dprjax.text import trec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str = flags.texts_file('_id, title and text')
  queries: str = flags.texts_file('_id and text')
  column: dict[str, str] = flags.columns('id, title or text of the corpus, query_id or query')
  out: str = flags.run_out()
  k: int = flag('passages a query, those that share a word with it', 1000)
  qrels: str | None = flags.file('rank only for queries judged here')
  drop_same_id: bool = flags.drop_same_id()
  k1: float = flag(
    'saturation of repeated words: smaller values saturate sooner', bm25_index.K1, read=float
  )
  b: float = flag('strength of the discount of long passages', bm25_index.B, read=float)
  language: str = flag(
    'language of the stemmer and stop words; none for neither', bm25_index.LANGUAGE
  )
  index_dir: str | None = flags.folder(
    'keep the index here and reuse it while passages and settings are the same'
  )


def _command(args: Flags) -> None:
  inputs = flags.paths(args, 'corpus', 'queries', 'qrels')
  with outputs.claim(args.out, inputs, also={'--index_dir': args.index_dir}):
    if args.index_dir is not None:
      outputs.check_folder(args.index_dir, inputs, **bm25_index.INDEX_FOLDER)
    run, report = bm25_index.search_files(
      args.corpus,
      args.queries,
      args.k,
      columns=args.column,
      qrels=args.qrels,
      index_dir=args.index_dir,
      drop_same_id=args.drop_same_id,
      settings={'k1': args.k1, 'b': args.b, 'language': args.language},
    )
    trec.write_reported(args.out, run, 'dprjax-bm25', report)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  # Importing bm25s starts JAX, which must not take the accelerator from another process.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
