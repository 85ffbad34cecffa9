"""Trainings and processes on one device, as on a laptop."""

import contextlib
import os

import jax
import pytest

from dprjax.base import mesh


@contextlib.contextmanager
def one():
  """In it, `train` has one device: it takes three quarters of the time of eight on two cores."""
  make = mesh.make_mesh

  def make_small(sizes, devices=None):
    return make(sizes, jax.devices()[:1] if devices is None else devices)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh, 'make_mesh', make_small)
    yield


def environment(**variables):
  """The environment of a process with one device and the compiler settings of conftest.py."""
  flags = os.environ.get('XLA_FLAGS', '').replace('device_count=8', 'device_count=1')
  return os.environ | {'XLA_FLAGS': flags} | variables
