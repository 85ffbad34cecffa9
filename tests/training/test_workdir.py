"""The folders of runs: their owner, and the files that a run began with."""

import pathlib
import shutil

import pytest
from etils import epath

from dprjax import train
from dprjax.base import provenance
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from tests.refusals import command_refused, refused
from tests.workdirs import files_of

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
KINDS = (workdirs.TRAINING, workdirs.PIPELINE, workdirs.QUICKSTART, workdirs.FIT)


def use(folder, kind, inputs=None):
  with workdirs.claim(folder, kind, inputs or {}):
    (folder / 'made').write_text('x')


@pytest.mark.parametrize('kind', KINDS)
def test_a_folder_is_taken_where_it_is_absent_empty_or_of_that_kind(tmp_path, kind):
  (tmp_path / 'empty').mkdir()
  for name in ('absent', 'empty', 'absent', 'empty'):
    use(tmp_path / name, kind)
  assert sorted(path.name for path in (tmp_path / 'absent').iterdir()) == ['dprjax.json', 'made']
  for other in KINDS:
    if other != kind:
      with refused('--workdir', 'absent'):
        use(tmp_path / 'absent', other)


@pytest.mark.parametrize(
  'content',
  [
    {'config.json': '{"model_type": "bert"}', 'model.safetensors': 'x'},
    {'dprjax.json': '{"format": "dprjax.model"}'},
    {'.hidden': ''},
  ],
  ids=str,
)
def test_a_folder_of_something_else_is_refused(tmp_path, content):
  for name, text in content.items():
    (tmp_path / name).write_text(text)
  with refused('--workdir'):
    use(tmp_path, workdirs.TRAINING)
  assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content


def test_a_run_that_makes_nothing_leaves_nothing(tmp_path):
  def fail(folder):
    with workdirs.claim(folder, workdirs.TRAINING, {}):
      (folder / 'config.json').write_text('{}')
      raise ValueError('bad')

  with pytest.raises(ValueError, match='bad'):
    fail(tmp_path / 'a' / 'b')
  assert list(tmp_path.iterdir()) == []
  use(tmp_path / 'c', workdirs.TRAINING)
  before = provenance.sums(epath.Path(tmp_path))
  with pytest.raises(ValueError, match='bad'):
    fail(tmp_path / 'c')
  assert provenance.sums(epath.Path(tmp_path)).items() >= before.items()


def test_two_runs_at_once(tmp_path):
  with workdirs.claim(tmp_path / 'run', workdirs.TRAINING, {}):
    with refused('--workdir', 'run'):
      use(tmp_path / 'run', workdirs.TRAINING)
    # The other processes of the one run.
    with workdirs.claim(tmp_path / 'run', workdirs.TRAINING, {}, lock=False):
      pass


def test_a_training_does_not_go_on_with_other_text(tmp_path):
  run = epath.Path(tmp_path / 'run')
  run.mkdir()
  sources = {name: epath.Path(tmp_path / name) for name in ('corpus', 'queries')}
  for name, path in sources.items():
    path.write_text(name)
  workdirs.begin(run, sources)
  sources['corpus'].write_text('other1')
  workdirs.begin(run, sources)  # nothing was trained yet
  (run / 'checkpoints' / '3').mkdir(parents=True)
  workdirs.begin(run, sources)
  sources['corpus'].write_text('CORPUS')
  before = (run / 'dprjax.json').read_text()
  with refused('corpus', 'run'):
    workdirs.begin(run, sources)
  with refused('run', '--workdir'):
    workdirs.begin(run, {'queries': sources['queries']})
  assert (run / 'dprjax.json').read_text() == before


def test_a_folder_that_a_training_writes_to_is_no_input(tmp_path):
  config = configs.default()
  config.data.dir, config.backbone.path = str(tmp_path / 'text'), str(tmp_path / 'model')
  for name in ('text', 'model'):
    (tmp_path / name).mkdir()
  for option, path, words in (('data.token_cache', 'text/qrels', '--config.data.dir'),):
    changed = config.copy_and_resolve_references()
    section, _, name = option.rpartition('.')
    (changed[section] if section else changed)[name] = str(tmp_path / path)
    with refused(f'--config.{option}', words):
      workdirs.check_folders(changed, workdirs.inputs(changed))


def test_a_workdir_of_another_experiment(command, trained):
  before = files_of(trained)
  other = ('--config.seed=7', '--config.optim.clip=2.0')
  flags = (f'--config={CONFIGS}/dptdr.py:local', f'--workdir={trained}', *other)
  command_refused(command(train, *flags), 'optim.clip', '1.0', '2.0', 'seed', '42')
  assert files_of(trained) == before


@pytest.fixture
def folders(trained, prompt, tmp_path):
  """Folders that are no workdir, and one whose data can be changed."""
  shutil.copytree(trained / 'backbone', tmp_path / 'model')
  shutil.copytree(trained / 'data', tmp_path / 'text')
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'config.json').write_text('{"method": "unm", "retriever": {}}')
  (tmp_path / 'theirs').mkdir()
  (tmp_path / 'theirs' / 'config.json').write_text('{}')
  return tmp_path


@pytest.mark.parametrize(
  ('workdir', 'message'),
  [
    ('model', '--config.backbone.path'),
    ('model/run', '--config.backbone.path'),
    ('text/qrels', '--config.data.dir'),
    ('.', '--workdir'),
    ('other', 'other'),
    ('theirs', 'theirs'),
  ],
)
def test_a_training_harms_nothing(command, folders, monkeypatch, workdir, message):
  monkeypatch.chdir(folders)
  before = files_of(folders)
  flags = ('--config.backbone.path=model', '--config.data.format=beir', '--config.data.dir=text')
  config = f'--config={CONFIGS}/dptdr.py:local'
  command_refused(command(train, config, f'--workdir={workdir}', *flags), message)
  assert files_of(folders) == before


def test_a_training_does_not_go_on_with_other_data(command, trained, folders):
  # Another worker may have locked it.
  shutil.copytree(trained, folders / 'run', ignore=shutil.ignore_patterns('.lock'))
  with (folders / 'run' / 'data' / 'qrels' / 'dev.tsv').open('a') as file:
    file.write('x\ty\t1\n')
  before = files_of(folders)
  command_refused(
    command(train, f'--config={CONFIGS}/dptdr.py:local', f'--workdir={folders}/run'),
    'qrels/dev.tsv',
    '--workdir',
  )
  assert files_of(folders) == before
