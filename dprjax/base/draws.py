"""Random choices that depend only on an id: the same in every run.

Two choices by one seed must not know of each other. Each has a name, which is hashed too.
"""

import hashlib


def draw(id_: str, seed: int, choice: str) -> bytes:
  """32 random bytes for an id, independent of those of any other choice.

  Args:
    id_: what is chosen, or not.
    seed: of the run.
    choice: the name of what is decided. '' is the split of ``dprjax.papers``, older than the names.
  """
  return hashlib.sha256(f'{choice}{seed}:{id_}'.encode()).digest()


def fraction(id_: str, seed: int, choice: str) -> float:
  """`draw` as a number in [0, 1)."""
  return int.from_bytes(draw(id_, seed, choice)[:7]) / 2**56
