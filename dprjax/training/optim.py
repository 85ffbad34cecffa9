"""The optimiser: AdamW with clipping and a schedule, only for trainable parameters.

Two guards keep frozen leaves fixed: only trainable leaves are differentiated, and ``optax.masked``
keeps the optimiser off frozen ones (with ``set_to_zero``, since it passes raw gradients through).
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from dprjax.base import tree


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
  """Whether weight decay applies to each trainable parameter, and its learning rate factor."""
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


def with_placeholders(trainable: Mapping[str, Any], frozen: Collection[str]) -> dict[str, Any]:
  """The flat tree for the optimiser: trainable leaves, and a scalar zero for each frozen leaf."""
  return {**trainable, **dict.fromkeys(frozen, jnp.zeros((), jnp.float32))}
