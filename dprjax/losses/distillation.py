"""Distillation of the scores of a teacher into a retriever or a cross-encoder.

``config.distillation.loss`` is one of two losses, combined with the loss on labels:

- margin_mse: squared error of the margin between positive and negative (Hofstaetter et al. 2020,
  section 3.2)
- kl: KL divergence of the softmax over the list of a query (Ren et al. 2021, RocketQAv2, Eq. 5)

Passages without a teacher score, such as random ones, are left out.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from etils import epath
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import files
from dprjax.base.errors import InputError

KEY = 'teacher_scores'  # key of a batch
_NONE = -1e30  # a masked logit; the gradient of all -inf is NaN


def scores_file(section: ConfigDict, config: ConfigDict) -> epath.Path:
  """The file of the teacher scores."""
  if not (config.distillation.scores or section.mined_negatives):
    raise InputError(
      'config.distillation.scores is empty; name a run of a teacher, such as one of dprjax.rerank '
      'or dprjax.fuse, or a scored file of dprjax.mine'
    )
  return files.regular_file(config.distillation.scores or section.mined_negatives, 'teacher scores')


def shown(config: ConfigDict) -> dict[str, str]:
  return {} if config.distillation.loss == 'none' else {'distillation': 'distillation'}


def add(
  config: ConfigDict,
  name: str,
  supervised: Float[Array, ''],
  scores: Float[Array, 'B C'],
  batch: Mapping[str, Array],
) -> dict[str, Array]:
  """The terms and their weighted sum, ``loss``.

  Args:
    name: of the loss on labels, among the metrics.
    scores: of the passages of each query by the student; column 0 is the positive.
  """
  settings = config.distillation
  if settings.loss == 'none':
    return {'loss': supervised}
  loss = {'margin_mse': margin_mse, 'kl': list_kl}[settings.loss]
  distilled = loss(scores, batch[KEY] / settings.temperature)
  return {
    'loss': settings.weight * distilled + (1 - settings.weight) * supervised,
    name: supervised,
    'distillation': distilled,
  }


def dot(queries: Float[Array, 'B H'], passages: Float[Array, 'B C H']) -> Float[Array, 'B C']:
  """Scores of the passages of each query, by their vectors."""
  return jnp.einsum(
    'bh,bch->bc',
    queries,
    passages,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def margin_mse(scores: Float[Array, 'B C'], teacher: Float[Array, 'B C']) -> Float[Array, '']:
  """Mean squared difference of margins over pairs of a positive and its own negative.

  Args:
    scores: of the passages of each query; column 0 is the positive.
    teacher: teacher scores; NaN where unscored.
  """
  known = jnp.isfinite(teacher)
  target = jnp.where(known, teacher, 0.0)
  pairs = known[:, :1] & known[:, 1:]
  error = (scores[:, :1] - scores[:, 1:]) - (target[:, :1] - target[:, 1:])
  return jnp.sum(jnp.where(pairs, jnp.square(error), 0.0)) / _count(pairs)


def list_kl(scores: Float[Array, 'B C'], teacher: Float[Array, 'B C']) -> Float[Array, '']:
  """KL(teacher || student) over scored passages; mean over queries with two or more."""
  known = jnp.isfinite(teacher)
  listed = jnp.sum(known, axis=1, dtype=jnp.int32) > 1
  wanted, student = (
    jax.nn.log_softmax(jnp.where(known, x, _NONE), axis=1)
    for x in (jnp.where(known, teacher, 0.0), scores)
  )
  each = jnp.sum(jnp.where(known, jnp.exp(wanted) * (wanted - student), 0.0), axis=1)
  return jnp.sum(jnp.where(listed, each, 0.0)) / _count(listed)


def _count(where: Array) -> Float[Array, '']:
  return jnp.maximum(jnp.sum(where, dtype=jnp.int32), 1).astype(jnp.float32)
