"""Features of the platform of this machine."""

import sys

import pytest

# As in setup.py: there are no wheels elsewhere. Here, a ScaNN that is missing is a failure.
needs_scann = pytest.mark.skipif(
  sys.platform != 'linux' or sys.version_info >= (3, 14),
  reason='ScaNN is for Linux and Python below 3.14',
)
