"""Compares a trained prompt, the frozen backbone and BM25 in one command.

    python -m dprjax.quickstart
    python -m dprjax.quickstart --search 'how do I count the words of a text?'
    python -m dprjax.quickstart --data=DIR --out=runs/mine --config=configs/dptdr.py:beir

The text is the docstrings of the installed Python packages or, with --data, a BEIR folder with
training judgements and a test split. The stages are commands of dprjax, printed as they run; their
files are below --out. The same command continues after an interruption. --config.KEY=VALUE goes to
dprjax.train.
"""

from __future__ import annotations

import dataclasses
import itertools
import resource
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from dprjax.base import files, provenance
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import duration, rounded
from dprjax.data import docstrings, sources, splitting
from dprjax.formats import hub_data, inputs
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import read_texts
from dprjax.formats.vector_spec import SIDES
from dprjax.retrieval import embeddings
from dprjax.runtime import cli, flags
from dprjax.runtime import config as configs
from dprjax.runtime import workdir as workdirs
from dprjax.runtime.flags import flag
from dprjax.runtime.stages import ModelFiles, Stages, TextFiles, config_file

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
_COMMANDS = 13  # in the whole comparison; two of them encode passages
_DEPTH = 100  # passages a query in the runs
_TEST = 0.2  # share of test queries, for data without a test split
_SHOWN = 3  # passages shown for a search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flag(
    'a value of --config.data.dir; a test split is made if there is none. Or '
    "'docstrings:json,email' for the docstrings of some packages",
    DOCSTRINGS,
    metavar='DIR',
  )
  out: str = flag('the folder of all files', OUT, metavar='DIR')
  experiment: tuple[str, ...] = flags.config(
    'of dprjax.train (default: configs/quickstart.py)', 'passed on to dprjax.train'
  )
  backbone: str | None = flags.backbone(None, '; replaces the backbone of the config')
  split: str = flag('the split to evaluate on', 'test')
  search: tuple[str, ...] = flag(
    'a question to search for at the end; may be repeated', (), metavar='QUESTION'
  )


def quickstart(args: Flags) -> dict[str, float]:
  """Compares BM25, the frozen backbone and the trained model on a split; prints some searches.

  Returns:
    Seconds of each command that ran, by title.
  """
  recipes = [word for word in args.experiment if word.startswith('--config=')]
  config = configs.locate((recipes or ['configs/quickstart.py'])[-1].removeprefix('--config='))
  files.existing(config_file(config), '--config')
  data = None if args.data.split(':')[0] == DOCSTRINGS else args.data
  inputs = {'--data': data, '--backbone': args.backbone}
  with workdirs.claim(args.out, workdirs.QUICKSTART, inputs, flag='--out'):
    return _compare(args, config)


