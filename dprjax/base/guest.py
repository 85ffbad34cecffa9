"""Keeps dprjax from changing the logging of the program that imports it."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Inside the block, absl does not configure the root logger, and orbax logs nothing.

  absl, which orbax logs through, calls ``logging.basicConfig`` where the root logger has no
  handler. Inside the block the root logger has the last-resort handler of Python instead.
  """
  root, absl = logging.getLogger(), logging.getLogger('absl')
  stand_in, level = logging.lastResort, absl.level
  added = stand_in if stand_in is not None and not root.handlers else None
  if added is not None:
    root.addHandler(added)
  absl.setLevel(logging.ERROR)
  try:
    yield
  finally:
    absl.setLevel(level)
    if added is not None:
      root.removeHandler(added)
