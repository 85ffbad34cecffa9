"""DuckDB for tables larger than memory, which last for a block of code."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import duckdb

_MEMORY = '1GB'  # of tables and operators; more goes to the folder


@contextlib.contextmanager
def temporary(folder: pathlib.Path) -> Iterator['duckdb.DuckDBPyConnection']:
  """An empty database in a folder, which the caller removes."""
  import duckdb  # takes .1 s

  with duckdb.connect(
    folder / 'tables.duckdb',
    config={'memory_limit': _MEMORY, 'temp_directory': str(folder)},
  ) as tables:
    yield tables
