"""The quickstart: its parts, and the whole comparison at a tiny scale."""

import json
import os
import re

import numpy as np
import pytest
from etils import epath

from dprjax import quickstart
from dprjax.inference.retriever import Hit
from dprjax.models import artifact
from dprjax.runtime import stages
from dprjax.runtime.stages import ModelFiles
from tests.options import with_options
from tests.refusals import command_refused, named_in, refused
from tests.test_pipeline import run_here


def write_beir(folder):
  """Two passages, two queries, and a split each for training and for measuring."""
  (folder / 'qrels').mkdir(parents=True)
  for name, texts in (
    ('corpus', {'d1': 'wings lift', 'd2': 'bread rises'}),
    ('queries', {'q1': 'why do wings lift', 'q2': 'why does bread rise'}),
  ):
    records = [json.dumps({'_id': id_, 'title': '', 'text': text}) for id_, text in texts.items()]
    (folder / f'{name}.jsonl').write_text('\n'.join(records))
  for split, line in (('train', 'q1\td1\t1'), ('test', 'q2\td2\t1')):
    (folder / 'qrels' / f'{split}.tsv').write_text(f'query-id\tcorpus-id\tscore\n{line}\n')
  return folder


def test_a_beir_folder_is_used_in_place(tmp_path):
  folder = write_beir(tmp_path / 'text')
  texts, questions = quickstart.prepare(str(folder), epath.Path(tmp_path / 'out'), 'test')
  assert (texts.folder, texts.corpus) == (folder, folder / 'corpus.jsonl')
  assert texts.qrels == {split: folder / 'qrels' / f'{split}.tsv' for split in ('train', 'test')}
  assert questions == ['why does bread rise']  # not the training query


def test_a_folder_without_training_judgements_is_refused(tmp_path):
  folder = write_beir(tmp_path / 'text')
  (folder / 'qrels' / 'train.tsv').unlink()
  with refused('train.tsv'):
    quickstart.prepare(str(folder), epath.Path(tmp_path / 'out'), 'test')


def test_changed_text_needs_another_out(tmp_path):
  folder, out = write_beir(tmp_path / 'text'), epath.Path(tmp_path / 'out')
  quickstart.prepare(str(folder), out, 'test')
  quickstart.prepare(str(folder), out, 'test')
  quickstart.prepare(str(folder), out, 'train')  # another split of the same text
  with (folder / 'qrels' / 'test.tsv').open('a') as file:
    file.write('q1\td1\t1\n')
  with refused('--out'):
    quickstart.prepare(str(folder), out, 'test')


def test_a_table_gets_a_split_for_testing(tmp_path, capsys):
  rows = [f'question {i},answer {i}' for i in range(100)]
  (tmp_path / 'pairs.csv').write_text('\n'.join(['question,answer', *rows]))
  out = epath.Path(tmp_path / 'out')
  texts, questions = quickstart.prepare(str(tmp_path / 'pairs.csv'), out, 'test')
  assert texts.folder == out / 'data' and len(questions) == 3
  assert 'split by document' in capsys.readouterr().out
  again, _ = quickstart.prepare(str(tmp_path / 'pairs.csv'), out, 'test')
  assert again == texts and capsys.readouterr().out == ''


def test_weight_of_a_prompt(tmp_path):
  file = epath.Path(tmp_path / 'prompt.npz')
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'x',
    'backbone_sha256': '0' * 64,
    'tokenizer_sha256': '0' * 64,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 0.05,
    'shift_positions': False,
    'query_max_length': 8,
    'passage_max_length': 8,
    'query_prefix': '',
    'passage_prefix': '',
    'dprjax_version': '0',
    'task': '',
    'metrics': {},
  }
  artifact.save_prompt(
    file, artifact.Prompt(meta, {'prefix': np.ones((3, 2, 5, 2, 7), np.float32)})
  )
  assert quickstart.weight(file) == (3 * 2 * 5 * 2 * 7, os.path.getsize(file))


def test_a_hit_is_shown_on_one_line():
  assert quickstart.shown(Hit('d1', 0.5, 'Wings\nlift')) == 'd1: Wings lift'
  assert (
    quickstart.shown(Hit('numpy.sum', 0.5, 'numpy.sum Adds ' + 'x' * 200)) == 'numpy.sum Adds ...'
  )


