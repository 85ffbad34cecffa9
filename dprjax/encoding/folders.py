"""Writes a folder of embeddings (`dprjax.encoding.embeddings`), in one process or several.

Files are written aside and renamed.
"""

import dataclasses
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import distributed, files, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, sha256_file
from dprjax.base.progress import Progress, pace
from dprjax.encoding import codes
from dprjax.encoding.manifest import (
  FILES,
  MANIFEST,
  PROGRESS,
  PROGRESS_OF_OTHERS,
  Checksums,
  Manifest,
  Meta,
  Shard,
  cut_shards,
  describe,
  shard_names,
  shown,
)
from dprjax.encoding.text_encoder import Encoder
from dprjax.text.fields import check_unique
from dprjax.text.texts import Text, Texts, pack

logger = logging.getLogger('dprjax')

_CHECKED = 1000  # texts checked for words of the topics
# Temporary files of a killed run.
_LEFT = re.compile(r'\.(embeddings-|ids-|manifest|progress).*\.[0-9a-f]{8}\.tmp')
# White space and control characters separate the columns and lines of a run.
_BAD_IDS = re.compile(r'[\s\x00-\x1f\x7f]')


class Rows(NamedTuple):
  """A summary of all ids in a folder."""

  total: int
  sha256: str


def summary(ids: Iterable[str], source: str = 'ids') -> Rows:
  """Raises InputError for an id that a TREC run cannot contain, or a repeated one in a list."""
  total, sha256 = 0, hashlib.sha256()
  for total, id_ in enumerate(ids, start=1):
    if not id_ or _BAD_IDS.search(id_):
      raise InputError(
        f'{source}, row {total}: the id {id_!r:.80} is empty or has whitespace or control '
        'characters'
      )
    sha256.update(f'{id_}\n'.encode())
  if isinstance(ids, Sequence):
    check_unique(ids, source)
  return Rows(total, sha256.hexdigest())


