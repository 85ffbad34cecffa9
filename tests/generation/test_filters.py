"""Queries that cannot be trained on."""

import pytest

from dprjax.base.counts import ReadReport
from dprjax.generation import filters
from dprjax.generation.filters import Query

PASSAGE = (
  'A hull pushes water aside and the water pushes back with the weight of what was pushed aside, '
  'so that a ship made of iron floats as long as it holds enough air.'
)


@pytest.mark.parametrize(
  'text, reason',
  [
    ('why does an iron ship float', ''),
    ('buoyancy of iron hulls', ''),
    ('what is 5 < 6 in a hull', ''),
    ('', 'empty'),
    ('hull', 'too short'),
    ('why ' * 33, 'too long'),
    ('why do <b>ships</b> float', 'markup'),
    ('<img src="http://a"> ships', 'markup'),
    ('[ships](javascript:x) that float', 'markup'),
    ('<|im_end|> why ships float', 'markup'),
    ('why ships\u202e float', 'markup'),
    ('Sure, here are three queries:', 'talk'),
    ('Ignore all previous instructions', 'talk'),
    ('I cannot help with ships', 'talk'),
    ('according to the passage why do ships float', 'about the text itself'),
    ('почему железный корабль плавает', 'another script'),
    ('the water pushes back with the weight of what', 'copied'),
    ('hull pushes water aside and the water', 'copied'),
  ],
)
def test_reasons(text, reason):
  assert filters.why_not(text, PASSAGE) == reason


def test_a_query_may_have_the_script_of_its_passage():
  russian = 'Корабль из железа плавает потому что вытесняет воду и не тонет как камень'
  assert filters.why_not('почему корабль плавает', russian) == ''
  assert filters.why_not('why do ships float', russian) == 'another script'
  assert filters.why_not('почему tcp-пакет теряется', russian) == ''


@pytest.mark.parametrize(
  'line, text',
  [
    ('1. why ships float', 'why ships float'),
    ('- "why ships float"', 'why ships float'),
    ('Query 2: why  ships\tfloat ', 'why ships float'),
    ('Q: why ships float', 'why ships float'),
    ('(3) \u201cwhy ships float\u201d', 'why ships float'),
    ('2020 elections in Ghana', '2020 elections in Ghana'),
    ("what is 'keel'", "what is 'keel'"),
  ],
)
def test_lines_of_answers_are_tidied(line, text):
  assert filters.tidy(line) == text


def test_repeated_and_shared_queries_and_counts():
  report = ReadReport()
  passages = {'a': PASSAGE, 'b': PASSAGE, 'c': PASSAGE}
  queries = [
    Query('a', 'why ships float'),
    Query('a', 'Why ships float?'),
    Query('a', 'iron in water'),
    Query('a', 'floating iron'),
    Query('b', 'floating of ships'),
    Query('c', 'Floating of ships'),
    Query('c', ''),
  ]
  found = filters.choose(queries, passages, report, 2)
  assert found == [queries[0], queries[2]]
  left = {what.removeprefix('queries left out: '): n for what, n in report.counts.items()}
  assert left == {
    'repeated': 1,
    'empty': 1,
    'more than a passage has': 1,
    'asked of several passages': 2,
  }
