"""The retriever of NIR-Prompt: prompts for many tasks on one backbone, against fine-tuning.

    python experiments/nir_prompt.py --data=../shared/data --out=runs/nir-prompt

Document retrieval (SciFact), question answering (MedQuAD) and dialogue (DailyDialog), tested on
these and on Cranfield, QNLI and ClariQ; all-MiniLM-L6-v2, cosines over .05; 16 tokens of a query,
32 of a passage; 8 queries in an update, with one negative of BM25 each (dialogue: a random one).
`experiments/nir_sets.py` lists the texts taken out of each set. Every run leaves a line in
OUT/ledger.jsonl with the scores of each test query, and the same command goes on where it stopped.
`--part` makes some of `PARTS`. `--part=tables` makes the tables of what there is, and with
`--docs=docs` puts them into docs/experiments/nir-prompt.md and keeps the ledger
(experiments/ledgers/nir_prompt.jsonl).

Rules, fixed before the runs:

- Dev chooses one of three rates with seed 0, for all weights by FT of all tasks, and for prompts by
  the prompt of dialogue, which learns least; while the best is at the edge, one more is tried (six
  at most). The weights of NIR-Prompt and of FT of one task have the rate of FT of all.
- Each training is measured on dev every 20 updates a task, ends when dev has not risen twice, at
  most after 80 a task, and keeps the best.
- A verdict is on the mean difference in RR@10 over test sets and seeds, with its 95 % interval over
  seeds and queries (`trials.interval`). *Held* or *not*: the interval excludes 0 and all seeds
  agree in the sign; else *undecided*. P@1, the measure of the paper, and nDCG@10 stand beside.

Rules of N4 to N6, fixed before their runs; three seeds, rates and updates as above. Verdicts are on
RR@10 in domain:

- N4, fixed prompts are better than free ones (Figures 8 and 9): `emm` above `emm-free`, whose
  prompts and weights are trained with template.fixed_layers=0.
- N5, batches of one task in turn are better than mixed ones (Table 13): `emm` above `emm-random`,
  the same under arrangement=random.
- N6, fused prompts help a new task (Table 10a). Each task is left out in turn: EMM of the other
  two, then 40 updates on 32 of its queries, with the rate of the weights that dev chooses. `new-*`
  above `fresh-*` (new prompt encoders on the same EMM) was to be the verdict; `few-*` (FT of the
  same 32 queries on the bare encoder) stands beside. Changed after the runs: three rates against
  one are not tuned alike, so the verdict is on `one-*`, the trainings of `new-*` at the middle
  rate.
"""

import functools
import json
import pathlib
import shutil
import sys
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

import nir_sets
import nir_tables
import trials
from dprjax.base import mesh, tree
from dprjax.encoding.embedder import place
from dprjax.exports import exporting
from dprjax.models import hub
from dprjax.retrieval import best, bm25_index, exact, measures
from dprjax.text import sources, tokenizing, trec
from dprjax.training import checkpoint, dev_ranking, train
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training import workdir as workdirs
from dprjax.training.method import Parts

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENGTHS = 16, 32  # tokens of a query and of a passage
TASKS = nir_sets.TASKS
RATES = {'ft': (2e-5, 6e-5, 2e-4), 'mdm-dialogue': (1e-3, 3e-3, 1e-2)}
FACTOR, MOST = 3, 6  # between rates; rates at most


class Run(NamedTuple):
  """A kind of training.

  Attributes:
    recipe: the argument of configs/nir_retriever.py.
    tasks: that it is trained on.
    chosen: the run that gives its rate.
    prompts: whether it takes the prompts of the runs mdm-TASK, with ``kind`` behind the name.
    kind: see ``prompts``.
    start: the run whose encoder it starts from; '': the backbone of the command.
    options: of its own.
  """

  recipe: str
  tasks: tuple[str, ...]
  chosen: str = 'ft'
  prompts: bool = False
  kind: str = ''
  start: str = ''
  options: Mapping[str, object] = types.MappingProxyType({})


ALL = '+'.join(TASKS)
FREE = {'template.fixed_layers': 0}
MIDDLE = 'rate05'  # of the rates of weights of a sum
FEW = {'steps': 40, 'eval.every': 20, 'checkpoint.every': 40}  # of 32 queries


def others(task):
  return tuple(one for one in TASKS if one != task)


