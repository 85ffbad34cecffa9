"""SmolLM2-135M as a retriever: contrastive training of the whole decoder, then a prompt or LoRA.

    python experiments/gguf_backbone.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/decoder.py --data=../shared/data --decoder=runs/smollm2 --out=runs/decoder

1. Contrastive training: two sentences of an arXiv abstract find each other among those of the other
   abstracts of an update (RIP without its masked-LM loss, which needs a head that decoders lack).
   All weights of the decoder are trained, with one learning rate and one seed.
2. A prompt and LoRA, for queries alone, on the decoder before and after step 1. The task is MedQuAD
   with 240 training queries. arXiv has none of its texts. Passages are encoded once, by the bare
   decoder, and all of them are negatives.

BM25 and the frozen all-MiniLM-L6-v2 are measured beside them. Every run leaves a line in
OUT/ledger.jsonl, and the same command goes on where it stopped, on another machine too
(experiments/ledgers/decoder.jsonl). `--part` names some backbones; `--part=tables --docs=docs` puts
the tables into docs/results.md and keeps the ledger.

Rules, fixed before the runs:

- Vectors are means of states, compared by their cosine. The last token's state is measured on the
  decoder as it is, and not trained.
- A prompt and LoRA have two learning rates each, a factor of three apart, and the same updates,
  batches and lengths. No dropout, average or regularization.
- Sixty of MedQuAD's 300 training queries, chosen by a hash, are held out. Their mean nDCG@10, over
  seeds, chooses the learning rate. The 300 test queries decide, by the verdicts of trials.py.
- Two rates do not bracket the best one. A verdict on a prompt against LoRA is of these rates alone.
"""

import functools
import pathlib
import shutil
from typing import NamedTuple

import jax
import numpy as np

import evaluation
import gain_sets
import systems
import trials
from dprjax.data import text
from dprjax.formats.qrels import read_qrels, write_qrels
from dprjax.runtime import mesh

BACKBONES = {
  'minilm': 'all-MiniLM-L6-v2',
  'contrastive': 'SmolLM2 after contrastive training',
  'original': 'SmolLM2',
}
LENGTHS = 20, 40  # tokens of a query and of a passage
HELD_OUT = 60  # queries that choose the learning rate
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
  'steps=50',
  'checkpoint.every=50',
  'optim.learning_rate=1e-4',
)
TUNED = (
  'data.folds=0',
  'data.hold_out=0.0',
  'batch_size=16',
  'epochs=0.0',
  'steps=50',
  'checkpoint.every=50',
  'prompt.regularization=0.0',
  'prompt.dropout=0.0',
  'ema=0.0',
  'weight_interpolation=0.0',
)


class Adapter(NamedTuple):
  """What is trained for the task: a label, a recipe of configs/ and learning rates."""

  label: str
  recipe: str
  rates: tuple[float, ...]


ADAPTERS = {
  'prompt': Adapter('a prompt', 'dptdr.py:beir,query', (3e-2, 1e-1)),
  'lora': Adapter('LoRA', 'dptdr.py:beir,lora,query', (1e-3, 3e-3)),
}
# The systems of the table, by name: those of nothing trained for the task first.
LABELS = {
  'bm25': 'BM25',
  'minilm/mean': 'MiniLM, frozen',
  'original/lasttoken': 'SmolLM2, frozen, last token',
  'original/mean': 'SmolLM2, frozen, mean',
  'original/prompt': 'SmolLM2 + prompt',
  'original/lora': 'SmolLM2 + LoRA',
  'contrastive/mean': 'SmolLM2, contrastive',
  'contrastive/prompt': 'SmolLM2, contrastive + prompt',
  'contrastive/lora': 'SmolLM2, contrastive + LoRA',
}
CLAIMS = (  # the first above the second
  ('contrastive/mean', 'original/mean'),
  ('original/prompt', 'original/mean'),
  ('original/lora', 'original/mean'),
  ('contrastive/prompt', 'contrastive/mean'),
  ('contrastive/lora', 'contrastive/mean'),
  ('original/prompt', 'original/lora'),
  ('contrastive/prompt', 'contrastive/lora'),
  ('contrastive/prompt', 'original/prompt'),
  ('contrastive/prompt', 'bm25'),
  ('contrastive/prompt', 'minilm/mean'),
)


def main():
  parser = trials.parser(__doc__, BACKBONES, '0')
  parser.add_argument('--decoder', required=True, help='the folder of SmolLM2-135M')
  parser.add_argument(
    '--dtype', default='auto', help='of the arithmetic; mixed: faster on processors with bfloat16'
  )
  Experiment(trials.begin(parser, BACKBONES)).go()


