"""Keeps the logging of a program that uses dprjax as the program has it."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Around imports and work: keeps absl from configuring the root logger, and orbax quiet.

  absl, which orbax logs through, calls ``logging.basicConfig`` where the root logger has no
  handler. Meanwhile it has the one that Python uses where there is none.
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
