"""One update of dprjax on one device as in the training loop: loss, gradient, clipping, AdamW."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models import scratch
from dprjax.models.encoder_config import EncoderConfig
from dprjax.training import config as configs
from dprjax.training import dpr
from dprjax.training import updates as trainings
from dprjax.training.method import Model, Parts

ROOT = pathlib.Path(__file__).resolve().parent.parent


def one_device() -> jax.sharding.Mesh:
  return meshes.make_mesh({'data': 1}, jax.devices()[:1])


def options(
  method: str, prompt: int, dtype: str, overrides: Sequence[str] = ()
) -> ml_collections.ConfigDict:
  """A prompt or LoRA for both sides ('DPT', 'LoRA') or configs/ft.py ('FT'), with mean pooling of
  unit vectors.

  There is no dropout and no average; the temperature is 0.05.

  Args:
    method: 'DPT', 'LoRA' (of queries and values, as in its paper) or 'FT'.
    prompt: length of the prompt, for DPT; the rank, for LoRA.
    dtype: of the arithmetic and of frozen weights.
    overrides: ``KEY=VALUE`` of config options.
  """
  recipe = {'DPT': 'dptdr.py:beir,both', 'LoRA': 'dptdr.py:beir,both,lora', 'FT': 'ft.py'}[method]
  settings = {
    'backbone.dtype': dtype,
    'backbone.dropout': 0.0,
    'prompt.dropout': 0.0,
    'ema': 0.0,
    'weight_interpolation': 0.0,
    'prompt.length': 0 if method == 'FT' else prompt,
    'pooling': 'mean',
    'normalize': 'true',
    'temperature': 0.05,
  }
  if method == 'LoRA':
    settings['lora.targets'] = 'attention/(query|value)'
  pairs = [f'{key}={value}' for key, value in settings.items()] + list(overrides)
  flags = [f'--config.{pair}' for pair in pairs]
  return configs.parse([f'--config={ROOT}/configs/{recipe}', *flags])


class Update:
  """A compiled update, its parameters and its batch.

  Attributes:
    compiled: the program.
    metrics: of the last step; empty before the first.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    method: Model,
    parts: Parts,
    batch: Mapping[str, np.ndarray],
  ):
    """``parts`` and ``batch`` as ``method.init`` and ``method.loss`` take them; on one device."""
    mesh = one_device()
    params = tree.flatten(method.init(parts, jax.random.key(1)))
    names = tree.trainable_names(config.trainable, list(params))
    layout = trainings.lay_out(config, params, names, mesh, 1000)
    # Copies: the step reuses the memory of trainable parameters.
    self._state, frozen = layout.place(
      {name: np.array(leaf) if name in names else leaf for name, leaf in params.items()}
    )
    self._rest = (frozen, meshes.put_batch(mesh, batch), jax.random.key(2))
    self._number = 0
    self.metrics: dict[str, jax.Array] = {}
    self.compiled = (
      trainings.make_update(method, layout).lower(self._state, *self._rest, 1).compile()
    )

  def __call__(self, steps: int = 1) -> None:
    """Takes steps and waits for the last one."""
    for _ in range(steps):
      self._number += 1
      self._state, self.metrics = self.compiled(self._state, *self._rest, self._number)
    jax.block_until_ready((self._state, self.metrics))

  def first_step(self) -> tuple[float, float]:
    """The loss and the norm of the gradient."""
    self()
    return float(self.metrics['loss']), float(self.metrics['gradient_norm'])

  @property
  def memory_mib(self) -> float:
    """Arguments and temporary memory of the program; its results reuse the memory of the state."""
    memory = self.compiled.memory_analysis()
    return round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20, 1)


def retrieval(
  config: ml_collections.ConfigDict,
  model: EncoderConfig,
  params: Mapping[str, Any],
  batch: Mapping[str, np.ndarray],
) -> Update:
  """An update of DPT, LoRA or FT."""
  return Update(config, dpr.build(config, model, one_device()), Parts(params), batch)


def retrieval_flops(
  config: ml_collections.ConfigDict,
  model: EncoderConfig,
  batch: Mapping[str, np.ndarray],
) -> jax.stages.Lowered:
  """The same, lowered from shapes only, for ``cost_analysis``.

  Layers are unrolled, since XLA counts the body of a loop once.
  """
  config = config.copy_and_resolve_references()
  config.backbone.unroll = 0
  mesh = one_device()
  method = dpr.build(config, model, mesh)
  start = jax.eval_shape(lambda key: scratch.init_encoder(model, key), jax.random.key(0))
  params = tree.flatten(
    jax.eval_shape(lambda start: method.init(Parts(start), jax.random.key(1)), start)
  )
  names = tree.trainable_names(config.trainable, list(params))
  layout = trainings.lay_out(config, params, names, mesh, 1000)
  shapes = {name: jax.ShapeDtypeStruct(rows.shape, rows.dtype) for name, rows in batch.items()}
  return trainings.lower(method, layout, params, shapes)


def parameters(model: EncoderConfig) -> dict[str, Any]:
  """Random parameters, numpy float32."""
  return scratch.init_params(model, jax.random.key(0))
