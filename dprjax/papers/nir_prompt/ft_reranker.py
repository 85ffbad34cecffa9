"""A classifier of labelled pairs of several tasks: the baseline of Reranker-Prompt (NIR-Prompt)."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array
from ml_collections import ConfigDict

from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.nir_prompt import multitask
from dprjax.papers.nir_prompt.pairs import VIEWS
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import cross_encoder
from dprjax.training.method import Model


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  """Binary cross-entropy of each pair (monoBERT: Nogueira and Cho 2019, Eq. 1)."""
  of_pairs = cross_encoder.build_classifier(config, model, devices, tokenizer)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    first, second = ([batch[f'{view}_tokens'], batch[f'{view}_mask']] for view in VIEWS)
    rows = [*first, *(array[:, None] for array in second)]
    scores = of_pairs.score(params, rows, key)[:, 0]
    matches = batch['label'] == 1
    value = jnp.mean(jax.nn.softplus(jnp.where(matches, -scores, scores)))
    accuracy = jnp.mean(((scores > 0) == matches).astype(jnp.float32))
    return value, {'accuracy': accuracy}

  return Model(of_pairs.init, loss, of_pairs.embed, {'accuracy': 'accuracy'})


METHOD = cross_encoder.METHOD._replace(
  build=build,
  data=functools.partial(
    multitask.find_tasks, form='pairs', templates=cross_encoder.templates, numbered=False
  ),
  shapes=functools.partial(multitask.batch_shapes, form='pairs', numbered=False),
  options={build: ('grad_cache',)},
  requires={
    **cross_encoder.METHOD.requires,
    'cross_encoder.loss': 'pointwise',
  },
)
