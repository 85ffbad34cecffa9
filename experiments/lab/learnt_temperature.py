"""A prompt for queries only, with a learnt temperature as in CLIP (Radford et al. 2021).

The temperature starts at ``config.temperature``. Only the loss depends on it: it scales all scores
of a query alike, so rankings stay. Query vectors have it as their length, also the frozen ones, so
the trust region compares both at the same temperature.
"""

import jax.numpy as jnp
from jax import lax

from dprjax.losses import contrastive
from dprjax.training import dpr, dual_encoder


def build(config, model, devices, _=None):
  plain = dpr.build(config, model, devices)
  encoders = dual_encoder.build(config, model, devices)

  def init(parts, key):
    return plain.init(parts, key) | {'head': {'log_scale': jnp.zeros((), jnp.float32)}}

  def loss(params, batch, key):
    scale = jnp.exp(params['head']['log_scale'])
    vectors = encoders.vectors(params, batch, key)
    vectors = vectors._replace(query=scale * vectors.query)
    frozen = vectors._replace(query=lax.stop_gradient(scale) * batch[contrastive.FROZEN])
    corpus = contrastive.corpus(params, batch)
    value, metrics = dpr.contrast(config, devices, batch, vectors, corpus, frozen)
    return value, metrics | {'temperature': config.temperature / scale}

  shown = {**plain.shown, 'temperature': 'temperature'}
  return plain._replace(init=init, loss=loss, shown=shown)


METHOD = dpr.METHOD._replace(build=build, options={**dpr.METHOD.options, build: dpr.OPTIONS})
