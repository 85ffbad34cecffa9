"""Chooses among rankings by held-out queries: the frozen encoder, adapters, BM25, fusions of these.

The frozen encoder is a candidate like any other. The scores of a candidate must be cross-fitted: no
score of a query may come from a model, a number of updates or a fusion weight that this query
helped to choose. `choose` then estimates the gain of each candidate over the frozen encoder on
other queries, in three steps:

1. Optimism. The best of several candidates looks better than it is. The mean excess of the best
   candidate of a bootstrap sample, in that sample over all queries, is taken off all gains. It
   grows with the number of candidates, and is near 0 where one is clearly ahead.
2. Shrinkage. A gain is drawn towards 0, that of the frozen encoder, the more so the fewer queries
   measured it: the posterior mean of a prior with wide tails and a normal measurement.
3. The posterior spread, and that of trainings with other seeds (`Prior.noise`), give the chance
   of a loss.

The candidate with the largest expected gain wins; without an expected gain above 0, the frozen
encoder does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Bool, Float, Float64, Int

from dprjax.base.counts import counted
from dprjax.base.errors import InputError

FORMAT = 'dprjax.choice'
"""Of choice.json."""

LOSS = 0.002
"""A smaller loss than this is none."""

HALF = 0.5
"""The step of models that nothing could check."""

_DRAWS = 400  # of the bootstrap
_DRAWS_AT_ONCE = 50  # bounds the memory
# Differences of single queries have this deviation, as if these many queries had shown it: a few
# queries that agree by chance do not make a certain gain.
_DEVIATION, _PSEUDO = 0.25, 3.0
# A gain that many queries show counts as one against these many in the spread of its prior, as in
# Student's distribution.
_SURE, _MANY = 3.0, 30.0


class Candidate(NamedTuple):
  """A way to rank.

  Attributes:
    model: the adapter name; 'frozen' is the encoder as it is, 'bm25' no encoder.
    step: how far from the frozen encoder to the trained adapter, from 0 to 1.
    fused: whether BM25 is fused with it, by learnt weights.
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
  """What is known of gains before any query is scored, in units of the measure.

  Attributes:
    spread: of the gains of data sets around 0.
    noise: the spread of the gain on other queries around the cross-fitted one that is not due to
      the number of queries: of seeds, and of a training on all queries in place of a part.
  """

  spread: float
  noise: float


# docs/experiments/small-labels.md has how they were found.
PRIOR = Prior(0.04, 0.01)
# Scores of queries that nobody judged: what they say of real queries is known less well.
_UNJUDGED = Prior(0.03, 0.05)


class Estimate(NamedTuple):
  """What is known of the gain of a candidate over the frozen encoder.

  Attributes:
    measured: the mean difference on the held-out queries.
    error: its standard error.
    expected: the gain to expect on other queries.
    deviation: the standard deviation of that.
    loss: the chance of losing more than `LOSS`.
  """

  measured: float
  error: float
  expected: float
  deviation: float
  loss: float


