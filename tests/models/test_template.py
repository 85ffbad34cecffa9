import jax
import numpy as np
import pytest

from dprjax.models.template import Piece, Template, fill, unpack
from tests.refusals import refused

CLS, SEP, PAD, VOCABULARY = 1, 2, 0, 50
PAIR = Template.pair((CLS,), (SEP,), (SEP,), 1)
WIDE = Template.pair((CLS,), (3, 3), (3,), 0)
# [CLS] P1 text P2 [MASK] [SEP] with vectors 0, 1 and 2, and one in words of another task.
VECTORS = Template(
  (Piece((CLS, VOCABULARY, VOCABULARY + 1)), Piece(None), Piece((VOCABULARY + 2, 4, SEP)))
)
WORDS = Template((Piece((CLS,)), Piece(None), Piece((7, 8, 9, 4, SEP), 1)))
PROMPTED = Template(
  (
    Piece((CLS, VOCABULARY)),
    Piece(None),
    Piece((SEP, VOCABULARY + 1)),
    Piece(None),
    Piece((SEP, VOCABULARY + 2, 4, SEP)),
  )
)
LENGTHS = {1: [(3,), (0,), (6,)], 2: [(3, 4), (0, 6), (5, 0)]}


def texts_of(lengths, first_id=20):
  """Token arrays of texts, all tokens different."""
  ids = iter(range(first_id, 10**6))
  return [
    [np.array([next(ids) for _ in range(row[i])], np.int32) for row in lengths]
    for i in range(len(lengths[0]))
  ]


def by_hand(template, texts, row):
  """The tokens, the types and the pieces of one example."""
  texts = iter(texts)
  tokens, types, pieces = [], [], []
  for index, piece in enumerate(template.pieces):
    part = next(texts)[row].tolist() if piece.tokens is None else list(piece.tokens)
    tokens += part
    types += [piece.token_type] * len(part)
    pieces += [index] * len(part)
  return tokens, types, pieces


def assert_filled(filled, template, texts, row, length):
  tokens, types, pieces = by_hand(template, texts, row)
  padding = length - len(tokens)
  assert filled.tokens[row].tolist() == tokens + [PAD] * padding
  assert filled.mask[row].tolist() == [True] * len(tokens) + [False] * padding
  assert filled.token_types[row].tolist() == types + [template.pieces[-1].token_type] * padding
  assert filled.pieces[row].tolist() == pieces + [len(template.pieces)] * padding


@pytest.mark.slow_but_first
@pytest.mark.parametrize('template', [PAIR, WIDE, VECTORS, WORDS, PROMPTED])
def test_packed_texts_are_filled_in(template):
  texts = texts_of(LENGTHS[template.num_texts])
  length = 7 + template.num_tokens + 2
  packed = template.pack(texts, length, PAD)
  assert packed.cut == 0 and packed.lengths.tolist() == list(map(list, LENGTHS[template.num_texts]))
  rows = np.full((3, length), PAD, np.int32)
  for row, tokens in zip(rows, packed.rows, strict=True):
    row[: len(tokens)] = tokens
  # The packed row is as long as the filled template, so sorting by length need not know it.
  assert [len(row) for row in packed.rows] == [
    len(by_hand(template, texts, row)[0]) for row in range(3)
  ]
  filled = jax.jit(lambda rows, lengths: fill([template], unpack(rows, lengths), length, PAD))(
    rows, packed.lengths
  )
  for row in range(3):
    assert_filled(filled, template, texts, row, length)


def kept(template, *lengths, max_length):
  texts = texts_of([lengths])
  packed = template.pack(texts, max_length, PAD)
  flat = np.concatenate([text[0][:kept] for text, kept in zip(texts, *packed.lengths, strict=True)])
  np.testing.assert_array_equal(packed.rows[0][: len(flat)], flat)
  assert packed.cut == (tuple(packed.lengths[0]) != lengths)
  return tuple(packed.lengths[0].tolist())


def test_a_long_second_text_is_cut():
  assert kept(PAIR, 4, 9, max_length=12) == (4, 5)
  assert kept(PAIR, 4, 5, max_length=12) == (4, 5)
  assert kept(PAIR, 9, 0, max_length=12) == (9, 0)


def test_cutting_never_meets_the_template():
  assert kept(VECTORS, 20, max_length=10) == (4,)
  assert kept(PROMPTED, 3, 20, max_length=15) == (3, 4)
  with refused('4', '3'):
    PAIR.pack(texts_of([(1, 1)]), 4, PAD)
  with refused('tokens', '6'):
    VECTORS.pack(texts_of([(1,)]), 6, PAD)
