"""A stage runs once, and again when its input changes."""

import json

import pytest
from etils import epath

from dprjax.papers.unm.pipeline import Stages
from tests.refusals import refused


@pytest.fixture
def scored(tmp_path):
  """A command that measures a run, the run, and the file it writes, in a folder of its own."""
  run, qrels = tmp_path / 'run.trec', tmp_path / 'test.tsv'
  out = epath.Path(tmp_path / 'measured' / 'metrics.json')
  run.write_text('q2 Q0 d1 1 2.0 x\nq2 Q0 d2 2 1.0 x\n')
  qrels.write_text('query-id\tcorpus-id\tscore\nq2\td2\t1\n')
  command = ['evaluate', f'--run={run}', f'--qrels={qrels}', f'--out={out}', '--measure', 'RR@10']
  return command, run, out


def stages(tmp_path):
  return Stages(epath.Path(tmp_path))


@pytest.mark.slow
def test_a_stage_runs_once_and_again_when_its_input_changes(tmp_path, scored, capfd):
  command, run, out = scored
  stages(tmp_path).run('Measure', command, out, [run], out.parent)
  assert json.loads(out.read_text())['mean'] == {'RR@10': 0.5}
  assert '$ python -m dprjax.evaluate --run=' in capfd.readouterr().out
  stages(tmp_path).run('Measure', command, out, [run], out.parent)
  assert capfd.readouterr().out == '[1] Measure: done before\n'
  out.unlink()
  stages(tmp_path).run('Measure', command, out, [run], out.parent)
  assert out.exists()

  (out.parent / 'left').write_text('from before')
  run.write_text('q2 Q0 d2 1 2.0 x\nq2 Q0 d1 2 1.0 x\n')
  stages(tmp_path).run('Measure', command, out, [run], out.parent)
  assert json.loads(out.read_text())['mean'] == {'RR@10': 1.0}
  assert not (out.parent / 'left').exists()
  stages(tmp_path).run('Measure', [*command, 'nDCG@10'], out, [run])
  assert 'nDCG@10' in json.loads(out.read_text())['mean']  # the command line is part of the input


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_process_and_is_not_done(tmp_path, scored, capfd):
  command, run, out = scored
  with pytest.raises(SystemExit) as ended:
    stages(tmp_path).run('Measure', [*command, '--run=nowhere.trec'], out, [run])
  assert ended.value.code == 2
  assert capfd.readouterr().err.count('dprjax: error: ') == 1  # the line of the command
  assert json.loads((tmp_path / 'stages.json').read_text())[str(out)]['done'] is False
  with refused('dprjax.nonesuch'):
    stages(tmp_path).run('Nothing', ['nonesuch'])
