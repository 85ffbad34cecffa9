"""Parquet: files that LanceDB, DuckDB, Spark, BigQuery and bulk loaders of other engines read.

A collection is a folder of ``part-*.parquet`` with the columns id (string), vector (fixed-size list
of float32), title, text and other fields. ``_dprjax.json`` has its record. An upsert is written
aside and joins the collection as a whole at its end. A search is exact and reads all files.
"""

import collections
import concurrent.futures
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from dprjax.base import files, machine
from dprjax.base.errors import InputError
from dprjax.engines import engine
from dprjax.engines.conditions import Condition
from dprjax.engines.engine import Address, Hits, Opened, Record, Rows, Stored
from dprjax.retrieval import best

_RECORD = '_dprjax.json'
_PART = re.compile(r'part-(\d{6})-(\d{12})\.parquet')
_STAGED = re.compile(r'\.staged-(\d{12})')
_GROUP_ROWS = 10_000  # of a row group


class Parquet:
  """A folder of collections."""

  most = 10**6
  stores_nul = True
  request_rows, request_bytes, answer_rows = 1 << 20, 1 << 27, 1 << 24
  index_types: Sequence[str] = ('FLAT',)

  def __init__(self, address: Address, *, new: bool = False, timeout: float = 30.0):
    del timeout
    import pyarrow  # slow to import

    self.address, self.version = address, f'pyarrow {pyarrow.__version__}'
    self._folder = epath.Path(address.place)
    engine.check_folder(address, self.is_index, new)
    self._records: dict[str, Record] = {}
    self._staged: dict[str, int] = {}  # written rows of an upsert

  @staticmethod
  def is_index(folder: epath.Path) -> bool:
    found = [path for path in folder.iterdir() if not path.name.startswith('.')]
    return all((path / _RECORD).exists() for path in found)  # also after the last --drop

  def close(self) -> None:
    """Nothing is open."""

  def names(self) -> list[str]:
    if not self._folder.exists():
      return []
    return [path.name for path in self._folder.iterdir() if not path.name.startswith('.')]

  def open(self, name: str) -> Opened | None:
    folder = self._folder / name
    if not folder.exists():
      return None
    record = None
    if (folder / _RECORD).exists():
      record = Record.of_json((folder / _RECORD).read_text())
    if record is not None:
      self._records[name] = record
      self._staged[name] = int((record.loading or {}).get('rows', 0))
    return Opened(record, 'FLAT')

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    del index_type, rows
    self.note(name, record)

  def note(self, name: str, record: Record) -> None:
    folder = self._folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(folder / _RECORD) as file:
      file.write(record.as_json() + '\n')
    self._records[name] = record
    if record.loading is not None:
      self._staged[name] = int(record.loading['rows'])
      for path, start in self._of(folder, _STAGED):
        if start[0] >= self._staged[name]:  # from another upsert, or not recorded
          path.unlink()

  def upsert(self, name: str, rows: Rows) -> None:
    import pyarrow as pa

    dimension = int(self._records[name].space['dimension'])
    ids = pa.array(rows.ids, pa.string())
    vector = pa.FixedSizeListArray.from_arrays(pa.array(rows.vectors.reshape(-1)), dimension)
    table = pa.table({'id': ids, 'vector': vector})
    if rows.payloads is not None:
      table = _joined(table, rows.payloads)
    folder = self._folder / name
    self._write(folder / f'.staged-{self._staged[name]:012d}', table)
    self._staged[name] += len(rows.ids)

  @staticmethod
  def _write(path: epath.Path, table: Any) -> None:
    from pyarrow import parquet

    with files.atomic_write(path, 'wb') as file:
      # A dictionary does not help for vectors.
      parquet.write_table(table, file, row_group_size=_GROUP_ROWS, use_dictionary=['title'])

  def flush(self, name: str) -> None:
    """Moves rows written aside into the collection, replacing those with equal ids."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = self._folder / name
    staged = [path for path, _ in self._of(folder, _STAGED)]
    if not staged:
      return
    self._schema(folder, staged)  # check before any change
    parts = self._of(folder, _PART)
    ids: list[Any] = []
    for path in reversed(staged):  # the last row of an id counts
      with path.open('rb') as file:
        own = parquet.read_table(file, columns=['id'])['id'].combine_chunks()
      if len(ids) and len(pa.chunked_array([*ids, own]).unique()) < sum(map(len, [*ids, own])):
        self._without(path, pa.concat_arrays(ids))
      ids.append(own)
    if parts:
      new = pa.concat_arrays(ids)
      for path, _ in parts:
        self._without(path, new)
    generation = max((numbers[0] for _, numbers in parts), default=-1) + 1
    for number, path in enumerate(staged):
      path.rename(folder / f'part-{generation:06d}-{number:012d}.parquet')
    self._staged[name] = 0

  def _without(self, path: epath.Path, ids: Any) -> None:
    """Removes these ids from a file."""
    from pyarrow import compute, parquet

    with path.open('rb') as file:
      own = parquet.read_table(file, columns=['id'])['id']
    kept = compute.invert(compute.is_in(own, value_set=ids))
    if compute.all(kept, min_count=0).as_py():
      return
    with path.open('rb') as file:
      table = parquet.read_table(file).filter(kept)
    if len(table):
      self._write(path, table)
    else:
      path.unlink()

  def count(self, name: str) -> int:
    from pyarrow import parquet

    total = 0
    for path, _ in self._of(self._folder / name, _PART):
      with path.open('rb') as file:
        total += parquet.ParquetFile(file).metadata.num_rows
    return total

  def delete(self, name: str, ids: Sequence[str]) -> None:
    import pyarrow as pa

    for path, _ in self._of(self._folder / name, _PART):
      self._without(path, pa.array(list(ids), pa.string()))

  def fetch(self, name: str, ids: Sequence[str], vectors: bool) -> dict[str, Stored]:
    found = {}
    for table in self._batches(name, (), [Condition('id', '=', tuple(ids))]):
      for row in table.to_pylist():
        vector = row.pop('vector')
        payload = {key: value for key, value in row.items() if key != 'id' and value is not None}
        found[row['id']] = Stored(np.asarray(vector, np.float32) if vectors else None, payload)
    return found

  def drop(self, name: str) -> None:
    folder = self._folder / name
    other = [
      path.name
      for path in folder.iterdir()
      if not (path.name == _RECORD or _PART.fullmatch(path.name) or path.name.startswith('.'))
    ]
    if other:
      raise InputError(f'{folder} has other contents, such as {other[0]}: remove it by hand')
    # The record goes last, so that a killed command can be repeated.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _RECORD):
      path.unlink()
    folder.rmdir()

  def settings(self, name: str, k: int) -> dict[str, Any]:
    del name, k
    return {}

  def search(
    self,
    name: str,
    queries: np.ndarray,
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    import pyarrow as pa

    if settings:
      raise InputError(f'--search_param: {self.address} has no settings')
    parts: list[Any] = []

    def ids_at(rows: np.ndarray) -> list[str]:
      return list(pa.chunked_array(parts, pa.string()).take(pa.array(rows)).to_pylist())

    found, seen = best.Best(len(queries), k, ids_at), 0
    for table in self._batches(name, ('id', 'vector'), where):
      if not len(table):
        continue
      vectors = table['vector'].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
      parts.append(table['id'].combine_chunks())
      found.add(queries @ vectors.T, seen)
      seen += len(table)
    ranked = found.ranked()
    used = ranked.rows >= 0
    ids, ends = ids_at(ranked.rows[used]), np.cumsum(used.sum(axis=1)).tolist()
    return [
      Hits(ids[start:end], scores[: end - start].tolist())
      for start, end, scores in zip([0, *ends], ends, ranked.scores, strict=False)
    ]

  def _batches(
    self, name: str, columns: Sequence[str], where: Sequence[Condition]
  ) -> Iterator[Any]:
    """Tables of the rows in all files that match the conditions."""
    from pyarrow import parquet

    needed = {*columns, *(condition.field for condition in where)}

    def groups() -> Iterator[tuple[epath.Path, Any, int, list[str]]]:
      for path, _ in self._of(self._folder / name, _PART):
        with path.open('rb') as file:
          about = parquet.read_metadata(file)
        there = about.schema.to_arrow_schema().names
        wanted = [one for one in there if not columns or one in needed]
        for number in range(about.num_row_groups):
          yield path, about, number, wanted

    def read(path: epath.Path, about: Any, number: int, wanted: list[str]) -> Any:
      with path.open('rb') as file:
        reader = parquet.ParquetFile(file, metadata=about)
        table = reader.read_row_group(number, columns=wanted, use_threads=False)
      for condition in where:
        table = table.filter(_meets(table, condition))
      return table

    # Decoding is slower than comparing, and one thread decodes a row group.
    ahead: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
      for group in groups():
        ahead.append(pool.submit(read, *group))
        if len(ahead) > machine.cores() + 1:
          yield ahead.popleft().result()
      while ahead:
        yield ahead.popleft().result()

  def _schema(self, folder: epath.Path, staged: Sequence[epath.Path]) -> Any:
    """The columns of all files."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = None
    for path in [*(path for path, _ in self._of(folder, _PART)), *staged]:
      with path.open('rb') as file:
        own = parquet.read_schema(file)
      both = [own] if schema is None else [schema, own]
      schema = pa.unify_schemas(both, promote_options='permissive')
    return schema

  @staticmethod
  def _of(folder: epath.Path, pattern: re.Pattern[str]) -> list[tuple[epath.Path, tuple[int, ...]]]:
    """Files of a pattern with their numbers, in order."""
    found = [
      (path, tuple(map(int, match.groups())))
      for path in folder.iterdir()
      if (match := pattern.fullmatch(path.name))
    ]
    return sorted(found, key=lambda one: one[1])


