"""The flags of a command: the fields of a frozen dataclass.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags:
      corpus: str = flag('embeddings of the passages', metavar='DIR')    # required
      k: int = flag('passages a query', 1000, most=10**6)
      out: str | None = flag('the metrics', None)
      strict: bool = switch('fail where an id is unknown')
      texts: dict[str, str] = flag('the texts of an index', {})          # --texts=NAME=VALUE ...
      network: Network = group(Network, 'network')                       # another such class

    flags, debug = parse(Flags, ['--corpus=embeddings', '--k=10'])

The type decides how a flag is read: a bool is ``true`` or ``false``, an int a whole number from
``least`` to ``most``, a float a number above 0 up to ``most``. Flags of tuples and dicts repeat.
Values of a dict are texts or numbers.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from dprjax.base.errors import InputError, error_line

REQUIRED = dataclasses.MISSING
_LONGEST_S = 7 * 24 * 3600

Flags = TypeVar('Flags')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flag:
  help: str
  name: str | None = None
  metavar: str | None = None
  choices: Sequence[str] | None = None
  read: Callable[[str], Any] | None = None
  least: int = 1
  most: float = 10**18
  unit: float = 1
  split: str = ''
  switch: bool = False
  either: str | None = None
  env: str | None = None
  const: str | None = None
  bare: bool = False


def flag(help: str, default: Any = REQUIRED, **how: Any) -> Any:
  """A field with a flag.

  Args:
    default: without one, the flag is required.
    read: turns a word into the value, or an item of a tuple; may raise ``ArgumentTypeError``.
    least, most: bounds of a number.
    unit: what a whole number on the command line counts, such as 2**20 for megabytes of bytes.
    split: separates values of one flag: ',' within a word, or ' ' between words.
    either: a group name shared by several flags; exactly one of them must be given.
    env: the environment variable with the default.
    const: the value if no word follows the flag.
    bare: whether it is a positional word, without ``--NAME=``.
  """
  return _field(_Flag(help=help, **how), default)


def switch(help: str, **how: Any) -> Any:
  """A field that is True if its flag, without a value, is given."""
  return _field(_Flag(help=help, switch=True, **how), False)


def group(kind: type, title: str, text: str | None = None) -> Any:
  """A field with another class of flags, which ``--help`` shows below a title."""
  return dataclasses.field(default_factory=kind, metadata={'group': (title, text)})


def config(file: str, key: str) -> Any:
  """A field for ``--config=FILE`` and ``--config.KEY=VALUE``, with their help texts."""
  return dataclasses.field(default=(), metadata={'config': (file, key)})


def _field(how: _Flag, default: Any) -> Any:
  if isinstance(default, dict):
    return dataclasses.field(default_factory=lambda: dict(default), metadata={'flag': how})
  return dataclasses.field(default=default, metadata={'flag': how})


def given(args: Any, *names: str) -> list[str]:
  """The flags whose values differ from their defaults."""
  usual = {field.name: field.default for field in dataclasses.fields(args)}
  # A flag without a default is required, or a dict that is empty by default.
  return [
    name
    for name in names
    if (value := getattr(args, name)) != usual[name] and (usual[name] is not REQUIRED or value)
  ]


def refuse(args: Any, names: Iterable[str], needed: str) -> None:
  """Raises InputError if a flag in ``names`` is given, which needs the flag ``needed``."""
  for name in given(args, *names):
    raise InputError(f'--{name} needs --{needed}')


def paths(args: Any, *names: str) -> dict[str, Any]:
  """The inputs of a command by flag, for `dprjax.base.outputs`."""
  return {f'--{name}': getattr(args, name) for name in names}


# Flags of several commands.


def backbone(default: Any = REQUIRED, more: str = '') -> Any:
  return flag(f'a Hugging Face directory, a hub id, or package:NAME{more}', default, metavar='DIR')


def dtype(use: str = '') -> Any:
  """The name of an arithmetic, for ``models.encoder_config.arithmetic``."""
  return flag(
    f'dtypes of computation{use}: auto is bfloat16 on accelerators and float32 on CPUs; mixed is '
    'faster on CPUs with AMX',
    'auto',
    choices=('auto', 'float32', 'bfloat16', 'mixed'),
  )


def weight_parts() -> Any:
  return flag(
    'devices that split the weights of the backbone (default: the fewest that need at most half of '
    'their memory for them)',
    None,
    most=4096,
  )


def batch_size(what: str = 'texts') -> Any:
  return flag(f'{what} at a time over all devices, at most', 64, most=2**16)


def file(help: str) -> Any:
  return flag(help, None, metavar='FILE')


def folder(help: str) -> Any:
  return flag(help, None, metavar='DIR')


def runs(help: str) -> Any:
  return flag(help, read=maybe_named, metavar='[NAME=]run.trec')


def run_out() -> Any:
  return flag('the run; its report goes to run.trec.json', metavar='run.trec')


def texts_file(fields: str, several: bool = False, **how: Any) -> Any:
  more = '; may be repeated' if several else ''
  return flag(
    f'jsonl with {fields}, tsv, csv, parquet, a folder, a pattern or hf:NAME; .gz, .zst and .xz '
    f'too{more}',
    **({'default': ()} if 'either' in how else {}),
    metavar='FILE',
    **how,
  )


def data() -> Any:
  return flag('a folder or file, as for --config.data.dir', bare=True, metavar='DATA')


def data_columns() -> Any:
  return flag('as config.data.columns', '', metavar='ROLE=NAME,...')


def columns(roles: str) -> Any:
  return flag(
    f'the name of a column, if it differs from the usual names, for {roles}; may be repeated',
    {},
    metavar='ROLE=NAME',
  )


def drop_same_id(effect: str = 'is not retrieved for it') -> Any:
  return flag(f'the BEIR rule: a passage with the same id as the query {effect}', False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """The place of a process in a job of several (``base.distributed``)."""

  coordinator: str | None = flag(
    'address of process 0: a free port on its host',
    None,
    metavar='HOST:PORT',
    env='DPRJAX_COORDINATOR',
  )
  processes: int | None = flag('number of processes', None, metavar='N', env='DPRJAX_PROCESSES')
  process: int | None = flag(
    'number of this process, from 0 to N - 1', None, least=0, metavar='I', env='DPRJAX_PROCESS'
  )
  join_timeout: int = flag(
    'limit for all processes to join',
    300,
    most=_LONGEST_S,
    metavar='SECONDS',
    env='DPRJAX_JOIN_TIMEOUT',
  )
  peer_timeout: int = flag(
    'time without a sign of life after which a process counts as lost and the job ends',
    20,
    most=_LONGEST_S,
    metavar='SECONDS',
    env='DPRJAX_PEER_TIMEOUT',
  )


def job() -> Any:
  return group(
    Job,
    'several processes',
    'The same command on every host runs as one job. On SLURM, Open MPI, TPU VMs and GKE each '
    'process finds its place itself;\nelsewhere give the first three flags. Each can also be set '
    'in the environment, as DPRJAX_COORDINATOR and so on.',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectionFlags:
  uri: str | None = flag(
    'ENGINE:FOLDER or ENGINE:ADDRESS, such as milvus:index.db, qdrant:http://host:6333 or '
    'pgvector:postgresql://host/database; a secret goes into ENGINE_TOKEN in the environment',
    None,
    metavar='ENGINE:PLACE',
  )
  collection: str = flag('', 'passages')


# Parsers of words, for ``type`` in argparse.


def boolean(text: str) -> bool:
  if text.lower() not in ('true', 'false'):
    raise argparse.ArgumentTypeError(f'expected true or false, not {text!r}')
  return text.lower() == 'true'


def whole(least: int = 1, most: float = 10**18) -> Callable[[str], int]:
  def read(text: str) -> int:
    # Python refuses to parse thousands of digits.
    value = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= value <= most:
      bounds = f'from {least} to {most}' if most < 10**18 else f'from {least} on'
      raise argparse.ArgumentTypeError(f'expected a whole number {bounds}, not {text!r:.40}')
    return value

  return read


def number(most: float) -> Callable[[str], float]:
  """A number above 0 and up to ``most``."""

  def read(text: str) -> float:
    try:
      value = float(text)
    except ValueError:
      value = -1.0
    if not 0 < value <= most:
      raise argparse.ArgumentTypeError(f'expected a number above 0 up to {most}, not {text!r:.40}')
    return value

  return read


def named(text: str) -> tuple[str, str]:
  name, equals, value = text.partition('=')
  if not (name and equals and value):
    raise argparse.ArgumentTypeError(f'expected NAME=VALUE, not {text!r}')
  return name, value


def _setting(text: str) -> tuple[str, float]:
  name, value = named(text)
  try:
    number = float(value)
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    raise argparse.ArgumentTypeError(f'expected NAME=NUMBER, not {text!r:.80}')
  return name, int(number) if number.is_integer() else number


def maybe_named(text: str) -> tuple[str, str]:
  """``NAME=PATH``, or ``PATH`` with an empty name. The name has no slash."""
  name, equals, path = text.partition('=')
  return (name, path) if name and equals and '/' not in name else ('', text)


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    print(error_line(f'{message} (see {self.prog} --help)'), file=sys.stderr, flush=True)
    sys.exit(2)


class _Strict(_Parser):
  """Raises InputError where a command line would end the process."""

  def error(self, message: str) -> NoReturn:
    raise InputError(message.removeprefix('argument '))


class _Names(argparse.Action):
  def __call__(self, parser: Any, args: Any, pair: Any, option_string: str | None = None) -> None:
    name, value = pair
    if name in vars(args).setdefault(self.dest, {}):
      raise argparse.ArgumentError(self, f'{name} is given twice')
    vars(args)[self.dest][name] = value


def parse(
  kind: type[Flags],
  argv: Sequence[str] | None = None,
  prog: str | None = None,
  text: str = '',
  parser_of: type[_Parser] = _Parser,
) -> tuple[Flags, bool]:
  """Reads a command line; ends the process if it is invalid.

  Args:
    argv: the words after the command, by default of this process.

  Returns:
    The flags, and whether ``--traceback`` was given.
  """
  parser = parser_of(
    prog=prog,
    description=text,
    allow_abbrev=False,
    argument_default=argparse.SUPPRESS,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--traceback', action='store_true', help='show the traceback of an error')
  _add(parser, kind)
  # A shell expands only words that begin with ~, not --out=~/x.
  words: Sequence[str] = [
    re.sub(r'(?:(?<=^)|(?<=[=:]))~[\w.-]*(?=/|$)', lambda home: os.path.expanduser(home[0]), word)
    for word in (sys.argv[1:] if argv is None else argv)
  ]
  experiment = {}
  for field in dataclasses.fields(kind):  # type: ignore[arg-type]
    if 'config' in field.metadata:
      words, experiment[field.name] = split_config(words)
  options = vars(parser.parse_args(words)) | experiment
  return _make(kind, options), options.get('traceback', False)


def of(kind: type[Flags], **values: Any) -> Flags:
  """Makes flags in a program, with the checks of a command line.

  A list is for a flag that repeats or takes several words.
  """
  fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
  words = []
  for name, value in values.items():
    how = fields[name].metadata.get('flag') if name in fields else None
    if how is None:
      raise InputError(f'{name}: there is no such option; options are {", ".join(fields)}')
    if value is None:
      continue
    flag = f'--{how.name or name}'
    if how.switch:
      words += [flag] * bool(value)
      continue
    several = list(value) if isinstance(value, list | tuple | set) else [value]
    shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in several]
    if how.split == ',':
      shown = [','.join(shown)]
    words += [f'{flag}={one}' for one in shown]
  return parse(kind, words, parser_of=_Strict)[0]


def split_config(words: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits a command line into words for argparse and words that begin with ``--config``.

  ``--config FILE`` becomes ``--config=FILE``, also for each key.
  """
  rest: list[str] = []
  ours: list[str] = []
  waits = False  # whether a value may follow
  for word in words:
    if waits and not word.startswith('-'):
      ours[-1] += f'={word}'
      waits = False
    else:
      taken = word.startswith('--config')
      (ours if taken else rest).append(word)
      waits = taken and '=' not in word
  return rest, ours


