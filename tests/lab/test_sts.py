"""Scored sentence pairs of each format."""

import gzip
import json

import pytest

from lab import sts
from lab.sts import Pair

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
