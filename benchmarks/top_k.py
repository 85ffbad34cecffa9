"""Exact search of an index on the device: dprjax, torch.topk and, if it is installed, faiss.

    python benchmarks/top_k.py [--passages=1000000] [--dimension=768] [--queries=64] [--k=100]
        [--runs=7]

Vectors are random; all find the same scores (1e-3). PyTorch multiplies blocks of the corpus in
float32 and keeps the best of each by torch.topk. faiss is IndexFlatIP on the processor. Writes
benchmarks/results/top_k-DEVICE.json.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

import options
import record
import timing
from dprjax.retrieval import exact

BLOCK = 1 << 18  # rows of PyTorch at a time


def main() -> None:
  parser = options.parser(
    __doc__,
    passages=(50_000, 1_000_000),
    dimension=(384, 768),
    queries=(16, 64),
    k=100,
    runs=(3, 7),
  )
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  corpus, queries = (
    rng.standard_normal((rows, args.dimension), np.float32)
    for rows in (args.passages, args.queries)
  )
  index = exact.ExactIndex(corpus)
  ways: dict[str, Callable[[], Any]] = {
    'dprjax': lambda: index.search(queries, args.k).scores,
    'torch.topk': by_torch(corpus, queries, args.k),
  }
  versions = {'torch': torch.__version__}
  try:
    import faiss
  except ImportError as error:
    print(f'faiss is left out: {error}', flush=True)
  else:
    flat = faiss.IndexFlatIP(args.dimension)
    flat.add(corpus)
    ways['faiss, processor'] = lambda: flat.search(queries, args.k)[0]
    versions['faiss'] = faiss.__version__
  expected = np.sort(queries @ corpus.T, axis=1)[:, : -args.k - 1 : -1]
  for name, way in ways.items():
    np.testing.assert_allclose(way(), expected, rtol=1e-3, atol=1e-2, err_msg=name)
  cases = timing.summary(timing.take_turns(ways, args.runs), 'torch.topk')
  for case in cases.values():
    case['queries_a_second'] = round(args.queries / case['milliseconds'] * 1e3, 1)
  timing.show(cases, ['milliseconds', 'fastest_and_slowest', 'ratio', 'queries_a_second'], 'search')
  record.write_jax('top_k', cases, vars(args), versions)


def by_torch(corpus: np.ndarray, queries: np.ndarray, k: int) -> Callable[[], np.ndarray]:
  """A search by blocks on the device of JAX."""
  device = 'cuda' if jax.default_backend() == 'gpu' else 'cpu'
  torch.backends.cuda.matmul.allow_tf32 = False
  placed = torch.tensor(corpus, device=device)

  def search() -> np.ndarray:
    asked = torch.tensor(queries, device=device)
    best = [
      torch.topk(asked @ block.T, min(k, len(block)), dim=1).values for block in placed.split(BLOCK)
    ]
    return torch.topk(torch.cat(best, dim=1), k, dim=1).values.cpu().numpy()

  return search


if __name__ == '__main__':
  main()
