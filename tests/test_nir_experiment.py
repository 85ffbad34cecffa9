"""The verdicts and the page of experiments/nir_prompt.py, of scores that are made here."""

import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def tables(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_tables

  return nir_tables


def line(run, seed, scores):
  return {'run': run, 'seed': seed, 'seconds': 30, 'commit': 'c0ffee', 'scores': scores}


@pytest.fixture
def lines(tables):
  """Two seeds of prompts, which are better by .2, and of fine-tuning of a task each and of all."""
  rng = np.random.default_rng(0)
  made = [{'run': 'sets', 'seed': 0, 'seconds': 0, 'commit': 'c0ffee',
           'counts': {'scifact': {'test': 3000}}}]  # fmt: skip
  for seed in (0, 1):
    whole = {
      f'{name}/{measure}': rng.uniform(0, 0.5, 40)
      for name in tables.IN.values()
      for measure in tables.MEASURES
    }
    better = {key: scores + 0.2 + rng.normal(0, 0.01, 40) for key, scores in whole.items()}
    made += [line('ft', seed, whole), line('emm', seed, better)]
    for task, name in tables.IN.items():
      # Better with one seed, then worse.
      own = {key: scores + (1 - 2 * seed) * 0.1 for key, scores in whole.items() if name in key}
      made.append(line(f'ft-{task}', seed, own))
  return made


def test_the_page_of_what_there_is(tables, lines):
  made = tables.page(tables.Results([one for one in lines if one['run'] != 'ft-qa']))
  assert '| scifact | test 3,000 |' in made and 'FT, a task each' not in made
  assert made.count('**held**') == 1 and 'N1' not in made


def test_trainings_take_the_prompts_and_the_rate_of_others(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_prompt

  for name, run in nir_prompt.RUNS.items():
    assert run.chosen in nir_prompt.RATES and run.chosen in nir_prompt.RUNS
    if run.prompts:
      assert {f'mdm-{task}' for task in run.tasks} <= nir_prompt.RUNS.keys(), name
  assert {name for part in nir_prompt.PARTS.values() for name in part} >= {'ft', 'emm'}


def test_one_answer_is_named(monkeypatch):
  """In the table of pairs, which has the larger class and a verdict on accuracy."""
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_reranker

  tests = ('SICK', 'MSRP')

  def run(name, seed, right, yes):
    answers = [float(i < right) for i in range(40)]
    looks = {'looks': {test: {'yes': yes, 'F1': 0.5, 'AP': 0.5} for test in tests}}
    return line(name, seed, {f'{test}/accuracy': answers for test in tests}) | looks

  counts = {test: {'test': 40, 'test, matching': 10} for test in tests}
  sets = {'run': 'sets', 'seed': 0, 'seconds': 0, 'commit': 'c0ffee', 'counts': counts}
  lines = [sets, *(run('emm', seed, 38, 0.3) for seed in range(3))]
  lines += [run('ft', seed, 30, 0.02 * seed) for seed in range(3)]
  made = nir_reranker.page(lines)
  assert '| the larger class | 0.750 |' in made and '| N7 |' in made and '**held**' in made
  (tuned,) = (row for row in made.splitlines() if row.startswith('| FT |'))
  (prompts,) = (row for row in made.splitlines() if row.startswith('| NIR-Prompt |'))
  assert tuned.count('**one answer**') == 2 and 'one answer' not in prompts
