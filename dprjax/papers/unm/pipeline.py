"""Runs unified negative mining.

    dprjax pipeline --config=configs/unm.py:beir --workdir=runs/unm --config.data.dir=DIR

The stages are commands of dprjax that run once each; one runs again if its input changed. The same
command continues after an interruption. A table compares BM25, the frozen backbone and the rows of
Table 9 of the paper on the test split.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from dprjax.base import cli, files, flags, outputs, reading
from dprjax.base.errors import InputError
from dprjax.retrieval import figures, measures
from dprjax.text import docstrings, sources
from dprjax.training import config as configs
from dprjax.training import options
from dprjax.training import workdir as workdirs

logger = logging.getLogger('dprjax')

# Set by the pipeline, in place of the config of an experiment.
_OF_DATA = ('dir', 'format', 'mined_negatives', 'train_split', 'token_cache')
_EXPERIMENTS = ('retriever', 'reranker')
_OURS = ('method', 'seed', 'mix', *(f'data.{name}' for name in _OF_DATA))
_MEASURES = ('nDCG@10', 'RR@10', 'R@100', 'R@1000')

_RECORD = 'stages.json'
_GRACE_S = 2.0  # for an interrupted command

_POOL = options.number(0.0, least=0, most=1)
_TEXT = options.text('')
# configs/unm.py explains them.
_OPTIONS = {
  'method': _TEXT,
  'seed': options.whole(42, least=0, most=2**31 - 1),
  'data.dir': _TEXT,
  'data.train_split': _TEXT,
  'data.test_split': _TEXT,
  'retriever_recipe': _TEXT,
  'reranker_recipe': _TEXT,
  'reranker_path': _TEXT,
  'depth': options.whole(200, least=1, most=10**6),
  'sample': options.whole(30, least=1, most=10**6),
  'threshold': options.number(0.1, least=0, most=1),
  'mix.denoised': _POOL,
  'mix.undenoised': _POOL,
  'mix.random': _POOL,
  'undenoised': options.switch(True),
  'measures': options.several(each=options.lines(''), least=0),
}


class ModelFiles(NamedTuple):
  backbone: str
  prompt: epath.Path | None = None

  @property
  def files(self) -> list[epath.Path]:
    """Local files; a backbone from the hub or a package has none, since its name identifies it."""
    local = bool(self.backbone) and epath.Path(self.backbone).is_dir()
    return ([epath.Path(self.backbone)] if local else []) + ([self.prompt] if self.prompt else [])


class Pipeline:
  """One experiment below ``workdir``: a folder for each training and mining, models/, embeddings/,
  runs/, metrics/, report.md and report.png.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path):
    check(config)
    self.config, self.workdir = config, workdir

  def run(self) -> dict[str, epath.Path]:
    with workdirs.claim(self.workdir, workdirs.PIPELINE, inputs(self.config)):
      return self._run()

  def _run(self) -> dict[str, epath.Path]:
    c, folder = self.config, str(self._folder())
    train, test = (
      sources.locate(sources.Source(folder, 'beir', c.data[f'{split}_split']))
      for split in ('train', 'test')
    )
    self._corpus, self._queries = train['corpus'], train['queries']
    self._qrels = {'train': train['qrels'], 'test': test['qrels']}
    files.write_json(self.workdir / 'config.json', json.loads(configs.to_json(c)))
    self._stages = Stages(self.workdir)
    runs = {split: self._bm25(split) for split in ('train', 'test')}
    metrics = {'BM25': self._measure('bm25', runs['test'])}
    bm25_run = f'bm25={runs["train"]}'

    mined = self._mine('mined-bm25', [bm25_run])
    first, base = self._train('first', mined, 'undenoised')
    systems = {
      'frozen': ('frozen backbone', ModelFiles(base)),
      'first': ('+ BM25 negatives', first),
    }
    candidates = [bm25_run, f'retriever={self._retrieve("first", first, "train")}']
    reranker = c.reranker_path
    if c.undenoised or not reranker:
      mined = self._mine('mined-undenoised', candidates)
      if c.undenoised:
        model, _ = self._train('undenoised', mined, 'undenoised', base)
        systems['undenoised'] = '+ un-denoised negatives', model
      reranker = reranker or self._reranker(mined, base)
    mined = self._mine('mined-denoised', candidates, reranker)
    newest, _ = self._train('denoised', mined, c.mix, base)
    systems['denoised'] = '+ denoised negatives', newest
    for name, (title, model) in systems.items():
      metrics[title] = self._measure(name, self._retrieve(name, model, 'test'))
    # The first is the baseline of comparisons.
    frozen, _ = systems['frozen']
    compared = {frozen: metrics[frozen], **metrics}
    command = ['report', *(f'--metrics={name}={path}' for name, path in compared.items())]
    command += ['--measure', *c.measures] if c.measures else []
    files_made = (f'--out={self.workdir / "report.md"}', f'--figure={self.workdir / "report.png"}')
    self._stages.run('Compare', [*command, *files_made])
    table, last = self.workdir / 'report.md', newest.prompt or newest.backbone
    print(f'{table} compares the retrievers; the last one is {last}', flush=True)
    return metrics

  def _folder(self) -> epath.Path:
    folder, data = self.workdir / 'data', self.config.data
    if not data.dir.startswith('docstrings:'):
      return epath.Path(data.dir)
    if not folder.exists():
      docstrings.build(folder, data.dir.partition(':')[2].split(','))
    return folder

  def _depth(self, split: str) -> int:
    return self.config.depth if split == 'train' else 1000

  def _bm25(self, split: str) -> epath.Path:
    run = self.workdir / 'runs' / f'bm25.{split}.trec'
    reads = [self._corpus, self._queries, self._qrels[split]]
    flags = [f'--corpus={reads[0]}', f'--queries={reads[1]}', f'--qrels={reads[2]}']
    command = ['bm25', *flags, f'--out={run}', f'--k={self._depth(split)}']
    self._stages.run(f'BM25: the {split} queries', command, run, reads)
    return run

  def _mine(self, name: str, runs: Sequence[str], reranker: str = '') -> epath.Path:
    c, folder, out = self.config, self.workdir / name, self.workdir / name / 'train.jsonl'
    qrels = self._qrels['train']
    self._stages.run(
      f'Mine: {name}',
      [
        'mine',
        f'--queries={self._queries}',
        f'--corpus={self._corpus}',
        f'--qrels={qrels}',
        *(f'--run={run}' for run in runs),
        f'--out={out}',
        f'--depth={c.depth}',
        f'--sample={c.sample}',
        f'--seed={c.seed}',
        '--texts=false',
        *([f'--reranker={reranker}', f'--threshold={c.threshold}'] if reranker else []),
      ],
      out,
      [
        self._corpus,
        self._queries,
        qrels,
        *(epath.Path(run.partition('=')[2]) for run in runs),
        *ModelFiles(reranker).files,
      ],
      folder,
    )
    return out

  def _train(
    self, name: str, mined: epath.Path, mix: str | Mapping[str, float], base: str = ''
  ) -> tuple[ModelFiles, str]:
    """Trains a retriever on a source of negatives or a mix; returns it and its initial backbone."""
    if isinstance(mix, str):
      mix = {source: float(source == mix) for source in self.config.mix}
    experiment = self.config.retriever
    prompted = bool(experiment.prompt.length)
    product = self.workdir / 'models' / (f'{name}.npz' if prompted else name)
    settings = [f'mix.{source}={fraction}' for source, fraction in mix.items()]
    recipe = self.config.retriever_recipe
    self._experiment(name, recipe, experiment, mined, base, product, settings)
    workdir = workdirs.trained(self.workdir / name)
    self._settings = workdirs.load_workdir(workdir)
    base = workdirs.backbone_path(self._settings, workdir)
    return (ModelFiles(base, product) if prompted else ModelFiles(str(product))), base

  def _reranker(self, mined: epath.Path, base: str) -> str:
    product = self.workdir / 'models' / 'reranker'
    recipe, experiment = self.config.reranker_recipe, self.config.reranker
    self._experiment('reranker', recipe, experiment, mined, base, product)
    return str(product)

  def _experiment(
    self,
    name: str,
    recipe: str,
    experiment: ml_collections.ConfigDict,
    mined: epath.Path,
    base: str,
    product: epath.Path,
    settings: Sequence[str] = (),
  ) -> None:
    """Trains and exports. A backbone from scratch is made once and then passed as ``base``."""
    workdir, backbone = self.workdir / name, experiment.backbone.path
    if base and backbone.startswith('scratch:'):
      backbone = base
    settings = [
      f'seed={self.config.seed}',
      'data.format=beir',
      f'data.dir={self._folder()}',
      f'data.mined_negatives={mined}',
      f'data.train_split={self.config.data.train_split}',
      f'backbone.path={backbone}',
      *settings,
    ]
    config_file = recipe.partition('.py:')[0] + '.py' if '.py:' in recipe else recipe
    reads = [epath.Path(config_file), self._corpus, self._queries, self._qrels['train'], mined]
    metrics = workdir / 'metrics.jsonl'
    command = [
      *('train', f'--config={recipe}', f'--workdir={workdir}'),
      *differences(recipe, experiment, _OURS),
      *(f'--config.{setting}' for setting in settings),
      '--config.eval.skip_saturated=False',  # later stages need a model even without a gain
    ]
    reads += ModelFiles(backbone).files
    self._stages.run(f'Train: {name}', command, metrics, reads, workdir)
    # The table has trainings without a gain.
    command = ['export', f'--workdir={workdir}', f'--out={product}', '--force']
    self._stages.run(f'Export: {name}', command, product, [metrics])

  def _encode(self, name: str, model: ModelFiles, split: str | None) -> epath.Path:
    side, settings = 'query' if split else 'passage', self._settings
    reads = [self._queries, self._qrels[split]] if split else [self._corpus]
    out = self.workdir / 'embeddings' / f'{name}-{split or "corpus"}'
    flags = {
      'backbone': model.backbone,
      **({'prompt': model.prompt} if model.prompt else {}),
      'side': side,
      'input': reads[0],
      'out': out,
      **({'qrels': reads[1]} if split else {}),
      'pooling': settings.pooling,
      'normalize': str(bool(settings.normalize)).lower(),
      'max_length': settings.data[f'{side}_max_length'],
    }
    title = f'Encode: {name}, the {f"{split} queries" if split else "corpus"}'
    command = ['encode', *(f'--{flag}={value}' for flag, value in flags.items())]
    self._stages.run(title, command, out, [*reads, *model.files], out)
    return out

  def _retrieve(self, name: str, model: ModelFiles, split: str) -> epath.Path:
    corpus, queries = (self._encode(name, model, which) for which in (None, split))
    run = self.workdir / 'runs' / f'{name}.{split}.trec'
    command = ['search', f'--corpus={corpus}', f'--queries={queries}', f'--out={run}']
    # Manifests have the checksums of all other files.
    reads = [folder / 'manifest.json' for folder in (corpus, queries)]
    title = f'Search: {name}, the {split} queries'
    self._stages.run(title, [*command, f'--k={self._depth(split)}'], run, reads)
    return run

  def _measure(self, name: str, run: epath.Path) -> epath.Path:
    names = list(dict.fromkeys([*self.config.measures, *_MEASURES]))
    out, qrels = self.workdir / 'metrics' / f'{name}.json', self._qrels['test']
    command = ['evaluate', f'--run={run}', f'--qrels={qrels}', '--measure', *names, f'--out={out}']
    self._stages.run(f'Measure: {name}', command, out, [run, qrels])
    return out


