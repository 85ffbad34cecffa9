import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import embed, encoder, hub, layers, model_folders, scratch
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderOptions
from tests.refusals import refused

LENGTHS = np.array([7, 4, 1, 6])
# Compiled once for each shape and set of options, over all tests.
encode = jax.jit(encoder.encode, static_argnames=('config', 'options'))


@pytest.fixture
def inputs(small):
  config, _ = small
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(1, config.vocab_size, (4, 7)), jnp.int32)
  return tokens, jnp.asarray(np.arange(7)[None] < LENGTHS[:, None])


def prompts(config, count, length=5, seed=1):
  shape = (count, config.num_layers, 2, length, config.num_heads, config.head_dim)
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def prefix(prompt, shift=False):
  """A shared prompt [L, 2, P, N, D], or one for each example [B, L, 2, P, N, D]."""
  if prompt is None:
    return None
  return Prefix(
    prompt if prompt.ndim == 5 else jnp.moveaxis(prompt, 0, 1),
    shift=prompt.shape[-3] if shift else 0,
  )


def bank_of(prompts, lengths=None, shift=False):
  """A bank of prompts [K, L, 2, P, N, D], by default all of the length P."""
  lengths = [prompts.shape[3]] * len(prompts) if lengths is None else lengths
  lengths = jnp.array(lengths, jnp.int32)
  return Prefix(jnp.moveaxis(prompts, 0, 1), lengths, lengths * jnp.int32(shift))


def golden_loss(hidden, mask):
  """The scalar whose gradient make_encoder_golden.py stored."""
  weights = np.cos(np.arange(hidden.size, dtype=np.float32)).reshape(hidden.shape)
  return jnp.sum(hidden * weights * mask[:, :, None].astype(np.float32))


@pytest.mark.parametrize(
  ('model_type', 'layers'),
  [
    ('roberta', 1),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [('bert', 1), ('bert', 3), ('roberta', 3), ('xlm-roberta', 1), ('xlm-roberta', 3)]
    ),
  ],
)
def test_equals_transformers(model_type, layers, golden, write_checkpoint):
  arrays = golden(model_type)
  backbone = hub.load_backbone(write_checkpoint(model_type, layers))
  tokens, mask = arrays['tokens'], arrays['mask']
  prompt = arrays[f'{layers}/prompt'].astype(np.float32)
  outputs = {}
  for case, shift in (('plain', False), ('prefix', False), ('shifted', True)):

    def loss(prompt, shift=shift):
      hidden = encode(
        backbone.config,
        backbone.params,
        tokens,
        mask,
        adapter=prefix(prompt, shift),
        token_types=arrays['token_types'],
      )
      return golden_loss(hidden, mask), hidden

    if case == 'plain':
      outputs[case] = loss(None)[1]
    else:
      (_, outputs[case]), gradient = jax.value_and_grad(loss, has_aux=True)(prompt)
      expected = arrays[f'{layers}/{case}/gradient']
      np.testing.assert_allclose(
        gradient, expected, rtol=0, atol=2e-5 * max(1, np.abs(expected).max())
      )
    np.testing.assert_allclose(
      outputs[case][mask], arrays[f'{layers}/{case}/hidden'][mask], rtol=0, atol=2e-5
    )
  # The three cases differ by far more than the tolerance.
  assert np.abs(outputs['plain'] - outputs['prefix'])[mask].max() > 0.1
  assert np.abs(outputs['shifted'] - outputs['prefix'])[mask].max() > 0.1


