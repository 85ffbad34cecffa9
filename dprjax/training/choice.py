"""Chooses a ranking by the held-out queries of a training, with ``config.eval.choose``.

Candidates are the frozen encoder, every trained adapter, BM25, and the fusion of each encoder with
BM25 (`dprjax.retrieval.choosing`). All scores are cross-fitted: held-out queries are split, and
each part is scored with the number of updates and the fusion weights that are best on the other
parts. The workdir keeps the choice in `choice.json`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ml_collections
import msgspec
import numpy as np
from etils import epath
from jaxtyping import Float, Int

from dprjax.base import files, reading
from dprjax.retrieval import best, bm25_index, choosing, exact, fusion
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate
from dprjax.text.qrels import Qrels
from dprjax.training import baseline
from dprjax.training import workdir as workdirs
from dprjax.training.method import Scores

_PARTS = 5  # of held-out queries, without folds


class Decision(NamedTuple):
  """The choice of a run, and the weight of BM25 in each fusion."""

  choice: choosing.Choice
  weights: Mapping[Candidate, float]

  @property
  def fusion(self) -> fusion.Fusion | None:
    """The fusion with BM25 that was chosen, or None."""
    chosen = self.choice.candidate
    if chosen != BM25 and not chosen.fused:
      return None
    weight = round(self.weights.get(chosen, 1.0), 6)
    return fusion_of(weight, bm25=bm25_index.SETTINGS)

  def best_of(self, model: str) -> tuple[Candidate, choosing.Estimate]:
    estimates = {name: one for name, one in self.choice.estimates.items() if name.model == model}
    best = max(estimates, key=lambda name: estimates[name].expected)
    return best, estimates[best]

  def best_model(self, models: Sequence[str]) -> str:
    return max(models, key=lambda model: self.best_of(model)[1].expected)


def decide(trainings: Mapping[str, Sequence[epath.Path]]) -> Decision:
  """Chooses by the stored evaluations of trainings.

  ``trainings`` has `workdir.scored` by model. All must have held out the same queries.
  """
  scores: dict[Candidate, np.ndarray] = {}
  weights: dict[Candidate, float] = {}
  new = None
  for model, folders in trainings.items():
    before = _joined(folders)
    if FROZEN not in scores:
      scores[FROZEN] = before.values['']
      new = before.new.get('')
      _fuse(FROZEN, before.fused[''], scores, weights)
      alone = np.argmax(fusion.candidates(2)[:, 0])  # BM25 without vectors
      scores[BM25] = before.fused[''][:, alone]
    values, fused = _cross_fitted(folders)
    scores[Candidate(model)] = values
    _fuse(Candidate(model), fused, scores, weights)
  return Decision(choosing.choose(scores, new), weights)


def _joined(folders: Sequence[epath.Path], step: int = 0) -> Scores:
  """Joins evaluations of trainings that held out one part each."""
  return baseline.join([baseline.read(folder, step) for folder in folders])


def _fuse(
  model: Candidate,
  fused: Float[np.ndarray, 'queries weights'],
  scores: dict[Candidate, np.ndarray],
  weights: dict[Candidate, float],
) -> None:
  if len(fused) < 2:  # too few to learn from
    return
  learnt = fusion.learn(fusion.candidates(2), fused)
  weight = float(learnt.weights[0])
  if 0 < weight < 1:  # otherwise not a fusion
    hybrid = model._replace(fused=True)
    scores[hybrid], weights[hybrid] = learnt.held_out, weight


def _cross_fitted(
  folders: Sequence[epath.Path],
) -> tuple[Float[np.ndarray, ' queries'], Float[np.ndarray, 'queries weights']]:
  """Scores of held-out queries, each after the number of updates best on the other parts."""
  common = set.intersection(*(set(baseline.measured(folder)) for folder in folders)) - {0}
  sizes = [len(baseline.read(folder).values['']) for folder in folders]
  by_step = {step: _joined(folders, step) for step in sorted(common)}
  if len(folders) > 1:
    parts = np.repeat(np.arange(len(folders)), sizes)
  else:
    parts = np.random.default_rng(0).permutation(np.arange(sizes[0]) % _PARTS)
  values = np.stack([one.values[''] for one in by_step.values()])  # [steps, queries]
  fused = np.stack([one.fused[''] for one in by_step.values()])
  rows, chosen = np.arange(len(parts)), best_elsewhere(values, parts)
  return values[chosen, rows], fused[chosen, rows]


def best_elsewhere(
  values: Float[np.ndarray, 'steps queries'], parts: Int[np.ndarray, ' queries']
) -> Int[np.ndarray, ' queries']:
  """For each query, the index of the step that is best on the queries of other parts."""
  steps = np.zeros(len(parts), np.int64)
  for part in np.unique(parts):
    others = values[:, parts != part]
    if others.shape[1] == 0:  # only one query or part
      others = values
    steps[parts == part] = np.argmax(others.sum(axis=1))
  return steps


def fuser(
  texts: Mapping[str, list[str]],
  query_ids: Sequence[str],
  passage_ids: Sequence[str],
  qrels: Qrels,
) -> Callable[[Mapping[str, np.ndarray], Sequence[str]], Float[np.ndarray, 'queries weights']]:
  """``(vectors by side, ids of queries) -> Scores.fused``, with the words of ``texts`` by side."""
  words = bm25_index.build(passage_ids, texts['passage']).rankings(texts['query'], fusion.DEPTH)
  lexical = dict(zip(query_ids, words, strict=True))
  weights, how = fusion.candidates(2), fusion_of(0.5)

  def fuse(
    vectors: Mapping[str, np.ndarray], wanted: Sequence[str]
  ) -> Float[np.ndarray, 'queries weights']:
    depth = min(fusion.DEPTH, len(passage_ids))
    top = exact.search(vectors['query'], vectors['passage'], depth, ids_at=best.ids_of(passage_ids))
    dense = dict(zip(query_ids, best.rankings(top, passage_ids), strict=True))
    return np.stack(
      [
        fusion.ndcg(
          *how.table({fusion.BM25: lexical[id_], fusion.DENSE: dense[id_]}), qrels[id_], weights
        )
        for id_ in wanted
      ]
    )

  return fuse


def fusion_of(weight: float, **more: Any) -> fusion.Fusion:
  return fusion.Fusion(
    weights={fusion.BM25: weight, fusion.DENSE: 1 - weight}, method='zscore', **more
  )


def trained_model(workdir: epath.Path, config: ml_collections.ConfigDict) -> str:
  return workdir.name if workdirs.top(workdir) != workdir else workdirs.model_name(config)


# Files of a choice.


class _Candidate(msgspec.Struct):
  model: str
  step: float
  fused: bool
  measured: float
  error: float
  expected: float
  deviation: float
  loss: float
  bm25_weight: float | None = None


class _Written(msgspec.Struct):
  format: Literal['dprjax.choice']
  chosen: tuple[str, float, bool]
  candidates: list[_Candidate]
  queries: int
  optimism: float
  new: float | None = None
  new_queries: int | None = None


def write(workdir: epath.Path, decision: Decision) -> None:
  files.write_json(workdir / workdirs.CHOSEN, decision.choice.record(decision.weights))


def read(workdir: epath.Path) -> Decision | None:
  path = workdir / workdirs.CHOSEN
  if not path.exists():
    return None
  stored = reading.read(path, 'choice', _Written)
  estimates, weights = {}, {}
  for one in stored.candidates:
    name = Candidate(one.model, one.step, one.fused)
    fields = choosing.Estimate._fields
    estimates[name] = choosing.Estimate(*(getattr(one, field) for field in fields))
    if one.bm25_weight is not None:
      weights[name] = one.bm25_weight
  chosen = Candidate(*stored.chosen)
  choice = choosing.Choice(
    chosen,
    estimates,
    stored.queries,
    optimism=stored.optimism,
    new=stored.new,
    new_queries=stored.new_queries,
  )
  return Decision(choice, weights)
