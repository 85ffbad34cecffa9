"""NIR-Prompt: prompts for many tasks on one backbone, against fine-tuning on the same batches.

    python experiments/nir_prompt.py --data=../shared/data --out=runs/nir-prompt

Retriever: document retrieval (SciFact), question answering (MedQuAD) and dialogue (DailyDialog),
tested on these and on Cranfield, QNLI and ClariQ; all-MiniLM-L6-v2, cosines over .05, 30 updates a
task of 16 queries with one negative of BM25. Reranker: these three, paraphrase (MSRP) and inference
(SICK), tested on STS-b, SNLI and MultiNLI too; the same encoder after 400 updates of masked
language modelling, 20 updates a task of 20 pairs. `experiments/nir_sets.py` says what was taken out
of which set. all-MiniLM-L6-v2 has seen SQuAD, MS MARCO, SNLI and MultiNLI when it was made.

All runs are made in this process, in the order of `PARTS`; `--part` makes some of them. Every run
leaves a line in OUT/ledger.jsonl, with the score of each test query, and the same command goes on
where it stopped. `--part=tables` makes tables, verdicts and figures of what is there
(OUT/results.md, OUT/*.png), and with `--docs=docs` puts those sections into
docs/experiments/nir-prompt.md whose runs are all there.
`--quick` is a dry run: 2 updates each, a few queries.

Verdicts follow rules that were fixed before the runs: the mean over seeds, averaged over test sets,
a paired bootstrap over each set's queries; a claim is *held* or *not* where the 95 % interval of
the difference leaves out 0 and all seeds agree in its sign, else *undecided*.
"""

import functools
import json
import pathlib
import shutil
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

import nir_sets
import nir_tables
import trials
from dprjax.data import pairs as labelled
from dprjax.data import sources, text
from dprjax.formats import trec
from dprjax.inference.embedder import place
from dprjax.methods import exporting, nir_prompt, pair_data, retrieval_data, training
from dprjax.methods import method as methods
from dprjax.methods.method import Parts
from dprjax.models import hub
from dprjax.models.template import Template
from dprjax.retrieval import best, bm25_index, exact, measures
from dprjax.runtime import config as configs
from dprjax.runtime import mesh, tree
from dprjax.runtime import workdir as workdirs

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENGTHS = 24, 48  # tokens of a first and of a second text
TASKS = {'retriever': nir_sets.RETRIEVAL, 'reranker': (*nir_sets.RETRIEVAL, *nir_sets.PAIRS)}
CANDIDATES, RERANKED = 10, 60  # of BM25, and of the queries of a set
QA_QUESTIONS = 200  # for Table 11
ARRANGEMENTS = ('random_task', 'balanced', 'random')


class Run(NamedTuple):
  """A kind of training.

  Attributes:
    stage: 'retriever' or 'reranker'.
    recipe: the argument of its config file.
    tasks: that it is trained on.
    prompts: the runs whose prompts it takes, 'mdm' for mdm-TASK; '': none.
    start: the run whose export is its backbone; '': the stage's own.
    updates: a task.
    options: others of its own.
    kept: what is exported: 'prompt', 'model', only the 'prompts' of a model, or nothing.
    seeds: at most so many.
    tested: whether its scores are measured.
  """

  stage: str
  recipe: str
  tasks: tuple[str, ...]
  prompts: str = ''
  start: str = ''
  updates: str = 'updates'
  options: tuple[str, ...] = ()
  kept: str = ''
  seeds: int = 1
  tested: bool = True


