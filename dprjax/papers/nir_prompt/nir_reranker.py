"""Reranker-Prompt: pairs of many tasks, judged by the word at [MASK] (NIR-Prompt, section 3.5).

``[CLS] P1 first [SEP] P2 second [SEP] P3 [MASK] [SEP]``. The masked-LM head predicts the word of
the label, yes or no, over the whole vocabulary; the scores are those of
``task_templates.answer_score``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.template import TextRows, bare, unpack
from dprjax.papers.nir_prompt import multitask, nir_prompt, task_templates
from dprjax.papers.nir_prompt.learned_tokens import LearnedTokens
from dprjax.papers.nir_prompt.pairs import VIEWS
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import cross_encoder, dual_encoder
from dprjax.training.method import Model, Parts

KINDS = ('pair',)


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  prompts = nir_prompt.build(config, model, tokenizer, KINDS)
  templates, bare_templates = prompts.templates, prompts.templates.without_prompts()
  verbalizer = config.template.verbalizer
  yes, no = task_templates.label_ids(verbalizer, tokenizer, 'config.template.verbalizer')
  options = dual_encoder.encoder_options(config, devices)
  around = len(tokenizer.opening), len(tokenizer.closing)
  chunks = config.grad_cache

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    head = {'mlm': task_templates.need_head(parts.heads, config.backbone.path).params}
    params = {'backbone': parts.encoder, 'head': head, **prompts.init(parts, key)}
    nir_prompt.check_trained(config, params)
    return params

  def logits(
    params: Params,
    table: LearnedTokens | None,
    texts: Sequence[TextRows],
    length: int,
    numbers: Array,
    key: Array | None,
  ) -> Float[Array, 'n V']:
    return task_templates.answer(
      model,
      params['backbone'],
      params['head']['mlm'],
      bare_templates if templates.rows and table is None else templates,
      texts,
      length,
      numbers,
      adapter=table,
      options=options,
      dropout_key=key,
    )

  def score(logits: Float[Array, 'n V']) -> Float[Array, ' n']:
    return task_templates.answer_score(logits, yes, no, config.template.score)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    table = prompts.table(params)

    def judge(rows: Any, key: Array | None) -> tuple[tuple[Array, Array, Array], tuple[()]]:
      tokens, masks, numbers, labels = rows[:2], rows[2:4], rows[4], rows[5]
      texts = [bare(*text, *around) for text in zip(tokens, masks, strict=True)]
      length = sum(text.shape[1] - sum(around) for text in tokens) + templates.extra('pair')
      by_word = logits(params, table, texts, length, numbers, key)
      total = jax.nn.logsumexp(by_word, axis=1)
      answers = jnp.stack([by_word[:, no], by_word[:, yes]], axis=1) - total[:, None]  # log P
      entropy = -jnp.take_along_axis(answers, labels[:, None], axis=1)[:, 0]
      right = (score(by_word) > 0) == (labels == 1)
      return (entropy, right.astype(jnp.float32), jnp.sum(jnp.exp(answers), axis=1)), ()

    names = ('first_tokens', 'second_tokens', 'first_mask', 'second_mask', 'task', 'label')
    rows = tuple(batch[name] for name in names)
    entropy, right, mass = map_chunks(judge, rows, key, chunks, devices)[0]
    value = jnp.mean(entropy)
    return value, {
      'accuracy': jnp.mean(right),
      # The probability mass of the two words.
      'yes_or_no': jnp.mean(mass),
    }

  def embed(
    params: Params, kind: str, rows: Array, mask: Array, lengths: Array, numbers: Array
  ) -> Float[Array, 'B 1']:
    del kind, mask  # only pairs, as packed texts
    texts = unpack(rows, lengths)
    by_word = logits(params, prompts.table(params), texts, rows.shape[1], numbers, None)
    return score(by_word)[:, None]

  shown = {'accuracy': 'accuracy', 'yes_or_no': 'P(yes or no)'}
  return Model(init, loss, embed, shown, dual_encoder.without_adapter)


METHOD = nir_prompt.method(
  build, 'pairs', KINDS, parts=('mlm',), needs=('mlm',), options={build: ('grad_cache',)}
)


def build_classifier(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer
) -> Model:
  """The baseline: binary cross-entropy of each pair (monoBERT: Nogueira and Cho 2019, Eq. 1)."""
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


FINE_TUNED = cross_encoder.METHOD._replace(
  build=build_classifier,
  data=functools.partial(
    multitask.find_tasks, form='pairs', templates=cross_encoder.templates, numbered=False
  ),
  shapes=functools.partial(multitask.batch_shapes, form='pairs', numbered=False),
  options={build_classifier: ('grad_cache',)},
  requires={
    **cross_encoder.METHOD.requires,
    'cross_encoder.loss': 'pointwise',
  },
)
