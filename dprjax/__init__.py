"""dprjax: dense passage retrieval by deep prompt tuning, in JAX.

>>> from dprjax import CrossEncoder, Retriever, load_backbone, load_prompt
"""

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dprjax.base.errors import InputError
  from dprjax.inference.reranker import CrossEncoder
  from dprjax.inference.retriever import Hit, Retriever
  from dprjax.models.artifact import load_prompt
  from dprjax.models.hub import load_backbone

__all__ = ['CrossEncoder', 'Hit', 'InputError', 'Retriever', 'load_backbone', 'load_prompt']

_HOMES = {
  'CrossEncoder': 'dprjax.inference.reranker',
  'Hit': 'dprjax.inference.retriever',
  'InputError': 'dprjax.base.errors',
  'Retriever': 'dprjax.inference.retriever',
  'load_backbone': 'dprjax.models.hub',
  'load_prompt': 'dprjax.models.artifact',
}


# On first use: `python -m dprjax.evaluate` need not wait for JAX.
def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_HOMES[name]), name)


def end_interrupted(*_: Any) -> None:
  """Ends a command that is interrupted while it imports its modules, as ``cli.run`` does later.

  An exception would be lost in some of them, or shown with its traceback.
  """
  from dprjax.base.errors import error_line, explain

  status, line = explain(KeyboardInterrupt())
  print(error_line(line), file=sys.stderr, flush=True)
  os._exit(status)


if (
  sys.argv[:1] == ['-m']  # python -m dprjax.COMMAND
  and any(word.startswith('dprjax.') for word in sys.orig_argv)
  and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
  signal.signal(signal.SIGINT, end_interrupted)
