"""Queries from texts of passages."""

import pytest

from dprjax.asking import extraction
from dprjax.formats.texts import PassageRecord

TEXT = (
  '# Floating\nA hull pushes water aside and the water pushes back. Why does iron float at all? '
  'The weight of the water that is pushed aside equals the push, which Archimedes found in a bath. '
  'Ballast lowers the centre of mass of the hull, and a low hull is a steady hull.'
)
PASSAGE = PassageRecord('ship', 'How ships float', TEXT)
OTHERS = ['the water and the bath', 'a water pipe and the push', 'the weight of a bath'] * 4


def queries(*kinds, passage=PASSAGE, **options):
  rarity = extraction.Rarity([passage.text, *OTHERS])
  return extraction.extract(passage, rarity, kinds=kinds, most=9, keep=0.0, **options)


@pytest.mark.parametrize(
  'kind, query, title, gone',
  [
    ('title', 'How ships float', '', ''),
    ('heading', 'Floating', 'How ships float', '# Floating'),
    ('question', 'Why does iron float at all?', 'How ships float', 'Why does iron float at all?'),
    (
      'first',
      'A hull pushes water aside and the water pushes back.',
      'How ships float',
      'A hull pushes water aside and the water pushes back.',
    ),
  ],
)
def test_what_became_the_query_leaves_the_passage(kind, query, title, gone):
  found = queries(kind, words_of_query=(1, 32))
  assert found.queries == [(kind, query)]
  assert found.passage.title == title
  assert (gone in TEXT) and (not gone or gone not in found.passage.text)
  assert len(found.passage.text) >= len(TEXT) - len(gone) - 2


def test_a_crop_is_of_one_sentence_which_leaves():
  found = queries('crop')
  [(kind, crop)] = found.queries
  assert kind == 'crop' and 5 <= len(crop.split()) <= 14
  assert crop in TEXT and crop not in found.passage.text
  assert queries('crop') == found
  crops = {queries('crop', seed=seed).queries[0].text for seed in range(9)}
  assert len(crops) > 3


def test_keyphrases_are_rare_elsewhere_and_stay():
  found = queries('keyphrases')
  [(_, phrases)] = found.queries
  assert phrases.startswith('hull pushes') and 'water' not in phrases.split()
  assert found.passage == PASSAGE


def test_several_kinds_share_a_passage_and_leave_enough_of_it():
  found = queries('title', 'question', 'first', 'crop')
  assert [kind for kind, _ in found.queries] == ['title', 'question', 'first', 'crop']
  texts = [text for _, text in found.queries]
  assert all(text not in found.passage.text for text in texts[1:])
  assert len(found.passage.text.split()) >= 8
  # Without a second sentence nothing can be taken out.
  single = PassageRecord('one', '', 'A single sentence of some ten words stands here alone today.')
  assert queries('first', 'crop', passage=single).queries == []
  assert queries('keyphrases', passage=single).queries != []


def test_a_share_of_passages_stays_whole_and_most_bounds_the_queries():
  rarity = extraction.Rarity([TEXT])
  whole = [
    extraction.extract(PASSAGE._replace(id=str(n)), rarity, kinds=('first',), keep=0.3).passage.text
    == TEXT
    for n in range(200)
  ]
  assert 35 <= sum(whole) <= 85
  assert len(extraction.extract(PASSAGE, rarity, most=2).queries) == 2
