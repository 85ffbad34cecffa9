"""Six ways to pretrain a backbone from scratch, compared by retrieval.

    python experiments/pretraining.py --data=../shared/data --out=runs/pretraining --size=mini \\
        --steps=2000 --seeds=0,1,2

DPTDR's Tables 6 to 8 and Condenser's Table 3 at a small size. For each seed, every method starts
from the same vocabulary and weights: random ones after `--base_steps` updates of plain MLM, since
the papers start from BERT or RoBERTa. (Directly from random weights, a contrastive loss over small
batches only makes all vectors alike.) All take the same number of updates with about the same
number of tokens (`--tokens`): methods with shorter texts get more passages. The rest is the same
for all: zero-shot retrieval, a prompt (DPT) and fine-tuning (FT) on SciFact and MedQuAD, FT with
100 and 1,000 queries, STS-b, alignment and uniformity. Finished stages are kept under `--out`: the
same command goes on where it stopped, and commands with other `--seeds` can share the work. At the
end, or with --table for the results so far, it prints the table and writes table.md, results.json
and medquad.png.
"""

import argparse
import json
import pathlib
import re

import jax
import numpy as np

import trials
from dprjax import Retriever
from dprjax.analysis import figures
from dprjax.analysis import statistics as analysis
from dprjax.data import documents, similarity, sources, text, views
from dprjax.formats import trec
from dprjax.formats.documents import read_documents
from dprjax.formats.report import Report
from dprjax.models import hub
from dprjax.retrieval import exact, measures
from dprjax.runtime import config as configs

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The config file with its argument, and overrides.
METHODS = {
  'MLM': ('condenser.py:mlm', []),
  'Condenser': ('condenser.py:condenser', []),
  # DPTDR's Table 7 compares these two.
  'coCondenser': ('condenser.py:cocondenser', []),
  'coCondenser, sentences': ('condenser.py:cocondenser,sentence', []),
  'RIP, sentences': ('rip.py:sentence', []),
  'RIP, spans': ('rip.py:span', []),
  'ICT': ('condenser.py:ict', []),
}
RANDOM, BASE = 'random weights', 'start'
PROMPTS = 'RIP on prompts'  # Table 6: on the backbone of plain MLM
SETS = ('scifact', 'medquad')
QUERIES = (100, 1000, 0)  # 0: all


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--data', required=True, help='the folder of data sets: arxiv, medquad, scifact, stsb, text'
  )
  parser.add_argument('--out', required=True)
  parser.add_argument('--size', default='mini', choices=sorted(hub.SIZES))
  parser.add_argument(
    '--base_steps', type=int, default=2000, help='updates of plain MLM before all methods'
  )
  parser.add_argument('--base_learning_rate', type=float, default=1e-3, help='of these updates')
  parser.add_argument('--steps', type=int, default=2000, help='updates of pretraining')
  parser.add_argument('--tokens', type=int, default=8192, help='about how many in an update')
  parser.add_argument(
    '--tune_steps', type=int, default=150, help='updates of DPT and FT, of 32 queries'
  )
  parser.add_argument(
    '--length', type=int, default=128, help='most tokens of a text in pretraining; spans have half'
  )
  parser.add_argument(
    '--learning_rate',
    type=float,
    default=5e-4,
    help='of pretraining; small models need more than 1e-4',
  )
  parser.add_argument(
    '--read', type=int, default=128, help='tokens of a passage in DPT, FT and retrieval'
  )
  parser.add_argument('--seeds', default='0', help='separated by commas')
  parser.add_argument('--vocab_size', type=int, default=8000)
  parser.add_argument(
    '--methods',
    default='',
    help='only these, by folder name, separated by commas: rip-sentences,ict',
  )
  parser.add_argument('--grad_cache', type=int, default=1, help='chunks, to save memory')
  parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
  parser.add_argument('--table', action='store_true', help='only make the table')
  args = parser.parse_args()
  experiment = Experiment(args)
  if not args.table:
    for seed in map(int, args.seeds.split(',')):
      for method in (BASE, *METHODS, PROMPTS, RANDOM):
        if slug(method) in (args.methods.split(',') if args.methods else [slug(method)]):
          experiment.run(method, seed)
  experiment.table()


