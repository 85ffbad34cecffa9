"""The whole comparison in one command: a prompt, the backbone without it, and BM25.

    python -m dprjax.quickstart
    python -m dprjax.quickstart --search 'how do I count the words of a text?'
    python -m dprjax.quickstart --data=DIR --out=runs/mine --config=configs/dptdr.py:beir

Without --data the text is the docstrings of the installed Python packages. With it, the text is any
BEIR folder with judgements to train on and a split to measure on. The stages are ordinary commands
of dprjax. They are printed as they run and write their files below --out; the same command again
goes on where it stopped. --config.KEY=VALUE is passed on to dprjax.train.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.base.progress import duration, size
from dprjax.data import docstrings, sources
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import KINDS, read_texts
from dprjax.retrieval import embeddings
from dprjax.runtime import cli
from dprjax.runtime import config as configs
from dprjax.runtime import workdir as workdirs
from dprjax.runtime.stages import Model, Stages, Texts, config_file

if TYPE_CHECKING:
  from dprjax.inference.retriever import Hit, Retriever

DOCSTRINGS = 'docstrings'
OUT = 'quickstart-out'
MEASURES = ('nDCG@10', 'RR@10', 'R@100')
QUESTIONS = (
  'how do I smooth a noisy signal?',
  'which words of a list are closest to a misspelled one?',
  'stop gradients from exploding',
)
_COMMANDS = 13  # of the whole comparison, of which two encode passages
_DEPTH = 100  # passages a query in the runs
_SHOWN = 3  # passages a search


def quickstart(
  data: str,
  out: epath.Path,
  *,
  config: str | None = None,
  backbone: str | None = None,
  split: str = 'test',
  overrides: Sequence[str] = (),
  questions: Sequence[str] = (),
) -> dict[str, float]:
  """Compares BM25, the frozen backbone and the trained one on one split; prints a few searches.

  Args:
    data: a BEIR folder; or 'docstrings', or 'docstrings:json,email' for those of some packages.
    out: the folder that everything is written to.
    config: of dprjax.train, a path with or without ':recipe'; by default configs/quickstart.py.
    backbone: replaces the config's.
    split: whose judgements to measure on.
    overrides: '--config.KEY=VALUE' for dprjax.train.
    questions: what to search for at the end; by default three questions about Python, or three of
      the split's queries.

  Returns:
    The seconds of each command that ran, by title.

  Raises:
    InputError: bad input; ``out`` holds a comparison on other text, or something else.
  """
  config = configs.find(config or 'configs/quickstart.py')
  files.existing(config_file(config), '--config')
  inputs = {'--data': None if data.split(':')[0] == DOCSTRINGS else data, '--backbone': backbone}
  with workdirs.claim(out, workdirs.QUICKSTART, inputs, flag='--out'):
    return _compare(data, out, config, backbone, split, overrides, questions)


def _compare(
  data: str,
  out: epath.Path,
  config: str,
  backbone: str | None,
  split: str,
  overrides: Sequence[str],
  questions: Sequence[str],
) -> dict[str, float]:
  """``quickstart`` in a folder that this command holds."""
  texts, asked = prepare(data, out, split)
  wanted = configs.parse([f'--config={config}', *overrides])
  shared = bool(wanted.prompt.length) and wanted.prompt.sides == 'query' and not wanted.alternatives
  stages = Stages(out, _COMMANDS - 2 * shared)

  def measure(name: str, run: epath.Path, extra: Sequence[str] = ()) -> epath.Path:
    title, path = f'Measure: {name}', run.with_suffix('.json')
    return stages.evaluate(title, run, texts.qrels[split], MEASURES, path, extra)

  run = stages.bm25('Rank by BM25', texts, split, out / f'bm25.{split}.trec', _DEPTH)
  metrics = {'BM25': measure('BM25', run)}

  workdir = out / 'training'
  flags = [f'--config.data.dir={texts.folder}', '--config.data.format=beir']
  flags += [f'--config.backbone.path={backbone}'] if backbone else []
  reads = [texts.corpus, texts.queries, texts.qrels['train'], *Model(backbone or '').files]
  stages.train('Train', config, [*flags, *overrides], workdir, reads)
  workdir = workdirs.trained(workdir)
  trained = configs.load_workdir(workdir)
  prompted = bool(trained.prompt.length)
  product = out / ('prompt.npz' if prompted else 'model')
  stages.export('Export', workdir, product)

  base = configs.backbone_path(trained, workdir)
  count, nbytes = weight(product)
  trained_name = '+ prompt' if prompted else 'fine-tuned'
  models = {
    'frozen': Model(base),
    'trained': Model(base, product) if prompted else Model(str(product)),
  }
  # A prompt for queries alone is trained on the frozen backbone's passages, which both search.
  passages = {
    system: workdir / 'passages' if shared else out / 'embeddings' / f'{system}-passages'
    for system in models
  }
  for system, name, extra in (
    ('frozen', 'frozen backbone', ['trained parameters=0']),
    ('trained', trained_name, [f'trained parameters={count}', f'file size={size(nbytes, "B")}']),
  ):
    # The frozen backbone reads as much of a text as the trained one does.
    corpus, queries = (
      passages[system]
      if shared and which is None
      else stages.encode(
        f'Encode the {"queries" if which else "passages"}: {name}',
        models[system],
        texts,
        which,
        passages[system] if which is None else out / 'embeddings' / f'{system}-{which}',
        trained,
      )
      for which in (None, split)
    )
    run = stages.search(f'Search: {name}', corpus, queries, out / f'{system}.{split}.trec', _DEPTH)
    metrics[name] = measure(name, run, extra)
  stages.report(metrics, (), out)
  print(lengths(trained, base), flush=True)

  questions = questions or (QUESTIONS if data == DOCSTRINGS else asked)
  settings: dict[str, Any] = {
    f'{kind}_max_length': trained.data[f'{kind}_max_length'] for kind in KINDS
  }
  settings |= {'pooling': trained.pooling, 'normalize': bool(trained.normalize)}
  hits = {}
  with cli.loading():
    from dprjax.inference.retriever import Retriever
  for system, model in models.items():
    retriever = Retriever.load(**model.arguments, **settings)
    hits[system] = search(retriever, passages[system], texts.corpus, questions)
  print(
    'Searches: the best passages '
    f'{"with the prompt" if prompted else "of the fine-tuned backbone"}, and what the frozen '
    'backbone finds'
  )
  for question, best, frozen in zip(questions, hits['trained'], hits['frozen'], strict=True):
    print(f'\n  {question}')
    for rank, hit in enumerate(best, start=1):
      print(f'    {rank}  {hit.score:.3f}  {shown(hit)}')
    print(f'    frozen    {", ".join(hit.id for hit in frozen)}')
  print('\n' + next_steps(out, product, models['trained'], data, split), flush=True)
  return stages.seconds


def lengths(trained: Any, backbone: str) -> str:
  """How much of a text both encoders were given, which may be less than the backbone reads."""
  with cli.loading():
    from dprjax.models import hub
  query, passage = (trained.data[f'{kind}_max_length'] for kind in KINDS)
  whole = hub.load_spec(backbone).longest
  less = f'; dprjax encode without flags reads {whole}' if min(query, passage) < whole else ''
  return f'Both encoders read up to {query} tokens of a query and {passage} of a passage{less}.\n'


def prepare(data: str, out: epath.Path, split: str) -> tuple[Texts, list[str]]:
  """The text, and the first few queries of the split; collects docstrings into ``out/data``.

  Raises:
    InputError: a file is missing or malformed, or ``out`` holds a comparison on other text.
  """
  folder = epath.Path(data)
  if data.split(':')[0] == DOCSTRINGS:
    folder = out / 'data'
    if not folder.exists():
      print('Collecting the docstrings of the installed packages', flush=True)
      packages = data.partition(':')[2]
      counts = docstrings.build(folder, packages.split(',') if packages else docstrings.PACKAGES)
      files.write_json(out / 'docstrings.json', counts)
      print(
        f'{sum(counts["passages"].values()):,} functions and classes '
        f'({", ".join(f"{name} {n:,}" for name, n in counts["passages"].items())}); '
        'queries, their summaries: '
        f'{", ".join(f"{n:,} {name}" for name, n in counts["queries"].items())}',
        flush=True,
      )
  test = sources.locate(sources.Source(str(folder), 'beir', split))
  train = sources.locate(sources.Source(str(folder), 'beir', 'train'))
  claim(out, data, {**test, 'training': train['qrels']}, split)
  judged = read_qrels(test['qrels'])
  queries = read_texts(test['queries'], 'query')
  questions = [query.text for query in queries if query.id in judged]
  if not questions:
    raise InputError(
      f'{test["qrels"]}: none of its {len(judged):,} queries is in {test["queries"]}'
    )
  qrels = {'train': train['qrels'], split: test['qrels']}
  return Texts(folder, test['corpus'], test['queries'], qrels), questions[:_SHOWN]


def claim(out: epath.Path, data: str, parts: Mapping[str, epath.Path], split: str) -> None:
  """Records which text ``out`` is about; raises InputError if it is about another."""
  path = out / 'text.json'
  now = {'data': data} | {
    f'qrels of {split}' if part == 'qrels' else part: files.sha256_file(file)
    for part, file in parts.items()
  }
  before = reading.read_json_object(path, 'record of the text') if path.exists() else {}
  differ = [part for part in now if part in before and before[part] != now[part]]
  if differ:
    raise InputError(
      f'{out} holds a comparison on other text ({", ".join(differ)} changed since); choose a fresh '
      '--out'
    )
  if not before.items() >= now.items():
    files.write_json(path, before | now)


def weight(product: epath.Path) -> tuple[int, int]:
  """Parameters and bytes of a prompt.npz, or of the encoders in a directory."""
  with cli.loading():
    from dprjax.models import artifact, hub
    from dprjax.runtime import tree
  if product.suffix == '.npz':
    arrays = artifact.load_prompt(product).arrays.values()
    return sum(array.size for array in arrays), product.stat().length
  folders = [product, *(product / kind for kind in KINDS)]
  folders = [folder for folder in folders if (folder / 'config.json').exists()]
  weights = [file for folder in folders for file in folder.glob('*.safetensors')]
  return (
    sum(tree.count(hub.load_backbone(folder).params) for folder in folders),
    sum(file.stat().length for file in weights),
  )


def search(
  retriever: Retriever, vectors: epath.Path, corpus: epath.Path, questions: Sequence[str]
) -> list[list[Hit]]:
  """The best passages for each question among embeddings on disk."""
  from dprjax.inference.retriever import Hit
  from dprjax.retrieval import exact

  passages = embeddings.load_embeddings(vectors)
  best = exact.search(
    retriever.encode(list(questions), 'query'), passages.shards, _SHOWN, ids_at=passages.ids_at
  )
  ids = [[passages.ids[row] for row in rows] for rows in best.rows]
  wanted = set(itertools.chain(*ids))
  read = read_texts(corpus, 'passage')
  texts = {passage.id: passage.text for passage in read if passage.id in wanted}
  return [
    [Hit(id_, float(score), texts[id_]) for id_, score in zip(*pair, strict=True)]
    for pair in zip(ids, best.scores, strict=True)
  ]


def shown(hit: Hit, width: int = 110) -> str:
  """The id and the beginning of the text on one line; the id once if the text begins with it."""
  text = hit.text if hit.text.startswith(hit.id) else f'{hit.id}: {hit.text}'
  return textwrap.shorten(text, width, placeholder=' ...')


def next_steps(out: epath.Path, product: epath.Path, model: Model, data: str, split: str) -> str:
  """What to look at, and what to type next."""
  again = ''.join(
    f' --{flag}={value}'
    for flag, value, usual in (
      ('data', data, DOCSTRINGS),
      ('split', split, 'test'),
      ('out', str(out), OUT),
    )
    if value != usual
  )
  arguments = ', '.join(f'{name}={value!r}' for name, value in model.arguments.items())
  written = f'{product}, {out / "report.md"}, {out / "report.png"}'
  also = f' (and{again})' if again else ''
  config = '--config=configs/dptdr.py:beir'
  return f"""Written: {written}; the runs, metrics and embeddings beside them.

