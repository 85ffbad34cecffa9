"""RIP: retrieval-oriented intermediate pretraining (DPTDR section 3.2).

    python -m dprjax.train --config=configs/rip.py --workdir=runs/rip \\
      --config.data.dir=corpus.jsonl,more.txt
    python -m dprjax.export --workdir=runs/rip --out=backbone

This trains a backbone on plain text: two sentences of a passage find each other in the batch.
Arguments: `sentence` (the default), `span` (two spans instead; Table 7 compares the two under
coCondenser, see configs/condenser.py), `prompt` (Table 6: a prompt in place of BERT-base, which is
frozen), `msmarco` or `nq` (the paper's numbers of epochs), and `local` after any of them.
`--config.backbone.path=scratch:mini` starts from random weights and trains a vocabulary on the
text.
"""

from dprjax.runtime import config as defaults


def get_config(arg: str = 'sentence'):
  words = (arg or 'sentence').split(',')
  if unknown := set(words) - {'sentence', 'span', 'prompt', 'msmarco', 'nq', 'local'}:
    raise ValueError(
      f'configs/rip.py:{arg}: {", ".join(sorted(unknown))}? choose from sentence, span, prompt, '
      'msmarco, nq and local'
    )
  c = defaults.default()
  c.method = 'pretrain'
  c.task = 'rip'
  c.backbone.path = 'roberta-large'
  c.trainable = ('backbone/.*', 'head/.*')
  c.pretrain.views = 'siblings'
  c.pretrain.unit = 'span' if 'span' in words else 'sentence'
  # DPTDR section 4.1: 2,048 passages, AdamW 1e-4, weight decay 0.01, linear decay. It gives no
  # warm-up; this is Condenser's.
  c.batch_size, c.grad_cache = 2048, 32
  c.epochs = 4.0 if 'nq' in words else 8.0
  c.optim.learning_rate, c.optim.weight_decay = 1e-4, 0.01
  c.data.format = 'corpus'
  if 'prompt' in words:
    # Table 6: BERT-base, P = 32, no reparametrisation. The MLM head is trained too, so that a fresh
    # one does not mislead the prompt, and at the rate of whole models: a prompt's would wreck it.
    # The prompt alone is exported.
    c.backbone.path = 'bert-base-uncased'
    c.trainable = ('prompt/.*', 'head/.*')
    c.prompt.length = 32
    c.optim.learning_rate_rules = (('head/.*', c.optim.learning_rate / 7e-3), ('.*', 1.0))
    c.optim.learning_rate, c.optim.weight_decay = 7e-3, 0.0
  return defaults.local(c) if 'local' in words else c