def test_next_steps_repeat_the_unusual_flags():
  out = epath.Path('runs/mine')
  model = ModelFiles('b', out / 'prompt.npz')
  text = quickstart.next_steps(out, out / 'prompt.npz', model, 'mytext', 'test')
  assert '--data=mytext --out=runs/mine' in text
  assert "Retriever.load(backbone='b', prompt='runs/mine/prompt.npz')" in text
  assert '--split' not in text


def test_what_both_encoders_read_is_said(minilm):
  config = with_options(data__query_max_length=32, data__passage_max_length=96)
  told = quickstart.lengths(config, str(minilm))
  assert '32 tokens of a query and 96 of a passage; dprjax encode without flags reads 256' in told
  config.data.update({'query_max_length': 256, 'passage_max_length': 256})
  assert 'without flags' not in quickstart.lengths(config, str(minilm))


@pytest.mark.slow
def test_the_whole_comparison_twice(tmp_path, monkeypatch, capsys, command, one_device):
  """Every file is there, the table has three systems, and a second run repeats none of the work."""
  out = tmp_path / 'out'
  monkeypatch.setattr(stages, '_run', run_here)  # which has imported all
  flags = [
    '--data=docstrings:email,http,json,logging,xml',
    f'--out={out}',
    '--backbone=scratch:tiny',
    '--config.steps=2',
    '--config.prompt.length=4',
    '--config.data.passage_max_length=32',
    '--config.data.passage_buckets=(32,)',
    '--config.backbone.vocab_size=1000',
    '--search=how are messages parsed?',
  ]
  quickstart.main(flags)
  first = capsys.readouterr().out
  # Layers, keys and values, length, heads, head size.
  prompt = artifact.load_prompt(out / 'prompt.npz')
  assert prompt.query_only and prompt.of_side('query')['prefix'].shape == (2, 2, 4, 2, 64)
  # The passages were encoded once, by the training, for both systems.
  assert (out / 'training' / 'passages').is_dir()
  assert not list(out.glob('embeddings/*passages'))
  assert (out / 'report.png').read_bytes().startswith(b'\x89PNG')
  table = (out / 'report.md').read_text()
  assert '| BM25 |' in table
  assert re.search(r'\| frozen backbone \|.*\| 0 \|', table)
  assert re.search(r'\| \+ prompt \|.*\| 2,048 \| 1[12]\.\d kB \|', table)
  assert set(json.loads((out / 'frozen.test.json').read_text())['mean']) == {
    'nDCG@10',
    'RR@10',
    'R@100',
  }
  assert 'Both encoders read up to 32 tokens of a query and 32 of a passage;' in first
  assert 'how are messages parsed?' in first
  assert len(re.findall(r'^    [123]  -?\d\.\d{3}  \S', first, re.MULTILINE)) == 3
  assert f'--data=docstrings:email,http,json,logging,xml --out={out}' in first
  assert re.search(r'in all, of which .* of memory', first)

  times = {
    file: file.stat().st_mtime_ns
    for file in (out / 'prompt.npz', out / 'frozen.test.trec', *out.glob('embeddings/*/*'))
  }
  quickstart.main(flags)
  second = capsys.readouterr().out
  assert second.count('done before') == 10  # everything but the report
  assert {file: file.stat().st_mtime_ns for file in times} == times
  assert 'how are messages parsed?' in second

  # A prompt for both encodes them under itself too.
  both = (
    '--config.prompt.sides=both',
    '--config.corpus_negatives=0',
    '--config.prompt.regularization=0.0',
  )
  quickstart.main([*flags, *both, f'--out={tmp_path}/both'])
  assert '[13/13]' in capsys.readouterr().out
  assert artifact.load_prompt(tmp_path / 'both' / 'prompt.npz').arrays['prefix'].shape[2] == 4
  made = (tmp_path / 'both' / 'embeddings').glob('*-passages')
  assert {path.name for path in made} == {'frozen-passages', 'trained-passages'}

  command_refused(command(quickstart, *flags, '--data=docstrings:email'), '--data')


@pytest.mark.parametrize(
  ('out', 'message'),
  [
    ('text', '--data'),
    ('text/out', '--data'),
    ('model', 'dprjax.quickstart'),
  ],
)
def test_a_comparison_harms_nothing(command, tmp_path, out, message):
  write_beir(tmp_path / 'text')
  (tmp_path / 'model').mkdir()
  (tmp_path / 'model' / 'config.json').write_text('{}')
  before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')}
  status, err = command(quickstart, f'--data={tmp_path}/text', f'--out={tmp_path}/{out}')
  assert status == 2 and named_in(err.splitlines()[-1], message), err
  assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')} == before
