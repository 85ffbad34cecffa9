"""Models that read a query and a passage together and score the pair.

``CrossEncoder`` is a sequence classifier. ``load`` also loads the reranker of a prompt, such as
Reranker-Prompt of NIR-Prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float

from dprjax.base import given
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.encoding import codes
from dprjax.encoding.embedder import (
  Embedder,
  ProgressFn,
  check_size,
  count_from,
  local_mesh,
  local_parts,
  place,
  place_backbone,
)
from dprjax.models import (
  artifact,
  encoder_config,
  head_specs,
  heads,
  hub,
  sentence,
)
from dprjax.models.encoder_config import EncoderOptions
from dprjax.models.template import Packed, Template, fill, unpack
from dprjax.text import tokenizing

# The cost of a pair grows faster than its length.
DEFAULT_LENGTH = 512
# Pairs tokenised and sorted by length at a time.
_BLOCK = 1 << 15


class Reranker:
  """Scores pairs on all local devices.

  Attributes:
    max_length: of a pair, in tokens.
    truncated: the number of pairs that lost tokens.
  """

  head: ClassVar[str]

  def __init__(
    self,
    backbone: hub.Backbone,
    tokenizer: tokenizing.Tokenizer,
    template: Template,
    max_length: int,
    score_rows: Callable[[Any, jax.Array, jax.Array, EncoderOptions], jax.Array],
    head_params: tuple[Any, ...],
    *,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
  ):
    """For subclasses: ``score_rows(params, rows, lengths, options) -> [B]`` scores ``Packed.rows``.

    Its ``params`` are those of the backbone and ``head_params``.
    """
    config = backbone.config
    check_size('max_length', max_length, config.max_tokens, backbone.path)
    arithmetic = encoder_config.arithmetic(dtype)
    if mesh is None:
      mesh = local_mesh(local_parts(arithmetic, backbone.params))
    options = EncoderOptions.of(arithmetic, mesh)

    def embed(params: Any, rows: jax.Array, _: jax.Array, lengths: jax.Array) -> jax.Array:
      return score_rows(params, rows, lengths, options)[:, None]

    self.backbone, self.tokenizer, self.max_length = backbone, tokenizer, max_length
    self.dtype, self.truncated = arithmetic.name, 0
    placed = place_backbone(mesh, config, backbone.params, arithmetic)
    self._params, self._template = (placed, *place(mesh, head_params)), template
    self._embedder = Embedder(embed, mesh, batch_size, max_length, tokenizer.pad_id)

  @property
  def sha256(self) -> str:
    """Identifies the encoder, the head and the tokenizer."""
    head = self.backbone.heads[self.head]
    digest = head_specs.sha256(self.head, self.backbone.config, head)
    return '+'.join((self.backbone.sha256, digest, self.tokenizer.sha256))

  @property
  def settings(self) -> dict[str, Any]:
    """Everything that decides a score, as JSON."""
    return {'reranker_sha256': self.sha256, 'max_length': self.max_length, 'dtype': self.dtype}

  @property
  def files(self) -> list[str]:
    return [self.backbone.path]

  def score(
    self, pairs: Iterable[tuple[str, str]], progress: ProgressFn | None = None
  ) -> Float[np.ndarray, ' n']:
    """Scores (query, passage) pairs: float32, in order.

    Args:
      pairs: any number; a passage is its title, a space and its text.
      progress: called with the number of pairs done.

    Raises:
      InputError: a value that is not a pair of texts.
    """
    pairs = _check_pairs(pairs)
    scores = np.zeros(len(pairs), np.float32)
    for start in range(0, len(pairs), _BLOCK):
      block = pairs[start : start + _BLOCK]
      packed = self.pack(block)
      self.truncated += packed.cut
      scores[start : start + len(block)] = self._embedder(
        self._params, packed.rows, count_from(start, progress), (packed.lengths,)
      )[:, 0]
    codes.check_finite(scores, lambda row: f'the score of {pairs[row]!s:.200}')
    return scores

  def pack(self, pairs: Sequence[tuple[str, str]]) -> Packed:
    """The tokens of (query, passage) pairs, cut to ``max_length``."""
    tokens = self.tokenizer.encode_bare(text for pair in pairs for text in pair)
    texts = [[tokens[pair[i]] for pair in pairs] for i in range(2)]
    return self._template.pack(texts, self.max_length, self.tokenizer.pad_id)


class CrossEncoder(Reranker):
  """A sequence classifier of 1 or 2 labels with its tokenizer, on all local devices.

  The score is the logit, or logit 1 (relevant) minus logit 0. Its sigmoid is the probability of
  relevance.

      reranker = CrossEncoder.load('cross-encoder')
      reranker.score([('how do planes fly', 'The lift of a swept wing ...')])   # float32 [1]
  """

  head = 'classifier'

  def __init__(
    self,
    backbone: hub.Backbone,
    tokenizer: tokenizing.Tokenizer,
    max_length: int,
    **options: Any,
  ):
    """See ``load``; ``options`` are mesh, batch_size and dtype."""
    head = _check_head(backbone.heads.get('classifier'), backbone.path).params
    model = backbone.config
    self.labels = head['output']['bias'].shape[0]
    template = Template.pair(*tokenizer.pair_format)

    def score_rows(
      params: Any, rows: jax.Array, lengths: jax.Array, options: EncoderOptions
    ) -> jax.Array:
      encoder, head = params
      pair = fill([template], unpack(rows, lengths), rows.shape[1], tokenizer.pad_id)
      return heads.score_pairs(model, encoder, head, *pair[:3], options=options)

    super().__init__(backbone, tokenizer, template, max_length, score_rows, (head,), **options)

  @classmethod
  def load(
    cls,
    path: PathLike,
    *,
    max_length: int | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
  ) -> Self:
    """Loads a sequence classifier of 1 or 2 labels.

    Args:
      path: a Hugging Face directory, a hub id, or ``package:NAME``.
      max_length: tokens of a pair; default: that of the tokenizer, at most 512. The passage is cut
        first, see ``Template.cut``.
      mesh, batch_size, dtype: as for ``Encoder.load``.

    Raises:
      InputError: a file cannot be read, the head is missing or has more labels, or the tokenizer
        belongs to another model.
    """
    backbone, tokenizer = load_model(path, cls.head)
    if max_length is None:
      max_length = min(
        sentence.max_length(epath.Path(backbone.path)), backbone.config.max_tokens, DEFAULT_LENGTH
      )
    return cls(backbone, tokenizer, max_length, mesh=mesh, batch_size=batch_size, dtype=dtype)


def load_model(path: PathLike, head: str) -> tuple[hub.Backbone, tokenizing.Tokenizer]:
  backbone = hub.load_backbone(path, (head,), on_disk=True)
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
  return backbone, tokenizer


def _check_pairs(pairs: Any) -> list[tuple[str, str]]:
  checked = []
  array = getattr(pairs, 'ndim', 1) == 2
  for number, pair in enumerate(pairs if array else given.values(pairs, 'pairs')):
    texts = given.values(pair, f'pairs: number {number}')
    query, passage = (given.check_text(text, number, 'pairs') for text in texts)
    checked.append((query, passage))
  return checked


def load(path: PathLike, prompt: PathLike | None = None, **options: Any) -> Reranker:
  """The reranker of the kind of a prompt; without one, ``CrossEncoder.load``."""
  if prompt is None:
    return CrossEncoder.load(path, **options)
  kind = artifact.load_prompt(prompt).kind
  if kind.reranker is None:
    raise InputError(f'{prompt}: a reranker takes no prompt of kind {kind.name!r}')
  return kind.reranker(path, prompt, **options)


def check(path: PathLike) -> None:
  """A quick check before ``CrossEncoder.load(path)``, without reading encoder weights."""
  _check_head(hub.load_head(path, 'classifier'), path)


def _check_head(head: head_specs.Head | None, path: PathLike) -> head_specs.Head:
  """The head, which is more than the BERT pooler."""
  if head is None or 'output' not in head.params:
    raise InputError(
      f'{path}: no sequence-classification head: this is a plain encoder, not a cross-encoder; '
      'train one: python -m dprjax.train --config=configs/cross_encoder.py:beir '
      f'--config.backbone.path={path} --config.data.dir=DIR --workdir=DIR'
    )
  return head
