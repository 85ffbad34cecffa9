"""Cores and memory of this machine or container."""

import contextlib
import os
import pathlib

_LIMITS = '/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes'


def cores() -> int:
  """Processor cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def memory_bytes() -> int:
  """Main memory, or the container limit."""
  limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
  for path in _LIMITS:
    with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
      limits.append(int(pathlib.Path(path).read_text()))
  return min(limits)
