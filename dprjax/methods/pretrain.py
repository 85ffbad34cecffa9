"""Pretraining a backbone for retrieval: masked language modelling, Condenser, coCondenser, RIP and
ICT, one loss of three terms.

    masked language modelling   of the backbone's last states (Devlin et al. 2019); of each text,
    whatever the method Condenser's                 of a short head on [late CLS ; early tokens],
    with the same output projection (Gao and Callan 2021) contrastive                 two texts of a
    passage against the batch's other texts: RIP (DPTDR Eqs. 4 and 5), coCondenser
                                (Gao and Callan 2022, Eqs. 6 and 7), or a sentence against the rests
                                of passages: ICT (Lee et al. 2019)

Which of them, and on which texts, ``config.pretrain`` says. A text is encoded once, masked, and
that one pass serves all terms, as coCondenser's code has it (DPTDR leaves it open).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.data.text import Tokenizer
from dprjax.methods import contrastive
from dprjax.methods.grad_cache import map_chunks
from dprjax.methods.method import Batch, Params, System
from dprjax.models import encoder, heads, masking, prompts
from dprjax.models.embed import pool

VIEWS = {'one': ('first',), 'siblings': ('first', 'second'), 'ict': ('first', 'second')}


class _Sums(NamedTuple):
  """Over masked tokens: cross-entropies and right predictions of the last layer, cross-entropies of
  the Condenser head, and their number.
  """

  late: Float[Array, '']
  right: Float[Array, '']
  head: Float[Array, '']
  masked: Float[Array, '']


def build(
  config: ml_collections.ConfigDict, model: encoder.EncoderConfig, mesh: Mesh, tokenizer: Tokenizer
) -> System:
  """The system that ``config`` and its ``pretrain`` section describe, for a backbone of the shape
  ``model``, on ``mesh``.

  The loss's means are taken over all masked tokens and all texts of the update, so that neither
  devices nor gradient-cache chunks change the terms' weights.

  Raises:
    InputError: a knob has a value it cannot have; the message names it.
  """
  knobs = config.pretrain
  if knobs.views not in VIEWS:
    raise InputError(
      f'config.pretrain.views: expected one of {", ".join(VIEWS)}, not {knobs.views!r}'
    )
  if config.temperature <= 0:
    raise InputError(f'config.temperature: must be above 0, not {config.temperature}')
  contrasted = knobs.views != 'one' and knobs.contrast_weight > 0
  mlm = knobs.mlm_weight > 0
  if not (contrasted or mlm):
    raise InputError(
      'config.pretrain: nothing to learn; set mlm_weight above 0, or contrast_weight with '
      "views='siblings' or 'ict'"
    )
  if mlm and not 0 < knobs.mask_rate < 1:
    raise InputError(f'config.pretrain.mask_rate: must lie between 0 and 1, not {knobs.mask_rate}')
  condenser = knobs.head_layers > 0
  if condenser and not mlm:
    raise InputError(
      'config.pretrain.head_layers: the Condenser head learns from masked tokens; set '
      'config.pretrain.mlm_weight above 0'
    )
  if not (condenser or knobs.late_mlm or contrasted):
    raise InputError(
      'config.pretrain.late_mlm: without it and without a Condenser head (head_layers) there is '
      'nothing to learn'
    )
  skip_from = knobs.skip_from or model.num_layers // 2
  if condenser and not 0 < skip_from < model.num_layers:
    raise InputError(
      f'config.pretrain.skip_from: {skip_from} leaves no early or no late layer; the backbone has '
      f'{model.num_layers} layers'
    )
  if config.backbone.two_encoders or not config.prompt.tied:
    raise InputError(
      'config.backbone.two_encoders, config.prompt.tied: pretraining has one encoder and one '
      'prompt for all texts'
    )
  if tokenizer.mask_id is None:
    raise InputError(
      'the tokenizer has no mask token; masked language modelling needs one: choose another '
      'backbone'
    )
  mask_id, ordinary = (
    tokenizer.mask_id,
    np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int32), tokenizer.special_ids).astype(
      np.int32
    ),
  )
  options = encoder.EncoderOptions.from_config(config.backbone)
  chunks = config.grad_cache * config.accumulate
  views, rate, shift = VIEWS[knobs.views], config.prompt.dropout, config.prompt.shift_positions
  late_mlm = mlm and knobs.late_mlm

  def init(parts: Mapping[str, Any], key: Array) -> dict[str, Any]:
    prompt_key, mlm_key, condenser_key = jax.random.split(key, 3)
    params: dict[str, Any] = {'backbone': parts['query']}
    if config.prompt.length:
      params['prompt'] = prompts.init_prompt(
        model,
        prompt_key,
        config.prompt.length,
        reparam=config.prompt.reparam,
        hidden=config.prompt.reparam_hidden,
        std=config.prompt.init_std,
      )
    if mlm:
      params['head'] = {
        'mlm': parts['heads']['mlm'].params
        if 'mlm' in parts['heads']
        else heads.init_mlm_head(model, mlm_key)
      }
    if condenser:
      stored = parts['heads'].get('condenser')
      head = stored.params if stored else None
      if head is not None and (layers := jax.tree.leaves(head)[0].shape[0]) != knobs.head_layers:
        raise InputError(
          f'config.pretrain.head_layers: {knobs.head_layers}, but the Condenser head beside the '
          f'backbone has {layers} layers'
        )
      if stored and stored.settings['split'] != skip_from:
        raise InputError(
          f'config.pretrain.skip_from: {skip_from}, but the Condenser head beside the backbone was '
          'trained on the states after layer '
          f'{stored.settings["split"]}; set that'
        )
      params['head']['condenser'] = (
        heads.init_condenser_head(model, condenser_key, knobs.head_layers) if head is None else head
      )
    return params

  def vector(hidden: Array, mask: Array) -> Float[Array, 'B H']:
    return pool(hidden, mask, config.pooling, config.normalize)

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    prefix = prompts.expand_prompt(model, params.get('prompt'))[kind]
    return vector(
      encoder.encode(
        model,
        params['backbone'],
        tokens,
        mask,
        prompt=prefix,
        shift_positions=shift,
        options=options,
      ),
      mask,
    )

  def encode(params: Params, rows: Any, key: Array | None) -> tuple[Float[Array, 'B H'], _Sums]:
    """One view's vectors, and its masked tokens' losses."""
    tokens, mask, masked = rows
    assert key is not None  # loss asks for one
    backbone_key, head_key, prompt_key = jax.random.split(key, 3)
    prefix = prompts.expand_prompt(model, params.get('prompt'))['passage']
    if prefix is not None and rate:
      prefix = prompts.drop(
        prefix,
        prompt_key,
        rate,
        tokens.shape[0] if config.prompt.dropout_scope == 'example' else None,
      )
    both = {
      'prompt': prefix,
      'shift_positions': shift,
      'dropout_key': backbone_key,
      'options': options,
    }
    if condenser:
      early, late = encoder.encode_early_late(
        model, params['backbone'], tokens, mask, skip_from, **both
      )
    else:
      late = encoder.encode(model, params['backbone'], tokens, mask, **both)
    sums = _Sums(*(jnp.zeros((), jnp.float32),) * 4)
    if mlm:
      words = params['backbone']['embeddings']['word']['embedding']
      targets = (masked.positions, masked.targets, masked.weights)
      sums = sums._replace(masked=jnp.sum(masked.weights))
      if late_mlm:
        late_loss, _, right = heads.mlm_loss(
          model, params['head']['mlm'], words, late, *targets, dtype=options.dtype
        )
        sums = sums._replace(late=late_loss, right=right)
      if condenser:
        states = heads.condenser_states(
          model,
          params['head']['condenser'],
          late,
          early,
          mask,
          dropout_key=head_key,
          options=options,
        )
        head_loss, _, right = heads.mlm_loss(
          model, params['head']['mlm'], words, states, *targets, dtype=options.dtype
        )
        sums = sums._replace(head=head_loss, right=right)
    return vector(late, mask), sums

  def loss(
    params: Params, batch: Batch, key: Array | None
  ) -> tuple[Float[Array, ''], dict[str, Array]]:
    if key is None:
      raise ValueError('a key is needed: the masks are drawn from it')
    vectors, total = {}, _Sums(*(jnp.zeros((), jnp.float32),) * 4)
    for number, view in enumerate(views):
      mask_key, encode_key = jax.random.split(jax.random.fold_in(key, number))
      tokens, mask, masked = batch[f'{view}_tokens'], batch[f'{view}_mask'], None
      if mlm:
        # Before the batch is cut into chunks: the same tokens are masked however many there are.
        masked = masking.mask_tokens(
          mask_key,
          tokens,
          batch[f'{view}_words'],
          rate=knobs.mask_rate,
          mask_id=mask_id,
          replacements=jnp.asarray(ordinary),
        )
        tokens = masked.tokens
      vectors[view], sums = map_chunks(
        functools.partial(encode, params), (tokens, mask, masked), encode_key, chunks, mesh
      )
      total = _Sums(*(a + b for a, b in zip(total, sums, strict=True)))
    value = jnp.zeros((), jnp.float32)
    metrics = {}
    if mlm:
      masked_tokens = jnp.maximum(total.masked, 1)
      metrics = {'mlm_accuracy': total.right / masked_tokens}
      if late_mlm:
        metrics['mlm'] = total.late / masked_tokens
        value += knobs.mlm_weight * metrics['mlm']
      if condenser:
        metrics['condenser'] = total.head / masked_tokens
        value += knobs.mlm_weight * metrics['condenser']
    if contrasted:
      if knobs.views == 'siblings':
        texts = contrastive.interleave(vectors['first'], vectors['second'])
        contrast = contrastive.nt_xent(
          texts, mesh, rows=config.loss_rows, temperature=config.temperature
        )
      else:
        index = batch['passage_index'][:, None]
        contrast = contrastive.info_nce(
          vectors['first'],
          vectors['second'][:, None],
          index,
          jnp.full_like(index, -1),
          mesh,
          rows=config.loss_rows,
          temperature=config.temperature,
        )
      metrics |= {'contrast': jnp.mean(contrast.loss), 'accuracy': jnp.mean(contrast.accuracy)}
      value += knobs.contrast_weight * metrics['contrast']
    return value, {'loss': value, **metrics}

  shown = {'condenser': 'condenser'} if condenser else {}
  shown |= {'mlm': 'mlm'} if late_mlm else {}
  shown |= {'mlm_accuracy': 'mlm accuracy'} if mlm else {}
  shown |= (
    {
      'contrast': 'contrast',
      'accuracy': 'sibling accuracy' if knobs.views == 'siblings' else 'in-batch accuracy',
    }
    if contrasted
    else {}
  )
  return System(init, loss, embed, shown)