def _compare(args: Flags, config: str) -> dict[str, float]:
  data, out, split, backbone = args.data, epath.Path(args.out), args.split, args.backbone
  overrides = [word for word in args.experiment if not word.startswith('--config=')]
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
  reads = [texts.corpus, texts.queries, texts.qrels['train'], *ModelFiles(backbone or '').files]
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
    'frozen': ModelFiles(base),
    'trained': ModelFiles(base, product) if prompted else ModelFiles(str(product)),
  }
  # A query-only prompt shares the passages of the frozen backbone.
  passages = {
    system: workdir / 'passages' if shared else out / 'embeddings' / f'{system}-passages'
    for system in models
  }
  for system, name, extra in (
    ('frozen', 'frozen backbone', ['trained parameters=0']),
    ('trained', trained_name, [f'trained parameters={count}', f'file size={rounded(nbytes, "B")}']),
  ):
    # Both encoders read the same number of tokens.
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
  # The first is the baseline of comparisons.
  stages.report({'frozen backbone': metrics['frozen backbone'], **metrics}, (), out)
  print(lengths(trained, base), flush=True)

  questions = args.search or (QUESTIONS if data == DOCSTRINGS else asked)
  settings: dict[str, Any] = {
    f'{side}_max_length': trained.data[f'{side}_max_length'] for side in SIDES
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
    f'{"with the prompt" if prompted else "of the fine-tuned backbone"}, and those that the frozen '
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
  """A line on how many tokens of a text both encoders read."""
  with cli.loading():
    from dprjax.models import hub
  query, passage = (trained.data[f'{side}_max_length'] for side in SIDES)
  whole = hub.load_spec(backbone).longest
  less = f'; dprjax encode without flags reads {whole}' if min(query, passage) < whole else ''
  return f'Both encoders read up to {query} tokens of a query and {passage} of a passage{less}.\n'


def prepare(data: str, out: epath.Path, split: str) -> tuple[TextFiles, list[str]]:
  """The text and the first queries of the split; collects docstrings into ``out/data``."""
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
  elif _lacks_test(folder, split):
    folder = out / 'data'
    if not folder.exists():
      _make_split(data, folder)
  test = sources.locate(sources.Source(str(folder), 'beir', split))
  train = sources.locate(sources.Source(str(folder), 'beir', 'train'))
  qrels = {'train': train['qrels'], split: test['qrels']}
  named = {f'qrels of {part}': path for part, path in qrels.items()}
  collected = data if folder == out / 'data' else ''
  _check_text(out, collected, {'corpus': test['corpus'], 'queries': test['queries'], **named})
  judged = read_qrels(test['qrels'])
  queries = read_texts(test['queries'], 'query')
  questions = [query.text for query in queries if query.id in judged]
  if not questions:
    raise InputError(f'{test["qrels"]}: no judged query is in {test["queries"]}')
  return TextFiles(folder, test['corpus'], test['queries'], qrels), questions[:_SHOWN]


def _lacks_test(folder: epath.Path, split: str) -> bool:
  """Whether data is not a BEIR folder with its own test split."""
  if split != 'test' or not (hub_data.is_named(folder) or folder.exists()):
    return False
  if not folder.is_dir() or not inputs.variant(folder, *inputs.OWN['passage']):
    return True
  splits = (inputs.variant(folder / 'qrels', f'{name}.tsv') for name in ('train', 'test'))
  train, test = splits
  return train is not None and test is None


def _make_split(data: str, folder: epath.Path) -> None:
  """Writes data as a BEIR folder with the splits train and test."""
  path = data
  if hub_data.is_named(data):
    path = str(hub_data.folder_of(data, folder.parent / 'hub', ['train']))
  dataset = sources.load_dataset(sources.Source(path))
  split = splitting.choose(dataset, _TEST)
  passages, _ = splitting.write(dataset, split, folder)
  print(
    f'{counted(passages, "passages")}; {counted(len(split.train), "queries")} to train on, '
    f'{len(split.test)} to test on, split by {split.by}',
    flush=True,
  )


def _check_text(out: epath.Path, collected: str, sources: Mapping[str, epath.Path]) -> None:
  """Records the text of ``out``. Raises InputError if it changed.

  ``collected`` is --data if it names packages, whose docstrings are stored in ``out``.
  """
  mark = provenance.read_mark(out)
  before = mark.get('inputs', {})
  changed = [role for role in provenance.changes(before, sources) if role in {*before} & {*sources}]
  if mark.get('collected', collected) != collected:
    changed = ['--data']
  if changed:
    raise InputError(
      f'{out} has a comparison on other text: {", ".join(changed)} changed; choose another --out'
    )
  stamped = before | provenance.stamp(sources)
  provenance.write_mark(out, workdirs.QUICKSTART, inputs=stamped, collected=collected)


def weight(product: epath.Path) -> tuple[int, int]:
  """Parameters and bytes of a prompt.npz, or of the encoders in a directory."""
  with cli.loading():
    from dprjax.models import artifact, hub
    from dprjax.runtime import tree
  if product.suffix == '.npz':
    arrays = artifact.load_prompt(product).arrays.values()
    return sum(array.size for array in arrays), product.stat().length
  folders = [product, *(product / side for side in SIDES)]
  folders = [folder for folder in folders if (folder / 'config.json').exists()]
  weights = [file for folder in folders for file in folder.glob('*.safetensors')]
  return (
    sum(tree.count(hub.load_backbone(folder, on_disk=True).params) for folder in folders),
    sum(file.stat().length for file in weights),
  )


def search(
  retriever: Retriever, vectors: epath.Path, corpus: epath.Path, questions: Sequence[str]
) -> list[list[Hit]]:
  """The best passages for each question, from embeddings on disk."""
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
  """The id and the beginning of the text on one line."""
  text = hit.text if hit.text.startswith(hit.id) else f'{hit.id}: {hit.text}'
  return textwrap.shorten(text, width, placeholder=' ...')


def next_steps(
  out: epath.Path, product: epath.Path, model: ModelFiles, data: str, split: str
) -> str:
  """The written files, and commands to try next."""
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
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  began = time.monotonic()
  seconds = quickstart(args)
  if len(seconds) > 1:
    # ru_maxrss is in kB on Linux. Sum of the largest child and this process.
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
      f'at most {rounded(peak, "B")} of memory'
    )


if __name__ == '__main__':
  main()