def test_camembert_is_roberta_by_another_name(golden, write_checkpoint, tmp_path):
  arrays, named = golden('roberta'), {'model_type': 'camembert'}
  backbone = hub.load_backbone(write_checkpoint('roberta', 1, prefix='roberta.', change=named))
  tokens, mask = arrays['tokens'], arrays['mask']
  hidden = encode(backbone.config, backbone.params, tokens, mask, token_types=arrays['token_types'])
  expected = arrays['1/plain/hidden'][mask]
  np.testing.assert_allclose(np.asarray(hidden)[mask], expected, rtol=0, atol=2e-5)
  model_folders.save_backbone(tmp_path / 'saved', backbone.config, backbone.params)
  assert hub.read_shape(tmp_path / 'saved') == backbone.config
  written = json.loads((tmp_path / 'saved' / 'config.json').read_text())
  assert written['architectures'] == ['CamembertModel']


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'remat': True, 'unroll': 3}], ids=str)
def test_remat_and_unroll_change_nothing(small, inputs, options):
  config, params = small
  tokens, mask = inputs

  def run(options):
    def loss(prompt):
      hidden = encode(config, params, tokens, mask, adapter=prefix(prompt), options=options)
      return golden_loss(hidden, mask), hidden

    return jax.jit(jax.grad(loss, has_aux=True))(prompts(config, 1)[0])

  gradient, hidden = run(EncoderOptions())
  other_gradient, other_hidden = run(EncoderOptions(**options))
  np.testing.assert_allclose(other_hidden, hidden, atol=2e-6, rtol=0)
  np.testing.assert_allclose(other_gradient, gradient, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('how', ['shared', 'bank'])
def test_fused_attention_equals_the_plain_one(small, inputs, how):
  config, params = small
  tokens, mask = inputs
  some = prompts(config, len(tokens))
  given = some[0] if how == 'shared' else some
  ids = jnp.array([2, 0, 3, 1], jnp.int32)
  make = prefix if how == 'shared' else lambda some: bank_of(some).choose(ids)

  def run(**options):
    def loss(params, given):
      adapter, how = make(given), EncoderOptions(**options)
      hidden = encode(config, params, tokens, mask, adapter=adapter, options=how)
      return golden_loss(hidden, mask), hidden

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, given)

  (gradients, hidden), (others, other) = run(), run(attention='fused')
  np.testing.assert_allclose(np.asarray(other)[mask], np.asarray(hidden)[mask], atol=5e-6, rtol=0)
  for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=5e-5 * max(1, np.abs(theirs).max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize('attention', ['plain', 'fused'])
def test_each_example_has_its_own_dropout_of_a_shared_prompt(small, inputs, attention):
  config, params = small
  tokens, mask = (jnp.repeat(rows[:1], 4, axis=0) for rows in inputs)
  options = EncoderOptions(attention=attention, dropout=0.0, prompt_dropout=0.5)
  shared = prompts(config, 1)[0]

  def run(key, prompt=shared):
    hidden = encode(
      config, params, tokens, mask, adapter=prefix(prompt), options=options, dropout_key=key
    )
    return hidden[:, 0]

  one, again, bare = (run(key) for key in (jax.random.key(0), jax.random.key(0), None))
  np.testing.assert_array_equal(one, again)
  apart = np.abs(one[:, None] - one[None]).max(-1)
  assert (apart[~np.eye(4, dtype=bool)] > 0.01).all()
  np.testing.assert_array_equal(bare, np.broadcast_to(bare[:1], bare.shape))
  # On the average each sees the prompt as it is, to the first order.
  keys = jax.random.split(jax.random.key(1), 64)
  small_prompt = 0.05 * shared
  mean = jnp.mean(jnp.stack([run(key, small_prompt) for key in keys]), axis=(0, 1))
  gone = run(None, jnp.zeros_like(small_prompt))[0]
  whole = run(None, small_prompt)[0]
  assert np.abs(mean - whole).max() < 0.25 * np.abs(gone - whole).max()


def products_of(jaxpr):
  """The matrix products of a program, those of its loops too."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield equation
    for inner in jax.tree.leaves(
      equation.params, is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr)
    ):
      if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
        yield from products_of(getattr(inner, 'jaxpr', inner))


def test_attention_scores_are_float32_under_bfloat16(small, inputs):
  # Large and of mixed signs: rounded to bfloat16 they would be wrong by 0.5 and more.
  draw = np.random.default_rng(0)
  query, key = (
    jnp.asarray(16 * draw.normal(size=(2, 3, length, 32)), jnp.bfloat16) for length in (5, 7)
  )
  exact = np.einsum('bntd,bnsd->bnts', np.asarray(query, np.float64), np.asarray(key, np.float64))
  exact /= 32**0.5  # of which no multiple is exact in bfloat16
  found = layers.attention_scores(query, key)
  assert found.dtype == jnp.float32
  assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()
  assert np.abs(exact.astype(jnp.bfloat16).astype(np.float64) - exact).max() > 0.5
  # And these belong to the encoder, with a prompt too: no product of the size of scores is rounded.
  config, params = small
  tokens, mask = inputs
  prompt = prompts(config, 1)[0]
  half = EncoderOptions(jnp.bfloat16)
  program = jax.make_jaxpr(
    lambda params: encode(config, params, tokens, mask, adapter=prefix(prompt), options=half)
  )(params)
  seen = tokens.shape[1] + prompt.shape[2]
  kinds = [
    (one.outvars[0].aval.shape, str(one.outvars[0].aval.dtype))
    for one in products_of(program.jaxpr)
  ]
  scores = (len(tokens), config.num_heads, tokens.shape[1], seen)
  assert (scores, 'float32') in kinds and (scores, 'bfloat16') not in kinds
  assert any(dtype == 'bfloat16' for _, dtype in kinds)  # the dense layers


@pytest.mark.slow
def test_prompt_gradient_computes_no_weight_gradients(small):
  options = EncoderOptions(products=jnp.bfloat16)  # mixed
  config = dataclasses.replace(small[0], hidden_size=128, intermediate_size=512)
  params = scratch.init_params(config, jax.random.key(0))
  tokens = jnp.ones((8, 16), jnp.int32)
  prompt = prompts(config, 1)[0]

  def loss(prompt, params):
    return encode(config, params, tokens, tokens > 0, adapter=prefix(prompt), options=options).var()

  def flops(argnums):
    return (
      jax.jit(jax.grad(loss, argnums=argnums))
      .lower(prompt, params)
      .compile()
      .cost_analysis()['flops']
    )

  assert flops(0) < 0.75 * flops((0, 1))


def test_exceeding_the_positions_names_the_numbers(small, inputs):
  config, params = small
  tokens = jnp.ones((1, 20), jnp.int32)
  prompt = prompts(config, 1)[0]
  encode(config, params, tokens, tokens > 0, adapter=prefix(prompt))
  with refused('20', '24'):
    encoder.encode(config, params, tokens, tokens > 0, adapter=prefix(prompt, shift=True))
  roberta = dataclasses.replace(config, model_type='roberta', pad_token_id=4)
  assert (roberta.first_position, roberta.max_tokens) == (5, 19)
  with refused('20', '19'):
    encode(roberta, params, tokens, tokens > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
  'model_type',
  [
    'bert',
    pytest.param('roberta', marks=pytest.mark.slow),
    pytest.param('xlm-roberta', marks=pytest.mark.slow),
  ],
)
def test_early_and_late_states_and_attention_equal_transformers(model_type, golden, write_heads):
  arrays = golden(f'heads_{model_type}')
  backbone = hub.load_backbone(write_heads(model_type))
  config, params, tokens, mask = backbone.config, backbone.params, arrays['tokens'], arrays['mask']

  @jax.jit
  def run():
    states = encoder.encode_early_late(
      config, params, tokens, mask, 1, token_types=arrays['token_types']
    )
    prompts = (None, arrays['prompt'].astype(np.float32))
    return states, [
      encoder.first_token_attention(config, params, tokens, mask, adapter=prefix(prompt))
      for prompt in prompts
    ]

  (early, late), (attention, prompt_attention) = run()
  np.testing.assert_allclose(early[mask], arrays['early'][mask], rtol=0, atol=2e-5)
  np.testing.assert_allclose(late[mask], arrays['late'][mask], rtol=0, atol=2e-5)
  assert early.dtype == late.dtype == jnp.float32
  assert attention.shape == (3, 3, 5, 12) and prompt_attention.shape == (3, 3, 5, 16)
  np.testing.assert_allclose(attention, arrays['attention'], rtol=0, atol=2e-5)
  np.testing.assert_allclose(prompt_attention, arrays['prompt_attention'], rtol=0, atol=2e-5)
  # Padding gets nothing, the prompt something.
  assert (
    attention[:, ~mask[:, None].repeat(5, 1)].max() == 0
    and prompt_attention[..., :4].sum(-1).max() > 0.5
  )


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['bert', 'roberta', 'xlm-roberta'])
def test_a_padding_token_in_a_text_is_as_in_transformers(model_type, golden, write_checkpoint):
  arrays = golden('sentence_files')
  backbone = hub.load_backbone(write_checkpoint(model_type, 3))
  tokens = arrays[f'{model_type}/tokens']
  assert (tokens[0] == backbone.config.pad_token_id).sum() == 3
  hidden = encode(backbone.config, backbone.params, tokens, np.ones(tokens.shape, bool))
  np.testing.assert_allclose(hidden, arrays[f'{model_type}/hidden'], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_equals_transformers_on_minilm(golden, minilm):
  arrays = golden('minilm')
  backbone = hub.load_backbone(minilm)
  mask, prompt = arrays['mask'], arrays['prompt'].astype(np.float32)

  def run(prompt, shift):
    hidden = encode(
      backbone.config, backbone.params, arrays['tokens'], mask, adapter=prefix(prompt, shift)
    )
    return golden_loss(hidden, mask), hidden

  for case, shift in (('plain', False), ('prefix', False), ('shifted', True)):
    hidden = run(prompt if case != 'plain' else None, shift)[1]
    np.testing.assert_allclose(
      hidden[:, :, ::16][mask], arrays[f'{case}/hidden'][mask], rtol=0, atol=2e-5
    )
    embedding = embed.of_states(backbone.config, {}, hidden, mask, backbone.spec)
    np.testing.assert_allclose(embedding, arrays[f'{case}/embedding'], rtol=0, atol=2e-6)
    if case != 'plain':
      gradient = jax.grad(lambda p, s=shift: run(p, s)[0])(prompt)[..., ::3, ::4]
      expected = arrays[f'{case}/gradient']
      np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_ids_out_of_range_are_noticed(small, inputs):
  config, params = small
  tokens, mask = inputs
  assert np.isnan(encode(config, params, tokens.at[0, 0].set(50), mask)[0]).all()
  bad = jnp.array([0, 1, 2, 3], jnp.int32)
  hidden = encode(config, params, tokens, mask, adapter=bank_of(prompts(config, 3)).choose(bad))
  assert np.isfinite(hidden[:3]).all() and np.isnan(hidden[3]).all()
