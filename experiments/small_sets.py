"""Sets of experiments/small_labels.py: those of gain_sets.py, and others that tuned nothing.

The others are pairs from sets of ../shared/data: a text finds its partner among all partners. A
corpus has all judged passages and others, at least 2,000 if there are so many.
"""

import csv
import functools
import zipfile

import numpy as np

import gain_sets
from dprjax.text import texts
from gain_sets import Source, first, hashed, only

# Sources that recipes, learning rates or fusions of this project were developed on.
KNOWN = (
  'clariq',
  'cranfield',
  'scifact',
  'qnli',
  'medquad',
  'arxiv',
  'docstrings',
  'msmarco-dl',
)
# Sources that nothing was developed on.
FRESH = ('sick', 'msrp', 'rte', 'dailydialog', 'stsb')
SOURCES = (*KNOWN, *FRESH)
SIZES = (50, 200, 1000)
TRAIN, TEST = 1000, 300  # queries at most


@functools.cache
def read(data, name):
  """A source. Queries without a relevant passage are left out."""
  if name in KNOWN:
    found = gain_sets.read(data, name)
    return found._replace(
      **{
        split: {query: docs for query, docs in judged.items() if max(docs.values()) > 0}
        for split, judged in (('train', found.train), ('test', found.test))
      }
    )
  make = {
    'sick': read_sick,
    'msrp': read_msrp,
    'rte': read_rte,
    'dailydialog': read_dailydialog,
    'stsb': read_stsb,
  }[name]
  found = make(data / name / 'raw')
  judged = {doc for split in found[2:] for docs in split.values() for doc in docs}
  most = max(gain_sets.PASSAGES, len(judged))
  entries = sorted(found.entries, key=lambda entry: (entry.id not in judged, hashed(entry.id)))
  return found._replace(entries=entries[:most])


def sizes(data, name):
  """The numbers of training queries: `SIZES`, or all that there are."""
  have = len(read(data, name).train)
  found = [size for size in SIZES if size <= have]
  if have < SIZES[-1] and have > 1.5 * (found or [0])[-1]:
    found.append(have)
  return found


def of_pairs(train, test, more=()):
  """A source of (text, partner) pairs; ``more`` are further partners."""
  partners = dict.fromkeys([*(b for _, b in (*train, *test)), *more])
  numbers = {text: f'p{number}' for number, text in enumerate(partners)}
  queries, splits = {}, []
  for split, pairs in (('train', train), ('test', test)):
    judged = {}
    for text, partner in pairs:
      judged.setdefault(text, {})[numbers[partner]] = 1
    ids = {text: f'{split}{number}' for number, text in enumerate(judged)}
    queries |= {id_: text for text, id_ in ids.items()}
    splits.append({ids[text]: docs for text, docs in judged.items()})
  entries = [texts.PassageRecord(id_, '', text) for text, id_ in numbers.items()]
  return Source(entries, queries, first(splits[0], TRAIN), first(splits[1], TEST))


def fresh(pairs, known):
  """Those whose texts are in no pair of ``known``."""
  taken = {text for pair in known for text in pair}
  return [pair for pair in pairs if taken.isdisjoint(pair)]


def rows(path, delimiter='\t'):
  with path.open(encoding='utf-8-sig', newline='') as file:
    yield from csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE)


def read_sick(folder):
  """Sentences that find those which they entail."""
  train, test = (
    [(row[1], row[2]) for row in rows(only(folder, f'*{name}*')) if row[4:5] == ['ENTAILMENT']]
    for name in ('train', 'test_annotated')
  )
  others = [row[2] for row in list(rows(only(folder, '*train*')))[1:]]
  return of_pairs(train, fresh(test, train), others)


def read_msrp(folder):
  """Sentences of the news that find their paraphrase."""
  train, test = (
    [(row[3], row[4]) for row in rows(only(folder, f'*{name}*')) if row[0] == '1']
    for name in ('train', 'test')
  )
  others = [row[4] for row in list(rows(only(folder, '*train*')))[1:]]
  return of_pairs(train, fresh(test, train), others)


def read_stsb(folder):
  """Sentences that find one of a similarity of 4 or more; a line with quotes may be left out."""
  found = {}
  for name in ('train', 'test'):
    with only(folder, f'*{name}*').open(encoding='utf-8', newline='') as file:
      found[name] = [row for row in csv.reader(file) if len(row) == 3]
  train, test = (
    [(a, b) for a, b, score in found[name] if float(score) >= 4] for name in ('train', 'test')
  )
  return of_pairs(train, fresh(test, train), [b for _, b, _ in found['train']])


def read_rte(folder):
  """Statements that find the text which entails them; split by text."""
  found, others = [], []
  with zipfile.ZipFile(only(folder, '*.zip')) as archive:
    for name in sorted(archive.namelist()):
      if name.endswith('.xml'):
        text = archive.read(name).decode('utf-8', 'replace')
        for part in text.split('<pair ')[1:]:
          t, h = (
            ' '.join(part.partition(f'<{tag}>')[2].partition(f'</{tag}>')[0].split())
            for tag in 'th'
          )
          if not t or not h:
            continue
          others.append(t)
          head = part.partition('>')[0]
          if any(f'"{word}"' in head for word in ('TRUE', 'YES', 'ENTAILMENT')):
            found.append((h, t))
  order = sorted(dict.fromkeys(t for _, t in found), key=hashed)
  tested = set(order[: len(order) // 4])
  train, test = (
    [pair for pair in found if (pair[1] in tested) is which] for which in (False, True)
  )
  return of_pairs(train, fresh(test, train), others)


def read_dailydialog(folder):
  """First turns of dialogues that find their reply."""
  found = {}
  for name in ('train', 'test'):
    with zipfile.ZipFile(folder / f'{name}.zip') as archive:
      lines = archive.read(f'{name}/dialogues_{name}.txt').decode().splitlines()
    turns = [[turn.strip() for turn in line.split('__eou__')] for line in lines]
    found[name] = [(one[0], one[1]) for one in turns if len(one) > 2 and one[0] != one[1]]
  return of_pairs(sample(found['train'], TRAIN), fresh(found['test'], found['train']))


def sample(pairs, count):
  return sorted(pairs, key=lambda pair: hashed(pair[0] + pair[1]))[:count]


def numbers(source):
  """The passages' row by id, and both splits as {row: grade} of each query."""
  place = {entry.id: row for row, entry in enumerate(source.entries)}
  judged = [
    [
      {place[doc]: grade for doc, grade in docs.items() if doc in place and grade > 0}
      for docs in own
    ]
    for own in (source.train.values(), source.test.values())
  ]
  return place, *judged


def seen(train, test):
  """For each test query: whether a training query has one of its answers."""
  known = {row for own in train for row in own}
  return np.array([not known.isdisjoint(own) for own in test])
