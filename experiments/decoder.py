"""SmolLM2-135M as a retriever: contrastive training of the whole decoder, then a prompt or LoRA.

    python experiments/gguf_backbone.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/decoder.py --data=../shared/data --decoder=runs/smollm2 --out=runs/decoder

1. Contrastive training: two sentences of an arXiv abstract find each other among those of the other
   abstracts of an update (RIP without its masked-LM loss, which needs a head that decoders lack).
   All weights of the decoder are trained, with one learning rate and one seed.
2. A prompt and LoRA, for queries only, on the decoder after step 1. The task is MedQuAD with 300
   training queries; arXiv has none of its texts. Passages are encoded once, by the bare decoder,
   and all of them are negatives.

The decoder before step 1, a prompt on it, and the frozen all-MiniLM-L6-v2 are runs of
experiments/prompt_init.py, from its kept ledger: the same queries, passages, lengths, batches and
updates. Every other run leaves a line in OUT/ledger.jsonl, and the same command goes on where it
stopped, on another machine too (experiments/ledgers/decoder.jsonl). `--part=tables --docs=docs`
puts the tables into docs/experiments/decoder.md and keeps the ledger.

Rules, fixed before a prompt or LoRA was scored; a first design chose rates on held-out training
queries:

- Vectors are means of states, compared by their cosine. The state of the last token is measured on
  the decoder before step 1, and not trained.
- A prompt begins as the keys and values of a text. Prompt and LoRA have two learning rates each, a
  factor of ten apart, and the same updates and batches. There is no dropout, average or
  regularization.
- The first third of the test queries chooses the learning rate, and the others decide, by the
  verdicts of trials.py, as in experiments/prompt_init.py.
- Two rates do not bracket the best one. A verdict on a prompt against LoRA holds for these rates.
"""

import functools
import pathlib
import shutil
from typing import NamedTuple

import jax
import numpy as np

import evaluation
import gain_sets
import prompt_init
import systems
import trials
from dprjax.base import mesh
from dprjax.text import tokenizing

PARTS = ('contrastive', 'lasttoken')
# Options of the contrastive training, and of a prompt or LoRA.
CONTRASTIVE = (
  'pretrain.mlm_weight=0.0',
  'pretrain.max_length=32',
  'pretrain.buckets=(32,)',
  "trainable=('backbone/.*',)",
  'pooling=mean',
  'normalize=True',
  'temperature=0.05',
  'batch_size=32',
  'epochs=0.0',
  'steps=8',
  'optim.warmup=0.6',
  'optim.decay=none',
  'checkpoint.every=8',
  'optim.learning_rate=1e-4',
)
BATCH, UPDATES = prompt_init.FAMILIES['llama']
TUNED = (
  'data.folds=0',
  'data.hold_out=0.0',
  f'batch_size={BATCH}',
  'epochs=0.0',
  f'steps={UPDATES}',
  f'checkpoint.every={UPDATES}',
  'prompt.regularization=0.0',
  'prompt.dropout=0.0',
  'ema=0.0',
  'weight_interpolation=0.0',
)


class Adapter(NamedTuple):
  """A training for the task: a recipe of configs/, learning rates and options."""

  recipe: str
  rates: tuple[float, ...]
  options: tuple[str, ...] = ()


