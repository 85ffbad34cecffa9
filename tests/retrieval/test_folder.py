import contextlib
import dataclasses
import json

import numpy as np
import pytest

from dprjax import Retriever, index, search
from dprjax.encoding import folders
from dprjax.models import artifact, hub
from dprjax.retrieval import folder, fusion
from dprjax.text.texts import Text
from dprjax.text.trec import read_run
from tests.refusals import command_refused, refused

TEXTS = {
  'a': 'Decode a JSON document.',
  'b': 'Send a message over HTTP.',
  'c': 'Parse an XML file into a tree.',
  'd': 'json',
}
QUERIES = ['read json', 'fetch a page', 'an http message']
SETTINGS = {'k1': 1.2, 'b': 0.3, 'language': 'none'}


@pytest.fixture
def fused(trained, prompt, tmp_path):
  """A retriever with a prompt and BM25, and an index."""
  weights = {'bm25': 0.4, 'dense': 0.6}
  how = fusion.Fusion(weights=weights, method='zscore', depth=4, bm25=SETTINGS)
  fusion.write(tmp_path / 'w.json', how)
  found = Retriever.load(
    trained / 'backbone', prompt, hybrid=tmp_path / 'w.json', query_max_length=12
  )
  found.index(TEXTS)
  return found


def test_a_saved_retriever_searches_alike_without_encoding_a_passage(fused, tmp_path, monkeypatch):
  fused.save(tmp_path / 'mine')
  again = Retriever.load(tmp_path / 'mine')
  monkeypatch.setattr(type(again.encoder), 'encode', _only_queries(type(again.encoder).encode))
  assert again.search(QUERIES, k=3) == fused.search(QUERIES, k=3)
  again.save(tmp_path / 'copy')
  assert Retriever.load(tmp_path / 'copy').search(QUERIES, k=3) == fused.search(QUERIES, k=3)
  card = (tmp_path / 'mine' / 'README.md').read_text()
  assert card.startswith('---\n') and 'library_name: dprjax' in card and '--retriever=mine' in card


def _only_queries(encode):
  def encoded(self, texts, side='passage', *more, **options):
    assert side == 'query'
    return encode(self, texts, side, *more, **options)

  return encoded


def test_a_retriever_without_prompt_words_and_index(trained, tmp_path):
  Retriever.load(trained / 'backbone').save(tmp_path / 'mine')
  assert {path.name for path in (tmp_path / 'mine').iterdir()} == {
    *('retriever.json', 'README.md', 'dprjax.json')
  }
  again = Retriever.load(tmp_path / 'mine')
  again.index(TEXTS)
  bare = Retriever.load(trained / 'backbone')
  bare.index(TEXTS)
  assert again.search(QUERIES) == bare.search(QUERIES)


def test_the_commands(fused, command, tmp_path):
  fused.save(tmp_path / 'mine')
  (tmp_path / 'corpus.jsonl').write_text(
    ''.join(json.dumps({'_id': id_, 'text': text}) + '\n' for id_, text in TEXTS.items())
  )
  (tmp_path / 'queries.tsv').write_text(''.join(f'{n}\t{one}\n' for n, one in enumerate(QUERIES)))
  Retriever.load(tmp_path / 'mine', hybrid=tmp_path / 'w.json').save(tmp_path / 'copy')
  empty = tmp_path / 'empty'
  bare = Retriever.load(fused.encoder.backbones['query'].path)
  bare.save(empty)
  looks = f'--queries={tmp_path}/queries.tsv', f'--out={tmp_path}/run.trec'
  command_refused(command(search, f'--retriever={empty}', *looks), 'dprjax index')
  command_refused(command(search, f'--retriever={tmp_path}/no', *looks), 'no/retriever.json')
  for name, searched in (('copy', fused), ('empty', bare)):
    fill = f'--retriever={tmp_path / name}', f'--input={tmp_path}/corpus.jsonl'
    assert command(index, *fill)[0] == 0
    if searched is bare:
      bare.index(TEXTS)
    assert command(search, f'--retriever={tmp_path / name}', *looks, '--k=3')[0] == 0
    expected = [[hit.id for hit in hits] for hits in searched.search(QUERIES, k=3)]
    run = read_run(tmp_path / 'run.trec')
    assert [[id_ for id_, _ in ranking] for _, ranking in run] == expected
  twice = f'--queries={tmp_path}/queries.tsv'
  command_refused(command(search, f'--retriever={tmp_path / name}', *looks, twice), 'queries.tsv')
  (tmp_path / 'corpus.jsonl').write_text('{"_id": "e", "text": "another"}\n')
  command_refused(command(index, *fill), 'vectors')


