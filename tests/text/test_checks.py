"""Findings of `dprjax data check`, and splits of `dprjax data split`."""

import json
import subprocess
import sys

import pytest

from dprjax import data_check, data_split
from dprjax.text import checks, splitting
from dprjax.text.sources import Source, load_dataset
from tests.refusals import command_refused, refused


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'data'
  (folder / 'qrels').mkdir(parents=True)

  def lines(name, rows):
    (folder / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))

  passages = [{'_id': f'd{i}', 'text': f'passage number {i}'} for i in range(8)]
  passages += [{'_id': 'copy', 'text': 'Passage  number \uff12'}, {'_id': 'empty', 'text': ''}]
  lines('corpus.jsonl', passages)
  queries = [{'_id': f'q{i}', 'text': f'query {i}'} for i in range(6)]
  lines('queries.jsonl', [*queries, {'_id': 'again', 'text': 'QUERY 1'}])
  (folder / 'qrels' / 'train.tsv').write_text('q0\td0\t1\nq1\td1\t1\nq1\tnone\t1\nq2\td2\t0\n')
  (folder / 'qrels' / 'test.tsv').write_text('q3\td3\t1\nq4\td1\t1\nagain\td4\t1\n')
  return folder


def test_findings(folder):
  assert checks.splits_of(str(folder)) == ['train', 'test']
  found = dict(checks.check(str(folder), ['train', 'test']))
  train, _, passages, both = ({one.what: one for one in some} for some in found.values())

  def number(findings, word):
    [one] = [one for what, one in findings.items() if word in what]
    return one.number, one.samples

  assert number(train, 'without a positive') == (1, ('q2',))
  assert train['queries'].number == 2 and train['queries'].samples[0] == 'q0: query 0'
  assert number(passages, 'with the text of another') == (1, ('d2 and copy: passage number 2',))
  assert number(passages, 'without text')[1] == ('empty',)
  assert number(passages, 'not in the corpus') == (1, ('none of query q1',))
  assert number(both, 'in both') == (1, ('again: QUERY 1',))
  assert number(both, 'share an answer') == (1, ('q4: query 4',))


@pytest.mark.slow
def test_the_command(folder, capsys):
  help = subprocess.run([sys.executable, '-m', 'dprjax', 'data', 'check', '--help'], stdout=-1)
  assert help.returncode == 0 and b'DATA' in help.stdout
  data_check.main([str(folder)])
  said = capsys.readouterr().out
  assert 'passages: ' in said and '10 passages' in said and 'train and test' in said
  data_split.main([str(folder), f'--out={folder.parent}/new', '--fraction=0.5', '--by=query'])
  assert 'split by query' in capsys.readouterr().err
  assert load_dataset(Source(str(folder.parent / 'new'), split='test')).queries


def pairs(tmp_path, rows):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(
    ''.join(
      json.dumps({'query': query, 'passage': f'text of {id_}', 'passage_id': id_}) + '\n'
      for query, id_ in rows
    )
  )
  return load_dataset(Source(str(path)))


def test_documents_are_kept_apart(tmp_path):
  rows = [(f'query {i}', f'doc{i // 4}.md#{i % 2}') for i in range(200)]
  rows += [('query 0', 'doc1.md#5')]  # which joins two documents
  dataset = pairs(tmp_path, rows)
  split = splitting.choose(dataset, 0.3)
  assert split.by == 'document' and len(split.train) + len(split.test) == 200
  documents = [
    {splitting.document_of(id_) for query in ids for id_ in dataset.positives(query)}
    for ids in (split.train, split.test)
  ]
  assert documents[0].isdisjoint(documents[1])
  splitting.write(dataset, split, tmp_path / 'out')
  again = load_dataset(Source(str(tmp_path / 'out'), split='test'))
  assert [query.id for query in again.queries] == split.test
  assert list(again.passages) == list(dataset.passages)


def test_one_document_leaves_a_split_by_query(tmp_path):
  dataset = pairs(tmp_path, [(f'query {i}', f'doc.md#{i}') for i in range(50)])
  split = splitting.choose(dataset, 0.2)
  assert split.by == 'query' and 3 < len(split.test) < 20
  with refused('document', '--fraction'):
    splitting.choose(dataset, 0.2, by='document')


def test_a_file_that_is_not_there_is_named(tmp_path, command):
  command_refused(command(data_check, tmp_path / 'none'), f'{tmp_path}/none')
  result = command(data_split, tmp_path / 'none', f'--out={tmp_path}/x')
  command_refused(result, f'{tmp_path}/none')
