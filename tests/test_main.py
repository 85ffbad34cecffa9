"""The console command, `dprjax COMMAND`, and the experiments that come with it."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from dprjax import __main__ as console
from dprjax import configs as command
from dprjax.base import flags, version
from dprjax.training import config as configs
from dprjax.training import methods

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(console.__file__).parent

# The work of the script of pip, and its imports.
SCRIPT = """
import sys
from dprjax.__main__ import main
try:
  main()
finally:
  print(sorted({'jax', 'numpy', 'rich', 'absl'} & set(sys.modules)), file=sys.stderr)
"""


def run(*words, **options):
  return subprocess.run(
    [sys.executable, '-c', SCRIPT, *words],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': str(PACKAGE.parent)},
    timeout=120,
    **options,
  )


def test_arguments_are_read_before_jax_is_imported():
  """So that --help and most errors take less than a second."""
  modules = [f'dprjax.{module}' for name, module in console.modules().items() if name != 'plan']
  code = f'import sys, {", ".join(modules)}; print("jax" in sys.modules)'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
  assert (done.stdout, done.stderr) == ('False\n', '')


def test_help_lists_every_command_at_once():
  began = os.times()
  done = run('--help')
  assert (done.returncode, done.stderr) == (0, '[]\n')  # nothing slow was imported
  ended = os.times()
  used = [ended[i] - began[i] for i in (2, 3)]  # by children, as user and in the kernel
  assert sum(used) < 0.7
  lines = [line[2:] for line in done.stdout.splitlines() if line.startswith('  ')]
  listed = [line.split('  ')[0].strip().replace(' ', '_') for line in lines]
  names = {path.stem for path in PACKAGE.glob('*.py') if not path.stem.startswith('_')}
  assert names >= {'train', 'encode', 'configs', 'quickstart'}
  assert names <= set(listed)
  assert all(line.endswith('.') for line in console.commands().values())
  assert max(map(len, done.stdout.splitlines())) <= 100


def test_versions_are_those_that_a_report_needs(capsys):
  console.main(['--version'])
  said = capsys.readouterr().out
  assert said.startswith(f'dprjax {version.__version__} (Python 3.')
  assert f'jax {importlib.metadata.version("jax")}, flax ' in said


@pytest.mark.parametrize(
  ('words', 'message'),
  [([], 'name a command'), (['trian'], 'did you mean train?'), (['a\nb'], 'there is no command')],
)
def test_an_unknown_command_ends_in_one_line(capsys, words, message):
  with pytest.raises(SystemExit) as end:
    console.main(words)
  said = capsys.readouterr().err
  assert end.value.code == 2
  assert said.startswith('dprjax: error: ') and message in said
  assert said.count('\n') == 1 and len(said) <= 520


def test_experiments_are_found_from_every_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  ours = configs.shipped() / 'dptdr.py'
  assert ours.read_bytes() == (ROOT / 'configs' / 'dptdr.py').read_bytes()
  assert configs.locate('configs/dptdr.py:beir,query') == f'{ours}:beir,query'
  config = configs.parse(['--config=configs/dptdr.py:beir,query', '--config.prompt.length=3'])
  assert (config.prompt.sides, config.prompt.length) == ('query', 3)
  # Anything else is left as it is, above all a file that is there.
  for name in ('configs/nonesuch.py', 'configs/../setup.py', 'dptdr.py', '/configs/dptdr.py', ''):
    assert configs.locate(name) == name
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs' / 'dptdr.py').write_text('')
  assert configs.locate('configs/dptdr.py:nq') == 'configs/dptdr.py:nq'


@pytest.mark.parametrize(
  ('words', 'own', 'ours'),
  [
    (['--config', 'a.py:b', '--workdir', 'x'], ['--workdir', 'x'], ['--config=a.py:b']),
    (['--config=a.py', 'b', '--config'], ['b'], ['--config=a.py', '--config']),
  ],
)
def test_a_value_may_stand_behind_its_flag(words, own, ours):
  assert flags.split_config(words) == (own, ours)


def test_experiments_are_listed(capsys):
  command.main([])
  said = capsys.readouterr().out
  names = sorted(path.name for path in (ROOT / 'configs').glob('*.py'))
  assert [line.split()[0] for line in said.splitlines() if line.startswith('configs/')] == [
    f'configs/{name}' for name in names
  ]
  assert 'DPTDR: deep prompt tuning for dense retrieval' in said
  assert f'in {configs.shipped()}' in said


@pytest.mark.slow
def test_a_method_beside_its_config_is_found(tmp_path):
  folder = tmp_path / 'elsewhere'
  folder.mkdir()
  (folder / 'mine.py').write_text('raise ValueError("here it is")')
  (folder / 'own.py').write_text(
    'from dprjax.training import config\n\n\n'
    "def get_config(arg=''):\n  c = config.local(config.default())\n"
    "  c.method = 'mine'\n  return c\n"
  )
  done = run('train', '--config=elsewhere/own.py', '--workdir=w', cwd=tmp_path)
  assert done.returncode == 2 and 'mine.py, line 1' in done.stderr and 'here it is' in done.stderr


def test_all_options_are_listed_with_what_they_change(capsys):
  listed = dict(
    one for _, prefix, table in command.tables() for one in command.explained(prefix, table)
  )
  names = [line.partition(' = ')[0] for line in listed]
  known = [
    f'config.{name}'
    for method in methods.names()
    for name in configs.flat(configs.default(method).to_dict())
  ]
  assert set(known) <= set(names) and len(names) == len(set(names))
  assert listed["config.prompt.sides = 'both' ('both' or 'query')"].startswith("'query':")
  command.main(['--options=dropout_scope'])
  title, _, section, _, name, effect = capsys.readouterr().out.splitlines()
  assert (title, section) == ('Options of every experiment', 'config.prompt')
  assert name == "config.prompt.dropout_scope = 'example' ('example' or 'batch')"
  assert effect.startswith("    'example': ") and "'batch': " in effect
  with pytest.raises(SystemExit) as end:
    command.main(['--options=nonesuch'])
  assert end.value.code == 2 and '--options' in capsys.readouterr().err


def test_what_comes_with_dprjax_can_be_copied(tmp_path, capsys):
  command.main([f'--copy={tmp_path}/here'])
  for name in ('configs/dptdr.py', 'constraints/py312.txt', 'launch/serve/Containerfile'):
    assert (tmp_path / 'here' / name).read_bytes() == (ROOT / name).read_bytes()
  capsys.readouterr()
  with pytest.raises(SystemExit) as end:
    command.main([f'--copy={tmp_path}/here'])
  assert end.value.code == 2 and 'configs exists' in capsys.readouterr().err
