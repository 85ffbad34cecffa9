"""Numbers with their nouns."""

import pytest

from dprjax.base.counts import counted


@pytest.mark.parametrize(
  ('plural', 'singular'),
  [
    ('queries', 'query'),
    ('training queries', 'training query'),
    ('passages of more than 8 tokens: cut', 'passage of more than 8 tokens: cut'),
    ('batches', 'batch'),
    ('processes', 'process'),
    ('prefixes', 'prefix'),
    ('indexes', 'index'),
    ('judgements', 'judgement'),
    ('of them matching', 'of them matching'),
    ('negatives that are not there', 'negative that is not there'),
    ('queries whose positives are unknown', 'query whose positives are unknown'),
    ('lines of an address', 'line of an address'),
  ],
)
def test_one_is_singular_and_the_rest_of_the_words_stay(plural, singular):
  assert counted(1, plural) == f'1 {singular}'
  assert counted(0, plural) == f'0 {plural}'
  assert counted(12345, plural) == f'12,345 {plural}'