def slug(method):
  return re.sub(r'[^a-z]+', '-', method.lower())


class Experiment:
  """All stages of all methods and seeds, each in its own folder."""

  def __init__(self, args):
    self.args = args
    self.data, self.out = (pathlib.Path(path).resolve() for path in (args.data, args.out))
    # General, medical and scientific text. Of the test sets' corpora it has only MedQuAD's.
    self.corpus = [
      self.data / 'arxiv',
      self.data / 'medquad' / 'corpus.jsonl',
      self.data / 'text' / 'enwiki',
      self.data / 'text' / 'wikitext-2',
      self.data / 'text' / 'gutenberg',
    ]
    trials.claim(
      self.out,
      {
        name: getattr(args, name)
        for name in (
          'size',
          'base_steps',
          'base_learning_rate',
          'steps',
          'tokens',
          'length',
          'learning_rate',
          'tune_steps',
          'read',
          'vocab_size',
        )
      },
    )

  def run(self, method, seed):
    """Everything for one method and seed, with a JSON file for each measurement."""
    name = f'{slug(method)}-{seed}'
    folder = self.out / name
    start, base = self.start(seed), self.out / f'start-{seed}' / 'backbone'
    rate = 7e-3 if method == PROMPTS else self.args.learning_rate
    if method == RANDOM:
      backbone, prompt = start, None
    elif method == BASE:
      backbone, prompt = base, None
      self.pretrain(
        'condenser.py:mlm',
        [],
        start,
        folder,
        seed,
        backbone,
        self.args.base_steps,
        self.args.base_learning_rate,
      )
    elif method == PROMPTS:
      backbone, prompt = self.out / f'mlm-{seed}' / 'backbone', folder / 'prompt.npz'
      self.pretrain(
        'rip.py:prompt',
        ['--config.prompt.length=16'],
        backbone,
        folder,
        seed,
        prompt,
        self.args.steps,
        rate,
      )
    else:
      backbone, prompt = folder / 'backbone', None
      config, overrides = METHODS[method]
      self.pretrain(config, overrides, base, folder, seed, backbone, self.args.steps, rate)
    results = folder / 'results'
    results.mkdir(parents=True, exist_ok=True)
    trials.once(results / 'looks.json', lambda: self.looks(backbone, prompt))
    for name in SETS:
      trials.once(
        results / f'{name}-zero-shot.json', lambda name=name: self.evaluate(backbone, prompt, name)
      )
      self.tuned('dptdr', name, 0, backbone, prompt, folder, seed)
      if method != PROMPTS:
        for queries in QUERIES:
          if not queries or queries < self.queries(name):
            self.tuned('ft', name, queries, backbone, None, folder, seed)

  def start(self, seed):
    """Random weights, and the vocabulary of all methods."""
    vocabulary, folder = self.out / 'vocabulary', self.out / f'random-{seed}'
    if not (vocabulary / 'tokenizer.json').exists():
      trials.say('training the vocabulary')
      text.train_wordpiece(
        (one.text for one in read_documents(self.corpus, Report())),
        self.args.vocab_size,
        vocabulary,
      )
    if not folder.exists():
      model = hub.scratch_config(self.args.size, text.load_tokenizer(vocabulary).vocab_size)
      hub.save_backbone(
        folder, model, hub.init_params(model, jax.random.key(seed)), source=vocabulary
      )
    return folder

  def passages(self, config):
    """The measured number of passages of this method's views that hold --tokens tokens."""
    knobs = config.pretrain
    store = documents.build_documents(
      self.corpus,
      text.load_tokenizer(self.out / 'vocabulary'),
      self.out / 'store' / 'documents',
      passage_length=knobs.passage_length,
    )
    batches, _ = views.make_view_batches(
      store,
      batch_size=256,
      views=knobs.views,
      unit=knobs.unit,
      span_length=knobs.span_length,
      max_length=knobs.max_length,
      buckets=knobs.buckets,
      seed=0,
    )
    drawn = [batches[step] for step in range(8)]
    real = np.mean(
      [sum(batch[key].sum() for key in batch if key.endswith('_mask')) / 256 for batch in drawn]
    )
    return max(16, round(self.args.tokens / real / 16) * 16)

  def pretrain(self, config, overrides, start, folder, seed, out, steps, rate):
    if out.exists():
      return
    flags = [
      f'--config={ROOT}/configs/{config}',
      f'--config.backbone.path={start}',
      f'--config.data.dir={",".join(map(str, self.corpus))}',
      f'--config.data.store={self.out}/store',
      f'--config.pretrain.max_length={self.args.length}',
      '--config.epochs=0.0',
      f'--config.pretrain.span_length={self.args.length // 2 - 2}',
      f'--config.pretrain.buckets=({self.args.length // 2}, {self.args.length})',
      f'--config.seed={seed}',
      f'--config.steps={steps}',
      f'--config.grad_cache={self.args.grad_cache}',
      f'--config.backbone.dtype={self.args.dtype}',
      '--config.backbone.unroll=0',
      '--config.log_every=50',
      '--config.checkpoint.every=500',
      f'--config.optim.learning_rate={rate}',
      *overrides,
    ]
    flags.append(f'--config.batch_size={self.passages(configs.parse(flags))}')
    trials.command('train', f'--workdir={folder}/pretrain', *flags)
    trials.command('export', f'--workdir={folder}/pretrain', f'--out={out}')

  def tuned(self, kind, name, queries, backbone, prompt, folder, seed):
    """Trains a prompt or the whole backbone on the queries of a set, and measures it."""
    label = {'dptdr': 'DPT', 'ft': 'FT'}[kind] + (f'-{queries}' if queries else '')
    workdir = folder / f'{name}-{label}'
    out = folder / 'models' / (f'{name}-{label}' + ('.npz' if kind == 'dptdr' else ''))

    def work():
      flags = [
        f'--config={ROOT}/configs/{kind}.py:beir',
        f'--config.backbone.path={backbone}',
        f'--config.data.dir={self.data}/{name}',
        '--config.pooling=cls',
        '--config.normalize=False',
        '--config.temperature=1.0',
        '--config.data.hold_out=0.0',
        '--config.data.query_max_length=64',
        f'--config.data.passage_max_length={self.args.read}',
        f'--config.data.max_queries={queries}',
        f'--config.data.store={self.out}/store/{name}-{queries}',
        '--config.epochs=0.0',
        f'--config.steps={self.args.tune_steps}',
        f'--config.seed={seed}',
        '--config.batch_size=32',
        '--config.backbone.unroll=0',
        '--config.log_every=50',
      ]
      # 1e-4 for small whole backbones, the paper's rate for prompts; the same for all methods.
      flags.append(f'--config.optim.learning_rate={1e-4 if kind == "ft" else 7e-3}')
      if prompt is not None:
        flags.append(f'--config.prompt.init_from={prompt}')
      if not out.exists():
        trials.command('train', f'--workdir={workdir}', *flags)
        trials.command('export', f'--workdir={workdir}', f'--out={out}')
      return self.evaluate(
        backbone if kind == 'dptdr' else out, out if kind == 'dptdr' else None, name
      )

    trials.once(folder / 'results' / f'{name}-{label}.json', work)

  def queries(self, name):
    return len(sources.load_dataset(sources.Source(str(self.data / name), 'beir', 'train')).queries)

  def evaluate(self, backbone, prompt, name):
    """Exact search of the test queries in the whole corpus by the first token's inner product."""
    dataset = sources.load_dataset(sources.Source(str(self.data / name), 'beir', 'test'))
    retriever = Retriever.load(
      backbone=str(backbone),
      prompt=prompt and str(prompt),
      pooling='cls',
      normalize=False,
      query_max_length=64,
      passage_max_length=self.args.read,
    )
    passages = list(dataset.passages)
    top = exact.search(
      retriever.encode([q.text for q in dataset.queries], 'query'),
      retriever.encode([p.text for p in passages]),
      100,
    )
    run = trec.run_from_rows(
      [q.id for q in dataset.queries], [p.id for p in passages], top.rows, top.scores
    )
    return measures.measure(run, dataset.qrels, ['nDCG@10', 'R@100'])['mean']

  def looks(self, backbone, prompt):
    """STS-b (frozen); alignment and uniformity on SciFact's test pairs, of unit and raw vectors."""
    retriever = Retriever.load(
      backbone=str(backbone),
      prompt=prompt and str(prompt),
      pooling='cls',
      normalize=False,
      query_max_length=64,
      passage_max_length=self.args.read,
    )
    pairs = similarity.read_pairs(self.data / 'stsb' / 'raw' / 'stsb-en-test.csv')
    dataset = sources.load_dataset(sources.Source(str(self.data / 'scifact'), 'beir', 'test'))
    texts = {passage.id: passage.text for passage in dataset.passages}
    matched = [
      (query.text, texts[passage_id])
      for query in dataset.queries
      for passage_id in dataset.positives(query.id)
    ]
    queries = retriever.encode([query for query, _ in matched], 'query')
    positives = retriever.encode([passage for _, passage in matched])
    others = retriever.encode(list(texts.values())[:2000])
    return {
      'STS-b': analysis.sts(pairs, lambda batch: retriever.encode(list(batch), 'query')),
      'alignment': analysis.alignment(analysis.unit(queries), analysis.unit(positives)),
      'uniformity': analysis.uniformity(analysis.unit(others)),
      'raw alignment': analysis.alignment(queries, positives),
      'raw uniformity': analysis.uniformity(others),
    }

  def table(self):
    """The mean of all measurements so far, and over several seeds half their range."""
    found = {}
    for path in sorted(self.out.glob('*/results/*.json')):
      method, seed = path.parts[-3].rsplit('-', 1)
      for key, value in json.loads(path.read_text()).items():
        what = key if path.stem == 'looks' else f'{path.stem} {key}'
        found.setdefault(method, {}).setdefault(what, {})[seed] = value
    columns = [
      'scifact-zero-shot nDCG@10',
      'scifact-DPT nDCG@10',
      'scifact-FT-100 nDCG@10',
      'scifact-FT nDCG@10',
      'medquad-zero-shot nDCG@10',
      'medquad-DPT nDCG@10',
      'medquad-FT-100 nDCG@10',
      'medquad-FT-1000 nDCG@10',
      'medquad-FT nDCG@10',
      'STS-b',
      'alignment',
      'uniformity',
      'raw alignment',
      'raw uniformity',
    ]
    rows = []
    for method in (RANDOM, BASE, *METHODS, PROMPTS):
      cells = []
      for column in columns:
        cells.append(trials.cell(found.get(slug(method), {}).get(column, {}).values()))
      rows.append([method, *cells])
    names = [column.replace(' nDCG@10', '').replace('-', ' ') for column in columns]
    made = trials.table(['', *names], rows)
    (self.out / 'table.md').write_text(made)
    (self.out / 'results.json').write_text(json.dumps(found, indent=2) + '\n')
    print(made)
    self.figure(found)

  def figure(self, found):
    """Bars of MedQuAD's columns, once all methods but prompts have them; whiskers span seeds."""
    values = {}
    for column in ('zero-shot', 'DPT', 'FT-100', 'FT-1000', 'FT'):
      scores = {
        method: list(found.get(slug(method), {}).get(f'medquad-{column} nDCG@10', {}).values())
        for method in (RANDOM, BASE, *METHODS)
      }
      if not all(scores.values()):
        return
      values[column.replace('-', ' ')] = {
        method: figures.Bar(float(np.mean(seeds)), min(seeds), max(seeds), False)
        for method, seeds in scores.items()
      }
    figures.bars(
      values,
      'nDCG@10 on MedQuAD',
      'FT 100: fine-tuned with 100 queries; whiskers: the range over seeds',
      self.out / 'medquad.png',
    )


if __name__ == '__main__':
  main()
