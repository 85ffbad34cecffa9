"""DuckDB for tables larger than memory, which last for a block of code."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dprjax.base import cli
from dprjax.base.errors import InputError

if TYPE_CHECKING:
  import duckdb

_MEMORY = '1GB'  # of tables and operators; more goes to the folder


@contextlib.contextmanager
def temporary(folder: pathlib.Path) -> Iterator['duckdb.DuckDBPyConnection']:
  """An empty database in a folder, which the caller removes.

  Raises InputError if the disk is full.
  """
  with cli.loading():  # an exception inside it would abort the process
    import duckdb  # takes .1 s

  try:
    with duckdb.connect(
      folder / 'tables.duckdb',
      config={'memory_limit': _MEMORY, 'temp_directory': str(folder)},
    ) as tables:
      yield tables
  # A checkpoint that finds no room raises the last.
  except (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.FatalException) as error:
    raise InputError(f'cannot write {folder}: {error}') from error