ADAPTERS = {
  'prompt': Adapter('dptdr.py:beir,query', prompt_init.RATES, prompt_init.STARTS['text'][1:]),
  'lora': Adapter('dptdr.py:beir,lora,query', (3e-4, 3e-3)),
}
# Runs of experiments/prompt_init.py, by their names here.
TAKEN = {
  'bert/frozen': 'minilm/mean',
  'llama/frozen': 'original/mean',
  **{f'llama/text@{rate:g}': f'original/prompt@{rate:g}' for rate in prompt_init.RATES},
}
LABELS = {  # the systems of the table, by name
  'bm25': 'BM25',
  'minilm/mean': 'MiniLM, frozen',
  'original/lasttoken': 'SmolLM2, frozen, last token',
  'original/mean': 'SmolLM2, frozen, mean',
  'original/prompt': 'SmolLM2 + prompt',
  'contrastive/mean': 'SmolLM2, contrastive',
  'contrastive/prompt': 'SmolLM2, contrastive + prompt',
  'contrastive/lora': 'SmolLM2, contrastive + LoRA',
}
CLAIMS = (  # the first above the second
  ('contrastive/mean', 'original/mean'),
  ('original/prompt', 'original/mean'),
  ('contrastive/prompt', 'contrastive/mean'),
  ('contrastive/lora', 'contrastive/mean'),
  ('contrastive/prompt', 'contrastive/lora'),
  ('contrastive/prompt', 'original/prompt'),
  ('contrastive/prompt', 'bm25'),
)


def main():
  parser = trials.parser(__doc__, PARTS, '0')
  parser.add_argument('--decoder', required=True, help='the folder of SmolLM2-135M')
  parser.add_argument(
    '--dtype', default='auto', help='of the arithmetic; mixed: faster on processors with bfloat16'
  )
  Experiment(trials.begin(parser, PARTS)).go()