Next
  search again       repeat the command with --search 'your question'{also}
  your own text      python -m dprjax.quickstart --data=DIR --out=runs/mine {config}
                     DIR holds corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv
  from Python        from dprjax import Retriever; retriever = Retriever.load({arguments})
"""


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('quickstart', __doc__ or '')
  parser.add_argument(
    '--data',
    default=DOCSTRINGS,
    metavar='DIR',
    help="a BEIR folder; 'docstrings' (the default), or 'docstrings:json,email'",
  )
  parser.add_argument(
    '--out', default=OUT, metavar='DIR', help=f'where everything is written (default: {OUT})'
  )
  parser.add_config('of dprjax.train (default: configs/quickstart.py)', 'passed on to dprjax.train')
  parser.add_argument(
    '--backbone', help="a Hugging Face directory, a hub id or package:NAME; replaces the config's"
  )
  parser.add_argument('--split', default='test', help='whose queries are measured (default: test)')
  parser.add_argument(
    '--search',
    action='append',
    default=[],
    metavar='QUESTION',
    help='to search for at the end; may be repeated',
  )
  own, overrides = cli.split_config(argv, '--config.')

  def command(args: argparse.Namespace) -> None:
    began = time.monotonic()
    seconds = quickstart(
      args.data,
      epath.Path(args.out),
      config=args.config,
      backbone=args.backbone,
      split=args.split,
      overrides=overrides,
      questions=args.search,
    )
    if len(seconds) > 1:
      # Linux counts in kB. The largest child, and this process beside it.
      peak = (
        sum(
          resource.getrusage(who).ru_maxrss
          for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)
        )
        * 1024
      )
      slowest = sorted(seconds, key=lambda title: -seconds[title])[:3]
      print(
        f'{duration(time.monotonic() - began)} in all, of which '
        f'{", ".join(f"{title} {duration(seconds[title])}" for title in slowest)}; '
        f'at most {size(peak, "B")} of memory'
      )

  cli.run(parser, command, own)


if __name__ == '__main__':
  main()
