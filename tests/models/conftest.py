"""Golden checkpoints, written out as Hugging Face directories, and a small encoder of our own."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from dprjax.models import scratch
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
    weights = {}
    for kind in kinds:
      weights |= starting(arrays, start + kind)
    return arrays, write_folder(tmp_path / folder, weights, arrays[f'{start}config'])

  return write


@pytest.fixture
def torch():
  return pytest.importorskip(
    'torch', reason='PyTorch is an oracle here, not a dependency: pip install torch'
  )


def write_folder(path, stored, config, change=None):
  """A Hugging Face directory. Tensors that are None and keys that are 'absent' are left out."""
  path.mkdir(exist_ok=True)
  kept = {name: value for name, value in stored.items() if value is not None}
  safetensors.numpy.save_file(kept, path / 'model.safetensors', {'format': 'pt'})
  config = json.loads(config.item()) | (change or {})
  written = {key: value for key, value in config.items() if value != 'absent'}
  (path / 'config.json').write_text(json.dumps(written))
  return path


def starting(arrays, start):
  """The arrays whose names begin so, float32, by the rest of their names."""
  return {
    name.removeprefix(start): value.astype(np.float32)
    for name, value in arrays.items()
    if name.startswith(start)
  }


@pytest.fixture
def write_checkpoint(golden, tmp_path):
  """Writes a golden checkpoint as a Hugging Face directory.

  ``tensors`` and ``change`` edit its tensors and its config.json.
  """

  def write(
    model_type='bert', layers=1, *, prefix='', change=None, tensors=None, folder='checkpoint'
  ):
    arrays = golden(model_type)
    stored = starting(arrays, f'{layers}/weights/')
    stored = {prefix + name: value for name, value in stored.items()} | (tensors or {})
    return write_folder(tmp_path / folder, stored, arrays[f'{layers}/config'], change)

  return write


@pytest.fixture
def write_heads(golden, tmp_path):
  """The same for a golden ForMaskedLM checkpoint with a Condenser head, edited by ``condenser``."""

  def write(
    model_type='bert', *, tensors=None, condenser=None, metadata=None, change=None, folder='heads'
  ):
    arrays = golden(f'heads_{model_type}')
    stored = starting(arrays, 'weights/') | (tensors or {})
    path = write_folder(tmp_path / folder, stored, arrays['config'], change)
    head = starting(arrays, 'condenser/') | (condenser or {})
    about = {'num_layers': '2', 'split': '1'} | (metadata or {})
    layers = {name: value for name, value in head.items() if name.startswith('layer.')}
    safetensors.numpy.save_file(layers, path / 'condenser.safetensors', about)
    return path

  return write


@pytest.fixture
def write_classifier(golden, tmp_path):
  """The same for a golden ForSequenceClassification checkpoint."""

  def write(model_type='bert', labels=1, *, tensors=None, change=None, folder='classifier'):
    arrays = golden(f'classifier_{model_type}')
    stored = starting(arrays, 'both/weights/') | starting(arrays, f'{labels}/weights/')
    stored |= tensors or {}
    return write_folder(tmp_path / folder, stored, arrays[f'{labels}/config'], change)

  return write


@pytest.fixture(scope='session')
def small():
  """``(config, params)`` of a random BERT. Large kernels make every term matter."""
  config = EncoderConfig('bert', 50, 32, 3, 4, 64, max_positions=24)
  params = scratch.init_params(config, jax.random.key(0))
  return config, jax.tree.map(lambda x: x * 10 if x.ndim == 3 else x, params)
