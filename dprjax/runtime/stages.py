"""Commands of dprjax one after another, each as a user would run it, and none twice: what
quickstart and pipeline are made of.
"""

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError

_RECORD = 'stages.json'


class Stages:
  """Runs commands, and leaves out those that have ended well before on the same input.

  ``stages.json`` holds, by the file or folder that a stage makes, the command's words and the
  SHA-256 of what it read; whatever of that is another one makes the stage run again. One that was
  cut short by a kill runs again as it is, so that commands which can resume do so; one whose input
  has changed since begins anew, without its scratch.

  Args:
    out: the folder of all that is written.
    count: stages in all, for the console.
  """

  def __init__(self, out: epath.Path, count: int):
    self._record, self._count, self._number = out / _RECORD, count, 0
    self._stages = (
      files.read_json(self._record, 'record of the stages') if self._record.exists() else {}
    )
    self._sums: dict[str, str] = {}
    self.seconds: dict[str, float] = {}  # by title, of the commands that ran

  def run(
    self,
    title: str,
    command: Sequence[str],
    makes: epath.Path | None = None,
    reads: Sequence[epath.PathLike] = (),
    scratch: epath.Path | None = None,
  ) -> None:
    """Runs ``python -m dprjax.COMMAND`` unless it has ended well before, on the same input, and
    what it makes is there.

    Args:
      title: what it is for, as the console and ``seconds`` name it.
      command: its name and arguments.
      makes: the file or folder it writes, for others to read, and no other stage does; None: it is
        run every time, and not recorded.
      reads: files and folders whose content counts, beyond the command's words.
      scratch: the stage's own folder, removed before it is run on other input than before; None:
        nothing is removed.

    Raises:
      InputError: it was killed, or failed in a way that is not the input's fault.
    """
    self._number += 1
    name, *arguments = command
    line = shlex.join(['python', '-m', f'dprjax.{name}', *arguments])
    entry = {'command': line, 'reads': {str(path): self._sum(epath.Path(path)) for path in reads}}
    before = self._stages.get(str(makes), {})
    same = all(before.get(key) == value for key, value in entry.items())
    head = f'[{self._number}/{self._count}] {title}'
    if makes is not None and same and before.get('done') and makes.exists():
      print(f'{head}: done before', flush=True)
      return
    if before and not same and scratch is not None and scratch.exists():
      scratch.rmtree()
    if makes is not None:
      self._note(makes, entry | {'done': False})
    print(f'\n{head}\n$ {line}', flush=True)
    began = time.monotonic()
    status = subprocess.run([sys.executable, '-m', f'dprjax.{name}', *arguments]).returncode
    if status == 2:
      sys.exit(2)  # the command has said why
    if status:
      ended = (
        f'was killed by signal {-status}{" (out of memory?)" if status == -9 else ""}'
        if status < 0
        else f'ended with status {status}'
      )
      raise InputError(f'dprjax.{name} {ended}; run the same command again to go on from here')
    self.seconds[title] = time.monotonic() - began
    if makes is not None:
      self._sums = {
        path: digest for path, digest in self._sums.items() if not path.startswith(str(makes))
      }
      self._note(makes, entry | {'done': True})

  def _note(self, makes: epath.Path, stage: dict[str, object]) -> None:
    self._stages[str(makes)] = stage
    files.write_json(self._record, self._stages)

  def _sum(self, path: epath.Path) -> str:
    """SHA-256 of a file, or of the names and sums of the files in a folder; what is read by several
    stages is read here once.
    """
    if str(path) not in self._sums:
      if path.is_dir():
        inside = {one.name: self._sum(one) for one in sorted(path.iterdir())}
        self._sums[str(path)] = hashlib.sha256(
          json.dumps(inside, sort_keys=True).encode()
        ).hexdigest()
      else:
        self._sums[str(path)] = files.sha256_file(path)
    return self._sums[str(path)]
