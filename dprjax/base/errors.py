"""Turns errors into one line without secrets, and an exit status."""

import contextlib
import errno
import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

_LONGEST = 500  # characters of an error line
_TRAIL = 6  # lines of code that a log names
_interrupted = False  # whether an interrupt came
_INSTALLED = (  # where files of dprjax, Python and no file begin
  os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
  os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
  '<',
)
_HINTS = {
  errno.ENOSPC: 'free some space and run the same command again',
  errno.EDQUOT: 'free some space and run the same command again',
  errno.EFBIG: 'free some space and run the same command again',
  errno.EACCES: 'give this user permission, or name another path',
  errno.EPERM: 'give this user permission, or name another path',
  errno.EROFS: 'name a path that can be written to',
  errno.ENAMETOOLONG: 'choose a shorter name',
  errno.ENOTDIR: 'a part of this path is a file, not a folder',
  errno.EMFILE: 'raise the number of open files: ulimit -n',
}
_EXTRAS = {  # which extra of setup.py has a module
  'datasets': 'hub-data',
  'markdown_it': 'documents',
  'matplotlib': 'figures',
  'mteb': 'mteb',
  'pgvector': 'pgvector',
  'psycopg': 'pgvector',
  'pymilvus': 'milvus',
  'milvus_lite': 'milvus',
  'pypdf': 'documents',
  'qdrant_client': 'qdrant',
  'tomotopy': 'papers',
  'trafilatura': 'documents',
}
# What these libraries raise is about a file, a value or a disk.
_LIBRARIES = ('_duckdb', 'msgspec', 'pyarrow', 'pydantic_core', 'safetensors')
_SECRETS = (
  # user:SECRET@host. A secret may hold '@' and '/', but does not begin with a port and a slash.
  (re.compile(r'(?<=://)([^/\s:@]*):(?!\d+/)\S+@'), r'\1:***@'),
  (re.compile(r'(?<=://)[^/\s:@]+@'), '***@'),
  (re.compile(r'(?<![\w/.])([\w.+-]+):(?!//|\d+/)[^\s@]+@(?=[\w\[])'), r'\1:***@'),
  # argparse repeats the words of a misspelt flag.
  (re.compile(r'(arguments:.*--?\w*(?:token|pass|secret|key)\w*\s+)[^\s-]\S*', re.I), r'\1***'),
  (
    re.compile(
      r'((?:token|password|passwd|secret|api_?key|apikey|access_?key)\s*=\s*)[^\s&;,\'"]+', re.I
    ),
    r'\1***',
  ),
)


class InputError(ValueError):
  """A file, a line, a flag or a config key that cannot be used.

  The message is one line: the fault, the place and the remedy. Commands then exit with status 2.
  """


def explain(error: BaseException) -> tuple[int, str]:
  """The exit status for ``error``, and its message.

  2: the user can change it, such as a fault in a method of their own. 130: interrupted. 1: a fault
  of dprjax.
  """
  if isinstance(error, InputError):
    return 2, str(error)
  # Compiled modules turn an interrupt into other errors, or lose it and fail later.
  if _interrupted or isinstance(error, KeyboardInterrupt):
    return 130, 'interrupted; run the same command again to continue or start over'
  if isinstance(error, OSError):
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    what = f'{" and ".join(names)}: ' if names else ''
    hint = _HINTS.get(error.errno or 0, '')
    return 2, f'{what}{error.strerror or str(error) or type(error).__name__}{hint and f"; {hint}"}'
  if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
    detail = str(error).partition('\n')[0]
    return 2, f'not enough memory{detail and f" ({detail})"}; a smaller batch or model needs less'
  if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or '')):
    return 2, f"{error.name} is not installed: pip install 'dprjax[{extra}]'"
  library = type(error).__module__.partition('.')[0]
  # A UnicodeError: half of a surrogate pair in a text, say.
  if isinstance(error, UnicodeError) or library in _LIBRARIES:
    return 2, str(error)
  # From epath, for s3:// and gs:// without their packages, and unknown kinds of paths.
  if isinstance(error, ImportError) and re.match('(Please i|I)nstall ', str(error)):
    return 2, f'{error}; or name a local path'
  if isinstance(error, KeyError) and re.fullmatch(r"'\w+://'", str(error)):
    return 2, f'{error}: no such kind of path; name a local path, gs:// or s3://'
  if _of_users(error):
    return 2, f'{describe_error(error)}; --traceback shows all calls'
  return 1, (
    f'a fault of dprjax, {type(error).__name__}: {error}; please report it with what --traceback '
    'shows'
  )


def describe_error(error: BaseException) -> str:
  """The message of an exception, with the last line of users' code, or else the last."""
  if isinstance(error, SyntaxError):
    at = f'{error.filename}, line {error.lineno}'
    return f'{at}: {type(error).__name__}: {error.msg}'
  frames = _of_users(error) or traceback.extract_tb(error.__traceback__)
  at = f'{frames[-1].filename}, line {frames[-1].lineno}: ' if frames else ''
  return f'{at}{type(error).__name__}: {error}'


def _of_users(error: BaseException) -> list[traceback.FrameSummary]:
  return [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if not frame.filename.startswith(_INSTALLED)
    and not re.search(r'[\\/](site|dist)-packages[\\/]', frame.filename)
  ]


def trail(error: BaseException) -> str:
  """The type of an exception and the lines that led to it, without texts of users."""
  frames = traceback.extract_tb(error.__traceback__)[-_TRAIL:]
  places = (f'{os.path.basename(frame.filename)}:{frame.lineno}' for frame in frames)
  return f'{type(error).__name__} at {" > ".join(places)}'


def end(status: int, message: str) -> NoReturn:
  """Prints the error line and ends the process at once.

  An ordinary exit would wait for other processes, and crash threads of XLA that still compile.
  """
  for stream, text in ((sys.stderr, error_line(message) + '\n'), (sys.stdout, '')):
    with contextlib.suppress(OSError, ValueError):  # closed, or full
      stream.write(text)
      stream.flush()
  os._exit(status)


def end_interrupted(*_: Any) -> None:
  """A signal handler that ends the process, during imports that lose or show the exception."""
  end(*explain(KeyboardInterrupt()))


def raise_interrupt(*_: Any) -> NoReturn:
  """A signal handler that raises KeyboardInterrupt; `explain` then blames it for every fault."""
  global _interrupted
  _interrupted = True
  raise KeyboardInterrupt


def hear_interrupts() -> None:
  """Handles interrupts while a command imports its modules."""
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_interrupted)


def wants_traceback() -> bool:
  return os.environ.get('DPRJAX_TRACEBACK', '') not in ('', '0')


def error_line(message: str) -> str:
  """One line for standard error, masked, of at most 500 characters."""
  line = 'dprjax: error: ' + ' '.join(mask(message).split())
  if len(line) > _LONGEST:
    # Keep the beginning, with the fault, and the end, with the remedy.
    end = 120
    line = f'{line[: _LONGEST - end - 5]} ... {line[-end:]}'
  return line


def mask(text: str) -> str:
  """The text without passwords (``user:SECRET@host``) and values of ``token=``."""
  for secret, masked in _SECRETS:
    text = secret.sub(masked, text)
  return text
