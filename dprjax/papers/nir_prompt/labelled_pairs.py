"""Labelled pairs as the data of a task."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from etils import epath
from jaxtyping import Float, Int32
from ml_collections import ConfigDict

from dprjax.base.errors import InputError
from dprjax.papers.nir_prompt import pairs
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
  key = f'config.tasks.{task}.data'
  folder = section.dir
  if section.format == 'docstrings':
    folder = str(workdir / 'data' / task)
    if not epath.Path(folder).exists():
      pairs.write_docstrings(folder, section.dir.split(','))
  elif section.format != 'auto' or section.mined_negatives:
    raise InputError(
      f'{key}.format, {key}.mined_negatives: labelled pairs are files SPLIT.jsonl, .tsv or .csv '
      'without mined negatives; leave both out'
    )
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
  """``accuracy`` and ``F1`` of matching pairs, predicted by a positive score.

  ``values`` are for ``measure``, one of the two.
  """
  said, true = scores > 0, labels == 1
  right = int(np.count_nonzero(said & true))
  either = int(np.count_nonzero(said)) + int(np.count_nonzero(true))
  means = {'accuracy': float(np.mean(said == true)), 'F1': 2 * right / either if either else 0.0}
  values = (said == true).astype(np.float64)
  if measure == 'F1':  # 2 a / b of two means, linear in both
    each = 2.0 * (said & true) - means['F1'] * (said.astype(np.float64) + true)
    values = means['F1'] + each * (len(scores) / max(either, 1))
  return Scores(means, {'': values})
