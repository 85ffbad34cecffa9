"""Files of a run for others to read."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from etils import epath
from jax import tree

from dprjax import export, load_backbone, load_prompt, train
from dprjax.base import tree as trees
from dprjax.models import hub, model_folders
from dprjax.text import seen, tokenizing
from dprjax.text.vector_spec import same_length
from dprjax.training import baseline, checkpoint
from tests.refusals import command_refused
from tests.workdirs import trainable_of

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group('export')  # one worker makes the runs that they share


@pytest.fixture(scope='session')
def run_of(reuse, tmp_path_factory):
  """``run_of(config, *flags)``: the workdir of a short run on the text and the backbone that the
  tests share.
  """
  made = {}

  def run(config, *flags):
    if (config, flags) not in made:
      workdir = tmp_path_factory.mktemp('runs') / 'run'
      usual = [*reuse, '--config.steps=3', '--config.data.dev_split=']
      train.main([f'--config={ROOT}/configs/{config}', f'--workdir={workdir}', *usual, *flags])
      made[config, flags] = workdir
    return made[config, flags]

  return run


def checkpoints(workdir, backbone):
  return checkpoint.Checkpoints(workdir, hub.load_backbone(str(backbone)).sha256)


def test_a_prompt(command, trained, tmp_path):
  status, err = command(export, '--force', f'--workdir={trained}', f'--out={tmp_path}/prompt.npz')
  assert status == 0
  saved = checkpoints(trained, trained / 'backbone')
  best, extra = saved.best(), saved.extra(saved.best())
  saved.close()
  assert f'step {best}' in err and best == extra['best_step']
  prefix = trainable_of(trained, best)[1]['prompt/prefix']
  with np.load(tmp_path / 'prompt.npz', allow_pickle=False) as npz:
    assert sorted(npz.files) == ['meta', 'prefix', 'queries/dev', 'queries/train']
    np.testing.assert_array_equal(npz['prefix'], prefix)
    assert npz['prefix'].shape == (2, 2, 4, 2, 64) and npz['prefix'].dtype == np.float32
    meta = json.loads(npz['meta'].item())
  config = json.loads((trained / 'config.json').read_text())
  assert meta == {
    'format': 'dprjax.prompt',
    'version': 1,
    'kind': 'prefix',
    'backbone': 'scratch:tiny',
    'backbone_sha256': load_backbone(trained / 'backbone').sha256,
    'tokenizer_sha256': tokenizing.load_tokenizer(str(trained / 'backbone')).sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 0.05,
    'shift_positions': False,
    'query_max_length': 16,
    'passage_max_length': 32,
    'query_prefix': '',
    'passage_prefix': '',
    'dprjax_version': meta['dprjax_version'],
    'task': config['task'],
    'metrics': {'dev/nDCG@10': extra['best']},
    'gain': extra['gain'],
  }
  loaded = load_prompt(tmp_path / 'prompt.npz')
  assert loaded.meta == meta and {*loaded.arrays} == {'prefix'}
  for split in ('train', 'dev'):
    rows = (trained / 'data' / 'qrels' / f'{split}.tsv').read_text().splitlines()[1:]
    ids = {row.split('\t')[0] for row in rows}
    lines = (trained / 'data' / 'queries.jsonl').read_text().splitlines()
    texts = [one['text'] for one in map(json.loads, lines) if one['_id'] in ids]
    np.testing.assert_array_equal(loaded.queries[split], seen.hashes(texts))


def test_a_loss_is_exported_only_by_force_and_a_doubtful_gain_is_told(command, trained, tmp_path):
  shutil.copytree(trained, tmp_path / 'run')
  trainable = trainable_of(trained, 12)[1]
  worse = baseline.Gain('nDCG@10', 0.5, 0.4, -0.1, -0.2, 0.0, 26, False)
  flags = f'--workdir={tmp_path}/run', f'--out={tmp_path}/p.npz'
  for step, gain in (
    (13, worse),
    (14, worse._replace(best=0.6, difference=0.1, high=0.3)),
    (15, worse._replace(best=0.7, difference=0.2, low=0.1, high=0.3, better=True)),
  ):
    saved = checkpoints(tmp_path / 'run', trained / 'backbone')
    extra = {'best': gain.best, 'best_step': step, 'gain': gain._asdict()}
    saved.save(step, trainable, {'count': np.zeros(1)}, extra, gain.best)
    saved.close()
    status, err = command(export, *flags)
    if gain.difference <= 0:
      command_refused((status, err), f'{gain.best:.4f}', '0.5000', '--force')
      assert not (tmp_path / 'p.npz').exists()
      status, err = command(export, *flags, '--force')
    assert status == 0
    assert (f'{gain.best:.4f}' in err) == (not gain.better)
    assert load_prompt(tmp_path / 'p.npz').meta['gain'] == gain._asdict()
  command_refused(command(export, f'--from={tmp_path}/p.npz', '--force', flags[1]), '--force')
  # The best is chosen over an equal one and over the latest, unless a step is named.
  saved = checkpoints(tmp_path / 'run', trained / 'backbone')
  for step, score in ((16, 0.7), (17, 0.3)):
    later = {name: leaf + step for name, leaf in trainable.items()}
    saved.save(step, later, {'count': np.zeros(1)}, extra, score)
  saved.close()
  for more, moved in (((), 0), (('--step=17',), 17)):
    assert command(export, *flags, *more)[0] == 0
    prefix = load_prompt(tmp_path / 'p.npz').of_side('query')['prefix']
    np.testing.assert_array_equal(prefix, trainable['prompt/prefix'] + moved)


@pytest.mark.slow
def test_a_reparametrised_prompt_is_expanded(command, run_of, trained, tmp_path):
  """Of two frozen encoders, which share the backbone."""
  flags = '--config.prompt.tied=False', '--config.backbone.two_encoders=True'
  # At the rate of the recipe for a prefix, 0.1, values of the MLP reach 40, where a float32 sum is
  # coarser than the bound below.
  flags += '--config.optim.learning_rate=7e-3', '--config.prompt.reparam=mlp'
  workdir = run_of('dptdr.py:local', *flags)
  assert command(export, '--force', f'--workdir={workdir}', f'--out={tmp_path}/prompt.npz')[0] == 0
  prompt = load_prompt(tmp_path / 'prompt.npz')
  assert sorted(prompt.arrays) == ['passage/prefix', 'query/prefix']
  assert prompt.meta['backbone_sha256'] == load_backbone(trained / 'backbone').sha256
  params = trees.unflatten(trainable_of(workdir, 3)[1])['prompt']
  for side in ('query', 'passage'):
    one = params[side]
    hidden = (
      np.tanh(one['embedding'] @ one['hidden']['kernel'] + one['hidden']['bias'])
      @ one['output']['kernel']
      + one['output']['bias']
    )
    expected = hidden.reshape(4, 2, 2, 2, 64).transpose(1, 2, 0, 3, 4)
    np.testing.assert_allclose(prompt.of_side(side)['prefix'], expected, atol=1e-6)
  assert (prompt.of_side('query')['prefix'] != prompt.of_side('passage')['prefix']).any()


@pytest.mark.slow
def test_a_trained_part_of_the_backbone(command, run_of, trained, tmp_path):
  workdir = run_of(
    'ft.py:local',
    r"--config.trainable=('backbone/layers/mlp/.*',)",
    '--config.pooling=cls',
    '--config.optim.learning_rate=1e-3',
  )
  out = tmp_path / 'model'
  status, said = command(export, '--force', f'--workdir={workdir}', f'--out={out}')
  # Queries of up to 16 tokens were scored.
  assert status == 0 and '--side=query --max_length=16' in said
  before, after = load_backbone(trained / 'backbone'), load_backbone(out)
  assert after.sha256 != before.sha256 and after.config == before.config
  assert after.spec == same_length(pooling='cls', normalize=True, length=32)
  for (name, old), new in zip(
    trees.flatten(before.params).items(), tree.leaves(after.params), strict=True
  ):
    if name.startswith('layers/mlp/'):
      assert (new != old).any(), name
    else:
      assert new.tobytes() == old.tobytes(), name
  np.testing.assert_array_equal(
    tokenizing.load_tokenizer(str(out)).encode(['json decoder'], 16)[0][0],
    tokenizing.load_tokenizer(str(trained / 'backbone')).encode(['json decoder'], 16)[0][0],
  )
  # A second export takes the place of the first, whole.
  inode = out.stat().st_ino
  assert command(export, '--force', f'--workdir={workdir}', f'--out={out}', '--step=3')[0] == 0
  assert out.stat().st_ino != inode and load_backbone(out).sha256 == after.sha256
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  result = command(export, '--force', f'--workdir={workdir}', f'--out={tmp_path}/model.npz')
  command_refused(result, 'model.npz')


@pytest.mark.slow
def test_two_encoders_with_a_prompt(command, run_of, trained, tmp_path):
  from dprjax import Retriever

  workdir = run_of(
    'dptdr.py:local',
    '--config.backbone.two_encoders=True',
    '--config.prompt.tied=False',
    "--config.trainable=('prompt/.*', 'backbone/.*')",
  )
  assert command(export, '--force', f'--workdir={workdir}', f'--out={tmp_path}/model')[0] == 0
  names = {path.name for path in (tmp_path / 'model').iterdir()}
  assert names >= {'passage', 'prompt.npz', 'query', 'retriever.json'}
  before = {path: path.read_bytes() for path in (tmp_path / 'model').rglob('*') if path.is_file()}
  assert command(export, '--force', f'--workdir={workdir}', f'--out={tmp_path}/model')[0] == 0
  assert before == {path: path.read_bytes() for path in before}
  shas = {side: load_backbone(tmp_path / 'model' / side).sha256 for side in ('query', 'passage')}
  assert len({*shas.values(), load_backbone(trained / 'backbone').sha256}) == 3
  assert load_prompt(tmp_path / 'model' / 'prompt.npz').meta['backbone_sha256'] == shas
  trainable = trainable_of(workdir, 3)[1]
  for side in shas:
    kernel = load_backbone(tmp_path / 'model' / side).params['layers']['mlp']['up']['kernel']
    np.testing.assert_array_equal(kernel, trainable[f'backbone/{side}/layers/mlp/up/kernel'])
  for side, length in (('query', 16), ('passage', 32)):
    assert load_backbone(tmp_path / 'model' / side).spec.max_length(side) == length
  both = Retriever.load(tmp_path / 'model', tmp_path / 'model' / 'prompt.npz')
  assert not np.allclose(both.encode(['json'], 'query'), both.encode(['json'], 'passage'))


def test_what_cannot_be_exported(command, trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  usual = ['--force', f'--workdir={trained}', '--out=p.npz']
  for flag, *words in (('--step=99', '99', '12'), ('--backbone=elsewhere', '--backbone', '--from')):
    command_refused(command(export, *usual, flag), *words)
  assert list(tmp_path.iterdir()) == []


def test_a_backbone_that_was_changed_since(command, trained, tmp_path):
  shutil.copytree(trained, tmp_path / 'run')
  backbone = load_backbone(trained / 'backbone')
  changed = tree.map(lambda leaf: leaf + np.float32(1), backbone.params)
  model_folders.save_backbone(
    tmp_path / 'run' / 'backbone', backbone.config, changed, source=backbone.path
  )
  command_refused(
    command(export, '--force', f'--workdir={tmp_path}/run', f'--out={tmp_path}/p.npz'),
    'sha256',
  )


@pytest.fixture
def folders(trained, tmp_path):
  """A training, the backbone that it began with, another training and foreign folders."""
  from dprjax.base import provenance

  run = tmp_path / 'run'
  shutil.copytree(trained, run)
  (run / 'backbone').rename(tmp_path / 'backbone')
  config = json.loads((run / 'config.json').read_text())
  config['backbone']['path'] = str(tmp_path / 'backbone')
  config['prompt']['init_from'] = str(tmp_path / 'start.npz')
  (run / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'start.npz').write_text('a prompt')
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'theirs').mkdir()
  (tmp_path / 'theirs' / 'config.json').write_text('{}')
  (tmp_path / 'theirs' / 'thesis').write_text('1')
  (tmp_path / 'link').symlink_to('run')

  def content():
    return provenance.sums(epath.Path(tmp_path))

  before = content()
  yield tmp_path
  assert content() == before
  assert not list(tmp_path.rglob('*.lock'))


@pytest.mark.parametrize(
  ('out', 'message'),
  [
    ('run', '--workdir'),
    ('link', '--workdir'),
    ('run/model', '--workdir'),
    ('link/new/prompt.npz', '--workdir'),
    ('backbone/prompt.npz', 'config.backbone.path'),
    ('start.npz', 'config.prompt.init_from'),
    ('other', 'other'),
    ('theirs/thesis', '--out'),
  ],
)
def test_an_export_harms_nothing(command, folders, monkeypatch, out, message):
  monkeypatch.chdir(folders)
  command_refused(command(export, '--force', '--workdir=run', f'--out={out}'), message)


def test_a_workdir_does_not_decide_which_code_is_imported(command, trained, tmp_path, monkeypatch):
  shutil.copytree(trained, tmp_path / 'run')
  config = json.loads((tmp_path / 'run' / 'config.json').read_text())
  config['method'] = 'strangers.method'
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'strangers').mkdir()
  for name in ('__init__', 'method'):
    (tmp_path / 'strangers' / f'{name}.py').write_text(
      f'import os\nos.mkdir("{tmp_path}/ran-{name}")'
    )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  flags = ['--workdir=run', '--out=p.npz']
  command_refused(command(export, *flags), 'strangers.method', '--method=strangers.method')
  command_refused(command(export, *flags, '--method=other'), '--method=strangers.method')
  assert not (tmp_path / 'ran-__init__').exists()
  command_refused(command(export, *flags, '--method=strangers.method'), 'strangers.method')
  assert (tmp_path / 'ran-method').exists()


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('backbone', None, 'config.backbone'),
    ('prompt', {'length': 10**12}, 'config.prompt.length'),
  ],
)
def test_a_workdir_with_another_config(command, trained, tmp_path, key, value, words):
  (tmp_path / 'run').mkdir()
  config = json.loads((trained / 'config.json').read_text())
  config[key] = {**config[key], **value} if isinstance(value, dict) else value
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
  command_refused(
    command(export, '--force', f'--workdir={tmp_path}/run', f'--out={tmp_path}/p.npz'), words
  )
