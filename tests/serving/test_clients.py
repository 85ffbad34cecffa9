"""Clients of other services, as they are installed, against the server over a socket."""

import warnings

import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax.retrieval.reranker import CrossEncoder
from dprjax.serving.app import App
from dprjax.serving.indexes import ServedReranker
from tests.serving.conftest import running

pytestmark = [
  pytest.mark.slow,
  pytest.mark.xdist_group('serving'),
  pytest.mark.filterwarnings('ignore'),  # of the clients
]
SIDES = ('query', 'passage')
TEXTS = ['json', 'an http server', 'parse the xml tree', '']


def client_of(module, extra=''):
  """A module of a client; the test skips without it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip(module, reason=f'pip install {extra or module}')


@pytest.fixture(scope='module')
def address(small, engine):
  with running(App(engine, rerankers=[ServedReranker('cross', small.path)])) as address:
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


def test_cohere(address, expected, small, http):
  cohere = client_of('cohere')
  client = cohere.ClientV2('none', base_url=address, httpx_client=http)
  for side, word in zip(SIDES, ('search_query', 'search_document'), strict=True):
    answer = client.embed(
      model='qa', input_type=word, texts=TEXTS, embedding_types=['float', 'ubinary'], truncate='END'
    )
    same(answer.embeddings.float_, expected(side))
    assert answer.embeddings.ubinary == np.packbits(expected(side) > 0, axis=1).tolist()
    assert answer.id and answer.meta.billed_units.input_tokens > len(TEXTS)
  ranked = client.rerank(model='cross', query='json', documents=TEXTS, top_n=3)
  logits = CrossEncoder.load(small.path, batch_size=8).score([('json', text) for text in TEXTS])
  assert [one.index for one in ranked.results] == np.argsort(-logits)[:3].tolist()
  same(
    [one.relevance_score for one in ranked.results], np.sort(1 / (1 + np.exp(-logits)))[::-1][:3]
  )
  with pytest.raises(cohere.NotFoundError):
    client.embed(model='none', input_type='search_query', texts=TEXTS)
  with pytest.raises(cohere.BadRequestError):
    client.embed(model='qa', input_type='image', texts=TEXTS)


def test_huggingface_hub(address, expected, monkeypatch):
  hub = client_of('huggingface_hub')
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)  # it is no hub
  client = hub.InferenceClient(f'{address}/embed')
  for side in SIDES:
    same(client.feature_extraction(TEXTS, prompt_name=f'qa:{side}', truncate=True), expected(side))
  same(client.feature_extraction('json'), expected('passage', ['json'], 'model'))
  with pytest.raises(hub.errors.HfHubHTTPError) as error:
    client.feature_extraction('json', prompt_name='none')
  assert error.value.response.status_code == 404
  hub.close_session()


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
