"""RIP, Condenser, coCondenser, ICT and plain MLM against float64 numpy, on 1 and 8 devices."""

import dataclasses

import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.models import heads, hub, model_folders, scratch
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.head_specs import Head
from dprjax.papers.condenser import losses, pretrain
from dprjax.text import vocabularies
from dprjax.text.vector_spec import same_length
from dprjax.training.method import Parts
from tests import gradients, reference, starts
from tests.gradients import make_mesh
from tests.options import check_options, with_options
from tests.refusals import refused

ROWS, LENGTHS = (
  24,
  {'first': 9, 'second': 12},
)  # three passages a device: the texts of a device are no power of two
SENTENCES = [
  'the cat sat on the mat',
  'the dog sat on the log',
  'a cat and a dog met at the mat',
] * 20

METHODS = {
  'mlm': {},
  'condenser': {'pretrain__head_layers': 2, 'pretrain__skip_from': 1},
  'condenser alone': {'pretrain__head_layers': 1, 'pretrain__late_mlm': False},
  'cocondenser': {
    'pretrain__views': 'siblings',
    'pretrain__unit': 'span',
    'pretrain__head_layers': 2,
  },
  'rip': {'pretrain__views': 'siblings'},
  'rip on prompts': {
    'pretrain__views': 'siblings',
    'prompt__length': 3,
    'trainable': ('prompt/.*', 'head/.*'),
  },
  'rip, weighed': {
    'pretrain__views': 'siblings',
    'pretrain__mlm_weight': 0.3,
    'pretrain__contrast_weight': 0.7,
    'temperature': 0.2,
    'normalize': True,
    'pooling': 'mean',
  },
  'ict': {'pretrain__views': 'ict', 'pretrain__mlm_weight': 0.0, 'trainable': ('backbone/.*',)},
  'ict with mlm': {'pretrain__views': 'ict'},
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return vocabularies.train_wordpiece(SENTENCES, 60, tmp_path_factory.mktemp('vocabulary'))


def model_of(tokenizer):
  return EncoderConfig('bert', tokenizer.vocab_size, 8, 3, 2, 16, max_positions=16)


def make_config(**changes):
  return with_options(
    **{
      'method': 'pretrain',
      'trainable': ('backbone/.*', 'head/.*'),
      'prompt__dropout': 0.0,
      'backbone__dropout': 0.0,
      'batch_size': ROWS,
    }
    | changes
  )


def make_batch(tokenizer, rows=ROWS, lengths=LENGTHS, seed=1):
  rng = np.random.default_rng(seed)
  batch = {'passage_index': rng.permutation(1000)[:rows].astype(np.int32)}
  for view, length in lengths.items():
    real = rng.integers(3, length + 1, size=rows)
    places = np.arange(length)[None, :]
    mask = places < real[:, None]
    tokens = np.where(
      mask, rng.integers(5, tokenizer.vocab_size, size=mask.shape), tokenizer.pad_id
    )
    tokens[:, 0] = tokenizer.opening[0]
    tokens[np.arange(rows), real - 1] = tokenizer.closing[0]
    inside = mask & (places > 0) & (places < real[:, None] - 1)
    words = np.where(inside, np.cumsum(rng.random(mask.shape) < 0.7, axis=1), -1)
    batch |= {
      f'{view}_tokens': tokens.astype(np.int32),
      f'{view}_mask': mask,
      f'{view}_words': words.astype(np.int32),
    }
  return batch


def make_params(method, model, std=0.4):
  start = starts.init_params(model, 3)
  params = method.init(Parts(start), jax.random.key(9))
  # Larger weights than the initial ones of BERT, so that every term matters.
  return {
    name: np.asarray(leaf)
    * np.float32(std / 0.02 if name.endswith(('kernel', 'embedding', 'prefix')) else 1.0)
    for name, leaf in tree.flatten(params).items()
  }


def masked_views(config, tokenizer, batch, key):
  """The tokens that the loss predicts, drawn as it is drawn there; test_masking.py
  sees to the drawing itself.
  """
  ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids).astype(np.int32)
  found = {}
  for number, view in enumerate(pretrain.VIEWS[config.pretrain.views]):
    mask_key, _ = jax.random.split(jax.random.fold_in(key, number))
    found[view] = jax.tree.map(
      np.asarray,
      losses.mask_tokens(
        mask_key,
        jax.numpy.asarray(batch[f'{view}_tokens']),
        jax.numpy.asarray(batch[f'{view}_words']),
        rate=config.pretrain.mask_rate,
        mask_id=tokenizer.mask_id,
        replacements=jax.numpy.asarray(ordinary),
      ),
    )
  return found


