"""Random choices that depend only on an id. Each choice has a name, which keeps it independent."""

import hashlib


def draw(id_: str, seed: int, choice: str) -> bytes:
  """32 random bytes for an id.

  Args:
    id_: what is chosen, or not.
    seed: of the run.
    choice: the decision name; '' is the split of ``dprjax.papers``.
  """
  return hashlib.sha256(f'{choice}{seed}:{id_}'.encode()).digest()


def fraction(id_: str, seed: int, choice: str) -> float:
  """`draw` as a number in [0, 1)."""
  return int.from_bytes(draw(id_, seed, choice)[:7]) / 2**56