class Experiment:
  """The runs on all backbones."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.source = pathlib.Path(args.data).resolve()
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.settings = {
      'dtype': args.dtype,
      'lengths': LENGTHS,
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
      for pooling in ('mean', 'lasttoken') if part == 'original' else ('mean',):
        name = f'{part}/{pooling}'
        trials.measure(self.out, name, 0, lambda run=(part, pooling): self.frozen(*run))
      for adapter, one in ADAPTERS.items() if part != 'minilm' else ():
        for seed in self.seeds:
          for rate in one.rates:
            run = (part, adapter, rate, seed)
            name = f'{part}/{adapter}@{rate:g}'
            trials.measure(self.out, name, seed, lambda run=run: self.train(*run))

  @functools.cached_property
  def folder(self):
    """MedQuAD, with the held-out queries as another split of judgements."""
    setting = gain_sets.Setting('medquad', 300)
    folder = gain_sets.prepare(self.source, self.out / 'data', 'medquad', setting)
    if not (folder / 'qrels' / 'dev.tsv').exists():
      train = read_qrels(folder / 'qrels' / 'train.tsv')
      held_out = gain_sets.first(train, HELD_OUT)
      rest = {query: docs for query, docs in train.items() if query not in held_out}
      write_qrels(folder / 'qrels' / 'train.tsv', rest)
      write_qrels(folder / 'qrels' / 'dev.tsv', held_out)
    return folder

  def path(self, name):
    """The folder or name of a backbone; the contrastive one is made where it is not there."""
    if name != 'contrastive':
      return self.args.backbone if name == 'minilm' else self.args.decoder
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
        self.path(name), self.folder, out, *LENGTHS, pooling=pooling, dtype=self.args.dtype
      ),
    )
    return out

  def config(self, name, pooling, recipe, *options):
    query_length, passage_length = LENGTHS
    return systems.parse(
      recipe,
      [
        f'backbone.path={self.path(name)}',
        f'backbone.dtype={self.args.dtype}',
        f'pooling={pooling}',
        f'data.dir={self.folder}',
        f'data.query_max_length={query_length}',
        f'data.query_buckets=({query_length},)',
        f'data.passage_max_length={passage_length}',
        *options,
      ],
    )

  def frozen(self, name, pooling):
    """Measures a bare backbone."""
    config = self.config(name, pooling, 'dptdr.py:beir,both', 'prompt.length=0')
    return self.search(name, pooling, config, {})

  def train(self, name, adapter, rate, seed):
    """Trains a prompt or LoRA and measures it."""
    one = ADAPTERS[adapter]
    workdir = self.out / 'runs' / f'{name}-{adapter}-{rate:g}-{seed}'
    options = (
      f'data.passage_embeddings={self.passages(name, "mean")}',
      f'optim.learning_rate={rate}',
      f'seed={seed}',
    )
    config = self.config(name, 'mean', one.recipe, *TUNED, *options)
    step = systems.train(config, workdir).step
    trained = trials.restore(workdir, systems.load(self.path(name)), step)
    found = self.search(name, 'mean', config, trained)
    shutil.rmtree(workdir)
    return found | {'bytes': sum(leaf.nbytes for leaf in trained.values())}

  def search(self, name, pooling, config, trained):
    """The test queries; the line has the held-out ones too."""
    backbone = systems.load(self.path(name))
    passages = self.passages(name, pooling)
    model = (backbone, text.load_tokenizer(backbone.path), self.devices, config, trained)
    held_out, found = (
      evaluation.search(*model, self.folder, passages, split) for split in ('dev', 'test')
    )
    scores = {'nDCG@10': found['scores']['nDCG@10'], 'held out': held_out['scores']['nDCG@10']}
    return found | {'held out': held_out['nDCG@10'], 'scores': scores}

  def tables(self):
    """Shows what is there; with --docs, puts it there and keeps the ledger."""
    lines = trials.ledger(self.out)
    runs = {}
    for line in lines:
      runs.setdefault(line['run'], {})[line['seed']] = line
    rows, chosen = [], {}
    for name, label in LABELS.items():
      rate, used = choose(runs, name)
      if used:
        chosen[name] = {seed: np.array(line['scores']['nDCG@10']) for seed, line in used.items()}
        one = next(iter(used.values()))
        rows.append(
          [
            label,
            rate,
            *(
              trials.cell(line[key] for line in used.values()) if key in one else ''
              for key in ('held out', 'nDCG@10', 'R@100')
            ),
            f'{one["bytes"] / 1e3:,.0f} kB' if 'bytes' in one else '',
          ]
        )
    head = ['system', 'learning rate', 'nDCG@10, held-out queries', 'nDCG@10, test', 'R@100, test']
    made = f'{trials.table([*head, "trained for the task"], rows)}\n'
    rows = []
    for ours, theirs in CLAIMS:
      if ours in chosen and theirs in chosen:
        pair = (of_seeds(chosen[one], chosen[ours]) for one in (ours, theirs))
        found = trials.compare(*pair, ['medquad'])
        rows.append([f'{LABELS[ours]} above {LABELS[theirs]}', trials.shown(found)])
    made += f'{trials.table(["claim", "difference in nDCG@10, interval, verdict"], rows)}\n'
    commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
    made += f'{len(lines)} runs; commit {commits}.\n'
    print(made)
    trials.write(self.out / 'results.md', made)
    if self.args.docs:
      trials.publish(self.args.docs, 'decoder', made, [])
      trials.keep(self.out, self.kept, self.settings)


def choose(runs, name):
  """The learning rate of a system, as shown, and its lines by seed; {} where a rate is missing."""
  start, _, adapter = name.partition('/')
  if adapter not in ADAPTERS:
    return '', runs.get(name, {})
  rates = ADAPTERS[adapter].rates
  tried = {rate: runs.get(f'{start}/{adapter}@{rate:g}', {}) for rate in rates}
  if not all(tried.values()):
    return '', {}
  best = max(rates, key=lambda rate: np.mean([one['held out'] for one in tried[rate].values()]))
  return f'{best:g}', tried[best]


def of_seeds(scores, seeds):
  """What `trials.compare` takes; a system that nothing trains for the task has all seeds."""
  own = scores if len(scores) > 1 else dict.fromkeys(seeds, next(iter(scores.values())))
  return {seed: {'medquad': values} for seed, values in own.items()}


if __name__ == '__main__':
  main()
