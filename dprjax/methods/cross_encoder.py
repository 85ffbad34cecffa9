"""Cross-encoders: a classifier of (query, passage) pairs, trained on a positive and its negatives.

    pointwise   binary cross-entropy of each pair, relevant or not (monoBERT: Nogueira and Cho 2019,
    Eq. 1) listwise    softmax cross-entropy of the positive among its own negatives (LCE: Gao, Dai
    and Callan 2021, Eq. 5)

A query's passages are compared with one another alone: there are no in-batch negatives, so that the
loss of a batch is the mean over its queries and ``grad_cache`` and ``accumulate`` both come to
averaging over chunks, of which memory holds one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.data.text import PairFormat, Tokenizer
from dprjax.methods.grad_cache import map_chunks
from dprjax.methods.method import Batch, Params, System
from dprjax.models import classifier, encoder
from dprjax.runtime import tree

LOSSES = ('listwise', 'pointwise')


def build(
  config: ml_collections.ConfigDict, model: encoder.EncoderConfig, mesh: Mesh, tokenizer: Tokenizer
) -> System:
  """The system that ``config`` and its ``cross_encoder`` section describe, for a backbone of the
  shape ``model``, on ``mesh``.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  knobs = config.cross_encoder
  if knobs.loss not in LOSSES:
    raise InputError(
      f'config.cross_encoder.loss: expected one of {", ".join(LOSSES)}, not {knobs.loss!r}'
    )
  if knobs.labels not in classifier.LABELS:
    raise InputError(f'config.cross_encoder.labels: expected 1 or 2, not {knobs.labels}')
  if config.negatives < 1:
    raise InputError(
      'config.negatives: a cross-encoder learns from negatives, there are none in the batch '
      'besides; use 1 or more'
    )
  if config.prompt.length or config.backbone.two_encoders:
    raise InputError(
      'config.prompt.length, config.backbone.two_encoders: a cross-encoder is one encoder without '
      'a prompt; set 0 and False'
    )
  form, closing = tokenizer.pair_format, len(tokenizer.closing)
  options: dict[str, Any] = {
    'second_type': form.second_type,
    'options': encoder.EncoderOptions.from_config(config.backbone),
  }
  longest = tokenizer.pair_length(config.data.query_max_length, config.data.passage_max_length)
  chunks = config.grad_cache * config.accumulate

  def init(parts: Mapping[str, Any], key: Array) -> dict[str, Any]:
    stored = parts['heads'].get('classifier')
    there = stored.params if stored else {}
    labels = there['output']['bias'].shape[0] if 'output' in there else knobs.labels
    # A pooler without a classifier is where BERT's head begins.
    params = {
      'backbone': parts['query'],
      'head': {'classifier': {**classifier.init_classifier(model, key, labels), **there}},
    }
    fresh = [
      name
      for name in tree.flatten(params)
      if name.startswith('head/') and name.split('/')[2] not in there
    ]
    live = tree.trainable_names(config.trainable, list(tree.flatten(params)))
    if frozen := [name for name in fresh if name not in live]:
      raise InputError(
        f"config.trainable: {frozen[0]} starts at random and would stay so; add 'head/.*'"
      )
    return params

  def embed(
    params: Params, kind: str, tokens: Array, mask: Array, starts: Array
  ) -> Float[Array, 'B 1']:
    del kind  # there are pairs alone
    return classifier.score_pairs(
      model, params['backbone'], params['head']['classifier'], tokens, mask, starts, **options
    )[:, None]

  def loss(
    params: Params, batch: Batch, key: Array | None
  ) -> tuple[Float[Array, ''], dict[str, Array]]:
    def one(rows: Any, key: Array | None) -> tuple[Float[Array, 'B C'], tuple[()]]:
      tokens, mask, starts = join_pairs(form, closing, tokenizer.pad_id, longest, *rows)
      size, candidates, length = tokens.shape
      scores = classifier.score_pairs(
        model,
        params['backbone'],
        params['head']['classifier'],
        tokens.reshape(-1, length),
        mask.reshape(-1, length),
        jnp.repeat(starts, candidates),
        **options,
        dropout_key=key,
      )
      return scores.reshape(size, candidates), ()

    rows = tuple(
      batch[f'{kind}_{what}'] for kind in ('query', 'passage') for what in ('tokens', 'mask')
    )
    scores = map_chunks(one, rows, key, chunks, mesh)[0]  # [B, C]
    value = jnp.mean(listwise(scores) if knobs.loss == 'listwise' else pointwise(scores))
    right = scores[:, 0] > jnp.max(scores[:, 1:], axis=1)
    return value, {'loss': value, 'accuracy': jnp.mean(right.astype(jnp.float32))}

  return System(init, loss, embed, {'accuracy': 'positive first'})


