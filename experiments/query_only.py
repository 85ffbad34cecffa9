"""A prompt for queries only against one for both sides, fine-tuning and a linear map.

    python experiments/query_only.py --data=../shared/data --out=runs/query-only

The sets are SciFact, MedQuAD, Cranfield and titles of arXiv, which find their own abstracts. All
methods start from all-MiniLM-L6-v2 and see the same batches. Each has three learning rates; dev
queries choose one with seed 0. It is trained until its dev nDCG@10 no longer rises (scored every 25
updates); its best checkpoint is tested. Passages are encoded once for the methods that leave them
unchanged. Runs, the ledger (experiments/ledgers/query_only.jsonl), `--part` and `--ways` are as in
experiments/gain.py.

Verdicts follow rules that were fixed before the runs: the mean over seeds, averaged over the sets,
with a paired bootstrap over the queries of each set. A claim is *held* or *not* if the 95 %
interval of the difference leaves out 0 and all seeds agree in its sign, else *undecided*.
"""

import json
import shutil
from typing import NamedTuple

import numpy as np

import evaluation
import gain_sets
import systems
import trials
from dprjax.base import files
from dprjax.papers.topic_dpr import papers as records
from dprjax.text import texts
from dprjax.text.qrels import read_qrels, write_qrels

CHOSEN_BY = 40  # queries, at least, of which a learning rate is chosen
PROMPT_RATES = (2e-3, 7e-3, 2e-2)
QUERY = ('prompt.sides=query', 'prompt.length=16')


class Set(NamedTuple):
  """A data set: its folder, tokens of its queries and passages, at most how many queries of each
  split.
  """

  source: str
  query_length: int
  passage_length: int
  train: int = 1500
  dev: int = 200
  test: int = 500


SETS = {
  'scifact': Set('scifact', 64, 256),
  'medquad': Set('medquad', 32, 64),
  'cranfield': Set('cranfield', 64, 256),
  'arxiv': Set('arxiv', 32, 256),
}


def way(label, rates, *options, both=False):
  return systems.Way(label, 'dptdr.py:beir,both', rates, options, both, keeps='')


WAYS = {
  'query': way('a prompt for queries', PROMPT_RATES, *QUERY),
  'corpus': way('+ the whole corpus as negatives', PROMPT_RATES, *QUERY, 'corpus_negatives=-1'),
  'linear': way(
    'a linear map of query vectors',
    (3e-4, 1e-3, 3e-3),
    *QUERY,
    'method=lab.linear_map',
    "trainable=('head/.*',)",
  ),
  'both': way('a prompt for both', PROMPT_RATES, 'prompt.length=16', both=True),
  'ft': way('fine-tuned', (1e-5, 2e-5, 5e-5), *systems.FINE_TUNED, both=True),
}
# Claims: the first above the second.
CLAIMS = (
  ('a prompt for queries gains', 'query', 'frozen'),
  ('a prompt for queries above a linear map', 'query', 'linear'),
  ('a prompt for both above one for queries', 'both', 'query'),
  ('fine-tuning above a prompt for queries', 'ft', 'query'),
  ('fine-tuning above a prompt for both', 'ft', 'both'),
  ('the whole corpus as negatives helps', 'corpus', 'query'),
)


def parser():
  made = systems.parser(__doc__, SETS, '0,1', WAYS)
  made.add_argument('--updates', type=int, default=150, help='of a training, at most')
  made.add_argument('--every', type=int, default=25, help='updates between two scores on dev')
  made.add_argument('--batch', type=int, default=16, help='queries of an update')
  made.add_argument('--passages', type=int, default=2000, help='of a set, but all judged ones')
  return made


def main():
  Experiment(trials.begin(parser(), SETS)).go()


