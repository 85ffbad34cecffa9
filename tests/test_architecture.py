"""The code agrees with docs/architecture.md: its rooms, and which may import which."""

import ast
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import dprjax
from dprjax import __main__ as console
from tests.refusals import command_refused

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(dprjax.__file__).parent

# From the lowest up: a room of the core imports from earlier ones and from itself.
CORE = ({'base'}, {'text'}, {'models'}, {'encoding', 'losses'}, {'retrieval'}, {'training'})
FORBIDDEN = {'tensorflow', 'torch'}
NEVER = FORBIDDEN | {'configs', 'tests', 'benchmarks', 'dprjax'}

COMMANDS = console.modules()
# A wheel has a copy of configs/ in training/.
MODULES = sorted(path for path in PACKAGE.rglob('*.py') if path.parent.name != 'configs')
# Dotted names of modules and of folders with modules.
NAMES = {
  '.'.join(one.relative_to(PACKAGE.parent).with_suffix('').parts)
  for path in MODULES
  for one in (path, *path.parents)
  if one.is_relative_to(PACKAGE)
}


def room(module):
  """`text` of `dprjax.text.trec`, `papers.unm` of a paper, '' of a command."""
  inside = module.split('.')[1:]
  inside += ['__init__'] * (inside[:1] != ['papers'] and PACKAGE.joinpath(*inside).is_dir())
  return '.'.join(inside[:2] if inside[:1] == ['papers'] else inside[:-1][:1])


@functools.cache
def imports(path):
  """(line number, dotted name) of every import in a file, `from dprjax import cli` as
  `dprjax.base.cli`.
  """
  return list(find_imports(path))


def find_imports(path):
  for node in ast.walk(ast.parse(path.read_bytes())):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}:{node.lineno}: write the import out from dprjax on'
      for alias in node.names:
        name = f'{node.module}.{alias.name}'
        yield node.lineno, name if name in NAMES else str(node.module)


def allowed(importer):
  """The rooms that a room may import from, itself apart."""
  for number, level in enumerate(CORE):
    if importer in level:
      return set().union(*CORE[:number])
  extras = {'', 'api', 'engines', 'exports', 'generation', 'mteb', 'planning', 'serving'}
  return set().union(*CORE) | (extras if importer in ('', 'api') else set())


def test_the_page_has_a_paragraph_for_every_room():
  page = (ROOT / 'docs' / 'architecture.md').read_text()
  told = set(re.findall(r'\*\*(\w+)\*\*', page.partition('## Shapes')[0]))
  assert told == {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
  assert len(page.split()) <= 1500
  for name in re.findall(r'`((?:\w+/)*\w+\.py)`', page):
    assert [*PACKAGE.rglob(name), *ROOT.glob(name)], name


def test_the_walls_between_rooms_stand():
  wrong = []
  for path in MODULES:
    own = room('.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts))
    if path == PACKAGE / '__init__.py':  # the public names, imported on first use
      continue
    for line, name in imports(path):
      inside = name.startswith('dprjax.')
      bad = room(name) not in allowed(own) | {own} if inside else name.split('.')[0] in NEVER
      if bad:
        wrong.append(f'{path}:{line} imports {name}')
  assert wrong == []


@pytest.mark.parametrize(
  'path',
  sorted([*ROOT.glob('configs/*.py'), *ROOT.glob('experiments/lab/configs/*.py')]),
  ids=lambda path: path.name,
)
def test_configs_import_only_the_config_module(path):
  ours = {name for _, name in imports(path) if name.split('.')[0] in {'dprjax', *FORBIDDEN}}
  ours = {name for name in ours if not re.fullmatch(r'dprjax\.papers\.\w+\.options', name)}
  assert ours <= {'dprjax.training.config'}


@pytest.mark.parametrize('folder', ['benchmarks', 'experiments'])
def test_scripts_call_what_modules_have(folder):
  """mypy does not read scripts."""
  neighbours = {path.stem: path for path in ROOT.glob(f'{folder}/*.py')}
  package = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path for path in MODULES}
  has = {name: bound(path) for name, path in (neighbours | package).items()}
  missing, seen = [], set()
  for path in sorted(ROOT.glob(f'{folder}/**/*.py')):
    script = ast.parse(path.read_bytes())
    modules = {}
    for node in ast.walk(script):
      if isinstance(node, ast.Import | ast.ImportFrom):
        start = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
        modules |= {alias.asname or alias.name: start + alias.name for alias in node.names}
    for node in ast.walk(script):
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = modules.get(node.value.id)
        if name in has and f'{name}.{node.attr}' not in NAMES:
          seen.add(name)
          if node.attr not in has[name]:
            missing.append(f'{path}:{node.lineno} {name}.{node.attr}')
  assert seen & neighbours.keys() and seen & package.keys()
  assert not missing


@functools.cache
def bound(path):
  """The names that the statements of a file give."""
  names = set()
  for node in ast.walk(ast.parse(path.read_bytes())):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      names |= {alias.asname or alias.name for alias in node.names}
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
  return names


@pytest.mark.slow
def test_nothing_needs_tensorflow_or_pytorch():
  """Every module can be imported without either."""
  names = [
    '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts).removesuffix('.__init__')
    for path in MODULES
  ]
  code = f"""
import importlib, sys

class Absent:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {FORBIDDEN}:
      raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Absent())
for name in {names}:
  importlib.import_module(name)
"""
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


# One start of Python for all commands, each run as ``python -m`` runs it. Prints status, output and
# errors of every command line as JSON.
RUN_COMMANDS = """
import contextlib, io, json, runpy, sys

from dprjax.__main__ import modules

def run(command, flag):
  out, err, status = io.StringIO(), io.StringIO(), 0
  sys.argv = [f'dprjax.{command}', flag]
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      runpy.run_module(f'dprjax.{modules()[command]}', run_name='__main__', alter_sys=True)
    except SystemExit as end:
      status = end.code or 0
  return status, out.getvalue(), err.getvalue()

commands = sys.argv[1:]
print(json.dumps({c: [run(c, flag) for flag in ('--help', '--nonesuch=1')] for c in commands}))
"""


@pytest.fixture(scope='module')
def answers():
  """(status, output, errors) of every command for --help and for an unknown flag."""
  done = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', RUN_COMMANDS, *sorted(COMMANDS)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {'COLUMNS': '150'},
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_every_command_has_help_and_refuses_a_wrong_call_in_one_line(answers, command):
  (status, output, errors), (other, _, line) = answers[command]
  assert status == 0 and re.search(rf'usage: dprjax {command}|--config', output), errors
  command_refused((other, line))


def test_every_promise_names_a_test_that_there_is():
  text = (ROOT / 'docs' / 'promises.md').read_text()
  promises = [block for block in text.split('\n- ')[1:] if 'are Python, and run' not in block]
  assert len(promises) >= 20
  for promise in promises:
    named = re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', promise)
    assert named, promise
    for file, name in named:
      assert f'def {name}(' in (ROOT / file).read_text(), (file, name)
