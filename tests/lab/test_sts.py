"""Scored sentence pairs: each format, and refusals of bad files."""

import gzip
import json

import pytest

from lab import sts
from lab.sts import Pair
from tests.refusals import refused

CSV = 'A man plays.,"Two, no: three.",2.4\r\n"She said ""no"".",A dog runs.,0\r\n'
PAIRS = [Pair('A man plays.', 'Two, no: three.', 2.4), Pair('She said "no".', 'A dog runs.', 0.0)]


def write(path, text):
  path.write_bytes(gzip.compress(text.encode()) if path.suffix == '.gz' else text.encode())
  return path


@pytest.mark.parametrize(
  'name, text',
  [
    ('a.csv.gz', CSV),
    (
      'glue.tsv',
      'index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\tA man plays.\tTwo, no: three.\t2.4\n'
      '1\tnews\tShe said "no".\tA dog runs.\t0\n',
    ),
    (
      'a.jsonl',
      '\n'.join(
        json.dumps({'sentence1': a, 'sentence2': b, 'score': s, 'split': 'test'})
        for a, b, s in PAIRS
      ),
    ),
  ],
)
def test_formats(tmp_path, name, text):
  assert sts.read_pairs(write(tmp_path / name, text)) == PAIRS


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('a.csv', 'One.,Two.,1\nThree.,Four.,5.1\n', ('a.csv', 'line 2', '5.1')),
    ('a.jsonl', '{"sentence1": "One.", "sentence2": "Two.", "score": true}', ('a.jsonl', 'line 1')),
  ],
)
def test_bad_input(tmp_path, name, text, message):
  with refused(message):
    sts.read_pairs(write(tmp_path / name, text))
