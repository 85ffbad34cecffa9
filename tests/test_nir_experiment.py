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
  (tmp_path / 'scores' / 'retriever').mkdir(parents=True)
  (tmp_path / 'sets').mkdir()
  (tmp_path / 'sets' / 'counts.json').write_text(json.dumps({'scifact': {'test': 3000}}))
  rng = np.random.default_rng(0)
  for seed in (0, 1):
    whole = {f'{name}/RR@10': rng.uniform(0, 0.5, 40) for name in RETRIEVAL.values()}
    better = {key: scores + 0.2 + rng.normal(0, 0.01, 40) for key, scores in whole.items()}
    saved = {'ft': whole, 'emm': better}
    for task, name in RETRIEVAL.items():
      key = f'{name}/RR@10'
      saved[f'ft-{task}'] = {key: whole[key] + (1 - 2 * seed) * 0.1}  # better once, then worse
    for run, arrays in saved.items():
      np.savez(tmp_path / 'scores' / 'retriever' / f'{run}-{seed}.npz', **arrays)
  return tmp_path


def test_verdicts_over_sets_and_seeds(tables, out):
  results = tables.Results(out)
  keys = results.keys('retriever', 'in')
  assert keys == ['dailydialog/RR@10', 'medquad/RR@10', 'scifact/RR@10']
  assert sorted(results.system('retriever', 'ft-*')[1]) == keys
  mean, low, high, said = results.compare('retriever', 'emm', 'ft', keys)
  assert said == 'held' and mean == pytest.approx(0.2, abs=0.01) and low < mean < high
  assert results.compare('retriever', 'ft', 'emm', keys)[3] == 'not'
  assert results.compare('retriever', 'ft-*', 'ft', keys)[3] == 'undecided'  # seeds do not agree
  # What was not measured is left out.
  assert results.compare('retriever', 'emm', 'ft', results.keys('retriever', 'out')) is None
  assert results.compare('retriever', 'emm', 'manual', keys) is None


def test_tables_of_what_there_is(tables, out, capsys):
  tables.write(out)
  made = (out / 'results.md').read_text()
  assert made in capsys.readouterr().out
  assert '| scifact | test 3,000 |' in made
  (row,) = (line for line in made.splitlines() if line.startswith('| NIR-Prompt, continuous'))
  assert row.count('±') == 4 and row.endswith('|  |  |  |  |')  # three sets and their mean
  claims = [line for line in made.splitlines() if line.endswith('** |')]
  assert len(claims) == 3 and '**held**' in claims[1]


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
