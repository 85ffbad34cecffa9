"""The verdicts and tables of experiments/nir_prompt.py, of scores that are made here."""

import json
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
RETRIEVAL = {'retrieval': 'scifact', 'qa': 'medquad', 'dialogue': 'dailydialog'}


@pytest.fixture
def tables(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_tables
  import trials

  trials.counts.cache_clear()
  monkeypatch.setattr(trials, 'DRAWS', 200)
  return nir_tables


@pytest.fixture
def out(tmp_path):
  """Two seeds of prompts, which are better by .2, and of fine-tuning of a task each and of all."""
  (tmp_path / 'sets').mkdir()
  (tmp_path / 'sets' / 'counts.json').write_text(json.dumps({'scifact': {'test': 3000}}))
  rng = np.random.default_rng(0)
  lines = []
  for seed in (0, 1):
    whole = {f'{name}/RR@10': rng.uniform(0, 0.5, 40) for name in RETRIEVAL.values()}
    better = {key: scores + 0.2 + rng.normal(0, 0.01, 40) for key, scores in whole.items()}
    saved = {'ft': whole, 'emm': better}
    for task, name in RETRIEVAL.items():
      key = f'{name}/RR@10'
      saved[f'ft-{task}'] = {key: whole[key] + (1 - 2 * seed) * 0.1}  # better once, then worse
    for run, arrays in saved.items():
      scores = {key: list(values) for key, values in arrays.items()}
      lines.append(line(f'retriever/{run}', seed, scores))
  write(tmp_path, lines)
  return tmp_path


def line(run, seed, scores):
  return {'run': run, 'seed': seed, 'seconds': 3, 'commit': 'c0ffee', 'scores': scores}


def write(out, lines):
  with (out / 'ledger.jsonl').open('a') as file:
    file.writelines(json.dumps(one) + '\n' for one in lines)


def test_verdicts_over_sets_and_seeds(tables, out):
  results = tables.Results(out)
  keys = results.keys('retriever', 'in')
  assert keys == ['dailydialog/RR@10', 'medquad/RR@10', 'scifact/RR@10']
  assert sorted(results.system('retriever', 'ft-*')[1]) == keys
  mean, low, high, said = results.compare('retriever', 'emm', 'ft', keys)
  assert said == 'held' and mean == pytest.approx(0.2, abs=0.01) and low < mean < high
  assert results.compare('retriever', 'ft', 'emm', keys)[3] == 'not'
  assert results.compare('retriever', 'ft-*', 'ft', keys)[3] == 'undecided'  # seeds do not agree
  # Runs without measurements are left out.
  assert results.compare('retriever', 'emm', 'ft', results.keys('retriever', 'out')) is None
  assert results.compare('retriever', 'emm', 'manual', keys) is None


def test_tables_of_what_there_is(tables, out, capsys):
  tables.write(out)
  made = (out / 'results.md').read_text()
  assert made in capsys.readouterr().out
  assert '| scifact | test 3,000 |' in made
  (row,) = (one for one in made.splitlines() if one.startswith('| NIR-Prompt, continuous'))
  assert row.count('±') == 4 and row.endswith('|  |  |  |  |')  # three sets and their mean
  claims = [one for one in made.splitlines() if one.endswith('** |')]
  assert len(claims) == 3 and '**held**' in claims[1]
  assert '| retriever/emm | 1 | 3 | c0ffee |' in made


def test_only_sections_whose_rows_are_all_there_are_published(tables, out, tmp_path):
  page = tmp_path / 'docs' / 'experiments' / 'nir-prompt.md'
  page.parent.mkdir(parents=True)
  marks = ''.join(
    f'<!-- experiments/nir_prompt.py, {name}: from here -->\nold {name}\n<!-- to here -->\n'
    for name in tables.SECTIONS
  )
  page.write_text(f'before\n{marks}after\n')
  keys = [key for domain in ('in', 'out') for key in tables.Results(out).keys('retriever', domain)]
  scores = {key: [0.25, 0.75] * 20 for key in keys}
  names = [name for name in tables.VARIANTS if name != 'emm']
  write(out, [line(f'retriever/{name}', 0, scores) for name in names[1:]])
  tables.write(out, tmp_path / 'docs')
  assert 'old variants' in page.read_text() and 'old sets' not in page.read_text()
  write(out, [line(f'retriever/{names[0]}', 0, scores)])
  tables.write(out, tmp_path / 'docs')
  made = page.read_text()
  assert 'old variants' not in made and '| mixed batches | 0.500 |' in made
  assert all(f'old {name}' in made for name in ('retriever', 'new task', 'reranker'))
  assert made.startswith('before\n') and made.endswith('after\n')


def test_runs_name_what_they_begin_with(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_prompt

  for name, run in nir_prompt.RUNS.items():
    if run.prompts:
      made = [f'{run.stage}/{run.prompts}-{task}' for task in run.tasks]
      assert all(nir_prompt.RUNS[one].kept == 'prompt' for one in made), name
    if run.start:
      assert nir_prompt.RUNS[f'{run.stage}/{run.start}'].kept == 'model', name
  listed = [name for part in nir_prompt.PARTS.values() for name in part]
  assert set(nir_prompt.RUNS) <= set(listed) and len(listed) == len(set(listed))
