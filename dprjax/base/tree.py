"""Names for the leaves of a tree, and rules by name.

A name is the path of a leaf, joined by slashes: ``backbone/layers/attention/query/kernel``. Rules
are ``(regular expression, value)`` pairs; the first whose expression matches the *whole* name wins.
Freezing, weight decay, learning-rate factors and sharding use the same rules.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jax
import msgspec
import numpy as np

from dprjax.base.errors import InputError
from dprjax.base.reading import convert

Factor = Annotated[float, msgspec.Meta(ge=0, le=1e6)]

Tree = Any
Value = TypeVar('Value')


def flatten(tree: Tree) -> dict[str, Any]:
  """Nested dicts to ``{name: leaf}``, in the order of JAX."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {'/'.join(str(getattr(k, 'key', k)) for k in path): leaf for path, leaf in leaves}


def unflatten(named: Mapping[str, Any]) -> Tree:
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def first_match(
  rules: Sequence[tuple[str, Value]],
  names: Iterable[str],
  what: str,
  kind: Any = Any,
) -> dict[str, Value]:
  checked = convert(rules, what, list[tuple[str, kind]])  # type: ignore[valid-type]
  compiled = [(_compile(pattern, what), value) for pattern, value in checked]
  matched = {}
  for name in names:
    for pattern, value in compiled:
      if pattern.fullmatch(name):
        matched[name] = value
        break
    else:
      raise InputError(f'{what}: no rule covers {name!r}; add one (the last may be ".*")')
  return matched


def trainable_names(trainable: Sequence[str], names: Sequence[str]) -> set[str]:
  """The names matched by ``config.trainable``; all others are frozen."""
  matched: set[str] = set()
  for pattern in convert(trainable, 'config.trainable', list[str]):
    matching = {name for name in names if _compile(pattern, 'config.trainable').fullmatch(name)}
    if not matching:
      tops = sorted({name.split('/')[0] for name in names})
      raise InputError(
        f'config.trainable: {pattern!r} matches no parameter; the names begin with '
        f'{", ".join(tops)}, for instance {names[0]!r}'
      )
    matched |= matching
  return matched


def count(tree: Tree) -> int:
  return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
  """The logical size: a sharded array counts once."""
  return sum(
    int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
  )


def _compile(pattern: str, what: str) -> re.Pattern[str]:
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', FutureWarning)
      return re.compile(pattern)
  except (re.error, RecursionError, OverflowError) as error:
    raise InputError(f'{what}: {pattern!r:.60} is not a regular expression ({error})') from error
