"""Hashes of the queries that a model has seen."""

import hashlib

import numpy as np

from dprjax.text import seen

KNOWN = {
  'train': seen.hashes(['How do wings lift?', 'Straße', 'ﬁn']),
  'dev': seen.hashes(['why does bread rise']),
}


def test_queries_are_known_by_their_texts_under_any_id():
  asked = [
    ('1', '  how DO wings\tlift? '),
    ('2', 'how do wings lift'),
    ('3', 'STRASSE'),
    ('4', 'fin'),
    ('5', 'Why does bread rise'),
    ('6', ''),
  ]
  assert seen.ids(asked, KNOWN) == {'train': ['1', '3', '4'], 'dev': ['5']}
  assert seen.ids(asked[1:2], KNOWN) == {} == seen.ids(asked, {}) == seen.ids([], KNOWN)


def test_what_any_of_several_models_has_seen():
  other = {'train': seen.hashes(['why does bread rise', 'fin'])}
  found = seen.join(KNOWN, other, {})
  assert len(found['train']) == 4 and found['dev'].tolist() == KNOWN['dev'].tolist()
  assert seen.join({}, {}) == {}


def test_a_file_of_them(tmp_path):
  path = tmp_path / 'queries.npz'
  assert seen.read(path) == {}
  seen.write(path, KNOWN)
  found = seen.read(path)
  assert {role: values.tolist() for role, values in found.items()} == {
    role: values.tolist() for role, values in KNOWN.items()
  }
  many = {'train': seen.hashes(map(str, range(10_000)))}
  seen.write(path, many)
  assert path.stat().st_size < 81_000


def test_the_hashes_in_files_of_earlier_versions():
  texts = 'how do wings lift?', 'strasse', 'fin'
  digests = (hashlib.sha256(text.encode()).digest() for text in texts)
  expected = sorted(int.from_bytes(digest[:8], 'big') for digest in digests)
  assert KNOWN['train'].dtype == np.uint64 and KNOWN['train'].tolist() == expected
