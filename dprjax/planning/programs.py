"""Compiles a program of an experiment for a machine that may be absent.

`compiling` starts it as a process, since compilers may crash. It reads the job from standard input,
writes the file named by its argument, and ends when standard input ends.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.experimental import topologies

from dprjax.base import mesh, tree
from dprjax.base.errors import InputError, error_line
from dprjax.encoding import embedder
from dprjax.models import encoder_config, scratch
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.head_specs import HEADS, Head
from dprjax.planning import backbones, targets
from dprjax.training import config as configs
from dprjax.training import dual_encoder, updates
from dprjax.training import method as methods


@dataclasses.dataclass(frozen=True)
class CompileJob:
  """A program to compile.

  Attributes:
    target: a name, see ``targets.parse``.
    config: of the experiment, as on the command line.
    length: tokens of a forward pass; 0 for the update.
    rows: of that pass, over all devices.
  """

  target: str
  config: tuple[str, ...]
  length: int = 0
  rows: int = 64


def read_config(arguments: Sequence[str], platform: str) -> ml_collections.ConfigDict:
  """An experiment for a platform, checked without its data."""
  config = configs.parse(arguments)
  with config.unlocked():
    # Any name works, since no text is read.
    for section in configs.data_sections(config).values():
      section.dir = section.dir or 'any'
  configs.check(config)
  if config.alternatives:
    entries = [configs.flat(entry.to_dict()) for entry in config.alternatives.values()]
    raise InputError(
      f'config.alternatives: plan one of {", ".join(config.alternatives)} (such as '
      'configs/dptdr.py:beir,both), or set the options in which they differ: '
      + ', '.join(f'--config.{key}' for key in sorted(set().union(*entries)))
    )
  if methods.of(config).shapes is None:
    raise InputError(f'config.method: {config.method!r} has no `Method.shapes`, needed by a plan')
  config, _ = dual_encoder.resolve_settings(
    config, {}, functools.partial(backbones.spec_of, config)
  )
  return configs.settle(config, platform)


def batch_of(config: ml_collections.ConfigDict, model: EncoderConfig) -> methods.BatchShapes:
  """The longest batch of an experiment."""
  shapes = methods.load(config.method).shapes
  assert shapes is not None
  return shapes(config, model, backbones.tokenizer())


class Experiment:
  """A method on a mesh, with the shapes of its parameters.

  Attributes:
    config: the experiment.
    shape: of its backbone.
    batch: the longest of the training.
    devices: the mesh.
    model: the method functions.
    params: shapes by flat names.
    layout: their placement in a training.
  """

  def __init__(self, config: ml_collections.ConfigDict, devices: Sequence[jax.Device]):
    self.config = ml_collections.FrozenConfigDict(config)
    self.shape = shape = backbones.shape_of(config)
    method = methods.load(config.method)
    self.batch = batch_of(config, shape)
    self.devices = mesh.make_mesh(config.mesh, devices)
    mesh.check_batch(self.devices, config.batch_size, config.grad_cache)
    self.model = method.build(self.config, shape, self.devices, backbones.tokenizer())

    def init(key: jax.Array) -> dict[str, Any]:
      # Heads required by a method are in the backbone directory.
      heads = {name: Head(HEADS[name].init(shape, key)) for name in method.needs}
      weights = scratch.init_encoder(shape, key)
      return self.model.init(methods.Parts(weights, heads, text=self.batch.parts), key)

    self.params = tree.flatten(jax.eval_shape(init, jax.random.key(0)))
    trainable = tree.trainable_names(config.trainable, list(self.params))
    # The length of the schedule is a constant of the program.
    self.layout = updates.lay_out(
      self.config,
      self.params,
      trainable,
      self.devices,
      config.steps or 1000,
      sharding=(*self.model.sharding, *shape.family.sharding),
    )

  def lower_update(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
    """Lowers the update of `dprjax.train`."""
    return updates.lower(self.model, self.layout, self.params, batch)

  def lower_forward(
    self, rows: int, length: int, memory: float, columns: Sequence[tuple[Any, ...]] = ()
  ) -> jax.stages.Lowered:
    """Lowers the forward pass of `dprjax.encode` for passages, with the same placement of weights.

    Args:
      rows, length, columns: of the batch, as for ``Embedder.lower``.
    """
    devices = self.devices.devices.ravel().tolist()
    arithmetic = encoder_config.arithmetic(self.config.backbone.dtype)
    dtype = embedder.weight_dtype(arithmetic, 'float32', devices[0].platform)
    backbone = {
      name: jax.ShapeDtypeStruct(leaf.shape, dtype)
      for name, leaf in self.params.items()
      if name.startswith('backbone/')
    }
    parts = embedder.weight_parts(tree.nbytes(backbone), memory, len(devices))
    everywhere = mesh.make_mesh({'data': -1, 'fsdp': parts}, devices)
    method = methods.load(self.config.method)
    model = method.build(self.config, self.shape, everywhere, backbones.tokenizer())
    program = embedder.Embedder(
      lambda params, *batch: model.embed(tree.unflatten(params), 'passage', *batch),
      everywhere,
      rows,
      length,
      0,
    )
    whole = mesh.replicated(everywhere)
    shardings = embedder.backbone_shardings(everywhere, self.shape, backbone)
    params = {
      name: jax.ShapeDtypeStruct(
        leaf.shape,
        dtype if name in backbone else jnp.float32,
        sharding=shardings.get(name, whole),
      )
      for name, leaf in self.params.items()
    }
    return program.lower(params, length, columns)

  def held(self) -> dict[str, int]:
    """Bytes kept on a device between steps of a training."""
    state, frozen = self.layout.shapes(self.params)
    return {
      'trained': _on_one(state.trainable),
      'frozen': _on_one(frozen),
      'optimizer': _on_one((state.opt_state, state.average, state.start)),
    }


def _on_one(leaves: Any) -> int:
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(leaves)
  )


def devices_of(target: targets.Target) -> Sequence[jax.Device]:
  """The devices of a target."""
  if target.platform == 'cpu':
    return jax.devices()
  try:
    if target.platform == 'tpu':
      described = topologies.get_topology_desc(
        platform='tpu', topology_name=target.topology, **_bounds(target)
      )
    else:
      described = topologies.get_topology_desc(
        platform='cuda', target_config=target.gpu_config(), topology=f'1x1x{target.devices}'
      )
  except Exception as error:
    raise InputError(f'--target={target.name}: unknown to the compiler ({error!s:.200})') from error
  return described.devices


def _bounds(target: targets.Target) -> dict[str, Any]:
  """Options of libtpu: one chip a host, and the two cores of v4 as one device."""
  bounds: dict[str, Any] = {'chips_per_host_bounds': (1, 1, 1)} if target.devices == 1 else {}
  return bounds | ({'chip_config_name': 'megacore'} if target.chip == 'v4' else {})


def run(job: CompileJob, text: bool = False) -> dict[str, Any]:
  """Compiles; returns facts about the program as JSON, with its ``text`` if asked for."""
  target = targets.parse(job.target)
  config = read_config(job.config, target.platform)
  experiment = Experiment(config, devices_of(target))
  batch = experiment.batch
  began = time.monotonic()
  if job.length:
    lowered = experiment.lower_forward(job.rows, job.length, target.memory, batch.columns)
  else:
    lowered = experiment.lower_update(batch.arrays)
  seconds = {'lower': time.monotonic() - began}
  answer: dict[str, Any] = {
    'held': experiment.held(),
    'mesh': dict(experiment.devices.shape),
    'trained': sum(
      math.prod(experiment.params[name].shape) for name in experiment.layout.trainable
    ),
    'parameters': sum(math.prod(leaf.shape) for leaf in experiment.params.values()),
  }
  began = time.monotonic()
  try:
    compiled = lowered.compile()
  except Exception as error:
    return answer | {'failed': failure(error, sum(answer['held'].values()))}
  finally:
    seconds['compile'] = time.monotonic() - began
    answer['seconds'] = seconds
  memory = compiled.memory_analysis()
  answer['memory'] = {
    name: int(getattr(memory, f'{name}_size_in_bytes'))
    for name in ('argument', 'output', 'temp', 'alias', 'generated_code')
  }
  return answer | ({'text': compiled.as_text()} if text else {})


_SIZE = r'([\d.]+)([KMGT])'
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def failure(error: Exception, held: int) -> dict[str, Any]:
  """The failure of a compiler, with the bytes for lack of memory. ``held``: bytes of arguments."""
  text = ' '.join(str(error).split())
  details: dict[str, Any] = {'why': text[:400], 'memory': 'RESOURCE_EXHAUSTED' in text}
  # Two wordings; the second counts only temporary arrays.
  for pattern, more in (
    (f'{_SIZE} of {_SIZE}', 0),
    (rf'\({_SIZE}\) exceeds available HBM \({_SIZE}\)', held),
  ):
    if details['memory'] and (sizes := re.search(pattern, text)):
      details['needs'] = float(sizes[1]) * _UNITS[sizes[2]] + more
      details['has'] = float(sizes[3]) * _UNITS[sizes[4]]
  return details


ORPHANED = 3
"""Exit status when standard input ended first."""


def _end_with_parent() -> None:
  """Ends this process when its parent is killed, since a compiler can take hours and gigabytes."""
  os.read(0, 1)
  os._exit(ORPHANED)


def main() -> None:
  answer: dict[str, Any]
  try:
    job, text = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = run(CompileJob(**{**job, 'config': tuple(job['config'])}), text)
  except InputError as error:
    answer = {'input_error': str(error)}
  except Exception as error:
    answer = {'failed': {'why': error_line(f'{type(error).__name__}: {error}'), 'memory': False}}
  pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == '__main__':
  main()
