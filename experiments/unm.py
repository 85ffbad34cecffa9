"""Claims of DPTDR and Condenser on mined negatives, and of DPTDR on RIP, at equal tuning.

    python experiments/unm.py --data=../shared/data --out=runs/unm

All start from all-MiniLM-L6-v2, on sets where BM25 leaves room: SciFact, MedQuAD with 8,000
passages, and MedQuAD with questions cut to keywords, one of which is missing (1,000 training
queries each, or all). A prompt for both sides (DPT) and fine-tuning (FT) see 8 queries in an
update, as Condenser on MS MARCO. Negatives are those of the batch, and 7 for each query (Table 9):

- bm25: from the 100 passages that BM25 ranks first;
- undenoised: from these and the first 100 of a first retriever, a prompt trained on the negatives
  of bm25;
- denoised: half as undenoised, half those of them that a cross-encoder finds irrelevant;
- distilled: the same, but the cross-encoder also learns a fused ranking (the sum of z-scores of
  BM25 and of the first retriever), by a KL divergence over the passages of a query.

The cross-encoder that judges a query has not seen it: two are trained, on half of the training
queries each. A table compares their rankings of held-out queries with BM25, with the fused ranking
and with a random order, which results from one answer for all passages. With the negatives of the
batch and with denoised ones, both also start from the encoder after RIP (Table 3).

Distilled cross-encoders are tried on medquad-2000 (2,000 training queries, 4,000 passages), beside
others. The rule was set before the runs: prompts are trained on their negatives only if they rank
above the fused ranking, because else the retrievers alone denoise as well. `--only_judges` trains
no prompts.

Each system has three learning rates; held-out training queries choose one with the first seed. It
is trained until their score no longer rises, at most 300 updates. Mining is done once for a set,
and RIP once, with one seed. Runs, seeds, the ledger (experiments/ledgers/unm.jsonl), `--part` and
`--ways` are as in experiments/gain.py. Verdicts were fixed before the runs: those of trials.py.
"""

import numpy as np

import adapted
import gain_sets
import mining
import systems
import trials
from dprjax.base import files
from dprjax.exports import exporting
from dprjax.models import artifact
from dprjax.retrieval import measures
from dprjax.text import seen, trec
from dprjax.text.qrels import read_qrels, write_qrels
from dprjax.text.texts import read_texts

SETS = {
  'scifact': gain_sets.Setting('scifact', 809),
  'medquad': gain_sets.Setting('medquad-8000', 1000),
  'medquad-cut': gain_sets.Setting('medquad-cut', 1000),
  'medquad-2000': gain_sets.Setting('medquad-large', 2000),
}
NEGATIVES = 7
HALF, HALVES = 'train-half-', (0, 1)  # splits of the training queries
FEWER = (*systems.PLAIN, 'batch_size=8')  # queries, of many passages each
FIRST_RATE = 3e-2  # of the first retriever
JUDGED, ORDERS = 20, 10  # passages of a query that judge a cross-encoder; random orders of them
# Options of a cross-encoder. With 7 negatives at 5e-5 it answers the prior for 150 updates.
RERANKER = (
  'cross_encoder.loss=pointwise',
  'negatives=3',
  'mix.undenoised=0.5',
  'mix.random=0.5',
  'optim.learning_rate=2e-4',
)
DISTILLED = (*RERANKER, 'distillation.loss=kl', 'distillation.weight=0.5')
POOLS = {
  'batch': (),
  'bm25': (f'negatives={NEGATIVES}',),
  'undenoised': (f'negatives={NEGATIVES}',),
  'denoised': (f'negatives={NEGATIVES}', 'mix.undenoised=0.5', 'mix.denoised=0.5'),
  'distilled': (f'negatives={NEGATIVES}', 'mix.undenoised=0.5', 'mix.denoised=0.5'),
}
JUDGES = ('denoised', 'distilled')  # pools of cross-encoders
KINDS = {
  'dpt': (
    'DPT',
    (7e-3, 3e-2, 0.1),
    FEWER,
  ),
  'ft': (
    'FT',
    (2e-5, 5e-5, 1e-4),
    (*FEWER, *systems.FINE_TUNED),
  ),
}
AFTER_RIP = ('batch', 'denoised')
REPORTED = ('dpt.denoised.rip', 'ft.denoised.rip')  # DPTDR Table 3


