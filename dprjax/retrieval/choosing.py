"""Chooses among the frozen encoder, adapters, BM25 and fusions of these, by held-out queries.

The frozen encoder is a candidate, too. Scores must be cross-fitted: the score of a query must not
come from a model, a number of updates or a fusion weight that this query helped to choose. `choose`
then estimates the gain of each candidate over the frozen encoder on other queries, in three steps:

1. Optimism. The measured gain of the best of several candidates is too high. Its mean excess in
   bootstrap samples (the gain of the best candidate in a sample, minus its gain over all queries)
   is subtracted from all gains. It grows with the number of candidates, and is near 0 if one is
   clearly ahead.
2. Shrinkage. Gains are shrunk towards 0, and more with fewer queries: the expected gain is the
   posterior mean for a prior with wide tails and a normal measurement.
3. Loss. The spread of the posterior and of trainings with other seeds (`Prior.noise`) gives the
   chance of a loss.

The candidate with the largest expected gain wins, of those whose chance of a loss is at most
`MOST_LOSS`. Without such a candidate the frozen encoder wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from dprjax.base.counts import counted

FORMAT = 'dprjax.choice'
"""Format of choice.json."""

LOSS = 0.002
"""Smaller losses do not count."""

MOST_LOSS = 1 / 3
"""Judged queries choose no candidate whose chance of losing more than `LOSS` is larger."""

_Z95 = 1.96  # standard errors of a 95 % interval
_DRAWS = 400  # of the bootstrap
_DRAWS_AT_ONCE = 50  # bounds the memory
# Prior of the deviation of single queries, with the weight of this many queries, so that a few
# queries that agree by chance do not make a gain certain.
_DEVIATION, _PSEUDO = 0.25, 3.0
# Degrees of freedom of the spread of the prior, as in Student's distribution: a gain measured by
# many queries counts as one observation.
_SURE, _MANY = 3.0, 30.0


class Candidate(NamedTuple):
  """A way to rank.

  Attributes:
    model: the adapter name; 'frozen' is the encoder without an adapter, 'bm25' no encoder.
    step: the position between the frozen encoder (0) and the trained adapter (1).
    fused: whether it is fused with BM25, by learnt weights.
  """

  model: str
  step: float = 1.0
  fused: bool = False

  def __str__(self) -> str:
    step = '' if self.step == 1 else f' at {self.step:g} of its step'
    return f'{self.model}{step}{" with BM25" if self.fused else ""}'


FROZEN = Candidate('frozen')
BM25 = Candidate('bm25')


class Prior(NamedTuple):
  """Prior knowledge of gains, in units of the measure.

  Attributes:
    spread: of the gains of data sets around 0.
    noise: the spread of gains on other queries around the cross-fitted gain from other sources than
      the number of queries: seeds, and training on all queries in place of a part.
  """

  spread: float
  noise: float


# docs/experiments/small-labels.md explains the values.
PRIOR = Prior(0.04, 0.01)


class Estimate(NamedTuple):
  """An estimate of the gain of a candidate over the frozen encoder.

  Attributes:
    measured: the mean difference on the held-out queries.
    expected, deviation: of the gain on other queries.
    loss: the chance of losing more than `LOSS`.
  """

  measured: float
  error: float
  expected: float
  deviation: float
  loss: float


_NO_CHANGE = Estimate(0.0, 0.0, 0.0, 0.0, 0.0)


class Choice(NamedTuple):
  """The candidate to use.

  Attributes:
    candidate: `FROZEN` unless another has an expected gain above 0 and a small chance of a loss.
    estimates: of each candidate except the frozen encoder.
    optimism: subtracted from all gains, since the best is chosen.
    new, new_queries: the measured gain on queries with new answers, and their number; None if
      unknown or without such queries.
  """

  candidate: Candidate
  estimates: Mapping[Candidate, Estimate]
  queries: int
  optimism: float = 0.0
  new: float | None = None
  new_queries: int | None = None

  @property
  def expected(self) -> float:
    """The expected gain of the choice; 0 for the frozen encoder."""
    return self.estimates.get(self.candidate, _NO_CHANGE).expected

  @property
  def loss(self) -> float:
    """The chance that the choice loses more than `LOSS`; 0 for the frozen encoder."""
    return self.estimates.get(self.candidate, _NO_CHANGE).loss

  @property
  def verdict(self) -> str:
    if not self.queries:
      return 'frozen: nothing could be checked, since there are no held-out queries'
    if self.candidate not in self.estimates:
      if not self.estimates:
        return 'frozen: there is no other candidate'
      best = max(self.estimates.values(), key=lambda one: one.expected)
      queries = counted(self.queries, 'held-out queries')
      return (
        f'frozen: by {queries} no candidate has an expected gain above 0 and at most a chance of '
        f'{percent(MOST_LOSS)} of losing more than {LOSS:g}; the best one has {best.expected:+.3f} '
        f'and {percent(best.loss)}'
      )
    chosen = self.estimates[self.candidate]
    low, high = (chosen.measured + sign * _Z95 * chosen.error for sign in (-1, 1))
    return (
      f'{self.candidate}: {chosen.measured:+.3f} nDCG@10 [{low:+.3f}, {high:+.3f}] on '
      f'{counted(self.queries, "held-out queries")}, expected gain {chosen.expected:+.3f}, chance '
      f'of losing more than {LOSS:g}: {percent(chosen.loss)}{self._on_new_answers}'
    )

  def record(self, weights: Mapping[Candidate, float]) -> dict[str, Any]:
    """The content of choice.json; ``weights``: of BM25 in each fusion."""
    return {
      'format': FORMAT,
      'verdict': self.verdict,
      'chosen': list(self.candidate),
      'candidates': [
        {**name._asdict(), **estimate._asdict(), 'bm25_weight': weights.get(name)}
        for name, estimate in self.estimates.items()
      ],
      'queries': self.queries,
      'optimism': self.optimism,
      'new': self.new,
      'new_queries': self.new_queries,
    }

  @property
  def _on_new_answers(self) -> str:
    if self.new_queries is None or self.new_queries == self.queries:
      return ''
    if self.new is None:
      return '; new answers are untested'
    measured = self.estimates[self.candidate].measured
    queries = counted(self.new_queries, 'queries')
    if self.new <= 0 < measured:
      return (
        f'; the measured gain is on answers seen in training, with {self.new:+.3f} on the '
        f'{queries} with new answers'
      )
    return f'; {self.new:+.3f} on the {queries} with new answers'


def percent(chance: float) -> str:
  """A chance for display, never 0 or 100 %."""
  if chance < 0.01:
    return 'under 1 %'
  return 'over 99 %' if chance > 0.99 else f'{100 * chance:.0f} %'


def choose(
  scores: Mapping[Candidate, Float[np.ndarray, ' queries']],
  new: Bool[np.ndarray, ' queries'] | None = None,
  prior: Prior = PRIOR,
) -> Choice:
  """The candidate with the largest expected gain over the frozen encoder, if a loss is unlikely.

  Args:
    scores: cross-fitted scores of the same held-out queries, in the same order, from 0 to 1; one
      candidate is `FROZEN`. NaN: the candidate was trained on the query. Among equally good
      candidates the first wins. Without queries the frozen encoder stays.
    new: whether each query has new answers: none of its relevant passages is relevant to a training
      query.
  """
  by_name = {name: np.asarray(values, np.float64) for name, values in scores.items()}
  names = [name for name in scores if name != FROZEN]
  count = len(by_name[FROZEN])
  if not count or not names:
    return Choice(FROZEN, {}, count)
  gains = np.stack([by_name[name] - by_name[FROZEN] for name in names])  # [candidates, queries]
  there = ~np.isnan(gains)
  gains, counts = np.where(there, gains, 0.0), there.sum(axis=1)
  # A candidate that never differs equals the frozen encoder.
  differing = np.any(gains != 0, axis=1)

  def expect(
    means: Float64[np.ndarray, '... candidates'], variances: Float64[np.ndarray, '... candidates']
  ) -> tuple[Float64[np.ndarray, '... candidates'], ...]:
    expected, *errors = posterior(means, variances, counts, prior)
    return np.where(differing, expected, -np.inf), *errors

  def moments(
    values: Float64[np.ndarray, 'candidates queries'],
  ) -> Float64[np.ndarray, ' candidates']:
    return np.sum(values, axis=1) / np.maximum(counts, 1)

  measured = moments(gains)
  variances = moments(gains**2) - measured**2
  optimism = _optimism(gains, there, measured, expect)
  expected, error, left = expect(measured - optimism, variances)
  deviation = np.sqrt(left)
  normal = statistics.NormalDist()
  loss = [normal.cdf(z) for z in (-LOSS - expected) / deviation]
  estimates = {
    name: Estimate(*map(float, row)) if differs else _NO_CHANGE
    for name, differs, *row in zip(
      names, differing, measured, np.sqrt(error), expected, deviation, loss, strict=True
    )
  }
  good = [one for one in names if estimates[one].expected > 0 and estimates[one].loss <= MOST_LOSS]
  if not good:
    return Choice(FROZEN, estimates, count, optimism)
  best = max(good, key=lambda name: estimates[name].expected)
  choice = Choice(best, estimates, count, optimism)
  if new is None:
    return choice
  fresh = (by_name[best] - by_name[FROZEN])[new]
  fresh = fresh[~np.isnan(fresh)]
  return choice._replace(new=float(fresh.mean()) if len(fresh) else None, new_queries=len(fresh))


def posterior(
  means: Float64[np.ndarray, '*n'],
  variances: Float64[np.ndarray, '*n'],
  counts: Int[np.ndarray, '*m'],
  prior: Prior,
) -> tuple[Float64[np.ndarray, '*n'], ...]:
  """Expected gains, squared standard errors, and squared deviations of the expected gains."""
  freedom = counts + _PSEUDO - 1
  error = (counts * variances + _PSEUDO * _DEVIATION**2) / freedom / np.maximum(counts, 1)
  around = error + prior.noise**2
  # A large gain over many queries indicates a larger spread.
  share = counts / (counts + _MANY)
  wide = (_SURE * prior.spread**2 + share * np.maximum(means**2 - around, 0)) / (_SURE + share)
  weight = wide / (wide + around)
  return weight * means, error, weight * around + prior.noise**2


def _optimism(gains, there, measured, expect) -> float:
  """The mean excess gain of the best candidate of a sample, in the sample over all queries."""
  count = gains.shape[1]
  rng, excess = np.random.default_rng(0), 0.0
  for _ in range(_DRAWS // _DRAWS_AT_ONCE):
    drawn = rng.multinomial(count, np.full(count, 1 / count), _DRAWS_AT_ONCE).astype(np.float64)
    sums = np.maximum(drawn @ there.T, 1)  # [draws, candidates]
    means, squares = drawn @ gains.T / sums, drawn @ (gains**2).T / sums
    expected = expect(means, squares - means**2)[0]
    best = expected.argmax(axis=1)
    rows = np.arange(len(best))
    # Otherwise the frozen encoder wins, which has no excess. `MOST_LOSS` would leave less excess.
    taken = expected[rows, best] > 0
    excess += np.sum(np.where(taken, means[rows, best] - measured[best], 0.0))
  return max(float(excess) / _DRAWS, 0.0)
