"""The types of a loss."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

Params = Mapping[str, Any]
Batch = Mapping[str, Array]
Loss = tuple[Float[Array, ''], dict[str, Array]]
"""The loss and its metrics."""
