"""Topics from the command line."""

import json
import lzma

import pytest

from dprjax.base.hashes import draw
from dprjax.papers.topic_dpr import topic_models, topics
from tests.papers.topic_dpr.test_topic_models import documents
from tests.refusals import command_refused

FEW = ['--topics=3', '--sweeps=60', '--eta=0.1', '--seed=1']


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  texts, _ = documents(90)
  rows = [{'_id': f'd{i}', 'text': text} for i, text in enumerate(texts)]
  rows.append({'_id': 'blank', 'text': ''})
  (tmp_path / 'corpus.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  papers = [
    {'id': f'd{i}', 'title': 'zebra zebra', 'abstract': text} for i, text in enumerate(texts)
  ]
  papers.append({'id': 'blank', 'title': 'zebra'})
  with lzma.open(tmp_path / 'papers.jsonl.xz', 'wt') as file:
    file.writelines(json.dumps(paper) + '\n' for paper in papers)
  return tmp_path


def test_a_corpus(folder, capsys):
  topics.main(['--input=corpus.jsonl', '--out=topics.npz', *FEW])
  output = capsys.readouterr()
  made = topic_models.load_topics('topics.npz')
  assert len(made) == 3 and made.meta['kind'] == 'hlda'
  for k, words in enumerate(made.names):
    assert ' '.join(words[:10]) in output.out and f'{made.sizes[k]:,}' in output.out
  report = json.loads((folder / 'topics.npz.json').read_text())
  assert f'{report["agreement"]:.1%} have the same topic by their words' in output.out
  assert report['agreement'] > 0.9 and report['sizes'][:3] == made.sizes.tolist()
  assert report['counts'] == {'documents': 91, 'documents without text or abstract: skipped': 1}
  assert '1 document without text or abstract: skipped (blank)' in output.err
  assert sum(topic['assigned'] for topic in report['topics']) == 90
  # The abstracts of an arXiv file are the same documents; titles are queries.
  topics.main(['--input=papers.jsonl.xz', '--out=again.npz', *FEW])
  assert (folder / 'again.npz').read_bytes() == (folder / 'topics.npz').read_bytes()


def test_documents_are_chosen_by_their_ids(folder):
  texts, _ = documents(90)
  found, counts = topics.read_documents('corpus.jsonl', 20, seed=4)
  chosen = sorted(range(90), key=lambda i: draw(f'd{i}', 4, 'topics'))[:20]
  assert found == [texts[i] for i in sorted(chosen, key=lambda i: draw(f'd{i}', 4, ''))]
  # Not those that dprjax.papers puts into its test split.
  assert set(chosen) != set(sorted(range(90), key=lambda i: draw(f'd{i}', 4, ''))[:20])
  assert counts['documents'] == 91


@pytest.mark.parametrize(
  'arguments, message',
  [
    ('--input=broken.jsonl', ('broken.jsonl', 'line 2')),
    ('--input=corpus.jsonl --min_documents=91', ('91', '90')),
    ('--input=corpus.jsonl --kind=lda --gamma=2', ('--gamma', '--kind=hlda')),
    ('--input=corpus.jsonl --out=folder', 'folder'),
  ],
)
def test_bad_input(folder, command, arguments, message):
  (folder / 'folder').mkdir()
  (folder / 'broken.jsonl').write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "text": 3}\n')
  before = {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}
  words = arguments.split()
  if '--out' not in arguments:
    words.append('--out=topics.npz')
  command_refused(command(topics, *words), message)
  assert {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')} == before
