"""A linear map of query vectors, as embedding adapters train: only a matrix [H, H].

The bare backbone encodes passages, as under a prompt for queries only. Everything else is as for
such a prompt (``config.prompt.length`` is not read).
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dprjax.losses import contrastive
from dprjax.models.embed import unit
from dprjax.training import dpr, dual_encoder
from dprjax.training.method import Model


def build(config, model, devices, _=None):
  encoders = dual_encoder.build(config, model)

  def init(parts, key):
    kernel = jnp.eye(model.hidden_size, dtype=jnp.float32)
    return {'backbone': parts.encoder, 'head': {'map': {'kernel': kernel}}}

  def encode(params, side, tokens, mask, key):
    vectors = encoders.encode(params, None, side, tokens, mask, key)
    if side == 'passage':
      return vectors
    vectors = vectors @ params['head']['map']['kernel']
    return unit(vectors) if config.normalize else vectors

  def loss(params, batch, key):
    def encode_rows(side, rows, key):
      return encode(params, side, *rows, key)

    corpus = contrastive.corpus(params, batch)
    return dpr.contrast(config, devices, encode_rows, batch, key, corpus=corpus)

  def embed(params, side, tokens, mask):
    return encode(params, side, tokens, mask, None)

  shown = {'accuracy': 'in-batch accuracy'}
  return Model(init, loss, embed, shown, sharding=(('head/map/kernel', PartitionSpec()),))


METHOD = dpr.METHOD._replace(build=build)
