"""Retriever-Prompt: a dual encoder for many tasks, told apart by templates (NIR-Prompt, Eq. 1).

``[CLS] P1 text P2 [MASK] [SEP]``, with separate P1 and P2 for queries and passages. The vector is
the state at [MASK], the loss the in-batch InfoNCE of ``dpr``.
"""

import functools
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base.errors import InputError
from dprjax.losses import contrastive
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.template import bare
from dprjax.papers.nir_prompt import learned_tokens, multitask, nir_prompt, task_templates
from dprjax.papers.nir_prompt.learned_tokens import LearnedTokens
from dprjax.text import vector_spec
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import dpr, dual_encoder
from dprjax.training.method import Model, Parts


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  contrastive.check_negatives(config)
  if config.pooling not in learned_tokens.POOLINGS:
    raise InputError(
      f'config.pooling: with a template use one of {", ".join(learned_tokens.POOLINGS)}, not '
      f'{config.pooling!r:.60}'
    )
  prompts = nir_prompt.build(config, model, tokenizer, SIDES)
  templates = prompts.templates
  options = dual_encoder.encoder_options(config, devices)
  spec = vector_spec.of_config(config)
  around = len(tokenizer.opening), len(tokenizer.closing)

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    params = {'backbone': parts.encoder, **prompts.init(parts, key)}
    nir_prompt.check_trained(config, params)
    return params

  def encode(
    params: Params,
    table: LearnedTokens | None,
    kind: str,
    tokens: Array,
    mask: Array,
    numbers: Array,
    key: Array | None,
  ) -> Float[Array, 'n H']:
    length = tokens.shape[1] - sum(around) + templates.extra(kind)
    return task_templates.vectors(
      model,
      params['backbone'],
      templates,
      kind,
      bare(tokens, mask, *around),
      length,
      numbers,
      [spec],
      adapter=table,
      options=options,
      dropout_key=key,
    )

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    in_templates = functools.partial(encode, params, prompts.table(params))
    vectors = dual_encoder.embed_batch(config, devices, in_templates, batch, key, ('task',))
    return dpr.contrast(config, devices, batch, vectors)

  def embed(
    params: Params, kind: str, tokens: Array, mask: Array, numbers: Array
  ) -> Float[Array, 'B H']:
    return encode(params, prompts.table(params), kind, tokens, mask, numbers, None)

  return Model(init, loss, embed, {'accuracy': 'in-batch accuracy'})


METHOD = nir_prompt.method(build, 'retrieval', SIDES, options={build: ('grad_cache',)})

# The baseline: fine-tuning on several tasks without templates.
FINE_TUNED = dpr.METHOD._replace(
  data=functools.partial(multitask.find_tasks, numbered=False),
  shapes=functools.partial(multitask.batch_shapes, numbered=False),
  options={dpr.build: dual_encoder.OPTIONS},
)
