import itertools

import pytest

WORDS = ['json', 'http', 'xml', 'list', 'dict', 'file']


@pytest.fixture(scope='session')
def texts():
  """Queries, corpus and judgements: (id to text, id to text, query id to passage id)."""
  corpus = {f'd{n}': ' '.join(words) for n, words in enumerate(itertools.permutations(WORDS, 3))}
  queries = {f'q{n}': f'parse {corpus[f"d{n}"]}' for n in range(40)}
  return queries, corpus, {f'q{n}': f'd{n}' for n in range(40)}
