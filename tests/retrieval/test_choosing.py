import numpy as np
import pytest

from dprjax.retrieval import choosing
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate

PROMPT, LORA = Candidate('query'), Candidate('lora')
FUSED = Candidate('frozen', fused=True)


def queries(count, seed=0):
  """Scores of the frozen encoder, and noise of the size of real differences."""
  rng = np.random.default_rng(seed)
  return rng.uniform(0.2, 0.8, count), lambda: rng.normal(0, 0.15, count)


def test_a_clear_gain_is_chosen_and_shrunk_a_little():
  frozen, noise = queries(400)
  scores = {FROZEN: frozen, PROMPT: frozen + 0.1 + noise(), FUSED: frozen + 0.02 + noise()}
  found = choosing.choose(scores)
  assert found.candidate == PROMPT
  measured = found.estimates[PROMPT].measured
  assert 0.7 * measured < found.expected < measured
  assert found.loss < 0.01
  assert 'expected gain +0.0' in found.verdict
  assert 'under 1 %' in found.verdict


def test_the_frozen_encoder_stays_where_all_others_lose():
  frozen, noise = queries(200)
  found = choosing.choose({FROZEN: frozen, PROMPT: frozen - 0.1 + noise(), BM25: frozen - 0.2})
  assert found.candidate == FROZEN
  assert found.expected == found.loss == 0
  assert found.estimates[PROMPT].loss > 0.95


def test_the_better_of_equals_does_not_depend_on_their_order():
  frozen, noise = queries(100)
  scores = {FROZEN: frozen, PROMPT: frozen + 0.05 + noise(), LORA: frozen + 0.09 + noise()}
  turned = dict(reversed(scores.items()))
  assert choosing.choose(scores).candidate == choosing.choose(turned).candidate == LORA


def test_gains_on_seen_answers_alone_are_told():
  frozen, _ = queries(100)
  new = np.arange(100) < 40
  scores = {FROZEN: frozen, PROMPT: frozen + np.where(new, -0.01, 0.2)}
  found = choosing.choose(scores, new)
  assert found.candidate == PROMPT
  assert (found.new, found.new_queries) == (pytest.approx(-0.01), 40)
  assert 'the measured gain is on answers seen in training' in found.verdict
  none = choosing.choose(scores, np.zeros(100, bool))
  assert (none.new, none.new_queries) == (None, 0)
  assert 'new answers are untested' in none.verdict


def test_each_candidate_counts_the_queries_that_it_was_not_trained_on():
  frozen, noise = queries(90)
  gained = frozen + 0.1 + noise()
  some = np.where(np.arange(90) < 30, gained, np.nan)
  found = choosing.choose({FROZEN: frozen, PROMPT: some, LORA: gained})
  part = choosing.choose({FROZEN: frozen[:30], PROMPT: gained[:30]})
  one, other = found.estimates[PROMPT], part.estimates[PROMPT]
  assert one.measured == pytest.approx(other.measured)
  assert one.error == pytest.approx(other.error)
  assert one.error > 1.5 * found.estimates[LORA].error
  none = choosing.choose({FROZEN: frozen, PROMPT: np.full(90, np.nan)})
  assert none.candidate == FROZEN
