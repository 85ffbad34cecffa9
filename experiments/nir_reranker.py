"""The reranker of NIR-Prompt: prompts for two tasks of pairs, against fine-tuning (claim N7).

    python experiments/mlm_backbone.py --data=../shared/data --out=runs/mlm
    python experiments/nir_reranker.py --data=../shared/data --out=runs/nir-reranker \\
      --backbone=runs/mlm/backbone

Paraphrases (MSRP) and entailment (SICK: entailment, or another relation), on all-MiniLM-L6-v2 with
the masked-LM head of experiments/mlm_backbone.py. Pairs of a test split that also stand in the
training or dev split are left out. Every run leaves a line in OUT/ledger.jsonl with the answer to
each test pair, right or wrong, and the quantiles of its scores, logit(yes) - logit(no); the same
command goes on where it stopped. Tables as in experiments/nir_prompt.py.

- `mdm-TASK`: the prompt of a task on the frozen backbone, 500 updates of 16 pairs.
- `emm`: all weights but the word embeddings, on both tasks under these prompts, 500 updates of 8
  pairs of each task.
- `ft`: a classifier at [CLS] (monoBERT) on the same batches as `emm`.

Rules, fixed before the runs:

- N7: `emm` is above `ft` in accuracy, the mean of both test sets. The verdict is that of N1 to N3:
  the mean difference over sets and seeds with its 95 % interval over seeds and pairs
  (`trials.interval`); F1 and average precision stand beside.
- The rates are those that dev chose for N1 to N3 (6e-5 for weights), and that of the recipe for
  prompts (1e-3). No rate is tried here.
- Accuracy on the dev split picks the checkpoint, every 100 updates.
- A run that gives one answer to 95 % of the pairs of a test set or more is *one answer*: the table
  says so, and no verdict takes it as a gain. The larger class has a row of its own.
- Three seeds; seed 0 of all runs comes first.
"""

import csv
import pathlib
import shutil
import sys

import numpy as np

import nir_sets
import trials
from dprjax import CrossEncoder, PromptReranker
from dprjax.exports import exporting
from dprjax.papers.nir_prompt import pairs
from dprjax.training import config as configs
from dprjax.training import train
from dprjax.training import workdir as workdirs

LEDGER = trials.LEDGERS / 'nir_reranker.jsonl'
TASKS = ('inference', 'paraphrase')
SETS = {'inference': 'SICK', 'paraphrase': 'MSRP'}
RUNS = ('mdm-inference', 'mdm-paraphrase', 'emm', 'ft')
LABELS = {
  'larger': 'the larger class',
  'mdm-*': 'NIR-Prompt, prompts only',
  'emm': 'NIR-Prompt',
  'ft': 'FT',
}
PARTS = {'reranker': RUNS}
RATES = {'prompt': 1e-3, 'weights': 6e-5}
LENGTH = 48  # tokens of a text
ONE_ANSWER = 0.95
SEEDS = 3  # of a verdict
MEASURES = ('accuracy', 'F1', 'AP')
CLAIM = 'NIR-Prompt above FT of both tasks, pairs'
PAPER = '83.6, 80.9; 84.6, 81.5'  # accuracy of paraphrases, of inference (Table 8b)


