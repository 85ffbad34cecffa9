"""Passages to ask about, from a corpus, a table, or documents cut into passages."""

from collections.abc import Iterator

from etils import epath

from dprjax.base import files
from dprjax.base.progress import Progress
from dprjax.formats import documents, hub_data, inputs, records
from dprjax.formats.texts import PassageRecord, Texts, read_corpus


def corpus_file(path: files.PathLike) -> epath.Path | None:
  """The jsonl corpus or MS MARCO tsv at a path, or in a BEIR folder.

  Returns:
    None for anything else (`read_others`).

  Raises:
    InputError: it is missing, or a pipe, since a corpus is read twice.
  """
  if hub_data.is_named(path) or files.is_pattern(path):
    return None
  found = files.existing(path, 'corpus')
  if found.is_dir():
    return inputs.variant(found, 'corpus.jsonl')
  files.regular_file(found, 'corpus')
  return None if records.ending_of(found) in ('csv', 'parquet') or _cut(found) else found


def _cut(path: epath.Path) -> bool:
  [found] = inputs.find(path, 'passage')
  return found.document


def read_passages(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages of a corpus file. Raises InputError as `texts.read_corpus`."""
  progress = Progress('passages', task=f'reading {path}')
  for _, entry in read_corpus(path):
    yield entry
    progress.advance()


def read_others(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages of tables and documents, read as in all commands (`formats.inputs`).

  Passages of documents have the headings above them as titles.

  Raises:
    InputError: as `Texts` and `documents.read_passages`.
  """
  progress = Progress('passages', task=f'reading {path}')
  found = inputs.find(path, 'passage')
  if any(not one.document for one in found):
    for text in Texts(path, 'passage'):
      yield PassageRecord(text.id, '', text.text)
      progress.advance()
    return
  for one in found:
    for passage in documents.read_passages(one.path, one.name):
      yield PassageRecord(passage.id, passage.title, passage.text)
      progress.advance()
