"""A linear map of query vectors, as embedding adapters train: only a matrix [H, H].

The bare backbone encodes passages, as under a prompt for queries only. Everything else is as for
such a prompt (``config.prompt.length`` is not read).
"""

import functools

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dprjax.losses import contrastive
from dprjax.models.embed import unit
from dprjax.training import dpr, dual_encoder
from dprjax.training.method import Model


def build(config, model, devices, _=None):
  encoders = dual_encoder.build(config, model, devices)

  def init(parts, key):
    kernel = jnp.eye(model.hidden_size, dtype=jnp.float32)
    return {'backbone': parts.encoder, 'head': {'map': {'kernel': kernel}}}

  def encode(params, side, tokens, mask, key):
    vectors = encoders.encode(params, dual_encoder.BARE, side, tokens, mask, key)
    if side == 'passage':
      return vectors
    vectors = vectors @ params['head']['map']['kernel']
    return unit(vectors) if config.normalize else vectors

  def loss(params, batch, key):
    mapped = functools.partial(encode, params)
    vectors = dual_encoder.embed_batch(config, devices, mapped, batch, key)
    return dpr.contrast(config, devices, batch, vectors, contrastive.corpus(params, batch))

  def embed(params, side, tokens, mask):
    return encode(params, side, tokens, mask, None)

  shown = {'accuracy': 'in-batch accuracy'}
  return Model(init, loss, embed, shown, sharding=(('head/map/kernel', PartitionSpec()),))


OPTIONS = tuple(name for name in dpr.OPTIONS if name != 'prompt.regularization')
METHOD = dpr.METHOD._replace(build=build, options={**dpr.METHOD.options, build: OPTIONS})
