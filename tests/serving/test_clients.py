"""Clients of other services, as they are installed, against the server over a socket."""

import asyncio
import warnings

import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax.inference.reranker import CrossEncoder
from dprjax.inference.text_encoder import Encoder
from dprjax.serving.app import App
from dprjax.serving.engine import Engine, ServerOptions
from dprjax.serving.indexes import ServedReranker
from tests.serving.test_app import running

pytestmark = [
  pytest.mark.slow,
  pytest.mark.xdist_group('serving'),
  pytest.mark.filterwarnings('ignore'),  # of the clients
]
OPTIONS = ServerOptions(rows=(1, 4), lengths=(16, 48), slots=6, deadline=0.001, prompt_length=4)
SIDES = ('query', 'passage')
TEXTS = ['json', 'an http server', 'parse the xml tree', '']


def client_of(module, extra=''):
  """A module of a client; the test skips without it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip(module, reason=f'pip install {extra or module}')


@pytest.fixture(scope='module')
def folder(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('served') / 'prompts'
  small.write(folder, 'qa', 2, passage=3)
  return folder


@pytest.fixture(scope='module')
def address(small, folder):
  engine = Engine.load(small.path, folder, name='org/base', options=OPTIONS)
  app = App(engine, rerankers=[ServedReranker('cross', small.path)])
  with running(app) as address:
    yield address
  app.close()


@pytest.fixture(scope='module')
def expected(small, folder):
  """``expected(side, texts, name)``: the vectors of an `Encoder`."""
  encoders = {
    'qa': Encoder.load(small.path, folder / 'qa.npz', batch_size=8),
    'org/base': Encoder.load(small.path, batch_size=8),
  }
  return lambda side, texts=TEXTS, name='qa': encoders[name].encode(texts, side)


@pytest.fixture
def http():
  with client_of('httpx').Client(timeout=60) as http:
    yield http


def same(found, expected):
  np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=1e-5)


def test_openai(address, expected):
  openai = client_of('openai')

  async def both():
    async with openai.AsyncOpenAI(base_url=f'{address}/v1', api_key='none') as client:
      return await asyncio.gather(
        *(client.embeddings.create(model=f'qa:{side}', input=TEXTS) for side in SIDES)
      )

  for side, answer in zip(SIDES, asyncio.run(both()), strict=True):
    same([one.embedding for one in answer.data], expected(side))
    assert answer._request_id
  with openai.OpenAI(base_url=f'{address}/v1', api_key='none') as client:
    answer = client.embeddings.create(
      model='org/base', input=TEXTS, extra_body={'input_type': 'query'}
    )
    same([one.embedding for one in answer.data], expected('query', name='org/base'))


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
  same(client.feature_extraction('json'), expected('passage', ['json'], 'org/base'))
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


def test_jina(address, expected, http):
  for side in SIDES:
    body = {'model': 'qa', 'task': f'retrieval.{side}', 'input': [{'text': one} for one in TEXTS]}
    body |= {'embedding_type': 'float', 'normalized': True, 'late_chunking': False}
    answer = http.post(f'{address}/v1/embeddings', json=body).json()
    same([one['embedding'] for one in answer['data']], expected(side))