def make(kind, pool, start):
  label, rates, options = KINDS[kind]
  pool_label = {'bm25': 'BM25'}.get(pool, pool)
  label = f'{label}, {pool_label}' + (', after RIP' if start else '')
  options = (*options, *POOLS[pool])
  return systems.Way(label, 'dptdr.py:beir,both', rates, options, keeps='', start=start)


WAYS = {f'{kind}.{pool}': make(kind, pool, '') for kind in KINDS for pool in POOLS} | {
  f'{kind}.{pool}.rip': make(kind, pool, 'rip') for kind in KINDS for pool in AFTER_RIP
}
CLAIMS = (
  ('D1: FT above DPT, plain', 'ft.batch', 'dpt.batch'),
  ('D2: FT above DPT, with RIP and UNM', 'ft.denoised.rip', 'dpt.denoised.rip'),
  ('D2: RIP and UNM help DPT', 'dpt.denoised.rip', 'dpt.batch'),
  ('RIP helps DPT', 'dpt.batch.rip', 'dpt.batch'),
  # The separate claims on RIP and on UNM were added after the runs.
  ('RIP helps DPT, with denoised negatives', 'dpt.denoised.rip', 'dpt.denoised'),
  ('denoised negatives help DPT, without RIP', 'dpt.denoised', 'dpt.batch'),
  ('negatives of BM25 help DPT', 'dpt.bm25', 'dpt.batch'),
  ('D9: negatives of several retrievers above those of BM25, DPT', 'dpt.undenoised', 'dpt.bm25'),
  ('C6: negatives of several retrievers above those of BM25, FT', 'ft.undenoised', 'ft.bm25'),
  ('D10: denoised ones above un-denoised ones, DPT', 'dpt.denoised', 'dpt.undenoised'),
  ('denoised ones above un-denoised ones, FT', 'ft.denoised', 'ft.undenoised'),
)


def parser():
  made = adapted.parser(__doc__, SETS, '0,1,2', WAYS)
  made.add_argument('--reranker_steps', type=int, default=400, help='updates of a cross-encoder')
  made.add_argument(
    '--only_judges', action='store_true', help='only the cross-encoders that --ways need'
  )
  return made


def main():
  Experiment(trials.begin(parser(), SETS)).go()


