"""Samples of passages."""

import collections
import json

import pytest

from dprjax.asking import passages, sampling
from dprjax.formats.read_report import ReadReport
from dprjax.formats.texts import PassageRecord
from tests.refusals import refused

SUBJECTS = {
  'ships': [
    'harbour',
    'anchor',
    'sail',
    'mast',
    'rudder',
    'keel',
    'deck',
    'crew',
    'cargo',
    'storm',
  ],
  'bread': ['flour', 'yeast', 'oven', 'dough', 'crust', 'knead', 'salt', 'water', 'loaf', 'bake'],
}


def corpus(ships, bread):
  made = []
  for subject, count in (('ships', ships), ('bread', bread)):
    own = ' '.join(SUBJECTS[subject]).split()
    for n in range(count):
      text = ' '.join(own[(n + k * (1 + n % 7)) % 10] for k in range(9))
      made.append(PassageRecord(f'{subject}{n}', '', f'{text} {subject} item{n} kind{n * 7}'))
  return made


def test_each_cluster_has_its_share_and_a_hash_draws():
  whole = corpus(90, 30)
  found = sampling.sample(whole, 40, 0, ReadReport())
  assert len({one.id for one in found.passages}) == 40 and found.clusters > 1
  subjects = collections.Counter(one.id.rstrip('0123456789') for one in found.passages)
  assert 26 <= subjects['ships'] <= 34  # 30 of 40
  # The order of the corpus does not matter, another seed does.
  again = sampling.sample(whole[::-1], 40, 0, ReadReport())
  assert {one.id for one in again.passages} == {one.id for one in found.passages}
  other = sampling.sample(whole, 40, 1, ReadReport())
  assert {one.id for one in other.passages} != {one.id for one in found.passages}


def test_near_duplicates_and_short_passages_are_left_out():
  whole = corpus(10, 10)
  copies = [one._replace(id=f'copy-{one.id}', text=f'{one.text}!') for one in whole]
  short = [PassageRecord('short', 'a title of its own', 'four words are few')]
  report = ReadReport()
  found = sampling.sample([*whole, *copies, *short], 100, 0, report)
  # One of each pair; its item and its kind tell it from the others.
  plain = {one.id.removeprefix('copy-') for one in found.passages}
  assert len(plain) == len(found.passages) <= 20
  assert report.counts['near-duplicates of passages in the sample: left out'] == 40 - len(plain)
  assert report.counts['passages below 8 words: not asked about'] == 1
  assert report.counts['passages'] == 41


def test_an_empty_corpus_has_an_empty_sample():
  assert sampling.sample([], 5, 0, ReadReport()) == ([], 0)


def test_documents_become_passages_of_whole_sentences(tmp_path):
  folder = tmp_path / 'documents'
  folder.mkdir()
  (folder / 'a b.txt').write_text(
    'How ships float\n\nA hull pushes water aside. The water pushes back with its weight.\n'
    'So iron floats.\n'
  )
  rows = [{'id': 'x', 'title': 'T', 'text': 'one two three. four five.'}, {'id': 'x', 'text': 'y.'}]
  (folder / 'c.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  report = ReadReport()
  found = list(passages.cut_documents(folder, report, length=10, language='en'))
  assert found == [
    ('a_b.txt#0', 'How ships float', 'A hull pushes water aside.'),
    ('a_b.txt#1', 'How ships float', 'The water pushes back with its weight. So iron floats.'),
    ('x#0', 'T', 'one two three. four five.'),
    ('x~2#0', '', 'y.'),
  ]
  assert report.counts['documents'] == 3
  assert passages.corpus_file(folder) is None
  (folder / 'corpus.jsonl').write_text('{}')
  assert passages.corpus_file(folder) == passages.corpus_file(folder / 'corpus.jsonl')
  with refused('nowhere'):
    passages.corpus_file(tmp_path / 'nowhere')


@pytest.mark.parametrize('text', ['', '   ', '中文'])
def test_odd_texts_have_features(text):
  found = sampling.features([text, 'sail and mast'])
  assert found.shape[0] == 2
