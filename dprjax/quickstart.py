"""The whole way in one command: does a prompt find more than the backbone without it, and than
BM25?

    python -m dprjax.quickstart
    python -m dprjax.quickstart --search 'how do I count the words of a text?'
    python -m dprjax.quickstart --data=DIR --out=runs/mine --config=configs/dptdr.py:beir

Without --data the text is the docstrings of the installed Python packages; with it, any folder in
BEIR's form with judgements to train on and a split to measure on. The steps are ordinary commands
of dprjax, shown as they are run, with their files below --out; the same command again goes on where
it stopped. --config.KEY=VALUE is handed on to dprjax.train.
"""

import argparse
import pathlib
import resource
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import duration, size
from dprjax.data import docstrings, sources
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import read_texts
from dprjax.inference.retriever import Hit, Retriever
from dprjax.models import artifact, hub
from dprjax.models.prompts import KINDS
from dprjax.retrieval import embeddings, exact
from dprjax.runtime import cli, tree
from dprjax.runtime import config as configs
from dprjax.runtime.stages import Stages

DOCSTRINGS = 'docstrings'
OUT = 'quickstart-out'
MEASURES = ('nDCG@10', 'RR@10', 'R@100')
QUESTIONS = (
  'how do I smooth a noisy signal?',
  'which words of a list are closest to a misspelled one?',
  'stop gradients from exploding',
)
_COMMANDS = 13  # of a whole tour
_SHOWN = 3  # passages a search


class Text(NamedTuple):
  """What is searched, and for what.

  Attributes:
    folder, split: in BEIR's form, and whose judgements are measured on.
    corpus, queries, qrels: the files.
    questions: the first few of the judged queries' texts.
  """

  folder: epath.Path
  split: str
  corpus: epath.Path
  queries: epath.Path
  qrels: epath.Path
  questions: list[str]


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
  """BM25, the frozen backbone and the trained one on one split; prints the table and a few
  searches.

  Args:
    data: a BEIR folder; or 'docstrings', or 'docstrings:json,email' for those of some packages.
    out: the folder of all that is written.
    config: of dprjax.train, a path with or without ':recipe'; by default configs/quickstart.py of
      the checkout.
    backbone: in place of the config's.
    split: which judgements to measure on.
    overrides: '--config.KEY=VALUE' for dprjax.train.
    questions: to search for at the end; by default three about Python, or three of the split's.

  Returns:
    The seconds that each command took, by its title, without those that were done before.

  Raises:
    InputError: bad input, or ``out`` holds a comparison on other text.
  """
  config = config or default_config()
  files.existing(config_file(config), '--config')
  text = prepare(data, out, split)
  tour = Stages(out, _COMMANDS)

  run = out / f'bm25.{split}.trec'
  tour.run(
    'Rank by BM25',
    [
      'bm25',
      f'--corpus={text.corpus}',
      f'--queries={text.queries}',
      f'--qrels={text.qrels}',
      f'--out={run}',
      '--k=100',
    ],
    run,
  )
  metrics = [f'--metrics=BM25={measure(tour, text, "BM25", run)}']

  product = train(
    tour,
    text,
    out,
    config,
    ([f'--config.backbone.path={backbone}'] if backbone else []) + list(overrides),
  )
  trained = configs.load_workdir(out / 'training')
  base = configs.backbone_path(trained, out / 'training')
  prompted = product.suffix == '.npz'
  count, nbytes = weight(product)
  extra = {
    'frozen': ['--extra', 'trained parameters=0'],
    'trained': [
      '--extra',
      f'trained parameters={count}',
      '--extra',
      f'file size={size(nbytes, "B")}',
    ],
  }
  names = {'frozen': 'frozen backbone', 'trained': '+ prompt' if prompted else 'fine-tuned'}
  models: dict[str, dict[str, Any]] = {
    'frozen': {'backbone': base},
    'trained': {'backbone': base, 'prompt': str(product)}
    if prompted
    else {'backbone': str(product)},
  }
  for system, name in names.items():
    run = rank(tour, text, out, system, name, models[system], trained)
    metrics.append(f'--metrics={name}={measure(tour, text, name, run, extra[system])}')
  tour.run(
    'Compare', ['report', *metrics, f'--out={out / "report.md"}', f'--figure={out / "report.png"}']
  )

  questions = questions or (QUESTIONS if data == DOCSTRINGS else text.questions)
  settings: dict[str, Any] = {
    f'{kind}_max_length': trained.data[f'{kind}_max_length'] for kind in KINDS
  }
  settings |= {'pooling': trained.pooling, 'normalize': bool(trained.normalize)}
  hits = {}
  for system in names:
    retriever = Retriever.load(**models[system], **settings)
    hits[system] = search(
      retriever, out / 'embeddings' / f'{system}-passages', text.corpus, questions
    )
  print(
    'Searches: the best passages '
    f'{"with the prompt" if prompted else "of the fine-tuned backbone"}, and what the frozen '
    'backbone finds'
  )
  for question, best, frozen in zip(questions, hits['trained'], hits['frozen'], strict=True):
    print(f'\n  {question}')
    for place, hit in enumerate(best, start=1):
      print(f'    {place}  {hit.score:.3f}  {shown(hit)}')
    print(f'    frozen    {", ".join(hit.id for hit in frozen)}')
  print('\n' + next_steps(out, product, models['trained'], data, split), flush=True)
  return tour.seconds