def reference_metrics(config, tokenizer, params, batch, masked):
  model, settings = model_of(tokenizer), config.pretrain
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  prefix = params['prompt']['prefix'] if 'prompt' in params else None
  words = params['backbone']['embeddings']['word']['embedding']
  mlm, condenser, count, right, vectors = 0.0, 0.0, 0.0, 0.0, []
  for view, some in masked.items():
    mask = batch[f'{view}_mask']
    tokens = some.tokens if settings.mlm_weight else batch[f'{view}_tokens']
    states = reference.states(model, params['backbone'], tokens, mask, prefix)
    vectors.append(reference.pool(states[-1], mask, config.pooling, config.normalize))
    if settings.mlm_weight:
      late, weights, good = reference.mlm_loss(
        model, params['head']['mlm'], words, states[-1], *some[1:]
      )
      mlm, count = mlm + late, count + weights
      if settings.head_layers:
        early = states[settings.skip_from or model.num_layers // 2]
        skipped = np.concatenate([states[-1][:, :1], early[:, 1:]], axis=1)
        head = reference.layers(model, params['head']['condenser'], skipped, mask)[-1]
        more, _, good = reference.mlm_loss(model, params['head']['mlm'], words, head, *some[1:])
        condenser += more
      right += good
  expected = {'loss': 0.0}
  if settings.mlm_weight:
    assert count > 2 * ROWS / 3  # most rows have a word to hide
    expected['mlm_accuracy'] = right / count
    if settings.late_mlm:
      expected['mlm'] = mlm / count
    if settings.head_layers:
      expected['condenser'] = condenser / count
    expected['loss'] += settings.mlm_weight * (
      expected.get('mlm', 0.0) + expected.get('condenser', 0.0)
    )
  if settings.views == 'siblings':
    expected['accuracy'] = reference.sibling_loss(*vectors, config.temperature)[1]
    expected['contrast'] = reference.sibling_loss(*vectors, config.temperature)[0]
  elif settings.views == 'ict':
    index = batch['passage_index'][:, None]
    expected['contrast'], expected['accuracy'], _ = reference.loss(
      vectors[0], vectors[1][:, None], index, index, config.temperature
    )
  if settings.views != 'one':
    expected['loss'] += settings.contrast_weight * expected['contrast']
  return expected


ONE, EIGHT, MESH = {'data': 1}, {'data': 8}, {'data': 2, 'fsdp': 2, 'model': 2}
LOSSES = ('mlm', 'condenser', 'cocondenser', 'rip', 'ict')
CASES = [(method, ONE, 1) for method in LOSSES]
CASES += [(method, EIGHT, 3) for method in LOSSES if method != 'cocondenser']
# Other weights and parameters; and siblings, heads and all parameters on a mesh of eight.
CASES += [
  ('condenser alone', ONE, 1),
  ('ict with mlm', ONE, 1),
  ('rip on prompts', EIGHT, 1),
  ('rip, weighed', EIGHT, 3),
  ('cocondenser', MESH, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('method', 'sizes', 'chunks'),
  CASES,
  ids=str,
)
def test_loss_and_gradient_equal_numpy(tokenizer, method, sizes, chunks):
  config = make_config(**METHODS[method], grad_cache=chunks)
  batch, key = make_batch(tokenizer), jax.random.key(5)
  mesh, model = make_mesh(sizes), model_of(tokenizer)
  method = pretrain.build(config, model, mesh, tokenizer)
  params = make_params(method, model)
  value, metrics, gradient = gradients.value_and_gradient(
    method, params, config.trainable, mesh, batch, key
  )
  masked = masked_views(config, tokenizer, batch, key)

  def expected(params):
    return reference_metrics(config, tokenizer, params, batch, masked)

  assert metrics | {'loss': value} == pytest.approx(expected(params), rel=1e-5)
  gradients.assert_slope(lambda params: expected(params)['loss'], params, gradient)


@pytest.mark.slow
def test_heads_that_are_there_are_taken(tokenizer):
  model = model_of(tokenizer)
  start = scratch.init_params(model, jax.random.key(0))
  method = pretrain.build(
    make_config(pretrain__head_layers=2), model, make_mesh({'data': 1}), tokenizer
  )
  fresh = method.init(Parts(start), jax.random.key(1))

  def parts(split):
    settings = {'condenser': {'split': split}}
    heads = {name: Head(head, settings.get(name, {})) for name, head in fresh['head'].items()}
    return Parts(start, heads)

  again = method.init(parts(1), jax.random.key(2))
  jax.tree.map(np.testing.assert_array_equal, again['head'], fresh['head'])
  with refused('config.pretrain.head_layers', '3'):
    pretrain.build(
      make_config(pretrain__head_layers=3), model, make_mesh({'data': 1}), tokenizer
    ).init(parts(1), jax.random.key(2))
  with refused('config.pretrain.skip_from', '1'):
    method.init(parts(2), jax.random.key(2))


def test_a_head_that_was_trained_alone_is_written_beside_its_backbone(tokenizer, tmp_path):
  model = model_of(tokenizer)
  start, head = starts.init_params(model, 3), heads.init_mlm_head(model, jax.random.key(0))
  model_folders.save_backbone(tmp_path / 'start', model, start)
  digest = hub.load_backbone(tmp_path / 'start').sha256
  given = hub.Backbone(model, start, digest, 'x', same_length(16), {}, {'mlm': Head(head, {})})
  trained = {'head/mlm/dense/bias': np.full(8, 2, np.float32)}
  product = pretrain.export(make_config(trainable=('head/.*',)), tmp_path, given, trained)
  model_folders.save_backbone(tmp_path / 'out', model, **product.encoders[''])
  written = hub.load_backbone(tmp_path / 'out', heads=('mlm',))
  found = written.heads['mlm'].params
  assert written.sha256 == digest
  np.testing.assert_array_equal(found['dense']['bias'], 2)
  np.testing.assert_array_equal(found['dense']['kernel'], head['dense']['kernel'])


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'pretrain__mlm_weight': 0.0}, ('config.pretrain', 'mlm_weight')),
    (
      {'pretrain__head_layers': 2, 'pretrain__mlm_weight': 0.0, 'pretrain__views': 'siblings'},
      'config.pretrain.head_layers',
    ),
    ({'pretrain__views': 'siblings', 'batch_size': 1}, 'config.batch_size'),
  ],
)
def test_a_option_that_cannot_be_is_named(tokenizer, settings, words):
  with refused(words):
    config = make_config(**settings)
    check_options(config)
    pretrain.build(config, model_of(tokenizer), make_mesh({'data': 1}), tokenizer)


def test_a_tokenizer_without_a_mask_token(tokenizer):
  maskless = dataclasses.replace(tokenizer, mask_id=None)
  with refused('tokenizer', 'mask'):
    pretrain.build(make_config(), model_of(tokenizer), make_mesh({'data': 1}), maskless)


@pytest.mark.parametrize(
  ('settings', 'option'),
  [
    ({}, 'config.pooling'),
    ({'pooling': 'mean', 'pretrain__head_layers': 1}, 'config.pretrain.head_layers'),
  ],
)
def test_the_first_state_needs_a_token_before_the_text(tokenizer, settings, option):
  decoder = dataclasses.replace(tokenizer)
  decoder.__dict__['_around_one'] = ((), tokenizer.closing)
  devices = make_mesh({'data': 1})
  with refused(option):
    pretrain.build(make_config(**settings), model_of(tokenizer), devices, decoder)
  pretrain.build(make_config(pooling='mean'), model_of(tokenizer), devices, decoder)