def _add(parser: argparse._ActionsContainer, kind: Any) -> None:
  hints = typing.get_type_hints(kind)
  either: dict[str, argparse._ActionsContainer] = {}
  for field in dataclasses.fields(kind):
    if 'group' in field.metadata:
      _add(parser.add_argument_group(*field.metadata['group']), hints[field.name])
    elif 'config' in field.metadata:
      file, key = field.metadata['config']
      parser.add_argument('--config', metavar='FILE[:RECIPE]', help=file)
      parser.add_argument('--config.KEY', metavar='VALUE', help=key)
    else:
      how: _Flag = field.metadata['flag']
      place = parser
      if how.either and how.either not in either:
        either[how.either] = parser.add_mutually_exclusive_group(required=True)
      place = either[how.either] if how.either else parser
      action = _action(hints[field.name], field, how)
      if how.bare:
        place.add_argument(field.name, **{key: action[key] for key in ('help', 'metavar', 'type')})
      else:
        place.add_argument(f'--{how.name or field.name}', dest=field.name, **action)


def _action(kind: Any, field: Any, how: _Flag) -> dict[str, Any]:
  help = how.help.replace('%', '%%')
  if how.switch:
    return {'action': 'store_true', 'help': help}
  if isinstance(kind, types.UnionType):
    kind = next(one for one in typing.get_args(kind) if one is not type(None))
  if field.default not in (REQUIRED, None, '', ()):
    default = field.default if how.unit == 1 else round(field.default / how.unit)
    help = f'{help} (default: {_shown(default, how.split)})'.lstrip()
  upper = how.name.upper() if how.name and not how.choices else None
  words: dict[str, Any] = {'help': help, 'metavar': how.metavar or upper}
  if how.env and os.environ.get(how.env):  # an empty variable counts as unset
    words['default'] = os.environ[how.env]
  elif field.default is REQUIRED and field.default_factory is REQUIRED and not how.either:
    words['required'] = True
  if how.const is not None:
    words |= {'nargs': '?', 'const': how.const}
  if how.choices:
    words['choices'] = how.choices
  if typing.get_origin(kind) is dict:
    return words | {'action': _Names, 'type': _setting if float in typing.get_args(kind) else named}
  item = kind
  if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is ...:
    item = typing.get_args(kind)[0]
    if how.split == ' ':
      words |= {'action': 'extend', 'nargs': '+'}
    elif not how.split:
      words |= {'action': 'append'}
  if item is bool:
    words['metavar'] = 'true|false'
  reads: dict[Any, Any] = {bool: boolean, int: whole(how.least, how.most), float: number(how.most)}
  read: Callable[[str], Any] = how.read or reads.get(item, str)
  if how.unit != 1:
    read = _counted(whole(how.least, how.most), how.unit)
  return words | {'type': _commas(read) if how.split == ',' else read}


def _commas(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
  return lambda text: tuple(read(part.strip()) for part in text.split(',') if part.strip())


def _counted(read: Callable[[str], int], unit: float) -> Callable[[str], float]:
  return lambda text: read(text) * unit


def _shown(default: Any, split: str) -> str:
  if isinstance(default, tuple):
    return (split or ' ').join(map(str, default))
  return str(default).lower() if isinstance(default, bool) else str(default)


def _make(kind: Any, options: dict[str, Any]) -> Any:
  hints = typing.get_type_hints(kind)
  values: dict[str, Any] = {}
  for field in dataclasses.fields(kind):
    if 'group' in field.metadata:
      values[field.name] = _make(hints[field.name], options)
    elif field.name in options:
      value = options[field.name]
      values[field.name] = tuple(value) if isinstance(value, list) else value
  return kind(**values)
