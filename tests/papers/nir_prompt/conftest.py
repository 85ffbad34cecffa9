"""A small backbone with a masked-LM head."""

import pytest

from tests.papers.nir_prompt import nir


@pytest.fixture(scope='module')
def shape(tokenizer):
  return nir.shape_of(tokenizer)


@pytest.fixture(scope='module')
def parts(shape):
  return nir.make_parts(shape)
