"""The whole quickstart at a tiny scale, twice."""

import re

import pytest
from etils import epath

from dprjax import quickstart
from dprjax.models import artifact
from tests import reading
from tests.refusals import command_refused


@pytest.mark.slow
def test_the_comparison_has_three_systems_and_trains_once(tmp_path, capsys, one_device):
  (tmp_path / 'models').mkdir()
  backbone, out = reading.write_backbone(tmp_path / 'models'), epath.Path(tmp_path / 'out')

  def compare(question):
    options = {'steps': 2, 'prompt.length': 4}
    options |= {'data.passage_max_length': 32, 'data.passage_buckets': (32,)}
    modules = ['email', 'json', 'logging']
    quickstart.quickstart(out, [question], modules, str(backbone), options)
    return capsys.readouterr().out

  first = compare('how are messages parsed?')
  # Layers, keys and values, length, heads, head size.
  product = out / 'training' / 'prompt.npz'
  assert artifact.load_prompt(product).of_side('query')['prefix'].shape == (2, 2, 4, 2, 32)
  assert (out / 'report.png').read_bytes().startswith(b'\x89PNG')
  table = (out / 'report.md').read_text()
  assert '| BM25 |' in table
  assert re.search(r'\| frozen backbone \|.*\| 0 \|', table)
  assert re.search(r'\| \+ prompt \|.*\| 1,024 \| [\d.]+ kB \|', table)
  assert 'up to 32 tokens of a query and 32 of a passage' in first
  assert len(re.findall(r'^    [123]  -?\d\.\d{3}  \S', first, re.MULTILINE)) == 3

  saved = {path: path.stat().mtime for path in (out / 'training').glob('training/checkpoints/*')}
  assert 'what is a header?' in compare('what is a header?')
  assert saved == {path: path.stat().mtime for path in saved} and saved
  assert (out / 'report.md').read_text() == table


def test_a_folder_of_other_files_is_refused(command, tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  command_refused(command(quickstart, f'--out={tmp_path}'), '--out')
  assert [path.name for path in tmp_path.iterdir()] == ['config.json']
