"""RIP: retrieval-oriented intermediate pretraining (DPTDR section 3.2).

    python -m dprjax.train --config=configs/rip.py --workdir=runs/rip \\
      --config.data.dir=corpus.jsonl,more.txt
    python -m dprjax.export --workdir=runs/rip --out=backbone

This trains a backbone on plain text: two sentences of a passage find each other in the batch.
Arguments:

- `sentence` (the default), or `span` (Table 7 compares the two, see configs/condenser.py)
- `prompt`: a prompt for a frozen BERT-base (Table 6)
- `msmarco` or `nq`: with the epochs of the paper
- `local`: a small trial

`--config.backbone.path=scratch:mini` starts from random weights and a vocabulary of the text.
"""

from dprjax.training import config as defaults


def get_config(arg: str = 'sentence'):
  words = (arg or 'sentence').split(',')
  if unknown := set(words) - {'sentence', 'span', 'prompt', 'msmarco', 'nq', 'local'}:
    raise ValueError(
      f'configs/rip.py:{arg}: {", ".join(sorted(unknown))}? choose from sentence, span, prompt, '
      'msmarco, nq and local'
    )
  c = defaults.default('pretrain')
  c.task = 'rip'
  c.backbone.path = 'roberta-large'
  c.trainable = ('backbone/.*', 'head/.*')
  c.pooling, c.normalize = 'cls', False
  c.pretrain.views = 'siblings'
  c.pretrain.unit = 'span' if 'span' in words else 'sentence'
  # DPTDR section 4.1: 2,048 passages, AdamW 1e-4, weight decay 0.01, linear decay. It gives no
  # warm-up; this is that of Condenser.
  c.batch_size, c.grad_cache = 2048, 32
  c.epochs = 4.0 if 'nq' in words else 8.0
  c.optim.learning_rate, c.optim.weight_decay = 1e-4, 0.01
  c.data.format = 'corpus'
  if 'prompt' in words:
    # Table 6: BERT-base, P = 32, no reparametrisation. The MLM head is trained too, since a fresh
    # one would mislead the prompt; at the rate of whole models, since a higher one would wreck it.
    c.backbone.path = 'bert-base-uncased'
    c.trainable = ('prompt/.*', 'head/.*')
    c.prompt.length = 32
    c.optim.learning_rate_rules = (('head/.*', c.optim.learning_rate / 7e-3), ('.*', 1.0))
    c.optim.learning_rate, c.optim.weight_decay = 7e-3, 0.0
  if 'local' in words:
    c = defaults.local(c)
    if 'prompt' not in words:
      c.optim.learning_rate = 3e-3  # at 1e-4 a random backbone stays at chance
  return c
