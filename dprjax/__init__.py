"""dprjax: dense passage retrieval by deep prompt tuning, in JAX.

>>> from dprjax import CrossEncoder, Retriever, fit, load_backbone, load_prompt
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dprjax.api.fitting import Fitted, fit
  from dprjax.api.measuring import evaluate, fuse, mine
  from dprjax.base.errors import InputError
  from dprjax.base.tables import Records
  from dprjax.models.artifact import load_prompt
  from dprjax.models.hub import load_backbone
  from dprjax.papers.nir_prompt.prompt_reranker import PromptReranker
  from dprjax.retrieval.reranker import CrossEncoder
  from dprjax.retrieval.retriever import Hit, Retriever

__all__ = [
  'CrossEncoder',
  'Fitted',
  'Hit',
  'InputError',
  'PromptReranker',
  'Records',
  'Retriever',
  'evaluate',
  'fit',
  'fuse',
  'load_backbone',
  'load_prompt',
  'mine',
]

_HOMES = {
  'CrossEncoder': 'dprjax.retrieval.reranker',
  'Fitted': 'dprjax.api.fitting',
  'Hit': 'dprjax.retrieval.retriever',
  'InputError': 'dprjax.base.errors',
  'PromptReranker': 'dprjax.papers.nir_prompt.prompt_reranker',
  'Records': 'dprjax.base.tables',
  'Retriever': 'dprjax.retrieval.retriever',
  'evaluate': 'dprjax.api.measuring',
  'fit': 'dprjax.api.fitting',
  'fuse': 'dprjax.api.measuring',
  'load_backbone': 'dprjax.models.hub',
  'load_prompt': 'dprjax.models.artifact',
  'mine': 'dprjax.api.measuring',
}


# On first use, so that `python -m dprjax.evaluate` does not wait for JAX.
def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from dprjax.base import progress

  with progress.quiet():
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


def _function(name: str) -> property:
  """The function ``name``, which shares its name with a command and so with a module.

  An import of the module would otherwise replace the attribute of the package.
  """

  def put(_: types.ModuleType, value: Any) -> None:
    if not isinstance(value, types.ModuleType):
      raise AttributeError(f'dprjax.{name} cannot be replaced')

  return property(lambda _: __getattr__(name), put)


class _Package(types.ModuleType):
  """The package: ``dprjax.fuse`` is the function, `sys.modules['dprjax.fuse']` the command."""

  evaluate, fuse, mine = map(_function, ('evaluate', 'fuse', 'mine'))


sys.modules[__name__].__class__ = _Package

if sys.argv[:1] == ['-m'] and any(word.startswith('dprjax.') for word in sys.orig_argv):
  from dprjax.base import errors

  errors.hear_interrupts()  # python -m dprjax.COMMAND