def differences(
  recipe: str, experiment: ml_collections.ConfigDict, ours: Sequence[str]
) -> list[str]:
  """The flags that turn a recipe of train into ``experiment``, except the backbone.

  ``ours`` are options and sections set by the pipeline itself.
  """
  usual = configs.flat(configs.parse([f'--config={recipe}']).to_dict())
  return [
    f'--config.{name}={value}'
    for name, value in configs.flat(experiment.to_dict()).items()
    if usual.get(name) != value
    and name != 'backbone.path'
    and not any(name == one or name.startswith(f'{one}.') for one in ours)
  ]


def check(config: ml_collections.ConfigDict) -> None:
  settings = configs.flat({k: v for k, v in config.to_dict().items() if k not in _EXPERIMENTS})
  options.check(_OPTIONS, dict(settings), 'config', 'configs/unm.py')
  if abs(sum(config.mix.values()) - 1) > 1e-6:
    raise InputError(
      'config.mix: fractions must add up to 1, not '
      f'{" + ".join(f"{value:g}" for value in config.mix.values())}'
    )
  measures.parse_measures(list(config.measures))
  figures.check_name('report.png')  # its package is there
  for name in _EXPERIMENTS:
    configs.check_ranges(config[name], f'config.{name}')
  if config.reranker_path:
    with cli.loading():
      from dprjax.retrieval import reranker
    reranker.check(config.reranker_path)


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  folder = config.data.dir
  return {
    '--config.data.dir': None if folder.startswith('docstrings:') else folder,
    '--config.reranker_path': config.reranker_path,
    **{f'--config.{name}.backbone.path': config[name].backbone.path for name in _EXPERIMENTS},
    '--config.retriever.prompt.init_from': config.retriever.prompt.init_from,
  }


