"""The data of experiments/nir_prompt.py: the sets of ../shared/data as BEIR folders.

    SETS/train/TASK        training data of a task (train and dev judgements, negatives from BM25)
    SETS/test/NAME         a test set (test judgements)

The corpora of test sets hold the judged passages of 150 queries and random ones, 300 in all or as
many as are judged. Test texts that stand in the training data are taken out.
"""

import csv
import io
import itertools
import json
import zipfile

import numpy as np

from dprjax.base import files
from dprjax.retrieval import bm25_index
from dprjax.text.qrels import write_qrels
from dprjax.text.sources import Source, load_dataset

TASKS = ('dialogue', 'qa', 'retrieval')
# The test sets of a task: in its domain, and another.
IN_DOMAIN = {'retrieval': 'scifact', 'qa': 'medquad', 'dialogue': 'dailydialog'}
OUT_OF_DOMAIN = {'retrieval': 'cranfield', 'qa': 'qnli', 'dialogue': 'clariq'}
PASSAGES = 300  # of the corpus of a test set
TRAIN, TEST, DEV = 1500, 150, 100  # queries of a task at most
DEPTH = 20  # BM25's passages that negatives are taken from


def prepare(data, out):
  """Writes all sets; returns how many of what there are, by set."""
  counts = {}
  for number, make in enumerate((scifact, cranfield, medquad, qnli, dailydialog, clariq)):
    counts |= make(data, out, np.random.default_rng(number))
  return {'counts': counts}


