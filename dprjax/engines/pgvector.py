"""PostgreSQL with the extension pgvector: a collection is a table of id, vector and payload.

The record of a collection is the comment of its table. The index is built after the first upsert,
which is faster than growing it; without an index a search compares all passages.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dprjax.base.errors import InputError
from dprjax.engines.engine import Address, Condition, Hits, Opened, Record, Rows

_INDEX = 'dprjax.index'  # in the comment, with the record
_MOST_HNSW, _MOST_HALF = 2_000, 4_000  # dimensions that pgvector indexes
_MOST_CANDIDATES = 1_000  # of hnsw.ef_search


class Pgvector:
  """A connection to a database."""

  most = 100_000
  stores_nul = False
  request_rows, request_bytes = 10_000, 1 << 26

  def __init__(self, address: Address, *, new: bool = False, timeout: float = 30.0):
    import psycopg  # an extra
    from psycopg import sql

    self.address, self._sql = address, sql
    secret = {'password': address.token()} if address.token() else {}
    self.client = psycopg.connect(
      address.place,
      autocommit=True,
      connect_timeout=max(round(timeout), 2),
      application_name='dprjax',
      **secret,  # type: ignore[arg-type]
    )
    self._kinds: dict[str, str] = {}
    if new:
      self.client.execute('SET client_min_messages = warning')
      self.client.execute('CREATE EXTENSION IF NOT EXISTS vector')
    cursor = self.client.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
    extension = cursor.fetchone()
    server = self.client.info.parameter_status('server_version')
    self.version = f'PostgreSQL {server}, pgvector {extension[0] if extension else "none"}'
    self._iterative = False
    if extension is not None:
      from pgvector.psycopg import register_vector

      register_vector(self.client)
      self._iterative = tuple(map(int, extension[0].split('.')[:2])) >= (0, 8)

  @staticmethod
  def types_at(address: Address) -> Sequence[str]:
    del address
    return ('HNSW', 'HNSW_HALF', 'FLAT')

  def close(self) -> None:
    self.client.close()

  def names(self) -> list[str]:
    rows = self.client.execute(
      'SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace '
      "AND relkind IN ('r', 'p', 'v', 'm')"
    )
    return [name for (name,) in rows]

  def open(self, name: str) -> Opened | None:
    row = self.client.execute(
      "SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE relname = %s "
      'AND relnamespace = current_schema()::regnamespace',
      [name],
    ).fetchone()
    if row is None:
      return None
    record = Record.of_json(row[0])
    kind = 'none'
    if record is not None:
      kind = self._kinds[name] = str(json.loads(row[0]).get(_INDEX, {}).get('type', 'FLAT'))
    return Opened(record, kind)

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    """'auto' is HNSW, on vectors of half precision above 2,000 dimensions, FLAT above 4,000."""
    del rows
    dimension = int(record.space['dimension'])
    if index_type == 'auto':
      index_type = 'HNSW' if dimension <= _MOST_HNSW else 'HNSW_HALF'
      index_type = index_type if dimension <= _MOST_HALF else 'FLAT'
    most = {'HNSW': _MOST_HNSW, 'HNSW_HALF': _MOST_HALF}
    if dimension > most.get(index_type, dimension):
      raise InputError(
        f'--index_type={index_type}: pgvector indexes at most {most[index_type]:,} dimensions this '
        f'way, not {dimension:,}; auto chooses one that fits'
      )
    self._kinds[name] = index_type
    with self.client.transaction():
      self.client.execute(
        self._with(
          'CREATE TABLE {} (id text COLLATE "C" PRIMARY KEY, vector vector({}) NOT NULL, '
          'payload jsonb)',
          name,
          dimension,
        )
      )
      self.note(name, record)

  def note(self, name: str, record: Record) -> None:
    values = json.loads(record.as_json()) | {_INDEX: {'type': self._kinds[name]}}
    text = json.dumps(values, sort_keys=True)
    self.client.execute(self._with('COMMENT ON TABLE {} IS {}', name, text))

  def upsert(self, name: str, rows: Rows) -> None:
    from psycopg.types.json import Jsonb

    payloads: Any = rows.payloads if rows.payloads is not None else [None] * len(rows.ids)
    with self.client.transaction(), self.client.cursor() as cursor:
      cursor.execute(
        'CREATE TEMP TABLE dprjax_new (id text, vector vector, payload jsonb) ON COMMIT DROP'
      )
      with cursor.copy('COPY dprjax_new FROM STDIN WITH (FORMAT BINARY)') as copy:
        copy.set_types(['text', 'vector', 'jsonb'])
        for id_, vector, payload in zip(rows.ids, rows.vectors, payloads, strict=True):
          copy.write_row((id_, vector, None if payload is None else Jsonb(dict(payload))))
      cursor.execute(
        self._with(
          'INSERT INTO {} SELECT * FROM dprjax_new ON CONFLICT (id) DO UPDATE '
          'SET vector = EXCLUDED.vector, payload = EXCLUDED.payload',
          name,
        )
      )

  def flush(self, name: str) -> None:
    """Builds the index, unless it exists, and collects planner statistics."""
    kind = self._kinds[name]
    index = f'{name[:54]}_dprjax'
    if kind == 'HNSW_HALF':
      how = f'USING hnsw ((vector::halfvec({self._dimension(name)})) halfvec_ip_ops)'
    else:
      how = 'USING hnsw (vector vector_ip_ops)'
    if kind != 'FLAT':
      self.client.execute(self._with(f'CREATE INDEX IF NOT EXISTS {{}} ON {{}} {how}', index, name))
    self.client.execute(self._with('ANALYZE {}', name))

  def _dimension(self, name: str) -> int:
    row = self.client.execute(
      "SELECT atttypmod FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'vector'",
      [f'"{name}"'],
    ).fetchone()
    assert row is not None
    return int(row[0])

  def count(self, name: str) -> int:
    row = self.client.execute(self._with('SELECT count(*) FROM {}', name)).fetchone()
    assert row is not None
    return int(row[0])

  def delete(self, name: str, ids: Sequence[str]) -> None:
    self.client.execute(self._with('DELETE FROM {} WHERE id = ANY(%s)', name), [list(ids)])

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    rows = self.client.execute(
      self._with('SELECT id, payload FROM {} WHERE id = ANY(%s)', name), [list(ids)]
    )
    return {id_: payload or {} for id_, payload in rows}

  def drop(self, name: str) -> None:
    self.client.execute(self._with('DROP TABLE {}', name))

  def settings(self, name: str, k: int) -> dict[str, Any]:
    """HNSW examines 2 k candidates."""
    if self._kinds[name] == 'FLAT':
      return {}
    return {'ef_search': min(max(2 * k, 64), _MOST_CANDIDATES)}

  def search(
    self,
    name: str,
    queries: np.ndarray,
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    kind = self._kinds[name]
    values = {f'hnsw.{key}': str(value) for key, value in settings.items()}
    if kind == 'FLAT':
      values['enable_indexscan'] = 'off'
    elif self._iterative:
      # An iterative scan continues if a condition, or ef_search < k, leaves too few.
      values = {'hnsw.iterative_scan': 'strict_order'} | values
    only, path = '', []
    if where:
      only, path = 'WHERE payload @@ %s::jsonpath', [_path(where)]
    if kind == 'HNSW_HALF':
      size = self._dimension(name)
      near = f'vector::halfvec({size}) <#> (%s::vector)::halfvec({size})'
      inner = f'SELECT id, vector FROM {{}} {only} ORDER BY {near} LIMIT {2 * k}'
      text = (
        f'SELECT id, -(vector <#> %s) AS score FROM ({inner}) AS near ORDER BY 2 DESC LIMIT {k}'
      )
    else:
      text = f'SELECT id, -(vector <#> %s) FROM {{}} {only} ORDER BY vector <#> %s LIMIT {k}'
    query = self._with(text, name)
    cursors = []
    with self.client.transaction():
      for key, value in values.items():
        self.client.execute('SELECT set_config(%s, %s, true)', [key, value])
      with self.client.pipeline():
        for vector in queries:
          cursor = self.client.cursor(binary=True)
          cursor.execute(query, [vector, *path, vector], prepare=True)
          cursors.append(cursor)
        rows = [cursor.fetchall() for cursor in cursors]
    return [Hits([id_ for id_, _ in one], [score for _, score in one]) for one in rows]

  def _with(self, text: str, *names: Any) -> Any:
    """A statement with its braces filled by quoted table names, numbers or texts."""
    parts = []
    for number, one in enumerate(names):
      table = isinstance(one, str) and not (number and 'COMMENT' in text)
      parts.append(self._sql.Identifier(one) if table else self._sql.Literal(one))
    return self._sql.SQL(text).format(*parts)


def _path(where: Sequence[Condition]) -> str:
  """Conditions as a jsonpath, which also looks into arrays."""
  parts = []
  for field, operator, values in where:
    name = '==' if operator == '=' else operator
    options = [f'$."{field}" {name} {json.dumps(value, ensure_ascii=False)}' for value in values]
    parts.append(f'({" || ".join(options)})')
  return ' && '.join(parts)
