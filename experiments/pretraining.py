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

import bz2
import collections
import dataclasses
import functools
import hashlib
import json
import re
import shutil
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import scipy.special

import charts
import evaluation
import gain_sets
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
from lab import inspection, measures, mediawiki, sections, sts
from lab.similarity import spearman_values


class Method(NamedTuple):
  """A pretraining of a backbone: a label, a recipe of configs/, and differences from it."""

  label: str
  recipe: str
  options: tuple[str, ...] = ()


ALONE = ('pretrain.contrast_weight=0.0',)
METHODS = {
  'mlm': Method('masked LM', 'condenser.py:mlm'),
  'mlm-sentence': Method('masked LM, sentences', 'rip.py:sentence', ALONE),
  'mlm-span': Method('masked LM, spans', 'rip.py:span', ALONE),
  'rip-sentence': Method('RIP, sentences', 'rip.py:sentence'),
  'rip-span': Method('RIP, spans', 'rip.py:span'),
  'cocondenser-sentence': Method('coCondenser, sentences', 'condenser.py:cocondenser,sentence'),
  'cocondenser-span': Method('coCondenser, spans', 'condenser.py:cocondenser'),
  'condenser': Method('Condenser', 'condenser.py:condenser'),
  'ict': Method('ICT', 'condenser.py:ict'),
}
START = 'start'
LABELS = {START: 'start'} | {key: one.label for key, one in METHODS.items()}
POOLINGS = ('cls', 'mean')
RATES = (1e-4, 3e-4, 1e-3)  # of whole backbones
PROMPT_RATES = (3e-2, 0.1, 0.3)
# Small encoders that know little rise late.
LONGER = (*systems.PLAIN, 'steps=600', 'eval.patience=4')
TUNED = {  # trainings: learning rates, options
  'zero': ((), ('prompt.length=0',)),
  'dpt': (PROMPT_RATES, LONGER),
  'ft': (
    RATES,
    (*LONGER, *systems.FINE_TUNED),
  ),
}
KINDS = {'zero': 'zero-shot', 'dpt': 'DPT', 'ft': 'FT'}
SETS = {
  'scifact': gain_sets.Setting('scifact', 809),
  'scifact-long': gain_sets.Setting('scifact', 809),
  'medquad': gain_sets.Setting('medquad-large', 2000),
  'medquad-even': gain_sets.Setting('medquad-even', 2000),
  'medquad-100': gain_sets.Setting('medquad-large', 100),
  'medquad-1000': gain_sets.Setting('medquad-large', 1000),
  'stsb-500': gain_sets.Setting('stsb', 500),
  'stsb-1000': gain_sets.Setting('stsb', 1000),
  'sections-1000': gain_sets.Setting('sections', 1000),
}
EVEN = 'medquad-even'  # all texts as long as spans; zero-shot only
LONG, UPDATES = 'scifact-long', 1200  # fine-tuning of so many updates, whatever they gain
WHOLE = ('scifact', 'medquad')  # also zero-shot and by a prompt
# Sources that are not retrieval.
SENTENCES = {
  name: trials.ROOT / 'experiments' / 'lab' / 'configs' / f'{name}.py'
  for name in ('stsb', 'sections')
}
TESTED = 0.3  # of Wikipedia articles
LOOKED_AT = 1000  # texts, at most
SHIFTED = 'medquad'  # the set for the change of attention by fine-tuning

