"""Data sets as BEIR folders: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.text.fields import UniqueIds
from dprjax.text.qrels import Qrels, write_qrels


def write(
  folder: files.PathLike,
  passages: Iterable[Mapping[str, Any]],
  queries: Iterable[Mapping[str, Any]],
  judged: Mapping[str, Qrels],
) -> tuple[int, int]:
  """Writes a data set; returns the numbers of passages and queries.

  Args:
    passages: ``{_id, title, text, categories}``; title and categories are optional.
    queries: ``{_id, text}``.
  """
  root = epath.Path(folder)
  (root / 'qrels').mkdir(parents=True)
  counts = (
    write_lines(root / 'corpus.jsonl', passages),
    write_lines(root / 'queries.jsonl', queries),
  )
  for split, qrels in judged.items():
    write_qrels(root / 'qrels' / f'{split}.tsv', qrels)
  return counts


def write_lines(path: epath.Path, records: Iterable[Mapping[str, Any]]) -> int:
  """Writes records with an ``_id`` as JSON lines; returns their number. Raises as `write`."""
  ids, count = UniqueIds(path.name, 'the'), 0
  with files.no_room(path), path.open('wb') as file:
    for count, record in enumerate(records, 1):
      ids.add(record['_id'], count)
      file.write(json.dumps(record, ensure_ascii=False).encode() + b'\n')
  return count
