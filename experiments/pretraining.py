"""Ways to pretrain a backbone from scratch, compared by trainings that start from it.

    python experiments/pretraining.py --data=../shared/data --out=runs/pretraining

The experiment repeats Tables 7 and 8 of DPTDR and Tables 1 to 3 of Condenser at a small size. For
each seed all methods begin with the same vocabulary and weights, the *start*: random weights after
`--base_steps` updates of plain masked LM, since the papers start from BERT or RoBERTa. All take the
same number of updates with about the same number of tokens (`--tokens`): methods with shorter texts
get more passages.

- Unit and loss: RIP, coCondenser and plain masked LM, each on sentences and on spans.
- Masked LM, Condenser and ICT on whole passages.

The rest is the same for all. Vectors are states of the first token (CLS) or means of all states
(mean), compared by cosine. They are measured

- zero-shot;
- with a prompt (DPT) and fine-tuning (FT) on SciFact and on MedQuAD, with 100, 1,000 and 2,000
  queries;
- with fine-tuning on 500 and 1,000 pairs of STS-b and on 1,000 triplets of Wikipedia sections;
- zero-shot on MedQuAD with texts that all have as many tokens as spans (medquad-even), because
  vectors trained at one length may tell lengths apart and little else.

Each training has three learning rates; held-out examples choose one with the first seed. It goes on
until their score no longer rises, at most 600 updates of 16. On SciFact many trainings are best at
the last update and some stop after a few scores without a rise, so fine-tuning there also takes
1,200 updates without a stop (scifact-long). `--ways=cls` or `--ways=ft,mean` trains only these,
`--methods` names some of the backbones.

Sentence similarity, alignment, uniformity and the entropy of first-token attention are measured
before training. After fine-tuning on MedQuAD, the change of that entropy is measured on 1,000
sections of Wikipedia (Condenser, section 5).

Runs, seeds, the ledger (experiments/ledgers/pretraining.jsonl) and `--part` are as in
experiments/gain.py. Verdicts were fixed before the runs: those of trials.py.
"""

import collections
import dataclasses
import functools
import json
import tempfile

import jax
import numpy as np

import charts
import evaluation
import pretraining_sets
import systems
import trials
from dprjax import Retriever
from dprjax.base import files, mesh
from dprjax.base.counts import ReadReport
from dprjax.exports import exporting
from dprjax.models import model_folders, scratch
from dprjax.papers.condenser import segments, views
from dprjax.papers.condenser.segments import read_documents
from dprjax.retrieval import figures
from dprjax.text import tokenizing, vocabularies
from lab import inspection, mediawiki, statistics
from pretraining_sets import EVEN, LONG, LOOKED_AT, SENTENCES, SETS, SHIFTED, UPDATES, WHOLE
from pretraining_systems import (
  CLAIMS,
  KINDS,
  LABELS,
  LOOKS,
  METHODS,
  POOLINGS,
  SHIFTS,
  START,
  TUNED,
  WAYS,
  alone,
  way,
)


def parser():
  made = systems.parser(__doc__, SETS, '0,1', (*KINDS, *POOLINGS))
  made.set_defaults(backbone='')
  made.add_argument('--methods', default=','.join(LABELS), help='separated by commas')
  made.add_argument('--size', default='tiny', choices=sorted(scratch.SIZES), help='its width')
  made.add_argument('--layers', type=int, default=4)
  made.add_argument('--vocab_size', type=int, default=8000)
  made.add_argument('--base_steps', type=int, default=4000, help='updates of the start')
  made.add_argument('--base_rate', type=float, default=2e-3, help='its learning rate')
  made.add_argument('--steps', type=int, default=1500, help='updates of each method')
  made.add_argument('--rate', type=float, default=5e-4, help='its learning rate')
  made.add_argument('--tokens', type=int, default=4096, help='about how many in an update')
  made.add_argument('--text_length', type=int, default=64, help='tokens of a text, at most')
  made.add_argument('--grad_cache', type=int, default=1, help='chunks, to save memory')
  return made


def main():
  Experiment(trials.begin(parser(), SETS)).go()


