import json

import pytest

from dprjax import bm25
from dprjax.text.trec import read_run
from tests.refusals import command_refused

CORPUS = {
  'd1': ('Cats', 'sleep all day'),
  'd2': ('', 'dogs and cats'),
  'd3': ('Stars', ''),
  'q2': ('', 'a dog'),
}
QUERIES = {'q1': 'cat', 'q2': 'dogs', 'q3': 'galaxies', 'q4': 'stars'}
ARGUMENTS = ['--corpus=corpus.jsonl', '--queries=queries.jsonl', '--out=run.trec']


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'corpus.jsonl').write_text(
    ''.join(
      json.dumps({'_id': id_, 'title': title, 'text': text}) + '\n'
      for id_, (title, text) in CORPUS.items()
    )
  )
  (tmp_path / 'queries.jsonl').write_text(
    ''.join(json.dumps({'_id': id_, 'text': text}) + '\n' for id_, text in QUERIES.items())
  )
  (tmp_path / 'qrels.tsv').write_text(
    'query-id\tcorpus-id\tscore\nq2\td2\t1\nq4\td3\t1\nq7\td1\t1\n'
  )
  return tmp_path


def documents(path='run.trec'):
  return {query_id: [doc_id for doc_id, _ in ranking] for query_id, ranking in read_run(path)}


def test_titles_count_and_ids_stay(folder):
  bm25.main(ARGUMENTS)
  found = documents()
  assert sorted(found['q1']) == ['d1', 'd2'] and found['q2'] == ['q2', 'd2']
  assert found['q4'] == ['d3'] and 'q3' not in found
  report = json.loads((folder / 'run.trec.json').read_text())
  assert report['settings'] == {'k1': 1.5, 'b': 0.75, 'language': 'english'}
  assert (report['queries'], report['passages']) == (4, 4)
  assert (report['unknown_queries'], report['queries_without_passages']) == (0, 1)


def test_only_judged_queries_and_not_their_own_id(folder, capsys):
  bm25.main([*ARGUMENTS, '--qrels=qrels.tsv', '--drop_same_id=true', '--k=1'])
  assert documents() == {'q2': ['d2'], 'q4': ['d3']}
  assert 'qrels.tsv: 1 of 3 queries not in queries.jsonl: q7' in capsys.readouterr().err


def test_index_is_kept_and_made_anew_for_other_passages_and_words(folder, monkeypatch):
  arguments = [*ARGUMENTS, '--index_dir=index']
  bm25.main([*arguments, '--out=a.trec'])
  kept = (folder / 'index' / 'dprjax_index.json').stat().st_mtime_ns
  bm25.main([*arguments, '--out=b.trec'])
  assert (folder / 'a.trec').read_bytes() == (folder / 'b.trec').read_bytes()
  assert (folder / 'index' / 'dprjax_index.json').stat().st_mtime_ns == kept
  with (folder / 'corpus.jsonl').open('a') as file:
    file.write('{"_id": "d9", "text": "galaxy"}\n')
  bm25.main([*arguments, '--out=c.trec'])
  assert documents('c.trec')['q3'] == ['d9']
  made = (folder / 'index' / 'dprjax_index.json').read_bytes()
  monkeypatch.setattr(bm25.bm25_index, 'WORDS', bm25.bm25_index.WORDS + 1)
  bm25.main([*arguments, '--out=d.trec'])
  assert (folder / 'index' / 'dprjax_index.json').read_bytes() != made


BAD = [
  ('--b=2', 'b = 2.0'),
  ('--qrels=others.tsv', 'queries.jsonl'),
  ('--index_dir=kept', 'kept'),
]


@pytest.mark.parametrize('arguments, message', BAD)
def test_bad_input(folder, command, arguments, message):
  (folder / 'others.tsv').write_text('z 0 d1 1\n')
  (folder / 'kept').mkdir()
  (folder / 'kept' / 'thesis.tex').write_text('years of work')
  before = sorted(folder.rglob('*'))
  command_refused(command(bm25, *ARGUMENTS, *arguments.split()), message)
  assert sorted(folder.rglob('*')) == before
