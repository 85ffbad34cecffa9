"""Places the parameters of a training on a mesh, and makes its update.

`dprjax.train` runs the update; `dprjax.planning` compiles it from shapes.

The optimiser is AdamW with clipping and a schedule, only for trainable parameters. Two guards keep
frozen leaves fixed: only trainable leaves are differentiated, and ``optax.masked`` keeps the
optimiser off frozen ones (with ``set_to_zero``, since it passes raw gradients through).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh, tree
from dprjax.models import encoder_config
from dprjax.training import method as methods


class State(NamedTuple):
  """The state changed by a step.

  ``average`` is the average of trained parameters, with ``config.ema`` or
  ``config.weight_interpolation``; ``start`` has their initial values, with
  ``config.weight_interpolation``.
  """

  trainable: dict[str, Any]
  opt_state: Any
  average: dict[str, Any] | None = None
  start: dict[str, Any] | None = None

  @property
  def model(self) -> dict[str, jax.Array]:
    """The parameters that are scored, saved and exported."""
    return self.trainable if self.average is None else self.average

  @property
  def rest(self) -> Any:
    """The content of a checkpoint besides ``model``."""
    if self.average is None:
      return self.opt_state
    content = {'optimizer': self.opt_state, 'trainable': self.trainable}
    return content if self.start is None else content | {'start': self.start}

  def restored(self, model: dict[str, jax.Array], rest: Any) -> 'State':
    """The inverse of ``model`` and ``rest``."""
    if self.average is None:
      return State(model, rest)
    return State(rest['trainable'], rest['optimizer'], model, rest.get('start'))


class ParameterLayout(NamedTuple):
  """The trained parameters, the placement of all, and their update.

  ``optimizer`` is for a tree of all names, see ``make_optimizer``. ``ema`` is the decay of the
  average of parameters, and ``interpolate`` mixes averaged parameters with the initial ones:
  WiSE-FT (Wortsman et al., 2022, equation 1).
  """

  dtypes: Mapping[str, np.dtype]
  shardings: Mapping[str, NamedSharding]
  trainable: frozenset[str]
  optimizer: optax.GradientTransformation
  devices: Mesh
  ema: float
  interpolate: float

  def place(self, params: Mapping[str, Any]) -> tuple[State, dict[str, jax.Array]]:
    """The initial state and the frozen parameters on the mesh, from host arrays by name."""

    def put(trained: bool) -> dict[str, jax.Array]:
      return {
        name: mesh.put(leaf.astype(self.dtypes[name]), self.shardings[name])
        for name, leaf in params.items()
        if (name in self.trainable) == trained
      }

    trainable, frozen = put(True), put(False)
    _, out = self._optimizer_state(trainable)
    opt_state = jax.jit(
      lambda trainable: self.optimizer.init(self.with_placeholders(trainable)), out_shardings=out
    )(trainable)
    # In separate memory, since a step donates the state.
    average, start = (put(True) if has else None for has in self._copies)
    return State(trainable, opt_state, average, start), frozen

  def shapes(self, params: Mapping[str, Any]) -> tuple[State, dict[str, jax.ShapeDtypeStruct]]:
    """Like ``place``, for shapes: allocates nothing and needs no devices."""
    named = {
      name: jax.ShapeDtypeStruct(leaf.shape, self.dtypes[name], sharding=self.shardings[name])
      for name, leaf in params.items()
    }
    trainable = {name: leaf for name, leaf in named.items() if name in self.trainable}
    frozen = {name: leaf for name, leaf in named.items() if name not in self.trainable}
    opt_state = jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
      *self._optimizer_state(trainable),
    )
    average, start = (dict(trainable) if has else None for has in self._copies)
    return State(trainable, opt_state, average, start), frozen

  def with_placeholders(self, trainable: Mapping[str, Any]) -> dict[str, Any]:
    """The tree for the optimiser: trainable leaves, and a scalar zero for each frozen leaf."""
    return {**dict.fromkeys(self.dtypes, jnp.zeros((), jnp.float32)), **trainable}

  @property
  def _copies(self) -> tuple[bool, bool]:
    """Whether the state has an average, and the initial parameters."""
    start = self.interpolate < 1
    return bool(self.ema) or start, start

  def _optimizer_state(self, trainable: Mapping[str, Any]) -> tuple[Any, Any]:
    """Shapes and shardings of the optimiser state: moments lie with their parameters."""
    shapes = jax.eval_shape(
      lambda trainable: self.optimizer.init(self.with_placeholders(trainable)), trainable
    )

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
      names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
      of_trained = names and names[-1] in self.trainable
      return self.shardings[names[-1]] if of_trained else mesh.replicated(self.devices)

    return shapes, jax.tree_util.tree_map_with_path(place, shapes)


def lay_out(
  config: ml_collections.FrozenConfigDict,
  params: Mapping[str, Any],
  trainable: Collection[str],
  devices: Mesh,
  steps: int,
  examples: int = 1,
  sharding: Sequence[tuple[str, P]] = (),
) -> ParameterLayout:
  """The layout of the parameters of a training.

  Args:
    steps: length of the schedule, in updates.
    examples: of an epoch, for ``config.weight_interpolation``.
    sharding: rules that precede ``mesh.RULES``; a name without a rule raises InputError.
  """
  # Trained parameters are float32, since lower precision would lose small updates.
  frozen = encoder_config.arithmetic(config.backbone.dtype).activations
  dtypes = {name: jnp.dtype('float32') if name in trainable else frozen for name in params}
  return ParameterLayout(
    dtypes,
    mesh.param_shardings(devices, params, sharding),
    frozenset(trainable),
    make_optimizer(config.optim, list(params), trainable, steps),
    devices,
    config.ema,
    examples / (examples + config.weight_interpolation),
  )


def make_update(model: methods.Model, layout: ParameterLayout) -> Any:
  """The jitted step: ``(state, frozen, batch, key, number) -> (state, metrics)``.

  The state is donated.
  """

  def update(
    state: State,
    frozen: dict[str, jax.Array],
    batch: dict[str, jax.Array],
    key: jax.Array,
    number: int,
  ) -> tuple[State, dict[str, jax.Array]]:
    step_key = jax.random.fold_in(key, number)

    # Frozen weights get no gradient.
    def loss(trainable: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
      return model.loss(tree.unflatten({**frozen, **trainable}), batch, step_key)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    changes, opt_state = layout.optimizer.update(
      layout.with_placeholders(gradient),
      state.opt_state,
      layout.with_placeholders(state.trainable),
    )
    changes = {name: changes[name] for name in state.trainable}
    trainable = optax.apply_updates(state.trainable, changes)
    average = state.average
    if average is not None:
      # A smaller decay in the first steps forgets the start faster.
      past = jnp.asarray(number, jnp.float32)
      decay = jnp.minimum(layout.ema, (1 + past) / (10 + past))
      scored = trainable
      if state.start is not None:
        scored = {
          name: start + layout.interpolate * (trainable[name] - start)
          for name, start in state.start.items()
        }
      average = {name: decay * average[name] + (1 - decay) * new for name, new in scored.items()}
    return State(trainable, opt_state, average, state.start), metrics | {
      'loss': value,
      'gradient_norm': optax.tree.norm(gradient),
      'update_norm': optax.tree.norm(changes),
    }

  return jax.jit(update, donate_argnums=0)


def lower(
  model: methods.Model,
  layout: ParameterLayout,
  params: Mapping[str, Any],
  batch: Mapping[str, jax.ShapeDtypeStruct],
) -> jax.stages.Lowered:
  """The update of `dprjax.train`, lowered from shapes.

  ``params`` are shapes by flat names, ``batch`` the shapes of the global batch.
  """
  state, frozen = layout.shapes(params)
  whole = mesh.replicated(layout.devices)
  rows = NamedSharding(layout.devices, P(mesh.BATCH))
  key = jax.eval_shape(lambda: jax.random.key(0))
  return make_update(model, layout).lower(
    state,
    frozen,
    {
      name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows)
      for name, leaf in batch.items()
    },
    jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole),
    jax.ShapeDtypeStruct((), jnp.int32, sharding=whole, weak_type=True),  # a Python number
  )


# The optimiser.


def make_schedule(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
  """Linear warm-up over ``warmup`` (a fraction of the steps), then linear decay to 0, constant, or
  cosine.
  """
  warmup = round(config.warmup * steps)
  rest = max(steps - warmup, 1)
  if config.decay == 'linear':
    decay = optax.linear_schedule(config.learning_rate, 0.0, rest)
  elif config.decay == 'cosine':
    decay = optax.cosine_decay_schedule(config.learning_rate, rest)
  else:
    decay = optax.constant_schedule(config.learning_rate)
  if not warmup:
    return decay
  return optax.join_schedules(
    [optax.linear_schedule(0.0, config.learning_rate, warmup), decay], [warmup]
  )


def match_rules(
  config: ml_collections.ConfigDict, trainable: Collection[str]
) -> tuple[dict[str, bool], dict[str, float]]:
  decay = {name: not name.endswith(('bias', 'scale')) for name in sorted(trainable)}
  factor = tree.first_match(
    config.learning_rate_rules, sorted(trainable), 'config.optim.learning_rate_rules', tree.Factor
  )
  return decay, factor


def make_optimizer(
  config: ml_collections.ConfigDict,
  names: Collection[str],
  trainable: Collection[str],
  steps: int,
) -> optax.GradientTransformation:
  """AdamW for a flat ``{name: array}`` tree where only names in ``trainable`` change.

  Args:
    steps: the length of the schedule, in updates.
  """
  decay, factor = match_rules(config, trainable)
  parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
  parts.append(optax.scale_by_adam(eps=config.eps))
  if config.weight_decay:
    parts.append(
      optax.add_decayed_weights(
        config.weight_decay, mask={name: name in trainable and bool(decay[name]) for name in names}
      )
    )
  parts.append(optax.scale_by_learning_rate(make_schedule(config, steps)))
  if any(value != 1.0 for value in factor.values()):
    parts.append(
      optax.stateless(
        lambda updates, _: {
          name: update * factor[name] if name in trainable else update
          for name, update in updates.items()
        }
      )
    )
  is_trainable = {name: name in trainable for name in names}
  is_frozen = {name: name not in trainable for name in names}
  chain = optax.chain(
    optax.masked(optax.chain(*parts), is_trainable), optax.masked(optax.set_to_zero(), is_frozen)
  )

  # optax raises a float to an integer count, which strict dtype promotion refuses.
  @jax.numpy_dtype_promotion('standard')
  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return chain.update(updates, state, params)

  return optax.GradientTransformation(chain.init, update)
