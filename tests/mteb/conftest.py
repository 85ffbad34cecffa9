"""The small backbone of tests/serving."""

from tests.serving.conftest import small  # noqa: F401 (a fixture)
