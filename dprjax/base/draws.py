"""Random choices that depend only on the seed, an id and the name of the choice."""

import hashlib


def draw(id_: str, seed: int, choice: str) -> bytes:
  """32 random bytes for an id.

  Args:
    choice: names the choice and keeps it independent of others; '' is the split of
      ``dprjax.papers``.
  """
  return hashlib.sha256(f'{choice}{seed}:{id_}'.encode()).digest()


def fraction(id_: str, seed: int, choice: str) -> float:
  """`draw` as a number in [0, 1)."""
  return int.from_bytes(draw(id_, seed, choice)[:7]) / 2**56
