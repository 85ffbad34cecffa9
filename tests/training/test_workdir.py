"""The folders of runs: their owner, and the files that a run began with."""

import pytest
from etils import epath

from dprjax.base import provenance
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from tests.refusals import refused

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
