import dataclasses
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dprjax.base import mesh as meshes
from dprjax.encoding import embedder
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, hub, model_folders, weights
from dprjax.text import tokenizing
from dprjax.text.vector_spec import VectorSpec, same_length
from tests.models.test_artifact import META
from tests.refusals import refused

pytestmark = pytest.mark.xdist_group('encoder')  # one worker makes the shared files
TEXTS = ['Decode a JSON document.', 'Send a message over HTTP.', 'Run a coroutine.', 'json', '']


@pytest.fixture
def variant(prompt, tmp_path):
  """``variant(name, length, **meta)``: the path of the prompt with some of its vectors."""
  loaded = artifact.load_prompt(prompt)

  def make(name, length=4, **meta):
    arrays = {'prefix': loaded.arrays['prefix'][:, :, :length]}
    path = tmp_path / f'{name}.npz'
    artifact.save_prompt(path, artifact.Prompt(loaded.meta | meta, arrays))
    return path

  return make


@pytest.mark.slow
def test_prompts_of_one_bank_equal_each_alone(trained, variant):
  paths = {
    'whole': variant('whole'),
    'short': variant('short', 1, pooling='cls', normalize=False),
    'long texts': variant('long', 3, pooling='mean', normalize=False, query_max_length=64),
    'prefixed': variant('prefixed', 2, query_prefix='query: ', query_max_length=9),
    'shifted': variant('shifted', 2, shift_positions=True),
    'shifted more': variant('more', 4, shift_positions=True, pooling='cls'),
    'bare': None,
  }
  bank = Encoder.load(trained / 'backbone', paths)
  texts = [f'{text} {i}' for i, text in enumerate(TEXTS * 6)]
  names = [list(paths)[i * i % len(paths)] for i in range(len(texts))]
  told = []
  together = bank.encode(texts, 'query', told.append, prompt=names)
  assert told == sorted(told) and told[-1] == len(texts)
  for name, path in paths.items():
    places = [i for i, other in enumerate(names) if other == name]
    chosen = [texts[i] for i in places]
    alone = Encoder.load(trained / 'backbone', path).encode(chosen, 'query')
    np.testing.assert_allclose(together[places], alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(bank.encode(chosen, 'query', prompt=name), alone, rtol=0, atol=1e-5)
  lengths = np.linalg.norm(together, axis=1)
  unit = np.array([bank.bank[name].spec.normalize for name in names])
  np.testing.assert_allclose(lengths[unit], 1, atol=1e-5)
  assert (np.abs(lengths[~unit] - 1) > 1e-2).all()


@pytest.mark.slow
def test_passages_of_prompts_for_queries_alone_are_the_bare_encoders(trained, prompt, tmp_path):
  loaded = artifact.load_prompt(prompt)
  paths = {}
  for name, length, more in (('a', 4, {}), ('b', 2, {'shift_positions': True}), ('c', 1, {})):
    paths[name] = tmp_path / f'{name}.npz'
    arrays = {'query/prefix': loaded.arrays['prefix'][:, :, :length]}
    meta = loaded.meta | {'sides': 'query'} | more
    artifact.save_prompt(paths[name], artifact.Prompt(meta, arrays))
  bank = Encoder.load(trained / 'backbone', paths | {'bare': None, 'tied': prompt})
  names = ['a', 'b', 'c', 'bare', 'a'] * 2
  settings = {name: getattr(bank.entry('a').spec, name) for name in ('pooling', 'normalize')}
  bare = Encoder.load(trained / 'backbone', passage_max_length=32, **settings)
  alone = Encoder.load(trained / 'backbone', {name: paths[name] for name in 'ac'})
  np.testing.assert_allclose(
    bank.encode(TEXTS * 2, prompt=names)[[0, 1, 2, 4]],
    bare.encode(TEXTS)[[0, 1, 2, 4]],
    rtol=0,
    atol=1e-5,
  )
  np.testing.assert_allclose(
    alone.encode(TEXTS, prompt=['a', 'c', 'a', 'c', 'a']), bare.encode(TEXTS), rtol=0, atol=1e-5
  )
  queries = bank.encode(TEXTS, 'query', prompt='a')
  np.testing.assert_allclose(alone.encode(TEXTS, 'query', prompt='a'), queries, rtol=0, atol=1e-5)
  assert np.abs(queries - bare.encode(TEXTS, 'query')).max() > 1e-3
  bank.check_comparable(['a', 'b', 'c'], 'b')
  bank.check_comparable(['tied'], 'tied')
  for wrong in (['a', 'tied'], ['tied']):
    with refused('tied', 'b'):
      bank.check_comparable(wrong, 'b')
  spec = dataclasses.replace(bank.bank['c'].spec, passage_prefix='passage: ')
  bank.bank['c'] = bank.bank['c']._replace(spec=spec)
  with refused('c', 'b', 'passage_prefix'):
    bank.check_comparable(['c'], 'b')


def test_a_prompt_is_named_where_there_are_several(trained, variant):
  bank = Encoder.load(trained / 'backbone', {'a': variant('a'), 'b': None})
  for prompt in (None, 'c', ['a', 'c']):
    with refused('prompt', 'a', 'b'):
      bank.encode(['x', 'y'], prompt=prompt)
  with refused('prompt', '2'):
    bank.encode(['x', 'y'], prompt=['a'])
  with refused('query_max_length', '510', '508'):
    Encoder.load(
      trained / 'backbone', {'a': variant('a', shift_positions=True)}, query_max_length=510
    )


def test_each_of_two_encoders_has_its_own_length_and_prefix(make_cross_encoder, tmp_path):
  loaded = hub.load_backbone(make_cross_encoder())

  def write(side, **settings):
    sentence = same_length(**settings)
    args = loaded.config, loaded.params
    model_folders.save_backbone(tmp_path / side, *args, source=loaded.path, spec=sentence)

  write('query', pooling='mean', length=8, query_prefix='q: ', passage_prefix='not this ')
  write('passage', pooling='mean', length=12, query_prefix='nor this ', passage_prefix='p: ')
  bare = Encoder.load(tmp_path).entry().spec
  assert bare == VectorSpec('mean', False, 8, 12, 'q: ', 'p: ')
  write('passage', pooling='cls', normalize=True, length=12)
  with refused(tmp_path, '--pooling'):
    Encoder.load(tmp_path)
  with refused(tmp_path, '--normalize'):
    Encoder.load(tmp_path, pooling='max')
  said = Encoder.load(tmp_path, pooling='max', normalize=True).entry().spec
  assert said == VectorSpec('max', True, 8, 12, 'q: ')


@pytest.mark.slow
def test_equals_transformers_with_and_without_a_prompt(minilm, tmp_path):
  with np.load(pathlib.Path(__file__).parents[1] / 'golden/minilm.npz', allow_pickle=False) as npz:
    golden = dict(npz)
  sentences = golden['sentences'].tolist()
  np.testing.assert_allclose(
    Encoder.load(minilm).encode(sentences), golden['plain/embedding'], rtol=0, atol=2e-6
  )
  backbone = hub.load_backbone(minilm)
  meta = META | {
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizing.load_tokenizer(backbone.path).sha256,
    'query_max_length': 64,
    'passage_max_length': 64,
  }
  for case, shift in (('prefix', False), ('shifted', True)):
    path = tmp_path / f'{case}.npz'
    artifact.save_prompt(
      path,
      artifact.Prompt(
        meta | {'shift_positions': shift}, {'prefix': golden['prompt'].astype(np.float32)}
      ),
    )
    vectors = Encoder.load(minilm, path).encode(sentences)
    np.testing.assert_allclose(vectors, golden[f'{case}/embedding'], rtol=0, atol=2e-6)


def test_a_backbone_comes_to_its_devices_in_parts_of_its_own_type(trained, tmp_path, monkeypatch):
  folder = shutil.copytree(trained / 'backbone', tmp_path / 'backbone')
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  half = {name: one.astype(jnp.bfloat16) for name, one in tensors.items()}
  safetensors.numpy.save_file(half, folder / 'model.safetensors')
  read, pieces = weights.OnDisk.__getitem__, []

  def watch(leaf, index):
    piece = read(leaf, index)
    pieces.append((leaf.tensor, piece.size / math.prod(leaf.shape), piece.dtype))
    return piece

  monkeypatch.setattr(weights.OnDisk, '__getitem__', watch)
  for dtype, placed in (('bfloat16', 'bfloat16'), ('mixed', 'bfloat16'), ('float32', 'float32')):
    pieces.clear()
    split = Encoder.load(folder, mesh=embedder.local_mesh(8), dtype=dtype)
    leaves = jax.tree.leaves(split._groups['passage'][0].params[0])
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(placed)}
    assert {dtype for *_, dtype in pieces} == {jnp.dtype(placed)}
    # The part of one device at a time, of all but norms and biases.
    tables = [share for tensor, share, _ in pieces if tensor.kernel or 'word' in tensor.path]
    assert set(tables) == {1 / 8}


@pytest.mark.slow
def test_a_split_backbone_and_mixed_arithmetic_stay_near_one_in_float32(trained, prompt):
  split = meshes.make_mesh({'fsdp': 4, 'model': 2})
  options = {}, {'mesh': split}, {'dtype': 'mixed'}
  one, parts, mixed = (Encoder.load(trained / 'backbone', prompt, **some) for some in options)
  exact = one.encode(TEXTS)
  np.testing.assert_allclose(parts.encode(TEXTS), exact, rtol=0, atol=1e-5)
  kernel = parts._groups['passage'][0].params[0]['layers']['mlp']['up']['kernel']
  assert kernel.addressable_shards[0].data.nbytes == kernel.nbytes / 8
  assert (one.dtype, mixed.dtype) == ('float32', 'mixed')
  found = mixed.encode(TEXTS)
  off = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
  assert found.dtype == np.float32 and (off > 1e-5).all() and (off < 0.03).all()