class Choice(NamedTuple):
  """The candidate to use.

  Attributes:
    candidate: `FROZEN` where no other has an expected gain above 0.
    estimates: of each candidate but the frozen encoder.
    queries: held-out queries.
    judged: whether people judged them.
    optimism: taken off all gains, since the best is chosen.
    new, new_queries: the measured gain on queries with new answers, and their number; None if
      unknown or without such queries.
  """

  candidate: Candidate
  estimates: Mapping[Candidate, Estimate]
  queries: int
  judged: bool = True
  optimism: float = 0.0
  new: float | None = None
  new_queries: int | None = None

  @property
  def expected(self) -> float:
    """The gain to expect of the choice; 0 of the frozen encoder."""
    return self.estimates[self.candidate].expected if self.candidate in self.estimates else 0.0

  @property
  def loss(self) -> float:
    """The chance that the choice loses more than `LOSS`; 0 of the frozen encoder."""
    return self.estimates[self.candidate].loss if self.candidate in self.estimates else 0.0

  @property
  def verdict(self) -> str:
    """The result in a sentence, for the user."""
    if not self.queries:
      return 'frozen: nothing could be checked, since there are no held-out queries'
    if not self.judged:
      return (
        f'{self.candidate}: nothing could be checked, since nobody judged the '
        f'{counted(self.queries, "queries")}; judge some of your own to know what it gains'
      )
    if self.candidate not in self.estimates:
      if not self.estimates:
        return 'frozen: there is no other candidate'
      best = max(self.estimates.values(), key=lambda one: one.expected)
      queries = counted(self.queries, 'held-out queries')
      return (
        f'frozen: no candidate is expected to gain, by {queries}; '
        f'the best one has an expected gain of {best.expected:+.3f}'
      )
    return (
      f'{self.candidate}: expected gain {self.expected:+.3f}, chance of losing more than '
      f'{LOSS:g}: {percent(self.loss)}{self._on_new_answers}'
    )

  def record(self, weights: Mapping[Candidate, float] | None = None) -> dict[str, Any]:
    """What choice.json holds; ``weights``: of BM25 in each fusion."""
    return {
      'format': FORMAT,
      'verdict': self.verdict,
      'chosen': list(self.candidate),
      'candidates': [
        {**name._asdict(), **estimate._asdict(), 'bm25_weight': (weights or {}).get(name)}
        for name, estimate in self.estimates.items()
      ],
      'queries': self.queries,
      'judged': self.judged,
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
        f'; all of the measured gain is on answers that training queries have, {self.new:+.3f} on '
        f'the {queries} with new answers'
      )
    return f'; measured {measured:+.3f} in all, {self.new:+.3f} on the {queries} with new answers'


def percent(chance: float) -> str:
  """A chance for people, never 0 or 100 %."""
  if chance < 0.01:
    return 'under 1 %'
  return 'over 99 %' if chance > 0.99 else f'{100 * chance:.0f} %'


def choose(
  scores: Mapping[Candidate, Float[np.ndarray, ' queries']],
  new: Bool[np.ndarray, ' queries'] | None = None,
  judged: bool = True,
  prior: Prior | None = None,
) -> Choice:
  """The candidate with the largest expected gain over the frozen encoder.

  Args:
    scores: cross-fitted scores of the same held-out queries, in the same order, from 0 to 1; one
      candidate is `FROZEN`. NaN: this candidate was trained on the query. Equally good candidates
      are preferred in this order. Without queries the frozen encoder stays.
    new: which queries have new answers, those with no relevant passage of a training query.
    judged: whether people judged the queries. If not (synthetic queries, say), gains are shrunk
      towards 0, adapters go half the way, and the choice says that nothing was checked.
    prior: default `PRIOR`.

  Raises:
    InputError: no scores of the frozen encoder, other queries of some candidate, or scores that are
      infinite.
  """
  own = _checked(scores, new)
  names = [name for name in scores if name != FROZEN]
  count = len(own[FROZEN])
  if not count or not names:
    return Choice(FROZEN, {}, count, judged)
  gains = np.stack([own[name] - own[FROZEN] for name in names])  # [candidates, queries]
  known = (prior or PRIOR) if judged else _UNJUDGED
  there = ~np.isnan(gains)
  gains, counts = np.where(there, gains, 0.0), there.sum(axis=1)
  # A candidate that never differs is the frozen encoder.
  other = np.any(gains != 0, axis=1)

  def expect(
    means: Float64[np.ndarray, '... candidates'], variances: Float64[np.ndarray, '... candidates']
  ) -> tuple[Float64[np.ndarray, '... candidates'], ...]:
    expected, *errors = posterior(means, variances, counts, known)
    return np.where(other, expected, -np.inf), *errors

  def moments(
    values: Float64[np.ndarray, 'candidates queries'],
  ) -> Float64[np.ndarray, ' candidates']:
    return np.sum(values, axis=1) / np.maximum(counts, 1)

  measured = moments(gains)
  variances = moments(gains**2) - measured**2
  optimism = _optimism(gains, there, measured, expect)
  expected, error, left = expect(measured - optimism, variances)
  deviation = np.sqrt(left)
  loss = scipy.special.ndtr((-LOSS - expected) / deviation)
  estimates = {
    name: Estimate(*map(float, row)) if differs else Estimate(0.0, 0.0, 0.0, 0.0, 0.0)
    for name, differs, *row in zip(
      names, other, measured, np.sqrt(error), expected, deviation, loss, strict=True
    )
  }
  best = measured_as = max(names, key=lambda name: estimates[name].expected)
  if not estimates[best].expected > 0:
    return Choice(FROZEN, estimates, count, judged, optimism)
  if not judged and not best.fused and best != BM25:
    best = best._replace(step=min(best.step, HALF))
    estimates.setdefault(best, estimates[measured_as])
  found = Choice(best, estimates, count, judged, optimism)
  if new is None:
    return found
  fresh = (own[measured_as] - own[FROZEN])[new]
  fresh = fresh[~np.isnan(fresh)]
  return found._replace(new=float(fresh.mean()) if len(fresh) else None, new_queries=len(fresh))