@pytest.mark.parametrize(
  ('words', 'named'),
  [
    (['--retriever=mine'], '--input'),
    (['--retriever=mine', '--input=c.jsonl', '--uri=parquet:x'], '--uri'),
    (['--uri=parquet:x', '--upsert=emb', '--input=c.jsonl'], '--input'),
  ],
)
def test_flags_of_index_that_do_not_go_together(words, named, command):
  command_refused(command(index, *words), named)


def test_a_folder_that_changed(fused, trained, tmp_path):
  fused.save(tmp_path / 'mine')
  with refused('mine'):
    fused.save(tmp_path / 'mine')  # it has an index
  path = tmp_path / 'mine' / folder.FILE
  whole = json.loads(path.read_text())
  path.write_text(json.dumps(whole | {'backbone_sha256': '0' * 64}))
  with refused(str(trained / 'backbone')):
    Retriever.load(tmp_path / 'mine')
  path.write_text(json.dumps(whole | {'settings': {'passage_max_length': 5}}))
  with refused('max_length', 'index'):
    Retriever.load(tmp_path / 'mine')
  path.write_text(json.dumps(whole | {'version': 9}))
  with refused(folder.FILE):
    Retriever.load(tmp_path / 'mine')
  path.write_text(json.dumps(whole))
  loaded = artifact.load_prompt(tmp_path / 'mine' / hub.PROMPT)
  arrays = {name: np.zeros_like(array) for name, array in loaded.arrays.items()}
  artifact.save_prompt(tmp_path / 'mine' / hub.PROMPT, dataclasses.replace(loaded, arrays=arrays))
  with refused('prompt_sha256'):
    Retriever.load(tmp_path / 'mine')


def test_what_the_training_encoded_is_not_encoded_again(trained, tmp_path, monkeypatch):
  bare, passages = Retriever.load(trained / 'backbone'), [Text(*one) for one in TEXTS.items()]
  folders.fill_folder(bare.encoder, 'passage', passages, tmp_path / 'passages', source='texts')
  bare.index(TEXTS)
  monkeypatch.setattr(type(bare.encoder), 'encode', _only_queries(type(bare.encoder).encode))
  for name, some in (('mine', passages), ('other', passages[1:])):
    Retriever.load(trained / 'backbone').save(tmp_path / name)
    folder.take(tmp_path / name, tmp_path / 'passages')
    with folder.claim_index(tmp_path / name, {}) as index:
      expected = contextlib.nullcontext() if some is passages else pytest.raises(AssertionError)
      with expected:
        folder.fill(index, bare.encoder, some, 'texts', None)
  assert Retriever.load(tmp_path / 'mine').search(QUERIES) == bare.search(QUERIES)
  assert not (tmp_path / 'mine' / 'index' / 'trained').exists()


def test_weights_for_another_bm25_than_that_of_the_index(fused, tmp_path):
  fused.save(tmp_path / 'mine')
  other = fusion.read(tmp_path / 'mine' / folder.FUSION)
  changed = dataclasses.replace(other, bm25=SETTINGS | {'k1': 1.9})
  fusion.write(tmp_path / 'mine' / folder.FUSION, changed)
  with refused('1.9', '1.2'):
    Retriever.load(tmp_path / 'mine')
