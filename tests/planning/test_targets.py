import importlib.util

import pytest

from dprjax.planning import targets
from tests.refusals import refused


@pytest.mark.parametrize(
  ('name', 'chip', 'topology', 'count', 'platform'),
  [
    ('v5e:2x4', 'v5e', 'v5e:2x4', 8, 'tpu'),
    ('h100:8', 'h100', '', 8, 'cuda'),
    ('cpu:4', 'cpu', '', 4, 'cpu'),
  ],
)
def test_a_name_is_a_machine(name, chip, topology, count, platform):
  target = targets.parse(name)
  assert (target.chip, target.topology, target.devices) == (chip, topology, count)
  assert target.platform == platform
  assert target.memory > 2**30 / count


@pytest.mark.parametrize(
  'name',
  [
    *('', 'v5e:8', 'v5e:2x2x2', 'v5e:0x4', 'v5e:9999x9999', 'h100:0', 'h100:x', 'tpu:8'),
  ],
)
def test_another_name_is_refused_in_a_line(name):
  with refused('--target') as error:
    targets.parse(name)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(('name', 'extra'), [('v5e:2x4', 'plan'), ('h100:8', 'plan-cuda')])
def test_an_absent_compiler_is_named_with_what_to_install(name, extra, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with refused(f'dprjax[{extra}]'):
    targets.check_installed(targets.parse(name))
  targets.check_installed(targets.parse('cpu'))


def test_a_process_that_compiles_does_not_see_this_ones_devices(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_foo=1')
  for name, flags in (
    ('v5e:2x4', None),
    ('cpu:2', '--xla_force_host_platform_device_count=2'),
  ):
    environment = targets.environment(targets.parse(name))
    assert environment.get('XLA_FLAGS') == flags
    assert environment['JAX_PLATFORMS'] == 'cpu'
    assert 'LIBTPU_INIT_ARGS' not in environment
