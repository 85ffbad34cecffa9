"""Texts of the quickstart, from a small package written here and a few standard modules."""

import collections
import json
import pathlib
import sys

import pytest

from dprjax.text import docstrings
from tests.refusals import refused

# fmt: off
FEW = (
  'argparse', 'collections', 'concurrent', 'email', 'http', 'importlib', 'json', 'logging',
  'statistics', 'textwrap',
)
# fmt: on


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """(the folder built from FEW, the counts, the page of every entry)."""
  folder = tmp_path_factory.mktemp('docstrings') / 'docs'
  counts = docstrings.build(folder, FEW)
  return folder, counts, {entry.name: entry.page for entry in docstrings.entries(FEW)}


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def qrels(folder, split):
  header, *lines = (folder / 'qrels' / f'{split}.tsv').read_text().splitlines()
  assert header == 'query-id\tcorpus-id\tscore'
  rows = [line.split('\t') for line in lines]
  assert all(score == '1' for _, _, score in rows)
  return {query: passage for query, passage, _ in rows}


@pytest.fixture
def package(tmp_path, monkeypatch):
  """An installed package `apiary` with private modules, which must never be imported."""
  sources = {
    '__init__.py': """\
'''A package.'''
from apiary._src import hive as _hive
from ._src.hive import *
from ._src.bees import Bee as Bee, _count
raise SystemExit('imported')
""",
    '_src/__init__.py': '',
    '_src/hive.py': """\
__all__ = ['build']

def build(wood):
  '''Builds a hive out of wood.

  Args
  ----
  wood: planks of pine.
  '''

def inner(x):
  '''Checks one frame of the hive.

  Not for use outside.
  '''
""",
    '_src/bees.py': """\
import warnings
BAD = '\\d'

try:
  from os import path
except ImportError:
  path = None

class Bee:
  '''An insect that
  makes honey.
  It also flies and stings.
  '''

  def sting(self):
    '''Stings whoever is near.

    Once only, as a rule.
    '''

def _count():
  '''Counts all the bees.

  Private to this file.
  '''
""",
    'tools.py': """\
from apiary._src.bees import Bee

if True:
  async def smoke():
    '''Calms the bees down.

    Blows smoke over them.
    '''

def bare():
  '''Only a summary line here.'''

def undocumented():
  pass

def mask():
  '''Puts a mask on.

  Two words
  '''
""",
    'zcopies.py': """\
def smoke_again():
  '''Calms the bees  down.

  Blows smoke over them.
  '''
""",
    'old.py': """\
print 'Python 2'
""",
    'tests/test_bees.py': """\
def check():
  '''Checks every single bee.

  In a test folder.
  '''
""",
  }
  for name, text in sources.items():
    (tmp_path / 'apiary' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'apiary' / name).write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  return 'apiary'


def test_entries_are_named_as_a_user_would_write_them(package):
  assert docstrings.entries([package]) == [
    ('apiary.Bee', 'apiary._src.bees', 'An insect that makes honey.', 'It also flies and stings.'),
    (
      'apiary._src.hive.inner',
      'apiary._src.hive',
      'Checks one frame of the hive.',
      'Not for use outside.',
    ),
    (
      'apiary.build',
      'apiary._src.hive',
      'Builds a hive out of wood.',
      'Args\nwood: planks of pine.',
    ),
    ('apiary.tools.smoke', 'apiary.tools', 'Calms the bees down.', 'Blows smoke over them.'),
  ]
  assert 'apiary' not in sys.modules