def scifact(data, out, random):
  train = load_dataset(Source(str(data / 'scifact'), 'beir', 'train'))
  passages = {passage.id: passage.text for passage in train.passages}
  order = random.permutation(len(train.queries))
  held = {train.queries[i].id for i in order[: len(order) // 10]}
  test = load_dataset(Source(str(data / 'scifact'), 'beir', 'test'))
  return {
    'retrieval': write_training(
      out,
      'retrieval',
      passages,
      [query for query in train.queries if query.id not in held],
      [query for query in train.queries if query.id in held][:DEV],
      {query.id: train.positives(query.id) for query in train.queries},
      random,
    ),
    'scifact': write_test(out, 'scifact', passages, test.queries[:TEST], test.qrels, random),
  }


def cranfield(data, out, random):
  return {'cranfield': untrained(data / 'cranfield', out, 'cranfield', ('test',), TEST, random)}


def clariq(data, out, random):
  # A query has 13 passages.
  splits = ('train', 'dev', 'test')
  return {'clariq': untrained(data / 'clariq', out, 'clariq', splits, TEST // 3, random)}


def untrained(folder, out, name, splits, count, random):
  """A set that nothing is trained on: queries of all its splits."""
  parts = [load_dataset(Source(str(folder), 'beir', split)) for split in splits]
  queries = draw([query for part in parts for query in part.queries], count, random)
  qrels = {query: grades for part in parts for query, grades in part.qrels.items()}
  passages = {passage.id: passage.text for passage in parts[0].passages}
  return write_test(out, name, passages, queries, qrels, random)


def medquad(data, out, random):
  splits = {
    name: load_dataset(Source(str(data / 'medquad'), 'beir', name))
    for name in ('train', 'dev', 'test')
  }
  passages = {passage.id: passage.text for passage in splits['train'].passages}
  chosen = {
    name: draw(splits[name].queries, count, random)
    for name, count in (('train', TRAIN), ('dev', DEV), ('test', TEST))
  }
  positives = {
    query.id: splits[name].positives(query.id) for name in chosen for query in chosen[name]
  }
  return {
    'qa': write_training(out, 'qa', passages, chosen['train'], chosen['dev'], positives, random),
    'medquad': write_test(out, 'medquad', passages, chosen['test'], splits['test'].qrels, random),
  }


def qnli(data, out, random):
  """Questions that their sentence answers, among sentences of other questions."""
  rows = list(read_tsv(data / 'qnli' / 'raw' / 'dev.tsv'))[1:]
  passages = {text: f's{i}' for i, text in enumerate(dict.fromkeys(row[2] for row in rows))}
  answered = [row for row in rows if row[3] == 'entailment']
  queries = [Text(f'q{row[0]}', row[1]) for row in draw(answered, TEST, random)]
  texts = {row[0]: row[2] for row in answered}
  qrels = {query.id: {passages[texts[query.id[1:]]]: 1} for query in queries}
  by_id = {name: text for text, name in passages.items()}
  return {'qnli': write_test(out, 'qnli', by_id, queries, qrels, random)}


def dailydialog(data, out, random):
  """Two consecutive turns among the first three of each dialogue."""
  turns = {
    split: [
      tuple(turn.strip() for turn in line.split('__eou__') if turn.strip())
      for line in archived(data / 'dailydialog' / 'raw' / f'{name}.zip', f'dialogues_{name}.txt')
    ]
    for split, name in (('train', 'train'), ('dev', 'validation'), ('test', 'test'))
  }

  def adjacent(dialogues, most=None):
    return [pair for turns in dialogues for pair in itertools.pairwise(turns[:most])]

  known = set(adjacent(turns['train']))
  every = set(adjacent(turns['test']))
  taken_out = len(every & known)
  chosen = {'train': draw(unique(adjacent(turns['train'], 3)), TRAIN, random)}
  for split, count in (('dev', DEV), ('test', TEST)):
    fresh = [pair for pair in unique(adjacent(turns[split], 3)) if pair not in known]
    chosen[split] = draw(fresh, count, random)
  replies = [turn for split in turns for dialogue in turns[split] for turn in dialogue[1:3]]
  ids = {text: f'r{i}' for i, text in enumerate(dict.fromkeys(replies))}
  passages = {name: text for text, name in ids.items()}
  queries = {
    split: [Text(f'{split}{i}', first) for i, (first, _) in enumerate(some)]
    for split, some in chosen.items()
  }
  positives = {
    query.id: [ids[second]]
    for split, some in chosen.items()
    for query, (_, second) in zip(queries[split], some, strict=True)
  }
  qrels = {query.id: {positives[query.id][0]: 1} for query in queries['test']}
  found = {
    'dialogue': write_training(
      out,
      'dialogue',
      passages,
      queries['train'],
      queries['dev'],
      positives,
      random,
      mine=False,  # BM25 finds replies to the same words, which may be right as well
    ),
    'dailydialog': write_test(out, 'dailydialog', passages, queries['test'], qrels, random),
  }
  found['dailydialog'] |= {'different test pairs': len(every), 'of them in train': taken_out}
  return found


class Text:
  """A query."""

  def __init__(self, name, text):
    self.id, self.text = name, text


def write_training(out, task, passages, train, dev, positives, random, mine=True):
  """A BEIR folder with the judged passages of both splits and random others; mined.jsonl."""
  folder = out / 'train' / task
  judged = unique(row for query in (*train, *dev) for row in positives[query.id])
  kept = fill_up(judged, passages, len(judged) + 2 * PASSAGES, random)
  for split, queries in (('train', train), ('dev', dev)):
    write_judgements(
      folder, split, {query.id: dict.fromkeys(positives[query.id], 1) for query in queries}
    )
  write_texts(folder / 'queries.jsonl', [(query.id, query.text) for query in (*train, *dev)])
  write_texts(folder / 'corpus.jsonl', [(row, passages[row]) for row in kept])
  negatives = 0
  if mine:
    index = bm25_index.build(kept, [passages[row] for row in kept])
    top = index.search([query.text for query in train], DEPTH).rows
    with files.atomic_write(folder / 'mined.jsonl') as file:
      for query, rows in zip(train, top, strict=True):
        wrong = [kept[row] for row in rows if row >= 0 and kept[row] not in positives[query.id]]
        negatives += len(wrong)
        origin = {'score': 1.0, 'sources': ['undenoised']}
        record = {
          'query_id': query.id,
          'query': query.text,
          'positive_passages': [{'docid': name} for name in positives[query.id]],
          'negative_passages': [
            {'docid': name, 'retriever': 'bm25', 'rank': rank, **origin}
            for rank, name in enumerate(wrong, 1)
          ],
        }
        file.write(json.dumps(record, ensure_ascii=False) + '\n')
  return {'train': len(train), 'dev': len(dev), 'passages': len(kept), 'negatives': negatives}


def write_test(out, name, passages, queries, qrels, random):
  """A BEIR folder of a test set, with ``PASSAGES`` passages or as many as are judged."""
  folder = out / 'test' / name
  known = {
    query.id: {k: v for k, v in qrels[query.id].items() if k in passages} for query in queries
  }
  judged = unique(row for grades in known.values() for row in grades)
  kept = fill_up(judged, passages, PASSAGES, random)
  write_judgements(folder, 'test', known)
  write_texts(folder / 'queries.jsonl', [(query.id, query.text) for query in queries])
  write_texts(folder / 'corpus.jsonl', [(row, passages[row]) for row in kept])
  return {'test': len(queries), 'passages': len(kept), 'judged': len(judged)}


def write_judgements(folder, split, qrels):
  (folder / 'qrels').mkdir(parents=True, exist_ok=True)
  write_qrels(folder / 'qrels' / f'{split}.tsv', qrels)


def write_texts(path, rows):
  with files.atomic_write(path) as file:
    file.writelines(json.dumps({'_id': name, 'text': text}) + '\n' for name, text in rows)


def fill_up(judged, passages, size, random):
  """The judged passages and random others, in the order of the corpus; no text comes twice."""
  kept, seen = set(judged), {passages[row] for row in judged}
  names = list(passages)
  for place in random.permutation(len(names)):
    if len(kept) >= size:
      break
    text = passages[names[place]]
    if text.strip() and text not in seen:
      kept.add(names[place])
      seen.add(text)
  return [name for name in names if name in kept]


def read_tsv(path):
  """Rows between tabs, in which quotes are text."""
  with path.open(encoding='utf-8-sig', newline='') as file:
    yield from csv.reader(file, delimiter='\t', quoting=csv.QUOTE_NONE)


def archived(path, name):
  """The lines of a file in a zip."""
  with zipfile.ZipFile(path) as archive:
    (inside,) = (one for one in archive.namelist() if one.endswith(name))
    return list(io.TextIOWrapper(archive.open(inside), encoding='utf-8'))


def unique(rows):
  return list(dict.fromkeys(rows))


def draw(rows, count, random):
  """``count`` of the rows at random, in their order."""
  if len(rows) <= count:
    return list(rows)
  return [rows[i] for i in sorted(random.permutation(len(rows))[:count])]
