"""Plain text to pretrain on: documents from files of many formats, and their sentences.

| file | documents |
|---|---|
| .jsonl, .csv, .tsv, .parquet | passages, see `text.texts` |
| .txt | one document; blank lines separate paragraphs, whose lines are joined |

All but .parquet may be compressed. A folder is read with its subfolders, in the order of
names; a BEIR or MS MARCO folder gives only its corpus. A newline in a text ends a sentence; a title
is the first line.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from dprjax.base import files, reading
from dprjax.base.counts import ReadReport
from dprjax.text import texts
from dprjax.text.documents import paragraphs
from dprjax.text.fields import check_id

KINDS = ('.jsonl', '.csv', '.tsv', '.parquet', '.txt')
# Characters; a longer text file becomes several documents, so that it need not fit into memory.
_PART = 1 << 20


class Document(NamedTuple):
  id: str
  text: str


def read_documents(paths: Sequence[files.PathLike], report: ReadReport) -> Iterator[Document]:
  """Yields the documents of files and folders; documents without text are counted and skipped.

  Ids come from the file, or else from its name and the line; they may repeat in other files.
  """
  for path in find_files(paths, report):
    for document in _read(path):
      check_id(document.id, str(path))
      if document.text.strip():
        report.count('documents')
        yield document
      else:
        report.count('documents without text: skipped', document.id)


def find_files(paths: Sequence[files.PathLike], report: ReadReport) -> list[epath.Path]:
  """The files of these paths, in reading order; unusable files of folders are counted."""
  found: list[epath.Path] = []
  for path in paths:
    given = files.existing(path, 'text')
    if given.is_dir():
      inside = list(_walk(given, report))
    else:
      files.regular_file(given, 'text')  # read twice: once for its checksum
      inside = [given] if _kind(given) else []
    if not inside:
      report.count(f'paths without a file of {", ".join(KINDS)}: skipped', str(given))
    found += inside
  return found


def _walk(
  folder: epath.Path, report: ReadReport, above: tuple[str, ...] = ()
) -> Iterator[epath.Path]:
  if str(files.resolved(folder)) in above:  # a link that leads up again
    report.count('links to a folder above: skipped', folder.name)
    return
  above = (*above, str(files.resolved(folder)))
  for name in ('corpus.jsonl', 'collection.tsv', 'psgs_w100.tsv'):
    for ending in ('', *reading.COMPRESSED):
      if (corpus := folder / f'{name}{ending}').exists():
        yield corpus
        return
  for child in sorted(folder.iterdir()):
    if child.name.startswith('.'):
      continue
    if child.is_dir():
      yield from _walk(child, report, above)
    elif _kind(child) is None:
      report.count('files of another kind: skipped', child.name)
    elif files.is_special(child) or not child.exists():
      report.count('pipes, devices and broken links: skipped', child.name)
    elif files.is_empty(child):
      report.count('empty files: skipped', child.name)
    else:
      yield child


def _kind(path: epath.Path) -> str | None:
  kind = epath.Path(reading.plain_name(path)).suffix
  return kind if kind in KINDS else None


def _read(path: epath.Path) -> Iterator[Document]:
  if _kind(path) == '.txt':
    yield from _read_text(path)
    return
  for entry in texts.read_entries(path, 'passage'):
    _, title, text = entry.record
    id_ = entry.record.id if 'id' in entry.roles else f'{path.name}:{entry.number}'
    # A title without a text is left out.
    yield Document(id_, f'{title}\n{text}'.strip() if text.strip() else '')


def _read_text(path: epath.Path) -> Iterator[Document]:
  """One document, or several of about ``_PART`` characters, split between paragraphs."""
  part: list[str] = []
  size = number = 0
  for paragraph in paragraphs(reading.read_lines(path, 'text')):
    part.append(paragraph)
    size += len(paragraph)
    if size > _PART:
      number += 1
      yield Document(f'{path.name}~{number}', '\n'.join(part))
      part, size = [], 0
  if part or not number:
    yield Document(f'{path.name}~{number + 1}' if number else path.name, '\n'.join(part))
