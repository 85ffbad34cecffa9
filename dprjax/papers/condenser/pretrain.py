"""The method ``pretrain``: ``config.pretrain`` selects the texts and up to three loss terms.

A text is encoded once, masked, for all terms, as in coCondenser code (DPTDR leaves it open).
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import files, mesh
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.losses import contrastive
from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models import encoder, heads, hub
from dprjax.models.adapter import SUBTREE, Adapter
from dprjax.models.embed import of_states
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.condenser import losses, segments, views
from dprjax.papers.condenser.segments import find_files, read_documents
from dprjax.text import docstrings, vector_spec
from dprjax.text.batches import longest_bucket
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import dual_encoder
from dprjax.training.method import (
  BatchShapes,
  DataSource,
  Method,
  Model,
  Parts,
  Product,
  TrainingData,
)
from dprjax.training.retrieval_data import cache_folder, chance, shorten

VIEWS = {'one': ('first',), 'siblings': ('first', 'second'), 'ict': ('first', 'second')}


class _Sums(NamedTuple):
  """Sums over masked tokens: cross-entropies, and correct predictions of the top head."""

  late: Float[Array, '']
  right: Float[Array, '']
  head: Float[Array, '']
  masked: Float[Array, '']


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  """The losses of ``config.pretrain``.

  Means are over all masked tokens and texts of an update, whatever its devices and chunks.
  """
  settings = config.pretrain
  contrasted = settings.views != 'one' and settings.contrast_weight > 0
  mlm = settings.mlm_weight > 0
  condenser = settings.head_layers > 0
  if not (contrasted or (mlm and (condenser or settings.late_mlm))):
    raise InputError(
      'config.pretrain: nothing to learn; set mlm_weight with late_mlm or head_layers, or '
      "contrast_weight with views='siblings' or 'ict'"
    )
  if contrasted:
    contrastive.check_update(config)
  if mlm and (model.family.mlm_tensors is None or tokenizer.mask_id is None):
    raise InputError(
      'config.pretrain.mlm_weight: masked language modelling needs a masked-LM head and a mask '
      f'token, which {model.model_type} models with this tokenizer do not have; set 0 to train the '
      'contrastive loss only, or choose another backbone'
    )
  skip_from, spec = _skip_from(config, model), vector_spec.of_config(config)
  if condenser and not 0 < skip_from < model.num_layers:
    raise InputError(
      f'config.pretrain.skip_from: {skip_from} must be between 0 and the {model.num_layers} layers'
    )
  dual_encoder.check_pooling(config, model)
  if (condenser or config.pooling == 'cls') and not tokenizer.opening:
    raise InputError(
      f'{"config.pretrain.head_layers" if condenser else "config.pooling"}: the state of a special '
      'token before the text is needed, and this tokenizer has none; choose another backbone'
      f'{"" if condenser else " or pooling, such as mean"}'
    )
  mask_id, everything = tokenizer.mask_id, np.arange(tokenizer.vocab_size, dtype=np.int32)
  ordinary = np.setdiff1d(everything, tokenizer.special_ids).astype(np.int32)
  options = dual_encoder.encoder_options(config, devices)
  chunks = config.grad_cache
  names, late_mlm = VIEWS[settings.views], mlm and settings.late_mlm

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    prompt_key, mlm_key, condenser_key = jax.random.split(key, 3)
    params: dict[str, Any] = {'backbone': parts.encoder}
    params |= dual_encoder.init_adapter(config, model, parts, prompt_key)
    if mlm:
      there = parts.heads.get('mlm')
      params['head'] = {'mlm': there.params if there else heads.init_mlm_head(model, mlm_key)}
    if condenser:
      there = parts.heads.get('condenser')
      if there:
        trained = jax.tree.leaves(there.params)[0].shape[0], there.settings['split']
        if trained != (settings.head_layers, skip_from):
          raise InputError(
            'config.pretrain.head_layers, config.pretrain.skip_from: '
            f'{settings.head_layers, skip_from}, but {trained} in the head of the backbone'
          )
      params['head']['condenser'] = (
        there.params
        if there
        else heads.init_condenser_head(model, condenser_key, settings.head_layers)
      )
    return params

  def encode_tokens(
    params: Params, adapter: Adapter | None, tokens: Array, mask: Array, key: Array | None
  ) -> tuple[Array | None, Array]:
    """Early states, if needed by the Condenser head, and late states."""
    shared: dict[str, Any] = {
      'adapter': adapter,
      'options': options if key is None else dual_encoder.example_dropout(config, adapter, options),
      'dropout_key': key,
    }
    if condenser and key is not None:  # not for an evaluation
      return encoder.encode_early_late(model, params['backbone'], tokens, mask, skip_from, **shared)
    return None, encoder.encode(model, params['backbone'], tokens, mask, **shared)

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    adapter = dual_encoder.expand(config, model, params)[kind]
    hidden = encode_tokens(params, adapter, tokens, mask, None)[1]
    return of_states(model, params['backbone'], hidden, mask, spec, adapter=adapter)

  def encode(
    params: Params, adapter: Adapter | None, rows: Any, key: Array | None
  ) -> tuple[Float[Array, 'B H'], _Sums]:
    tokens, mask, masked = rows
    assert key is not None
    backbone_key, head_key, _ = jax.random.split(key, 3)
    early, late = encode_tokens(params, adapter, tokens, mask, backbone_key)
    sums = _Sums(*(jnp.zeros((), jnp.float32),) * 4)
    if mlm:
      words = params['backbone']['embeddings']['word']['embedding']

      def mlm_loss(states: Array) -> tuple[Array, Array]:
        targets = (masked.positions, masked.targets, masked.weights)
        return losses.mlm_loss(
          model, params['head']['mlm'], words, states, *targets, dtype=options.dtype
        )

      sums = sums._replace(masked=jnp.sum(masked.weights))
      if late_mlm:
        late_loss, right = mlm_loss(late)
        sums = sums._replace(late=late_loss, right=right)
      if early is not None:
        head_loss, right = mlm_loss(
          losses.condenser_states(
            model,
            params['head']['condenser'],
            late,
            early,
            mask,
            options=options,
            dropout_key=head_key,
          )
        )
        sums = sums._replace(head=head_loss, right=right)
    return of_states(model, params['backbone'], late, mask, spec, adapter=adapter), sums

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    assert key is not None
    vectors, same, total = {}, {}, _Sums(*(jnp.zeros((), jnp.float32),) * 4)
    for number, view in enumerate(names):
      mask_key, encode_key = jax.random.split(jax.random.fold_in(key, number))
      tokens, mask, masked = batch[f'{view}_tokens'], batch[f'{view}_mask'], None
      same[view] = losses.text_keys(tokens, mask)
      if mlm:
        assert mask_id is not None
        # Masks must not depend on the number of chunks.
        masked = losses.mask_tokens(
          mask_key,
          tokens,
          batch[f'{view}_words'],
          rate=settings.mask_rate,
          mask_id=mask_id,
          replacements=jnp.asarray(ordinary),
        )
        tokens = masked.tokens
      prompt_key = jax.random.fold_in(encode_key, number)
      adapter = dual_encoder.expand(config, model, params)['passage']
      adapter = dual_encoder.batch_dropout(config, adapter, prompt_key)
      vectors[view], sums = map_chunks(
        functools.partial(encode, params, adapter),
        (tokens, mask, masked),
        encode_key,
        chunks,
        devices,
      )
      total = _Sums(*(a + b for a, b in zip(total, sums, strict=True)))
    value = jnp.zeros((), jnp.float32)
    metrics = {}
    if mlm:
      masked_tokens = jnp.maximum(total.masked, 1)
      metrics = {'mlm_accuracy': total.right / masked_tokens}
      if late_mlm:
        metrics['mlm'] = total.late / masked_tokens
        value += settings.mlm_weight * metrics['mlm']
      if condenser:
        metrics['condenser'] = total.head / masked_tokens
        value += settings.mlm_weight * metrics['condenser']
    if contrasted:
      first, second = vectors['first'], vectors['second']
      if settings.views == 'siblings':
        texts = jnp.stack([first, second], axis=1).reshape(2 * len(first), -1)
        keys = jnp.stack([same['first'], same['second']], axis=1).reshape(-1)
        ranking = losses.nt_xent(texts, devices, temperature=config.temperature, keys=keys)
      else:
        index = same['second'][:, None]
        ranking = contrastive.info_nce(
          first,
          second[:, None],
          index,
          jnp.full_like(index, -1),
          devices,
          temperature=config.temperature,
          query_index=same['first'],
        )
      metrics['contrast'], metrics['accuracy'] = jnp.mean(ranking.loss), jnp.mean(ranking.accuracy)
      value += settings.contrast_weight * metrics['contrast']
    return value, metrics

  shown = {'condenser': 'condenser'} if condenser else {}
  shown |= {'mlm': 'mlm'} if late_mlm else {}
  shown |= {'mlm_accuracy': 'mlm accuracy'} if mlm else {}
  if contrasted:
    accuracy = 'sibling accuracy' if settings.views == 'siblings' else 'in-batch accuracy'
    shown |= {'contrast': 'contrast', 'accuracy': accuracy}
  return Model(init, loss, embed, shown)


def _skip_from(config: ConfigDict, model: EncoderConfig) -> int:
  return config.pretrain.skip_from or model.num_layers // 2


def find_data(
  section: ConfigDict, config: ConfigDict, workdir: epath.Path, devices: Mesh
) -> DataSource:
  """Plain text: the files and folders in ``config.data.dir``, separated by commas."""
  if section.format == 'docstrings':
    folder = workdir / 'data'
    if not folder.exists():
      docstrings.build(folder, packages=section.dir.split(','))
    paths = [folder / 'corpus.jsonl']
  elif section.format in ('auto', 'corpus'):
    paths = [files.existing(path.strip(), 'text') for path in section.dir.split(',')]
  else:
    raise InputError(
      f"config.data.format: expected 'corpus' or 'docstrings', not {section.format!r}"
    )

  def read() -> Iterator[str]:
    return (document.text for document in read_documents(paths, ReadReport()))

  def open_cache(tokenizer: Tokenizer, model: EncoderConfig) -> TrainingData:
    settings = config.pretrain
    dual_encoder.check_length(config, model, 'config.pretrain.max_length', settings.max_length)
    texts = segments.build_documents(
      paths,
      tokenizer,
      cache_folder(section, workdir) / 'documents',
      passage_length=settings.passage_length,
      language=settings.language,
      process_index=jax.process_index(),
    )
    update = config.batch_size
    rank, count = mesh.batch_rank(devices)
    dataset, eligible = views.make_view_batches(
      texts,
      tokenizer,
      batch_size=update,
      views=settings.views,
      unit=settings.unit,
      span_length=settings.span_length,
      max_length=settings.max_length,
      buckets=settings.buckets,
      seed=config.seed,
      process_index=rank,
      process_count=count,
    )

    def ids(batch: Mapping[str, np.ndarray]) -> str:
      return f'passages {shorten(texts.passage_ids(np.asarray(batch["passage_index"])))}'

    description = f'{eligible:,} of {counted(texts.num_passages, "passages")}'
    if settings.views != 'one':
      negatives = 2 * update - 2 if settings.views == 'siblings' else update - 1
      description += f'; {chance(negatives, "text")}'
    return TrainingData(dataset, 'passages', description, ids, evaluation=None)

  roles = {
    f'text {number} ({path.name})': path
    for number, path in enumerate(find_files(paths, ReadReport()), start=1)
  }
  return DataSource(read, open_cache, roles)


def export(
  config: ConfigDict, _: epath.Path, backbone: hub.Backbone, trained: Mapping[str, np.ndarray]
) -> Product:
  """The encoder with its heads for further pretraining, or only a prompt."""
  length = config.pretrain.max_length
  spec = vector_spec.of_config(config).replace(query_max_length=length, passage_max_length=length)
  prompt = dual_encoder.export_prompt(config, backbone, trained, spec)
  if dual_encoder.trains(trained, SUBTREE) and not dual_encoder.trains(trained, 'backbone'):
    return Product({}, *prompt)
  settings = {'condenser': {'split': _skip_from(config, backbone.config)}}
  # Only settings that differ from those of a bare folder of dprjax need files.
  longest, folder_spec = backbone.config.max_tokens, None
  if (spec.pooling, spec.normalize) != ('cls', False):
    folder_spec = vector_spec.same_length(longest, pooling=spec.pooling, normalize=spec.normalize)
  checkpoint = {
    'params': dual_encoder.encoder_params(backbone, trained),
    'heads': dual_encoder.export_heads(backbone, trained, settings),
    'spec': folder_spec,
  }
  return Product({'': checkpoint}, *prompt)


def shapes(config: ConfigDict, _: EncoderConfig, tokenizer: Tokenizer) -> BatchShapes:
  settings = config.pretrain
  size = config.batch_size
  spans = settings.views == 'siblings' and settings.unit == 'span'
  longest = settings.max_length
  if spans:
    longest = min(longest, settings.span_length + tokenizer.num_specials)
  padded = longest_bucket(longest, settings.buckets, 'config.pretrain.buckets')
  arrays = {'passage_index': jax.ShapeDtypeStruct((size,), np.int32)}
  views = VIEWS[settings.views]
  for view in views:
    for name, dtype in (('tokens', np.int32), ('mask', np.bool_), ('words', np.int32)):
      arrays[f'{view}_{name}'] = jax.ShapeDtypeStruct((size, padded), dtype)
  programs = sum(bucket <= padded for bucket in settings.buckets) ** len(views)
  texts = {'passages': size, 'texts': size * len(views)}
  return BatchShapes(arrays, ((size, padded),) * len(views), texts, programs, settings.max_length)


METHOD = Method(
  build,
  find_data,
  export,
  parts=('mlm', 'condenser'),
  options={build: ('grad_cache', 'prompt.kind', 'prompt.length', 'prompt.init_text')},
  requires={'data.query_prefix': '', 'data.passage_prefix': ''},
  shapes=shapes,
)
