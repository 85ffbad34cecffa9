"""The methods of this package, with the modules of their options.

    config.method = 'dpr'        dprjax/training/dpr.py
    config.method = 'lab.toy'    lab/toy.py in the working folder, by the config or on PYTHONPATH

A module of options has ``table()``, and may have ``local(config)``, for `config.local`;
``task_table()``, the options of an entry of ``config.tasks``; and ``inputs(config)``, files by
option.
"""

import importlib
import types
from collections.abc import Container
from typing import NamedTuple

from dprjax.base import extensions


class Modules(NamedTuple):
  """The module with the `method.Method`, those with its options, and the name of the value."""

  method: str
  options: tuple[str, ...] = ()
  value: str = 'METHOD'


_QUERIES = 'dprjax.training.query_options'
_PAIRS = 'dprjax.training.pair_options'
_NIR = 'dprjax.papers.nir_prompt.options'
_RETRIEVER = 'dprjax.papers.nir_prompt.nir_retriever'
_RERANKER = 'dprjax.papers.nir_prompt.nir_reranker'
_TOPICS = 'dprjax.papers.topic_dpr.options'

# A workdir may name no other module by itself.
METHODS = {
  'cross_encoder': Modules('dprjax.training.cross_encoder', (_QUERIES, _PAIRS)),
  'dpr': Modules('dprjax.training.dpr', (_QUERIES,)),
  'ft_reranker': Modules(_RERANKER, (_QUERIES, _NIR, _PAIRS), 'FINE_TUNED'),
  'ft_retriever': Modules(_RETRIEVER, (_QUERIES, _NIR), 'FINE_TUNED'),
  'nir_reranker': Modules(_RERANKER, (_QUERIES, _NIR, _PAIRS)),
  'nir_retriever': Modules(_RETRIEVER, (_QUERIES, _NIR)),
  'pretrain': Modules('dprjax.papers.condenser.pretrain', ('dprjax.papers.condenser.options',)),
  'topic_dpr': Modules('dprjax.papers.topic_dpr.topic_dpr', (_QUERIES, _TOPICS)),
}


def names() -> list[str]:
  """The methods of this package."""
  return [name for name, modules in METHODS.items() if extensions.there(modules.method)]


def option_modules(method: str, sections: Container[str] = ()) -> list[types.ModuleType]:
  """The modules of the options of a method.

  A method of one's own may build on any of these: it has those whose ``sections`` its config has.
  """
  if method in METHODS:
    return [importlib.import_module(name) for name in METHODS[method].options]
  every = dict.fromkeys(path for name in names() for path in METHODS[name].options)
  modules = [importlib.import_module(path) for path in every]
  return [module for module in modules if all(name in sections for name in vars(module.table()))]
