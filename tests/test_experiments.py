"""The verdicts, tables and sets of the experiments."""

import importlib
import pathlib
import types
from typing import NamedTuple

import numpy as np
import pytest

from lab import measures

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = 12


class Documents(NamedTuple):
  ids: list
  titles: list
  abstracts: list
  categories: list


@pytest.fixture
def tables(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import topic_dpr_tables

  return topic_dpr_tables


class Topics:
  """Two topics, by the number of the document."""

  def __len__(self):
    return 2

  def assign(self, texts):
    return np.array([int(text) % 2 for text in texts])


@pytest.mark.slow
def test_scores_of_each_document(tables):
  rng = np.random.default_rng(0)
  p, q = (rng.normal(size=(DOCUMENTS, 8)).astype(np.float32) for _ in range(2))
  p, q = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (p, p + q))
  numbers = [str(i) for i in range(DOCUMENTS)]
  # Four of each of three categories; one has a category of its own.
  categories = [(f'c{i % 3}',) for i in range(DOCUMENTS - 1)] + [('own',)]
  documents = Documents(numbers, numbers, numbers, categories)
  dealt = np.arange(DOCUMENTS) // 6
  scores = tables.scores({'passages': p, 'oracle': q, 'dealt': dealt}, documents, Topics())
  # The one that has no other with its category is left out with its own abstract.
  assert len(scores['oracle nAP@10']) == len(scores['oracle Align']) == DOCUMENTS
  assert len(scores['oracle nAP@10 of others']) == DOCUMENTS - 1
  first = np.argmax(q @ p.T, axis=1) == np.arange(DOCUMENTS)
  assert (scores['oracle RR@100'][first] == 1).all()
  assert np.allclose(scores['oracle Align'], ((q - p) ** 2).sum(1))
  others = [[j for j in range(DOCUMENTS) if categories[i] != categories[j]] for i in range(3)]
  assert np.allclose(scores['oracle Sim(q, p-)'][:3], [(q @ p.T)[i, j].mean() for i, j in
                                                       enumerate(others)])  # fmt: skip
  near = measures.nearest(p, tables.NEAREST)
  own = np.arange(DOCUMENTS)[:, None]
  assert np.allclose(scores['near topic'], (near % 2 == own % 2).mean(1))
  assert np.allclose(scores['near dealt'], (near // 6 == own // 6).mean(1))


@pytest.mark.parametrize(
  ('values', 'draws', 'sign', 'said'),
  [
    ([0.1, 0.11], [0.1, 0.11], 1, 'held'),
    ([0.1, 0.11], [0.1, 0.11], -1, 'not'),
    ([0.1, 0.2], [-0.1, 0.4], 1, 'undecided'),
    ([0.3, 0.01], [0.15, 0.16], 1, 'undecided'),
  ],
)
def test_verdicts(tables, values, draws, sign, said):
  found = tables.trials.verdict(values, np.array(draws), sign)
  assert found[3] == said and np.isclose(found[0], np.mean(values))


def test_an_interval_is_over_seeds_and_queries(tables):
  interval, rng = tables.trials.interval, np.random.default_rng(0)
  draws = rng.normal(0.2, 0.01, 20_000)
  # One seed: percentiles of the bootstrap. Seeds that agree: only queries, about 1.96 deviations.
  assert np.allclose(interval([0.2], draws), np.quantile(draws, [0.025, 0.975]))
  assert np.allclose(interval([0.2, 0.2], draws), [0.2 - 0.0196, 0.2 + 0.0196], atol=4e-4)
  # Queries that agree: the interval of a mean of three normal numbers, t with 2 degrees: 4.303.
  values = [0.1, 0.2, 0.3]
  half = 4.303 * 0.1 / 3**0.5
  assert np.allclose(interval(values, np.full(9, 0.2)), [0.2 - half, 0.2 + half], atol=1e-4)


@pytest.mark.slow
def test_the_page_of_results_has_the_verdicts_of_the_ledgers(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import verdicts

  page = (ROOT / 'docs' / 'results.md').read_text()
  for name, made in verdicts.tables().items():
    begin, end = f'<!-- experiments/{name}: from here -->', '<!-- to here -->'
    assert page.partition(begin)[2].partition(end)[0].strip() == made.strip(), name


def test_a_ledger_is_taken_up_where_settings_are_the_same(monkeypatch, tmp_path, capsys):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import trials

  done = []

  def work():
    done.append(1)
    return {'best': 0.5, 'scores': {'nDCG@10': np.array([1.0, 1 / 3])}}

  out, kept, settings = tmp_path / 'out', tmp_path / 'kept.jsonl', {'batch': 16, 'sets': ('a',)}
  out.mkdir()
  line = trials.measure(out, 'a-ft', 1, work)
  assert line['scores'] == {'nDCG@10': [1.0, 0.3333]} and line['best'] == 0.5
  assert trials.measure(out, 'a-ft', 1, work) == trials.ledger(out)[0] and len(done) == 1
  trials.measure(out, 'a-ft', 2, work)
  assert len(done) == 2
  trials.keep(out, kept, settings)
  # On another machine: the same settings, then others.
  other = tmp_path / 'other'
  trials.take_up(other, kept, settings)
  assert trials.ledger(other) == trials.ledger(out)
  trials.measure(other, 'a-ft', 2, work)
  assert len(done) == 2
  trials.take_up(tmp_path / 'third', kept, settings | {'batch': 32})
  assert trials.ledger(tmp_path / 'third') == []
  assert 'other settings' in capsys.readouterr().out


def test_a_system_that_is_no_gain_has_the_scores_of_the_encoder_as_it_is(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import gain
  import trials

  def line(run, scores, seed=0, **more):
    return {'run': run, 'seed': seed, 'commit': 'c', 'scores': {'nDCG@10': scores}, **more}

  made = {'rate': 0, 'bytes': 1000, 'step': 4, 'train_s': 60, 'reencode_s': 1.0}
  lines = [
    line('cranfield/frozen', [0.5, 0.5]),
    line('cranfield/bm25', [0.25, 0.25]),
    line('cranfield/query', [0.75, 0.75], better=True, gain=0.25, **made),
    line('cranfield/both', [1.0, 1.0], better=False, gain=0.5, **made),
    line('cranfield-one/query', [0.25, 0.25], better=False, gain=0.1, **made),
    line('cranfield-one/both', [0.0, 0.5], better=False, gain=0.2, **made),
    line('cranfield-one/ft', [0.25, 0.5], better=False, gain=0.0, **made),
    line('pretrained/ft', [1.0, 1.0]),  # the start of some runs, which is no setting
  ]
  experiment = object.__new__(gain.Experiment)  # without a backbone
  experiment.out, experiment.seeds = tmp_path, [0]
  trials.write_ledger(tmp_path / trials.LEDGER, lines)
  found = experiment.found()

  def used(name, way):
    return experiment.used(found, name, way, 0).mean()

  assert used('cranfield', 'query') == 0.75 and used('cranfield', 'both') == 0.5
  # The one that is a gain; where none is, the encoder as it is.
  assert used('cranfield', 'new') == 0.75 and used('cranfield-one', 'new') == 0.5
  assert used('cranfield-one', 'ft') == 0.375  # fine-tuning keeps its score
  rows = experiment.scores(found, ['cranfield', 'cranfield-one']).splitlines()
  assert rows[4] == '| cranfield | 2 | 0.250 | 0.500 | 0.750 | 0.750 | 0.500 (1 kept) |  |  |  |'
  assert (
    '| mean gain (settings) |  | -0.250 (2) | +0.000 (2) | +0.125 (2) | +0.125 (2) | +0.000 (2) |  '
    '| -0.125 (1) |  |'
  ) in rows


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_an_experiment_trains_measures_and_goes_on(trained, monkeypatch, tmp_path):
  """A small setting and backbone: the floors, the best of two rates, tables, the kept ledger."""
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import gain
  import gain_sets
  import systems
  import trials

  corpus = [
    gain_sets.texts.PassageRecord(f'd{n}', '', f'passage {n} about {n * n}') for n in range(24)
  ]
  asked = {f'q{n}': f'what is said about {n * n}' for n in range(16)}
  qrels = [{f'q{n}': {f'd{n}': 1} for n in some} for some in (range(10), range(10, 16))]
  source = gain_sets.Source(corpus, asked, *qrels)
  monkeypatch.setattr(gain_sets, 'read', lambda data, name: source)
  linear = gain.WAYS['linear']
  way = linear._replace(rates=(1e-3, 1e-2), options=(*linear.options, 'steps=2', 'batch_size=4'))
  monkeypatch.setattr(gain.Experiment, 'sets', {'small': gain_sets.Setting('tiny', 10)})
  monkeypatch.setattr(gain.Experiment, 'ways', gain.WAYS | gain.VARIANTS | {'linear': way})
  monkeypatch.setattr(trials, 'LEDGERS', tmp_path)
  args = types.SimpleNamespace(
    backbone=str(trained / 'backbone'),
    length=16,
    dtype='float32',
    data=str(tmp_path),
    out=str(tmp_path / 'out'),
    part='small',
    ways='linear',
    seeds='0',
    again=True,
    docs=None,
  )
  gain.Experiment(args).go()
  lines = {line['run']: line for line in trials.ledger(tmp_path / 'out')}
  rates = [f'small/linear@{rate:g}' for rate in way.rates]
  assert lines.keys() == {'tiny/bm25', 'tiny/frozen', 'small/linear', *rates}
  assert lines['small/linear']['rate'] == max(
    way.rates, key=lambda r: lines[f'small/linear@{r:g}']['best']
  )
  assert all(len(lines[run]['scores']['nDCG@10']) == 6 for run in ('tiny/frozen', 'small/linear'))
  assert '| small | 6 |' in (tmp_path / 'out' / 'results.md').read_text()
  # The ledger is kept; the same command finds all runs in it.
  trials.keep(tmp_path / 'out', tmp_path / 'gain.jsonl', gain.Experiment(args).settings)
  monkeypatch.setattr(systems, 'train', None)
  args.again, args.out = False, str(tmp_path / 'other')
  gain.Experiment(args).go()
  assert trials.ledger(tmp_path / 'other') == trials.ledger(tmp_path / 'out')


@pytest.mark.parametrize('name', ['gain', 'prompt_tuning', 'pretraining', 'unm'])
def test_claims_are_of_systems_that_can_be_trained(monkeypatch, name):
  """Their configs are read, and each claim is of two that there are."""
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  module = importlib.import_module(name)
  import systems

  experiment = module.Experiment
  for claim, ours, theirs, *rest in experiment.claims:
    pair = (ours, theirs)
    if rest:  # methods of pretraining, trainings that start from them, and their data
      kind, some = rest
      pair = tuple(module.way(one, kind, 'cls') for one in pair)
      assert set(some) <= experiment.sets.keys(), claim
    assert set(pair) <= {*experiment.ways, *systems.FLOORS}, claim
  for way, one in experiment.ways.items():
    config = systems.parse(one.recipe, one.options)
    assert bool(config.prompt.length) != ('ft' in way or 'zero' in way), way


def test_trainings_take_the_prompts_and_the_rate_of_others(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  import nir_prompt

  for name, run in nir_prompt.RUNS.items():
    assert run.chosen in nir_prompt.RATES and run.chosen in nir_prompt.RUNS
    if run.prompts:
      assert {f'mdm-{task}' for task in run.tasks} <= nir_prompt.RUNS.keys(), name
  assert {name for part in nir_prompt.PARTS.values() for name in part} >= {'ft', 'emm'}