class Experiment(systems.Runs):
  """Backbones, and trainings that start from them."""

  name = 'pretraining'
  sets = SETS
  ways = WAYS
  columns = tuple(WAYS)
  claims = CLAIMS
  title = 'Most differences from masked LM may be chance'
  fixed = (
    *systems.Runs.fixed,
    'size',
    'layers',
    'vocab_size',
    'base_steps',
    'base_rate',
    'steps',
    'rate',
    'tokens',
    'text_length',
  )

  def __init__(self, args):
    super().__init__(args)
    # General, medical and scientific text. MedQuAD is the only corpus of a test set in it.
    self.corpus = [
      self.source / 'arxiv',
      self.source / 'medquad' / 'corpus.jsonl',
      self.out / 'enwiki.jsonl',
      *(self.source / 'text' / name for name in ('wikitext-2', 'gutenberg')),
    ]
    words = args.ways.split(',')
    self.kinds = [kind for kind in KINDS if kind in words] or list(KINDS)
    self.poolings = [one for one in POOLINGS if one in words] or list(POOLINGS)
    self.methods = args.methods.split(',')

  # Backbones.

  @functools.cache  # noqa: B019
  def backbone(self, way, seed):
    """The folder of the backbone that a system starts from; made where it is not there."""
    start = self.ways[way].start
    out = self.out / 'backbones' / f'{start}-{seed}'
    if not out.exists():
      self.pretrain(start, seed, out)
    return str(out)

  def pretrain(self, start, seed, out):
    args = self.args
    with files.atomic_write(self.out / 'enwiki.jsonl', 'w') as file:
      for article in mediawiki.read_articles(self.dump):
        text = '\n'.join(section.text for section in article.sections)
        file.write(json.dumps({'_id': article.title, 'text': text}) + '\n')
    if start == START:
      method, steps, rate = METHODS['mlm'], args.base_steps, args.base_rate
      begin = args.backbone or self.random(seed)
    else:
      method, steps, rate = METHODS[start], args.steps, args.rate
      begin = self.backbone(way(START, 'zero', 'cls'), seed)
    config = self.pretraining(method, begin, seed, steps, rate)
    systems.pretrain(self.out, f'backbones/{start}', seed, config, out)

  def random(self, seed):
    """Random weights with the vocabulary of all methods."""
    vocabulary, folder = self.out / 'vocabulary', self.out / 'backbones' / f'random-{seed}'
    if not (vocabulary / 'tokenizer.json').exists():
      trials.say('training the vocabulary')
      found = (one.text for one in read_documents(self.corpus, ReadReport()))
      vocabularies.train_wordpiece(found, self.args.vocab_size, vocabulary)
    if not folder.exists():
      size = tokenizing.load_tokenizer(vocabulary).vocab_size
      shape = scratch.shape(self.args.size, size)
      shape = dataclasses.replace(shape, num_layers=self.args.layers)
      params = scratch.init_params(shape, jax.random.key(seed))
      model_folders.save_backbone(folder, shape, params, source=vocabulary)
    return folder

  def pretraining(self, method, start, seed, steps, rate):
    """The config of a pretraining, with as many passages as hold --tokens tokens."""
    length = self.args.text_length
    options = [
      f'backbone.path={start}',
      f'backbone.dtype={self.args.dtype}',
      'backbone.unroll=0',
      f'data.dir={",".join(map(str, self.corpus))}',
      f'data.token_cache={self.out}/token_cache',
      f'pretrain.max_length={length}',
      f'pretrain.span_length={length // 2 - 2}',
      f'pretrain.buckets=({length // 2}, {length})',
      'epochs=0.0',
      f'steps={steps}',
      f'seed={seed}',
      f'grad_cache={self.args.grad_cache}',
      f'optim.learning_rate={rate}',
      'log_every=50',
      'checkpoint.every=500',
      *method.options,
    ]
    config = systems.parse(method.recipe, options)
    return systems.parse(method.recipe, [*options, f'batch_size={self.passages_in(config, start)}'])

  def passages_in(self, config, start):
    """The measured number of passages of an update."""
    options = config.pretrain
    tokenizer = tokenizing.load_tokenizer(start)
    cache = segments.build_documents(
      self.corpus,
      tokenizer,
      self.out / 'token_cache' / 'documents',
      passage_length=options.passage_length,
    )
    batches, _ = views.make_view_batches(
      cache,
      tokenizer,
      batch_size=256,
      views=options.views,
      unit=options.unit,
      span_length=options.span_length,
      max_length=options.max_length,
      buckets=options.buckets,
      seed=0,
    )
    drawn = [batches[step] for step in range(8)]
    real = np.mean(
      [sum(batch[key].sum() for key in batch if key.endswith('_mask')) / 256 for batch in drawn]
    )
    return max(16, round(self.args.tokens / real / 16) * 16)

  # Trainings that start from them.

  def make(self, name):
    """All runs of a setting, and measures of the vectors of each backbone."""
    taken = KINDS if name in WHOLE else ('zero',) if name == EVEN else ('ft',)
    kinds = [kind for kind in self.kinds if kind in taken]
    for pooling in self.poolings:
      for start in self.methods:
        self.train(name, [way(start, kind, pooling) for kind in kinds])
        for seed in self.seeds:
          self.look(start, pooling, seed)

  def look(self, start, pooling, seed):
    """STS-b and sections as they are, alignment and uniformity, and the entropy of attention."""

    def work():
      backbone = self.backbone(way(start, 'zero', pooling), seed)
      retriever, texts = self.retriever(backbone, pooling), self.looked_at
      found = inspection.inspect(start, retriever, texts)
      queries, passages = (
        retriever.encode([pair[number] for pair in texts.positives], side)
        for number, side in enumerate(('query', 'passage'))
      )
      return {
        'STS-b': found.spearman,
        'sections': found.accuracy,
        'alignment': found.alignment,
        'uniformity': found.uniformity,
        'raw alignment': found.raw_alignment,
        'raw uniformity': found.raw_uniformity,
        'entropy': by_layer(found.entropy.T),
        'scores': {
          'raw alignment': np.sum((queries.astype(np.float64) - passages) ** 2, axis=1),
          'raw uniformity': statistics.uniformity_values(retriever.encode(texts.passages)),
        },
      }

    return trials.measure(self.out, f'looks/{start}.{pooling}', seed, work)

  def retriever(self, backbone, pooling):
    return Retriever.load(
      backbone=backbone,
      pooling=pooling,
      normalize=False,
      query_max_length=systems.QUERY_LENGTH,
      passage_max_length=self.args.length,
    )

  @functools.cached_property
  def looked_at(self):
    return inspection.read_texts(
      scored=self.source / 'stsb' / 'raw' / 'stsb-en-test.csv',
      wikipedia=self.dump,
      beir=self.source / 'scifact',
      most=LOOKED_AT,
    )

  @property
  def dump(self):
    return self.source / 'text' / 'enwiki' / 'enwiki-shortened.xml.bz2'

  def shift(self, name, way, rate, seed):
    """Change of first-token attention by fine-tuning.

    The line has the entropy by layer, before and after, and for each text the change, the mean over
    layers.
    """
    pooling = way.rpartition('.')[2]
    with tempfile.TemporaryDirectory() as folder:
      tuned = exporting.export(self.workdir(name, way, rate, seed), f'{folder}/tuned', force=True)
      before, after = (
        inspection.first_token_entropies(
          self.retriever(path, pooling), self.looked_at.attended
        ).mean(axis=2)
        for path in (self.backbone(way, seed), tuned)
      )
    return [by_layer(values) for values in (before, after)], np.abs(after - before).mean(axis=1)

  def more_options(self, name, way, seed):
    del way, seed
    return (f'steps={UPDATES}', 'eval.patience=0') if name == LONG else ()

  def folder(self, name):
    source, count = self.sets[name].source, self.sets[name].train
    folder = self.out / 'data' / name
    if source == 'stsb':
      return pretraining_sets.few_pairs(self.source / 'stsb' / 'raw', folder, count)
    if source == 'sections':
      return pretraining_sets.split_dump(self.dump, self.out / 'data' / 'sections')
    if name == EVEN:
      return pretraining_sets.repeat_texts(
        super().folder('medquad'), folder, self.args.text_length // 2
      )
    return super().folder(name)

  def lengths(self, name):
    length = self.args.text_length // 2  # of a span, with its special tokens
    return (length, length) if name == EVEN else super().lengths(name)

  def config(self, name, way, rate, seed):
    source = self.sets[name].source
    if source not in SENTENCES:
      return super().config(name, way, rate, seed)
    known = ('pooling', 'steps', 'epochs', 'batch_size', 'eval', 'optim.weight_decay', 'trainable')
    options = [
      f'backbone.path={self.backbone(way, seed)}',
      f'backbone.dtype={self.args.dtype}',
      'backbone.unroll=0',
      f'data.query_max_length={self.args.length}',
      f'seed={seed}',
      *(option for option in self.ways[way].options if option.startswith(known)),
      f'optim.learning_rate={rate}',
    ]
    if source == 'stsb':
      options += [f'data.dir={self.folder(name)}', 'data.train_split=train.jsonl']
      options += ['data.dev_split=dev.jsonl']
    else:
      options += [f'data.dir={self.folder(name) / "train.xml.bz2"}', 'data.hold_out=0.2']
      options += [
        f'data.max_queries={self.sets[name].train}',
        'sections.per_article=0',
        'sections.dev_triplets=1000',
      ]
    return systems.parse(SENTENCES[source], options)

  def search(self, name, way, rate, seed, trained):
    """The test queries, pairs or triplets."""
    source = self.sets[name].source
    if source not in SENTENCES:
      found = super().search(name, way, rate, seed, trained)
      if name == SHIFTED and way and '.ft.' in way:
        found['entropy'], found['scores']['shift'] = self.shift(name, way, rate, seed)
      return found
    backbone = systems.load(self.backbone(way, seed))
    embed = evaluation.embedder(
      backbone,
      tokenizing.load_tokenizer(backbone.path),
      mesh.make_mesh({'data': -1}),
      self.config(name, way, rate, seed),
      trained,
    )
    measured = {
      'stsb': pretraining_sets.measure_pairs,
      'sections': pretraining_sets.measure_sections,
    }[source]
    return measured(self.folder(name), lambda texts: embed('query', texts))

  # Tables and figures.

  def page(self, found, names):
    parts = [self.losses()]
    for pooling in POOLINGS:
      parts += [self.trained(found, names, pooling), self.verdicts_of(found, pooling)]
    return '\n'.join(part for part in (*parts, self.looks(), self.shifts(found)) if part)

  def short(self, found, names):
    made = self.trained(found, names, POOLINGS[0])
    return f'{made}\n{self.verdicts_of(found, POOLINGS[0], decided=True)}'

  def losses(self):
    """The pretraining losses at the end."""
    lines = [line for line in trials.ledger(self.out) if line['run'].startswith('backbones/')]
    if not lines:
      return ''
    columns = {
      'mlm': 'masked LM',
      'condenser': 'Condenser head',
      'contrast': 'contrast',
      'accuracy': 'its accuracy',
    }
    rows = []
    for start, label in LABELS.items():
      own = [line for line in lines if line['run'] == f'backbones/{start}']
      if own:
        values = ([line[key] for line in own if key in line] for key in columns)
        passages = ', '.join(sorted({f'{line["passages"]}' for line in own}))
        rows.append([label, f'{len(own)}', passages, *(trials.cell(some) for some in values)])
    head = ['', 'seeds', 'passages an update', *columns.values()]
    return f'## Losses\n\n{trials.table(head, rows)}'

  def trained(self, found, names, pooling):
    """Scores of all methods, a table for each kind of training."""
    made = []
    for kind, label in KINDS.items():
      starts = {start: way(start, kind, pooling) for start in LABELS}
      columns = [name for name in names if any(found[name][one] for one in starts.values())]
      if not columns:
        continue
      rows = []
      for start, one in starts.items():
        cells = [trials.cell(self.mean(found, name, one)) for name in columns]
        if any(cells):
          rows.append([LABELS[start], *cells])
      if TUNED[kind][0]:
        rows.append(
          [
            'examples seen, repeats counted',
            *(seen(found[name], starts.values()) for name in columns),
          ]
        )
      made.append(trials.table([f'{label}, {pooling}', *columns], rows))
    return '\n'.join([f'## Vectors: {pooling}\n', *made]) if made else ''

  def verdicts_of(self, found, pooling, decided=False):
    """The verdicts of a pooling, all of them or those that are not 'undecided'."""
    rows = []
    for claim, ours, theirs, kind, some in self.claims:
      pair = [way(start, kind, pooling) for start in (ours, theirs)]
      if set(self.settled(found, some, *pair)) == set(some):
        verdict = self.difference(found, some, *pair)
        if not decided or verdict[3] != 'undecided':
          each = self.each(found, some, pair)
          rows.append([claim, KINDS[kind], each, trials.shown(verdict)])
    head = ['claim', 'trained', 'sets', 'difference, interval, verdict']
    return trials.table(head, rows) if rows else ''

  def each(self, found, names, pair):
    """The sets of a verdict; where they are several, with the difference on each."""
    if len(names) == 1:
      return names[0]
    gaps = ((name, self.difference(found, [name], *pair)) for name in names)
    return ', '.join(
      f'{name} {mean:+.3f} [{low:+.3f}, {high:+.3f}]' for name, (mean, low, high, _) in gaps
    )

  def looks(self):
    """Measures of vectors without training."""
    lines = [line for line in trials.ledger(self.out) if line['run'].startswith('looks/')]
    if not lines:
      return ''
    columns = (
      'STS-b',
      'sections',
      'alignment',
      'uniformity',
      'raw alignment',
      'raw uniformity',
    )
    looks = collections.defaultdict(dict)
    for line in lines:
      looks[line['run']][line['seed']] = line
    rows = []
    for pooling in POOLINGS:
      for start, label in LABELS.items():
        if own := looks[f'looks/{start}.{pooling}'].values():
          cells = (trials.cell(line[key] for line in own) for key in columns)
          entropy = np.mean([line['entropy'] for line in own], axis=0)
          rows.append([label, pooling, *cells, listed(entropy)])
    head = ['', 'vectors', *columns, 'entropy by layer']
    verdicts = self.compared(LOOKS, lambda start, pooling: looks[f'looks/{start}.{pooling}'])
    return f'## Without training\n\n{trials.table(head, rows)}{verdicts}'

  def shifts(self, found):
    """Change of attention by fine-tuning."""
    lines, rows = found[SHIFTED], []
    for pooling in POOLINGS:
      for start, label in LABELS.items():
        if own := lines[way(start, 'ft', pooling)].values():
          entropies = np.mean([line['entropy'] for line in own], axis=0)
          moved = trials.cell(np.mean(line['scores']['shift']) for line in own)
          rows.append([label, pooling, *map(listed, entropies), moved])
    if not rows:
      return ''
    head = ['', 'vectors', 'entropy by layer', f'after FT on {SHIFTED}', 'moved']
    verdicts = self.compared(SHIFTS, lambda start, pooling: lines[way(start, 'ft', pooling)])
    return f'## Attention of the first token\n\n{trials.table(head, rows)}{verdicts}'

  def compared(self, claims, lines_of):
    """Verdicts on measures other than scores, of {seed: line} of a method and pooling."""
    rows = []
    for pooling in POOLINGS:
      for claim, more, less, key in claims:
        pair = [
          {seed: {key: np.array(line['scores'][key])} for seed, line in found.items()}
          for found in (lines_of(start, pooling) for start in (more, less))
        ]
        if all(seed in one for one in pair for seed in self.seeds):
          rows.append([claim, pooling, trials.shown(trials.compare(*pair, [key]))])
    head = ['claim', 'vectors', 'difference, interval, verdict']
    return f'\n{trials.table(head, rows)}' if rows else ''

  def draw(self, found, names):
    """Differences from masked LM of the same texts, for each pooling."""
    drawn = []
    for pooling in POOLINGS:
      gains = {}
      for name in names:
        for kind in KINDS:
          bars = {}
          for start in METHODS:
            pair = [way(one, kind, pooling) for one in (start, alone(start))]
            if start != alone(start) and (compared := self.difference(found, [name], *pair)):
              bars[LABELS[start]] = figures.Bar(*compared[:3], False)
          if bars:
            gains[f'{name}, {KINDS[kind]}'] = bars
      if gains:
        drawn.append(self.out / f'pretraining-{pooling}.png')
        foot = f'pooling: {pooling}; 95 % intervals, long ones cut; empty: not run'
        others = {'stsb': 'STS-b: Spearman', 'sections': 'sections: accuracy'}
        said = '; '.join(
          word for name, word in others.items() if any(row.startswith(name) for row in gains)
        )
        what = f'difference in nDCG@10{f" ({said})" if said else ""} from masked LM'
        charts.differences(gains, what, foot, drawn[-1], self.title)
    return drawn


def seen(found, ways):
  """From how many to how many training examples the chosen checkpoints of a setting have seen."""
  steps = [line['step'] for one in ways for line in found[one].values()]
  return ' to '.join(f'{systems.BATCH * step:,}' for step in sorted({min(steps), max(steps)}))


def by_layer(entropies):
  """Means over texts or heads, [n, L]."""
  return [round(float(value), 4) for value in entropies.mean(axis=0)]


def listed(values):
  return ', '.join(f'{value:.2f}' for value in values)


if __name__ == '__main__':
  main()