def _joined(table: Any, payloads: Sequence[Mapping[str, Any]]) -> Any:
  """A table with the payloads as columns."""
  import pyarrow as pa

  for name in dict.fromkeys(key for payload in payloads for key in payload):
    column = pa.array([payload.get(name) for payload in payloads])
    if not pa.types.is_null(column.type):
      table = table.append_column(name, column)
  return table


def _meets(table: Any, condition: Condition) -> Any:
  """Whether each row of a table matches a condition."""
  import pyarrow as pa
  from pyarrow import compute

  none = pa.array(np.zeros(len(table), bool))
  field, operator, values = condition
  if field not in table.column_names:
    return none
  column = table[field].combine_chunks()
  items = column.flatten() if pa.types.is_list(column.type) else column
  number = pa.types.is_integer(items.type) or pa.types.is_floating(items.type)
  if operator == '=':
    met = compute.is_in(items, value_set=_like(values, items.type))
  elif number:
    names = {'<': 'less', '<=': 'less_equal', '>': 'greater', '>=': 'greater_equal'}
    met = compute.call_function(names[operator], [items, pa.scalar(values[0])]).fill_null(False)
  else:
    return none
  if items is column:
    return met
  parents = compute.list_parent_indices(column).to_numpy()
  mask = np.zeros(len(table), bool)
  mask[parents[met.to_numpy(zero_copy_only=False)]] = True
  return pa.array(mask)


def _like(values: Sequence[Any], kind: Any) -> Any:
  """The values that fit the type of a column."""
  import pyarrow as pa

  words, truth = pa.types.is_string(kind), pa.types.is_boolean(kind)
  usable = [
    value
    for value in values
    if words == isinstance(value, str)
    and truth == isinstance(value, bool)
    and not (pa.types.is_integer(kind) and value != int(value))
  ]
  return pa.array(usable, kind)
