"""Golden checkpoints, written out as Hugging Face directories, and a small encoder of our own."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from dprjax.models import hub
from dprjax.models.encoder_config import EncoderConfig

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'


@pytest.fixture(scope='session')
def golden():
  """``golden(name)``: the arrays of tests/golden/NAME.npz; of an encoder for a model type."""

  def load(name):
    file = GOLDEN / (f'{name}.npz' if name == 'minilm' or '_' in name else f'encoder_{name}.npz')
    with np.load(file, allow_pickle=False) as arrays:
      return dict(arrays)

  return load


@pytest.fixture
def write_golden(golden, tmp_path):
  """Writes tensors and config.json of a golden file as a directory; gives its arrays and the path.

  ``start`` stands before the names in the file.
  """

  def write(name, start='', kinds=('weights/',), folder='golden'):
    arrays = golden(name)
    weights = {
      key.removeprefix(start + kind): value.astype(np.float32)
      for kind in kinds
      for key, value in arrays.items()
      if key.startswith(start + kind)
    }
    path = tmp_path / folder
    path.mkdir()
    safetensors.numpy.save_file(weights, path / 'model.safetensors', {'format': 'pt'})
    (path / 'config.json').write_text(arrays[f'{start}config'].item())
    return arrays, path

  return write


@pytest.fixture
def torch():
  return pytest.importorskip(
    'torch', reason='PyTorch is an oracle here, not a dependency: pip install torch'
  )


@pytest.fixture
def write_checkpoint(golden, tmp_path):
  """Writes a golden checkpoint as a Hugging Face directory.

  ``tensors`` and ``change`` edit its tensors and its config.json.
  """

  def write(
    model_type='bert',
    layers=1,
    *,
    prefix='',
    change=None,
    tensors=None,
    folder='checkpoint',
    dtype=np.float32,
  ):
    arrays = golden(model_type)
    start = f'{layers}/weights/'
    weights = {
      prefix + name.removeprefix(start): value.astype(dtype)
      for name, value in arrays.items()
      if name.startswith(start)
    }
    weights |= tensors or {}
    path = tmp_path / folder
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(
      {name: value for name, value in weights.items() if value is not None},
      path / 'model.safetensors',
    )
    config = json.loads(arrays[f'{layers}/config'].item()) | (change or {})
    (path / 'config.json').write_text(
      json.dumps({key: value for key, value in config.items() if value != 'absent'})
    )
    return path

  return write


@pytest.fixture
def write_heads(golden, tmp_path):
  """The same for a golden ForMaskedLM checkpoint with a Condenser head, edited by ``condenser``."""

  def write(
    model_type='bert', *, tensors=None, condenser=None, metadata=None, change=None, folder='heads'
  ):
    arrays = golden(f'heads_{model_type}')
    path = tmp_path / folder
    path.mkdir(exist_ok=True)
    for file, start, edits, about in (
      ('model', 'weights/', tensors, None),
      (
        'condenser',
        'condenser/layer.',
        condenser,
        {'num_layers': '2', 'split': '1'} | (metadata or {}),
      ),
    ):
      stored = {
        name: value.astype(np.float32) for name, value in arrays.items() if name.startswith(start)
      }
      stored = {name.split('/')[1]: value for name, value in stored.items()} | (edits or {})
      stored = {name: value for name, value in stored.items() if value is not None}
      safetensors.numpy.save_file(stored, path / f'{file}.safetensors', about)
    (path / 'config.json').write_text(
      json.dumps(json.loads(arrays['config'].item()) | (change or {}))
    )
    return path

  return write


@pytest.fixture
def write_classifier(golden, tmp_path):
  """The same for a golden ForSequenceClassification checkpoint; ``shards`` splits it."""

  def write(
    model_type='bert', labels=1, *, tensors=None, change=None, shards=1, folder='classifier'
  ):
    arrays = golden(f'classifier_{model_type}')
    path = tmp_path / folder
    path.mkdir(exist_ok=True)
    starts = ('both/weights/', f'{labels}/weights/')
    stored = {
      name.split('/')[2]: value.astype(np.float32)
      for name, value in arrays.items()
      if name.startswith(starts)
    } | (tensors or {})
    stored = {name: value for name, value in stored.items() if value is not None}
    if shards == 1:
      safetensors.numpy.save_file(stored, path / 'model.safetensors')
    else:
      weight_map = {
        name: f'model-{i % shards + 1:05d}-of-{shards:05d}.safetensors'
        for i, name in enumerate(sorted(stored))
      }
      for file in set(weight_map.values()):
        safetensors.numpy.save_file(
          {name: value for name, value in stored.items() if weight_map[name] == file}, path / file
        )
      (path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    config = json.loads(arrays[f'{labels}/config'].item()) | (change or {})
    (path / 'config.json').write_text(
      json.dumps({key: value for key, value in config.items() if value != 'absent'})
    )
    return path

  return write


@pytest.fixture(scope='session')
def small():
  """``(config, params)`` of a random BERT. Large kernels make every term matter."""
  config = EncoderConfig('bert', 50, 32, 3, 4, 64, max_positions=24)
  params = hub.init_params(config, jax.random.key(0))
  return config, jax.tree.map(lambda x: x * 10 if x.ndim == 3 else x, params)
