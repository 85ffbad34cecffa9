"""Unified negative mining from beginning to end: each stage a command of dprjax, each kept, and
none done twice.

    python -m dprjax.pipeline --config=configs/unm.py:beir --workdir=runs/unm --config.data.dir=DIR

BM25 ranks the passages for the training queries, and a first retriever is trained on its negatives.
What both take for relevant is mined; a cross-encoder is trained on that, and sorts out what may be
relevant after all; a last retriever is trained on the mixture (DPTDR, section 3.3). All are
measured on the test split, in one table: BM25, the frozen backbone, and the three rows of the
paper's Table 9. The same command again goes on where it stopped; a stage whose input has changed is
done again, and so is what follows from it.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.data import docstrings, sources
from dprjax.inference import reranker as rerankers
from dprjax.runtime import cli
from dprjax.runtime import config as configs
from dprjax.runtime.stages import Stages

_OURS = (
  'seed',
  'mix',
  'data.dir',
  'data.format',
  'data.train',
  'data.train_split',
  'data.store',
)  # set here, whatever an experiment's config says
_MEASURES = ('nDCG@10', 'RR@10', 'R@100', 'R@1000')


class Model(NamedTuple):
  """What encodes: a backbone, and a prompt where there is one."""

  backbone: str
  prompt: epath.Path | None = None

  @property
  def flags(self) -> list[str]:
    return [f'--backbone={self.backbone}', *([f'--prompt={self.prompt}'] if self.prompt else [])]

  @property
  def files(self) -> list[epath.Path]:
    """What it consists of, as far as that is here: a hub id or a package is known by its name."""
    local = bool(self.backbone) and epath.Path(self.backbone).is_dir()
    return [
      *([epath.Path(self.backbone)] if local else []),
      *([self.prompt] if self.prompt else []),
    ]


class Pipeline:
  """One experiment, all of it below ``workdir``.

  Args:
    config: that of configs/unm.py.
    workdir: a folder for each training and each mining, embeddings/, runs/, metrics/, report.md and
      report.png.

  Raises:
    InputError: a knob that cannot be, or text that is missing or malformed; from the methods, a
      stage that was killed. A stage that fails on its input has said why, and ends the process with
      status 2.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path):
    check(config)
    self.config, self.workdir = config, workdir
    workdir.mkdir(parents=True, exist_ok=True)
    self.folder = self._text()
    train, test = (
      sources.locate(sources.Source(str(self.folder), 'beir', config.data[f'{split}_split']))
      for split in ('train', 'test')
    )
    self.corpus, self.queries, self.qrels = (
      train['corpus'],
      train['queries'],
      {'train': train['qrels'], 'test': test['qrels']},
    )
    files.write_json(workdir / 'config.json', json.loads(configs.to_json(config)))
    trainings = 1 + int(config.undenoised) + config.rounds
    trained_here = not config.reranker_path
    # BM25 and its negatives; train and export; encode twice, search and measure; a round's own; the
    # reranker's; the table.
    self._stages = Stages(
      workdir,
      4
      + 2 * trainings
      + 4 * (trainings + 1)
      + 3 * config.rounds
      + (config.undenoised or trained_here)
      + 2 * trained_here
      + 1,
    )
    self._encoded: dict[str, epath.Path] = {}

  def run(self) -> dict[str, epath.Path]:
    """All stages. Returns the file of metrics of each system, by its name in the table."""
    c = self.config
    runs = {split: self._bm25(split) for split in ('train', 'test')}
    metrics = {'BM25': self._measure('bm25', runs['test'])}
    outside = [f'bm25={runs["train"]}', *c.runs]

    newest, base = self._train(
      'first', self._mine('mined-bm25', [f'bm25={runs["train"]}']), 'undenoised'
    )
    systems = {'frozen': ('frozen backbone', Model(base)), 'first': ('+ BM25 negatives', newest)}
    reranker, place = c.reranker_path, 'first'
    for number in range(1, c.rounds + 1):
      suffix = f'-{number}' if number > 1 else ''
      candidates = [*outside, f'retriever={self._retrieve(place, newest, "train")}']
      if number == 1 and (c.undenoised or not reranker):
        mined = self._mine('mined-undenoised', candidates)
        if c.undenoised:
          systems['undenoised'] = (
            '+ un-denoised negatives',
            self._train('undenoised', mined, 'undenoised', base)[0],
          )
        reranker = reranker or self._reranker(mined, base)
      mined = self._mine(f'mined-denoised{suffix}', candidates, reranker)
      place = f'denoised{suffix}'
      newest, _ = self._train(place, mined, c.mix, base)
      systems[place] = ('+ denoised negatives' + (f', round {number}' if suffix else ''), newest)
    for place, (name, model) in systems.items():
      metrics[name] = self._measure(place, self._retrieve(place, model, 'test'))
    report = self.workdir / 'report.md'
    self._stages.run(
      'Compare',
      [
        'report',
        *(f'--metrics={name}={file}' for name, file in metrics.items()),
        '--measure',
        *c.measures,
        f'--out={report}',
        f'--figure={report.with_suffix(".png")}',
      ],
    )
    return metrics

  def _text(self) -> epath.Path:
    """The BEIR folder; docstrings are collected into the workdir, once."""
    if not self.config.data.dir.startswith('docstrings:'):
      return epath.Path(self.config.data.dir)
    folder = self.workdir / 'data'
    if not folder.exists():
      docstrings.build(folder, self.config.data.dir.partition(':')[2].split(','))
    return folder

  def _bm25(self, split: str) -> epath.Path:
    run = self.workdir / 'runs' / f'bm25.{split}.trec'
    self._stages.run(
      f'BM25: the {split} queries',
      [
        'bm25',
        f'--corpus={self.corpus}',
        f'--queries={self.queries}',
        f'--qrels={self.qrels[split]}',
        f'--out={run}',
        f'--k={self._depth(split)}',
      ],
      run,
      [self.corpus, self.queries, self.qrels[split]],
    )
    return run

  def _depth(self, split: str) -> int:
    return self.config.depth if split == 'train' else 1000

  def _mine(self, place: str, runs: Sequence[str], reranker: str = '') -> epath.Path:
    """Negatives for the training queries; returns the training file."""
    c, folder = self.config, self.workdir / place
    out = folder / 'train.jsonl'
    read = [
      self.corpus,
      self.queries,
      self.qrels['train'],
      *(epath.Path(run.partition('=')[2] or run) for run in runs),
    ]
    self._stages.run(
      f'Mine: {place}',
      [
        'mine',
        f'--queries={self.queries}',
        f'--corpus={self.corpus}',
        f'--qrels={self.qrels["train"]}',
        *(f'--run={run}' for run in runs),
        f'--out={out}',
        f'--depth={c.depth}',
        f'--sample={c.sample}',
        f'--seed={c.seed}',
        '--texts=false',
        *([f'--reranker={reranker}', f'--threshold={c.threshold}'] if reranker else []),
      ],
      out,
      [*read, *Model(reranker).files],
      folder,
    )
    return out

  def _train(
    self, place: str, mined: epath.Path, mix: str | Mapping[str, float], base: str = ''
  ) -> tuple[Model, str]:
    """A retriever; returns it and its backbone before training.

    ``mix`` is the name of a pool, or shares.
    """
    shares = {pool: float(pool == mix) for pool in self.config.mix} if isinstance(mix, str) else mix
    workdir = self.workdir / place
    experiment, path = self.config.retriever, self._backbone(self.config.retriever, base)
    product = workdir / ('prompt.npz' if experiment.prompt.length else 'model')
    self._experiment(
      place,
      self.config.retriever_recipe,
      experiment,
      mined,
      path,
      product,
      [f'mix.{pool}={share}' for pool, share in shares.items()],
    )
    base = configs.backbone_path(configs.load_workdir(workdir), workdir)
    return (Model(base, product) if experiment.prompt.length else Model(str(product))), base

  def _reranker(self, mined: epath.Path, base: str) -> str:
    """A cross-encoder; returns its directory."""
    product = self.workdir / 'reranker' / 'model'
    experiment = self.config.reranker
    self._experiment(
      'reranker',
      self.config.reranker_recipe,
      experiment,
      mined,
      self._backbone(experiment, base),
      product,
    )
    return str(product)

  def _backbone(self, experiment: ml_collections.ConfigDict, base: str) -> str:
    """The backbone to start from: one from scratch is made by the first training, and is then all
    others'.
    """
    return (
      base if base and experiment.backbone.path.startswith('scratch:') else experiment.backbone.path
    )

  def _experiment(
    self,
    place: str,
    recipe: str,
    experiment: ml_collections.ConfigDict,
    mined: epath.Path,
    backbone: str,
    product: epath.Path,
    more: Sequence[str] = (),
  ) -> None:
    """Trains and exports."""
    workdir = self.workdir / place
    knobs = [
      f'seed={self.config.seed}',
      'data.format=beir',
      f'data.dir={self.folder}',
      f'data.train={mined}',
      f'data.train_split={self.config.data.train_split}',
      f'backbone.path={backbone}',
      *more,
    ]
    finished = workdir / 'metrics.jsonl'
    self._stages.run(
      f'Train: {place}',
      [
        'train',
        f'--config={recipe}',
        f'--workdir={workdir}',
        *differences(recipe, experiment),
        *(f'--config.{knob}' for knob in knobs),
      ],
      finished,
      [
        recipe.partition('.py:')[0] + '.py',
        self.corpus,
        self.queries,
        self.qrels['train'],
        mined,
        *Model(backbone).files,
      ],
      workdir,
    )
    self._stages.run(
      f'Export: {place}',
      ['export', f'--workdir={workdir}', f'--out={product}'],
      product,
      [finished],
    )

  def _encode(self, place: str, model: Model, kind: str, split: str = '') -> epath.Path:
    out = self.workdir / 'embeddings' / f'{place}-{split or "corpus"}'
    if str(out) not in self._encoded:
      trained = self.config.retriever
      source, judged = (self.queries, self.qrels[split]) if split else (self.corpus, None)
      self._stages.run(
        f'Encode: {place}, the {f"{split} queries" if split else "corpus"}',
        [
          'encode',
          *model.flags,
          f'--kind={kind}',
          f'--input={source}',
          f'--out={out}',
          *([f'--qrels={judged}'] if judged else []),
          f'--pooling={trained.pooling}',
          f'--normalize={str(bool(trained.normalize)).lower()}',
          f'--max_length={trained.data[f"{kind}_max_length"]}',
        ],
        out,
        [source, *([judged] if judged else []), *model.files],
        out,
      )
      self._encoded[str(out)] = out
    return out

  def _retrieve(self, place: str, model: Model, split: str) -> epath.Path:
    """Encodes what is not encoded yet, and searches; returns the run."""
    run = self.workdir / 'runs' / f'{place}.{split}.trec'
    corpus, queries = (
      self._encode(place, model, 'passage'),
      self._encode(place, model, 'query', split),
    )
    self._stages.run(
      f'Search: {place}, the {split} queries',
      [
        'search',
        f'--corpus={corpus}',
        f'--queries={queries}',
        f'--out={run}',
        f'--k={self._depth(split)}',
      ],
      run,
      [corpus / 'manifest.json', queries / 'manifest.json'],
    )  # which hold the sums of all other files
    return run

  def _measure(self, place: str, run: epath.Path) -> epath.Path:
    out = self.workdir / 'metrics' / f'{place}.json'
    self._stages.run(
      f'Measure: {place}',
      [
        'evaluate',
        f'--run={run}',
        f'--qrels={self.qrels["test"]}',
        '--measure',
        *dict.fromkeys([*self.config.measures, *_MEASURES]),
        f'--out={out}',
      ],
      out,
      [run, self.qrels['test']],
    )
    return out


