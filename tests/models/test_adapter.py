"""The seam of adapters, and one of one's own in one file outside the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax import encode, load_backbone
from dprjax.base import extensions
from dprjax.encoding.embeddings import load_embeddings
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import adapter as adapters
from dprjax.models import artifact, encoder
from dprjax.models.adapter import Several, allocate, pad, stack, write
from dprjax.models.adapters.prefix import Prefix
from dprjax.text import tokenizing
from dprjax.text.texts import read_texts
from tests import devices, reference
from tests.resuming import export_to, train_and_resume, train_small
from tests.toys.bias import Bias

TOY = 'tests.toys.bias'
encode_tokens = jax.jit(encoder.encode, static_argnames=('config', 'options'))


def prefix_of(config, length, seed=0):
  shape = config.num_layers, 2, length, config.num_heads, config.head_dim
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.slow
def test_a_bank_chooses_writes_and_leaves_a_row_for_none(small):
  config, params = small
  given = [Prefix(prefix_of(config, 3, seed), shift=shift) for seed, shift in ((0, 3), (1, 0))]
  given.insert(1, None)
  given[2] = Prefix(given[2].vectors[:, :, :2])
  bank = stack(given)
  assert bank.vectors.shape[1:4] == (3, 2, 3)
  slots = jax.jit(lambda: allocate(bank_row(bank, 0), 5, jnp.float32))()
  for place, adapter in ((3, given[0]), (1, given[2])):
    slots = write(slots, pad(adapter.row(), bank_row(bank, 0)), jnp.int32(place))
  tokens = jnp.asarray(np.random.default_rng(2).integers(1, 50, (3, 6)), jnp.int32)
  mask = tokens > 0

  def hidden(adapter):
    return encode_tokens(config, params, tokens, mask, adapter=adapter)

  alone = jnp.stack([hidden(adapter)[i] for i, adapter in enumerate(given)])
  for chosen in (bank.choose(jnp.arange(3)), slots.choose(jnp.array([3, 0, 1], jnp.int32))):
    np.testing.assert_allclose(hidden(chosen), alone, atol=2e-6)
  assert stack([None, None]) is None


def bank_row(bank, row):
  return jax.tree.map(
    np.zeros_like, Prefix(bank.vectors[:, row], bank.lengths[row], bank.shift[row])
  )


@pytest.mark.slow
def test_several_adapters_act_together(small):
  """Each example has a row of two banks, and row 0 of each changes nothing."""
  config, params = small
  bias = np.random.default_rng(1).standard_normal((config.num_layers, config.hidden_size))
  bias = bias.astype(np.float32)
  prefix = Prefix(prefix_of(config, 4), shift=4)
  both = Several((stack([None, prefix]), stack([None, Bias(bias)])))
  tokens = jnp.asarray(np.random.default_rng(2).integers(1, 50, (4, 6)), jnp.int32)
  rows = jnp.array([[0, 0], [1, 0], [0, 1], [1, 1]], jnp.int32)

  def hidden(adapter):
    return encode_tokens(config, params, tokens, tokens > 0, adapter=adapter)

  found = hidden(both.choose(rows))
  alone = (None, prefix, Bias(bias), Several((prefix, Bias(bias))))
  for row, adapter in enumerate(alone):
    np.testing.assert_allclose(found[row], hidden(adapter)[row], atol=2e-6)
  with pytest.raises(ValueError, match='too many values'):
    hidden(Several((prefix, prefix)))


def biased(config, params, tokens, bias):
  """The states of one text, in float64, a layer at a time."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  mask = np.ones((1, len(tokens)), bool)
  x = reference.states(config, params | {'layers': slice_of(params['layers'], 0, 0)}, tokens, mask)
  x = x[0]
  for number, vector in enumerate(bias.astype(np.float64)):
    layer = slice_of(params['layers'], number, number + 1)
    x = reference.layers(config, layer, x, mask)[-1] + vector
  return x[0]


def slice_of(layers, start, stop):
  return jax.tree.map(lambda leaf: leaf[start:stop], layers)


