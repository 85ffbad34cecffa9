"""dprjax: dense passage retrieval by deep prompt tuning, in JAX.

>>> from dprjax import CrossEncoder, Retriever, load_backbone, load_prompt
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dprjax.base.errors import InputError
  from dprjax.inference.reranker import CrossEncoder, PromptReranker
  from dprjax.inference.retriever import Hit, Retriever
  from dprjax.models.artifact import load_prompt
  from dprjax.models.hub import load_backbone

__all__ = [
  'CrossEncoder',
  'Hit',
  'InputError',
  'PromptReranker',
  'Retriever',
  'load_backbone',
  'load_prompt',
]

_HOMES = {
  'CrossEncoder': 'dprjax.inference.reranker',
  'Hit': 'dprjax.inference.retriever',
  'InputError': 'dprjax.base.errors',
  'PromptReranker': 'dprjax.inference.reranker',
  'Retriever': 'dprjax.inference.retriever',
  'load_backbone': 'dprjax.models.hub',
  'load_prompt': 'dprjax.models.artifact',
}


# On first use: `python -m dprjax.evaluate` need not wait for JAX.
def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


if sys.argv[:1] == ['-m'] and any(word.startswith('dprjax.') for word in sys.orig_argv):
  from dprjax.base import errors

  errors.hear_interrupts()  # python -m dprjax.COMMAND