def check(config: ml_collections.ConfigDict) -> None:
  """Raises InputError for knobs that cannot be as they are, before anything runs."""
  if config.method != 'unm':
    raise InputError(
      f'--config is an experiment of dprjax.train (config.method {config.method!r}); '
      'dprjax.pipeline takes configs/unm.py'
    )
  if not config.data.dir:
    raise InputError(
      'config.data.dir is empty; name a BEIR folder with judgements to train on, '
      '--config.data.dir=DIR'
    )
  for name in ('depth', 'sample', 'rounds'):
    if config[name] < 1:
      raise InputError(f'config.{name}: must be at least 1, not {config[name]}')
  if abs(sum(config.mix.values()) - 1) > 1e-6 or min(config.mix.values()) < 0:
    raise InputError(
      'config.mix: shares must add up to 1, not '
      f'{" + ".join(f"{value:g}" for value in config.mix.values())}'
    )
  for name, method in (('retriever', 'dpr'), ('reranker', 'cross_encoder')):
    if config[name].method != method:
      raise InputError(f'config.{name}.method: expected {method!r}, not {config[name].method!r}')
  for run in config.runs:
    files.existing(run.partition('=')[2] or run, 'run in config.runs')
  if config.reranker_path:
    try:
      rerankers.check(config.reranker_path)
    except InputError as error:
      raise InputError(f'config.reranker_path: {error}') from error


