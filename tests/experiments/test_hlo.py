import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import hlo
from dprjax.base import mesh as meshes

# As a TPU's compiler writes them: a loop of 3 that does a collective in pieces, which began before
# it; a slice of a stack in slow memory; a reduce-scatter that is a fusion.
PROGRAM = """\
HloModule jit_update, is_scheduled=true

%sliced (p.0: bf16[3,8,4], p.1: s32[]) -> bf16[8,4] {
  %p.0 = bf16[3,8,4]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,8,4]{2,1,0} dynamic-slice(%p.0, %p.1, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %bitcast.1 = bf16[8,4]{1,0} bitcast(%dynamic-slice.1)
}

%all-reduce-scatter.1 (p.2: f32[8,4]) -> f32[4,4] {
  %p.2 = f32[8,4]{1,0} parameter(0)
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%p.2), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %id = s32[] constant(0)
  ROOT %dynamic-slice.2 = f32[4,4]{1,0} dynamic-slice(%all-reduce.1, %id, %id), dynamic_slice_sizes={4,4}
}

%async_collective_fusion.1 (p.3: f32[2,4]) -> f32[2,4] {
  %p.3 = f32[2,4]{1,0} parameter(0)
  %all-gather.9 = f32[8,4]{1,0} all-gather(%p.3), channel_id=7, replica_groups=mesh['x'=4] {'x'}, dimensions={0}
  ROOT %copy.9 = f32[2,4]{1,0} copy(%p.3)
}

%body (arg: (s32[], f32[16,8], bf16[3,8,4], f32[2,4])) -> (s32[], f32[16,8], bf16[3,8,4], f32[2,4]) {
  %arg = (s32[], f32[16,8]{1,0:T(8,128)S(1)}, bf16[3,8,4]{2,1,0}, f32[2,4]{1,0:S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[16,8]{1,0:T(8,128)S(1)} get-tuple-element(%arg), index=1
  %stack = bf16[3,8,4]{2,1,0} get-tuple-element(%arg), index=2
  %small = f32[2,4]{1,0:S(1)} get-tuple-element(%arg), index=3
  %layer = bf16[8,4]{1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%sliced
  %y = f32[16,4]{1,0:T(8,128)S(1)} dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %piece = f32[2,4]{1,0:S(1)} fusion(%small), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %out = (s32[], f32[16,8]{1,0:T(8,128)S(1)}, bf16[3,8,4]{2,1,0}, f32[2,4]{1,0:S(1)}) tuple(%i, %x, %stack, %piece)
}

%condition (arg.1: (s32[], f32[16,8], bf16[3,8,4], f32[2,4])) -> pred[] {
  %arg.1 = (s32[], f32[16,8]{1,0}, bf16[3,8,4]{2,1,0}, /*index=3*/f32[2,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: f32[16,8], b: bf16[3,8,4], c: f32[2,4], d: f32[8,4]) -> f32[4,4] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = bf16[3,8,4]{2,1,0} parameter(1)
  %c = f32[2,4]{1,0} parameter(2)
  %d = f32[8,4]{1,0:S(1)} parameter(3)
  %n = s32[] constant(0)
  %began = f32[2,4]{1,0} fusion(%c), kind=kCustom, calls=%async_collective_fusion.1
  %start = (s32[], f32[16,8]{1,0}, bf16[3,8,4]{2,1,0}, f32[2,4]{1,0}) tuple(%n, %a, %b, %began)
  %while.1 = (s32[], f32[16,8]{1,0}, bf16[3,8,4]{2,1,0}, f32[2,4]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %mine = f32[4,4]{1,0:S(1)} fusion(%d), kind=kCustom, calls=%all-reduce-scatter.1
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_run_and_what_is_on_the_chip_moves_nothing():
  cost = hlo.HloProgram(PROGRAM).cost()
  assert cost.flops == 3 * 2 * 16 * 8 * 4
  # A layer of the stack and its number an iteration; input and output of the collective.
  assert cost.bytes == 3 * (8 * 4 * 2 + 4) + 2 * 2 * 4 * 4


def test_a_collective_in_pieces_is_one_and_a_reduce_scatter_is_told_from_an_all_reduce():
  gather, scatter = hlo.HloProgram(PROGRAM).cost().collectives
  assert gather == hlo.Collective('all-gather', 1, 8 * 4 * 4)
  assert scatter == hlo.Collective('reduce-scatter', 1, 8 * 4 * 4)
  assert hlo.HloProgram(PROGRAM).cost().gathered == (8 * 4 * 4,)


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
