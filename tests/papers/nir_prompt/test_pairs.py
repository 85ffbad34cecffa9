"""Labelled pairs: files as strangers write them, held-out ones, and their tokens."""

import json
import random

import numpy as np
import pytest
from ml_collections import ConfigDict

from dprjax.base.errors import InputError
from dprjax.papers.nir_prompt import pairs
from dprjax.papers.nir_prompt.pairs import PairSource
from dprjax.text import vocabularies
from tests.fuzz import mutations
from tests.refusals import refused

ROWS = [('oak elm', 'oak', 1), ('ash', 'fir yew', 0), ('pine', 'pine', 1), ('larch', 'elm', 0)]


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  words = ['ash', 'elm', 'fir', 'larch', 'oak', 'pine', 'yew', 'duplicate', 'of']
  return vocabularies.train_wordpiece(
    [f'{word} {other} :' for word in words for other in words],
    200,
    tmp_path_factory.mktemp('words'),
  )


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('train.tsv', 'oak elm\toak\tyes\nash\tfir yew\tno\npine\tpine\t1\nlarch\telm\t0\n'),
    ('train.tsv', 'Label\ttext1\ttext2\nTrue\toak elm\toak\nfalse\tash\tfir yew\n1\tpine\tpine\n'
     'No\tlarch\telm\n'),
    ('train.csv', 'text1,text2,label\n"oak elm",oak,1\nash,fir yew,0\npine,pine,1\nlarch,elm,0\n'),
    ('train.jsonl', ''.join(
      json.dumps({'text1': a, 'text2': b, 'label': label, 'more': 3}) + '\n'
      for (a, b, _), label in zip(ROWS, (True, 0, 'yes', 'no'), strict=True))),
  ],
)  # fmt: skip
def test_files_of_pairs(tmp_path, name, content):
  (tmp_path / name).write_text(content)
  assert [pair[:3] for pair in pairs.read_pairs(PairSource(str(tmp_path)))] == ROWS


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('train.tsv', 'oak\telm\t1\nash\tyew\t2\n', ('train.tsv', 'line 2')),
    ('train.tsv', 'oak\t \t1\n', ('line 1', 'text2')),
    ('train.tsv', 'oak\telm\t1\nash\tyew\t1\n', ('train.tsv', '2')),
    ('train.jsonl', '{"text1": ["oak"], "text2": "elm", "label": 1}\n', ('line 1', 'oak')),
  ],
)
def test_what_is_no_pair(tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with refused(message):
    pairs.read_pairs(PairSource(str(tmp_path)))


@pytest.mark.parametrize(
  ('name', 'join'), [('train.tsv', '\t'), ('train.csv', ','), ('train.jsonl', '')]
)
def test_harmed_files_are_read_or_refused_in_a_line(tmp_path, name, join):
  path, refusals = tmp_path / name, 0
  harms = [mutations.mutate_bytes, mutations.mutate_lines]
  for seed in range(150):
    rng = random.Random(seed)
    if path.is_dir():
      path.rmdir()
    if join:
      rows = [('text1', 'text2', 'label'), *ROWS]
      path.write_text(''.join(join.join(map(str, row)) + '\n' for row in rows))
    else:
      pairs.write_pairs(path, ROWS)
    done = rng.choice([*harms, *([] if join else [mutations.mutate_json])])(rng, path)
    try:
      found = pairs.read_pairs(PairSource(str(tmp_path)))
    except InputError as error:
      assert '\n' not in str(error) and 'train' in str(error), done
      refusals += 1
    else:
      assert {pair.label for pair in found} == {0, 1}, done
      assert all(pair.first.strip() and pair.second.strip() for pair in found), done
  assert 30 < refusals < 150


def test_pairs_are_held_out_by_their_texts(tmp_path):
  rows = [(f'a{i}', f'b{i}', i % 2) for i in range(200)] + [('a7', 'b7', 1)]
  pairs.write_pairs(tmp_path / 'train.jsonl', rows)
  whole = PairSource(str(tmp_path))
  train, dev = (
    pairs.read_pairs(PairSource(str(tmp_path), hold_out=(0.2, 5), held_out=held)) for held in (0, 1)
  )
  assert sorted([*train, *dev], key=lambda pair: pair.line) == pairs.read_pairs(whole)
  assert 20 < len(dev) < 60 and not {p[:2] for p in train} & {p[:2] for p in dev}
  few = pairs.read_pairs(PairSource(str(tmp_path), hold_out=(0.2, 5), max_pairs=30))
  assert len(few) == 30 and set(few) < set(train) and few == sorted(few, key=lambda p: p.line)
  # Added rows do not move the others.
  pairs.write_pairs(tmp_path / 'train.jsonl', [('new', 'row', 1), *rows])
  again = pairs.read_pairs(PairSource(str(tmp_path), hold_out=(0.2, 5), held_out=True))
  assert {p[:2] for p in dev} <= {p[:2] for p in again} <= {p[:2] for p in dev} | {('new', 'row')}


def test_one_label_is_nothing_to_train_or_measure_on(tmp_path):
  rows = [('oak', 'elm', 1), *((f'a{i}', f'b{i}', 0) for i in range(30))]
  pairs.write_pairs(tmp_path / 'train.jsonl', rows)
  for seed, held in ((2, False), (1, True)):  # the pair that matches is not there
    with refused('train.jsonl', 'hold_out=0.5'):
      pairs.read_pairs(PairSource(str(tmp_path), hold_out=(0.5, seed), held_out=held))
    other = pairs.read_pairs(PairSource(str(tmp_path), hold_out=(0.5, seed), held_out=not held))
    assert {pair.label for pair in other} == {0, 1}


def test_tokens_of_pairs(tmp_path, tokenizer):
  rows = [*ROWS, ('oak elm fir', 'yew ash pine oak', 1)]
  pairs.write_pairs(tmp_path / 'train.jsonl', rows)
  settings = ConfigDict(
    {
      'query_max_length': 6,
      'passage_max_length': 5,
      'query_prefix': 'duplicate : ',
      'passage_prefix': '',
    }
  )
  made = pairs.tokenise(PairSource(str(tmp_path)), tokenizer, settings)
  assert (made.labels.tolist(), made.lines) == ([1, 0, 1, 0, 1], [1, 2, 3, 4, 5])
  for i, (one, other, _) in enumerate(rows):
    first, second = (tokens[i] for tokens in made.tokens)
    np.testing.assert_array_equal(first, tokenizer.encode([f'duplicate : {one}'], 6)[0][0])
    np.testing.assert_array_equal(second, tokenizer.encode([other], 5)[0][0])
  assert [lengths.max() for lengths in made.lengths] == [6, 5]
  with refused('query_buckets', '[4]'):
    pairs.PairFeed(made, {'query_buckets': [4], 'passage_buckets': [8]})


def test_pairs_of_docstrings(tmp_path):
  pairs.write_docstrings(tmp_path / 'docs', ['json', 'email'])
  for split in ('train', 'dev', 'test'):
    found = pairs.read_pairs(PairSource(str(tmp_path / 'docs'), split))
    assert [pair.label for pair in found] == [1, 0] * (len(found) // 2)
    for right, wrong in zip(found[::2], found[1::2], strict=True):
      assert right.first == wrong.first and right.second != wrong.second