def differences(recipe: str, experiment: ml_collections.ConfigDict) -> list[str]:
  """The flags that make an experiment of dprjax.train of its recipe, but for what the pipeline sets
  itself.
  """
  usual = dict(_leaves(configs.parse([f'--config={recipe}']).to_dict()))
  return [
    f'--config.{name}={value}'
    for name, value in _leaves(experiment.to_dict())
    if usual.get(name) != value
    and name != 'backbone.path'
    and not any(name == ours or name.startswith(f'{ours}.') for ours in _OURS)
  ]


def _leaves(tree: Mapping[str, Any], above: str = '') -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f'{above}{name}.')
    else:
      yield above + name, value


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('pipeline', __doc__ or '')
  parser.add_config(
    'configs/unm.py:beir, :scifact, :medquad, :local; with ,ft for fine-tuning',
    'override a knob, for instance --config.rounds=2 or --config.retriever.prompt.length=32; the '
    'config file lists and explains them',
  )
  parser.add_argument(
    '--workdir', help='where everything is kept; the same command again goes on where it stopped'
  )
  own, experiment = cli.split_config(argv)

  def command(args: argparse.Namespace) -> None:
    if not args.workdir:
      raise InputError('--workdir is missing; name the folder that everything is kept in')
    Pipeline(configs.parse(experiment), epath.Path(args.workdir)).run()

  cli.run(parser, command, own)


if __name__ == '__main__':
  main()
