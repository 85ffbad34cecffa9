import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import hlo
from dprjax.base import mesh as meshes


@pytest.mark.parametrize(
  ('image', 'kernel', 'out', 'attributes', 'flops'),
  [
    # A plain product, and products of a batch: each place of the window meets one row.
    (
      '2,16,256',
      '256,256,1',
      '2,16,256',
      'window={size=1}, dim_labels=0bf_io0->0bf',
      2 * 2 * 16 * 256**2,
    ),
    (
      '2,4,16,64',
      '2,4,32,64',
      '2,4,16,32',
      'window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=01bf_01oi->01bf',
      2 * 2 * 4 * 16 * 32 * 64,
    ),
    # In a window of 3 over 5 places, the two at the ends meet padding once.
    ('1,5,2', '3,2,7', '1,5,7', 'window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f', 2 * 13 * 2 * 7),
  ],
)
def test_a_convolution_is_counted_as_xla_counts_it(image, kernel, out, attributes, flops):
  lines = (
    'HloModule m',
    f'ENTRY %main (a: f32[{image}], b: f32[{kernel}]) -> f32[{out}] {{',
    f'  %a = f32[{image}] parameter(0)',
    f'  %b = f32[{kernel}] parameter(1)',
    f'  ROOT %c = f32[{out}] convolution(%a, %b), {attributes}',
    '}',
  )
  assert hlo.HloProgram('\n'.join(lines)).cost().flops == flops


def test_a_real_program():
  """A scan of products over a batch that four devices share."""
  mesh = meshes.make_mesh({'data': 4}, jax.devices()[:4])
  rows, whole = NamedSharding(mesh, P('data')), NamedSharding(mesh, P())

  def run(x, layers):
    y, _ = jax.lax.scan(lambda y, layer: (jnp.tanh(y @ layer), None), x, layers)
    return jnp.sum(y, axis=0)

  shapes = (
    jax.ShapeDtypeStruct((64, 32), np.float32, sharding=rows),
    jax.ShapeDtypeStruct((6, 32, 32), np.float32, sharding=whole),
  )
  cost = hlo.HloProgram(jax.jit(run, out_shardings=whole).lower(*shapes).compile().as_text()).cost()
  assert cost.flops == 6 * 2 * 16 * 32 * 32
  (sum_,) = cost.collectives
  assert sum_ == ('all-reduce', 1, 32 * 4)
  assert 6 * 32 * 32 * 4 < cost.bytes < 6 * 32 * 32 * 4 * 8