class Experiment:
  """The runs on the decoder before and after the contrastive training."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.source = pathlib.Path(args.data).resolve()
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.settings = {
      'dtype': args.dtype,
      'lengths': prompt_init.LENGTHS,
      'contrastive': CONTRASTIVE,
      'tuned': TUNED,
      'rates': {name: one.rates for name, one in ADAPTERS.items()},
    }
    self.kept = trials.LEDGERS / 'decoder.jsonl'
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, self.kept, self.settings)
    self.devices = mesh.make_mesh({'data': 1}, jax.devices()[:1])

  def go(self):
    for part in self.args.part.split(','):
      if part == 'tables':
        self.tables()
        continue
      trials.measure(self.out, 'bm25', 0, lambda: evaluation.search_words(self.folder))
      if part == 'lasttoken':
        trials.measure(
          self.out, 'original/lasttoken', 0, lambda: self.frozen('original', 'lasttoken')
        )
        continue
      trials.measure(self.out, 'contrastive/mean', 0, lambda: self.frozen('contrastive', 'mean'))
      for adapter, one in ADAPTERS.items():
        for seed in self.seeds:
          for rate in one.rates:
            run = (adapter, rate, seed)
            name = f'contrastive/{adapter}@{rate:g}'
            trials.measure(self.out, name, seed, lambda run=run: self.train(*run))

  @functools.cached_property
  def folder(self):
    setting = gain_sets.Setting(prompt_init.DATA, 300)
    return gain_sets.prepare(self.source, self.out / 'data', prompt_init.DATA, setting)

  def path(self, name):
    """The folder of a decoder; the contrastive one is made where it is not there."""
    if name == 'original':
      return self.args.decoder
    folder = self.out / 'contrastive'
    if not folder.exists():
      options = [
        f'backbone.path={self.args.decoder}',
        f'backbone.dtype={self.args.dtype}',
        f'data.dir={self.source}/arxiv',
        f'data.token_cache={self.out}/token_cache',
        'seed=0',
        *CONTRASTIVE,
      ]
      config = systems.parse('rip.py:sentence', options)
      systems.pretrain(self.out, 'contrastive', 0, config, folder)
    return str(folder)

  def passages(self, name, pooling):
    """The folder of all passages under a bare backbone."""
    out = self.out / 'passages' / f'{name}-{pooling}'
    trials.once(
      out.with_suffix('.json'),
      lambda: evaluation.encode_passages(
        self.path(name),
        self.folder,
        out,
        *prompt_init.LENGTHS,
        pooling=pooling,
        dtype=self.args.dtype,
      ),
    )
    return out

  def config(self, name, pooling, recipe, *options):
    query_length, passage_length = prompt_init.LENGTHS
    return systems.parse(
      recipe,
      [
        f'backbone.path={self.path(name)}',
        f'backbone.dtype={self.args.dtype}',
        f'pooling={pooling}',
        f'data.dir={self.folder}',
        f'data.query_max_length={query_length}',
        f'data.passage_max_length={passage_length}',
        *options,
      ],
    )

  def frozen(self, name, pooling):
    """Measures a bare backbone."""
    config = self.config(name, pooling, 'dptdr.py:beir,both', 'prompt.length=0')
    return self.search(name, pooling, config, {})

  def train(self, adapter, rate, seed):
    """Trains a prompt or LoRA on the contrastive decoder and measures it."""
    one = ADAPTERS[adapter]
    workdir = self.out / 'runs' / f'{adapter}-{rate:g}-{seed}'
    options = (
      f'data.passage_embeddings={self.passages("contrastive", "mean")}',
      f'optim.learning_rate={rate}',
      f'seed={seed}',
    )
    config = self.config('contrastive', 'mean', one.recipe, *TUNED, *one.options, *options)
    step = systems.train(config, workdir).step
    trained = trials.restore(workdir, systems.load(self.path('contrastive')), step)
    found = self.search('contrastive', 'mean', config, trained)
    shutil.rmtree(workdir)
    return found | {'bytes': sum(leaf.nbytes for leaf in trained.values())}

  def search(self, name, pooling, config, trained):
    backbone = systems.load(self.path(name))
    model = (backbone, tokenizing.load_tokenizer(backbone.path), self.devices, config, trained)
    return evaluation.search(*model, self.folder, self.passages(name, pooling))

  def tables(self):
    """Prints tables of all finished runs; with --docs, writes them there and keeps the ledger."""
    lines = trials.ledger(self.out)
    runs = {}
    for line in (*taken(), *lines):
      values = np.array(line['scores']['nDCG@10']) if 'scores' in line else None
      runs.setdefault(line['run'], {})[line['seed']] = values
    first = len(runs['bm25'][0]) // 3
    rows, chosen = [], {}
    for name, label in LABELS.items():
      rate, used = choose(runs, name, first)
      if used:
        chosen[name] = used
        rows.append([label, rate, *prompt_init.shown(used, first)])
    head = ['system', 'learning rate', 'nDCG@10, choosing queries', 'the others']
    made = f'{trials.table(head, rows)}\n'
    rows = []
    for ours, theirs in CLAIMS:
      if ours in chosen and theirs in chosen:
        pair = (prompt_init.rest(chosen[one], first, chosen[ours]) for one in (ours, theirs))
        found = trials.shown(trials.compare(*pair, ['llama']))
        rows.append([f'{LABELS[ours]} above {LABELS[theirs]}', found])
    made += f'{trials.table(["claim", "difference in nDCG@10, interval, verdict"], rows)}\n'
    commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
    made += f'{len(lines)} runs; commit {commits}.\n'
    print(made)
    trials.write(self.out / 'results.md', made)
    if self.args.docs:
      trials.publish(self.args.docs, 'decoder', made, [])
      trials.keep(self.out, self.kept, self.settings)


def taken():
  """The kept lines of experiments/prompt_init.py, with their names here."""
  lines = trials.kept_lines(trials.LEDGERS / 'prompt_init.jsonl')
  return [
    line | {'run': TAKEN[line['run']]}
    for line in lines
    if line['run'] in TAKEN and line['seed'] == 0
  ]


def choose(runs, name, first):
  """The learning rate of a system, as shown, and its scores by seed; {} where a rate is missing."""
  start, _, adapter = name.partition('/')
  if adapter not in ADAPTERS:
    return '', runs.get(name, {})
  rates = ADAPTERS[adapter].rates
  tried = {rate: runs.get(f'{start}/{adapter}@{rate:g}', {}) for rate in rates}
  if not all(tried.values()):
    return '', {}
  best = max(rates, key=lambda rate: np.mean([own[:first] for own in tried[rate].values()]))
  return f'{best:g}', tried[best]


if __name__ == '__main__':
  main()
