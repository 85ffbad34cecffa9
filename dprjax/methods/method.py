"""What the training loop asks of a system; each module beside this one builds one with
``build(config, model, mesh, tokenizer)``.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Float

Params = Mapping[str, Any]
Batch = Mapping[str, Array]


class System(NamedTuple):
  """A way to train.

  Attributes:
    init: ``(parts, key) -> params``, the tree with named top-level subtrees. The parts are what a
      backbone's directory holds: ``query`` and ``passage`` (the encoder's parameters, one object
      for both where it is one directory), and ``heads`` (see ``hub.Backbone``).
    loss: ``(params, batch, key or None) -> (loss, metrics)``; no key, no dropout.
    embed: ``(params, kind, tokens, mask) -> [B, H]``, without dropout, for evaluation. A
      cross-encoder's takes where each second text begins as well, and gives the score, ``[B, 1]``.
    shown: the metrics of the console's line besides the loss, and what they are called there.
  """

  init: Callable[[Mapping[str, Any], Array], dict[str, Any]]
  loss: Callable[[Params, Batch, Array | None], tuple[Float[Array, ''], dict[str, Array]]]
  embed: Callable[..., Float[Array, 'B H']]
  shown: Mapping[str, str]
