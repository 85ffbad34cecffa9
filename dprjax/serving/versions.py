"""A prompt of a server: its content, and the description that stays when its vectors go."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dprjax.serving.bank import AdapterChoice
from dprjax.text.vector_spec import SIDES, VectorSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
  """One content of the file of a prompt, or the bare backbone.

  Attributes:
    name: of the prompt.
    sha256: of the file; '' for the bare backbone.
    spec: settings of vectors.
    meta: of the file.
    lengths: by side, the size of the adapter, such as P.
    choices: by side, one or one for each topic.
    topic_model: chooses among several.
  """

  name: str
  sha256: str
  spec: VectorSpec
  meta: dict[str, Any]
  lengths: dict[str, int]
  choices: dict[str, list[AdapterChoice]]
  topic_model: Any = None

  @property
  def two_sided(self) -> bool:
    """Whether queries and passages have different prompts or prefixes; lengths do not count."""
    query, passage = ([one.key for one in self.choices[side]] for side in SIDES)
    return query != passage or self.spec.prefix('query') != self.spec.prefix('passage')

  @property
  def shift_positions(self) -> bool:
    """Whether tokens count their positions from the prompt length."""
    return bool(self.meta.get('shift_positions'))

  @property
  def nbytes(self) -> int:
    adapters = {id(one): one.adapter for own in self.choices.values() for one in own}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(adapters) if isinstance(leaf, np.ndarray))

  def choose(self, texts: Sequence[str], side: str) -> list[AdapterChoice]:
    """The adapter of each text."""
    own = self.choices[side]
    if self.topic_model is None:
      return own * len(texts)
    return [own[number] for number in self.topic_model.assign(texts).tolist()]


@dataclasses.dataclass(frozen=True)
class About:
  """The description of a prompt, kept when its vectors are not.

  Attributes:
    sha256, meta, lengths, spec, two_sided: as of `Version`; empty if ``refused``.
    nbytes: of its vectors.
    modified: the file time, in seconds.
    refused: why the file cannot be served, or ''.
  """

  sha256: str = ''
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)
  lengths: dict[str, int] = dataclasses.field(default_factory=dict)
  spec: VectorSpec = dataclasses.field(default_factory=VectorSpec)
  two_sided: bool = False
  nbytes: int = 0
  modified: float = 0
  refused: str = ''
