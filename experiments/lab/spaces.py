"""Alignment and uniformity of the vectors of backbones, on a retrieval data set."""

import dataclasses
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.retrieval.retriever import Retriever
from dprjax.text import sources
from dprjax.text.texts import Passage, Query
from lab.statistics import alignment, uniformity, unit

logger = logging.getLogger('dprjax')

_SEED = 0


class Sample(NamedTuple):
  """Texts of a data set.

  Attributes:
    name: of the data set and split.
    positives: (query, relevant passage), for alignment.
    passages, queries: for uniformity.
    relevant: texts of passages relevant to drawn queries, by id.
  """

  name: str
  positives: list[tuple[str, str]]
  passages: list[Passage]
  queries: list[Query]
  relevant: dict[str, str]


class InspectedVectors(NamedTuple):
  """Vectors of `Sample`; ``asking`` and ``answering`` are the sides of the positives."""

  asking: Float[np.ndarray, 'positives H']
  answering: Float[np.ndarray, 'positives H']
  passages: Float[np.ndarray, 'passages H']
  queries: Float[np.ndarray, 'queries H']


@dataclasses.dataclass(frozen=True)
class Findings:
  """The measures of one backbone.

  Attributes:
    settings: of its vectors, in words.
    alignment: of queries and relevant passages, scaled to unit length.
    uniformity, query_uniformity: of passages and queries, scaled to unit length; None for a single
      query.
    raw_alignment, raw_uniformity: of unscaled vectors (DPTDR Table 8); None if the backbone
      normalises.
  """

  settings: str
  alignment: float | None = None
  uniformity: float | None = None
  query_uniformity: float | None = None
  raw_alignment: float | None = None
  raw_uniformity: float | None = None

  def columns(self) -> dict[str, float | None]:
    """The measures by column title."""
    return {
      'alignment': self.alignment,
      'uniformity': self.uniformity,
      'uniformity of queries': self.query_uniformity,
      'raw alignment': self.raw_alignment,
      'raw uniformity': self.raw_uniformity,
    }


def draw(dataset: sources.Dataset, name: str, most: int) -> Sample:
  """Draws the same texts each time.

  Args:
    dataset: with judgements.
    most: of positives, passages and queries each; at least 2.

  Raises:
    InputError: no positive, or fewer than two passages.
  """
  if most < 2:
    raise InputError(f'max_texts: {most} is too few; uniformity needs 2')
  rng = random.Random(_SEED)
  pairs = [
    (query.text, passage) for query in dataset.queries for passage in dataset.positives(query.id)
  ]
  pairs = rng.sample(pairs, min(most, len(pairs)))
  # A separate generator keeps the other draws independent.
  queries = random.Random(_SEED).sample(dataset.queries, min(most, len(dataset.queries)))
  wanted = {passage for _, passage in pairs}
  wanted.update(query.id for query in queries)
  wanted.update(next(iter(dataset.positives(query.id))) for query in queries)
  relevant: dict[str, str] = {}
  kept: list[Passage] = []
  seen = 0
  progress = Progress('passages', task=f'reading {name}')
  for passage in dataset.passages:
    progress.advance()
    if not passage.text:
      continue
    if passage.id in wanted:
      relevant[passage.id] = passage.text
    # Reservoir sampling (Vitter 1985, algorithm R).
    seen += 1
    if len(kept) < most:
      kept.append(passage)
    elif (place := rng.randrange(seen)) < most:
      kept[place] = passage
  positives = [(query, relevant[id_]) for query, id_ in pairs if id_ in relevant]
  if len(positives) < len(pairs):
    logger.info(
      '%s: left out %s of %s positives, without text or not in the corpus',
      name,
      f'{len(pairs) - len(positives):,}',
      f'{len(pairs):,}',
    )
  if not positives or len(kept) < 2:
    raise InputError(
      f'{name}: {len(positives)} positives and {len(kept)} passages have text; 1 and 2 are needed'
    )
  return Sample(name, positives, kept, queries, relevant)


def encode(name: str, retriever: Retriever, drawn: Sample) -> InspectedVectors:
  """Encodes the texts; progress lines say ``name``."""
  queries, passages = zip(*drawn.positives, strict=True)
  return InspectedVectors(
    vectors(name, retriever, queries, 'query', 'queries'),
    vectors(name, retriever, passages, 'passage', 'relevant passages'),
    vectors(name, retriever, [one.text for one in drawn.passages], 'passage', 'passages'),
    vectors(name, retriever, [one.text for one in drawn.queries], 'query', 'queries'),
  )


def vectors(
  name: str, retriever: Retriever, texts: Sequence[str], side: str, what: str
) -> Float[np.ndarray, 'n H']:
  """Vectors of texts. Raises InputError if one is not finite."""
  found = retriever.encode(texts, side, Progress('texts', len(texts), f'{name}: {what}'))
  if not np.isfinite(found).all():
    raise InputError(f'{name}: vectors are not finite; its training must have diverged')
  return found


def measure(retriever: Retriever, found: InspectedVectors) -> Findings:
  raw = not retriever.encoder.entry().spec.normalize
  return Findings(
    settings=describe(retriever),
    alignment=alignment(unit(found.asking), unit(found.answering)),
    uniformity=uniformity(unit(found.passages)),
    query_uniformity=uniformity(unit(found.queries)) if len(found.queries) > 1 else None,
    raw_alignment=alignment(found.asking, found.answering) if raw else None,
    raw_uniformity=uniformity(found.passages) if raw else None,
  )


def describe(retriever: Retriever) -> str:
  """The vector settings of a backbone, in words."""
  spec = retriever.encoder.entry().spec
  lengths = dict.fromkeys((spec.query_max_length, spec.passage_max_length))
  return f'{spec.pooling} pooling, at most {" and ".join(map(str, lengths))} tokens'


def inspect(name: str, retriever: Retriever, drawn: Sample) -> Findings:
  """Measures one backbone. Raises InputError if vectors are not finite."""
  began = time.monotonic()
  found = measure(retriever, encode(name, retriever, drawn))
  logger.info('%s: inspected in %s', name, duration(time.monotonic() - began))
  return found


def table(findings: Mapping[str, Findings]) -> tuple[list[str], list[list[str]]]:
  """Columns and a row for each backbone; only columns with values."""
  values = {name: found.columns() for name, found in findings.items()}
  titles = dict.fromkeys(
    title for row in values.values() for title, value in row.items() if value is not None
  )
  rows = [[name, *(_shown(row.get(title)) for title in titles)] for name, row in values.items()]
  return ['backbone', *titles], rows


def _shown(value: float | None) -> str:
  return '' if value is None else 'undefined' if np.isnan(value) else f'{value:.4f}'


def note(drawn: Sample, findings: Mapping[str, Findings]) -> list[str]:
  """Lines on the columns, the number of texts, and vector settings."""
  pairs = f'{len(drawn.positives):,} pairs of a query and a relevant passage of {drawn.name}'
  return [
    f'Alignment (alpha = 2): {pairs}; lower is nearer. For unit vectors, and raw.',
    f'Uniformity (t = 2): {len(drawn.passages):,} passages of {drawn.name}; lower is more even. '
    'For unit vectors, and raw.',
    f'Uniformity of queries: {len(drawn.queries):,} queries of {drawn.name}.',
    '; '.join(f'{name}: {found.settings}' for name, found in findings.items()) + '.',
  ]
