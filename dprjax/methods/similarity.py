"""Sentence similarity: the cosine of two sentences' vectors learns people's scores (Reimers and
Gurevych 2019, section 3; Condenser section 4.2).
"""

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dprjax.data.text import Tokenizer
from dprjax.methods import dual_encoder as dual
from dprjax.methods.grad_cache import map_chunks
from dprjax.methods.method import Batch, Params, System
from dprjax.models import encoder, prompts
from dprjax.models.embed import unit

VIEWS = ('first', 'second')


def build(
  config: ml_collections.ConfigDict,
  model: encoder.EncoderConfig,
  mesh: Mesh,
  tokenizer: Tokenizer | None = None,
) -> System:
  """The mean of squared differences of cosine and score (0 to 1), of texts encoded as queries are;
  the tokenizer is not needed.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  encoders = dual.build(config, model)
  chunks = config.grad_cache * config.accumulate

  def loss(
    params: Params, batch: Batch, key: Array | None
  ) -> tuple[Float[Array, ''], dict[str, Array]]:
    prefix = prompts.expand_prompt(model, params.get('prompt'))['query']

    def one(rows: tuple[Array, Array], key: Array | None) -> tuple[Array, tuple[()]]:
      return unit(encoders.encode(params, prefix, 'query', *rows, key)), ()

    keys = (None, None) if key is None else tuple(jax.random.split(key))
    first, second = (
      map_chunks(one, (batch[f'{view}_tokens'], batch[f'{view}_mask']), view_key, chunks, mesh)[0]
      for view, view_key in zip(VIEWS, keys, strict=True)
    )
    wrong = (
      jnp.einsum('bh,bh->b', first, second, precision=jax.lax.Precision.HIGHEST) - batch['score']
    )
    value = jnp.mean(jnp.square(wrong))
    return value, {'loss': value, 'error': jnp.mean(jnp.abs(wrong))}

  return System(encoders.init, loss, encoders.embed, {'error': 'mean error'})
