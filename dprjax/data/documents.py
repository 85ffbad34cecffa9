"""Documents cut into passages of whole sentences and tokenised once, to pretrain on.

    DIR/documents.json  what it was made of (files, tokenizer, lengths) and what the report said
    DIR/lengths.npz     tokens and sentences of every passage
    DIR/passages/       TFDS data set, split 'passages': id, tokens, words, ends

Tokens are those of running text, without special tokens: a sentence that is not its document's
first keeps the space before it, which byte-level BPE and sentencepiece make part of its first word.
Text that spells a special token is text. Special tokens are added by `dprjax.data.views`, which
cuts passages into the texts of a batch.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
import tokenizers
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.data import fingerprint, table
from dprjax.data.text import Tokenizer
from dprjax.formats.documents import Document, find_files, read_documents, split_sentences
from dprjax.formats.report import Report

FORMAT_VERSION = 1
COLUMNS = ('tokens', 'words', 'ends')
# tokens; what is shorter says too little to be told from other sentences: a heading, "Yes.", half
# an abbreviation
SHORT = 5

_CHUNK = 4096  # sentences tokenised at a time
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Documents:
  """An open store of passages.

  Attributes:
    settings: what it was built from, as in documents.json.
    pad_id, cls_id, sep_id: of the tokenizer, for batches.
    num_tokens: of each passage, no special tokens.
    num_sentences: of each passage.
    passages: the rows. `tokens`; `words`, the number of the word in the passage that each token
      belongs to, from 0; `ends`, where each sentence ends among the tokens, the last at their
      number.
  """

  path: epath.Path
  settings: dict[str, Any]
  pad_id: int
  cls_id: int
  sep_id: int
  num_tokens: jt.Int32[np.ndarray, 'passages']
  num_sentences: jt.Int32[np.ndarray, 'passages']
  passages: table.Table

  @property
  def num_passages(self) -> int:
    return len(self.num_tokens)

  def passage_ids(self, rows: jt.Int[np.ndarray, 'B']) -> list[str]:
    """``DOCUMENT#n``, n counting the document's passages from 0."""
    return [name.decode() for name in self.passages.read(rows, ('id',))[0]]


def open_documents(directory: files.PathLike) -> Documents:
  """Opens what `build_documents` wrote.

  Raises InputError if it is not there, or was written by another version.
  """
  path = epath.Path(directory)
  written = fingerprint.read_description(path, 'documents.json', FORMAT_VERSION)
  with (path / 'lengths.npz').open('rb') as file, np.load(file) as arrays:
    lengths = {name: arrays[name] for name in ('num_tokens', 'num_sentences')}
  return Documents(
    path=path,
    settings=written['settings'],
    **written['special'],
    passages=table.Table(path / 'passages', 'passages'),
    **lengths,
  )


def build_documents(
  paths: Sequence[files.PathLike],
  tokenizer: Tokenizer,
  directory: files.PathLike,
  *,
  passage_length: int,
  language: str = 'en',
  process_index: int = 0,
  wait_s: float = 24 * 3600,
) -> Documents:
  """The store at ``directory``, built unless what is there was made of just this.

  Each document's sentences are put together, in order, to passages of at most ``passage_length``
  tokens, see `_pack`. A sentence of fewer than ``SHORT`` tokens is joined to the next one, the last
  of a document to the one before. A sentence longer than a passage is cut into pieces of like
  length, between words, each a sentence from then on. A passage with the tokens of an earlier one
  is left out. All of that is counted and reported once. Built aside and renamed, by process 0; the
  others wait.

  Args:
    paths: files and folders, see `dprjax.formats.documents`.
    passage_length: tokens of a passage, at most, without special tokens.
    language: whose rules split sentences, see `split_sentences`.
    process_index, wait_s: of this process, and how many seconds one that is not process 0 waits.

  Raises:
    InputError: a file that cannot be used; no text in any of them; a tokenizer without a mask
      token; the directory holds something else; process 0 was not done in time.
  """
  if tokenizer.mask_id is None:
    raise InputError(
      'the tokenizer has no mask token, which masked language modelling needs; take a masked '
      "language model's tokenizer, "
      'or add one ([MASK] or <mask>) to its vocabulary and special tokens'
    )
  if passage_length < SHORT:
    raise InputError(
      f'passages of {passage_length} tokens cannot hold sentences; expected {SHORT} or more'
    )
  path = epath.Path(directory)
  found = find_files(paths, Report())
  where = {f'{number}: {file.name}': file for number, file in enumerate(found)}
  settings = {
    'format_version': FORMAT_VERSION,
    'tokenizer_sha256': tokenizer.sha256,
    'passage_length': passage_length,
    'language': language,
  }
  report = Report()

  def build(aside: epath.Path, stamps: dict[str, Any]) -> None:
    lengths = _write_passages(
      aside / 'passages',
      read_documents(paths, report),
      tokenizer,
      passage_length,
      language,
      report,
    )
    if not lengths:
      raise InputError(
        f'{", ".join(map(str, paths))}: no text to pretrain on ({report.counts.total():,} '
        'documents, all of them empty)'
      )
    with (aside / 'lengths.npz').open('wb') as file:
      np.savez(
        file,
        **dict(zip(('num_tokens', 'num_sentences'), np.array(lengths, np.int32).T, strict=True)),
      )
    special = {'pad_id': tokenizer.pad_id, 'cls_id': tokenizer.cls_id, 'sep_id': tokenizer.sep_id}
    files.write_json(
      aside / 'documents.json',
      {'settings': settings, 'special': special, 'files': stamps, 'report': dict(report.counts)},
    )

  built = fingerprint.build_once(
    path, 'documents.json', settings, where, build, process_index=process_index, wait_s=wait_s
  )
  documents = open_documents(path)
  if built:
    _log.info('documents: built %s\n%s', path, report)
  else:
    _log.info('documents: %s passages, built before, in %s', f'{documents.num_passages:,}', path)
  return documents


