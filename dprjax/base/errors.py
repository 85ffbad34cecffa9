"""Errors as people see them: one line, a status, and no secret in it."""

import contextlib
import errno
import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

_LONGEST = 500  # characters of an error line
_HINTS = {
  errno.ENOSPC: 'free some space and run the same command again',
  errno.EDQUOT: 'free some space and run the same command again',
  errno.EFBIG: 'free some space and run the same command again',
  errno.EACCES: 'give this user the right to it, or name another path',
  errno.EPERM: 'give this user the right to it, or name another path',
  errno.EROFS: 'name a path that can be written to',
  errno.ENAMETOOLONG: 'choose a shorter name',
  errno.ENOTDIR: 'a part of this path is a file, not a folder',
  errno.EMFILE: 'raise the number of open files: ulimit -n',
}
_SECRETS = (
  # Of user:SECRET@host. A secret may hold '@' and '/'; a port and a slash begin no secret.
  (re.compile(r'(?<=://)([^/\s:@]*):(?!\d+/)\S+@'), r'\1:***@'),
  (re.compile(r'(?<=://)[^/\s:@]+@'), '***@'),
  (re.compile(r'(?<![\w/.])([\w.+-]+):(?!//|\d+/)[^\s@]+@(?=[\w\[])'), r'\1:***@'),
  # argparse lists the words of a misspelt flag.
  (re.compile(r'(arguments:.*--?\w*(?:token|pass|secret|key)\w*\s+)[^\s-]\S*', re.I), r'\1***'),
  (
    re.compile(
      r'((?:token|password|passwd|secret|api_?key|apikey|access_?key)\s*=\s*)[^\s&;,\'"]+', re.I
    ),
    r'\1***',
  ),
)


class InputError(ValueError):
  """A file, a line, a flag or a config key that cannot be used as it is.

  The message is one line: what was wrong, where (file, line, config key) and what to do about it.
  Commands print it as ``dprjax: error: ...`` and exit with status 2 (see ``dprjax.runtime.cli``).
  """


def explain(error: BaseException) -> tuple[int, str]:
  """The status that a command ends with because of ``error``, and what it says.

  2: something that its user can change. 130: interrupted from the keyboard. 1: nobody foresaw it.
  """
  if isinstance(error, InputError):
    return 2, str(error)
  if isinstance(error, KeyboardInterrupt):
    return 130, 'interrupted; the same command goes on, or begins again'
  if isinstance(error, OSError):
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    what = f'{" and ".join(names)}: ' if names else ''
    hint = _HINTS.get(error.errno or 0, '')
    return 2, f'{what}{error.strerror or str(error) or type(error).__name__}{hint and f"; {hint}"}'
  if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
    detail = str(error).partition('\n')[0]
    return 2, f'not enough memory{detail and f" ({detail})"}; a smaller batch or model needs less'
  # epath's, of s3:// and gs:// without their packages, and of an unknown kind of path.
  if isinstance(error, ImportError) and re.match('(Please i|I)nstall ', str(error)):
    return 2, f'{error}; or name a local path'
  if isinstance(error, KeyError) and re.fullmatch(r"'\w+://'", str(error)):
    return 2, f'{error}: no such kind of path; name a local path, gs:// or s3://'
  return 1, (
    f'a fault of dprjax, {type(error).__name__}: {error}; please report it with what '
    'DPRJAX_TRACEBACK=1 shows'
  )


def place(error: BaseException) -> str:
  """What an exception of code that is not ours says, and the file and line that raised it."""
  if isinstance(error, SyntaxError):
    at = f'{error.filename}, line {error.lineno}'
    return f'{at}: {type(error).__name__}: {error.msg}'
  frames = traceback.extract_tb(error.__traceback__)
  at = f'{frames[-1].filename}, line {frames[-1].lineno}: ' if frames else ''
  return f'{at}{type(error).__name__}: {error}'


def end(status: int, message: str) -> NoReturn:
  """Prints the one error line and ends the process at once.

  For where an ordinary exit would wait for other processes, or would take away what threads of XLA
  still use: an interrupted compilation goes on in one, and crashes then.
  """
  for stream, text in ((sys.stderr, error_line(message) + '\n'), (sys.stdout, '')):
    with contextlib.suppress(OSError, ValueError):  # closed, or full
      stream.write(text)
      stream.flush()
  os._exit(status)


def end_interrupted(*_: Any) -> None:
  """Ends the process as ``cli.run`` does at an interrupt: a signal handler.

  For the time before it: an exception would be lost in some imports, or shown with its traceback.
  """
  end(*explain(KeyboardInterrupt()))


def hear_interrupts() -> None:
  """Has a command that is interrupted while it imports its modules end as it does later."""
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_interrupted)


def wants_traceback() -> bool:
  """Whether the environment asks for tracebacks: ``DPRJAX_TRACEBACK=1``."""
  return os.environ.get('DPRJAX_TRACEBACK', '') not in ('', '0')


def error_line(message: str) -> str:
  """The one line on standard error: no secret in it, and 500 characters at most."""
  line = 'dprjax: error: ' + ' '.join(mask(message).split())
  if len(line) > _LONGEST:
    # What is wrong stands at the beginning, what to do at the end.
    end = 120
    line = f'{line[: _LONGEST - end - 5]} ... {line[-end:]}'
  return line


def mask(text: str) -> str:
  """The text without passwords of addresses (``user:SECRET@host``) and values of ``token=``."""
  for secret, masked in _SECRETS:
    text = secret.sub(masked, text)
  return text
