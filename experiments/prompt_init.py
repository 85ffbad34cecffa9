"""Initial values of a prompt: zeros, random numbers, or keys and values of a text; two families.

    python experiments/gguf_backbone.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/prompt_init.py --data=../shared/data --decoder=runs/smollm2 --out=runs/init

The families are BERT (all-MiniLM-L6-v2) and Llama (SmolLM2-135M, which nobody trained for
retrieval; mean pooling). Prompts for queries only are trained on MedQuAD with 300 training queries,
against frozen vectors of all passages, without dropout, average or regularization. They begin as

- zeros;
- N(0, .02), of `config.prompt.init_std`;
- N(0, s), where s is the deviation of the keys or values that the frozen encoder computes of a text
  in that layer;
- these keys and values themselves (`config.prompt.init_text`).

A training has 100 updates of 16 queries (Llama: 60 of 8). Every run leaves a line in
OUT/ledger.jsonl, and the same command goes on where it stopped, on another machine too
(experiments/ledgers/prompt_init.jsonl). `--part` names some families, `--starts` some starts;
`--part=tables --docs=docs` puts the tables into docs/experiments/prompt-init.md and keeps the
ledger.

Rules, fixed before the runs: each start has two learning rates. The first third of the test queries
chooses one, by the mean over seeds; the other queries decide, by the verdicts of trials.py. The
default of a family changes from N(0, .02) to another start only if that start is above it (held).
"""

import pathlib
import shutil

import jax
import numpy as np

import evaluation
import gain_sets
import systems
import trials
from dprjax.base import mesh
from dprjax.models import artifact
from dprjax.text import tokenizing
from dprjax.training import train

FAMILIES = {'bert': (16, 100), 'llama': (8, 60)}  # queries of an update, and updates
RATES = (1e-2, 1e-1)
TEXT = 'Represent this question for searching medical passages that answer it:'
STARTS = {
  'zeros': ('zeros', 'prompt.init_text=', 'prompt.init_std=0.0'),
  'random': ('N(0, .02)', 'prompt.init_text='),
  'scaled': ('N(0, deviation of a text)',),
  'text': ('a text', f'prompt.init_text={TEXT}'),
}
CLAIMS = (
  *((one, 'random') for one in STARTS if one != 'random'),
  ('text', 'scaled'),
  *((one, 'frozen') for one in STARTS),
)
LENGTHS = 16, 32  # tokens of a query and of a passage
DATA = 'medquad'


def main():
  parser = trials.parser(__doc__, FAMILIES, '0,1')
  parser.add_argument('--decoder', required=True, help='the folder of SmolLM2-135M')
  parser.add_argument('--starts', default=','.join(STARTS), help='some, separated by commas')
  args = trials.begin(parser, FAMILIES)
  out = pathlib.Path(args.out).resolve()
  settings = {'starts': list(STARTS), 'rates': RATES, 'families': FAMILIES, 'lengths': LENGTHS}
  kept = trials.LEDGERS / 'prompt_init.jsonl'
  trials.claim(out, settings)
  trials.take_up(out, kept, settings)
  setting = gain_sets.Setting(DATA, 300)
  folder = gain_sets.prepare(pathlib.Path(args.data).resolve(), out / 'data', DATA, setting)
  for part in args.part.split(','):
    if part == 'tables':
      tables(args, out, kept, settings)
    else:
      path = {'bert': args.backbone, 'llama': args.decoder}[part]
      seeds = [int(seed) for seed in args.seeds.split(',')]
      Family(part, path, folder, out).go(args.starts.split(','), seeds)