def runs():
  """All trainings by name."""
  found = {}
  for stage, every, seeds in (
    ('retriever', TASKS['retriever'], 2),
    ('reranker', TASKS['reranker'], 2),
  ):
    add = functools.partial(Run, stage)
    own = {} if stage == 'retriever' else {'updates': 'pair_updates'}
    rerank = stage == 'reranker'
    for task in every:
      found[f'{stage}/mdm-{task}'] = add(
        f'mdm={task}', (task,), kept='prompt', seeds=seeds, tested=False, **own
      )
      found[f'{stage}/ft-{task}'] = add(f'ft={task}', (task,), seeds=seeds, **own)
      if not rerank:
        found[f'{stage}/ft-mask-{task}'] = add(f'ft={task},mask', (task,), seeds=seeds)
    found[f'{stage}/ft'] = add('ft', every, seeds=seeds, **own)
    found[f'{stage}/ft-mark'] = add('ft,mark', every, seeds=seeds, **own)
    if not rerank:
      found[f'{stage}/ft-mask'] = add('ft,mask', every, seeds=seeds)
    found[f'{stage}/emm'] = add('emm', every, 'mdm', kept='model', seeds=seeds, **own)
    found[f'{stage}/manual'] = add('emm,manual', every, **own)
    free = ('template.fixed_layers=0',)
    for task in every:
      found[f'{stage}/free-{task}'] = add(
        f'mdm={task}', (task,), options=free, kept='prompt', tested=False, **own
      )
    found[f'{stage}/emm-free'] = add('emm', every, 'free', options=free, **own)
    if rerank:
      for task in every:
        found[f'{stage}/hybrid-{task}'] = add(
          f'mdm={task},hybrid', (task,), kept='prompt', tested=False, **own
        )
      found[f'{stage}/emm-hybrid'] = add('emm,hybrid', every, 'hybrid', **own)
    for name in ('random',) if rerank else ARRANGEMENTS:
      # A batch that the tasks divide.
      size = ('batch_size=15',) if name == 'balanced' else ()
      found[f'{stage}/emm-{name}'] = add(
        'emm', every, 'mdm', options=(f'arrangement={name}', *size), **own
      )
    if rerank:
      continue
    for task in every:  # each left out in turn
      others = tuple(name for name in every if name != task)
      found[f'{stage}/emm-without-{task}'] = add('emm', others, 'mdm', kept='model', tested=False)
      found[f'{stage}/ft-without-{task}'] = add('ft', others, kept='model', tested=False)
      few = {'updates': 'few_updates', 'options': (f'tasks.{task}.data.max_queries=32',)}
      found[f'{stage}/few-ft-{task}'] = add(f'ft={task}', (task,), **few)
      found[f'{stage}/few-ft-after-{task}'] = add(
        f'ft={task}', (task,), start=f'ft-without-{task}', **few
      )
      for word, argument, kept in (
        ('unfused', 'unfused', ''),
        ('fused', 'continuous', 'prompts'),
        ('frozen', 'frozen', 'prompt'),
      ):
        found[f'{stage}/few-{word}-{task}'] = add(
          f'adapt={task},{argument}', (task,), start=f'emm-without-{task}', kept=kept, **few
        )
  return found


RUNS = runs()
PARTS = {
  'zero': ('retriever/bm25', 'retriever/zero-mean', 'retriever/zero-cls', 'retriever/zero-mask'),
  'retriever': tuple(
    name for name, run in RUNS.items() if run.stage == 'retriever' and run.seeds > 1
  ),
  'retriever-more': tuple(
    name
    for name, run in RUNS.items()
    if run.stage == 'retriever' and run.seeds == 1 and 'without' not in name and 'few' not in name
  ),
  'new-task': tuple(name for name in RUNS if 'without' in name or 'few-' in name),
  'mlm': ('reranker/mlm', 'reranker/head-alone'),
  'reranker': (
    'reranker/bm25',
    'reranker/untrained',
    *(name for name, run in RUNS.items() if run.stage == 'reranker'),
  ),
}


def main():
  parser = trials.parser(__doc__, PARTS, '0,1')
  parser.add_argument(
    '--pair_seeds', type=int, default=1, help='how many of them for the rerankers, 1 or 2'
  )
  parser.add_argument('--updates', type=int, default=30, help='of a retriever, a task')
  parser.add_argument('--pair_updates', type=int, default=20, help='of a reranker, a task')
  parser.add_argument('--few_updates', type=int, default=10, help='of a new task')
  parser.add_argument('--mlm_updates', type=int, default=400, help='of masked language modelling')
  parser.add_argument('--test', type=int, default=300, help='most queries and pairs of a test set')
  parser.add_argument('--quick', action='store_true', help='a dry run')
  parser.add_argument('--only', help='runs whose names hold this text')
  args = trials.begin(parser, PARTS)
  if args.quick:
    args.updates = args.pair_updates = args.few_updates = args.mlm_updates = 2
    args.test = 5
  experiment = Experiment(args)
  for part in args.part.split(','):
    for name in PARTS.get(part, ()):
      if not args.only or args.only in name:
        experiment.make(name)
  nir_tables.write(experiment.out, args.docs)


