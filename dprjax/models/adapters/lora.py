"""Low-rank changes of linear projections (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1)."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models import adapter as adapters
from dprjax.models.adapter import Adapter, AdapterTraining, Kind, Peft

_Rank = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
_Alpha = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
_Target = Annotated[str, msgspec.Meta(pattern=r'^[a-z_]+/[a-z_]+\Z', max_length=100)]


class _Meta(msgspec.Struct):
  rank: _Rank
  alpha: _Alpha
  targets: Annotated[list[_Target], msgspec.Meta(min_length=1)]


@flax.struct.dataclass
class Lora(Adapter):
  """Adds ``scale * x A B`` to the projections of ``x`` that have an A and a B.

  Attributes:
    a, b: by the names in `Adapter.project`, shared or one for each example.
    scale: alpha / R.
  """

  a: Mapping[str, Float[Array | np.ndarray, 'L *B I R']]
  b: Mapping[str, Float[Array | np.ndarray, 'L *B R O']]
  scale: Float[Array | np.ndarray, '*B'] | float

  by_layer = ('a', 'b')
  undropped = ('scale',)

  def project(
    self, name: str, x: Float[Array, 'B T I'], y: Float[Array, 'B T O']
  ) -> Float[Array, 'B T O']:
    if name not in self.a:
      return y
    a, b = self.a[name].astype(x.dtype), self.b[name].astype(x.dtype)
    inner = jnp.matmul(x, a, preferred_element_type=jnp.float32)
    inner = inner * jnp.reshape(self.scale, (-1, 1, 1))
    change = jnp.matmul(inner.astype(x.dtype), b, preferred_element_type=jnp.float32)
    return y + change.astype(y.dtype)

  def size(self) -> int:
    return max(a.shape[-1] for a in self.a.values())

  def row(self) -> 'Lora':
    return dataclasses.replace(self, scale=np.array(self.scale, np.float32))


def init(config: Any, model: Any, key: Array) -> dict[str, Any]:
  """R = ``config.prompt.length``: A is uniform within 1 / sqrt(I), as in PEFT, and B zero."""
  rank, sizes = config.prompt.length, adapters.sizes(model)
  params: dict[str, Any] = {}
  for number, name in enumerate(_targets(config, model)):
    shape = model.num_layers, sizes[f'{name}/in'], rank
    subkey = jax.random.fold_in(key, number)
    bound = shape[1] ** -0.5
    a = jax.random.uniform(subkey, shape, jnp.float32, -bound, bound)
    b = jnp.zeros((model.num_layers, rank, sizes[f'{name}/out']), jnp.float32)
    half, last = name.split('/')
    params.setdefault(half, {})[last] = {'a': a, 'b': b}
  return params


def _targets(config: Any, model: Any) -> list[str]:
  names = sorted({name for _, fused in adapters.projections(model) for name in fused})
  for pattern in config.lora.targets:
    if not any(re.fullmatch(pattern, name) for name in names):
      raise InputError(
        f'config.lora.targets: {pattern!r} matches no projection of {model.model_type}: '
        f'{", ".join(names)}'
      )
  return [
    name for name in names if any(re.fullmatch(pattern, name) for pattern in config.lora.targets)
  ]


def expand(config: Any, model: Any, params: Mapping[str, Any]) -> Lora:
  a, b = (
    {f'{half}/{name}': one[key] for half, pairs in params.items() for name, one in pairs.items()}
    for key in 'ab'
  )
  return Lora(a, b, config.lora.alpha / config.prompt.length)


def _export(config: Any, adapter: Lora) -> tuple[dict[str, Any], dict[str, Any]]:
  arrays: dict[str, Any] = {}
  for name in adapter.a:
    arrays |= {f'{name}/a': adapter.a[name], f'{name}/b': adapter.b[name]}
  return arrays, _meta(config.prompt.length, config.lora.alpha, [*adapter.a])


def _meta(rank: int, alpha: float, targets: list[str]) -> dict[str, Any]:
  return {'rank': rank, 'alpha': float(alpha), 'targets': sorted(targets)}


def _arrays(where: str, meta: Mapping[str, Any]) -> dict[str, str]:
  lora = convert(dict(meta), f'{where}: meta', _Meta)
  return {
    f'{name}/{key}': axes
    for name in lora.targets
    for key, axes in (('a', f'L {name}/in {lora.rank}'), ('b', f'L {lora.rank} {name}/out'))
  }


def _load(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Adapter]:
  a, b = ({name: arrays[f'{name}/{key}'] for name in meta['targets']} for key in 'ab')
  return [Lora(a, b, meta['alpha'] / meta['rank'])]


def merge(model: Any, params: Mapping[str, Any], adapter: Lora) -> tuple[Any, Mapping[str, Any]]:
  """The encoder with each kernel ``W + scale * A B``, summed in float64."""
  layers = params['layers']
  for name, a in adapter.a.items():
    half, last = name.split('/')
    dense = layers[half][last]
    change = adapter.scale * (np.asarray(a, np.float64) @ np.asarray(adapter.b[name], np.float64))
    kernel = (np.asarray(dense['kernel'], np.float64) + change).astype(np.float32)
    layers = {**layers, half: {**layers[half], last: {**dense, 'kernel': kernel}}}
  return model, {**params, 'layers': layers}


def to_peft(
  where: str, model: Any, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """LoRA in PEFT format: A as [R, I] and B as [O, R] for every module.

  A module that fuses n projections, such as Wqkv of ModernBERT, gets their A stacked and a
  block-diagonal B. The PEFT rank is then n times R; other modules are padded with zeros.
  """
  rank = meta['rank']
  fused = [one for one in modules(model) if {*one.names} & {*meta['targets']}]
  times = max(len(one.names) for one in fused)
  tensors = {}
  for one in fused:
    a = np.zeros((rank * times, one.shape[1]), np.float32)
    b = np.zeros((one.shape[0], rank * times), np.float32)
    rows = one.shape[0] // len(one.names)
    for place, name in enumerate(one.names):
      if name in meta['targets']:
        ranks = slice(place * rank, (place + 1) * rank)
        a[ranks] = arrays[f'{name}/a'][one.layer].T
        b[place * rows : (place + 1) * rows, ranks] = arrays[f'{name}/b'][one.layer].T
    for key, array in (('A', a), ('B', b)):
      tensors[f'base_model.model.{one.module}.lora_{key}.weight'] = array
  config = {
    'bias': 'none',
    'fan_in_fan_out': False,
    'init_lora_weights': True,
    'lora_alpha': meta['alpha'] * times,
    'lora_dropout': 0.0,
    'r': rank * times,
    'target_modules': [one.module for one in fused],
  }
  return config, tensors


class Module(NamedTuple):
  """A linear module of a layer in transformers."""

  module: str
  layer: int
  names: list[str]
  shape: tuple[int, int]


def modules(model: Any) -> list[Module]:
  named, targets = model.family.modules, []
  for tensor, names in adapters.projections(model):
    if named is None:
      targets.append(Module(tensor.name.removesuffix('.weight'), tensor.layer, names, tensor.shape))
      continue
    shape = tensor.shape[0] // len(names), tensor.shape[1]
    for name in names:
      targets.append(Module(f'layers.{tensor.layer}.{named[name]}', tensor.layer, [name], shape))
  return targets


ADAPTER = Kind(
  'lora',
  'low-rank changes of projections',
  _arrays,
  _load,
  AdapterTraining(init, expand, _export),
  peft=Peft('LORA', to_peft),
  merge=merge,
)