UNITS = ('sentence', 'span')
# (claim, its method, the one that it is above), whatever is trained
CROSSED = (
  *(
    (f'D6: sentences above spans, {said}', f'{loss}-sentence', f'{loss}-span')
    for said, loss in (('coCondenser', 'cocondenser'), ('RIP', 'rip'))
  ),
  *(
    (f'D7: {said}, {unit}s', f'{ours}-{unit}', f'{theirs}-{unit}')
    for said, ours, theirs in (
      ('RIP above coCondenser', 'rip', 'cocondenser'),
      ('RIP above masked LM', 'rip', 'mlm'),
      ('coCondenser above masked LM', 'cocondenser', 'mlm'),
    )
    for unit in UNITS
  ),
)
LOW = ('medquad-100', 'medquad-1000')
# (claim, its method, the one that it is above, the training, the sets)
CLAIMS = (
  *((*one, kind, WHOLE) for kind in KINDS for one in CROSSED),
  *((*one, 'ft', (LONG,)) for one in CROSSED),
  (
    'D6, one length: coCondenser',
    'cocondenser-sentence',
    'cocondenser-span',
    'zero',
    (EVEN,),
  ),
  ('D6, one length: RIP', 'rip-sentence', 'rip-span', 'zero', (EVEN,)),
  ('C1: Condenser above masked LM, 500 pairs', 'condenser', 'mlm', 'ft', ('stsb-500',)),
  ('C1: Condenser above masked LM, 1,000 pairs', 'condenser', 'mlm', 'ft', ('stsb-1000',)),
  ('C2: Condenser above masked LM, sections', 'condenser', 'mlm', 'ft', ('sections-1000',)),
  ('C3: Condenser above masked LM, few queries', 'condenser', 'mlm', 'ft', LOW),
  ('C3: Condenser above masked LM, all queries', 'condenser', 'mlm', 'ft', WHOLE),
  ('C4: ICT above Condenser, few queries', 'ict', 'condenser', 'ft', LOW),
  ('C4: ICT above Condenser, all queries', 'ict', 'condenser', 'ft', WHOLE),
)
# (claim, the method whose measure is higher, and lower, without training; see `Experiment.look`)
LOOKS = tuple(
  (f'D8: {said}, {unit}s', f'{other}-{unit}', f'rip-{unit}', measure)
  for said, other, measure in (
    ('RIP better aligned than masked LM', 'mlm', 'raw alignment'),
    ('RIP more uniform than masked LM', 'mlm', 'raw uniformity'),
    ('RIP more uniform than coCondenser', 'cocondenser', 'raw uniformity'),
  )
  for unit in UNITS
)
# (claim, the method whose attention fine-tuning moves more, and less; see `Experiment.shift`)
SHIFTS = (
  ('C5: more after masked LM than after Condenser', 'mlm', 'condenser', 'shift'),
  ('C5: more after masked LM than after ICT', 'mlm', 'ict', 'shift'),
)


def way(start, kind, pooling):
  """The name of a system."""
  return f'{start}.{kind}.{pooling}'


def alone(start):
  """Plain masked LM on the texts of a method."""
  unit = start.rpartition('-')[2]
  return f'mlm-{unit}' if unit in UNITS else 'mlm'


def make(start, kind, pooling):
  rates, options = TUNED[kind]
  return systems.Way(
    f'{LABELS[start]}, {KINDS[kind]}',
    'dptdr.py:beir,both',
    rates,
    (*options, f'pooling={pooling}'),
    keeps='',
    start=start,
    trained=kind != 'zero',
  )


