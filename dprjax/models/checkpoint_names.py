"""The tensors of a Hugging Face checkpoint: names, shapes, and places in our parameter tree.

A family lists them (`family.Family.tensors`).
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dprjax.base.errors import InputError

Params = dict[str, Any]

# Prefixes added by PyTorch, sentence-transformers and training scripts.
_WRAPPERS = re.compile(
  r'((module|model|auto_model|base_model|_orig_mod|_fsdp_wrapped_module|encoder|backbone|'
  r'transformer|\d+)\.)*'
)
# The float types: numpy names and safetensors names.
DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float64': 'F64'}


class Tensor(NamedTuple):
  """One tensor of a checkpoint and its place in our tree (kernels transposed, layers stacked).

  Attributes:
    parts: for a fused tensor, such as queries, keys and values in one: the names of its equal parts
      in our tree, which replace the last but one name of ``path``.
  """

  name: str
  shape: tuple[int, ...]
  path: tuple[str, ...]
  layer: int | None = None
  num_layers: int = 0
  parts: tuple[str, ...] = ()

  @property
  def kernel(self) -> bool:
    return self.path[-1] == 'kernel'

  @property
  def paths(self) -> list[tuple[str, ...]]:
    return [(*self.path[:-2], part, self.path[-1]) for part in self.parts] or [self.path]


def weights(
  name: str,
  path: tuple[str, ...],
  shape: tuple[int, ...],
  bias: bool = True,
  parts: tuple[str, ...] = (),
) -> Iterator[Tensor]:
  """The weight and perhaps the bias of a dense layer, or of a norm, whose shape has one axis."""
  kind = 'kernel' if len(shape) == 2 else 'scale'
  yield Tensor(f'{name}.weight', shape, (*path, kind), parts=parts)
  if bias:
    yield Tensor(f'{name}.bias', shape[:1], (*path, 'bias'), parts=parts)


def stack(num_layers: int, start: str, *modules: Iterable[Tensor]) -> Iterator[Tensor]:
  """The tensors of these modules in each layer; ``start`` precedes its number."""
  of_layer = list(itertools.chain(*modules))
  for layer in range(num_layers):
    for tensor in of_layer:
      name = f'{start}.{layer}.{tensor.name}'
      yield tensor._replace(name=name, layer=layer, num_layers=num_layers)


def wrapper(config: Any, stored: Iterable[str], where: str) -> str:
  """The prefix that a tool added to all names, such as ``module.``, or ''."""
  family = config.family
  word = next(one.name for one in family.tensors(config) if one.path[:2] == ('embeddings', 'word'))
  before = {name.removesuffix(word) for name in stored if f'.{name}'.endswith(f'.{word}')}
  prefix = re.compile(rf'(?<![^.]){re.escape(family.prefix)}$')  # not the end of 'xlm_roberta.'
  wrappers = sorted({prefix.sub('', name) for name in before})
  if len(wrappers) > 1 or not all(map(_WRAPPERS.fullmatch, wrappers)):
    raise InputError(
      f'{where}: names begin with {" and ".join(map(repr, wrappers[:8]))}, not with those of one '
      f'{family.model_type} encoder; save one encoder without a wrapper'
    )
  return wrappers[0] if wrappers else ''


def place(params: Params, tensor: Tensor, array: np.ndarray) -> None:
  """Puts the tensor of a checkpoint into our tree, as float32."""
  for path, part in zip(tensor.paths, np.split(array, len(tensor.paths)), strict=True):
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    part = part.T if tensor.kernel else part
    if tensor.layer is None:
      node[path[-1]] = np.array(part, np.float32)
      continue
    if path[-1] not in node:
      # Layers without the tensor get zeros.
      node[path[-1]] = np.zeros((tensor.num_layers, *part.shape), np.float32)
    node[path[-1]][tensor.layer] = part


def export(tensors: Iterable[Tensor], params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Converts our tree to checkpoint tensors, float32."""
  arrays = {}
  for tensor in tensors:
    parts = []
    for path in tensor.paths:
      array: Any = params
      for key in path:
        array = array[key]
      if tensor.layer is not None:
        array = array[tensor.layer]
      value = np.asarray(array, np.float32)
      parts.append(value.T if tensor.kernel else value)
    whole = np.concatenate(parts) if tensor.parts else parts[0]
    arrays[tensor.name] = np.ascontiguousarray(whole)
  return arrays
