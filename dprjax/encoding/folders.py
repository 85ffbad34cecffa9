"""Encodes texts into a folder of embeddings, in one process or several."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from dprjax.base import distributed, files
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, pace
from dprjax.encoding import embeddings, manifest
from dprjax.encoding.text_encoder import Encoder
from dprjax.text.texts import Text, pack

logger = logging.getLogger('dprjax')


class _Survey(NamedTuple):
  """The summary of a first pass over all texts.

  Attributes:
    rows: the number of texts, and the SHA-256 of their ids.
    shards: the digest of the texts of each shard, 16 bytes.
  """

  rows: embeddings.Rows
  input_sha256: str
  shards: list[bytes]


def fill_folder(
  encoder: Encoder,
  side: str,
  texts: Iterable[Text],
  out: files.PathLike,
  *,
  source: str,
  dtype: str = 'float32',
  shard_rows: int = 20_000,
  topic: str = 'infer',
  numbers: Sequence[int] | int | None = None,
  calibrate: int = 1024,
  vectors: Callable[[slice], Float[np.ndarray, 'n H']] | None = None,
) -> None:
  """Encodes texts into a folder claimed by the caller; see ``encoding.embeddings``.

  Texts are read twice, and once more for calibration; the texts of one shard are in memory.
  Existing shards are kept. All processes call this; each encodes its own shards.

  Args:
    encoder: with at most one prompt.
    texts: at least one; the same in each iteration.
    topic, numbers: for a topic prompt: how topics were chosen, and the topic of each text or of
      all; None: by words.
    calibrate: the most texts for measuring the ranges of codes. An unfinished folder keeps its
      ranges.
    vectors: gives the vectors of texts that are already encoded.
  """
  survey = _survey(texts, source, shard_rows)
  count_all = survey.rows.total
  meta = describe(encoder, side, dtype, survey.input_sha256, topic)
  process, processes = jax.process_index(), jax.process_count()
  with distributed.turn():
    writer = embeddings.EmbeddingsWriter(out, meta, survey.rows, shard_rows, process, source)
    if writer.needs_ranges:
      try:
        _calibrate(writer, encoder, side, texts, count_all, numbers, calibrate)
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
  own = pending[process::processes]
  count = sum(shard.stop - shard.start for shard in own)
  progress = Progress('texts', count, 'encoding')
  cut = 0
  try:
    for shard, part in _parts(texts, own, survey, source):
      if vectors is None:
        given, before = [text.text for text in part], encoder.truncated[side]
        made = encoder.encode(
          given, side, progress, topic=_topics(numbers, range(shard.start, shard.stop))
        )
        cut = encoder.truncated[side] - before
      else:
        made = vectors(slice(shard.start, shard.stop))
      writer.write(shard, made, [text.id for text in part], cut)
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
  ids, whole, part = embeddings.IdReader(source), hashlib.sha256(), hashlib.blake2b(digest_size=16)
  shards: list[bytes] = []
  progress = Progress('texts', task=f'reading {source}')
  for number, text in enumerate(texts):
    if number and not number % shard_rows:
      shards.append(part.digest())
      part = hashlib.blake2b(digest_size=16)
    ids.add(text.id)
    packed = pack(text)
    whole.update(packed)
    part.update(packed)
    progress.advance()
  rows = ids.finish()
  if isinstance(texts, Sequence):  # `Texts` checks ids itself
    embeddings.check_unique([text.id for text in texts], source)
  return _Survey(rows, whole.hexdigest(), [*shards, part.digest()])


def _parts(
  texts: Iterable[Text], shards: Iterable[manifest.Shard], survey: _Survey, source: str
) -> Iterator[tuple[manifest.Shard, list[Text]]]:
  """The texts of these ascending shards."""
  stream, place = iter(texts), 0
  for shard in shards:
    wanted = itertools.islice(stream, shard.start - place, shard.stop - place)
    part, place = list(wanted), shard.stop
    found = hashlib.blake2b(b''.join(map(pack, part)), digest_size=16).digest()
    if found != survey.shards[shard.number]:
      raise InputError(
        f'{source} was changed while it was encoded; encode it again, into another folder'
      )
    yield shard, part


def _topics(
  numbers: Sequence[int] | int | None, places: Iterable[int]
) -> Sequence[int] | int | None:
  """The topics of the texts at these places."""
  return numbers if numbers is None or isinstance(numbers, int) else [numbers[i] for i in places]


def _calibrate(
  writer: embeddings.EmbeddingsWriter,
  encoder: Encoder,
  side: str,
  texts: Iterable[Text],
  rows: int,
  topics: Sequence[int] | int | None,
  count: int,
) -> None:
  """Measures ranges of codes on texts sampled from the whole corpus."""
  places = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
  chosen = set(places.tolist())
  sample = [text.text for place, text in enumerate(texts) if place in chosen]
  before = encoder.truncated[side]
  writer.calibrate(encoder.encode(sample, side, topic=_topics(topics, places)))
  encoder.truncated[side] = before  # they are encoded again later


def describe(
  encoder: Encoder, side: str, dtype: str, input_sha256: str, topic: str = 'infer'
) -> manifest.Meta:
  """The description of vectors in a manifest, for at most one prompt."""
  entry = encoder.entry()
  prompt = entry.prompt
  sha256 = None if prompt is None else files.sha256_file(prompt.path)
  query_only = prompt is not None and prompt.query_only
  return manifest.Meta(
    dimension=encoder.dimension,
    dtype=dtype,
    side=side,
    backbone_sha256=encoder.space_sha256,
    config_sha256=encoder.config_sha256,
    tokenizer_sha256=encoder.tokenizer.sha256,
    prompt_sha256=None if query_only else sha256,
    query_prompt_sha256=sha256 if query_only and side == 'query' else None,
    # Implied by the SHA-256 of a query-only prompt; passages do not share it.
    shift_positions=entry.shift_positions and not query_only,
    **entry.spec.of_side(side),
    arithmetic=encoder.dtype,
    input_sha256=input_sha256,
    topic=topic if encoder.topics else '',
  )
