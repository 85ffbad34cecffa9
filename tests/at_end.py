"""What the tests of a worker share until they end, such as a database."""

import contextlib

STACK = contextlib.ExitStack()