RUNS = {
  'ft': Run(f'ft={ALL}', TASKS),
  'ft-mask': Run(f'ft={ALL},mask', TASKS),
  'emm': Run(f'emm={ALL}', TASKS, prompts=True),
  **{f'mdm-{task}': Run(f'mdm={task}', (task,), 'mdm-dialogue') for task in TASKS},
  **{f'ft-{task}': Run(f'ft={task}', (task,)) for task in TASKS},
  # N4 and N5.
  'emm-free': Run(f'emm={ALL}', TASKS, prompts=True, kind='-free', options=FREE),
  **{
    f'mdm-{task}-free': Run(f'mdm={task}', (task,), 'mdm-dialogue', options=FREE) for task in TASKS
  },
  'emm-random': Run(f'emm={ALL}', TASKS, prompts=True, options={'arrangement': 'random'}),
  # N6.
  **{
    f'but-{task}': Run(f'emm={"+".join(others(task))}', others(task), prompts=True)
    for task in TASKS
  },
  **{
    f'new-{task}': Run(f'adapt={task}', (task,), start=f'but-{task}', options=FEW) for task in TASKS
  },
  **{
    f'fresh-{task}': Run(f'adapt={task},unfused', (task,), start=f'but-{task}', options=FEW)
    for task in TASKS
  },
  **{
    f'few-{task}': Run(f'ft={task}', (task,), options={**FEW, f'tasks.{task}.data.max_queries': 32})
    for task in TASKS
  },
}
PARTS = {
  'floors': ('bm25', 'zero-mean'),
  'retriever': ('ft', *(f'ft-{task}' for task in TASKS), 'emm', 'ft-mask'),
  'arrangements': ('emm-random', 'emm', 'emm-free'),
  'new-task': tuple(f'{kind}-{task}' for kind in ('new', 'one', 'fresh', 'few') for task in TASKS),
}


