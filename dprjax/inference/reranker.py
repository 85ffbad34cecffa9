"""A cross-encoder, which reads a query and a passage together and scores them."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.data import text
from dprjax.inference.embedder import (
  Embedder,
  ProgressFn,
  count_from,
  encoder_row_bytes,
  local_mesh,
  place,
)
from dprjax.models import classifier, encoder, head_specs, hub, sentence
from dprjax.models.template import Template, fill, unpack

# A pair's cost grows faster than its length.
DEFAULT_LENGTH = 512
# Pairs tokenised and sorted by length at a time.
_BLOCK = 1 << 15


class CrossEncoder:
  """A sequence classifier of 1 or 2 labels with its tokenizer, on all local devices.

  The sigmoid of a score is the probability of relevance. The score is the logit, or of two labels
  logit 1 (relevant) minus logit 0.

      reranker = CrossEncoder.load('cross-encoder')
      reranker.score([('how do planes fly', 'The lift of a swept wing ...')])   # float32 [1]
  """

  def __init__(
    self,
    backbone: hub.Backbone,
    tokenizer: text.Tokenizer,
    max_length: int,
    *,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'float32',
  ):
    """See ``load``.

    Raises:
      InputError: the backbone has no classifier (see ``hub.load_backbone``), or fewer positions
        than ``max_length``.
    """
    head = _check_head(backbone.heads.get('classifier'), backbone.path).params
    model = backbone.config
    if max_length > model.max_tokens:
      raise InputError(
        f'max_length {max_length} exceeds the {model.max_tokens} positions of {backbone.path}'
      )
    self.backbone, self.tokenizer, self.max_length, self.dtype = (
      backbone,
      tokenizer,
      max_length,
      dtype,
    )
    self.labels = head['output']['bias'].shape[0]
    self.truncated = 0  # pairs that lost tokens
    mesh = local_mesh() if mesh is None else mesh
    self._params = place(mesh, (backbone.params, head))
    self._template = Template.pair(*tokenizer.pair_format)

    def embed(params: Any, rows: jax.Array, _: jax.Array, lengths: jax.Array) -> jax.Array:
      backbone, head = params
      pair = fill([self._template], unpack(rows, lengths), rows.shape[1], tokenizer.pad_id)
      return classifier.score_pairs(
        model,
        backbone,
        head,
        pair.tokens,
        pair.mask,
        pair.token_types,
        options=encoder.EncoderOptions(jnp.dtype(dtype)),
      )[:, None]

    self._embedder = Embedder(
      embed, mesh, batch_size, max_length, tokenizer.pad_id, encoder_row_bytes(model)
    )

  @classmethod
  def load(
    cls,
    path: PathLike,
    *,
    max_length: int | None = None,
    batch_size: int = 64,
    dtype: str = 'float32',
  ) -> Self:
    """Loads a BERT, RoBERTa or XLM-R sequence classifier of 1 or 2 labels.

    Args:
      path: a Hugging Face directory, a hub id, or ``package:NAME``.
      max_length: tokens of a pair; by default that of the tokenizer's files, at most 512. The
        passage is cut first, see ``Template.cut``.
      batch_size: pairs scored at a time, over all devices.
      dtype: 'float32' or 'bfloat16', of the arithmetic.

    Raises:
      InputError: something cannot be read, there is no such head, it has more labels, or the
        tokenizer is another model's.
    """
    backbone = hub.load_backbone(path, ('classifier',))
    tokenizer = text.load_tokenizer(backbone.path)
    hub.check_vocabulary(backbone, tokenizer.vocab_size, backbone.path)
    if max_length is None:
      max_length = min(
        sentence.max_length(epath.Path(backbone.path)), backbone.config.max_tokens, DEFAULT_LENGTH
      )
    return cls(backbone, tokenizer, max_length, batch_size=batch_size, dtype=dtype)

  @property
  def sha256(self) -> str:
    """Names the encoder's tensors, the head's and the tokenizer, which decide a score."""
    classifier = self.backbone.heads['classifier']
    head = head_specs.sha256('classifier', self.backbone.config, classifier)
    return '+'.join((self.backbone.sha256, head, self.tokenizer.sha256))

  def score(
    self, pairs: Sequence[tuple[str, str]], progress: ProgressFn | None = None
  ) -> Float[np.ndarray, ' n']:
    """Scores of (query, passage) pairs, float32, in their order.

    Args:
      pairs: any number; a passage is its title, a space, its text.
      progress: called with the number of pairs done.
    """
    scores = np.zeros(len(pairs), np.float32)
    for start in range(0, len(pairs), _BLOCK):
      block = pairs[start : start + _BLOCK]
      tokens = self.tokenizer.encode_bare(text for pair in block for text in pair)
      texts = [[tokens[pair[i]] for pair in block] for i in range(2)]
      packed = self._template.pack(texts, self.max_length, self.tokenizer.pad_id)
      self.truncated += packed.cut
      scores[start : start + len(block)] = self._embedder(
        self._params, packed.rows, count_from(start, progress), (packed.lengths,)
      )[:, 0]
    return scores


def check(path: PathLike) -> None:
  """A quick check for ``CrossEncoder.load(path)``, which does not read the encoder's weights.

  Raises:
    InputError: there is no model, or it has no sequence-classification head of 1 or 2 labels.
  """
  _check_head(hub.load_head(path, 'classifier'), path)


def _check_head(head: head_specs.Head | None, path: PathLike) -> head_specs.Head:
  """The head; raises InputError where there is none, or BERT's pooler alone."""
  if head is None or 'output' not in head.params:
    raise InputError(
      f'{path}: no sequence-classification head: this is a plain encoder, not a cross-encoder; '
      'train one from it: '
      'python -m dprjax.train --config=configs/cross_encoder.py:beir '
      f'--config.backbone.path={path} --config.data.dir=DIR --workdir=DIR'
    )
  return head
