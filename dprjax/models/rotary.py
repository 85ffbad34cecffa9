"""Rotary positions (Su et al., 2021), with the scalings named in config.json."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models.family import only

# The parameters of each kind of scaling, and their defaults; None: required.
_NUMBERS: dict[str, dict[str, Any]] = {
  'default': {},
  'linear': {'factor': None},
  'ntk': {'factor': None},
  'dynamic': {'factor': None, 'original_max_position_embeddings': None},
  'llama3': {
    'factor': None,
    'low_freq_factor': None,
    'high_freq_factor': None,
    'original_max_position_embeddings': None,
  },
  'yarn': {
    'factor': None,
    'original_max_position_embeddings': None,
    'beta_fast': 32,
    'beta_slow': 1,
    'attention_factor': 0,
    'mscale': 0,
    'mscale_all_dim': 0,
    'truncate': 1,
  },
  'longrope': {
    **dict.fromkeys(('short_factor', 'long_factor', 'original_max_position_embeddings')),
    'factor': 0,
    'attention_factor': 0,
  },
}


class Rope(NamedTuple):
  """The rotation of heads by positions.

  Attributes:
    theta: the base of the wavelengths.
    kind: the scaling of wavelengths: 'default' (none), 'linear', 'ntk', 'llama3', 'yarn',
      'dynamic' (none) or 'longrope'; 'none': no rotation.
    numbers: parameters of the scaling, sorted by name as in config.json.
  """

  theta: float
  kind: str = 'default'
  numbers: tuple[tuple[str, Any], ...] = ()

  @property
  def longest(self) -> float:
    """The most tokens of a text; the rotation of a longer one may depend on its length."""
    bound = self.kind in ('dynamic', 'longrope')
    return dict(self.numbers)['original_max_position_embeddings'] if bound else math.inf

  def frequencies(self, size: int) -> tuple[Float[np.ndarray, ' D/2'], float]:
    """The rotation by one position in radians, for each pair in a head of ``size`` numbers.

    Returns:
      The rotations, and a factor on rotated heads.
    """
    scale, numbers = 1.0, dict(self.numbers)
    # In float32, as in transformers: at position 8,192 the last bit is 5e-4 radians.
    plain = 1 / np.float32(self.theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    if self.kind in ('default', 'dynamic'):
      return plain, scale
    turns = plain / np.float32(numbers['factor'])
    if self.kind == 'longrope':
      short, factor = np.array(numbers['short_factor'], np.float32), numbers['factor']
      if len(short) != len(plain):
        raise InputError(f'short_factor has {len(short)} numbers, but a head {len(plain)} pairs')
      turns, scale = plain / short, numbers['attention_factor']
      if not scale:
        positions = numbers['original_max_position_embeddings']
        scale = math.sqrt(1 + math.log(max(factor, 1)) / math.log(positions))
    if self.kind == 'ntk':  # a larger base, as in text-embeddings-inference
      exponent = np.arange(0, size, 2, dtype=np.float32) / size
      turns = 1 / np.float32(self.theta * numbers['factor']) ** exponent
      turns /= np.float32(numbers['factor'] ** (2 / size))
    if self.kind == 'llama3':
      # Long waves are scaled, short ones are not, and those in between are partly scaled.
      low, high = numbers['low_freq_factor'], numbers['high_freq_factor']
      waves = numbers['original_max_position_embeddings'] * plain / (2 * np.pi)
      share = np.clip((waves - low) / (high - low), 0, 1).astype(np.float32)
      turns = (1 - share) * turns + share * plain
    if self.kind == 'yarn':
      turns, scale = _yarn(numbers, self.theta, size, plain)
    return turns, scale

  def written(self) -> dict[str, Any] | None:
    if self.kind == 'default':
      return None
    numbers = {key: value for key, value in self.numbers if value != _NUMBERS[self.kind][key]}
    if 'truncate' in numbers:
      numbers['truncate'] = bool(numbers['truncate'])
    if 'original_max_position_embeddings' in numbers:
      numbers['original_max_position_embeddings'] = int(numbers['original_max_position_embeddings'])
    return {'rope_type': self.kind, **numbers}


NONE = Rope(0.0, 'none')  # of models without rotary positions


def _yarn(numbers, theta, size, plain):
  """YaRN (Peng et al., 2024, section 3), as in transformers."""

  def pair(turns):  # the pair of a head with this many turns over the original positions
    positions = numbers['original_max_position_embeddings']
    return size * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

  def root(scale, factor=1.0):
    return 1.0 if scale <= 1 else 0.1 * factor * math.log(scale) + 1

  low, high = pair(numbers['beta_fast']), pair(numbers['beta_slow'])
  if numbers['truncate']:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, size - 1)
  if low == high:
    high += 0.001
  place = np.arange(size // 2, dtype=np.float32)
  scaled = np.clip((place - low) / (high - low), 0, 1).astype(np.float32)
  factor = numbers['factor']
  scale = numbers['attention_factor']
  if not scale:
    scale = root(factor)
    if numbers['mscale'] and numbers['mscale_all_dim']:
      scale = root(factor, numbers['mscale']) / root(factor, numbers['mscale_all_dim'])
  return plain / np.float32(factor) * scaled + plain * (1 - scaled), scale


def read(settings: Mapping[str, Any], theta: float, positions: int) -> Rope:
  """The rotation described in config.json by rope_parameters or rope_scaling.

  Args:
    positions: of the model, the default for the original positions.
  """
  entries = {key: value for key, value in settings.items() if value is not None}
  kinds = entries.pop('rope_type', None), entries.pop('type', None)
  kind = str(kinds[0] or kinds[1] or 'default')
  known = _NUMBERS.get(kind, {})
  entries = {'original_max_position_embeddings': positions, **entries}
  extra = {'rope_theta', 'partial_rotary_factor', 'original_max_position_embeddings'}
  missing = [key for key, default in known.items() if default is None and key not in entries]
  wrong = [*missing, *(key for key in entries if key not in extra | known.keys())]
  if wrong or kind not in _NUMBERS:
    raise InputError(
      f'rotary positions of type {kind!r:.40}: {", ".join(map(str, wrong)):.80} is unknown or '
      f'missing; types are {", ".join(_NUMBERS)}, and this has {", ".join(known) or "no numbers"}'
    )
  if 'truncate' in entries:
    entries['truncate'] = int(entries['truncate'])
  lists = {
    key: tuple(convert(entries.pop(key), f'rotary positions: {key}', list[float]))
    for key in ('short_factor', 'long_factor')
    if key in entries
  }
  numbers = convert(entries, f'rotary positions of type {kind!r}', dict[str, float])
  only(numbers, partial_rotary_factor=1)
  if kind == 'longrope':
    numbers.setdefault('factor', positions / numbers['original_max_position_embeddings'])
  fields = {key: numbers.get(key, default or 0) for key, default in known.items()} | lists
  return Rope(numbers.get('rope_theta', theta), kind, tuple(sorted(fields.items())))


def turn(
  x: Float[Array, 'B T N D'],
  positions: Int[Array, 'B T'],
  frequencies: Float[Array, ' D/2'],
  scale: float | Array = 1.0,
) -> Float[Array, 'B T N D']:
  """Rotates heads by their positions: number i of a head is paired with number i + D/2."""
  angle = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
  cos, sin = ((f(angle) * scale).astype(x.dtype) for f in (jnp.cos, jnp.sin))
  first, second = jnp.split(x, 2, axis=3)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=3)
