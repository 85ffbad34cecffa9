"""Time and memory of the contrastive loss and its gradient, from 256 to 65,536 passages.

    python benchmarks/contrastive.py [--queries=256] [--rows=1024] [--most=2048] [--runs=5]
    [--width=384]

Measures the part of training/dpr.py after encoding: the scores of all queries and passages without
false negatives, cross-entropy, accuracy, and the gradient with respect to the vectors of both
sides. There are three series:

- a fixed number of queries with more and more negatives: memory should grow linearly
- as many queries as passages, the whole batch of one device, scored at once: quadratically
- the same in blocks of --rows queries, as a training scores them: linearly again

Memory is the temporary memory of the compiled program, without arguments and results. A case that
requests more than --most MiB or takes more than --work TFLOP is only compiled. `power` is x if
memory grows as the x-th power of the passages since the case before. Writes
benchmarks/results/contrastive-DEVICE.json.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import options
import record
import timing
from dprjax.base import mesh as meshes
from dprjax.losses import contrastive

COUNTS = (256, 1024, 4096, 16_384, 65_536)


def main() -> None:
  args = options.parser(
    __doc__,
    queries=256,
    width=384,
    relevant=4,
    runs=5,
    most=(2048, 40_000),
    work=(1, 40),
    rows=1024,
    passages=COUNTS[-1],
  ).parse_args()
  counts = [count for count in COUNTS if count <= args.passages]
  cases: dict[str, Any] = {}
  for series, queries, at_a_time in (
    (f'{args.queries} queries', args.queries, args.queries),
    ('as many queries', 0, COUNTS[-1]),
    (f'as many queries, {args.rows} at a time', 0, args.rows),
  ):
    ways, found = {}, {}
    before = None
    for count in counts:
      rows = min(queries or count, count)
      program, inputs, temporary = compiled(rows, count, args.width, args.relevant, at_a_time)
      found[f'{count} passages'] = case = {
        'queries': rows,
        'temporary_mib': round(temporary, 2),
        'scores_mib': round(4 * rows * count / 2**20, 2),
      }
      if before is not None:
        case['power'] = round(math.log(temporary / before[1]) / math.log(count / before[0]), 2)
      before = count, temporary
      # Forward, and two products backward.
      if temporary <= args.most and 6 * rows * count * args.width <= args.work * 1e12:
        ways[f'{count} passages'] = lambda program=program, inputs=inputs: jax.block_until_ready(
          program(*inputs)
        )
    for name, timed in timing.summary(timing.take_turns(ways, args.runs)).items():
      found[name] |= timed
    timing.show(
      found,
      ['queries', 'temporary_mib', 'scores_mib', 'power', 'milliseconds', 'fastest_and_slowest'],
      series,
    )
    power = found[f'{counts[-1]} passages'].get('power', math.nan)
    print(
      f'{series}: memory grows as the passages to the power {power}: '
      f'{"linearly" if power < 1.25 else "faster than linearly"}\n',
      flush=True,
    )
    cases[series] = found
  record.write_jax('contrastive', cases, vars(args))


def compiled(
  queries: int, passages: int, width: int, relevant: int, at_a_time: int
) -> tuple[Any, Any, float]:
  """The program, its arguments, and the MiB that it requests beside them and its results."""
  each = passages // queries
  mesh = meshes.make_mesh({'data': 1}, jax.devices()[:1])

  def loss(
    vectors: tuple[jax.Array, jax.Array], index: jax.Array, known: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    found = contrastive.info_nce(*vectors, index, known, mesh, rows=at_a_time, temperature=0.05)
    return jnp.mean(found.loss), {
      'accuracy': jnp.mean(found.accuracy),
      'negatives': jnp.mean(found.negatives),
    }

  rng = np.random.default_rng(0)
  q, p = (rng.normal(size=(rows, width)).astype(np.float32) for rows in (queries, passages))
  q, p = (jnp.asarray(one / np.linalg.norm(one, axis=1, keepdims=True)) for one in (q, p))
  index = jnp.arange(passages, dtype=jnp.int32).reshape(queries, each)
  known = jnp.asarray(rng.integers(-1, passages, (queries, relevant)), jnp.int32)
  inputs = (q, p.reshape(queries, each, width)), index, known
  program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*inputs).compile()
  return program, inputs, timing.temporary_mib(program)


if __name__ == '__main__':
  main()