class EmbeddingsWriter:
  """Writes a folder shard by shard; a second run keeps the complete shards.

      writer = EmbeddingsWriter(folder, meta, summary(ids))
      for shard in writer.pending():
        rows = slice(shard.start, shard.stop)
        writer.write(shard, encode(texts[rows]), ids[rows])
      writer.finish()

  Several processes may write different shards. Process 0 opens the folder first and finishes last.
  """

  def __init__(
    self,
    folder: PathLike,
    meta: Meta,
    rows: Rows,
    shard_rows: int = 100_000,
    process: int = 0,
  ):
    """Opens or makes the folder, and verifies the shards of an earlier run."""
    self.folder = epath.Path(folder)
    self.meta = meta
    self._process = process
    self._progress = PROGRESS if process == 0 else f'progress-{process:05d}.json'
    self._shards = cut_shards(rows.total, shard_rows)
    self._manifest = Manifest(meta, rows.total, shard_rows, rows.sha256, {})
    self._manifest.checksums.update(self._resume())

  def _resume(self) -> dict[int, Checksums]:
    """Checksums of the intact shards, by number."""
    names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
    stored = next((name for name in (MANIFEST, PROGRESS) if name in names), None)
    if stored is None:
      if names and not outputs.is_vacant(self.folder):
        raise InputError(f'{self.folder} has other contents; choose another folder')
      self._clear()
      self._manifest.write(self.folder / PROGRESS)
      return {}
    manifest = Manifest.read(self.folder / stored)
    if different := self._differences(manifest):
      raise InputError(
        f'{self.folder} has other embeddings: {"; ".join(different)}; repeat the first settings, '
        'or choose another folder'
      )
    # Shards written now must use the same ranges.
    self._manifest = dataclasses.replace(self._manifest, ranges=manifest.ranges)
    if self._process:  # verified by process 0
      return manifest.checksums
    self._clear()
    done = {
      number: digests
      for number, digests in (self._others() | manifest.checksums).items()
      if self._intact(number, digests)
    }
    # A finished folder with a damaged shard becomes unfinished.
    if stored == PROGRESS or len(done) < len(self._shards):
      dataclasses.replace(self._manifest, checksums=done).write(self.folder / PROGRESS)
      (self.folder / MANIFEST).unlink(missing_ok=True)
    for path in self.folder.glob(PROGRESS_OF_OTHERS):
      path.unlink()
    return done

  def _clear(self) -> None:
    for path in self.folder.iterdir() if self.folder.exists() else ():
      if _LEFT.fullmatch(path.name):
        path.unlink()

  def _intact(self, number: int, digests: Checksums) -> bool:
    names = shard_names(number, len(self._shards))
    return all(
      path.exists()
      and not path.is_dir()
      and not files.is_special(path)
      and sha256_file(path) == digest
      for path, digest in zip(
        (self.folder / names[what] for what in FILES), digests.of_files, strict=True
      )
    )

  def _differences(self, manifest: Manifest) -> list[str]:
    """Differing header fields: 'arithmetic is float32 there, bfloat16 here'."""
    there = manifest.header()
    return [
      f'{key} is {shown(there[key])} there, {shown(value)} here'
      for key, value in self._manifest.header().items()
      if there[key] != value
    ]

  def _others(self) -> dict[int, Checksums]:
    checksums: dict[int, Checksums] = {}
    for path in self.folder.glob(PROGRESS_OF_OTHERS):
      progress = Manifest.read(path)
      if not self._differences(progress):
        checksums |= progress.checksums
    return checksums

  @property
  def needs_ranges(self) -> bool:
    """Whether codes are stored but their ranges are not measured yet."""
    return self.meta.dtype in codes.LEVELS and self._manifest.ranges is None

  def calibrate(self, sample: Float[np.ndarray, 'n H']) -> None:
    """Measures the ranges of codes on a sample, before any vector is written."""
    codes.check_finite(sample, lambda _: f'{self.folder}: the embedding of a text')
    ranges = codes.calibrate(sample, self.meta.dtype)
    self._manifest = dataclasses.replace(self._manifest, ranges=ranges)
    self._manifest.write(self.folder / self._progress)

  def pending(self) -> list[Shard]:
    """The shards to write, in order."""
    return [shard for shard in self._shards if shard.number not in self._manifest.checksums]

  def write(
    self,
    shard: Shard,
    vectors: Float[np.ndarray, 'rows H'],
    ids: Sequence[str],
    cut: int = 0,
  ) -> None:
    """Writes a shard, of which ``cut`` texts were cut."""
    ranges = self._manifest.ranges
    dtype = self.meta.dtype if ranges is None else 'float32'
    with np.errstate(over='ignore'):  # a value too large for float16 becomes infinite
      vectors = np.ascontiguousarray(vectors, dtype=dtype)
    codes.check_finite(vectors, lambda row: f'the embedding of {ids[row]!r} as {dtype}')
    if ranges is not None:
      vectors = codes.encode(vectors, codes.Code(self.meta.dtype, ranges))
    names = shard_names(shard.number, len(self._shards))
    with atomic_write(self.folder / names['embeddings'], 'wb') as file:
      np.save(file, vectors, allow_pickle=False)
    with atomic_write(self.folder / names['ids']) as file:
      file.writelines(f'{id_}\n' for id_ in ids)
    of_vectors, of_ids = (sha256_file(self.folder / names[what]) for what in FILES)
    self._manifest.checksums[shard.number] = Checksums(of_vectors, of_ids, cut)
    self._manifest.write(self.folder / self._progress)

  @property
  def cut(self) -> int:
    """How many texts of all written shards were cut."""
    return sum(checksums.cut for checksums in self._manifest.checksums.values())

  def discard(self) -> None:
    """Removes the progress file of an unfinished folder without shards; for failed commands."""
    if self._process or self._manifest.checksums or any(self.folder.glob(PROGRESS_OF_OTHERS)):
      return
    if not (self.folder / MANIFEST).exists():
      (self.folder / PROGRESS).unlink(missing_ok=True)

  def finish(self) -> None:
    """Writes the manifest, on process 0."""
    if self._process:
      return
    self._manifest.checksums.update(self._others())
    if pending := self.pending():
      raise RuntimeError(f'{len(pending)} of {len(self._shards)} shards are not written')
    self._manifest.write(self.folder / MANIFEST)
    for path in (self.folder / PROGRESS, *self.folder.glob(PROGRESS_OF_OTHERS)):
      path.unlink(missing_ok=True)


