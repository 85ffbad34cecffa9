"""Documents for pretraining, cut into passages of whole sentences and tokenised once.

| file | documents |
|---|---|
| .jsonl, .csv, .tsv, .parquet | passages, see `text.texts` |
| .txt | one document; blank lines separate paragraphs, whose lines are joined |

All but .parquet may be compressed. A folder is read with its subfolders, in the order of names; a
BEIR or MS MARCO folder gives only its corpus.

    DIR/documents.json  its inputs (files, tokenizer, lengths), and the report
    DIR/lengths.npz     tokens and sentences of every passage
    DIR/passages/       TFDS data set, split 'passages': id, tokens, words, ends

Tokens are those of running text, without special tokens: a sentence after the first of its document
keeps the space before it, which byte-level BPE and sentencepiece make part of the first word. Text
that spells a special token stays text. `papers.condenser.views` cuts passages
into the texts of a batch and adds special tokens.
"""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
import sentencex
import tokenizers
from etils import epath

from dprjax.base import files, reading
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.text import fingerprint, table, texts
from dprjax.text.fields import check_id
from dprjax.text.table import Integers
from dprjax.text.tokenizing import Tokenizer

FORMAT_VERSION = 1
COLUMNS = ('tokens', 'words', 'ends')
SHORT = 5  # tokens; shorter sentences carry too little: a heading, "Yes.", half an abbreviation

KINDS = ('.jsonl', '.csv', '.tsv', '.parquet', '.txt')
# Characters; a longer text file becomes several documents, so that it need not fit into memory.
_PART = 1 << 20
_CHUNK = 4096  # sentences tokenised at a time
_log = logging.getLogger(__name__)


class Document(NamedTuple):
  id: str
  text: str