class Stages:
  """Runs commands of dprjax, unless they already succeeded on the same input.

  For each file or folder made, ``stages.json`` has the command line of the stage and the SHA-256 of
  its input. If these change, the ``scratch`` folder is removed and the stage runs again. A killed
  stage may resume.
  """

  def __init__(self, out: epath.Path):
    self._record, self._number = out / _RECORD, 0
    self._stages: dict[str, dict[str, Any]] = {}
    if self._record.exists():
      kind = dict[str, dict[str, Any]]
      self._stages = reading.read(self._record, 'record of the stages', kind)
    self._sums: dict[str, str] = {}
    self._made: set[str] = set()  # by this process

  def run(
    self,
    title: str,
    command: Sequence[str],
    makes: epath.Path | None = None,
    reads: Sequence[epath.PathLike] = (),
    scratch: epath.Path | None = None,
  ) -> None:
    """Runs ``python -m dprjax.COMMAND`` unless it succeeded on the same input.

    Args:
      makes: the file or folder that only this stage makes; None: runs every time.
      scratch: the folder of the stage, removed before it runs on changed input.
    """
    name, *arguments = command
    line = shlex.join(['python', '-m', f'dprjax.{name}', *arguments])
    entry = {'command': line, 'reads': {str(path): self._sum(epath.Path(path)) for path in reads}}
    before = self._stages.get(str(makes), {})
    same = all(before.get(key) == value for key, value in entry.items())
    if same and str(makes) in self._made:
      return
    self._number += 1
    head = f'[{self._number}] {title}'
    if makes is not None and same and before.get('done') and makes.exists():
      print(f'{head}: done before', flush=True)
      self._made.add(str(makes))
      return
    if before and not same and scratch is not None and scratch.exists():
      scratch.rmtree()
    if makes is not None:
      self._note(makes, entry | {'done': False})
    print(f'\n{head}\n$ {line}', flush=True)
    status = run_command([sys.executable, '-m', f'dprjax.{name}', *arguments])
    if status in (2, 130):
      sys.exit(status)  # the command printed the reason
    if status:
      killed = ', killed (out of memory?)' if status == -signal.SIGKILL else ''
      raise InputError(
        f'dprjax.{name} ended with status {status}{killed}; run the same command again to continue '
        'from here'
      )
    if makes is not None:
      self._sums = {
        path: digest for path, digest in self._sums.items() if not path.startswith(str(makes))
      }
      self._note(makes, entry | {'done': True})
      self._made.add(str(makes))

  def _note(self, makes: epath.Path, stage: dict[str, object]) -> None:
    self._stages[str(makes)] = stage
    files.write_json(self._record, self._stages)

  def _sum(self, path: epath.Path) -> str:
    """SHA-256 of a file, or of the names and sums in a folder; cached."""
    if str(path) not in self._sums:
      if path.is_dir():
        content = {item.name: self._sum(item) for item in sorted(path.iterdir())}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
      else:
        digest = files.sha256_file(path)
      self._sums[str(path)] = digest
    return self._sums[str(path)]