class _Sentences(NamedTuple):
  """A document's tokens, where words begin among them, and how many tokens each sentence has."""

  id: str
  tokens: table.Integers
  begins: jt.Bool[np.ndarray, 'tokens']
  lengths: list[int]


def _write_passages(
  folder: epath.Path,
  documents: Iterable[Document],
  tokenizer: Tokenizer,
  passage_length: int,
  language: str,
  report: Report,
) -> list[tuple[int, int]]:
  """Writes the passages; returns the number of tokens and of sentences of each."""
  sizes: list[tuple[int, int]] = []
  seen: set[bytes] = set()
  progress = Progress('documents', task='tokenising')
  with table.TableWriter(folder, 'passages', COLUMNS) as writer:
    for document in _tokenise(documents, tokenizer, language):
      joined = _join_short(document.lengths)
      report.counts[f'sentences of fewer than {SHORT} tokens: joined to a neighbour'] += len(
        document.lengths
      ) - len(joined)
      ends = _cut_long(np.cumsum(joined), document.begins, passage_length)
      report.counts[f'sentences of more than {passage_length} tokens: cut'] += sum(
        length > passage_length for length in joined
      )
      for number, (start, inner) in enumerate(_pack(ends, passage_length)):
        tokens, begins = (
          document.tokens[start : inner[-1]],
          document.begins[start : inner[-1]].copy(),
        )
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        if digest in seen:
          report.count('passages that came before: left out', f'{document.id}#{number}')
          continue
        seen.add(digest)
        borders = np.array(inner, np.int32) - start
        # A piece of a sentence may begin within a word, which then is two.
        begins[borders[:-1]] = True
        words = np.cumsum(begins, dtype=np.int32)
        writer.write(
          f'{document.id}#{number}', {'tokens': tokens, 'words': words - words[0], 'ends': borders}
        )
        sizes.append((len(tokens), len(borders)))
      progress.advance()
  report.counts['passages'] = len(sizes)
  report.counts['passages of one sentence'] = sum(sentences == 1 for _, sentences in sizes)
  return sizes


def _tokenise(
  documents: Iterable[Document], tokenizer: Tokenizer, language: str
) -> Iterator[_Sentences]:
  # A copy of its own, in which text that spells a special token stays text.
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
  # Not encode_batch_fast, which leaves the words out.
  encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
  for identifier, sentences in chunk:
    tokens: list[int] = []
    words: list[int | None] = []
    lengths = []
    for _, encoding in zip(sentences, encodings, strict=False):
      tokens += encoding.ids
      words += encoding.word_ids
      lengths.append(len(encoding))
    if tokens:
      numbers = np.array([-1 if word is None else word for word in words], np.int32)
      begins = np.concatenate([[True], numbers[1:] != numbers[:-1]])
      # Each sentence counts its words from 0 again, so two neighbours may have one number.
      firsts = np.cumsum([0, *lengths[:-1]])
      begins[firsts[firsts < len(begins)]] = True
      yield _Sentences(
        identifier, np.array(tokens, np.int32), begins, [length for length in lengths if length]
      )


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
  ends: jt.Int[np.ndarray, 'sentences'], begins: jt.Bool[np.ndarray, 'tokens'], limit: int
) -> list[int]:
  """The ends with more among them, so that no sentence has more than ``limit`` tokens."""
  cut: list[int] = []
  start = 0
  for end in ends.tolist():
    while end - start > limit:
      pieces = -(-(end - start) // limit)
      middle = start - (start - end) // pieces
      # Back to where a word begins, if one does.
      (places,) = np.nonzero(begins[start + 1 : middle + 1])
      start = start + 1 + int(places[-1]) if len(places) else middle
      cut.append(start)
    cut.append(end)
    start = end
  return cut


def _pack(ends: list[int], limit: int) -> list[tuple[int, list[int]]]:
  """(start, ends of its sentences) of every passage: as many sentences as fit, in order.

  A last sentence that is left alone, and so could not be set against another of its passage, gets
  the one before it for company, where that passage has two more.
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
