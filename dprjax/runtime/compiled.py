"""Compiled programs, kept between runs: the second start of a command on the same shapes need not
wait for the compiler.

JAX's persistent compilation cache, switched on for the commands (a library leaves it to its user).
Its key holds the program, the compiler's version and flags, and the kind of device, but not the
instructions that a CPU has: those are in the folder's name here, so that a home directory can be
shared by unlike machines.
"""

import hashlib
import os
import pathlib
import platform

import jax

AUTO = 'auto'
_BYTES = 4 << 30  # kept at most; what was not used for longest goes first
_SECONDS = 0.3  # a program that compiles faster is not worth a file


def keep(folder: str = AUTO) -> None:
  """Keeps what is compiled from now on.

  Args:
    folder: 'auto': what ``JAX_COMPILATION_CACHE_DIR`` says (empty: nothing is kept), else a folder
      below the user's cache directory (``XDG_CACHE_HOME``, ``~/.cache``), unless that cannot be
      written; '': nothing is kept; or a folder, which may be on a bucket.
  """
  if folder == AUTO:
    if (said := os.environ.get('JAX_COMPILATION_CACHE_DIR')) is not None:
      jax.config.update(
        'jax_compilation_cache_dir', said or None
      )  # JAX would take '' for the working directory
      return
    home = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
    local = home / 'dprjax' / f'compiled-{_machine()}'
    try:
      local.mkdir(parents=True, exist_ok=True)
    except OSError:
      return
    folder = str(local)
  jax.config.update('jax_compilation_cache_dir', folder or None)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _SECONDS)
  # Eviction takes a file lock, which a bucket does not have.
  jax.config.update('jax_compilation_cache_max_size', -1 if '://' in folder else _BYTES)


def _machine() -> str:
  """A name for what code this processor can run."""
  said = platform.machine()
  try:
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith(('flags', 'Features')):
        said += ' '.join(sorted(line.partition(':')[2].split()))
        break
  except OSError:
    said += platform.processor()
  return hashlib.sha256(said.encode()).hexdigest()[:12]