class Family:
  """The runs of one family.

  Attributes:
    name: of the family.
    path: of its backbone.
    folder: of the data set.
    out: of the experiment.
  """

  def __init__(self, name, path, folder, out):
    self.name, self.path, self.folder, self.out = name, path, folder, out
    self.backbone = systems.load(path)
    self.tokenizer = tokenizing.load_tokenizer(self.backbone.path)
    self.devices = mesh.make_mesh({'data': 1}, jax.devices()[:1])
    self.passages = out / 'passages' / name

  def go(self, starts, seeds):
    trials.once(
      self.out / 'passages' / f'{self.name}.json',
      lambda: evaluation.encode_passages(self.path, self.folder, self.passages, *LENGTHS),
    )
    bare = self.config('random', 0, 0, 'prompt.length=0', 'prompt.sides=both', 'corpus_negatives=0')
    trials.measure(self.out, f'{self.name}/frozen', 0, lambda: self.search(bare, {}))
    for seed in seeds:
      for start in starts:
        for rate in RATES:
          name = f'{self.name}/{start}@{rate:g}'
          trials.measure(self.out, name, seed, lambda run=(start, rate, seed): self.train(*run))

  def config(self, start, rate, seed, *more):
    batch, updates = FAMILIES[self.name]
    return systems.parse(
      'dptdr.py:beir,query',
      [
        f'backbone.path={self.path}',
        'backbone.dtype=float32',
        f'data.dir={self.folder}',
        f'data.query_max_length={LENGTHS[0]}',
        f'data.passage_max_length={LENGTHS[1]}',
        f'data.passage_embeddings={self.passages}',
        'data.folds=0',
        'data.hold_out=0.0',
        f'batch_size={batch}',
        'epochs=0.0',
        f'steps={updates}',
        f'checkpoint.every={updates}',
        'prompt.regularization=0.0',
        'prompt.dropout=0.0',
        'ema=0.0',
        'weight_interpolation=0.0',
        f'optim.learning_rate={rate}',
        f'seed={seed}',
        *STARTS[start][1:],
        *more,
      ],
    )

  def train(self, start, rate, seed):
    """Trains a prompt and measures it; the line has the loss of the first and last updates."""
    workdir = self.out / 'runs' / f'{self.name}-{start}-{rate:g}-{seed}'
    more = [f'prompt.init_from={self.scaled(seed)}'] if start == 'scaled' else []
    config = self.config(start, rate, seed, *more)
    step = systems.train(config, workdir).step
    found = self.search(config, trials.restore(workdir, self.backbone, step))
    shutil.rmtree(workdir)
    return found

  def search(self, config, trained):
    return evaluation.search(
      *(self.backbone, self.tokenizer, self.devices, config, trained, self.folder, self.passages)
    )

  def scaled(self, seed):
    """A prompt file of random numbers with the deviations of the keys and values of a text."""
    path = self.out / f'scaled-{self.name}-{seed}.npz'
    config = self.config('text', 0, seed)
    of_text = train.prompt_of_text(config, self.backbone, self.tokenizer, TEXT)
    start = of_text.arrays['prefix']
    draws = np.random.default_rng(seed).standard_normal(start.shape)
    vectors = draws * start.std(axis=(2, 3, 4), keepdims=True)
    meta = {
      'format': artifact.FORMAT,
      'version': artifact.VERSION,
      'kind': 'prefix',
      'backbone': self.path,
      'backbone_sha256': self.backbone.sha256,
      'tokenizer_sha256': self.tokenizer.sha256,
      **self.backbone.spec.to_meta(),
      'temperature': 1.0,
      'shift_positions': False,
      'dprjax_version': '0',
    }
    prompt = artifact.Prompt(meta, {'prefix': vectors.astype(np.float32)})
    artifact.save_prompt(path, prompt)
    return path


def tables(args, out, kept, settings):
  """Prints tables of all finished runs; with --docs, writes them there and keeps the ledger."""
  made = ''
  lines = trials.ledger(out)
  for family, (batch, updates) in FAMILIES.items():
    scores = read(lines, family)
    if 'frozen' not in scores:
      continue
    first = len(next(iter(scores['frozen'].values()))) // 3
    rows = [['the frozen encoder', '', *shown(scores['frozen'], first)]]
    chosen = {'frozen': scores['frozen']}
    for start, (label, *_) in STARTS.items():
      tried = {rate: scores.get(f'{start}@{rate:g}', {}) for rate in RATES}
      if not all(tried.values()):
        continue
      best = max(RATES, key=lambda rate: np.mean([own[:first] for own in tried[rate].values()]))
      chosen[start] = tried[best]
      rows += [
        [label, f'{rate:g}{" (chosen)" if rate == best else ""}', *shown(tried[rate], first)]
        for rate in RATES
      ]
    head = ['start', 'learning rate', 'nDCG@10, choosing queries', 'the others']
    made += f'## {family}, {updates} updates of {batch} queries\n\n{trials.table(head, rows)}\n'
    rows = []
    for ours, theirs in CLAIMS:
      if ours in chosen and theirs in chosen:
        pair = (rest(chosen[one], first, chosen[ours]) for one in (ours, theirs))
        label = f'{STARTS[ours][0]} above {STARTS.get(theirs, ("the frozen encoder",))[0]}'
        rows.append([label, trials.shown(trials.compare(*pair, [family]))])
    made += f'{trials.table(["claim", "difference in nDCG@10, interval, verdict"], rows)}\n'
  commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
  made += f'{len(lines)} runs; commit {commits}.\n'
  print(made)
  trials.write(out / 'results.md', made)
  if args.docs:
    trials.publish(args.docs, 'prompt_init', made, [])
    trials.keep(out, kept, settings)


def read(lines, family):
  """{run: {seed: the score of each test query}}."""
  found = {}
  for line in lines:
    name, _, run = line['run'].partition('/')
    if name == family:
      found.setdefault(run, {})[line['seed']] = np.array(line['scores']['nDCG@10'])
  return found


def rest(scores, first, seeds):
  """The argument of `trials.compare`, for the queries that did not choose."""
  own = scores if len(scores) > 1 else dict.fromkeys(seeds, next(iter(scores.values())))
  family = {seed: values[first:] for seed, values in own.items()}
  return {seed: dict.fromkeys(FAMILIES, values) for seed, values in family.items()}


def shown(scores, first):
  """The mean of the queries that chose and of the others, over seeds."""
  return (
    trials.cell(values[part].mean() for values in scores.values())
    for part in (slice(first), slice(first, None))
  )


if __name__ == '__main__':
  main()
