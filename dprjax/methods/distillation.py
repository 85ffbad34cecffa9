"""Distillation: the encoder learns a cross-encoder's scores of its queries' own passages.

Two losses of ``config.distillation.loss``, beside InfoNCE or in its place:

- margin_mse: the difference of the positive's and a negative's score is to be the teacher's
  (Hofstaetter et al. 2020, section 3.2)
- kl: the softmax over a query's list is to be the teacher's (Ren et al. 2021, RocketQAv2, Eq. 5)

Passages that the teacher did not score, such as random ones, have no part in them.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from etils import epath
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import files
from dprjax.base.errors import InputError

KEY = 'teacher_scores'  # of a batch
_NONE = -1e30  # a logit of no candidate; minus infinity has no gradient where there is no other


def check(config: ConfigDict) -> None:
  """Raises InputError where there are no scores to learn, or nothing that they are of."""
  if config.distillation.loss == 'none':
    return
  if not (config.distillation.scores or config.data.mined_negatives):
    raise InputError(
      'config.distillation.scores is empty; name a run of dprjax.rerank or a file of dprjax.mine '
      'that has scores'
    )
  scores_file(config.data, config)


def scores_file(section: ConfigDict, config: ConfigDict) -> epath.Path:
  """The file of the teacher's scores. Raises InputError where it is none."""
  return files.regular_file(config.distillation.scores or section.mined_negatives, 'teacher scores')


def shown(config: ConfigDict) -> dict[str, str]:
  """The metrics of the console's line."""
  return {} if config.distillation.loss == 'none' else {'distillation': 'distillation'}


def add(
  config: ConfigDict,
  info_nce: Float[Array, ''],
  queries: Float[Array, 'B H'],
  passages: Float[Array, 'B C H'],
  batch: Mapping[str, Array],
) -> dict[str, Array]:
  """``loss``: InfoNCE and the loss that ``config.distillation`` says, each by its weight."""
  knobs = config.distillation
  if knobs.loss == 'none':
    return {'loss': info_nce}
  scores = (
    jnp.einsum(
      'bh,bch->bc',
      queries,
      passages,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    / config.temperature
  )
  loss = {'margin_mse': margin_mse, 'kl': list_kl}[knobs.loss]
  value = loss(scores, batch[KEY] / knobs.temperature)
  return {
    'loss': knobs.weight * value + (1 - knobs.weight) * info_nce,
    'info_nce': info_nce,
    'distillation': value,
  }


def margin_mse(scores: Float[Array, 'B C'], teacher: Float[Array, 'B C']) -> Float[Array, '']:
  """The mean squared difference of margins, over all pairs of a positive and its own negative.

  Args:
    scores: of each query's passages; column 0 is the positive's.
    teacher: likewise; NaN where there is none.
  """
  known = jnp.isfinite(teacher)
  target = jnp.where(known, teacher, 0.0)
  pairs = known[:, :1] & known[:, 1:]
  error = (scores[:, :1] - scores[:, 1:]) - (target[:, :1] - target[:, 1:])
  return jnp.sum(jnp.where(pairs, jnp.square(error), 0.0)) / _count(pairs)


def list_kl(scores: Float[Array, 'B C'], teacher: Float[Array, 'B C']) -> Float[Array, '']:
  """KL(teacher || student) of a query's scored passages, the mean over queries with two or more."""
  known = jnp.isfinite(teacher)
  listed = jnp.sum(known, axis=1, dtype=jnp.int32) > 1
  wanted, given = (
    jax.nn.log_softmax(jnp.where(known, x, _NONE), axis=1)
    for x in (jnp.where(known, teacher, 0.0), scores)
  )
  each = jnp.sum(jnp.where(known, jnp.exp(wanted) * (wanted - given), 0.0), axis=1)
  return jnp.sum(jnp.where(listed, each, 0.0)) / _count(listed)


def _count(where: Array) -> Float[Array, '']:
  return jnp.maximum(jnp.sum(where, dtype=jnp.int32), 1).astype(jnp.float32)