def default_config() -> str:
  """configs/quickstart.py of the checkout that this file is part of.

  Raises InputError where it is part of none.
  """
  file = pathlib.Path(__file__).parent.parent / 'configs' / 'quickstart.py'
  if not file.is_file():
    raise InputError(
      f'{file} is not there: dprjax is installed without its configs; run this from a checkout '
      '(pip install -e .), or name a config, --config=FILE'
    )
  return str(file)


def config_file(config: str) -> str:
  """``FILE[:recipe]`` -> ``FILE``."""
  return config.partition('.py:')[0] + '.py' if '.py:' in config else config


def prepare(data: str, out: epath.Path, split: str) -> Text:
  """Finds the text; docstrings are collected into ``out/data``.

  Raises:
    InputError: a file is missing or malformed, or ``out`` was begun with other text.
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
  where = sources.locate(sources.Source(str(folder), 'beir', split))
  training = sources.locate(sources.Source(str(folder), 'beir', 'train'))
  claim(out, data, {**where, 'training': training['qrels']}, split)
  judged = read_qrels(where['qrels'])
  questions = [query.text for query in read_texts(where['queries'], 'query') if query.id in judged]
  if not questions:
    raise InputError(
      f'{where["qrels"]}: none of its {len(judged):,} queries is in {where["queries"]}'
    )
  return Text(folder, split, where['corpus'], where['queries'], where['qrels'], questions[:3])


def claim(out: epath.Path, data: str, parts: Mapping[str, epath.Path], split: str) -> None:
  """Notes which text ``out`` is about, or raises InputError if that was another."""
  record = out / 'text.json'
  here = {'data': data} | {
    f'qrels of {split}' if part == 'qrels' else part: files.sha256_file(file)
    for part, file in parts.items()
  }
  there = files.read_json(record, 'record of the text') if record.exists() else {}
  differ = [part for part in here if part in there and there[part] != here[part]]
  if differ:
    raise InputError(
      f'{out} holds a comparison on other text ({", ".join(differ)} changed since); choose a fresh '
      '--out'
    )
  if not there.items() >= here.items():
    files.write_json(record, there | here)


def train(
  tour: Stages, text: Text, out: epath.Path, config: str, overrides: Sequence[str]
) -> epath.Path:
  """Trains and exports; returns the prompt, or the directory of a backbone that was trained."""
  workdir = out / 'training'
  knobs = [f'--config.data.dir={text.folder}', '--config.data.format=beir', *overrides]
  tour.run(
    'Train',
    ['train', f'--config={config}', f'--workdir={workdir}', *knobs],
    workdir / 'config.json',
    reads=[config_file(config)],
  )
  product = out / ('prompt.npz' if configs.load_workdir(workdir).prompt.length else 'model')
  tour.run('Export', ['export', f'--workdir={workdir}', f'--out={product}'], product)
  return product


def rank(
  tour: Stages,
  text: Text,
  out: epath.Path,
  system: str,
  name: str,
  model: Mapping[str, str],
  config: Any,
) -> epath.Path:
  """Encodes with ``model`` and searches; returns the run.

  The frozen backbone reads as much of a text as the trained one.
  """
  made = {}
  for kind, source in (('passage', text.corpus), ('query', text.queries)):
    made[kind] = out / 'embeddings' / f'{system}-{"passages" if kind == "passage" else text.split}'
    what = 'passages' if kind == 'passage' else 'queries'
    tour.run(
      f'Encode the {what}: {name}',
      [
        'encode',
        *(f'--{flag}={value}' for flag, value in model.items()),
        f'--kind={kind}',
        f'--input={source}',
        f'--out={made[kind]}',
        f'--pooling={config.pooling}',
        f'--normalize={str(bool(config.normalize)).lower()}',
        f'--max_length={config.data[f"{kind}_max_length"]}',
        *([f'--qrels={text.qrels}'] if kind == 'query' else []),
      ],
      made[kind],
    )
  run = out / f'{system}.{text.split}.trec'
  tour.run(
    f'Search: {name}',
    [
      'search',
      f'--corpus={made["passage"]}',
      f'--queries={made["query"]}',
      f'--out={run}',
      '--k=100',
    ],
    run,
  )
  return run


def measure(
  tour: Stages, text: Text, name: str, run: epath.Path, extra: Sequence[str] = ()
) -> epath.Path:
  """Evaluates a run; returns the metrics."""
  metrics = run.with_suffix('.json')
  tour.run(
    f'Measure: {name}',
    [
      'evaluate',
      f'--run={run}',
      f'--qrels={text.qrels}',
      '--measure',
      *MEASURES,
      f'--out={metrics}',
      *extra,
    ],
    metrics,
  )
  return metrics


def weight(product: epath.Path) -> tuple[int, int]:
  """Parameters and bytes of a prompt.npz, or of the encoders in a directory."""
  if product.suffix == '.npz':
    return sum(
      array.size for array in artifact.load_prompt(product).arrays.values()
    ), product.stat().length
  homes = [
    home
    for home in (product, *(product / kind for kind in KINDS))
    if (home / 'config.json').exists()
  ]
  stored = [file for home in homes for file in home.glob('*.safetensors')]
  return sum(tree.count(hub.load_backbone(home).params) for home in homes), sum(
    file.stat().length for file in stored
  )


def search(
  retriever: Retriever, vectors: epath.Path, corpus: epath.Path, questions: Sequence[str]
) -> list[list[Hit]]:
  """The best passages of each question, among embeddings that are on disk already."""
  passages = embeddings.load_embeddings(vectors)
  found = exact.search(retriever.encode(list(questions), 'query'), passages.shards, _SHOWN)
  ids = [[passages.ids[row] for row in rows] for rows in found.rows]
  wanted = {one for row in ids for one in row}
  texts = {
    passage.id: passage.text for passage in read_texts(corpus, 'passage') if passage.id in wanted
  }
  return [
    [Hit(one, float(score), texts[one]) for one, score in zip(row, scores, strict=True)]
    for row, scores in zip(ids, found.scores, strict=True)
  ]


def shown(hit: Hit, width: int = 110) -> str:
  """The id and the beginning of the text, on one line; the id once if the text begins with it."""
  text = hit.text if hit.text.startswith(hit.id) else f'{hit.id}: {hit.text}'
  return textwrap.shorten(text, width, placeholder=' ...')


def next_steps(
  out: epath.Path, product: epath.Path, model: Mapping[str, str], data: str, split: str
) -> str:
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
  arguments = ', '.join(f'{name}={value!r}' for name, value in model.items())
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
  parser.add_config('of dprjax.train (default: configs/quickstart.py)', 'handed on to dprjax.train')
  parser.add_argument(
    '--backbone',
    help="a Hugging Face directory, a hub id, or package:NAME, in place of the config's",
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

  try:
    cli.run(parser, command, own)
  except KeyboardInterrupt:
    print('\nstopped; the same command goes on from here', file=sys.stderr)
    sys.exit(130)


if __name__ == '__main__':
  main()
