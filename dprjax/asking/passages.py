"""Passages to ask about: those of a corpus, or documents cut into passages."""

import re
from collections.abc import Iterator

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.formats.document_files import Document, read_documents
from dprjax.formats.read_report import ReadReport
from dprjax.formats.sentences import split_sentences
from dprjax.formats.texts import PassageRecord, read_corpus

CORPUS = ('corpus.jsonl', 'collection.tsv', 'psgs_w100.tsv')
_TITLE_WORDS = 20  # a longer first line is text
_SPACE = re.compile(r'\s+')


def corpus_file(path: files.PathLike) -> epath.Path | None:
  """The corpus that a path names, itself or in a BEIR folder; None: a folder of documents.

  Raises:
    InputError: nothing is there, or a pipe, since a corpus is read twice.
  """
  found = files.existing(path, 'corpus')
  if not found.is_dir():
    return files.regular_file(found, 'corpus')
  return next((found / name for name in CORPUS if (found / name).exists()), None)


def read_passages(path: files.PathLike) -> Iterator[PassageRecord]:
  """The passages of a corpus file. Raises InputError as `texts.read_corpus`."""
  progress = Progress('passages', task=f'reading {path}')
  for _, entry in read_corpus(path):
    yield entry
    progress.advance()


def cut_documents(
  folder: files.PathLike, report: ReadReport, *, length: int, language: str
) -> Iterator[PassageRecord]:
  """Whole sentences of documents, joined in order to passages of at most ``length`` words.

  A short first line is the title of all its passages. Ids are ``DOCUMENT#n``, counted from 0, with
  ``_`` for white space, and ``~2`` after a document whose id another one has.

  Args:
    folder: of files that `document_files.read_documents` reads.
    report: counts documents.
    length: a longer sentence is a passage of its own.
    language: whose rules split sentences (ISO 639).

  Raises:
    InputError: as `document_files.read_documents`; no text.
  """
  seen: dict[str, int] = {}
  progress = Progress('documents', task=f'reading {folder}')
  for document in read_documents([folder], report):
    name = _SPACE.sub('_', document.id.strip())
    seen[name] = seen.get(name, 0) + 1
    if seen[name] > 1:
      name = f'{name}~{seen[name]}'
    yield from _cut(document, name, length, language)
    progress.advance()
  if not seen:
    raise InputError(f'{folder}: no document with text in it')


def _cut(document: Document, name: str, length: int, language: str) -> Iterator[PassageRecord]:
  first, _, rest = document.text.strip().partition('\n')
  first = ' '.join(first.split())
  titled = rest.strip() and len(first.split()) <= _TITLE_WORDS and first[-1:] not in '.!?;:,'
  title, text = (first, rest) if titled else ('', document.text)
  number, part, size = 0, list[str](), 0
  for sentence in split_sentences(text, language):
    words = len(sentence.split())
    if part and size + words > length:
      yield PassageRecord(f'{name}#{number}', title, ' '.join(part))
      number, part, size = number + 1, [], 0
    part.append(sentence)
    size += words
  if part:
    yield PassageRecord(f'{name}#{number}', title, ' '.join(part))
