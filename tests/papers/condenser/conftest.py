"""The golden heads of tests/models."""

from tests.models.conftest import golden, small, write_heads  # noqa: F401
