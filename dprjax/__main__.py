"""``dprjax COMMAND``: all commands under one name, the same as ``python -m dprjax COMMAND``.

dprjax --help
dprjax train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=mytext
"""

import ast
import difflib
import importlib.metadata
import os
import pathlib
import platform
import re
import runpy
import sys
import textwrap
from collections.abc import Sequence

from dprjax.base import errors, version

_PACKAGE = pathlib.Path(__file__).parent
_BESIDE = ('jax', 'flax')  # versions needed in bug reports
_OF_PAPERS = {
  'papers': 'papers.topic_dpr.papers',
  'pipeline': 'papers.unm.pipeline',
  'topics': 'papers.topic_dpr.topics',
}
_COLUMNS = 100
_LONGEST = 60  # compared letters of a word


def commands() -> dict[str, str]:
  """Descriptions of commands by name: the first sentence of each module.

  Imports nothing, since that would take seconds.
  """
  return {name: _sentence(_path(module)) for name, module in modules().items()}


def modules() -> dict[str, str]:
  """The modules of commands by name, relative to the package."""
  ours = {path.stem: path.stem for path in _PACKAGE.glob('[!_]*.py')}
  papers = {name: module for name, module in _OF_PAPERS.items() if _path(module).exists()}
  return dict(sorted((ours | papers).items()))


def _path(module: str) -> pathlib.Path:
  return _PACKAGE.joinpath(*module.split('.')).with_suffix('.py')


def _sentence(path: pathlib.Path) -> str:
  text = ast.get_docstring(ast.parse(path.read_bytes())) or ''
  first = ' '.join(text.partition('\n\n')[0].split())
  return re.split(r'(?<=\.)\s', first)[0]


def usage() -> str:
  known = {name.replace('_', ' '): sentence for name, sentence in commands().items()}
  width = max(map(len, known))
  lines = [
    'usage: dprjax COMMAND ...',
    '       dprjax COMMAND --help',
    '       dprjax --version',
    '',
    'Dense passage retrieval by deep prompt tuning, in JAX.',
    '',
  ]
  for name, sentence in known.items():
    lines += textwrap.wrap(
      sentence,
      _COLUMNS,
      initial_indent=f'  {name:{width}}  ',
      subsequent_indent=' ' * (width + 4),
    )
  lines += [
    '',
    'Begin with a folder of passages, queries and judgements:',
    '',
    '  dprjax data check mytext',
    '  dprjax train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=mytext',
    '  dprjax export --workdir=runs/mine --out=mine.npz',
    '',
    '`python -m dprjax COMMAND` is the same command.',
  ]
  return '\n'.join(lines)


def versions() -> str:
  beside = [f'Python {platform.python_version()}']
  for name in _BESIDE:
    try:
      beside.append(f'{name} {importlib.metadata.version(name)}')
    except importlib.metadata.PackageNotFoundError:
      beside.append(f'no {name}')
  return f'dprjax {version.__version__} ({", ".join(beside)})'


def _fail(message: str) -> None:
  print(errors.error_line(message), file=sys.stderr, flush=True)
  sys.exit(2)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command named by the first word, as ``python -m`` would.

  Args:
    argv: the command and its arguments; by default those of this process.
  """
  words = list(sys.argv[1:] if argv is None else argv)
  known = modules()
  if (two := '_'.join(words[:2])) in known:  # dprjax data check is dprjax.data_check
    words[:2] = [two]
  if words[:1] in (['-h'], ['--help'], ['help']):
    print(usage())
  elif words[:1] in (['-V'], ['--version']):
    print(versions())
  elif not words or words[0].startswith('-'):
    _fail('name a command first, as in dprjax train (dprjax --help lists them)')
  elif words[0] not in known:
    near = difflib.get_close_matches(words[0][:_LONGEST], known, n=1)
    meant = f'; did you mean {near[0].replace("_", " ")}?' if near else ''
    _fail(f'there is no command {words[0]!r:.60}{meant} (dprjax --help lists them)')
  else:
    errors.hear_interrupts()
    sys.argv = words
    # As with `python -m`: the working folder may have a custom method or table.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
      sys.path.insert(0, os.getcwd())
    runpy.run_module(f'dprjax.{known[words[0]]}', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
