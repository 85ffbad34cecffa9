"""Collections of vectors: the same behaviour on every engine."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dprjax.base.errors import InputError
from dprjax.encoding.manifest import check_same_space
from dprjax.engines import engine as engines
from dprjax.engines.engine import Condition, Engine, Hits, Record, Rows
from dprjax.retrieval import best
from dprjax.retrieval.best import check_finite

_IDS = 1_000  # in a request
_ANSWER_ROWS = 100_000  # results of all queries of a request

ProgressFn = Callable[[int], None]
_Asks = Callable[[Int[np.ndarray, ' some'], int], list[Hits]]


def check_name(name: str) -> None:
  """Raises InputError for a name that is not valid on all engines."""
  if not re.fullmatch(r'[a-z_][a-z0-9_]{0,62}', name, re.I):
    raise InputError(
      f'--collection={name!r:.80}: expected letters, digits and underscores, 63 at most'
    )


class Found(NamedTuple):
  """The results of each query, best first.

  Attributes:
    ids: of all documents found, each once.
    rows: indices into ``ids``; -1 where fewer than k were found.
    scores: inner products; -inf where fewer were found.
  """

  ids: list[str]
  rows: Int[np.ndarray, 'queries k']
  scores: Float[np.ndarray, 'queries k']


def exists(engine: Engine, name: str) -> bool:
  """Whether a collection of this name exists, made by any program."""
  check_name(name)
  with engines.errors(engine.address, str(engine.address)):
    return engine.open(name) is not None


def open_collection(engine: Engine, name: str) -> 'Collection':
  """Opens a collection."""
  check_name(name)
  with engines.errors(engine.address, str(engine.address)):
    opened = engine.open(name)
    names = [] if opened and opened.record else sorted(engine.names())
  if opened is None or opened.record is None:
    raise InputError(
      f'{engine.address}: dprjax made no collection {name!r}; there are '
      f'{", ".join(names[:20]) or "none"}; fill one with dprjax.index --upsert, or choose another'
    )
  return Collection(engine, name, opened.record, opened.kind)


def create(
  engine: Engine,
  name: str,
  space: Mapping[str, Any],
  *,
  index_type: str = 'auto',
  rows: int = 0,
) -> 'Collection':
  """Makes an empty collection for about this many rows."""
  check_name(name)
  engines.check_index_type(engine.address, index_type)
  with engines.errors(
    engine.address, f'{engine.address}: collection {name!r} with index {index_type}'
  ):
    engine.create(name, Record(dict(space)), index_type=index_type, rows=rows)
  return open_collection(engine, name)


class Collection:
  """Vectors with the same settings under document ids, from `open_collection` or `create`.

  Attributes:
    engine, name: of the collection.
    record: its description.
    kind: the index, by its name in the engine.
  """

  def __init__(self, engine: Engine, name: str, record: Record, kind: str):
    self.engine, self.name, self.record, self.kind = engine, name, record, kind
    self.where = f'{engine.address}, collection {name!r}'

  @property
  def space(self) -> Mapping[str, Any]:
    """The settings of the vectors, `manifest.Meta.space`."""
    return self.record.space

  def __len__(self) -> int:
    with self._errors():
      return self.engine.count(self.name)

  def check_space(self, space: Mapping[str, Any], what: str) -> None:
    """Raises InputError if ``what`` has another space."""
    check_same_space(self.where, self.space, what, space)

  def note(self, loading: Mapping[str, Any] | None) -> None:
    """Records the progress of an upsert; None after its end."""
    self.record = Record(self.record.space, loading)
    with self._errors():
      self.engine.note(self.name, self.record)

  def upsert(
    self,
    ids: Sequence[str],
    vectors: Float[np.ndarray, 'n H'],
    progress: ProgressFn | None = None,
    payloads: Sequence[Mapping[str, Any]] | None = None,
  ) -> None:
    """Writes vectors, replacing those with the same ids.

    Args:
      payloads: title, text and other fields to store with each document.
    """
    check_finite(vectors, 'document', 0)
    if not self.engine.stores_nul:
      self._check_text(zip(ids, payloads or (), strict=False))
    for part in slices(len(ids), self._batch(), progress):
      rows = Rows(
        ids[part],
        np.ascontiguousarray(vectors[part], np.float32),
        payloads and payloads[part],
      )
      with self._errors():
        self.engine.upsert(self.name, rows)

  def flush(self) -> None:
    """Makes the engine write and index all upserts."""
    with self._errors():
      self.engine.flush(self.name)

  def drop(self) -> None:
    """Removes the collection and its content."""
    with self._errors():
      self.engine.drop(self.name)

  def delete(self, ids: Sequence[str], progress: ProgressFn | None = None) -> list[str]:
    """Deletes documents; returns ids that were missing."""
    missing: list[str] = []
    for part in slices(len(ids), _IDS, progress):
      with self._errors():
        stored = self.engine.fetch(self.name, ids[part])
        if stored:
          self.engine.delete(self.name, sorted(stored))
      missing += [id_ for id_ in ids[part] if id_ not in stored]
    return missing

  def payloads(self, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Title, text and other fields of these documents."""
    payloads: dict[str, dict[str, Any]] = {}
    for part in slices(len(ids), _IDS):
      with self._errors():
        payloads |= self.engine.fetch(self.name, ids[part])
    missing = [id_ for id_ in dict.fromkeys(ids) if id_ not in payloads]
    if missing:
      raise InputError(f'{self.where} lacks {len(missing)} ids: {", ".join(missing[:5])}')
    return [payloads[id_] for id_ in ids]

  def search(
    self,
    queries: Float[np.ndarray, 'queries H'],
    k: int,
    *,
    settings: Mapping[str, Any] | None = None,
    where: Sequence[Condition] = (),
    progress: ProgressFn | None = None,
  ) -> Found:
    """The best k documents of each query, as found by the index.

    Args:
      queries: vectors with the settings of the collection.
      settings: of a search in this index (nprobe, ef, ...), which override ``engine.settings``.
    """
    check_finite(queries, 'query', 0)
    if k > self.engine.most:
      raise InputError(
        f'{self.engine.address} returns at most {self.engine.most:,} passages a query, not {k:,}; '
        'use fewer or --index=exact'
      )

    def ask(some: Int[np.ndarray, ' some'], wanted: int) -> list[Hits]:
      vectors = np.ascontiguousarray(queries[some], np.float32)
      return self.engine.search(self.name, vectors, wanted, self.settings(wanted, settings), where)

    return self._best(ask, len(queries), k, self._batch(), progress)

  def settings(self, k: int, chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of a search: the defaults, overridden by ``chosen``."""
    return self.engine.settings(self.name, min(k, self.engine.most)) | dict(chosen or {})

  def _best(
    self,
    ask: _Asks,
    queries: int,
    k: int,
    size: int,
    progress: ProgressFn | None = None,
  ) -> Found:
    """The k best documents, with ties by id; ``ask`` searches for some of the queries."""
    places: dict[str, int] = {}
    done = 0

    def found(some: Int[np.ndarray, ' some'], wanted: int) -> best.TopK:
      nonlocal done
      rows = np.full((len(some), wanted), -1, np.int32)
      scores = np.full((len(some), wanted), -np.inf, np.float32)
      for part in slices(len(some), max(1, min(size, _ANSWER_ROWS // wanted))):
        with self._errors():
          answers = ask(some[part], wanted)
        for number, hits in enumerate(answers, start=part.start):
          rows[number, : len(hits.ids)] = [places.setdefault(id_, len(places)) for id_ in hits.ids]
          scores[number, : len(hits.ids)] = hits.scores
        done += part.stop - part.start
        if progress is not None and done <= queries:  # do not count repeated queries
          progress(done)
      return best.TopK(scores, rows)

    def ids_at(some: Int[np.ndarray, ' some']) -> list[str]:
      ids = list(places)
      return [ids[row] for row in some.tolist()]

    scores, rows = best.whole_ties(found, queries, k, self.engine.most, ids_at)
    return Found(list(places), rows, scores)

  def _check_text(self, documents: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    for id_, payload in documents:
      for name, value in payload.items():
        if any('\0' in one for one in (value if isinstance(value, list) else [str(value)])):
          raise InputError(
            f'{self.where}: passage {id_!r:.80} has a null character in {name}, which '
            f'{self.engine.address} cannot store; take it out there, or store no texts'
          )

  def _batch(self) -> int:
    row_bytes = 4 * int(self.space['dimension'])
    return max(1, min(self.engine.request_rows, self.engine.request_bytes // row_bytes))

  def _errors(self) -> contextlib.AbstractContextManager[None]:
    return engines.errors(self.engine.address, self.where)


def slices(count: int, size: int, progress: ProgressFn | None = None) -> Iterator[slice]:
  """Slices of at most ``size``; reports the end of each."""
  for start in range(0, count, size):
    stop = min(start + size, count)
    yield slice(start, stop)
    if progress is not None:
      progress(stop)
