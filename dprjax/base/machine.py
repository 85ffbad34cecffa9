"""Cores and memory of this machine or container, and the programs compiled for it.

The persistent compilation cache of JAX keeps programs between commands. Its key has the program,
the compiler version and flags, and the kind of device, but not the instruction set of a CPU. The
name of the folder has that, so that different machines can share a home directory.
"""

import contextlib
import hashlib
import os
import pathlib
import platform

from dprjax.base import files

_BYTES = 4 << 30  # of kept programs, at most; the least recently used go first
_SECONDS = 0.3  # faster compilations are not worth a file
_LIMITS = '/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes'


def cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def memory_bytes() -> int:
  """Main memory, or the container limit."""
  limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
  for path in _LIMITS:
    with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
      limits.append(int(pathlib.Path(path).read_text()))
  return min(limits)


def keep_programs() -> None:
  """Keeps programs compiled from now on.

  They lie in ``JAX_COMPILATION_CACHE_DIR`` (nowhere if that is empty), or else below the user cache
  directory, if that can be written.
  """
  import jax  # not at the top: commands import this module before they read their arguments

  if (variable := os.environ.get('JAX_COMPILATION_CACHE_DIR')) is not None:
    # For JAX, '' is the working directory.
    jax.config.update('jax_compilation_cache_dir', variable or None)
    return
  folder = files.user_cache() / f'compiled-{_instructions()}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _SECONDS)
  jax.config.update('jax_compilation_cache_max_size', _BYTES)


def _instructions() -> str:
  features = platform.machine()
  try:
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith(('flags', 'Features')):
        features += ' '.join(sorted(line.partition(':')[2].split()))
        break
  except OSError:
    features += platform.processor()
  return hashlib.sha256(features.encode()).hexdigest()[:12]