def posterior(
  means: Float64[np.ndarray, '*n'],
  variances: Float64[np.ndarray, '*n'],
  counts: Int[np.ndarray, '*m'],
  prior: Prior,
) -> tuple[Float64[np.ndarray, '*n'], ...]:
  """Expected gains, squared standard errors, and squared deviations of the expected gains.

  Args:
    means, variances: of the gain of single queries.
    counts: the number of queries.
    prior: of gains.
  """
  freedom = counts + _PSEUDO - 1
  error = (counts * variances + _PSEUDO * _DEVIATION**2) / freedom / np.maximum(counts, 1)
  around = error + prior.noise**2
  # A large gain that many queries show tells of a larger spread.
  own = counts / (counts + _MANY)
  wide = (_SURE * prior.spread**2 + own * np.maximum(means**2 - around, 0)) / (_SURE + own)
  weight = wide / (wide + around)
  return weight * means, error, weight * around + prior.noise**2


def _checked(scores, new):
  """The scores in float64. Raises as `choose`."""
  if FROZEN not in scores:
    raise InputError('there are no scores of the frozen encoder to compare with')
  own = {name: np.asarray(values, np.float64) for name, values in scores.items()}
  count = len(own[FROZEN])
  for name, values in own.items():
    if values.shape != (count,):
      raise InputError(
        f'{name} has scores of {counted(len(values), "queries")}, the frozen encoder of {count:,}'
      )
    if np.isinf(values).any() or (name == FROZEN and np.isnan(values).any()):
      raise InputError(f'{name} has scores that are no numbers')
  if new is not None and np.shape(new) != (count,):
    raise InputError(
      f'{counted(len(new), "queries")} are marked for new answers, and {count:,} have scores'
    )
  return own


def _optimism(gains, there, measured, expect) -> float:
  """How much better the best candidate of a sample looks in it than it is over all queries."""
  count = gains.shape[1]
  rng, excess = np.random.default_rng(0), 0.0
  for _ in range(_DRAWS // _DRAWS_AT_ONCE):
    drawn = rng.multinomial(count, np.full(count, 1 / count), _DRAWS_AT_ONCE).astype(np.float64)
    sums = np.maximum(drawn @ there.T, 1)  # [draws, candidates]
    means, squares = drawn @ gains.T / sums, drawn @ (gains**2).T / sums
    expected = expect(means, squares - means**2)[0]
    best = expected.argmax(axis=1)
    rows = np.arange(len(best))
    taken = expected[rows, best] > 0  # else the frozen encoder, which has no excess
    excess += np.sum(np.where(taken, means[rows, best] - measured[best], 0.0))
  return max(float(excess) / _DRAWS, 0.0)