def read_documents(paths: Sequence[files.PathLike], report: ReadReport) -> Iterator[Document]:
  """Yields the documents of files and folders; documents without text are counted and skipped.

  Ids come from the file, or else from its name and the line; they may repeat in other files. A
  title is the first line.
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
  listed: list[epath.Path] = []
  for path in paths:
    source = files.existing(path, 'text')
    if source.is_dir():
      inside = list(_walk(source, report))
    else:
      files.regular_file(source, 'text')  # read twice: once for its checksum
      inside = [source] if _kind(source) else []
    if not inside:
      report.count(f'paths without a file of {", ".join(KINDS)}: skipped', str(source))
    listed += inside
  return listed


def _walk(
  folder: epath.Path, report: ReadReport, above: tuple[str, ...] = ()
) -> Iterator[epath.Path]:
  resolved = str(files.resolved(folder))
  if resolved in above:  # a link that leads up again
    return
  for name in ('corpus.jsonl', 'collection.tsv', 'psgs_w100.tsv'):
    for ending in ('', *reading.COMPRESSED):
      if (corpus := folder / f'{name}{ending}').exists():
        yield corpus
        return
  for child in sorted(folder.iterdir()):
    if child.name.startswith('.'):
      continue
    if child.is_dir():
      yield from _walk(child, report, (*above, resolved))
    elif (
      _kind(child) is None or files.is_special(child) or not child.exists() or files.is_empty(child)
    ):
      report.count('empty files, and files of another kind: skipped', child.name)
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


@dataclasses.dataclass(frozen=True)
class PassageCache:
  """An open cache of passages.

  The rows of ``passages`` have `tokens`; `words`, the word number of each token, from 0 in each
  passage; `ends`, the end of each sentence in `tokens`.
  """

  path: epath.Path
  settings: dict[str, Any]
  num_tokens: jt.Int32[np.ndarray, ' passages']
  num_sentences: jt.Int32[np.ndarray, ' passages']
  passages: table.Table

  @property
  def num_passages(self) -> int:
    return len(self.num_tokens)

  def passage_ids(self, rows: jt.Int[np.ndarray, ' B']) -> list[str]:
    return self.passages.ids(rows)


def open_documents(path: epath.Path) -> PassageCache:
  description, lengths = fingerprint.open_built(path, 'documents')
  passages = table.Table(path / 'passages', 'passages')
  return PassageCache(path, description['settings'], **lengths, passages=passages)


def build_documents(
  paths: Sequence[files.PathLike],
  tokenizer: Tokenizer,
  directory: files.PathLike,
  *,
  passage_length: int,
  language: str = 'en',
  process_index: int = 0,
) -> PassageCache:
  """The cache at ``directory``, rebuilt if its inputs changed (`fingerprint.build_once`).

  Sentences are joined in order to passages of at most ``passage_length`` tokens. A sentence shorter
  than ``SHORT`` tokens joins the next one, or at the end the one before. A sentence longer than a
  passage is cut between words into similar pieces, which count as sentences. Repeated passages are
  left out. The report counts all of these.
  """
  path = epath.Path(directory)
  settings = {
    'format_version': FORMAT_VERSION,
    'tokenizer_sha256': tokenizer.sha256,
    'passage_length': passage_length,
    'language': language,
  }

  def build(aside: epath.Path) -> fingerprint.Built:
    report = ReadReport()
    texts = _tokenise(read_documents(paths, report), tokenizer, language)
    sizes = _write_passages(aside / 'passages', texts, passage_length, report)
    if not sizes:
      raise InputError(
        f'{", ".join(map(str, paths))}: no text to pretrain on ({" ".join(str(report).split())})'
      )
    columns = zip(('num_tokens', 'num_sentences'), np.array(sizes, np.int32).T, strict=True)
    return fingerprint.Built(dict(columns), report, {})

  built = fingerprint.build_once(
    path,
    'documents',
    settings,
    {f'{number}: {file.name}': file for number, file in enumerate(find_files(paths, ReadReport()))},
    build,
    process_index,
  )
  documents = open_documents(path)
  if not built:
    _log.info(
      'documents: %s, built before, in %s', counted(documents.num_passages, 'passages'), path
    )
  return documents


class _Sentences(NamedTuple):
  """Tokens of a document, whether each begins a word, and the number in each sentence."""

  id: str
  tokens: Integers
  begins: jt.Bool[np.ndarray, ' tokens']
  lengths: list[int]


def _write_passages(
  folder: epath.Path, documents: Iterable[_Sentences], passage_length: int, report: ReadReport
) -> list[tuple[int, int]]:
  """Writes the passages; returns the number of tokens and of sentences of each."""
  sizes: list[tuple[int, int]] = []
  seen: set[bytes] = set()
  progress = Progress('documents', task='tokenising')
  with table.TableWriter(folder, 'passages', COLUMNS) as writer:
    for document in documents:
      joined = _join_short(document.lengths)
      short = len(document.lengths) - len(joined)
      long = sum(length > passage_length for length in joined)
      report.counts[f'sentences of fewer than {SHORT} tokens: joined to a neighbour'] += short
      report.counts[f'sentences of more than {passage_length} tokens: cut'] += long
      ends = _cut_long(np.cumsum(joined), document.begins, passage_length)
      for number, (start, inner) in enumerate(_pack(ends, passage_length)):
        identifier = f'{document.id}#{number}'
        tokens = document.tokens[start : inner[-1]]
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        if digest in seen:
          report.count('passages that came before: left out', identifier)
          continue
        seen.add(digest)
        borders = np.array(inner, np.int32) - start
        begins = document.begins[start : inner[-1]].copy()
        # A piece may begin inside a word, which then counts as two words.
        begins[borders[:-1]] = True
        words = np.cumsum(begins, dtype=np.int32)
        values = {'tokens': tokens, 'words': words - words[0], 'ends': borders}
        writer.write(identifier, values)
        sizes.append((len(tokens), len(borders)))
      progress.advance()
  report.counts['passages'] = len(sizes)
  report.counts['passages of one sentence'] = sum(sentences == 1 for _, sentences in sizes)
  return sizes


def _tokenise(
  documents: Iterable[Document], tokenizer: Tokenizer, language: str
) -> Iterator[_Sentences]:
  # A copy that does not parse special tokens in text.
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  backend.encode_special_tokens = True
  waiting: list[tuple[str, list[str]]] = []
  count = 0
  for document in documents:
    sentences = split_sentences(document.text, language)
    waiting.append((document.id, sentences))
    count += len(sentences)
    if count >= _CHUNK:
      yield from _tokenise_chunk(waiting, backend)
      waiting, count = [], 0
  yield from _tokenise_chunk(waiting, backend)


def _tokenise_chunk(
  chunk: list[tuple[str, list[str]]], backend: tokenizers.Tokenizer
) -> Iterator[_Sentences]:
  texts = [
    f' {sentence}' if number else sentence
    for _, sentences in chunk
    for number, sentence in enumerate(sentences)
  ]
  # encode_batch_fast would leave out the words.
  encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
  for identifier, sentences in chunk:
    tokens: list[int] = []
    begins: list[bool] = []
    lengths: list[int] = []
    for encoding in itertools.islice(encodings, len(sentences)):
      if encoding.ids:
        tokens += encoding.ids
        # Each sentence counts its words from 0, so two neighbours may have the same number.
        begins += [True, *(a != b for a, b in itertools.pairwise(encoding.word_ids))]
        lengths.append(len(encoding))
    if tokens:
      yield _Sentences(identifier, np.array(tokens, np.int32), np.array(begins), lengths)


def _join_short(lengths: Sequence[int]) -> list[int]:
  joined: list[int] = []
  waiting = 0
  for length in lengths:
    waiting += length
    if waiting >= SHORT:
      joined.append(waiting)
      waiting = 0
  if waiting and joined:
    joined[-1] += waiting
  elif waiting:
    joined.append(waiting)
  return joined


def _cut_long(
  ends: jt.Int[np.ndarray, ' sentences'], begins: jt.Bool[np.ndarray, ' tokens'], limit: int
) -> list[int]:
  """The ends, with more inserted so that no sentence has more than ``limit`` tokens."""
  cut: list[int] = []
  start = 0
  for end in ends.tolist():
    while end - start > limit:
      pieces = -(-(end - start) // limit)
      middle = start - (start - end) // pieces
      # Move back to the beginning of a word, if possible.
      (places,) = np.nonzero(begins[start + 1 : middle + 1])
      start = start + 1 + int(places[-1]) if len(places) else middle
      cut.append(start)
    cut.append(end)
    start = end
  return cut


def _pack(ends: list[int], limit: int) -> list[tuple[int, list[int]]]:
  """(start, ends of its sentences) of every passage: as many sentences as fit, in order.

  If the last passage has only one sentence, and the one before at least three, its last sentence
  moves over, so that the last passage has two to compare.
  """
  passages: list[tuple[int, list[int]]] = [(0, [])]
  for end in ends:
    start, inner = passages[-1]
    if end - start > limit:
      start, inner = inner[-1], []
      passages.append((start, inner))
    inner.append(end)
  if len(passages) > 1:
    before, last = passages[-2][1], passages[-1][1]
    if len(last) == 1 and len(before) > 2 and last[0] - before[-2] <= limit:
      passages[-1] = before[-2], [before.pop(), *last]
  return passages


def split_sentences(text: str, language: str = 'en') -> list[str]:
  """The sentences of a text, with single spaces; a newline ends a sentence.

  ``language`` is an ISO 639 code; sentencex takes English rules for an unknown one.
  """
  spans = (
    sentence.split() for line in text.splitlines() for sentence in sentencex.segment(language, line)
  )
  return [' '.join(words) for words in spans if words]


def paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
  """Joins numbered lines; a gap in the numbers is a blank line, which ends a paragraph."""
  for _, block in itertools.groupby(enumerate(lines), key=lambda pair: pair[1][0] - pair[0]):
    yield ' '.join(line.strip() for _, (_, line) in block)
