"""Labelled pairs as the data of a task."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from etils import epath
from jaxtyping import Float, Int32
from ml_collections import ConfigDict

from dprjax.base.files import PathLike
from dprjax.papers.nir_prompt import pairs
from dprjax.retrieval import measures
from dprjax.retrieval.reranker import Reranker
from dprjax.text import trec
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import retrieval_data
from dprjax.training.method import Evaluate, Scores
from dprjax.training.pair_data import Scorer


@dataclasses.dataclass(frozen=True)
class LabelledPairs:
  """Labelled pairs of a run; attributes as in `retrieval_data.Retrieval`."""

  section: ConfigDict
  workdir: epath.Path
  train: pairs.PairSource
  dev: pairs.PairSource | None
  task: str

  def read_passages(self) -> Iterator[str]:
    """All texts, for a vocabulary."""
    return (text for pair in pairs.read_pairs(self.train) for text in pair[:2])

  def files(self) -> dict[str, epath.Path]:
    """The files of both splits, by role."""
    found = {'pairs': pairs.locate(self.train)}
    if self.dev is not None and (dev := pairs.locate(self.dev)) != found['pairs']:
      found['dev pairs'] = dev
    return found

  def open_cache(self, name: str, source: pairs.PairSource, tokenizer: Tokenizer) -> pairs.Pairs:
    """The token cache of a split, built on first use."""
    folder = retrieval_data.cache_folder(self.section, self.workdir, self.task) / name
    return pairs.build_pairs(
      source, tokenizer, folder, **retrieval_data.cache_options(self.section)
    )

  def evaluation(
    self, scorer: Scorer, tokenizer: Tokenizer, measure: str, number: int | None = None
  ) -> Evaluate:
    """Evaluates classification of the dev pairs; ``number`` is the task."""
    assert self.dev is not None
    tokens = self.open_cache('dev', self.dev, tokenizer)
    rows = tokens.tokens(np.arange(tokens.num_pairs))
    packed = scorer.pack(*([np.frombuffer(row, np.int32) for row in view] for view in rows))
    return lambda params: classify(scorer(params, packed, number), tokens.labels, measure)


def find_pairs(section: ConfigDict, workdir: epath.Path, seed: int, task: str) -> LabelledPairs:
  """The labelled pairs of a task."""
  folder = section.dir
  if section.format == 'docstrings':
    folder = str(workdir / 'data' / task)
    if not epath.Path(folder).exists():
      pairs.write_docstrings(folder, section.dir.split(','))
  hold_out = (section.hold_out, seed) if section.hold_out and not section.dev_split else None
  most = 2 * section.max_queries or None  # of each label
  train = pairs.PairSource(folder, section.train_split, hold_out=hold_out, max_pairs=most)
  if most:
    most = max(len(pairs.read_pairs(train)), 2)
  dev = None
  if section.dev_split:
    dev = pairs.PairSource(folder, section.dev_split, max_pairs=most)
  elif hold_out:
    dev = dataclasses.replace(train, held_out=True, max_pairs=most)
  return LabelledPairs(section, workdir, train, dev, task)


def classify(
  scores: Float[np.ndarray, ' n'], labels: Int32[np.ndarray, ' n'], measure: str
) -> Scores:
  """``accuracy``, ``F1`` and ``AP`` of matching pairs, and the share of ``yes``.

  A positive score says yes; AP is of their order. ``values`` are for ``measure``, accuracy or F1.
  """
  said, true = scores > 0, labels == 1
  ranked = {f'{i:09}': score for i, score in enumerate(scores.tolist())}
  judged = {f'{i:09}': int(label) for i, label in enumerate(labels)}
  right = int(np.count_nonzero(said & true))
  either = int(np.count_nonzero(said)) + int(np.count_nonzero(true))
  means = {
    'accuracy': float(np.mean(said == true)),
    'F1': 2 * right / either if either else 0.0,
    'AP': measures.measure(trec.run_from_dict({'': ranked}), {'': judged}, ['AP'])['mean']['AP'],
    'yes': float(np.mean(said)),
  }
  values = (said == true).astype(np.float64)
  if measure == 'F1':  # 2 a / b of two means, linear in both
    each = 2.0 * (said & true) - means['F1'] * (said.astype(np.float64) + true)
    values = means['F1'] + each * (len(scores) / max(either, 1))
  return Scores(means, {'': values})


def one_answer(labels: Int32[np.ndarray, ' n'], measure: str) -> Scores:
  """The scores of yes or no to all pairs, the better by ``measure``."""
  both = [classify(np.full(len(labels), answer), labels, measure) for answer in (1.0, -1.0)]
  return max(both, key=lambda found: found.means[measure])


def measure_pairs(reranker: Reranker, folder: PathLike, split: str = 'test') -> dict[str, float]:
  """``accuracy``, ``F1``, ``AP`` and the share of ``yes`` of a reranker on labelled pairs.

  ``one answer`` is the accuracy of the more frequent label.
  """
  rows = pairs.read_pairs(pairs.PairSource(str(folder), split))
  labels = np.array([row.label for row in rows], np.int32)
  found = classify(reranker.score([row[:2] for row in rows]), labels, 'accuracy')
  return {**found.means, 'one answer': one_answer(labels, 'accuracy').means['accuracy']}
