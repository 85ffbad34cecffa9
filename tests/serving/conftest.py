"""A small backbone (of a cross-encoder), prompts for it, and the server that most tests ask."""

import contextlib
import threading
import types

import numpy as np
import pytest

from dprjax.models import artifact, hub
from dprjax.text import tokenizing
from tests.models.test_artifact import META

SHAPE = (2, 2, 2, 8)  # layers, keys and values, heads, head size


@pytest.fixture(scope='session')
def small(make_cross_encoder):
  """``path``, and ``write(folder, name, length, **meta)``, which writes a random prompt."""
  path = make_cross_encoder()
  backbone, tokenizer = hub.load_backbone(path), tokenizing.load_tokenizer(path)
  meta = {name: value for name, value in META.items() if name != 'task'} | {
    'backbone': 'small',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizer.sha256,
    'query_max_length': 16,
    'passage_max_length': 16,
  }

  def write(folder, name, length, passage=None, scale=1.0, **changes):
    rng = np.random.default_rng([*name.encode()])

    def prefix(count):
      layers, two, heads, size = SHAPE
      values = scale * rng.standard_normal((layers, two, count, heads, size))
      return values.astype(np.float32)

    arrays = {'query/prefix' if changes.get('sides') == 'query' else 'prefix': prefix(length)}
    if passage is not None:
      arrays = {'query/prefix': prefix(length), 'passage/prefix': prefix(passage)}
    folder.mkdir(exist_ok=True)
    file = folder / f'{name}.npz'
    artifact.save_prompt(file, artifact.Prompt(meta | changes, arrays))
    return file

  return types.SimpleNamespace(path=path, write=write, meta=meta, tokenizer=tokenizer)


@contextlib.contextmanager
def running(app, **options):
  """The address of a server in a thread."""
  from dprjax.serving import server as http  # whose packages may be absent

  listening = http.listen('127.0.0.1', 0)
  server = http.make_server(app, 5, **options)
  thread = threading.Thread(target=server.run, kwargs={'sockets': [listening]})
  thread.start()
  try:
    assert app.ready.wait(120), app.failed
    yield f'http://127.0.0.1:{listening.getsockname()[1]}'
  finally:
    server.should_exit = True
    thread.join()


@pytest.fixture(scope='session')
def folder(small, tmp_path_factory):
  """The prompts of ``engine``."""
  folder = tmp_path_factory.mktemp('served') / 'prompts'
  small.write(folder, 'qa', 2)
  small.write(folder, 'chat', 3, passage=1, pooling='cls', normalize=False)
  small.write(folder, 'asks', 1, index='qa')
  return folder


@pytest.fixture(scope='session')
def engine(small, folder):
  """One for all tests that ask over HTTP."""
  from dprjax.serving.engine import Engine
  from dprjax.serving.options import ServerOptions

  options = ServerOptions(rows=(4,), lengths=(16, 48), slots=6, deadline=0.001, prompt_length=4)
  engine = Engine(small.path, folder, options=options)
  yield engine
  engine.close()


@pytest.fixture(scope='session')
def alone(small, folder):
  """``alone(name, side, *texts)``: the vectors of an encoder with only that prompt."""
  from dprjax.encoding.text_encoder import Encoder

  paths = {name: folder / f'{name}.npz' for name in ('qa', 'chat', 'asks')} | {'model': None}
  encoders = {name: Encoder.load(small.path, path, batch_size=8) for name, path in paths.items()}
  return lambda name, side, *texts: encoders[name].encode(texts, side)