def listwise(scores: Float[Array, 'B C']) -> Float[Array, ' B']:
  """Negative log-likelihood of the positive, column 0, among each query's passages."""
  return jax.nn.logsumexp(scores, axis=1) - scores[:, 0]


def pointwise(scores: Float[Array, 'B C']) -> Float[Array, ' B']:
  """Binary cross-entropy of each pair, column 0 relevant and the others not, the mean over a
  query's passages.

  With 2 labels it is the cross-entropy of the two: its score is the difference of their logits.
  """
  return jnp.mean(
    jnp.concatenate([jax.nn.softplus(-scores[:, :1]), jax.nn.softplus(scores[:, 1:])], axis=1),
    axis=1,
  )


def join_pairs(
  form: PairFormat,
  closing: int,
  pad_id: int,
  longest: int,
  query_tokens: Int[Array, 'B Tq'],
  query_mask: Bool[Array, 'B Tq'],
  passage_tokens: Int[Array, 'B C Tp'],
  passage_mask: Bool[Array, 'B C Tp'],
) -> tuple[Int[Array, 'B C T'], Bool[Array, 'B C T'], Int[Array, ' B']]:
  """Each query with each of its passages, as ``Tokenizer.join_pairs`` puts them together; T follows
  from Tq and Tp.

  Args:
    form: what goes around the two.
    closing: special tokens that end a text of its own.
    pad_id: the padding token.
    longest: T at most: no pair has more tokens.
    query_tokens, query_mask, passage_tokens, passage_mask: texts with their own special tokens, as
      a batch has them.

  Returns:
    Tokens, mask, and where the passage begins.
  """
  batch, candidates, _ = passage_tokens.shape
  alone = len(form.opening) + closing
  length = min(query_tokens.shape[1] + passage_tokens.shape[2] - 2 * alone + form.specials, longest)
  query_length = jnp.sum(query_mask, axis=1, dtype=jnp.int32) - alone  # [B]
  passage_length = jnp.sum(passage_mask, axis=2, dtype=jnp.int32) - alone  # [B, C]
  middle = (len(form.opening) + query_length)[:, None, None]  # where the query ends
  start = middle + len(form.middle)
  end = start + passage_length[:, :, None]
  place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, candidates, length))

  def pick(tokens: Int[Array, 'B C S'], index: Int[Array, 'B C T']) -> Int[Array, 'B C T']:
    return jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[2] - 1), axis=2)

  passage = pick(passage_tokens, place - start + len(form.opening))
  query = pick(
    jnp.broadcast_to(query_tokens[:, None], (batch, candidates, query_tokens.shape[1])), place
  )  # begins as the pair does
  tokens = jnp.where(
    place < middle, query, jnp.where((place >= start) & (place < end), passage, pad_id)
  )
  for specials, first in ((form.middle, middle), (form.closing, end)):
    for offset, special in enumerate(specials):
      tokens = jnp.where(place == first + offset, special, tokens)
  return tokens, place < end + len(form.closing), start[:, 0, 0]
