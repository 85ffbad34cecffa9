"""Stages of quickstart and pipeline: commands that run in order, each only if needed."""

import contextlib
import hashlib
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError
from dprjax.training import config as configs

_RECORD = 'stages.json'
_GRACE_S = 2.0  # for an interrupted command


class TextFiles(NamedTuple):
  """A BEIR folder and its files; judgements by split."""

  folder: epath.Path
  corpus: epath.Path
  queries: epath.Path
  qrels: Mapping[str, epath.Path]


class ModelFiles(NamedTuple):
  """A backbone and perhaps a prompt."""

  backbone: str
  prompt: epath.Path | None = None

  @property
  def arguments(self) -> dict[str, Any]:
    """Flags of a command, or arguments of ``Retriever.load``."""
    return {'backbone': self.backbone} | ({'prompt': str(self.prompt)} if self.prompt else {})

  @property
  def files(self) -> list[epath.Path]:
    """Local files; a backbone from the hub or a package has none, since its name identifies it."""
    local = bool(self.backbone) and epath.Path(self.backbone).is_dir()
    return ([epath.Path(self.backbone)] if local else []) + ([self.prompt] if self.prompt else [])


class Stages:
  """Runs commands of dprjax, unless they already succeeded on the same input.

  For each file or folder made, ``stages.json`` has the command line of the stage and the SHA-256 of
  its input. If these change, the ``scratch`` folder is removed and the stage runs again. A killed
  stage runs again without removal, so a command may resume.
  """

  def __init__(self, out: epath.Path, count: int):
    self._record, self._count, self._number = out / _RECORD, count, 0
    self._stages = _read(self._record) if self._record.exists() else {}
    self._sums: dict[str, str] = {}
    self._made: set[str] = set()  # by this process
    self.seconds: dict[str, float] = {}  # by title

  def bm25(self, title: str, texts: TextFiles, split: str, out: epath.Path, k: int) -> epath.Path:
    """Ranks passages for the queries of a split; returns the run."""
    reads = [texts.corpus, texts.queries, texts.qrels[split]]
    flags = [f'--corpus={reads[0]}', f'--queries={reads[1]}', f'--qrels={reads[2]}']
    self.run(title, ['bm25', *flags, f'--out={out}', f'--k={k}'], out, reads)
    return out

  def train(
    self,
    title: str,
    config: str,
    flags: Sequence[str],
    workdir: epath.Path,
    reads: Sequence[epath.Path],
    restart: bool = False,
  ) -> None:
    """Trains; with ``restart``, in an empty workdir when the input changes."""
    # The last stage needs a model even if no gain is possible.
    command = ['train', f'--config={config}', f'--workdir={workdir}', *flags]
    self.run(
      title,
      [*command, '--config.eval.skip_saturated=False'],
      workdir / 'metrics.jsonl',
      [epath.Path(config_file(config)), *reads],
      workdir if restart else None,
    )

  def export(self, title: str, workdir: epath.Path, out: epath.Path) -> None:
    # The last stage reports a training without gain.
    command = ['export', f'--workdir={workdir}', f'--out={out}', '--force']
    self.run(title, command, out, [workdir / 'metrics.jsonl'])

  def encode(
    self,
    title: str,
    model: ModelFiles,
    texts: TextFiles,
    split: str | None,
    out: epath.Path,
    config: ml_collections.ConfigDict,
  ) -> epath.Path:
    """Encodes the queries of a split or, without one, the corpus; settings are of ``config``."""
    side = 'query' if split else 'passage'
    reads = [texts.queries, texts.qrels[split]] if split else [texts.corpus]
    flags = {
      **model.arguments,
      'side': side,
      'input': reads[0],
      'out': out,
      **({'qrels': reads[1]} if split else {}),
      'pooling': config.pooling,
      'normalize': str(bool(config.normalize)).lower(),
      'max_length': config.data[f'{side}_max_length'],
    }
    command = ['encode', *(f'--{name}={value}' for name, value in flags.items())]
    self.run(title, command, out, [*reads, *model.files], out)
    return out

  def search(
    self, title: str, corpus: epath.Path, queries: epath.Path, out: epath.Path, k: int
  ) -> epath.Path:
    """Searches embeddings; returns the run."""
    # Manifests have the checksums of all other files.
    reads = [corpus / 'manifest.json', queries / 'manifest.json']
    command = ['search', f'--corpus={corpus}', f'--queries={queries}', f'--out={out}', f'--k={k}']
    self.run(title, command, out, reads)
    return out

  def evaluate(
    self,
    title: str,
    run: epath.Path,
    qrels: epath.Path,
    measures: Sequence[str],
    out: epath.Path,
    extra: Sequence[str] = (),
  ) -> epath.Path:
    """Evaluates a run; returns the file of metrics. ``extra``: ``NAME=VALUE`` metrics."""
    command = ['evaluate', f'--run={run}', f'--qrels={qrels}', '--measure', *measures]
    command += [f'--out={out}', *(word for each in extra for word in ('--extra', each))]
    self.run(title, command, out, [run, qrels])
    return out

  def report(
    self, metrics: Mapping[str, epath.Path], measures: Sequence[str], folder: epath.Path
  ) -> None:
    """Writes report.md and report.png from metrics by system; always runs."""
    command = ['report', *(f'--metrics={name}={path}' for name, path in metrics.items())]
    command += ['--measure', *measures] if measures else []
    command += [f'--out={folder / "report.md"}', f'--figure={folder / "report.png"}']
    self.run('Compare', command)

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
      reads: input files and folders, besides the command line.
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
    head = f'[{self._number}/{self._count}] {title}'
    if makes is not None and same and before.get('done') and makes.exists():
      print(f'{head}: done before', flush=True)
      self._made.add(str(makes))
      return
    if before and not same and scratch is not None and scratch.exists():
      scratch.rmtree()
    if makes is not None:
      self._note(makes, entry | {'done': False})
    print(f'\n{head}\n$ {line}', flush=True)
    began = time.monotonic()
    status = _run([sys.executable, '-m', f'dprjax.{name}', *arguments])
    if status in (2, 130):
      sys.exit(status)  # the command printed the reason
    if status:
      ended = (
        f'was killed by signal {-status}{" (out of memory?)" if status == -9 else ""}'
        if status < 0
        else f'ended with status {status}'
      )
      raise InputError(f'dprjax.{name} {ended}; run the same command again to continue from here')
    self.seconds[title] = time.monotonic() - began
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


def _read(path: epath.Path) -> dict[str, dict[str, Any]]:
  return reading.read(path, 'record of the stages', dict[str, dict[str, Any]])


class _Child(subprocess.Popen[bytes]):
  """A command, and whether an interrupt came during its start."""

  interrupted = False


def _start(command: Sequence[str]) -> _Child:
  """Starts a command without losing an interrupt that comes meanwhile."""
  heard: list[int] = []
  if threading.current_thread() is not threading.main_thread():
    return _Child(command, pass_fds=outputs.held())
  before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
  try:
    child = _Child(command, pass_fds=outputs.held())
  finally:
    signal.signal(signal.SIGINT, before)
  child.interrupted = bool(heard)
  return child


def _run(command: Sequence[str]) -> int:
  """Runs a command, which reports an interrupt itself; returns its status."""
  # It inherits the locks of this process, so the folder stays locked until the command ends.
  with _start(command) as child:
    try:
      if child.interrupted:
        raise KeyboardInterrupt
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


def config_file(config: str) -> str:
  """``FILE[:recipe]`` -> ``FILE``."""
  return config.partition('.py:')[0] + '.py' if '.py:' in config else config


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