class Experiment:
  """All runs, each in its own folder, and what was measured of them."""

  def __init__(self, args):
    self.args = args
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.data, self.out = (pathlib.Path(path).resolve() for path in (args.data, args.out))
    names = ('backbone', 'updates', 'pair_updates', 'few_updates', 'mlm_updates', 'test')
    trials.claim(self.out, {name: getattr(args, name) for name in names})
    self.sets = self.out / 'sets'
    self.counts = nir_sets.prepare(self.data, self.sets)
    self.devices = mesh.make_mesh({'data': -1})

  def make(self, name):
    """A run of a name, or all its seeds."""
    run = RUNS.get(name)
    count = run.seeds if run else 1
    if name.startswith('reranker/'):
      count = min(count, self.args.pair_seeds)
    for seed in self.seeds[:count] if run else [0]:
      folder = self.out / 'runs' / f'{name}-{seed}'
      if name.endswith('bm25'):
        work = functools.partial(self.rank_words, name)
      elif 'zero' in name:
        work = functools.partial(self.zero_shot, name)
      elif name in PARTS['mlm']:
        work = functools.partial(self.pretrain, name)
      elif name == 'reranker/untrained':
        work = self.untrained
      else:
        work = functools.partial(self.train, name, run, seed)
      trials.measure(self.out, name, seed, functools.partial(work, folder))

  # Training.

  def backbone(self, stage, seed=0, start=''):
    """The folder of the encoder that a run begins with."""
    if start:
      return self.out / 'runs' / f'{stage}/{start}-{seed}' / 'export'
    if stage == 'retriever':
      return self.args.backbone
    self.make('reranker/mlm')
    return self.out / 'runs' / 'reranker/mlm-0' / 'export'

  def flags(self, run, seed):
    """What a run is trained with."""
    updates = getattr(self.args, run.updates)
    steps = updates * len(run.tasks)
    marks = '-mark' if 'mark' in run.recipe else ''
    recipe = run.recipe
    if recipe.split(',')[0] in ('ft', 'emm'):  # the tasks by name
      first, *rest = recipe.split(',')
      recipe = ','.join([f'{first}={"+".join(run.tasks)}', *rest])
    size = 16 if run.stage == 'retriever' else 20
    options = {
      'backbone.path': self.backbone(run.stage, seed, run.start),
      'data.query_max_length': LENGTHS[0],
      'data.passage_max_length': LENGTHS[1],
      'data.query_buckets': (LENGTHS[0],),
      'data.passage_buckets': (LENGTHS[1],),
      'data.token_cache': f'{self.out}/token_cache{marks}',
      'epochs': 0.0,
      'steps': steps,
      'batch_size': size,
      'eval.every': max(steps // 2, 1),
      'eval.corpus_limit': 300,
      'cross_encoder.candidates': CANDIDATES,
      'cross_encoder.dev_queries': 30,
      'checkpoint.every': steps,
      'log_every': 10,
      'seed': seed,
    }
    if self.args.quick:
      options['eval.every'] = 10**6
      options['eval.corpus_limit'] = 20
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
        made = f'{run.stage}/{run.prompts}-{task}'
        self.make(made)
        options[f'tasks.{task}.prompt'] = self.out / 'runs' / f'{made}-{seed}' / 'prompt.npz'
    return [
      f'--config={ROOT}/configs/nir_{run.stage}.py:{recipe}',
      *(f'--config.{name}={value}' for name, value in options.items()),
      *(f'--config.{option}' for option in run.options),
    ]

  def train(self, name, run, seed, folder):
    """Trains, measures, exports, and forgets the checkpoints."""
    flags = self.flags(run, seed)
    config = configs.parse(flags)
    began = time.monotonic()
    workdir = folder / 'training'
    result = training.train(config, workdir)
    if not result.done:
      sys.exit('stopped; the same command goes on')
    trained_s = time.monotonic() - began
    workdir = workdirs.trained(workdir)  # of weights of prompts the best rate
    found = {'best': result.best, 'best_step': result.best_step}
    if run.kept:
      out = folder / ('prompt.npz' if run.kept == 'prompt' else 'export')
      if not out.exists():
        exporting.export(workdir, out, force=True)
      if run.kept == 'prompts':
        (out / 'model.safetensors').unlink()
    if run.tested:
      found['scores'] = self.test(config, workdir, result.best_step or result.step)
    shutil.rmtree(workdir / 'checkpoints')
    return found | {
      'train_s': round(trained_s),
      'test_s': round(time.monotonic() - began - trained_s),
      'config': [flag.replace(str(self.out), 'OUT') for flag in flags],
    }

  def pretrain(self, name, folder):
    """Masked language modelling of all weights, or of a fresh head alone."""
    alone = name.endswith('head-alone')
    steps = self.args.mlm_updates
    source = ','.join(map(str, nir_sets.text_inputs(self.data, self.sets)))
    options = {
      'backbone.path': self.args.backbone,
      'data.dir': source,
      'data.token_cache': f'{self.out}/token_cache-mlm',
      'pretrain.max_length': 64,
      'pretrain.buckets': (64,),
      'pretrain.passage_length': 62,
      'batch_size': 32,
      'grad_cache': 1,
      'epochs': 0.0,
      'steps': steps,
      'optim.learning_rate': 3e-4,
      'checkpoint.every': steps,
      'log_every': max(steps // 40, 1),
      'trainable': "('head/.*',)" if alone else "('backbone/.*', 'head/.*')",
    }
    flags = [
      f'--config={ROOT}/configs/condenser.py:mlm',
      *(f'--config.{option}={value}' for option, value in options.items()),
    ]
    workdir = folder / 'training'
    training.train(configs.parse(flags), workdir)
    if not alone and not (folder / 'export').exists():
      exporting.export(workdir, folder / 'export')
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    shutil.rmtree(workdir / 'checkpoints')
    accuracy = [row['mlm_accuracy'] for row in rows if 'mlm_accuracy' in row]
    return {'mlm_accuracy': float(np.mean(accuracy[-5:]))}

  # Testing.

  @functools.cache  # noqa: B019
  def retrieval_set(self, name):
    """(queries, passages, judgements), the texts by id."""
    dataset = sources.load_dataset(sources.Source(str(self.sets / 'test' / name), 'beir', 'test'))
    queries = {query.id: query.text for query in dataset.queries[: self.args.test]}
    passages = {passage.id: passage.text for passage in dataset.passages}
    if self.args.quick:
      judged = {row for query in queries for row in dataset.qrels[query]}
      others = [row for row in passages if row not in judged][:20]
      passages = {row: passages[row] for row in (*judged, *others)}
    return queries, passages, {query: dataset.qrels[query] for query in queries}

  @functools.cache  # noqa: B019
  def pair_set(self, name):
    return labelled.read_pairs(labelled.PairSource(str(self.sets / 'test' / name), 'test'))[
      : max(self.args.test, 20) if self.args.quick else None
    ]

  @functools.cache  # noqa: B019
  def candidates(self, name):
    """BM25's passages of a set's first queries."""
    queries, passages, qrels = self.retrieval_set(name)
    queries = dict(list(queries.items())[:RERANKED])
    index = bm25_index.build(list(passages), list(passages.values()))
    top = index.search(list(queries.values()), CANDIDATES)
    return queries, list(passages), top, {query: qrels[query] for query in queries}

  def test(self, config, workdir, step):
    """The scores of every query and pair, by set and measure."""
    method = methods.load(config.method)
    backbone = hub.load_backbone(str(configs.backbone_path(config, workdir)), heads=method.parts)
    trained = trials.restore(workdir, backbone, step)
    return self.scores(config, method, backbone, trained)

  def scores(self, config, method, backbone, trained):
    return self.tester(config, method, backbone, trained).measure()

  def tester(self, config, method, backbone, trained):
    """A model with its trained parameters, for the test sets of its tasks."""
    tokenizer = text.load_tokenizer(backbone.path)
    model = method.build(config, backbone.config, self.devices, tokenizer)
    parts = Parts(backbone.params, backbone.heads, sha256=backbone.sha256)
    params = tree.flatten(model.init(parts, jax.random.key(0))) | trained
    return Tester(self, config, model, place(self.devices, params), tokenizer)

  def zero_shot(self, name, folder):
    """The encoder as it is."""
    pooling = name.rpartition('-')[2]
    recipe = 'ft,mask' if pooling == 'mask' else 'ft'
    run = Run('retriever', recipe, nir_sets.RETRIEVAL)
    config = configs.parse([*self.flags(run, 0), f'--config.pooling={pooling}'])
    method = methods.load(config.method)
    backbone = hub.load_backbone(self.args.backbone)
    return {'scores': self.scores(config, method, backbone, {})}

  def untrained(self, folder):
    """The manual templates before any training, and how likely yes and no are in them."""
    run = Run('reranker', 'emm,manual', TASKS['reranker'], updates='pair_updates')
    found = {}
    for way in ('logit', 'probability'):
      config = configs.parse([*self.flags(run, 0), f'--config.template.score={way}'])
      method = methods.load(config.method)
      backbone = hub.load_backbone(config.backbone.path, heads=method.parts)
      tester = self.tester(config, method, backbone, {})
      found[way] = np.concatenate(
        [
          tester.score(name, task)[0]
          for task in nir_sets.PAIRS
          for name in (nir_sets.IN_DOMAIN[task], *nir_sets.OUT_OF_DOMAIN[task])
        ]
      ).astype(np.float64)
      if way == 'logit':
        scores = tester.measure()
    # From log P(yes) / P(no) and P(yes) - P(no).
    ratio = np.exp(found['logit'])
    no = found['probability'] / (ratio - 1)
    return {
      'P(yes)': float(np.mean(no * ratio)),
      'P(no)': float(np.mean(no)),
      'scores': scores,
    }

  def rank_words(self, name, folder):
    """BM25: of whole corpora, or of the reranker's candidates."""
    found = {}
    for test_set in [
      *(nir_sets.IN_DOMAIN[task] for task in nir_sets.RETRIEVAL),
      *(some for task in nir_sets.RETRIEVAL for some in nir_sets.OUT_OF_DOMAIN[task]),
    ]:
      if name.startswith('reranker'):
        queries, ids, top, qrels = self.candidates(test_set)
      else:
        queries, passages, qrels = self.retrieval_set(test_set)
        ids = list(passages)
        index = bm25_index.build(ids, list(passages.values()))
        top = index.search(list(queries.values()), 10)
      found[f'{test_set}/RR@10'] = reciprocal_ranks(list(queries), ids, top, qrels)
    return {'scores': found}


class Tester:
  """Scores test sets by one model."""

  def __init__(self, experiment, config, model, params, tokenizer):
    self.experiment, self.config, self.params = experiment, config, params
    self.tokenizer, self.numbered = tokenizer, config.method.startswith('nir_')
    self.numbers = {name: number for number, name in enumerate(sorted(config.tasks))}
    if config.method in ('dpr', 'nir_retriever'):
      self.embedders = retrieval_data.make_embedders(
        config.data, config, experiment.devices, tokenizer, model
      )
      return
    template = Template.pair(*tokenizer.pair_format)
    if self.numbered:
      around = nir_prompt.around(config, ('pair',), nir_prompt.read_files(config), tokenizer)
      template = max(around['pair'], key=lambda one: one.num_tokens)
    longest = sum(LENGTHS) + template.num_tokens
    self.scorer = pair_data.Scorer(model, config, experiment.devices, tokenizer, template, longest)

  def measure(self):
    """The scores of every query and pair of the tasks' test sets, by set and measure."""
    tested = {
      name: task
      for task in self.config.tasks
      for name in (nir_sets.IN_DOMAIN[task], *nir_sets.OUT_OF_DOMAIN[task])
    }
    if self.config.method in ('dpr', 'nir_retriever'):
      return {f'{name}/RR@10': self.search(name, task) for name, task in tested.items()}
    found = {}
    for name, task in tested.items():
      if task in nir_sets.RETRIEVAL:
        found[f'{name}/RR@10'] = self.rerank(name, task)
      else:
        found[f'{name}/accuracy'] = self.classify(name, task)
    if {'qa', 'paraphrase'} <= set(self.config.tasks):
      found |= self.discriminate()
    return found

  def tokens(self, texts, side, task):
    prefix = self.config.tasks[task].data[f'{side}_prefix']
    length = self.config.data[f'{side}_max_length']
    return self.tokenizer.encode([prefix + one for one in texts], length)[0]

  def search(self, name, task):
    """The reciprocal rank of each query in the whole corpus."""
    queries, passages, qrels = self.experiment.retrieval_set(name)
    vectors = {}
    for side, texts in (('query', queries), ('passage', passages)):
      rows = self.tokens(list(texts.values()), side, task)
      number = [np.full(len(rows), self.numbers[task], np.int32)] if self.numbered else []
      vectors[side] = self.embedders[side](self.params, rows, columns=number)
    k, ids_at = min(10, len(passages)), best.ids_of(list(passages))
    top = exact.search(vectors['query'], vectors['passage'], k, ids_at=ids_at)
    return reciprocal_ranks(list(queries), list(passages), top, qrels)

  def pairs(self, first, second, task):
    """Scores of pairs of texts."""
    packed = self.scorer.pack(
      self.tokens(first, 'query', task), self.tokens(second, 'passage', task)
    )
    return self.scorer(self.params, packed, self.numbers[task] if self.numbered else None)

  def rerank(self, name, task):
    """The reciprocal rank of each query among BM25's passages."""
    queries, ids, top, qrels = self.experiment.candidates(name)
    passages = self.experiment.retrieval_set(name)[1]
    texts = list(queries.values())
    places = [(i, row) for i, rows in enumerate(top.rows.tolist()) for row in rows if row >= 0]
    scores = self.pairs(
      [texts[i] for i, _ in places], [passages[ids[row]] for _, row in places], task
    )
    rankings = {query: {} for query in queries}
    names = list(queries)
    for (i, row), score in zip(places, scores.tolist(), strict=True):
      rankings[names[i]][ids[row]] = score
    return ranks(rankings, qrels)

  def score(self, name, task):
    """The scores of a set of pairs, and whether each is one of yes."""
    found = self.experiment.pair_set(name)
    scores = self.pairs([one.first for one in found], [one.second for one in found], task)
    return scores, np.array([one.label == 1 for one in found])

  def classify(self, name, task):
    """Whether each pair is judged right."""
    scores, right = self.score(name, task)
    return ((scores > 0) == right).astype(np.float64)

  def discriminate(self):
    """Table 11: of QA's questions, whether the passage that answers wins against the question
    itself under QA's prompt, and the question under paraphrase's.
    """
    queries, passages, qrels = self.experiment.retrieval_set(nir_sets.IN_DOMAIN['qa'])
    questions = list(queries.items())[:QA_QUESTIONS]
    own = [one for _, one in questions]
    answers = [passages[max(qrels[query], key=qrels[query].get)] for query, _ in questions]
    found = {}
    for task, sign in (('qa', 1), ('paraphrase', -1)):
      margin = self.pairs(own, answers, task) - self.pairs(own, own, task)
      wins = (sign * margin > 0).astype(np.float64)
      found[f'apart/{task}'] = np.where(margin == 0, 0.5, wins)
    return found


def reciprocal_ranks(query_ids, passage_ids, top, qrels):
  rankings = {
    query: {
      passage_ids[row]: float(score) for row, score in zip(rows, scores, strict=True) if row >= 0
    }
    for query, rows, scores in zip(query_ids, top.rows.tolist(), top.scores.tolist(), strict=True)
  }
  return ranks(rankings, qrels)


def ranks(rankings, qrels):
  """RR@10 of each judged query; 0 where nothing was found."""
  found = measures.measure(
    trec.run_from_dict({query: rows for query, rows in rankings.items() if rows}), qrels, ['RR@10']
  )
  return np.array([found['per_query']['RR@10'][query] for query in qrels])


if __name__ == '__main__':
  main()
