"""DPTDR's claims on prompts: against fine-tuning, by length, through an MLP, and pretrained.

    python experiments/prompt_tuning.py --data=../shared/data --out=runs/prompt-tuning

From all-MiniLM-L6-v2, with negatives of the batch alone, on SciFact, MedQuAD (2,000 training
queries, 4,000 passages) and docstrings:

- prompts for both sides of 8, 16, 32 and 64 positions (Tables 3 and 4);
- one of 16 that is made by an MLP (Table 5; after training the MLP is gone);
- one of 32 that begins with RIP's (Table 6), pretrained on the texts of SciFact, MedQuAD and arXiv;
  the frozen encoder's masked-LM head is trained first (`--head_steps`), since it comes without one;
- fine-tuning (Table 3).

They are plain: no dropout, no average, no trust region. Each has four learning rates, of which
held-out training queries choose with the first seed, and is trained until their score no longer
rises, at most 300 updates of 16 queries. Runs, seeds, the ledger
(experiments/ledgers/prompt_tuning.jsonl), `--part` and `--ways` are as in experiments/gain.py.

Verdicts were fixed before the runs: those of trials.py over the three sets; and that scores are
alike (P against 16, pretrained against random) is held where the 95 % intervals of all differences
lie within .01 of 0, not held where one lies outside of it, else undecided. (The paper's scores of
P = 8 to 128 are .006 apart.)
"""

import gain_sets
import systems
import trials

SETS = {
  'scifact': gain_sets.Setting('scifact', 809),
  'medquad': gain_sets.Setting('medquad-large', 2000),
  'docstrings': gain_sets.Setting('docstrings', 1000),
}
LENGTHS = (8, 16, 32, 64)
NEAR = 0.01  # in nDCG@10
PLAIN = (*systems.TUNED, 'prompt.dropout=0.0', 'ema=0.0')


def prompt(label, *knobs, rates=(7e-3, 3e-2, 0.1, 0.3)):
  return systems.Way(label, 'dptdr.py:beir,both', rates, (*PLAIN, *knobs), keeps='')


WAYS = {
  **{f'p{length}': prompt(f'P = {length}', f'prompt.length={length}') for length in LENGTHS},
  'mlp': prompt('P = 16 by an MLP', 'prompt.reparam=mlp', rates=(3e-4, 1e-3, 3e-3, 1e-2)),
  'rip': prompt('P = 32 from RIP', 'prompt.length=32'),
  'ft': prompt(
    'fine-tuned',
    'prompt.length=0',
    "trainable=('backbone/.*',)",
    'optim.weight_decay=0.01',
    rates=(2e-5, 5e-5, 1e-4, 2e-4),
  ),
}
CLAIMS = (
  ('D1: fine-tuning above a prompt, P = 16', 'ft', 'p16'),
  ('D1: fine-tuning above a prompt, P = 64', 'ft', 'p64'),
  ('D3: P = 64 above P = 8', 'p64', 'p8'),
  ('D4: without an MLP above with it', 'p16', 'mlp'),
)


# Of RIP on prompts and of the head before it; the head's rate is that of whole models in both.
TEXTS = ('scifact/corpus.jsonl', 'medquad/corpus.jsonl', 'arxiv')
PRETRAINING = (
  'pooling=mean',
  'normalize=True',
  'temperature=0.05',
  'batch_size=64',
  'grad_cache=1',
  'epochs=0.0',
  'backbone.unroll=0',
  'pretrain.max_length=64',
  'pretrain.buckets=(32, 64)',
  'checkpoint.every=100',
)


def main():
  parser = systems.parser(__doc__, SETS, '0,1,2', WAYS)
  parser.add_argument('--head_steps', type=int, default=400, help='updates of the masked-LM head')
  parser.add_argument('--rip_steps', type=int, default=300, help='updates of RIP on the prompt')
  Experiment(trials.begin(parser, SETS)).go()


class Experiment(systems.Runs):
  """Prompts of some lengths, and what they are compared with."""

  name = 'prompt_tuning'
  sets = SETS
  ways = WAYS
  columns = tuple(WAYS)
  claims = CLAIMS
  fixed = (*systems.Runs.fixed, 'head_steps', 'rip_steps')

  def more_knobs(self, way, seed):
    return (f'prompt.init_from={self.rip(seed)}',) if way == 'rip' else ()

  def rip(self, seed):
    """RIP's prompt on the frozen encoder, whose masked-LM head was trained for it."""
    args = self.args
    head, out = (self.out / 'pretrained' / f'{name}-{seed}' for name in ('head', 'rip'))
    out = out.with_suffix('.npz')
    if not out.exists():
      mlm = ('condenser.py:mlm', args.backbone, args.head_steps, 1e-3, "trainable=('head/.*',)")
      self.pretrained('pretrained/head', seed, self.pretraining(seed, *mlm), head)
      prompt = ('rip.py:prompt', head, args.rip_steps, 7e-3, 'prompt.length=32')
      self.pretrained('pretrained/rip', seed, self.pretraining(seed, *prompt), out)
    return out

  def pretraining(self, seed, recipe, backbone, steps, rate, knob):
    """The config of a pretraining."""
    knobs = [
      f'backbone.path={backbone}',
      f'backbone.dtype={self.args.dtype}',
      f'data.dir={",".join(str(self.source / name) for name in TEXTS)}',
      f'data.store={self.out}/store',
      f'steps={steps}',
      f'seed={seed}',
      f'optim.learning_rate={rate}',
      *PRETRAINING,
      knob,
    ]
    return systems.parse(recipe, knobs)

  def page(self, found, names):
    alike = {
      'D3, the score hardly depends on P: P = 8, 32, 64 against 16': [
        (f'p{length}', 'p16') for length in LENGTHS if length != 16
      ],
      "D5, RIP's prompt is no better start than a random one": [('rip', 'p32')],
    }
    made = super().page(found, names)
    for claim, pairs in alike.items():
      gaps = [self.difference(found, names, *pair) for pair in pairs]
      if all(gaps):
        shown = ', '.join(f'{mean:+.3f} [{low:+.3f}, {high:+.3f}]' for mean, low, high, _ in gaps)
        made += f'\n{claim}: {shown}: **{near(gaps)}**\n'
    return made


def near(gaps):
  """The verdict on intervals being near 0."""
  if all(low > -NEAR and high < NEAR for _, low, high, _ in gaps):
    return 'held'
  return 'not' if any(low > NEAR or high < -NEAR for _, low, high, _ in gaps) else 'undecided'


if __name__ == '__main__':
  main()