class Experiment(adapted.Runs):
  """Systems by negatives, and the mining before them."""

  name = 'unm'
  sets = SETS
  ways = WAYS
  claims = CLAIMS
  title = 'Fine-tuning leads on SciFact; prompts keep up on MedQuAD'
  fixed = (*adapted.Runs.fixed, 'reranker_steps')

  @property
  def columns(self):
    made = {line['run'].partition('/')[2] for line in trials.ledger(self.out)}
    return [way for way in WAYS if way in made]

  def backbone(self, way, seed):
    if way and self.ways[way].start:
      return str(self.rip(0, 'rip', 'rip.py:sentence', 3e-5))
    return super().backbone(way, seed)

  def more_options(self, name, way, seed):
    pool = way.split('.')[1]
    return () if pool == 'batch' else (f'data.mined_negatives={self.mined(name, pool)}',)

  @property
  def pair_length(self):
    return f'--max_length={systems.QUERY_LENGTH + self.args.length}'

  @property
  def arithmetic(self):
    return f'--dtype={self.args.dtype}'

  def train(self, name, ways):
    if any(way.split('.')[1] in JUDGES for way in ways):
      self.first(name)  # while the run that it is has not been tested and forgotten
    if not self.args.only_judges:
      super().train(name, ways)
      return
    for pool in dict.fromkeys(way.split('.')[1] for way in ways):
      for half in HALVES if pool in JUDGES else ():
        self.reranker(name, half, pool)

  # Mining, once for a set. Existing files are kept.

  def mined(self, name, pool):
    """The training file of a pool."""
    out = self.out / 'mined' / f'{name}-{pool}.jsonl'
    if out.exists():
      return out
    qrels = self.folder(name) / 'qrels' / 'train.tsv'
    runs = [f'--run=bm25={self.words(name)}']
    if pool != 'bm25':
      runs.append(f'--run=first={self.first(name)}')
    if pool in JUDGES:
      parts = []
      for half in HALVES:
        parts.append(out.with_name(f'{name}-{pool}-half-{half}.jsonl'))
        reranker = self.reranker(name, half, pool)
        flags = (f'--reranker={reranker}', self.pair_length, self.arithmetic)
        self.mine(name, self.half(name, half), runs, parts[-1], *flags)
      with files.atomic_write(out) as file:
        file.writelines(part.read_text() for part in parts)
    else:
      self.mine(name, qrels, runs, out)
    return out

  def mine(self, name, qrels, runs, out, *flags):
    """A training file for the queries that are judged in a file."""
    mining.mine(self.folder(name), qrels, runs, out, *flags)

  def words(self, name):
    """The BM25 run of the training queries."""
    return mining.words(self.folder(name), self.out / 'mined' / f'{name}-bm25.trec')

  def first(self, name):
    """The run of the first retriever for the training queries."""
    out, folder = self.out / 'mined' / f'{name}-first.trec', self.folder(name)
    if not out.exists():
      run = (name, 'dpt.bm25', FIRST_RATE, 0)
      workdir = self.workdir(*run)
      self.run(*run)
      if not workdir.exists():  # it was tested and forgotten, or ran on another machine
        systems.train(self.config(*run), workdir)
      vectors, prompt = (self.out / 'mined' / f'{name}-first{suffix}' for suffix in ('', '.npz'))
      exporting.export(workdir, prompt, force=True)
      model = (f'--backbone={self.args.backbone}', f'--prompt={prompt}')
      inputs = {
        'passage': (f'--input={folder}/corpus.jsonl',),
        'query': (f'--input={folder}/queries.jsonl', f'--qrels={folder}/qrels/train.tsv'),
      }
      for side, given in inputs.items():
        given = (*given, self.arithmetic, f'--out={vectors}-{side}')
        trials.command('encode', *model, f'--side={side}', *given)
      folders = (f'--corpus={vectors}-passage', f'--queries={vectors}-query')
      trials.command('search', *folders, '--index=exact', f'--k={mining.DEPTH}', f'--out={out}')
    return out

  def half(self, name, number):
    """The judgements of half of the training queries, by the hash: a split of the setting."""
    judged = self.folder(name) / 'qrels'
    out = judged / f'{HALF}{number}.tsv'
    if not out.exists():
      qrels = read_qrels(judged / 'train.tsv')
      order = sorted(qrels, key=gain_sets.hashed)[number :: len(HALVES)]
      write_qrels(out, {query: qrels[query] for query in order})
    return out

  def fused(self, name):
    """The fused run of BM25 and of the first retriever for the training queries."""
    out = self.out / 'mined' / f'{name}-fused.trec'
    if not out.exists():
      runs = (f'--run=bm25={self.words(name)}', f'--run=dense={self.first(name)}')
      trials.command('fuse', *runs, '--method=zscore', f'--out={out}')
    return out

  def reranker(self, name, half, pool):
    """A cross-encoder for half of the training queries, trained on the other ones."""
    out = self.out / 'mined' / f'{name}-{pool}-reranker-{half}'
    if not out.exists():
      (other,) = set(HALVES) - {half}
      negatives = out.with_suffix('.jsonl')
      runs = (f'--run=bm25={self.words(name)}', f'--run=first={self.first(name)}')
      self.mine(name, self.half(name, other), runs, negatives)
      workdir = out.with_name(f'{out.name}-run')
      systems.train(self.reranker_config(name, other, negatives, pool), workdir)
      exporting.export(workdir, out)
    run = f'rerankers/{name}' + (f', {pool}' if pool == 'distilled' else '')
    trials.measure(self.out, run, half, lambda: self.judge(name, half, out, pool))
    if self.args.only_judges:
      new = f'{run}, new to the first retriever'
      trials.measure(self.out, new, half, lambda: self.judge(name, half, out, pool, new=True))
    return out

  def reranker_config(self, name, half, negatives, pool):
    """The config of a cross-encoder for half of the training queries."""
    options = RERANKER
    if pool == 'distilled':
      options = (*DISTILLED, f'distillation.scores={self.fused(name)}')
    return systems.parse(
      'cross_encoder.py:beir',
      [
        f'backbone.path={self.args.backbone}',
        f'backbone.dtype={self.args.dtype}',
        'backbone.unroll=0',
        f'data.dir={self.folder(name)}',
        f'data.mined_negatives={negatives}',
        f'data.train_split={HALF}{half}',
        f'data.query_max_length={systems.QUERY_LENGTH}',
        f'data.passage_max_length={self.args.length}',
        'data.folds=0',
        'data.hold_out=0.0',
        'batch_size=8',
        'epochs=0.0',
        f'steps={self.args.reranker_steps}',
        'seed=0',
        *options,
      ],
    )

  def judge(self, name, half, reranker, pool, new=False):
    """Scores of rankings of the same passages, for queries that the cross-encoder has not seen;
    ``new``: for those that the first retriever was not trained on either.
    """
    folder, qrels = self.folder(name), read_qrels(self.half(name, half))
    given = (f'--{kind}={folder}/{kind}.jsonl' for kind in ('queries', 'corpus'))
    words, out = (
      self.out / 'mined' / f'{name}-{made}-{half}.trec' for made in ('bm25', f'{pool}-reranked')
    )
    with files.atomic_write(words) as file:
      rows = self.words(name).read_text().splitlines(keepends=True)
      file.writelines(row for row in rows if row.split()[0] in qrels)
    if not out.exists():
      flags = (f'--run={words}', f'--depth={JUDGED}', self.pair_length, self.arithmetic)
      trials.command('rerank', f'--backbone={reranker}', *given, *flags, f'--out={out}')
    first, reranked = trec.read_run(words).top(JUDGED), trec.read_run(out)
    if new:
      self.first(name)
      prompt = artifact.load_prompt(self.out / 'mined' / f'{name}-first.npz')
      texts = ((query.id, query.text) for query in read_texts(folder / 'queries.jsonl', 'query'))
      known = {*seen.ids(texts, prompt.queries)['train']}
      qrels = {query: judged for query, judged in qrels.items() if query not in known}
    teacher = {query: dict(ranked) for query, ranked in trec.read_run(self.fused(name))}
    fused = [teacher[query][passage] for query, ranked in first for passage, _ in ranked]
    rng = np.random.default_rng(0)
    shuffled = (first.rescored(rng.random(len(first.docs))) for _ in range(ORDERS))
    return {
      'random': float(np.mean([ndcg(run, qrels) for run in shuffled])),
      'BM25': ndcg(first, qrels),
      'fused': ndcg(first.rescored(np.array(fused)), qrels),
      'reranked': ndcg(reranked, qrels),
    }

  def page(self, found, names):
    return super().page(found, names) + self.apart(found, names) + self.judged()

  def apart(self, found, names):
    """FT and DPT, apart for test queries with a positive that training queries have too."""
    rows = []
    for name in self.settled(found, names, *REPORTED):
      judged = self.folder(name) / 'qrels'
      train, test = (read_qrels(judged / f'{split}.tsv') for split in ('train', 'test'))
      trained = {passage for passages in train.values() for passage in passages}
      # The order of the scores: see evaluation.score.
      shared = np.array([not trained.isdisjoint(test[query]) for query in sorted(test)])
      for label, chosen in (('trained on', shared), ('others', ~shared)):
        if not chosen.any():
          continue
        scores = [
          {seed: {name: self.used(found, name, way, seed)[chosen]} for seed in self.seeds}
          for way in ('frozen', *REPORTED)
        ]
        means = [f'{np.mean([one[name].mean() for one in of.values()]):.3f}' for of in scores]
        difference = trials.compare(scores[2], scores[1], [name])
        rows.append([name, label, f'{chosen.sum()}', *means, trials.shown(difference)])
    if not rows:
      return ''
    labels = (self.ways[way].label for way in REPORTED)
    head = ['set', 'passage', 'test queries', 'frozen', *labels, 'FT above DPT']
    about = (
      'nDCG@10 of test queries whose passage is a positive of training queries, and of others.'
    )
    return f'\n## Passages that were trained on\n\n{about}\n\n{trials.table(head, rows)}'

  def judged(self):
    """Whether the cross-encoders have learnt anything: one that answers the same for all passages
    ranks them at random.
    """
    lines = [line for line in trials.ledger(self.out) if line['run'].startswith('rerankers/')]
    rows = []
    for name in dict.fromkeys(line['run'].partition('/')[2] for line in lines):
      halves = [line for line in lines if line['run'] == f'rerankers/{name}']
      labels = ('random', 'BM25', 'fused', 'reranked')
      rows.append(
        [
          name,
          *(trials.cell(one[label] for one in halves if label in one) for label in labels),
        ]
      )
    if not rows:
      return ''
    head = ['set', 'in a random order', 'by BM25', 'by the fused ranking', 'by the cross-encoder']
    about = (
      f'nDCG@10 of the first {JUDGED} passages of BM25, on training queries new to the '
      'cross-encoder.'
    )
    return f'\n## Cross-encoders\n\n{about}\n\n{trials.table(head, rows)}'


def ndcg(run, qrels):
  return measures.measure(run, qrels, ['nDCG@10'])['mean']['nDCG@10']


if __name__ == '__main__':
  main()
