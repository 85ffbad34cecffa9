"""Samples of passages."""

import collections

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


def test_documents_and_tables_become_passages(tmp_path):
  folder = tmp_path / 'documents'
  folder.mkdir()
  (folder / 'a b.txt').write_text('A hull pushes water aside.\n\nSo iron floats.\n')
  assert passages.corpus_file(folder) is None
  assert passages.corpus_file(folder / 'a b.txt') is None
  [found] = passages.read_others(folder)
  assert found == ('a%20b.txt#0', '', 'A hull pushes water aside.\nSo iron floats.')
  table = tmp_path / 'table.csv'
  table.write_text('id,text\nx,one two\n')
  assert passages.corpus_file(table) is None
  assert list(passages.read_others(table)) == [('x', '', 'one two')]
  (folder / 'corpus.jsonl').write_text('{}')
  assert passages.corpus_file(folder) == passages.corpus_file(folder / 'corpus.jsonl')
  with refused('nowhere'):
    passages.corpus_file(tmp_path / 'nowhere')


@pytest.mark.parametrize('text', ['', '   ', '中文'])
def test_odd_texts_have_features(text):
  found = sampling.features([text, 'sail and mast'])
  assert found.shape[0] == 2
