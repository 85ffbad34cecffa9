"""Shared by experiments that pretrain a published encoder further, by RIP.

Such an encoder has no masked-LM head, so one is trained first, on the frozen encoder, once for all
seeds.
"""

import systems

# Options of the head and of RIP. The head has the learning rate of whole models in both.
TEXTS = ('scifact/corpus.jsonl', 'medquad/corpus.jsonl', 'arxiv')
OPTIONS = (
  'pooling=mean',
  'normalize=True',
  'temperature=0.05',
  'batch_size=64',
  'grad_cache=1',
  'epochs=0.0',
  'backbone.unroll=0',
  'checkpoint.every=100',
)
# Tokens of a passage for the head, and of a sentence for RIP: 73 % have no more.
HEAD_LENGTH, SENTENCE_LENGTH = 64, 32


def parser(doc, settings, seeds, ways):
  """``systems.parser`` with the lengths of these trainings."""
  made = systems.parser(doc, settings, seeds, ways)
  made.add_argument('--head_steps', type=int, default=400, help='updates of the masked-LM head')
  made.add_argument('--rip_steps', type=int, default=300, help='updates of RIP')
  return made


class Runs(systems.Runs):
  """Runs that may start from a result of RIP."""

  fixed = (*systems.Runs.fixed, 'head_steps', 'rip_steps')

  def rip(self, seed, name, recipe, rate, *options):
    """The result of RIP by a recipe: a prompt, or the encoder itself."""
    out = self.out / 'pretrained' / f'{name}-{seed}'
    if 'prompt' in recipe:
      out = out.with_suffix('.npz')
    if not out.exists():
      args, head = self.args, self.out / 'pretrained' / 'head'
      if not head.exists():
        mlm = ('condenser.py:mlm', args.backbone, HEAD_LENGTH, args.head_steps, 1e-2)
        config = self.pretraining(0, *mlm, "trainable=('head/.*',)")
        systems.pretrain(self.out, 'pretrained/head', 0, config, head)
      config = self.pretraining(seed, recipe, head, SENTENCE_LENGTH, args.rip_steps, rate, *options)
      systems.pretrain(self.out, f'pretrained/{name}', seed, config, out)
    return out

  def pretraining(self, seed, recipe, backbone, length, steps, rate, *options):
    """The config of one of these trainings."""
    return systems.parse(
      recipe,
      [
        f'backbone.path={backbone}',
        f'backbone.dtype={self.args.dtype}',
        f'data.dir={",".join(str(self.source / name) for name in TEXTS)}',
        f'data.token_cache={self.out}/token_cache',
        f'pretrain.max_length={length}',
        f'pretrain.buckets=({length},)',
        f'steps={steps}',
        f'seed={seed}',
        f'optim.learning_rate={rate}',
        *OPTIONS,
        *options,
      ],
    )