class Experiment(systems.Runs):
  """Prompts for queries, and the systems that they are compared with."""

  name = 'query_only'
  sets = SETS
  ways = WAYS
  columns = tuple(WAYS)
  claims = CLAIMS
  title = 'At the rates of the paper, a prompt for queries gains little'
  fixed = (*systems.Runs.fixed, 'updates', 'every', 'batch', 'passages')

  def lengths(self, name):
    one = SETS[name]
    return one.query_length, min(one.passage_length, self.args.length)

  def more_options(self, name, way, seed):
    return (
      'data.dev_split=dev',
      'data.hold_out=0.0',
      f'batch_size={self.args.batch}',
      'epochs=0.0',
      f'steps={self.args.updates}',
      f'eval.every={self.args.every}',
      'eval.patience=1',
      f'checkpoint.every={self.args.every}',
      'eval.corpus_limit=500',
      'prompt.dropout=0.0',
      'ema=0.0',
      'weight_interpolation=0.0',
    )

  def folder(self, name):
    """The data set, made unless it was."""
    folder = self.out / 'data' / name
    if not (folder / 'qrels' / 'test.tsv').exists():
      (folder / 'qrels').mkdir(parents=True, exist_ok=True)
      {'arxiv': self.make_arxiv}.get(name, self.split)(name, folder)
    return folder

  def split(self, name, folder):
    """A BEIR folder with judgements to train, to choose and to test on, by a hash of the query.

    A passage counts as judged where one of these queries finds it.
    """
    source = self.source / name
    gain_sets.only(source / 'qrels', 'test.tsv')
    found = {path.stem: read_qrels(path) for path in (source / 'qrels').glob('*.tsv')}
    if 'train' not in found:  # Cranfield: half of the queries to test on
      whole = found.pop('test')
      order = sorted(whole, key=gain_sets.hashed)
      half = len(order) // 2
      found['train'] = {query: whole[query] for query in order[:half]}
      found['test'] = {query: whole[query] for query in order[half:]}
    if 'dev' not in found:
      order = sorted(found['train'], key=gain_sets.hashed)
      part = max(len(order) // 5, CHOSEN_BY)
      found['dev'] = {query: found['train'][query] for query in order[:part]}
      found['train'] = {query: found['train'][query] for query in order[part:]}
    for split in ('train', 'dev', 'test'):
      order = sorted(found[split], key=gain_sets.hashed)[: getattr(SETS[name], split)]
      found[split] = {query: found[split][query] for query in order}
    judged = {doc for split in found.values() for docs in split.values() for doc in docs}
    entries = texts.read_entries(source / 'corpus.jsonl', 'passage')
    self.write_corpus(folder, [entry.record for entry in entries], judged)
    shutil.copyfile(source / 'queries.jsonl', folder / 'queries.jsonl')
    for split in ('train', 'dev', 'test'):
      write_qrels(folder / 'qrels' / f'{split}.tsv', found[split])

  def make_arxiv(self, name, folder):
    """Titles that find their own abstracts: two ninths to test on, one to choose by."""
    source = gain_sets.only(self.source / name, '*.jsonl*')
    whole = sorted(
      (paper for paper in records.read_papers(source) if paper.title and paper.passage),
      key=lambda paper: gain_sets.hashed(paper.id),
    )[:4500]
    entries = [texts.PassageRecord(paper.id, '', paper.passage) for paper in whole]
    self.write_corpus(folder, entries, set())
    kept = {text.id for text in texts.read_texts(folder / 'corpus.jsonl', 'passage')}
    whole = [paper for paper in whole if paper.id in kept]
    with files.atomic_write(folder / 'queries.jsonl') as file:
      for paper in whole:
        file.write(json.dumps({'_id': paper.id, 'text': paper.title}) + '\n')
    borders = [0, *(len(whole) * part // 9 for part in (2, 3)), len(whole)]
    for split, start, stop in zip(('test', 'dev', 'train'), borders, borders[1:], strict=False):
      judged = {paper.id: {paper.id: 1} for paper in whole[start:stop]}
      write_qrels(folder / 'qrels' / f'{split}.tsv', judged)

  def write_corpus(self, folder, entries, judged):
    """The judged passages, and others up to --passages of them all."""
    entries = sorted(entries, key=lambda one: one.id not in judged)
    entries = entries[: max(self.args.passages, len(judged))]
    with files.atomic_write(folder / 'corpus.jsonl') as file:
      for entry in entries:
        row = {'_id': entry.id, 'title': entry.title, 'text': entry.text}
        file.write(json.dumps(row) + '\n')

  def page(self, found, names):
    """A table of each set, and the verdicts."""
    made = ''
    for name in names:
      unseen = evaluation.unseen(self.folder(name))
      rows = [
        self.row(found[name], way, unseen) for way in (*systems.FLOORS, *WAYS) if found[name][way]
      ]
      head = ['', 'nDCG@10', 'answers not seen', 'rate', 'training, s', 'trained', 'encoded again']
      made += (
        f'## {name}: {len(unseen):,} test queries, {sum(unseen):,} with answers not seen\n\n'
        f'{trials.table(head, rows)}\n'
      )
    return made + self.verdicts(found, names)

  def row(self, found, way, unseen):
    """A line in the table of a set, from the lines of its seeds."""
    own = [found[way][seed] for seed in sorted(found[way])]
    if way in systems.FLOORS:
      own = own[:1]
    measured = [trials.cell(line['nDCG@10'] for line in own)]
    if unseen.any():
      scores = [np.array(line['scores']['nDCG@10'])[unseen].mean() for line in own]
      measured.append(trials.cell(scores))
    else:
      measured.append('')
    if way in systems.FLOORS:
      return [systems.FLOORS[way], *measured, '', '', '', '']
    return [
      WAYS[way].label,
      *measured,
      f'{own[0]["rate"]:g}',
      f'{np.mean([line["train_s"] for line in own]):.0f}',
      f'{own[0]["bytes"] / 1e3:,.0f} kB',
      f'all, {own[0]["reencode_s"]:.0f} s' if WAYS[way].both else 'none',
    ]


if __name__ == '__main__':
  main()