WAYS = {
  way(start, kind, pooling): make(start, kind, pooling)
  for pooling in POOLINGS
  for kind in TUNED
  for start in LABELS
}


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
          'raw uniformity': uniformity_values(retriever.encode(texts.passages)),
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
      return few_pairs(self.source / 'stsb' / 'raw', folder, count)
    if source == 'sections':
      return split_dump(self.dump, self.out / 'data' / 'sections')
    if name == EVEN:
      return repeat_texts(super().folder('medquad'), folder, self.args.text_length // 2)
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
    measured = {'stsb': measure_pairs, 'sections': measure_sections}[source]
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


def uniformity_values(x, t=2):
  """``statistics.uniformity`` plus the influence of each vector on it; their mean is uniformity.

  A bootstrap of these values gives its interval, as of ``spearman_values``: a vector takes part in
  n - 1 of the pairs (Hajek projection of a U-statistic, by its logarithm). Holds n x n numbers.
  """
  x = np.asarray(x, np.float64)
  square = np.sum(x**2, axis=1)
  exponent = -t * (square[:, None] + square[None, :] - 2 * (x @ x.T)).clip(0)
  np.fill_diagonal(exponent, -np.inf)
  own = scipy.special.logsumexp(exponent, axis=1) - np.log(len(x) - 1)
  value = scipy.special.logsumexp(own) - np.log(len(x))
  return value + 2 * (np.exp(own - value) - 1)


def listed(values):
  return ', '.join(f'{value:.2f}' for value in values)


def repeat_texts(source, folder, length):
  """A folder with the queries and passages of another, each repeated until it has so many words."""
  if not folder.exists():
    with files.atomic_path(folder) as made:
      shutil.copytree(source, made)
      for path in (made / 'corpus.jsonl', made / 'queries.jsonl'):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        with path.open('w') as file:
          for row in rows:
            words = f'{row.pop("title", "")} {row["text"]}'.split()
            times = -(-length // max(1, len(words)))
            file.write(json.dumps(row | {'text': ' '.join(words * times)}) + '\n')
  return folder


def few_pairs(source, folder, count):
  """A folder of so many training pairs, by a hash of their rows, and all dev and test pairs."""
  if not (folder / 'test.jsonl').exists():
    folder.mkdir(parents=True, exist_ok=True)
    for split in ('train', 'dev', 'test'):
      pairs = sts.read_pairs(source / f'stsb-en-{split}.csv')
      if split == 'train':
        pairs = sorted(pairs, key=lambda pair: gain_sets.hashed('\n'.join(pair[:2])))[:count]
      with files.atomic_write(folder / f'{split}.jsonl') as file:
        for first, second, score in pairs:
          row = {'sentence1': first, 'sentence2': second, 'score': score}
          file.write(json.dumps(row) + '\n')
  return folder


def split_dump(dump, folder):
  """A folder of two dumps, train.xml.bz2 and test.xml.bz2, by a hash of page titles."""
  if not (folder / 'test.xml.bz2').exists():
    folder.mkdir(parents=True, exist_ok=True)
    whole = bz2.decompress(dump.read_bytes()).decode()
    head, tail = whole[: whole.index('<page>')], whole[whole.rindex('</page>') + len('</page>') :]
    pages = {'train': [], 'test': []}
    for page in re.findall(r'<page>.*?</page>', whole, re.DOTALL):
      title = re.search(r'<title>(.*?)</title>', page, re.DOTALL)[1]
      share = int.from_bytes(hashlib.sha256(title.encode()).digest()[:7]) / 2**56
      pages['test' if share < TESTED else 'train'].append(page)
    for split, some in pages.items():
      with files.atomic_write(folder / f'{split}.xml.bz2', 'wb') as file:
        file.write(bz2.compress(''.join((head, *some, tail)).encode()))
  return folder


def measure_pairs(folder, embed):
  """Spearman correlation of the test pairs, and the influence of each pair on it as 'scores'."""
  pairs = sts.read_pairs(folder / 'test.jsonl')
  first, second = (embed([pair[side] for pair in pairs]) for side in (0, 1))
  cosines, people = measures.cosine(first, second), np.array([pair.score for pair in pairs])
  values = spearman_values(cosines, people)
  return {'spearman': measures.spearman(cosines, people), 'scores': {'spearman': values}}


def measure_sections(folder, embed):
  """Whether an anchor is nearer to its own section, of triplets of articles that none has seen."""
  articles = mediawiki.read_articles(folder / 'test.xml.bz2')
  triplets, _ = sections.draw_triplets(articles, 0, most=LOOKED_AT)
  anchor, positive, negative = (embed([one[view] for one in triplets]) for view in range(3))
  near, far = (np.linalg.norm(anchor - other, axis=1) for other in (positive, negative))
  right = (near < far).astype(float)
  return {'accuracy': float(right.mean()), 'scores': {'accuracy': right}}


if __name__ == '__main__':
  main()
