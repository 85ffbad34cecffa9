"""Dual-encoder retrieval: deep prompt tuning (DPTDR section 3.1) and full fine-tuning (DPR).

The two differ only in what ``config.trainable`` names and in whether there is a prompt.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dprjax.data.text import Tokenizer
from dprjax.errors import InputError
from dprjax.models import encoder, heads, prompts
from dprjax.objectives import contrastive
from dprjax.objectives.system import Batch, Params, System
from dprjax.runtime import mesh as meshes


def build(config: ml_collections.ConfigDict, model: encoder.EncoderConfig, mesh: Mesh, tokenizer: Tokenizer | None = None) -> System:
  """The system that ``config`` describes, for a backbone of the shape ``model``, on ``mesh``; the tokenizer is not needed.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  if config.backbone.dtype not in ('float32', 'bfloat16'):
    raise InputError(f"config.backbone.dtype: expected 'float32' or 'bfloat16', not {config.backbone.dtype!r}")
  if config.temperature <= 0:
    raise InputError(f'config.temperature: must be above 0, not {config.temperature}')
  if config.prompt.dropout_scope not in ('example', 'batch'):
    raise InputError(f"config.prompt.dropout_scope: expected 'example' or 'batch', not {config.prompt.dropout_scope!r}")
  if config.backbone.dropout >= 0:
    model = dataclasses.replace(model, hidden_dropout=config.backbone.dropout, attention_dropout=config.backbone.dropout)
  no_dropout = not (model.hidden_dropout or model.attention_dropout)
  dtype = jnp.dtype(config.backbone.dtype)
  unroll = config.backbone.unroll or model.num_layers
  two = config.backbone.two_encoders
  chunks = config.grad_cache * config.accumulate
  pooling, normalize, temperature = config.pooling, config.normalize, config.temperature
  rate, scope = config.prompt.dropout, config.prompt.dropout_scope
  shift, remat, in_batch = config.prompt.shift_positions, config.backbone.remat, config.in_batch

  def init(parts: Mapping[str, Any], key: Array) -> dict[str, Any]:
    params: dict[str, Any] = {'backbone': {kind: parts[kind] for kind in prompts.KINDS} if two else parts['query']}
    if config.prompt.length:
      params['prompt'] = prompts.init_prompt(
          model, key, config.prompt.length, tied=config.prompt.tied,
          reparam=config.prompt.reparam, hidden=config.prompt.reparam_hidden, std=config.prompt.init_std)
    return params

  def encode(backbone: Params, prefix: Array | None, tokens: Array, mask: Array, key: Array | None) -> Float[Array, 'B H']:
    dropout_key = None
    if key is not None:
      backbone_key, prompt_key = jax.random.split(key)
      dropout_key = None if no_dropout else backbone_key
      if prefix is not None and rate:
        prefix = prompts.drop(prefix, prompt_key, rate, tokens.shape[0] if scope == 'example' else None)
    hidden = encoder.encode(
        model, backbone, tokens, mask, prompt=prefix, shift_positions=shift, dtype=dtype, remat=remat, unroll=unroll,
        dropout_key=dropout_key)
    pooled = heads.pool(hidden, mask, pooling)
    return heads.normalize(pooled) if normalize else pooled

  def backbone_of(params: Params, kind: str) -> Params:
    return params['backbone'][kind] if two else params['backbone']

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    prefix = prompts.expand_prompt(model, params.get('prompt'))[kind]
    return encode(backbone_of(params, kind), prefix, tokens, mask, None)

  def embed_chunked(params: Params, prefix: Array | None, kind: str, tokens: Array, mask: Array, key: Array | None) -> Float[Array, 'B C H']:
    """Encodes ``[B, C, T]`` in chunks of rows; the backward pass holds the activations of one chunk (GradCache, Gao et al. 2021)."""
    rows, candidates, length = tokens.shape
    backbone = backbone_of(params, kind)
    if chunks == 1:
      vectors = encode(backbone, prefix, tokens.reshape(-1, length), mask.reshape(-1, length), key)
      return vectors.reshape(rows, candidates, -1)

    def split(x: Array) -> Array:
      # Row i goes to chunk i mod n: every device keeps its own rows. With the chunks outermost, as
      # reshape(n, -1, ...) has them, all devices would compute every chunk whole.
      x = x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)  # [n, B / n, C, T]
      return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, meshes.BATCH)))

    def one(piece: tuple[Array, Array, Array | None]) -> Array:
      t, m, k = piece
      return encode(backbone, prefix, t.reshape(-1, length), m.reshape(-1, length), k)
    keys = None if key is None else jax.random.split(key, chunks)
    vectors = jax.lax.map(jax.checkpoint(one), (split(tokens), split(mask), keys))  # [n, B / n * C, H]
    return vectors.reshape(chunks, rows // chunks, candidates, -1).swapaxes(0, 1).reshape(rows, candidates, -1)

  def loss(params: Params, batch: Batch, key: Array | None) -> tuple[Float[Array, ''], dict[str, Array]]:
    prefixes = prompts.expand_prompt(model, params.get('prompt'))
    query_key, passage_key = (None, None) if key is None else tuple(jax.random.split(key))
    q = embed_chunked(params, prefixes['query'], 'query', batch['query_tokens'][:, None], batch['query_mask'][:, None], query_key)[:, 0]
    p = embed_chunked(params, prefixes['passage'], 'passage', batch['passage_tokens'], batch['passage_mask'], passage_key)
    # The loss needs every passage on every device: the one gather of the step.
    p = jax.lax.with_sharding_constraint(p, NamedSharding(mesh, P()))
    scores = contrastive.score_batch(q, p, batch['passage_index'], batch['relevant'], temperature, in_batch)
    value = jnp.mean(contrastive.cross_entropy(scores))
    return value, {
        'loss': value,
        'accuracy': jnp.mean(contrastive.accuracy(scores)),
        'negatives': jnp.mean(contrastive.negatives_seen(scores)),
    }

  return System(init, loss, embed, {'accuracy': 'in-batch accuracy'})
