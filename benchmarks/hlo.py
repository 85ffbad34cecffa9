"""Counts products, bytes and collectives in the XLA text of a compiled program.

The ``cost_analysis`` of XLA counts the body of a loop once; here it counts as often as it runs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

COLLECTIVES = ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute', 'reduce-scatter')

_BYTES = {
  'pred': 1, 's2': 1, 'u2': 1, 's4': 1, 'u4': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2,
  'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8, 'c128': 16,
}  # fmt: skip

# These move no data.
_FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'iota'),
  *('partition-id', 'replica-id', 'opt-barrier', 'domain', 'add-dependency', 'async-update'),
)
_OUTER = ('while', 'call', 'conditional', 'async-start')  # their callees are counted

_HEADER = re.compile(r'^(ENTRY )?%?([^\s(]+) \(.*\{$')
_ARRAY = re.compile(r'([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](?:\{([^{}]*)\})?')
_OPERAND = re.compile(r'%([\w.\-]+)')


class Array(NamedTuple):
  """Type and shape of an array, and whether it lies in the main memory of the device."""

  dtype: str
  shape: tuple[int, ...]
  main: bool

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * _BYTES.get(self.dtype, 1 if self.dtype.startswith('f8') else 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a program; ``attributes`` follow the operands, ``type`` is the result type."""

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  root: bool

  @functools.cached_property
  def arrays(self) -> list[Array]:
    """The arrays of the result, several for a tuple."""
    return [
      Array(dtype, tuple(map(int, filter(None, shape.split(',')))), 'S(' not in layout)
      for dtype, shape, layout in _ARRAY.findall(self.type)
    ]

  def called(self, *keys: str) -> Iterator[str]:
    """The computations under these keys."""
    for key in keys:
      found = re.search(rf'\b{key}=(?:%([\w.\-]+)|\{{([^}}]*)\}})', self.attributes)
      if found:
        yield from [found[1]] if found[1] else _OPERAND.findall(found[2])


Computation = dict[str, Instruction]


class Collective(NamedTuple):
  """Collectives of one kind.

  Attributes:
    kind: one of ``COLLECTIVES``.
    times: how often they run in the program.
    bytes: of the larger side on a device.
  """

  kind: str
  times: int
  bytes: int


class HloCost(NamedTuple):
  """Cost of one run of a program on one device.

  Attributes:
    flops: of matrix products and convolutions; a multiply-add counts as two.
    bytes: to and from main memory.
    collectives: by kind.
    gathered: largest result of each all-gather in bytes, the largest first.
  """

  flops: int
  bytes: int
  collectives: tuple[Collective, ...]
  gathered: tuple[int, ...]


