"""The record of how texts become vectors, and the places where it is stored.

    config                     of_config
    meta of a prompt           of_meta, to_meta
    a sentence-transformers    models.sentence: read_folder, write_folder
      folder
    a folder of embeddings     of_side, in retrieval.manifest.Meta

`models.embed` applies the record.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

SIDES = ('query', 'passage')


@dataclasses.dataclass(frozen=True)
class VectorSpec:
  """How texts become vectors, compared by inner product.

  Attributes:
    pooling: a name in `models.pooling`.
    normalize: whether vectors have unit length, so that the inner product is the cosine.
    query_max_length, passage_max_length: tokens of a text, special ones included.
    query_prefix, passage_prefix: put before a text.
    dimension: how many leading numbers of a vector are kept, rescaled if `normalize`;
      None: all.
  """

  pooling: str = 'cls'
  normalize: bool = False
  query_max_length: int = 512
  passage_max_length: int = 512
  query_prefix: str = ''
  passage_prefix: str = ''
  dimension: int | None = None

  def max_length(self, side: str) -> int:
    return self.query_max_length if side == 'query' else self.passage_max_length

  def prefix(self, side: str) -> str:
    return self.query_prefix if side == 'query' else self.passage_prefix

  @property
  def longest(self) -> int:
    return max(self.query_max_length, self.passage_max_length)

  @property
  def similarity(self) -> str:
    """The name of the similarity in sentence-transformers."""
    return 'cosine' if self.normalize else 'dot'

  def replace(self, **changes: Any) -> Self:
    """The record with the changes that are not None."""
    return dataclasses.replace(
      self, **{name: value for name, value in changes.items() if value is not None}
    )

  def only(self, side: str) -> Self:
    """The record for an encoder of one side: its maximum length applies to both sides."""
    length = self.max_length(side)
    return dataclasses.replace(self, query_max_length=length, passage_max_length=length)

  def at_most(self, tokens: int) -> Self:
    """The record with maximum lengths of at most ``tokens``."""
    return dataclasses.replace(
      self,
      query_max_length=min(self.query_max_length, tokens),
      passage_max_length=min(self.passage_max_length, tokens),
    )

  def longer(self, tokens: int) -> Self:
    """The record with maximum lengths longer by ``tokens``."""
    return dataclasses.replace(
      self,
      query_max_length=self.query_max_length + tokens,
      passage_max_length=self.passage_max_length + tokens,
    )

  def of_side(self, side: str) -> dict[str, Any]:
    """The settings of one side, under the keys of a manifest."""
    return {
      'pooling': self.pooling,
      'normalize': self.normalize,
      'prefix': self.prefix(side),
      'max_length': self.max_length(side),
    }

  def to_meta(self) -> dict[str, Any]:
    """The keys in the meta of a prompt; several dimensions have another key there."""
    values = dataclasses.asdict(self)
    del values['dimension']
    return values


def same_length(
  length: int = 512,
  pooling: str = 'cls',
  normalize: bool = False,
  query_prefix: str = '',
  passage_prefix: str = '',
) -> VectorSpec:
  """A record with the same maximum length for queries and passages."""
  return VectorSpec(pooling, normalize, length, length, query_prefix, passage_prefix)


def of_meta(meta: Mapping[str, Any], base: VectorSpec = VectorSpec()) -> VectorSpec:
  """The record in the meta of a prompt, with missing keys from ``base``."""
  names = (field.name for field in dataclasses.fields(VectorSpec))
  return dataclasses.replace(base, **{name: meta[name] for name in names if name in meta})


def of_config(config: Any, data: Mapping[str, Any] | None = None) -> VectorSpec:
  """The record of a training, from ``config`` and ``data`` (by default ``config.data``)."""
  data = config.data if data is None else data
  return VectorSpec(
    config.pooling,
    bool(config.normalize),
    *(data[f'{side}_max_length'] for side in SIDES),
    *(data[f'{side}_prefix'] for side in SIDES),
  )
