"""The machines of a plan, by name, with their limits."""

import importlib.util
import math
import os
import re
import sys
from typing import NamedTuple

from dprjax.base import machine
from dprjax.base.errors import InputError

GIB = 2**30


class Chip(NamedTuple):
  """An accelerator and its memory.

  Attributes:
    kind: the jax name of the device.
    memory: bytes for programs.
    source: of the number.
  """

  kind: str
  memory: float
  source: str


_TPU = 'cloud.google.com/tpu/docs'
_NVIDIA = 'the data sheet, dense'
# Memory is the limit of the TPU compiler for programs, and the jax default of three quarters on a
# GPU.
CHIPS = {
  'v4': Chip('TPU v4', 30.75 * GIB, f'{_TPU}/v4'),
  'v5e': Chip('TPU v5 lite', 15.75 * GIB, f'{_TPU}/v5e'),
  'v5p': Chip('TPU v5', 95.74 * GIB, f'{_TPU}/v5p'),
  'v6e': Chip('TPU v6 lite', 31.25 * GIB, f'{_TPU}/v6e'),
  'h100': Chip('NVIDIA H100 80GB HBM3', 0.75 * 79.1 * GIB, _NVIDIA),
  'a100': Chip('NVIDIA A100-SXM4-80GB', 0.75 * 79.2 * GIB, _NVIDIA),
  'l4': Chip('NVIDIA L4', 0.75 * 22.0 * GIB, _NVIDIA),
}

TPUS = ('v4', 'v5e', 'v5p', 'v6e')
GPUS = ('h100', 'a100', 'l4')
_MOST = 4096  # devices

# GpuTargetConfigProto of the XLA GPU compiler, in the order of `_GPU_FIELDS`.
_GPU_FIELDS = (
  'shared_memory_per_block',
  'shared_memory_per_core',
  'threads_per_core_limit',
  'core_count',
  'fpus_per_core',
  'memory_bandwidth',
  'l2_cache_size',
  'clock_rate_ghz',
  'device_memory_size',
  'shared_memory_per_block_optin',
)
_GPU_VALUES = {
  'h100': (49152, 233472, 2048, 132, 128, 3352320000000, 52428800, 1.98, 84942979072, 232448),
  'a100': (49152, 167936, 2048, 108, 64, 2039000000000, 41943040, 1.41, 85040168960, 166912),
  'l4': (49152, 102400, 1536, 58, 128, 300096000000, 50331648, 2.04, 23656071168, 101376),
}
_CAPABILITY = {'h100': (9, 0), 'a100': (8, 0), 'l4': (8, 9)}
_SAME = """  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""


class Target(NamedTuple):
  """Chips of one kind.

  Attributes:
    name: as given by the user.
    chip: a key of ``CHIPS``, or 'cpu'.
    topology: of a TPU, by its name in libtpu; else ''.
    devices: their number.
  """

  name: str
  chip: str
  topology: str
  devices: int

  @property
  def platform(self) -> str:
    """The platform name in jax."""
    return 'tpu' if self.chip in TPUS else 'cuda' if self.chip in GPUS else 'cpu'

  @property
  def memory(self) -> float:
    """Bytes for programs on a chip."""
    if self.chip in CHIPS:
      return CHIPS[self.chip].memory
    return machine.memory_bytes() / self.devices

  def gpu_config(self) -> str:
    """The device description of the XLA GPU compiler."""
    major, minor = _CAPABILITY[self.chip]
    fields = zip(_GPU_FIELDS, _GPU_VALUES[self.chip], strict=True)
    lines = ''.join(f'  {name}: {value}\n' for name, value in fields)
    return (
      f'gpu_device_info {{\n{_SAME}{lines}'
      f'  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n'
      'platform_name: "CUDA"\n'
      'dnn_version_info { major: 9 minor: 10 }\n'
      'runtime_version { major: 12 minor: 8 patch: 0 }\n'
      f'device_description_str: "{CHIPS[self.chip].kind}"\n'
    )


def parse(name: str) -> Target:
  """Parses the name of a target: ``v5e:2x4``, ``v4:2x2x1``, ``h100:8``, ``cpu`` or ``cpu:4``."""
  chip, colon, rest = name.strip().lower().partition(':')
  axes = (2 if chip in ('v5e', 'v6e') else 3) if chip in TPUS else 1
  sizes = [1] if chip == 'cpu' and not colon else []
  if re.fullmatch('x'.join([r'[1-9]\d{0,4}'] * axes), rest):
    sizes = [int(size) for size in rest.split('x')]
  count = math.prod(sizes)
  if chip not in (*TPUS, *GPUS, 'cpu') or not sizes or count > _MOST:
    raise InputError(
      f'--target={name!r:.60}: choose TPUs {", ".join(TPUS)} with a topology (v5e:2x4, v5p:2x2x1), '
      f'GPUs {", ".join(GPUS)} with a number (h100:8), or cpu; at most {_MOST:,} devices'
    )
  return Target(f'{chip}{colon}{rest}', chip, f'{chip}:{rest}' if chip in TPUS else '', count)


def check_installed(target: Target) -> None:
  """Raises InputError if the compiler of a target is not installed."""
  compilers = {
    'tpu': ('plan', ['libtpu']),
    'cuda': ('plan-cuda', ['jax_cuda12_plugin', 'jax_cuda13_plugin']),
  }
  extra, packages = compilers.get(target.platform, ('', []))
  if packages and not any(map(importlib.util.find_spec, packages)):
    raise InputError(f"--target={target.name} needs its compiler: pip install 'dprjax[{extra}]'")


def environment(target: Target) -> dict[str, str]:
  """The environment of a process that compiles for a target, without settings of this process."""
  settings = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'JAX_PLATFORMS', 'JAX_COMPILATION_CACHE_DIR')
  inherited = {name: value for name, value in os.environ.items() if name not in settings}
  flags = {}
  if target.platform == 'cpu':
    flags = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={target.devices}'}
  path = os.pathsep.join(filter(None, sys.path))
  return {
    **inherited,
    **flags,
    'PYTHONPATH': path,  # for custom methods
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_MIN_LOG_LEVEL': '3',
    'TF_CPP_MIN_LOG_LEVEL': '3',
  }