class HloProgram:
  """A program by its computations."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    self._entry = ''
    current: Computation | None = None
    for line in text.splitlines():
      if current is None:
        if (header := _HEADER.match(line)) is not None:
          current = self.computations[header[2]] = {}
          self._entry = header[2] if header[1] else self._entry
      elif line.startswith('}'):
        current = None
      elif (instruction := _parse(line)) is not None:
        current[instruction.name] = instruction

  def cost(self) -> HloCost:
    """The cost of the whole program."""
    flops, moved = 0, 0
    found: dict[str, tuple[str, int, int]] = {}
    for name, times in self._runs(self._entry, 1):
      computation = self.computations[name]
      for one in computation.values():
        flops += times * self._flops(computation, one)
        moved += times * self._bytes(computation, one)
        for inside, other in self._collectives(name, one):
          # A TPU runs one in pieces beside an independent loop: the channel is the same, and it
          # begins and ends outside the loop.
          key = f'{name} {one.name}'
          if 'async' in one.name + inside:
            key = (re.search(r'channel_id=\d+', other.attributes) or [key])[0]
          if key not in found or times < found[key][-1]:
            found[key] = (*self._sizes(inside, other), times)
    collectives = []
    for kind in sorted({one[0] for one in found.values()}):
      own = [one[1:] for one in found.values() if one[0] == kind]
      collectives.append(
        Collective(kind, sum(times for _, times in own), sum(size * times for size, times in own))
      )
    gathered = [
      size for kind, size, times in found.values() if kind == 'all-gather' for _ in range(times)
    ]
    return HloCost(flops, moved, tuple(collectives), tuple(sorted(gathered, reverse=True)))

  def _runs(self, name: str, times: int) -> Iterator[tuple[str, int]]:
    """Yields computations whose instructions run one by one (not fusions), and how often."""
    yield name, times
    for one in self.computations[name].values():
      if one.opcode == 'while':
        for body in one.called('body'):
          yield from self._runs(body, times * self._trips(one))
      elif one.opcode in _OUTER:
        # An upper bound, since all branches of a conditional count.
        keys = ('to_apply', 'calls', 'branch_computations', 'true_computation', 'false_computation')
        for inner in one.called(*keys):
          yield from self._runs(inner, times)

  def _trips(self, loop: Instruction) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
      return int(known[1])
    for name in loop.called('condition'):
      # jax loops count from 0 to a constant.
      limits = [
        int(value[1])
        for one in self._inside(name)
        if one.opcode == 'constant' and (value := re.search(r'\((\d+)\)', one.attributes))
      ]
      if limits:
        return max(limits)
    return 1

  def _inside(self, name: str) -> Iterator[Instruction]:
    for one in self.computations.get(name, {}).values():
      yield one
      if one.opcode in ('fusion', 'call'):
        for inner in one.called('calls', 'to_apply'):
          yield from self._inside(inner)

  def _flops(self, computation: Computation, one: Instruction) -> int:
    if one.opcode == 'fusion':
      return sum(
        self._flops(inner, other)
        for name in one.called('calls')
        if (inner := self.computations.get(name)) is not None
        for other in inner.values()
      )
    if one.opcode == 'dot':
      return _dot_flops(computation, one, _numbers(one.attributes, 'lhs_contracting_dims=\\{'))
    if one.opcode == 'convolution':
      return _convolution_flops(computation, one)
    if one.opcode == 'custom-call' and 'dot_dimension_numbers' in one.attributes:  # cuBLAS
      return _dot_flops(
        computation, one, _numbers(one.attributes, '"lhs_contracting_dimensions":\\[')
      )
    if (
      one.opcode == 'custom-call' and 'tpu_custom_call' in one.attributes
    ):  # a Pallas kernel declares its cost
      stated = re.search(r'"flops":"?(\d+)', one.attributes)
      return int(stated[1]) if stated else 0
    if one.opcode == 'custom-call' and 'onednn$matmul' in one.attributes:
      first = _operand(computation, one, 0)
      return 2 * math.prod(one.arrays[0].shape) * first.shape[-1] if first and first.shape else 0
    return 0

  def _bytes(self, computation: Computation, one: Instruction) -> int:
    """Bytes to and from main memory if each operand is read once."""
    if one.opcode in (*_FREE, *_OUTER) or one.opcode.endswith('-done'):
      return 0
    if one.opcode == 'custom-call' and 'AllocateBuffer' in one.attributes:
      return 0
    operands = [computation[name] for name in one.operands if name in computation]
    if one.opcode in ('dynamic-slice', 'gather', 'slice'):
      return 2 * _main(one.arrays)
    if one.opcode in ('dynamic-update-slice', 'scatter'):
      update = operands[-1 if one.opcode == 'scatter' else 1]
      return 2 * _main(update.arrays)
    if one.opcode == 'fusion':
      name = next(iter(one.called('calls')), '')
      return self._fusion_bytes(self.computations.get(name, {}), one, operands)
    if one.opcode == 'slice-start':  # the result has the operand, the slice and a token
      return one.arrays[1].nbytes + _main(one.arrays[1:2])
    if one.opcode == 'copy-start':  # the result repeats the operand
      return _main(one.arrays[:1]) + sum(_main(operand.arrays) for operand in operands)
    return _main(one.arrays) + sum(_main(operand.arrays) for operand in operands)

  def _fusion_bytes(
    self, inner: Computation, one: Instruction, operands: Sequence[Instruction]
  ) -> int:
    """The bytes of a fusion, which reads only slices of operands and writes only updates."""
    total = 0
    for operand, parameter in zip(operands, _parameters(inner), strict=False):
      for array in operand.arrays[:1] if operand.opcode != 'tuple' else ():
        if array.main:
          total += min(
            array.nbytes, self._read(inner, parameter) * array.nbytes // max(array.size, 1)
          )
    written = _main(one.arrays)
    roots = [other for other in inner.values() if other.root]
    updated = sum(_written(inner, root) for root in roots)
    return total + (min(written, updated) if updated and written else written)

  def _read(self, inner: Computation, value: Instruction) -> int:
    """The elements of a value read by a fusion: all, unless it only slices the value."""
    total = 0
    for user in inner.values():
      if value.name not in user.operands:
        continue
      if user.opcode in ('dynamic-slice', 'gather', 'slice'):
        if user.operands[0] != value.name:
          return value.arrays[0].size
        total += user.arrays[0].size
      elif user.opcode == 'dynamic-update-slice' and user.operands[0] == value.name:
        continue  # updated in place
      elif user.opcode in ('bitcast', 'reshape', 'convert', 'copy'):
        total += self._read(inner, user)
      elif user.opcode == 'fusion':
        called = self.computations.get(next(iter(user.called('calls')), ''), {})
        for number, name in enumerate(user.operands):
          if name == value.name and number < len(parameters := _parameters(called)):
            total += self._read(called, parameters[number])
      else:
        return value.arrays[0].size
    return total

  def _collectives(self, name: str, one: Instruction) -> Iterator[tuple[str, Instruction]]:
    if one.opcode.removesuffix('-start') in COLLECTIVES:
      yield name, one
    elif one.opcode == 'fusion':
      for called in one.called('calls'):
        for inner in self.computations.get(called, {}).values():
          yield from self._collectives(called, inner)

  def _sizes(self, name: str, one: Instruction) -> tuple[str, int]:
    """Kind of a collective and bytes of the larger side."""
    computation = self.computations[name]
    kind = one.opcode.removesuffix('-start')
    out = sum(array.nbytes for array in one.arrays)
    taken = sum(
      array.nbytes
      for operand in one.operands
      if operand in computation
      for array in computation[operand].arrays
    )
    if one.opcode.endswith('-start') and kind != 'all-reduce':
      out -= taken  # the result includes the operands
    if kind == 'all-reduce' and (
      'all-reduce-scatter' in name
      or any(_slices(computation, other, one) for other in computation.values())
    ):
      kind = 'reduce-scatter'  # TPUs fuse an all-reduce and a slice of it
    return kind, max(out, taken)


def _parse(line: str) -> Instruction | None:
  """A line of a computation; None for other lines."""
  name, equals, rest = line.strip().partition(' = ')
  if not equals:
    return None
  end = _matching(rest, 0) + 1 if rest.startswith('(') else rest.find(' ')
  kind, rest = rest[:end], rest[end:].lstrip()
  opcode, parenthesis, _ = rest.partition('(')
  if not parenthesis:
    return None
  close = _matching(rest, len(opcode))
  inside = rest[len(opcode) + 1 : close]
  literal = opcode in ('constant', 'parameter')
  return Instruction(
    name.removeprefix('ROOT ').lstrip('%'),
    kind,
    opcode,
    (inside,) if literal else tuple(_OPERAND.findall(inside)),
    f'({inside}) {rest[close + 1 :]}' if literal else rest[close + 1 :],
    name.startswith('ROOT '),
  )


def _matching(text: str, start: int) -> int:
  """Position of the parenthesis that closes the one at ``start``."""
  depth = 0
  for place in re.finditer(r'[()]', text[start:]):
    depth += 1 if place[0] == '(' else -1
    if not depth:
      return start + place.start()
  return len(text)


def _slices(computation: Computation, one: Instruction, reduced: Instruction) -> bool:
  """Whether an instruction takes the part of one device from a reduced array."""
  if one.opcode != 'dynamic-slice':
    return False
  source: Instruction | None = computation.get(one.operands[0])
  while source is not None and source.opcode in ('bitcast', 'get-tuple-element', 'reshape'):
    source = computation.get(source.operands[0])
  return source is reduced


def _main(arrays: Sequence[Array]) -> int:
  return sum(array.nbytes for array in arrays if array.main)


def _parameters(computation: Computation) -> list[Instruction]:
  found = (one for one in computation.values() if one.opcode == 'parameter')
  return sorted(found, key=lambda one: int(one.operands[0] or 0))


def _written(inner: Computation, root: Instruction) -> int:
  """Bytes written by the root of a fusion that updates part of an operand; 0 means all."""
  if root.opcode == 'bitcast' and root.operands[0] in inner:
    return _written(inner, inner[root.operands[0]])
  if root.opcode == 'dynamic-update-slice' and root.operands[1] in inner:
    return sum(array.nbytes for array in inner[root.operands[1]].arrays)
  if root.opcode == 'tuple':
    parts = [inner[name] for name in root.operands if name in inner]
    written = [_written(inner, part) for part in parts]
    if any(written):
      return sum(
        some or sum(array.nbytes for array in part.arrays)
        for some, part in zip(written, parts, strict=True)
      )
  return 0


def _operand(computation: Computation, one: Instruction, number: int) -> Array | None:
  if number < len(one.operands) and one.operands[number] in computation:
    return next(iter(computation[one.operands[number]].arrays), None)
  return None


def _numbers(attributes: str, opening: str) -> list[int]:
  """Numbers in brackets after ``opening``, a regular expression."""
  found = re.search(opening + r'([\d,"]*)', attributes)
  return [int(number) for number in re.findall(r'\d+', found[1])] if found else []


def _dot_flops(computation: Computation, one: Instruction, contracting: Sequence[int]) -> int:
  first = _operand(computation, one, 0)
  if first is None or not one.arrays:
    return 0
  return 2 * math.prod(one.arrays[0].shape) * math.prod(first.shape[axis] for axis in contracting)


def _convolution_flops(computation: Computation, one: Instruction) -> int:
  """FLOPs as counted by XLA: places of the window on padding or dilation cost nothing."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', one.attributes)
  image, kernel = (_operand(computation, one, number) for number in (0, 1))
  if labels is None or image is None or kernel is None:
    return 0
  window = re.search(r'window=\{([^}]*)\}', one.attributes)
  values = dict(re.findall(r'(\w+)=(\S+)', window[1])) if window else {}
  rank = len(values.get('size', '').split('x')) if values.get('size') else 0

  def each(key: str, default: str) -> list[str]:
    return values[key].split('x') if key in values else [default] * rank

  pairs = 1
  spatial = zip(
    each('size', '1'),
    each('stride', '1'),
    each('pad', '0_0'),
    each('lhs_dilate', '1'),
    each('rhs_dilate', '1'),
    strict=True,
  )
  for axis, (size, stride, pad, dilate, spread) in enumerate(spatial):
    length = image.shape[labels[1].index(str(axis))]
    places = one.arrays[0].shape[labels[3].index(str(axis))]
    low = int(pad.split('_')[0])
    valid = 0
    for place in range(places):
      for number in range(int(size)):
        at = place * int(stride) - low + number * int(spread)
        valid += at % int(dilate) == 0 and 0 <= at // int(dilate) < length
    pairs *= valid
  out = one.arrays[0].shape
  rows, features = out[labels[3].index('b')], out[labels[3].index('f')]
  return 2 * pairs * rows * features * kernel.shape[labels[2].index('i')]
