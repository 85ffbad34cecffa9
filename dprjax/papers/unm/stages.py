"""Stages of a pipeline: commands that run in order, each only if needed."""

import contextlib
import hashlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from etils import epath

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError

_RECORD = 'stages.json'
_GRACE_S = 2.0  # for an interrupted command


class Stages:
  """Runs commands of dprjax, unless they already succeeded on the same input.

  For each file or folder made, ``stages.json`` has the command line of the stage and the SHA-256 of
  its input. If these change, the ``scratch`` folder is removed and the stage runs again. A killed
  stage runs again without removal, so a command may resume.
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
    status = _run([sys.executable, '-m', f'dprjax.{name}', *arguments])
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


def _run(command: Sequence[str]) -> int:
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
