"""Claims of DPTDR on prompts: against fine-tuning, by length, through an MLP, and pretrained.

    python experiments/prompt_tuning.py --data=../shared/data --out=runs/prompt-tuning

All start from all-MiniLM-L6-v2, with negatives of the batch only, on SciFact, MedQuAD (2,000
training queries, 4,000 passages) and docstrings:

- prompts for both sides of 8, 16, 32 and 64 positions (Tables 3 and 4);
- a prompt of 16 through an MLP (Table 5; after training the MLP is gone);
- a prompt of 32 that begins with that of RIP (Table 6), pretrained on the texts of SciFact, MedQuAD
  and arXiv. The frozen encoder has no masked-LM head, so one is trained first (`--head_steps`),
  once for all seeds; the prompt of RIP is trained for each seed;
- fine-tuning (Table 3).

They are plain: no dropout, no average, no trust region. Each has four learning rates; held-out
training queries choose one with the first seed. It is trained until their score no longer rises, at
most 300 updates of 16 queries. Runs, seeds, the ledger (experiments/ledgers/prompt_tuning.jsonl),
`--part` and `--ways` are as in experiments/gain.py.

Verdicts were fixed before the runs: those of trials.py over the three sets. That scores are alike
(P against 16, pretrained against random) is held if the 95 % intervals of all differences lie
within .01 of 0, not held if one lies outside of it, else undecided. (In the paper, scores of P = 8
to 128 are .006 apart.)
"""

import adapted
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


def prompt(label, *options, rates=(7e-3, 3e-2, 0.1, 0.3)):
  return systems.Way(label, 'dptdr.py:beir,both', rates, (*systems.PLAIN, *options), keeps='')


WAYS = {
  **{f'p{length}': prompt(f'P = {length}', f'prompt.length={length}') for length in LENGTHS},
  'mlp': prompt('P = 16 by an MLP', 'prompt.reparam=mlp', rates=(3e-4, 1e-3, 3e-3, 1e-2)),
  'rip': prompt('P = 32 from RIP', 'prompt.length=32'),
  'ft': prompt(
    'fine-tuned',
    *systems.FINE_TUNED,
    rates=(2e-5, 5e-5, 1e-4, 2e-4),
  ),
}
CLAIMS = (
  ('D1: fine-tuning above a prompt, P = 16', 'ft', 'p16'),
  ('D1: fine-tuning above a prompt, P = 64', 'ft', 'p64'),
  ('D3: P = 64 above P = 8', 'p64', 'p8'),
  ('D4: without an MLP above with it', 'p16', 'mlp'),
)


def parser():
  return adapted.parser(__doc__, SETS, '0,1,2', WAYS)


def main():
  Experiment(trials.begin(parser(), SETS)).go()


class Experiment(adapted.Runs):
  """Prompts of some lengths, and the systems that they are compared with."""

  name = 'prompt_tuning'
  sets = SETS
  ways = WAYS
  columns = tuple(WAYS)
  claims = CLAIMS
  title = 'Prompts of all lengths gain alike; fine-tuning gains more'

  def more_options(self, name, way, seed):
    if way != 'rip':
      return ()
    return (f'prompt.init_from={self.rip(seed, "rip", "rip.py:prompt", 7e-3, "prompt.length=32")}',)

  def page(self, found, names):
    alike = {
      'D3, the score hardly depends on P: P = 8, 32, 64 against 16': [
        (f'p{length}', 'p16') for length in LENGTHS if length != 16
      ],
      'D5, a prompt of RIP is no better start than a random one': [('rip', 'p32')],
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
