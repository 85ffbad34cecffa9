"""Saving small arrays of a training from several devices: dprjax against the default of orbax.

    python benchmarks/checkpoint.py [--devices=8] [--runs=5] [--arrays=106] [--rows=128]

A trained subtree has --arrays matrices of --rows x --rows (a prompt encoder has a hundred small
ones) and two Adam moments of each. It is replicated on --devices simulated devices of this
processor, as `dprjax.train` keeps it. `orbax` cuts every array into a slice for each device;
`dprjax` writes arrays of less than 1 MiB once. Writes benchmarks/results/checkpoint-DEVICE.json.
"""

import argparse
import itertools
import logging
import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp

import record
import timing
from dprjax.training import checkpoint


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (('devices', 8), ('runs', 5), ('arrays', 106), ('rows', 128)):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args()
  logging.getLogger('absl').setLevel(logging.ERROR)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', args.devices)
  mesh = jax.make_mesh((args.devices,), ('data',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  values = {
    f'layer_{i}': jax.device_put(np.full((args.rows, args.rows), i, np.float32), whole)
    for i in range(args.arrays)
  }
  moments = {'mu': values, 'nu': values}
  with tempfile.TemporaryDirectory() as made:
    steps = itertools.count(1)
    saved = checkpoint.Checkpoints(pathlib.Path(made), 'b' * 64)  # registers a handler

    def way(least: int | None) -> Callable[[], None]:
      def save() -> None:
        ocp.type_handlers.register_type_handler(
          jax.Array,
          ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=least),
          override=True,
        )
        saved.save(next(steps), values, moments, {})
        saved.wait()

      return save

    ways = {'orbax': way(None), 'dprjax': way(1 << 20)}
    cases = timing.summary(timing.take_turns(ways, args.runs), 'orbax')
    saved.close()
  timing.show(cases, ['milliseconds', 'fastest_and_slowest', 'ratio'])
  record.write('checkpoint', cases, vars(args), {'orbax': ocp.__version__, 'jax': jax.__version__})


if __name__ == '__main__':
  main()
