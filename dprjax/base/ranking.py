"""The order of a ranking, the same wherever this package ranks: by falling score, and equal scores
by falling id, as trec_eval and pytrec_eval have it.

Scores are compared as float32, since those programs keep them so. Ids are compared as their UTF-8
bytes are: d9 comes before d10.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def places(ids: Sequence[str] | Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """The place of each id among all, ascending, from 0."""
  by_id = sorted(range(len(ids)), key=ids.__getitem__)  # of str: by code point, as UTF-8 bytes
  found = np.empty(len(ids), np.int32)
  found[by_id] = np.arange(len(ids), dtype=np.int32)
  return found


def order(
  queries: Int[np.ndarray, ' rows'],
  scores: Float[np.ndarray, ' rows'],
  ids: Int[np.ndarray, ' rows'],
) -> Int[np.ndarray, ' rows']:
  """The rows by query, and best first within a query; ``ids``: their `places`."""
  with np.errstate(over='ignore'):
    return np.lexsort((-ids, -scores.astype(np.float32), queries))
