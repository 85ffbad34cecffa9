import numpy as np

import prompt_cosines
from dprjax.models.artifact import Prompt


def prompt(first, second, **meta):
  arrays = {'slots/query/P1': first, 'slots/passage/P1': second}
  return Prompt(
    {'kind': 'template', **meta},
    {name: np.array(rows, np.float32) for name, rows in arrays.items()},
    'task.npz',
  )


PROMPTS = {
  'qa': prompt([[1, 0]], [[0, 2]]),
  'dr': prompt([[-2, 0]], [[0, -4]]),
  'rd': prompt([[0, 3]], [[0, 0]]),
  'new': prompt([[1, 0]], [[0, 0]], weights={'qa': 0.5, 'dr': -0.25}),
}


def test_cosines_and_weights():
  expected = [
    [1, -1, 0, 5**-0.5],
    [-1, 1, 0, -(5**-0.5)],
    [0, 0, 1, 0],
    [5**-0.5, -(5**-0.5), 0, 1],
  ]
  np.testing.assert_allclose(prompt_cosines.cosines(PROMPTS), expected, atol=1e-6)
  assert prompt_cosines.weights(PROMPTS) == {'new': {'qa': 0.5, 'dr': -0.25}}