@pytest.mark.slow
def test_an_adapter_of_ones_own_is_trained_resumed_exported_and_served(
  trained, tmp_path, command, monkeypatch
):
  pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")
  from dprjax.serving.engine import Engine
  from dprjax.serving.options import ServerOptions

  monkeypatch.setenv(extensions.VARIABLE, TOY)
  backbone = trained / 'backbone'

  def run(workdir):
    own = f'--config.data.token_cache={trained}/token_cache', '--config.prompt.kind=bias'
    with devices.one():
      return train_small(command, trained, backbone, tmp_path / workdir, *own)

  _, whole = train_and_resume(run, tmp_path)
  assert [*whole] == ['prompt/bias']

  folder = tmp_path / 'prompts'
  export_to(command, tmp_path / 'whole', folder / 'toy.npz')
  prompt = artifact.load_prompt(folder / 'toy.npz')
  assert prompt.kind.name == 'bias'
  np.testing.assert_array_equal(prompt.arrays['bias'], whole['prompt/bias'])
  corpus = trained / 'data' / 'corpus.jsonl'
  status, log = command(
    encode,
    *(f'--backbone={backbone}', f'--prompt={folder}/toy.npz', '--side=passage', '--batch_size=8'),
    *(f'--input={corpus}', f'--out={tmp_path / "embeddings"}'),
  )
  assert status == 0, log
  stored = load_embeddings(tmp_path / 'embeddings')
  texts = {passage.id: passage.text for passage in read_texts(corpus, 'passage')}
  some = [texts[id_] for id_ in stored.ids[:3]]
  loaded, tokenizer = load_backbone(backbone), tokenizing.load_tokenizer(str(backbone))
  for vector, one in zip(stored.vectors()[:3], some, strict=True):
    tokens = tokenizer.encode([one], prompt.meta['passage_max_length'])[0]
    states = biased(loaded.config, loaded.params, np.array(tokens), prompt.arrays['bias'])
    pooled = reference.pool(
      states[None],
      np.ones((1, len(states)), bool),
      prompt.meta['pooling'],
      prompt.meta['normalize'],
    )
    np.testing.assert_allclose(vector, pooled[0], atol=1e-5)

  # Beside every other kind and the bare backbone, in the batches of one server.
  draw, size = np.random.default_rng(3), adapters.sizes(loaded.config)

  def save(name, kind, arrays, **meta):
    meta = prompt.meta | {'kind': kind} | meta
    artifact.save_prompt(folder / f'{name}.npz', artifact.Prompt(meta, arrays))

  def lora(*targets, rank):
    shapes = {
      f'{target}/{key}': shape
      for target in targets
      for key, shape in (
        ('a', (size['L'], size[f'{target}/in'], rank)),
        ('b', (size['L'], rank, size[f'{target}/out'])),
      )
    }
    arrays = {key: draw.standard_normal(shape, np.float32) for key, shape in shapes.items()}
    return arrays, {'rank': rank, 'alpha': 1.0, 'targets': [*targets]}

  save('prefix', 'prefix', {'prefix': prefix_of(loaded.config, 3)}, shift_positions=False)
  save('linear', 'linear', {'change': draw.standard_normal((size['H'],) * 2, np.float32)})
  for name, (arrays, more) in {
    'lora': lora('attention/query', 'mlp/down', rank=2),
    'other': lora('attention/query', 'attention/value', rank=3),
  }.items():
    save(name, 'lora', arrays, **more)
  kinds = ['toy', 'prefix', 'linear', 'lora', 'other', 'bare']
  names = kinds * 3
  encoders = Encoder.load(
    backbone, {name: None if name == 'bare' else folder / f'{name}.npz' for name in kinds}
  )
  short = [one[:60] for one in some]  # which the server does not cut
  repeated = [one for one in short for _ in kinds]
  alone = encoders.encode(repeated, 'passage', prompt=names)
  assert len({vector.tobytes() for vector in alone}) == len(names)
  options = ServerOptions(rows=(1, 16), lengths=(64,), budget=16 * 64, slots=20, deadline=0.2)
  engine = Engine(backbone, folder, name='bare', options=options)
  try:
    engine.ready.result(120)
    waiting = [engine.submit(name, 'passage', short) for name in kinds]
    served = np.stack([future.result(60) for future in waiting], axis=1).reshape(alone.shape)
  finally:
    engine.close()
  np.testing.assert_allclose(served, alone, atol=1e-5)
