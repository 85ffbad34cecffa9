"""Makes a test split for data without one.

By query, a hash of the query id decides. By document, a hash of the answering documents decides:
queries that share a document stay together, so no document answers queries of both splits. The
document of a passage ``PATH#n`` is ``PATH``; any other passage is a document by itself.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dprjax.base import files, hashes
from dprjax.base.errors import InputError
from dprjax.text.qrels import write_dataset
from dprjax.text.sources import Dataset

BY = ('auto', 'document', 'query')

_NEAR = 2  # auto splits by document up to this factor from the fraction


class Split(NamedTuple):
  """Ids of queries by split, and the rule applied, 'document' or 'query'."""

  train: list[str]
  test: list[str]
  by: str


def choose(dataset: Dataset, fraction: float, seed: int = 0, by: str = 'auto') -> Split:
  """Divides the queries of a data set.

  Args:
    by: 'query', 'document', or 'auto': by document, unless the test split would be smaller than
      half the fraction or larger than twice it.
  """
  if by == 'auto':
    split = _divide(dataset, fraction, seed, 'document')
    part = len(split.test) / len(dataset.queries)
    near = fraction / _NEAR <= part <= min(fraction * _NEAR, 0.9)
    return split if near else choose(dataset, fraction, seed, 'query')
  split = _divide(dataset, fraction, seed, by)
  if not split.train or not split.test:
    raise InputError(
      f'{dataset.source.path}: by {by}, {len(split.test):,} of {len(dataset.queries):,} queries '
      'are for the test; take another --fraction, or --by=query'
    )
  return split


def write(dataset: Dataset, split: Split, folder: files.PathLike) -> tuple[int, int]:
  """Writes a BEIR folder with both splits; returns the numbers of passages and queries."""
  with files.atomic_path(folder) as out:
    return write_dataset(
      out,
      ({'_id': passage.id, 'text': passage.text} for passage in dataset.passages),
      ({'_id': query.id, 'text': query.text} for query in dataset.queries),
      {
        name: {id_: dataset.qrels[id_] for id_ in ids}
        for name, ids in (('train', split.train), ('test', split.test))
      },
    )


def document_of(passage_id: str) -> str:
  path, mark, number = passage_id.rpartition('#')
  return path if mark and number.isdecimal() else passage_id


def _divide(dataset: Dataset, fraction: float, seed: int, by: str) -> Split:
  names = {query.id: query.id for query in dataset.queries}
  if by == 'document':
    names = _groups({id_: dataset.positives(id_) for id_ in names})
  test = {id_ for id_, name in names.items() if hashes.fraction(name, seed, 'test') < fraction}
  ids = list(names)
  return Split([id_ for id_ in ids if id_ not in test], [id_ for id_ in ids if id_ in test], by)


def _groups(positives: Mapping[str, list[str]]) -> dict[str, str]:
  """For each query, the smallest document id of its group, joined by shared documents."""
  above: dict[str, str] = {}

  def root(name: str) -> str:
    while (next_ := above.setdefault(name, name)) != name:
      above[name] = above[next_]
      name = above[name]
    return name

  for passages in positives.values():
    roots = {root(document_of(passage)) for passage in passages}
    least = min(roots)
    above.update(dict.fromkeys(roots, least))
  return {query: root(document_of(passages[0])) for query, passages in positives.items()}
