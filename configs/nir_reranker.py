"""Reranker-Prompt: one reranker for many tasks (NIR-Prompt; Xu et al., 2023).

    python -m dprjax.train --config=configs/condenser.py:mlm --workdir=runs/mlm \\
      --config.backbone.path=DIR --config.data.dir=corpus.txt     # without a masked-LM head
    python -m dprjax.train --config=configs/nir_reranker.py:mdm=paraphrase --workdir=runs/pi \\
      --config.backbone.path=backbone --config.tasks.paraphrase.data.dir=DIR
    python -m dprjax.export --workdir=runs/pi --out=paraphrase.npz
    python -m dprjax.train --config=configs/nir_reranker.py:emm --workdir=runs/emm \\
      --config.backbone.path=backbone --config.tasks.paraphrase.data.dir=DIR \\
      --config.tasks.paraphrase.prompt=paraphrase.npz ...

Arguments as for configs/nir_retriever.py, and

- two tasks of labelled pairs (train.jsonl, .tsv or .csv with text1, text2, label), `paraphrase` and
  `inference`; set --config.tasks.TASK.form=pairs for others
- a template `hybrid`: learned vectors, and "Do these two sentences match?" before [MASK]
- `ft` is monoBERT, a classifier at [CLS]; `mask` does not follow it

The backbone needs a masked-LM head: BERT and RoBERTa as published have one.
"""

from dprjax.training import config as defaults

TASKS = ('retrieval', 'qa', 'dialogue', 'paraphrase', 'inference')
PAIRS = ('paraphrase', 'inference')
KINDS = ('continuous', 'hybrid', 'manual')


def get_config(arg: str = 'emm'):
  shared = defaults.sibling(__file__, 'nir_retriever')
  what, names, rest = shared.split(__file__, arg or 'emm', TASKS, KINDS)
  if 'mask' in rest:
    raise ValueError(f'configs/nir_reranker.py:{arg}: mask? a classifier is at [CLS]')
  c = shared.recipe('ft_reranker' if what == 'ft' else 'nir_reranker', what, names, rest)
  c.pooling, c.normalize = 'cls', False
  c.cross_encoder.loss = 'pointwise'
  if shared.BACKBONE in c.trainable:
    c.trainable = (*c.trainable, 'head/.*')
  for name in set(names) & set(PAIRS):
    c.tasks[name].form, c.tasks[name].measure = 'pairs', 'accuracy'
  c.backbone.path = 'bert-base-uncased'
  # Equal rows of each task; other numbers as for the retriever.
  c.arrangement = 'balanced'
  c.batch_size = 16 if len(names) == 1 else 4 * len(names)
  return shared.finish(c, rest)
