"""Lists the experiments shipped with dprjax, for --config, and their folder.

    python -m dprjax.configs

These names work in every folder without a `configs/` of its own. `--options` lists the options of a
config by section, with defaults and effects; `--options=WORD` only those with the word.
`--copy=DIR` writes the experiments, the pinned versions (`constraints/`) and the scripts for
clusters and servers (`launch/`) to a folder. A config file is a few lines of Python: copy one to
change it.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
import types
from collections.abc import Callable, Iterator

from etils import epath

from dprjax.base import cli, files, flags
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.training import config as configs
from dprjax.training import methods, options

FOLDERS = ('configs', 'constraints', 'launch')

_WIDTH = 16
_COLUMNS = 100
_GAP = '\n\n'
_OPTION = re.compile(r'c\.([\w.]+) = ([^#]*?)(?:  # (.*))?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  options: str | None = flag('list the options of a config', None, const='', metavar='WORD')
  copy: str | None = flags.folder('folder for copies of the files')


def _command(args: Flags) -> None:
  if args.options is not None:
    _list_options(args.options)
  if args.copy is not None:
    _copy(args.copy)
  if args.options is None and args.copy is None:
    folder = configs.shipped()
    for path in sorted(folder.glob('*.py')):
      text = ast.get_docstring(ast.parse(path.read_bytes())) or ''
      print(f'configs/{path.name:{_WIDTH}}  {" ".join(text.partition(_GAP)[0].split())}')
    print(f'\nin {folder}\nThe first lines of each name its recipes: configs/NAME.py:RECIPE')


def tables() -> Iterator[tuple[str, str, Callable[[], types.SimpleNamespace]]]:
  """A title, the prefix of names, and the table of options, of every experiment and of methods."""
  yield 'Options of every experiment', '', options.table
  users: dict[types.ModuleType, list[str]] = {}
  for method in methods.names():
    for module in methods.option_modules(method):
      users.setdefault(module, []).append(method)
  for module, names in users.items():
    yield f'Options of config.method = {" or ".join(map(repr, names))}', '', module.table
    if hasattr(module, 'task_table'):
      yield 'Options of each entry of config.tasks', 'tasks.NAME.', module.task_table


def explained(prefix: str, table: Callable[[], types.SimpleNamespace]) -> Iterator[tuple[str, str]]:
  """Each option as ``config.KEY = DEFAULT (allowed values)``, and its effect."""
  known = configs.flat(vars(table()))
  about: list[str] = []
  for line in inspect.getsource(table).splitlines():
    line = line.strip()
    if line.startswith('# '):
      about.append(line[2:])
    elif (match := _OPTION.fullmatch(line)) and match[1] in known:
      spec = known[match[1]]
      text = re.sub(r'\bc\.(?=[a-z])', 'config.', ' '.join([*about, match[3] or '']).strip())
      yield f'config.{prefix}{match[1]} = {spec.value!r} ({spec.expected})', text
      about = []
    else:  # a comment on a section precedes its first option
      about = about if 'SimpleNamespace()' in line else []


def _list_options(word: str) -> None:
  listed = False
  for title, prefix, table in tables():
    matches = [one for one in explained(prefix, table) if word.lower() in ' '.join(one).lower()]
    if matches:
      print(f'\n\n{title}' if listed else title)
      listed = True
    for section, some in itertools.groupby(sorted(matches, key=_section), _section):
      print(f'\n{section}\n')
      for option, text in some:
        print(option)
        print(textwrap.indent(textwrap.fill(text, _COLUMNS - 4), '    '))
  if not listed:
    raise InputError(f'--options={word!r:.60}: no option has that word')


def _section(explained: tuple[str, str]) -> str:
  """``config.prompt`` of ``('config.prompt.length = 0 (...)', ...)``."""
  return explained[0].partition(' ')[0].rpartition('.')[0]


def _copy(to: str) -> None:
  folder = epath.Path(to)
  if taken := [folder / name for name in FOLDERS if (folder / name).exists()]:
    raise InputError(f'--copy={to}: {taken[0]} exists; name another folder')
  for name in FOLDERS:
    with files.atomic_path(folder / name) as aside:
      shutil.copytree(
        configs.shipped(name),
        aside,
        ignore=shutil.ignore_patterns('__pycache__'),
        dirs_exist_ok=True,
      )
    print(folder / name)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
