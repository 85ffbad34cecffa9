"""dprjax: dense passage retrieval by deep prompt tuning, in JAX.

>>> from dprjax import CrossEncoder, Retriever, load_backbone, load_prompt
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dprjax.errors import InputError
  from dprjax.models.artifact import load_prompt
  from dprjax.models.hub import load_backbone
  from dprjax.reranker import CrossEncoder
  from dprjax.retriever import Hit, Retriever

__all__ = ['CrossEncoder', 'Hit', 'InputError', 'Retriever', 'load_backbone', 'load_prompt']

_HOMES = {
  'CrossEncoder': 'dprjax.reranker',
  'Hit': 'dprjax.retriever',
  'InputError': 'dprjax.errors',
  'Retriever': 'dprjax.retriever',
  'load_backbone': 'dprjax.models.hub',
  'load_prompt': 'dprjax.models.artifact',
}


# On first use: `python -m dprjax.evaluate` need not wait for JAX.
def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_HOMES[name]), name)
