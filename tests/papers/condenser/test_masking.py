import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes
from dprjax.papers.condenser import losses as masking

MASK, PAD, CLS, SEP = 4, 0, 1, 2
REPLACEMENTS = np.arange(100, 200, dtype=np.int32)
ROWS, LENGTH = 256, 34
mask_tokens = jax.jit(masking.mask_tokens, static_argnames=('rate', 'mask_id'))


def texts(rows=ROWS, length=LENGTH, seed=0, longest=4):
  """Tokens from 1000 on, none of them a replacement, in words of 1 to ``longest`` tokens, between
  specials; of many lengths, padded.
  """
  rng = np.random.default_rng(seed)
  tokens, words = np.full((rows, length), PAD, np.int32), np.full((rows, length), -1, np.int32)
  for row in range(rows):
    size = rng.integers(1, length - 1) if row % 4 else length - 2
    tokens[row, 0], tokens[row, size + 1] = CLS, SEP
    tokens[row, 1 : size + 1] = rng.integers(1000, 2000, size)
    words[row, 1 : size + 1] = np.repeat(np.arange(size), rng.integers(1, longest + 1, size))[:size]
  return tokens, words


def draw(tokens, words, key=0, **options):
  return jax.device_get(
    mask_tokens(
      jax.random.key(key), tokens, words, mask_id=MASK, replacements=REPLACEMENTS, **options
    )
  )


@pytest.mark.slow
def test_rows_with_nothing_to_mask():
  # All padding; one word of three tokens, which a budget of one does not take.
  tokens, words = np.full((2, 12), 1000, np.int32), np.full((2, 12), -1, np.int32)
  words[1, 1:4] = 7
  masked = draw(tokens, words)
  assert masked.weights.sum() == 0
  np.testing.assert_array_equal(masked.tokens, tokens)


def greedy(order, words, budget):
  """The choice of create_pretraining_data.py, a row at a time."""
  hidden = np.zeros(len(words), bool)
  first = {word: place for place, word in reversed(list(enumerate(words.tolist()))) if word >= 0}
  for word in sorted(first, key=lambda word: order[first[word]]):
    if hidden.sum() + (words == word).sum() <= budget:
      hidden |= words == word
  return hidden


def test_choice_equals_plain_python():
  _, words = texts(rows=64, longest=5, seed=5)
  rng = np.random.default_rng(6)
  order = rng.random(words.shape).astype(np.float32)
  budget = rng.integers(0, 13, 64).astype(np.int32)
  chosen = masking.choose_words(order, words, budget, 12)
  np.testing.assert_array_equal(
    chosen, [greedy(*row) for row in zip(order, words, budget, strict=True)]
  )
  assert np.asarray(chosen).sum() > 100
  # By hand: words of 2, 3 and 1 tokens, in this order, and room for 3: the second is passed over,
  # the third still fits.
  by_hand = masking.choose_words(
    jnp.array([[0.0, 0.1, 0.9, 0.2, 0.0, 0.0, 0.3]]),
    jnp.array([[-1, 5, 5, 2, 2, 2, 9]], jnp.int32),
    jnp.array([3], jnp.int32),
    3,
  )
  np.testing.assert_array_equal(by_hand, [[False, True, True, False, False, False, True]])


@pytest.mark.slow
def test_eighty_ten_ten():
  tokens, words = texts(rows=2000, longest=1)
  masked = draw(tokens, words)
  hidden = masked.weights == 1
  shown = np.take_along_axis(masked.tokens, masked.positions, axis=1)[hidden]
  kinds = np.array(
    [
      (shown == MASK).mean(),
      np.isin(shown, REPLACEMENTS).mean(),
      (shown == masked.targets[hidden]).mean(),
    ]
  )
  assert kinds.sum() == 1
  # Five standard deviations of a share in as many draws as there were.
  expected = np.array([0.8, 0.1, 0.1])
  assert (
    hidden.sum() > 6000
    and (np.abs(kinds - expected) < 5 * np.sqrt(expected * (1 - expected) / hidden.sum())).all()
  ), kinds
  random = shown[np.isin(shown, REPLACEMENTS)]
  assert len(np.unique(random)) > 95 and abs(random.mean() - 149.5) < 5 * 28.9 / np.sqrt(
    len(random)
  )
  # Every place of a full row is as likely as another.
  full = words[:, -2] >= 0
  places = np.bincount(masked.positions[full][hidden[full]], minlength=LENGTH)[1:-1]
  assert places.min() > 0 and np.abs(places - places.mean()).max() < 5 * np.sqrt(places.mean())


@pytest.mark.slow
def test_rows_do_not_wait_for_one_another():
  placed = jax.device_put(texts(), NamedSharding(meshes.make_mesh({'data': 8}), P(meshes.BATCH)))
  options = {'mask_id': MASK, 'replacements': REPLACEMENTS}
  compiled = mask_tokens.lower(jax.random.key(0), *placed, **options).compile().as_text()
  exchanges = 'all-gather', 'all-reduce', 'all-to-all', 'collective-permute'
  assert not any(f'{name}(' in compiled for name in exchanges)