def run_command(command: Sequence[str]) -> int:
  """Runs a command, which reports an interrupt itself; returns its status."""
  # It inherits the locks of this process, so the folder stays locked until the command ends.
  with subprocess.Popen(command, pass_fds=outputs.held()) as child:
    try:
      return child.wait()
    except KeyboardInterrupt:
      # An interrupt from the keyboard reached both; one from elsewhere only this process.
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
      if child.poll() is None:
        child.send_signal(signal.SIGINT)
      if child.wait() == 130:
        return 130
      raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  experiment: tuple[str, ...] = flags.config(
    'configs/unm.py:beir, :scifact, :medquad, :local, with ,ft for fine-tuning',
    'override an option, for example --config.depth=100 or --config.retriever.prompt.length=32; '
    'the config file lists and explains them',
  )
  workdir: str | None = flags.flag(
    'the folder of all files; the same command continues where it stopped (default: '
    'runs/CONFIG-RECIPE)',
    None,
  )


def _command(args: Flags) -> None:
  config = configs.parse(args.experiment)
  if config.method != 'unm':
    raise InputError(
      f'--config: config.method is {config.method!r}; dprjax.pipeline takes configs/unm.py'
    )
  for key in sorted(configs.given(args.experiment)):
    section, _, name = key.partition('.')
    if section in _EXPERIMENTS and name.startswith(_OURS):
      raise InputError(f'config.{key}: the pipeline sets it; leave it out')
  if not config.data.dir:
    config.data.dir = f'docstrings:{configs.EMBEDDED}'
    logger.info('no --config.data.dir: docstrings of %s are the text', configs.EMBEDDED)
  workdir = args.workdir or workdirs.default_workdir(args.experiment, config)
  if args.workdir is None:
    logger.info('--workdir=%s', workdir)
  Pipeline(config, epath.Path(workdir)).run()


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
