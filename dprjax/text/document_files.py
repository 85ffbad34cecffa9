"""Plain text to pretrain on: documents from files of many formats, and their sentences.

| file | documents |
|---|---|
| .jsonl, .csv, .tsv, .parquet | passages, see `text.texts` |
| .txt | one document; blank lines separate paragraphs, whose lines are joined |
| .zip | its .txt files |

All but .parquet and .zip may be compressed. A folder is read with its subfolders, in the order of
names; a BEIR or MS MARCO folder gives only its corpus. A newline in a text ends a sentence; a title
is the first line.
"""

import errno
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text import texts
from dprjax.text.fields import check_id
from dprjax.text.read_report import ReadReport
from dprjax.text.sentences import paragraphs

_KINDS = ('.jsonl', '.csv', '.tsv', '.parquet', '.txt', '.zip')
# Characters; a longer text file becomes several documents, so that it need not fit into memory.
_PART = 1 << 20
_MOST_PACKED = 200  # largest plausible compression of text in a zip file
# zipfile raises these, too, for encryption, unknown compression and wrong sizes.
_BROKEN_ZIP = (
  *(zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError, OverflowError, EOFError),
  *(zlib.error, lzma.LZMAError, struct.error, OSError),
)


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
      raise InputError(
        f'{given}: no text; expected {", ".join(_KINDS)}, perhaps with '
        f'{", ".join(reading.COMPRESSED)}'
      )
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
  name = reading.plain_name(path)
  kind = epath.Path(name).suffix
  return kind if kind in _KINDS and (kind != '.zip' or name == path.name) else None


def _read(path: epath.Path) -> Iterator[Document]:
  match _kind(path):
    case '.txt':
      with reading.open_text(path, 'text') as file:
        yield from _read_text(file, path.name, str(path))
    case '.zip':
      yield from _read_zip(path)
    case _:
      yield from _read_entries(path)


def _read_entries(path: epath.Path) -> Iterator[Document]:
  for entry in texts.read_entries(path, 'passage'):
    _, title, text = entry.record
    id_ = entry.record.id if 'id' in entry.roles else f'{path.name}:{entry.number}'
    # A title without a text is left out.
    yield Document(id_, f'{title}\n{text}'.strip() if text.strip() else '')


def _read_zip(path: epath.Path) -> Iterator[Document]:
  with path.open('rb') as file:
    try:
      archive = zipfile.ZipFile(file)
      members = sorted(
        (member for member in archive.infolist() if _is_text(member.filename)),
        key=lambda member: member.filename,
      )
      if not members:
        raise InputError(f'{path}: it contains no .txt file')
      packed, size = file.seek(0, io.SEEK_END), sum(member.file_size for member in members)
      if size > max(_MOST_PACKED * packed, _PART):
        raise InputError(
          f'{path}: its {packed:,} bytes unpack to {size:,}, too many for text; unpack it yourself '
          'first'
        )
      for member in members:
        name = member.filename
        with archive.open(member) as inside, reading.decoded(inside) as lines:
          yield from _read_text(lines, f'{path.name}/{name}', f'{path}, {name}')
    except InputError:
      raise
    except _BROKEN_ZIP as error:
      # A wrong offset makes a system call fail with a bad argument.
      if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise
      raise InputError(
        f'{path}: broken, cut-off or encrypted zip file ({error}); fetch it again, or unpack it'
      ) from error


def _is_text(name: str) -> bool:
  return name.endswith('.txt') and not name.startswith('__MACOSX/')


def _read_text(lines: IO[str], identifier: str, name: str) -> Iterator[Document]:
  """One document, or several of about ``_PART`` characters, split between paragraphs."""
  part: list[str] = []
  size = number = 0
  for paragraph in paragraphs(reading.number_lines(lines, name)):
    part.append(paragraph)
    size += len(paragraph)
    if size > _PART:
      number += 1
      yield Document(f'{identifier}~{number}', '\n'.join(part))
      part, size = [], 0
  if part or not number:
    yield Document(f'{identifier}~{number + 1}' if number else identifier, '\n'.join(part))
