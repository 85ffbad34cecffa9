"""The least cost of a program by formula (docs/performance.md)."""

import dataclasses
import math
from collections.abc import Sequence

from dprjax.models.encoder_config import EncoderConfig


@dataclasses.dataclass(frozen=True)
class Cost:
  """The least FLOPs and bytes for some sequences.

  Attributes:
    flops: of matrix products; a multiply-add counts as two.
    bytes: to and from memory, if elementwise operations are fused and attention scores stay on the
      chip.
  """

  flops: float
  bytes: float


def cost(
  model: EncoderConfig,
  method: str,
  rows: Sequence[tuple[float, int]],
  prompt: int,
  width: int = 2,
) -> Cost:
  """FLOPs and bytes of a forward pass ('encode') or of an update by 'DPT' or 'FT'.

  With T tokens, a prompt of P, S = P + T, W weights in the kernels of a layer and A numbers in all
  its heads, a sequence costs in the forward pass of each layer

      weights    2 T W     (the BERT W is 4 H^2 + 2 H I: queries, keys, values, output; up and down)
      attention  4 T S A   (scores; sums of values; the BERT A is H)

  The backward pass computes each product with a weight once for the gradient of its input, and once
  for the gradient of the weight, which DPT does not need. Attention has no weights, and always
  needs the gradients of both factors:

      encode  weights + attention      DPT  2 weights + 3 attention      FT  3 weights + 3 attention

  Pooling, the scores of the batch, LayerNorm, GELU, softmax and the optimiser are omitted, since
  each is below 1 % for these shapes.

  Numbers per token and layer, with Y numbers in the inputs and outputs of products (BERT: 10 H + 2
  I): forward Y + 4 H, with residuals; forward and backward 3 Y + 10 H, and for FT 4 Y + 8 H, with
  gradients of weights. Weights are read once in every pass of each encoder call; FT writes
  gradients once a call, and AdamW reads and writes 7 float32 a weight.

  Args:
    rows: (sequences, length) of each call of the encoder: an update encodes queries and passages
      separately.
    width: bytes of a number, in activations and weights.
  """
  h, layers = model.hidden_size, model.num_layers
  kernels = [tensor.shape for tensor in model.family.layer_tensors(model, 1) if tensor.kernel]
  a_layer, products = sum(map(math.prod, kernels)), sum(map(sum, kernels))
  through_weights, through_attention = {'encode': (1, 1), 'DPT': (2, 3), 'FT': (3, 3)}[method]
  passes = {'encode': 1, 'DPT': 2, 'FT': 2}[method]
  a_token = {
    'encode': products + 4 * h,
    'DPT': 3 * products + 10 * h,
    'FT': 4 * products + 8 * h,
  }[method]
  flops, moved = 0.0, 28.0 * layers * a_layer if method == 'FT' else 0.0
  for sequences, t in rows:
    weights = 2 * t * a_layer
    attention = 4 * t * (prompt + t) * model.num_heads * model.head_dim
    flops += sequences * layers * (through_weights * weights + through_attention * attention)
    moved += width * layers * (sequences * t * a_token + passes * a_layer) + (
      4 * layers * a_layer if method == 'FT' else 0
    )
  return Cost(flops, moved)
