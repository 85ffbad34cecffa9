"""Data sets of ir_datasets, written as BEIR folders.

ir_datasets reads from ``IR_DATASETS_HOME`` (``~/.ir_datasets``) and downloads missing files to it.
Its copies of corpora may be pickles, which can run code: use only a folder that you trust.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.reading import read_json_object
from dprjax.text import beir
from dprjax.text.fields import check_id
from dprjax.text.qrels import Qrels

PREFIX = 'irds:'  # of ids, where an option also takes a folder
TRAIN = 'train'  # the split of a data set whose id has judgements itself

_MARK = 'irds.json'
_log = logging.getLogger(__name__)


def folder_of(name: str, folder: files.PathLike, splits: Sequence[str]) -> epath.Path:
  """The BEIR folder of an id with its prefix, written unless it exists."""
  out, id_ = epath.Path(folder), name.removeprefix(PREFIX)
  wanted = {'id': id_, 'splits': list(dict.fromkeys(splits))}
  if out.exists():
    found = read_json_object(out / _MARK, 'data set') if (out / _MARK).exists() else {}
    if found != wanted:
      raise InputError(
        f'{out} does not contain {name} with the splits {", ".join(splits)}; remove it, or name '
        'another workdir'
      )
  else:
    write(id_, splits, out)
  return out


def write(id_: str, splits: Sequence[str], folder: files.PathLike) -> None:
  """Writes corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

  The judgements of a split come from the data set ``ID/SPLIT``. Without an ``ID/train``, the split
  'train' has the judgements of the data set ``ID``. ``id_`` may also be ``ID/SPLIT``.

  Args:
    splits: whose queries and judgements are written.
    folder: made whole or not at all.
  """
  datasets = {split: _find(id_, split) for split in dict.fromkeys(splits)}
  main = _registered(id_) or next(iter(datasets.values()))
  if not main.has_docs():
    raise InputError(f'{PREFIX}{id_} has no documents')
  queries: dict[str, str] = {}
  judged: dict[str, Qrels] = {}
  for split, dataset in datasets.items():
    for query in _iterate(id_, dataset.queries_iter):
      text = _text(id_, query)
      if queries.setdefault(check_id(query.query_id, f'{PREFIX}{id_}'), text) != text:
        raise InputError(f'{PREFIX}{id_}: two queries have the id {query.query_id!r:.80}')
    judged[split] = _judgements(id_, dataset)
    if not judged[split]:
      raise InputError(f'{PREFIX}{id_} has no judgements of the split {split}')
  with files.atomic_path(folder) as out:
    passages, _ = beir.write(
      out,
      (_passage(id_, doc) for doc in _iterate(id_, main.docs_iter)),
      ({'_id': key, 'text': text} for key, text in queries.items()),
      judged,
    )
    files.write_json(out / _MARK, {'id': id_, 'splits': list(datasets)})
  _log.info(
    '%s%s: %s, %s', PREFIX, id_, counted(passages, 'passages'), counted(len(queries), 'queries')
  )


def _find(id_: str, split: str) -> Any:
  """The data set with the judgements of a split."""
  names = [f'{id_}/{split}']
  if split == TRAIN or id_.endswith(f'/{split}'):
    names.append(id_)
  for name in names:
    found = _registered(name)
    if found is not None and found.has_qrels() and found.has_queries():
      return found
  import ir_datasets

  known = [str(name) for name in ir_datasets.registry]
  below = [name.removeprefix(f'{id_}/') for name in known if name.startswith(f'{id_}/')]
  if id_ not in known and not below:
    raise InputError(f'ir_datasets has no data set {id_!r:.80}')
  raise InputError(
    f'{PREFIX}{id_} has no queries and judgements of a split {split!r:.80}; it has '
    f'{", ".join(below[:20]) or "no splits"}'
  )


def _registered(name: str) -> Any | None:
  import ir_datasets

  try:
    return ir_datasets.load(name)
  except KeyError:
    return None


def _iterate(id_: str, records: Any) -> Iterator[Any]:
  """The records of a method such as ``docs_iter``, with errors that name the data set."""
  try:
    yield from records()
  except Exception as error:  # readers and downloads of others raise anything
    raise InputError(
      f'{PREFIX}{id_}: ir_datasets cannot read it ({type(error).__name__}: {error}); it looks for '
      'its files below IR_DATASETS_HOME, or ~/.ir_datasets'
    ) from error


def _passage(id_: str, doc: Any) -> dict[str, str]:
  title, text = getattr(doc, 'title', None), getattr(doc, 'text', None)
  key = {'_id': check_id(doc.doc_id, f'{PREFIX}{id_}')}
  if isinstance(title, str) and isinstance(text, str):
    return key | {'title': title, 'text': text}
  return key | {'text': _text(id_, doc)}


def _text(id_: str, record: Any) -> str:
  """The text that ir_datasets gives to a retriever."""
  if not hasattr(record, 'default_text'):
    raise InputError(f'{PREFIX}{id_}: its {type(record).__name__} has no text')
  text = record.default_text()
  if not isinstance(text, str | None):
    raise InputError(f'{PREFIX}{id_}: a text is {text!r:.40}; expected a string')
  return text or ''


def _judgements(id_: str, dataset: Any) -> Qrels:
  """The judgements; if a passage is judged twice, the higher grade counts."""
  judged: Qrels = {}
  for entry in _iterate(id_, dataset.qrels_iter):
    if not isinstance(grade := getattr(entry, 'relevance', None), int):
      raise InputError(f'{PREFIX}{id_}: its judgements have no grades')
    own = judged.setdefault(check_id(entry.query_id, f'{PREFIX}{id_}'), {})
    key = check_id(entry.doc_id, f'{PREFIX}{id_}')
    own[key] = max(grade, own.get(key, grade))
  return judged
