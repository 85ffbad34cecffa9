"""Dual-encoder retrieval: deep prompt tuning (DPTDR section 3.1) and full fine-tuning (DPR).

The two differ only in what ``config.trainable`` names and in whether there is a prompt.
"""

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.data import batches
from dprjax.data.text import Tokenizer
from dprjax.methods import contrastive
from dprjax.methods import dual_encoder as dual
from dprjax.methods.grad_cache import map_chunks
from dprjax.methods.method import Batch, Params, System
from dprjax.models import encoder, prompts


def build(
  config: ml_collections.ConfigDict,
  model: encoder.EncoderConfig,
  mesh: Mesh,
  tokenizer: Tokenizer | None = None,
) -> System:
  """The system that ``config`` describes, for a backbone of the shape ``model``, on ``mesh``; the
  tokenizer is not needed.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  if config.temperature <= 0:
    raise InputError(f'config.temperature: must be above 0, not {config.temperature}')
  encoders = dual.build(config, model)
  chunks = config.grad_cache * config.accumulate
  temperature, in_batch = config.temperature, config.in_batch

  def embed_chunked(
    params: Params, prefix: Array | None, kind: str, tokens: Array, mask: Array, key: Array | None
  ) -> Float[Array, 'B C H']:
    candidates, length = tokens.shape[1:]

    def one(rows: tuple[Array, Array], key: Array | None) -> tuple[Array, tuple[()]]:
      tokens, mask = rows
      vectors = encoders.encode(
        params, prefix, kind, tokens.reshape(-1, length), mask.reshape(-1, length), key
      )
      return vectors.reshape(-1, candidates, vectors.shape[-1]), ()

    return map_chunks(one, (tokens, mask), key, chunks, mesh)[0]

  def loss(
    params: Params, batch: Batch, key: Array | None
  ) -> tuple[Float[Array, ''], dict[str, Array]]:
    prefixes = prompts.expand_prompt(model, params.get('prompt'))
    query_key, passage_key = (None, None) if key is None else tuple(jax.random.split(key))
    q = embed_chunked(
      params,
      prefixes['query'],
      'query',
      batch['query_tokens'][:, None],
      batch['query_mask'][:, None],
      query_key,
    )[:, 0]
    p = embed_chunked(
      params,
      prefixes['passage'],
      'passage',
      batch['passage_tokens'],
      batch['passage_mask'],
      passage_key,
    )
    contrast = contrastive.info_nce(
      q,
      p,
      batch['passage_index'],
      batch['relevant'],
      mesh,
      rows=config.loss_rows,
      temperature=temperature,
      in_batch=in_batch,
    )
    value = jnp.mean(contrast.loss)
    return value, negative_pools(batch) | {
      'loss': value,
      'accuracy': jnp.mean(contrast.accuracy),
      'negatives': jnp.mean(contrast.negatives),
    }

  return System(encoders.init, loss, encoders.embed, {'accuracy': 'in-batch accuracy'})


def negative_pools(batch: Batch) -> dict[str, Float[Array, '']]:
  """Shares of `batches.SLOT_SOURCES` in a batch's own negatives, and of queries short of a pool.

  Empty for a batch without `negative_pool`.
  """
  if 'negative_pool' not in batch:
    return {}
  kind = batch['negative_pool']
  shares = {
    f'negatives/{name}': jnp.mean((kind == number).astype(jnp.float32))
    for number, name in enumerate(batches.SLOT_SOURCES)
  }
  return shares | {
    'negatives/queries_short_of_a_pool': jnp.mean(
      jnp.any(kind >= batches.STAND_INS, axis=1).astype(jnp.float32)
    )
  }
