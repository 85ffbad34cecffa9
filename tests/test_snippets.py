"""The snippets of docs/other-tools.md, run as they stand there, with stand-ins of the interfaces.

tests/test_walkthrough.py runs them with the tools themselves, where they are installed.
"""

import abc
import pathlib
import re
import sys
import types

import numpy as np
import pytest

from dprjax import Retriever
from tests.serving.conftest import small  # noqa: F401 (a fixture)

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'other-tools.md'
TEXTS = ['json decodes', 'an http server', 'parse the xml tree']


class Embeddings(abc.ABC):
  """The interface of LangChain."""

  @abc.abstractmethod
  def embed_documents(self, texts: list[str]) -> list[list[float]]: ...

  @abc.abstractmethod
  def embed_query(self, text: str) -> list[float]: ...


class BaseEmbedding(abc.ABC):
  """The interface of LlamaIndex, with its methods on top."""

  def __init__(self, embed_batch_size=10):
    self.embed_batch_size = embed_batch_size

  @abc.abstractmethod
  def _get_query_embedding(self, query): ...

  @abc.abstractmethod
  async def _aget_query_embedding(self, query): ...

  @abc.abstractmethod
  def _get_text_embedding(self, text): ...

  def get_query_embedding(self, query):
    return self._get_query_embedding(query)

  def get_text_embedding(self, text):
    return self._get_text_embedding(text)

  def get_text_embedding_batch(self, texts):
    size = self.embed_batch_size
    batches = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [vector for batch in batches for vector in self._get_text_embeddings(batch)]


def snippet(title):
  """The Python block of a section."""
  section = re.search(rf'^## {title}$(.*?)(?=^## |\Z)', PAGE.read_text(), re.MULTILINE | re.DOTALL)
  [block] = re.findall(r'^```python\n(.*?)^```$', section[1], re.MULTILINE | re.DOTALL)
  return block


@pytest.fixture
def run(monkeypatch):
  """``run(title, name, stand_in)`` -> the object that the snippet calls ``name``."""

  def execute(title, name, stand_in):
    [module] = re.findall(rf'^from (\S+) import {stand_in.__name__}$', snippet(title), re.MULTILINE)
    parts = module.split('.')
    for end in range(1, len(parts) + 1):
      monkeypatch.setitem(sys.modules, '.'.join(parts[:end]), types.ModuleType(parts[end - 1]))
    setattr(sys.modules[module], stand_in.__name__, stand_in)
    values = {}
    exec(snippet(title), values)
    return values[name]

  return execute


@pytest.fixture(scope='module')
def retriever(small, tmp_path_factory):  # noqa: F811
  prompt = small.write(tmp_path_factory.mktemp('prompts'), 'qa', 2, passage=1)
  return Retriever.load(small.path, prompt, batch_size=8)


def test_langchain(run, retriever):
  embeddings = run('LangChain', 'PromptEmbeddings', Embeddings)(retriever)
  found = embeddings.embed_documents(TEXTS)
  assert isinstance(found[0][0], float)
  np.testing.assert_array_equal(np.float32(found), retriever.encode(TEXTS, 'passage'))
  found = embeddings.embed_query(TEXTS[0])
  np.testing.assert_array_equal(np.float32(found), retriever.encode(TEXTS[:1], 'query')[0])


def test_llamaindex(run, retriever):
  embedding = run('LlamaIndex', 'PromptEmbedding', BaseEmbedding)(retriever, embed_batch_size=2)
  passages = retriever.encode(TEXTS, 'passage')
  np.testing.assert_allclose(embedding.get_text_embedding_batch(TEXTS), passages, atol=1e-6)
  np.testing.assert_allclose(embedding.get_text_embedding(TEXTS[1]), passages[1], atol=1e-6)
  found = embedding.get_query_embedding(TEXTS[0])
  np.testing.assert_array_equal(np.float32(found), retriever.encode(TEXTS[:1], 'query')[0])
