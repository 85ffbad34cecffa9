"""Cosines of the prompts of tasks, and the weights of a summed prompt (NIR-Prompt, Figure 7)."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

import charts
from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.models.artifact import Prompt
from dprjax.papers.nir_prompt import learned_tokens


def cosines(prompts: Mapping[str, Prompt]) -> Float[np.ndarray, 'K K']:
  """The cosine of every two prompts, of all their vectors laid end to end.

  Raises:
    InputError: they do not have the same learned slots, or none.
  """
  spaces = {
    name: {slot: vectors.shape for slot, vectors in learned_tokens.vectors(prompt).items()}
    for name, prompt in prompts.items()
  }
  first = next(iter(spaces))
  for name, space in spaces.items():
    if space != spaces[first] or not space:
      raise InputError(
        f'{prompts[name].path}: its learned slots are {space or "none"}, and those of {first} '
        f'{spaces[first] or "none"}; compare prompts of one template'
      )
  rows = np.stack(
    [
      np.concatenate(
        [learned_tokens.vectors(prompt)[slot].reshape(-1) for slot in sorted(spaces[first])]
      )
      for prompt in prompts.values()
    ]
  ).astype(np.float64)
  rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
  return (rows @ rows.T).astype(np.float32)


def weights(prompts: Mapping[str, Prompt]) -> dict[str, dict[str, float]]:
  """For each prompt that is a sum: the weights of the trained prompts."""
  return {
    name: {str(source): float(value) for source, value in prompt.meta['weights'].items()}
    for name, prompt in prompts.items()
    if prompt.meta.get('weights')
  }


def draw(prompts: Mapping[str, Prompt], path: files.PathLike, foot: str = '') -> None:
  """The cosines as a figure, and beside them the weights in prompts of new tasks.

  Raises:
    InputError: as ``cosines``; the suffix of ``path`` is no format.
  """
  names = tuple(prompts)
  panels = [charts.Matrix('cosines of prompts', names, names, cosines(prompts))]
  if sums := weights(prompts):
    sources = tuple(sorted({source for own in sums.values() for source in own}))
    values = [[own.get(source, np.nan) for source in sources] for own in sums.values()]
    panels.append(
      charts.Matrix('weights of new prompts', tuple(sums), sources, np.array(values, np.float32))
    )
  charts.matrices(panels, foot, path)
