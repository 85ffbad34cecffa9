"""Numbers with their nouns."""

import pytest

from dprjax.base.counts import counted


@pytest.mark.parametrize(
  ('plural', 'singular'),
  [
    ('queries', 'query'),
    ('passages of more than 8 tokens: cut', 'passage of more than 8 tokens: cut'),
    ('batches', 'batch'),
    ('negatives that are not there', 'negative that is not there'),
    ('lines of an address', 'line of an address'),
  ],
)
def test_one_is_singular_and_the_rest_of_the_words_stay(plural, singular):
  assert counted(1, plural) == f'1 {singular}'
  assert counted(0, plural) == f'0 {plural}'
  assert counted(12345, plural) == f'12,345 {plural}'