def encode_file(
  encoder: Encoder,
  side: str,
  source: str,
  out: PathLike,
  *,
  columns: Mapping[str, str] | None = None,
  qrels: str | None = None,
  part: tuple[int, int] = (0, 1),
  topic: int | None = None,
  **options: Any,
) -> None:
  """Encodes the texts of an input into a folder claimed by the caller.

  Args:
    source: a file, a pattern, a folder or ``hf:NAME``, which is read more than once.
    columns: the names of columns by role, id, title and text.
    qrels: judgements; of the queries, only those judged here are encoded.
    part: (i, n) encodes part i of n equal parts of the texts.
    topic, options: of `fill_folder`.
  """
  if options.get('dtype') == 'float16' and not encoder.entry().spec.normalize:
    raise InputError(
      '--precision=float16 needs --normalize=true: other values can exceed its range'
    )
  judged = None
  if qrels is not None:
    from dprjax.text.qrels import read_qrels

    judged = read_qrels(qrels)
  texts: Iterable[Text] = Texts(source, side, judged, columns=columns)
  if judged is not None and not any(True for _ in texts):
    raise InputError(f'{source}: none of its queries is judged in {qrels}')
  number, parts = part
  if parts > 1:
    total = sum(1 for _ in texts)
    if total < parts:
      raise InputError(f'--part={number}/{parts}: {source} has only {total:,} texts')
    texts = _Slice(texts, total * number // parts, total * (number + 1) // parts)
  encoder.check_topic(topic)
  if topic is None and side == 'passage' and encoder.topics:
    first = [text.text for text in itertools.islice(texts, _CHECKED)]
    for model in encoder.topics.values():
      model.check_shares(first, source)
  fill_folder(encoder, side, texts, out, source=source, topic=topic, **options)


@dataclasses.dataclass(frozen=True)
class _Slice:
  """Texts from ``start`` to ``stop``; each iteration reads them again."""

  texts: Iterable[Text]
  start: int
  stop: int

  def __iter__(self) -> Iterator[Text]:
    return itertools.islice(iter(self.texts), self.start, self.stop)


class _Survey(NamedTuple):
  """The summary of a first pass over all texts; ``shards`` has a digest of each, 16 bytes."""

  rows: Rows
  input_sha256: str
  shards: list[bytes]


def fill_folder(
  encoder: Encoder,
  side: str,
  texts: Iterable[Text],
  out: PathLike,
  *,
  source: str,
  dtype: str = 'float32',
  shard_rows: int = 20_000,
  topic: int | None = None,
  calibrate: int = 1024,
  vectors: Callable[[slice], Float[np.ndarray, 'n H']] | None = None,
) -> None:
  """Encodes texts into a folder claimed by the caller; see ``encoding.embeddings``.

  Texts are read twice, and once more for calibration; the texts of one shard are in memory.
  Existing shards are kept. All processes call this; each encodes its own shards.

  Args:
    encoder: with at most one prompt.
    texts: at least one; the same in each iteration.
    topic: for a topic prompt: the topic of all texts; None: by the words of each.
    calibrate: the most texts for measuring the ranges of codes.
    vectors: gives the vectors of texts that are already encoded.
  """
  survey = _survey(texts, source, shard_rows)
  count_all = survey.rows.total
  meta = describe(encoder, side, dtype, survey.input_sha256, topic)
  process, processes = jax.process_index(), jax.process_count()
  with distributed.turn():
    writer = EmbeddingsWriter(out, meta, survey.rows, shard_rows, process)
    if writer.needs_ranges:
      try:
        _calibrate(writer, encoder, side, texts, count_all, topic, calibrate)
      except BaseException:  # as below
        writer.discard()
        raise
  pending = writer.pending()
  todo = sum(shard.stop - shard.start for shard in pending)
  if todo < count_all:
    logger.info(
      '%s: %s of %s already there', out, f'{count_all - todo:,}', counted(count_all, 'texts')
    )
  if 0 < len(pending) < processes:
    logger.info(
      '%s for %d processes leave some idle: give a smaller --shard_rows',
      counted(len(pending), 'shards'),
      processes,
    )
  share = pending[process::processes]
  count = sum(shard.stop - shard.start for shard in share)
  progress = Progress('texts', count, 'encoding')
  cut = 0
  try:
    for shard, part in _parts(texts, share, survey, source):
      if vectors is None:
        strings, before = [text.text for text in part], encoder.truncated[side]
        encoded = encoder.encode(strings, side, progress, topic=topic)
        cut = encoder.truncated[side] - before
      else:
        encoded = vectors(slice(shard.start, shard.stop))
      writer.write(shard, encoded, [text.id for text in part], cut)
      progress.advance(len(part))
  except BaseException:  # also after an interrupt, no partial shard stays
    writer.discard()
    raise
  distributed.barrier('encoded')
  writer.finish()
  if writer.cut:
    logger.info(
      '%s: %s of %s were longer than %d tokens and cut',
      out,
      f'{writer.cut:,}',
      counted(count_all, 'texts'),
      meta.max_length,
    )
  logger.info(
    '%s: %s%s',
    out,
    counted(count_all, f'{side} vectors'),
    pace(todo, progress.seconds),
  )


def _survey(texts: Iterable[Text], source: str, shard_rows: int) -> _Survey:
  whole, part = hashlib.sha256(), hashlib.blake2b(digest_size=16)
  shards: list[bytes] = []
  progress = Progress('texts', task=f'reading {source}')

  def ids() -> Iterator[str]:
    nonlocal part
    for number, text in enumerate(texts):
      if number and not number % shard_rows:
        shards.append(part.digest())
        part = hashlib.blake2b(digest_size=16)
      packed = pack(text)
      whole.update(packed)
      part.update(packed)
      progress.advance()
      yield text.id

  rows = summary(ids(), source)
  if isinstance(texts, Sequence):  # `Texts` checks ids itself
    check_unique([text.id for text in texts], source)
  return _Survey(rows, whole.hexdigest(), [*shards, part.digest()])


def _parts(
  texts: Iterable[Text], shards: Iterable[Shard], survey: _Survey, source: str
) -> Iterator[tuple[Shard, list[Text]]]:
  """The texts of these ascending shards."""
  stream, place = iter(texts), 0
  for shard in shards:
    wanted = itertools.islice(stream, shard.start - place, shard.stop - place)
    part, place = list(wanted), shard.stop
    checksum = hashlib.blake2b(b''.join(map(pack, part)), digest_size=16).digest()
    if checksum != survey.shards[shard.number]:
      raise InputError(
        f'{source} was changed while it was encoded; encode it again, into another folder'
      )
    yield shard, part


def _calibrate(
  writer: EmbeddingsWriter,
  encoder: Encoder,
  side: str,
  texts: Iterable[Text],
  rows: int,
  topic: int | None,
  count: int,
) -> None:
  """Measures ranges of codes on texts sampled from the whole corpus."""
  places = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
  chosen = set(places.tolist())
  sample = [text.text for place, text in enumerate(texts) if place in chosen]
  before = encoder.truncated[side]
  writer.calibrate(encoder.encode(sample, side, topic=topic))
  encoder.truncated[side] = before  # they are encoded again later
