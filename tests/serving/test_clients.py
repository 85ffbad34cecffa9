"""Clients of other services, as they are installed, against the server over a socket."""

import warnings

import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax.serving.app import App
from tests.serving.conftest import running

pytestmark = [
  pytest.mark.slow,
  pytest.mark.xdist_group('serving'),
  pytest.mark.filterwarnings('ignore'),  # of the clients
]
TEXTS = ['json', 'an http server', 'parse the xml tree', '']


def client_of(module, extra=''):
  """A module of a client; the test skips without it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip(module, reason=f'pip install {extra or module}')


@pytest.fixture(scope='module')
def address(engine):
  with running(App(engine)) as address:
    yield address


@pytest.fixture(scope='module')
def expected(alone):
  """``expected(side, texts, name)``: the vectors of an encoder."""
  return lambda side, texts=TEXTS, name='qa': alone(name, side, *texts)


@pytest.fixture
def http():
  with client_of('httpx').Client(timeout=60) as http:
    yield http


def same(found, expected):
  np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=1e-5)


def test_langchain_openai(address, expected, http):
  module = client_of('langchain_openai', 'langchain-openai')

  def embeddings(side):
    return module.OpenAIEmbeddings(
      model=f'qa:{side}',
      base_url=f'{address}/v1',
      api_key='none',
      check_embedding_ctx_length=False,
      http_client=http,
    )

  same(embeddings('passage').embed_documents(TEXTS), expected('passage'))
  same([embeddings('query').embed_query('json')], expected('query', ['json']))


def test_llama_index(address, expected, http):
  module = client_of('llama_index.embeddings.openai_like', 'llama-index-embeddings-openai-like')
  model = module.OpenAILikeEmbedding(
    model_name='qa', api_base=f'{address}/v1', api_key='none', http_client=http, embed_batch_size=3
  )
  texts = [text for text in TEXTS if text]
  same(model.get_text_embedding_batch(texts), expected('passage', texts))
  model = module.OpenAILikeEmbedding(
    model_name='qa:query', api_base=f'{address}/v1', api_key='none', http_client=http
  )
  same([model.get_query_embedding('json')], expected('query', ['json']))
