"""The files of an input: a file, a pattern such as ``corpus-*.jsonl.gz``, a folder, or a data set
of the hub.

A folder gives

1. its ``corpus`` file for passages or ``queries`` file for queries, as in a BEIR folder, or the
   ``collection.tsv`` of MS MARCO or the ``psgs_w100.tsv`` of DPR;
2. else all .jsonl, .csv, .tsv and .parquet files in it and its subfolders, in the order of names.
"""

import logging
from collections.abc import Iterable, Iterator

from etils import epath

from dprjax.base import files, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text import records

OWN: dict[str, tuple[str, ...]] = {
  'query': tuple(f'queries.{ending}' for ending in records.ENDINGS),
  'passage': (
    *(f'corpus.{ending}' for ending in records.ENDINGS),
    'collection.tsv',
    'psgs_w100.tsv',
  ),
}

_log = logging.getLogger(__name__)


def find(source: files.PathLike, side: str) -> list[epath.Path]:
  """The files of an input, in their order.

  Args:
    source: a file, a pipe, a pattern, a folder or ``hf:NAME``.
  """
  what = f'{side} file'
  path = epath.Path(source)
  if files.is_hub_name(source):
    return [path]
  if files.is_pattern(source):
    matches = files.matching(source)
    if not matches:
      raise InputError(f'{what} not found: no file matches {source}')
    for one in matches:
      files.existing(one, what)
    return matches
  path = files.existing(source, what)
  if not path.is_dir():
    return [path]
  if standard := variant(path, *OWN[side]):
    return [standard]
  every = [one for one in _below(path) if not files.is_special(one) and not files.is_empty(one)]
  tables = [one for one in every if records.ending_of(one) in records.ENDINGS and not _about(one)]
  if left := len(every) - len(tables):
    _log.info('%s: skipped %s of another kind', path, counted(left, 'files'))
  if not tables:
    kinds = [f'.{ending}' for ending in records.ENDINGS if ending != 'json']
    raise InputError(f'{path}: no {side} in this folder; expected {", ".join(kinds)}')
  return tables


def check_again(paths: Iterable[files.PathLike], side: str, what: str) -> None:
  """Raises InputError, with ``what``, for an input that is missing or cannot be read again."""
  for path in paths:
    for one in find(path, side):
      if not files.is_hub_name(one):
        files.regular_file(one, what)


def variant(folder: epath.Path, *names: str) -> epath.Path | None:
  """The first of these files that exists, plain or compressed."""
  candidates = (
    folder / f'{name}{ending}' for name in names for ending in ('', *reading.COMPRESSED)
  )
  return next((path for path in candidates if path.exists()), None)


def _about(path: epath.Path) -> bool:
  """Whether a .json file in a folder describes the data and has no rows."""
  return reading.plain_name(path).endswith('.json')


def _below(folder: epath.Path) -> Iterator[epath.Path]:
  for path in sorted(folder.iterdir(), key=lambda path: path.name):
    if path.name.startswith('.'):
      continue
    if path.is_dir():
      yield from _below(path)
    elif path.exists():
      yield path