@pytest.mark.slow
def test_a_beir_folder(built):
  folder, counts, page = built
  corpus = {row['_id']: row for row in read(folder / 'corpus.jsonl')}
  queries = {row['_id']: row['text'] for row in read(folder / 'queries.jsonl')}
  splits = {split: qrels(folder, split) for split in ('train', 'dev', 'test')}

  assert corpus['json.dump']['title'] == 'json.dump'
  assert corpus['json.dump']['text'].startswith('If ``skipkeys`` is true')
  assert (
    queries['q:json.dump']
    == 'Serialize ``obj`` as a JSON formatted stream to ``fp`` (a ``.write()``-supporting '
    'file-like object).'
  )
  assert 200 < len(corpus) < 600
  assert sum(counts['passages'].values()) == len(corpus)
  assert counts['passages'].keys() == set(FEW)
  assert counts['queries'] == {split: len(pairs) for split, pairs in splits.items()}
  assert sum(counts['queries'].values()) + sum(counts['ask no query'].values()) == len(corpus)

  pairs = {query: passage for split in splits.values() for query, passage in split.items()}
  assert len(pairs) == sum(map(len, splits.values())) == len(queries)  # in one split each
  assert pairs.keys() == queries.keys()
  assert set(pairs.values()) <= corpus.keys()
  assert all(query == f'q:{passage}' for query, passage in pairs.items())
  assert all(
    0.1 * len(queries) <= len(splits[split]) < 0.25 * len(queries) for split in ('dev', 'test')
  )
  # No page is in two splits.
  homes = collections.defaultdict(set)
  for split, judged in splits.items():
    for passage in judged.values():
      homes[page[passage]].add(split)
  assert len(homes) > 20 and all(len(names) == 1 for names in homes.values())


def test_a_query_does_not_give_its_passage_away(tmp_path):
  (tmp_path / 'things.py').write_text(
    ''.join(
      f"def f{number}():\n  '''{doc}\n  '''\n\n"
      for number, doc in enumerate(
        [
          'Copies the whole file.\n\n  Bytes and all, to the end.',
          'Copies the  WHOLE file!\n\n  Lines only, to the end.',
          'Copies.\n\n  Everything that there is.',
          'Moves the file away.\n\n  See also: moves the file, away! And back.',
          'Opens a file.\n\n  For reading or for writing.',
        ]
      )
    )
  )
  for name in ('more', 'still'):
    (tmp_path / f'{name}.py').write_text(
      f"def f():\n  '''Does {name} of it.\n\n  Whatever that may be.\n  '''\n"
    )
  sys.path.insert(0, str(tmp_path))
  try:
    counts = docstrings.build(tmp_path / 'out', ['things', 'more', 'still'])
  finally:
    sys.path.remove(str(tmp_path))
  assert counts['passages'] == {'things': 5, 'more': 1, 'still': 1}
  assert counts['ask no query'] == {
    'summary shared': 2,
    'summary too short': 1,
    'summary repeated in the body': 1,
  }
  assert counts['queries'] == {'train': 1, 'dev': 1, 'test': 1}
  assert {row['_id'] for row in read(tmp_path / 'out' / 'queries.jsonl')} == {
    'q:things.f4',
    'q:more.f',
    'q:still.f',
  }
  # Passages without a query are in the corpus.
  assert len(read(tmp_path / 'out' / 'corpus.jsonl')) == 7


@pytest.mark.slow
def test_the_same_packages_give_the_same_bytes(built, tmp_path):
  docstrings.build(tmp_path / 'again', FEW)
  for path in filter(pathlib.Path.is_file, built[0].rglob('*')):
    assert path.read_bytes() == (tmp_path / 'again' / path.relative_to(built[0])).read_bytes()


def test_what_cannot_be_built_says_so_and_leaves_what_was(tmp_path):
  (tmp_path / 'docs').mkdir()
  (tmp_path / 'docs' / 'mine.txt').write_text('mine')
  with refused('nonesuch'):
    docstrings.build(tmp_path / 'docs', ['json', 'nonesuch'])
  assert [path.name for path in tmp_path.rglob('*')] == ['docs', 'mine.txt']


@pytest.mark.slow
def test_numpy_has_its_compiled_functions():
  found = {entry.name: entry for entry in docstrings.entries(['numpy'])}
  for name, summary in (
    ('numpy.hypot', 'Given the "legs" of a right triangle, return its hypotenuse.'),  # a ufunc
    ('numpy.zeros', 'Return a new array of given shape and type, filled with zeros.'),  # add_newdoc
  ):
    assert found[name].summary == summary
  assert found['numpy.median'].page.startswith('numpy.lib._')  # re-exported
  assert 'hypotenuse' not in found['numpy.hypot'].body.split('\n')[0]
  assert 'numpy.abs' not in found  # the same function as numpy.absolute
  assert 700 < len(found) < 1500