def main():
  parser = trials.parser(__doc__, PARTS, '0,1,2')
  parser.add_argument('--updates', type=int, default=80, help='of a task, at most')
  args = trials.begin(parser, PARTS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    for seed in experiment.seeds:
      for name in PARTS.get(part, ()):
        experiment.make(name, seed)
    nir_tables.write(experiment.out, args.docs if part == 'tables' else None)
  if args.docs:
    trials.keep(experiment.out, nir_tables.LEDGER, experiment.settings)


class Experiment:
  """All runs, each in its own folder."""

  def __init__(self, args):
    self.args = args
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.out = pathlib.Path(args.out).resolve()
    self.settings = {name: getattr(args, name) for name in ('backbone', 'updates')}
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, nir_tables.LEDGER, self.settings)
    self.sets = self.out / 'sets'

  def prepare(self):
    """Writes all sets, unless they are there; a line of the ledger says how many of what."""
    data = pathlib.Path(self.args.data).resolve()
    trials.prepare(self.sets, lambda folder: nir_sets.prepare(data, folder))

  @functools.cached_property
  def devices(self):
    return mesh.make_mesh({'data': -1})

  def make(self, name, seed):
    """A run of a name."""
    self.prepare()
    if name == 'bm25':
      trials.measure(self.out, name, 0, self.rank_words)
    elif name == 'zero-mean':
      trials.measure(self.out, name, 0, self.zero_shot)
    elif name.startswith('one-'):
      task = name.removeprefix('one-')
      trials.measure(self.out, name, seed, lambda: self.one_rate(f'new-{task}', seed))
    elif not any((line['run'], line['seed']) == (name, seed) for line in trials.ledger(self.out)):
      run = RUNS[name]
      rate = self.choose(run.chosen)
      if run.start:
        self.make(run.start, seed)
      if run.prompts:
        for task in run.tasks:  # in lines of their own, whose seconds are theirs
          self.prompt(task, seed, run.kind)
      trials.measure(self.out, name, seed, lambda: self.train(name, seed, rate, True))

  @functools.cache  # noqa: B019
  def choose(self, kind):
    """The rate that is best on dev, with seed 0."""
    tried = {}
    rates = list(RATES[kind])
    while True:
      for rate in rates:
        if rate not in tried:
          work = functools.partial(self.train, kind, 0, rate, False)
          tried[rate] = trials.measure(self.out, f'dev/{kind}/{rate:g}', 0, work)['best']
      found = max(tried, key=tried.get)
      if found not in (rates[0], rates[-1]) or len(rates) == MOST:
        return found
      if found == rates[0]:
        rates.insert(0, found / FACTOR)
      else:
        rates.append(found * FACTOR)

  def workdir(self, name, seed, rate):
    return self.out / 'runs' / f'{name}-{rate:g}-{seed}'

  def prompt(self, task, seed, kind=''):
    """The file of the prompt of a task, which is trained unless it is there."""
    name, rate = f'mdm-{task}{kind}', self.choose('mdm-dialogue')
    trials.measure(self.out, name, seed, lambda: self.train(name, seed, rate, False))
    return self.needed(name, seed, rate)

  def needed(self, name, seed, rate):
    """What a run exported; where its line is of another machine, it is trained here."""
    out = self.exported(name, seed, rate)
    if not out.exists():
      self.forget(name, seed)
      self.train(name, seed, rate, False)
    return out

  def forget(self, name, seed):
    """Drops the lines of runs that took the result of another machine: they are made again."""
    takers = {
      taker
      for taker, run in RUNS.items()
      if run.start == name
      or (run.prompts and name in {f'mdm-{task}{run.kind}' for task in run.tasks})
    }
    with trials.changing(self.out):
      lines = trials.ledger(self.out)
      kept = [line for line in lines if line['seed'] != seed or line['run'] not in takers]
      trials.write_ledger(self.out / trials.LEDGER, kept)

  def exported(self, name, seed, rate):
    """The prompt of a task, or the encoder under the prompts of several."""
    made = f'{name}-{rate:g}-{seed}'
    if name.startswith('mdm'):
      return self.out / 'prompts' / f'{made}.npz'
    return self.out / 'encoders' / made

  def start(self, name, seed):
    """The backbone of a run."""
    start = RUNS[name].start
    return self.needed(start, seed, self.choose('ft')) if start else self.args.backbone

  def flags(self, name, seed, rate):
    """The command line of a training."""
    run = RUNS[name]
    steps = self.args.updates * len(run.tasks)
    options = {
      'backbone.path': self.start(name, seed),
      'backbone.dtype': 'mixed',
      'data.query_max_length': LENGTHS[0],
      'data.passage_max_length': LENGTHS[1],
      'data.query_buckets': (LENGTHS[0],),
      'data.passage_buckets': (LENGTHS[1],),
      'data.token_cache': f'{self.out}/token_cache',
      'epochs': 0.0,
      'steps': steps,
      'batch_size': 8,
      'optim.learning_rate': rate,
      'eval.every': 20 * len(run.tasks),
      'eval.patience': 2,
      'eval.skip_saturated': False,  # a few dev queries may all be right
      'eval.corpus_limit': 200,
      'checkpoint.every': steps,
      'log_every': 20,
      'seed': seed,
      **run.options,
    }
    for task in run.tasks:
      folder = self.sets / 'train' / task
      options |= {
        f'tasks.{task}.data.dir': folder,
        f'tasks.{task}.data.dev_split': 'dev',
        f'tasks.{task}.data.hold_out': 0.0,
      }
      if (folder / 'mined.jsonl').exists():
        options[f'tasks.{task}.data.mined_negatives'] = folder / 'mined.jsonl'
      if run.prompts:
        options[f'tasks.{task}.prompt'] = self.prompt(task, seed, run.kind)
    return [
      f'--config={ROOT}/configs/nir_retriever.py:{run.recipe}',
      *(f'--config.{name}={value}' for name, value in options.items()),
    ]

  def train(self, name, seed, rate, tested):
    """Trains unless that is done; measures and forgets the checkpoints, or exports a prompt."""
    config = configs.parse(self.flags(name, seed, rate))
    workdir = self.workdir(name, seed, rate)
    result = train.train(config, workdir)
    if not result.done:
      sys.exit('stopped; the same command goes on')
    found = {'rate': rate, 'best': result.best, 'best_step': result.best_step}
    trained = workdirs.trained(workdir)
    out = self.exported(name, seed, rate)
    if name.startswith(('mdm', 'but')) and not out.exists():
      out.parent.mkdir(exist_ok=True)
      exporting.export(trained, out, force=True)
    if tested:
      method = methods.load(config.method)
      backbone = hub.load_backbone(config.backbone.path, heads=method.parts)
      params = trials.restore(trained, backbone, result.best_step or result.step)
      found['scores'] = self.scores(config, method, backbone, params)
      shutil.rmtree(trained / 'checkpoints')
    return found

  def one_rate(self, name, seed):
    """The scores of a run with `MIDDLE` alone, which it trained beside the other rates."""
    workdir = self.workdir(name, seed, self.choose('ft'))
    if json.loads((workdir / workdirs.SELECTION).read_text())['chosen'] == MIDDLE:
      return {'scores': trials.scores_by_run(trials.ledger(self.out))[name][seed]}
    part = workdirs.alternative(workdir, MIDDLE)
    config = workdirs.load_workdir(part)
    method = methods.load(config.method)
    backbone = hub.load_backbone(config.backbone.path, heads=method.parts)
    saved = checkpoint.Checkpoints(part, backbone.sha256, read_only=True)
    try:
      step = saved.best() or saved.latest()
      params = saved.restore_trainable(step)
    finally:
      saved.close()
    return {'best_step': step, 'scores': self.scores(config, method, backbone, params)}

  # Testing.

  @functools.cache  # noqa: B019
  def retrieval_set(self, name):
    """(queries, passages, judgements), the texts by id."""
    dataset = sources.load_dataset(sources.Source(str(self.sets / 'test' / name), 'beir', 'test'))
    queries = {query.id: query.text for query in dataset.queries}
    passages = {passage.id: passage.text for passage in dataset.passages}
    return queries, passages, {query: dataset.qrels[query] for query in queries}

  def zero_shot(self):
    """The encoder as it is."""
    config = configs.parse([*self.flags('ft', 0, 1e-5), '--config.pooling=mean'])
    method = methods.load(config.method)
    return {'scores': self.scores(config, method, hub.load_backbone(self.args.backbone), {})}

  def rank_words(self):
    """BM25."""
    found = {}
    for name in (*nir_sets.IN_DOMAIN.values(), *nir_sets.OUT_OF_DOMAIN.values()):
      queries, passages, qrels = self.retrieval_set(name)
      index = bm25_index.build(list(passages), list(passages.values()))
      found |= ranks(name, queries, passages, index.search(list(queries.values()), 10), qrels)
    return {'scores': found}

  def scores(self, config, method, backbone, trained):
    """The scores of each query of the test sets of the tasks, by set and measure."""
    tokenizer = tokenizing.load_tokenizer(backbone.path)
    model = method.build(config, backbone.config, self.devices, tokenizer)
    parts = Parts(backbone.params, backbone.heads, sha256=backbone.sha256)
    params = place(self.devices, tree.flatten(model.init(parts, jax.random.key(0))) | trained)
    embedders = dev_ranking.make_embedders(
      config.data, config, self.devices, tokenizer, model.embed
    )
    found = {}
    for number, task in enumerate(sorted(config.tasks)):
      columns = [number] if config.method.startswith('nir_') else []
      for name in (nir_sets.IN_DOMAIN[task], nir_sets.OUT_OF_DOMAIN[task]):
        queries, passages, qrels = self.retrieval_set(name)
        vectors = {}
        for side, texts in (('query', queries), ('passage', passages)):
          rows = tokenizer.encode(list(texts.values()), config.data[f'{side}_max_length'])[0]
          given = [np.full(len(rows), one, np.int32) for one in columns]
          vectors[side] = embedders[side](params, rows, columns=given)
        ids_at = best.ids_of(list(passages))
        top = exact.search(vectors['query'], vectors['passage'], 10, ids_at=ids_at)
        found |= ranks(name, queries, passages, top, qrels)
    return found


def ranks(name, queries, passages, top, qrels):
  """{set/measure: scores of each judged query}; 0 where nothing was found."""
  ids = list(passages)
  rankings = {
    query: {ids[row]: float(score) for row, score in zip(rows, scores, strict=True) if row >= 0}
    for query, rows, scores in zip(queries, top.rows.tolist(), top.scores.tolist(), strict=True)
  }
  run = trec.run_from_dict({query: rows for query, rows in rankings.items() if rows})
  found = measures.measure(run, qrels, list(nir_tables.MEASURES))['per_query']
  return {
    f'{name}/{measure}': np.array([found[measure][query] for query in qrels])
    for measure in nir_tables.MEASURES
  }


if __name__ == '__main__':
  main()
