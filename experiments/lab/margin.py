"""A prompt for queries only that leaves out negatives which may be unlabelled positives.

These are the passages that the frozen encoder scores above the positive of the query, at most the
``MOST`` highest. RocketQA (Qu et al. 2021) does so with a cross-encoder, NV-Retriever (de Souza P.
Moreira et al. 2024) by such a margin.
"""

import jax
import jax.numpy as jnp

from dprjax.losses import contrastive
from dprjax.training import dpr

MOST = 100


def build(config, model, devices, _=None):
  plain = dpr.build(config, model, devices)

  def loss(params, batch, key):
    corpus = contrastive.corpus(params, batch)
    frozen = batch[contrastive.FROZEN]
    positive = jnp.sum(frozen * batch['passage_vectors'][:, 0], axis=1)
    scores = contrastive.inner_products(frozen, corpus.vectors)
    highest, places = jax.lax.top_k(scores, min(MOST, scores.shape[1]))
    above = jnp.where(highest > positive[:, None], corpus.rows[places], -1)
    relevant = jnp.concatenate([batch['relevant'], above], axis=1)
    return plain.loss(params, batch | {'relevant': relevant}, key)

  return plain._replace(loss=loss)


METHOD = dpr.METHOD._replace(build=build, options={**dpr.METHOD.options, build: dpr.OPTIONS})