def main():
  parser = trials.parser(__doc__, PARTS, '0,1,2')
  parser.add_argument('--updates', type=int, default=500)
  args = trials.begin(parser, PARTS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    for seed in map(int, args.seeds.split(',')):
      for name in PARTS.get(part, ()):
        experiment.make(name, seed)
  made = page(trials.ledger(experiment.out))
  trials.write(experiment.out / 'results.md', made)
  print(made)
  if args.docs:
    trials.insert(
      pathlib.Path(args.docs) / 'experiments' / 'nir-prompt.md', 'nir_reranker.py', made
    )
    trials.keep(experiment.out, LEDGER, experiment.settings)


class Experiment:
  """All runs, each in its own folder."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.settings = {'updates': args.updates}
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, LEDGER, self.settings)
    self.sets = self.out / 'sets'

  def make(self, name, seed):
    data = pathlib.Path(self.args.data)
    trials.prepare(self.sets, lambda folder: {'counts': prepare(data, folder)})
    if name == 'emm':
      for task in TASKS:  # in lines of their own
        self.make(f'mdm-{task}', seed)
    trials.measure(self.out, name, seed, lambda: self.train(name, seed))

  def train(self, name, seed):
    """Trains unless that is done, exports and tests."""
    workdir = self.out / 'runs' / f'{name}-{seed}'
    result = train.train(configs.parse(self.flags(name, seed)), workdir)
    if not result.done:
      sys.exit('stopped; the same command goes on')
    out = self.exported(name, seed)
    if not out.exists():
      out.parent.mkdir(exist_ok=True)
      exporting.export(workdirs.trained(workdir), out, force=True)
      shutil.rmtree(workdirs.trained(workdir) / 'checkpoints')
    found = {'best': result.best, 'best_step': result.best_step, 'scores': {}, 'looks': {}}
    for task in TASKS if name in ('emm', 'ft') else (name.removeprefix('mdm-'),):
      scores, looks = self.test(self.reranker(name, task, seed), task)
      found['scores'][f'{SETS[task]}/accuracy'] = scores
      found['looks'][SETS[task]] = looks
    return found

  def exported(self, name, seed):
    return self.out / 'exports' / f'{name}-{seed}{".npz" if name.startswith("mdm") else ""}'

  def needed(self, name, seed):
    """What a run exported; where its line is of another machine, it is trained here."""
    out = self.exported(name, seed)
    if not out.exists():
      self.train(name, seed)
    return out

  def reranker(self, name, task, seed):
    out = self.exported(name, seed)
    if name == 'ft':
      return CrossEncoder.load(out)
    if name == 'emm':
      return PromptReranker.load(out, out / 'prompts' / f'{task}.npz')
    return PromptReranker.load(self.args.backbone, out)

  def flags(self, name, seed):
    """The command line of a training."""
    recipe = name.replace('-', '=') if name.startswith('mdm') else f'{name}={"+".join(TASKS)}'
    tasks = [name.removeprefix('mdm-')] if name.startswith('mdm') else TASKS
    options = {
      'backbone.path': self.args.backbone,
      'backbone.dtype': 'mixed',
      'data.query_max_length': LENGTH,
      'data.passage_max_length': LENGTH,
      'data.query_buckets': (16, 32, LENGTH),
      'data.passage_buckets': (16, 32, LENGTH),
      'data.token_cache': f'{self.out}/token_cache',
      'epochs': 0.0,
      'steps': self.args.updates,
      'batch_size': 16,
      'optim.learning_rate': RATES['prompt' if name.startswith('mdm') else 'weights'],
      'eval.every': 100,
      'eval.patience': 0,
      'checkpoint.every': 100,
      'log_every': 20,
      'seed': seed,
    }
    for task in tasks:
      options |= {
        f'tasks.{task}.data.dir': self.sets / task,
        f'tasks.{task}.data.dev_split': 'dev',
        f'tasks.{task}.data.hold_out': 0.0,
      }
      if name == 'emm':
        options[f'tasks.{task}.prompt'] = self.needed(f'mdm-{task}', seed)
    return [
      f'--config={trials.ROOT}/configs/nir_reranker.py:{recipe}',
      *(f'--config.{key}={value}' for key, value in options.items()),
    ]

  def test(self, reranker, task):
    """Which answers are right, and what the scores look like."""
    rows = pairs.read_pairs(pairs.PairSource(str(self.sets / task), 'test'))
    scores = reranker.score([row[:2] for row in rows])
    labels = np.array([row.label for row in rows], np.int32)
    found = pairs.classify(scores, labels, 'accuracy')
    looks = {
      **{name: found.means[name] for name in ('yes', 'F1', 'AP')},
      'of matches': quantiles(scores[labels == 1]),
      'of others': quantiles(scores[labels == 0]),
    }
    return found.values[''], looks


def quantiles(scores):
  return [round(float(value), 3) for value in np.quantile(scores, (0.05, 0.5, 0.95))]


def prepare(data, out):
  """Writes the splits of both sets; returns how many pairs there are."""
  made = {'paraphrase': msrp(data / 'msrp' / 'raw'), 'inference': sick(data / 'sick' / 'raw')}
  counts = {}
  for task, splits in made.items():
    known = {row[:2] for split in ('train', 'dev') for row in splits[split]}
    unseen = [row for row in splits['test'] if row[:2] not in known]
    counts[SETS[task]] = {'also in train': len(splits['test']) - len(unseen)}
    for split, rows in (splits | {'test': unseen}).items():
      (out / task).mkdir(parents=True, exist_ok=True)
      pairs.write_pairs(out / task / f'{split}.jsonl', rows)
      counts[SETS[task]] |= {split: len(rows), f'{split}, matching': sum(row[2] for row in rows)}
  return counts


def msrp(folder):
  return {
    split: [
      (row[3], row[4], int(row[0]))
      for row in list(nir_sets.read_tsv(folder / f'msr-para-{name}.tsv'))[1:]
    ]
    for split, name in (('train', 'train'), ('dev', 'val'), ('test', 'test'))
  }


def sick(folder):
  splits = {}
  for split, name in (('train', 'train'), ('dev', 'trial'), ('test', 'test_annotated')):
    with (folder / f'SICK_{name}.txt').open(newline='') as file:
      rows = csv.DictReader(file, delimiter='\t', quoting=csv.QUOTE_NONE)
      splits[split] = [
        (row['sentence_A'], row['sentence_B'], int(row['entailment_judgment'] == 'ENTAILMENT'))
        for row in rows
      ]
  return splits


def page(lines):
  """The table of all systems, and the verdict on N7."""
  counts = next((line['counts'] for line in lines if line['run'] == 'sets'), {})
  found = trials.scores_by_run(lines)
  rows = [row for name, text in LABELS.items() if (row := row_of(name, text, lines, counts))]
  keys = [f'{name}/accuracy' for name in SETS.values()]
  verdict = trials.compare(found['emm'], found['ft'], keys)
  claims = []
  if verdict:
    seeds = len(found['emm'].keys() & found['ft'].keys())
    claims = [trials.claim_row('N7', CLAIM, PAPER, verdict, seeds, 'accuracy', SEEDS)]
  head = [f'{name}, {what}' for name in SETS.values() for what in (*MEASURES, 'says yes')]
  done = f'{len(lines) - 1} runs.\n'
  return '\n'.join((trials.table(['', *head], rows), trials.table(trials.CLAIMS, claims), done))


def row_of(name, text, lines, counts):
  """A system: means over seeds, and *one answer* where a run has one."""
  cells = []
  for task, test in SETS.items():
    if name == 'larger':
      total, matching = counts[test]['test'], counts[test]['test, matching']
      larger = max(matching, total - matching) / total
      yes = 2 * matching >= total
      cells += [f'{larger:.3f}', f'{2 * matching / (total + matching) if yes else 0:.3f}',
                f'{matching / total:.3f}', f'{float(yes):.0%}']  # fmt: skip
      continue
    runs = [line for line in lines if line['run'] == name.replace('*', task)]
    if not runs:
      return None
    looks = [line['looks'][test] for line in runs]
    one = any(max(look['yes'], 1 - look['yes']) >= ONE_ANSWER for look in looks)
    cells += [
      trials.cell(np.mean(line['scores'][f'{test}/accuracy']) for line in runs),
      *(trials.cell(look[measure] for look in looks) for measure in MEASURES[1:]),
      f'{np.mean([look["yes"] for look in looks]):.0%}{", **one answer**" if one else ""}',
    ]
  return [text, *cells]


if __name__ == '__main__':
  main()
