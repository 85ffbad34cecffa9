"""Encodes texts into a folder of embeddings, in one process or several."""

import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float

from dprjax.base import files
from dprjax.base.counts import counted
from dprjax.base.progress import Progress, pace
from dprjax.formats import seen
from dprjax.formats.texts import Text, digest
from dprjax.inference.text_encoder import Encoder
from dprjax.retrieval import embeddings, manifest
from dprjax.runtime import distributed

logger = logging.getLogger('dprjax')


def fill_folder(
  encoder: Encoder,
  side: str,
  texts: Sequence[Text],
  out: files.PathLike,
  *,
  source: str,
  dtype: str = 'float32',
  shard_rows: int = 20_000,
  topic: str = 'infer',
  numbers: Sequence[int] | None = None,
  calibrate: int = 1024,
  vectors: Callable[[slice], Float[np.ndarray, 'n H']] | None = None,
) -> None:
  """Encodes texts into a folder that the caller has claimed; see ``retrieval.embeddings``.

  Existing shards are kept. All processes call this; each encodes its own shards.

  Args:
    encoder: a backbone with at most one prompt.
    side: 'query' or 'passage'.
    texts: at least one.
    out: the folder.
    source: of the texts, for messages.
    dtype: of the stored vectors.
    shard_rows: rows of a file.
    topic, numbers: for a topic prompt, how topics were chosen, and each text's; None: by its words.
    calibrate: the most texts to measure ranges of codes on. A folder that was begun keeps its
      ranges.
    vectors: gives the vectors of texts that are encoded already.

  Raises:
    InputError: bad ids, or ``out`` holds embeddings of other settings or texts.
  """
  ids = [text.id for text in texts]
  meta = describe(encoder, side, dtype, digest(texts), topic)
  process, processes = jax.process_index(), jax.process_count()
  with distributed.turn():
    known = seen.ids(texts, encoder.queries()) if side == 'query' else {}
    writer = embeddings.EmbeddingsWriter(out, meta, ids, shard_rows, process, source, known)
    if writer.needs_ranges:
      try:
        _calibrate(writer, encoder, side, [text.text for text in texts], numbers, calibrate)
      except BaseException:  # as below
        writer.discard()
        raise
  pending = writer.pending()
  todo = sum(shard.stop - shard.start for shard in pending)
  if todo < len(ids):
    logger.info(
      '%s: %s of %s already there', out, f'{len(ids) - todo:,}', counted(len(ids), 'texts')
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
  try:
    for shard in own:
      part = [text.text for text in texts[shard.start : shard.stop]]
      if vectors is None:
        own_topics = None if numbers is None else numbers[shard.start : shard.stop]
        made = encoder.encode(part, side, progress, topic=own_topics)
      else:
        made = vectors(slice(shard.start, shard.stop))
      writer.write(shard, made)
      progress.advance(len(part))
  except BaseException:  # an interrupt leaves no half of a shard either
    writer.discard()
    raise
  distributed.barrier('encoded')
  writer.finish()
  if cut := encoder.truncated[side]:
    logger.info(
      '%s of %s%s longer than %d tokens: cut there',
      f'{cut:,}',
      counted(count, 'texts'),
      ' of process 0' if processes > 1 else '',
      meta.max_length,
    )
  logger.info(
    '%s: %s%s',
    out,
    counted(len(ids), f'{side} vectors'),
    pace(todo, progress.seconds),
  )


def _calibrate(
  writer: embeddings.EmbeddingsWriter,
  encoder: Encoder,
  side: str,
  texts: Sequence[str],
  topics: Sequence[int] | None,
  count: int,
) -> None:
  """Measures ranges of codes on texts from the whole corpus."""
  places = np.unique(np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(np.int64))
  before = encoder.truncated[side]
  writer.calibrate(
    encoder.encode(
      [texts[place] for place in places],
      side,
      topic=None if topics is None else [topics[place] for place in places],
    )
  )
  encoder.truncated[side] = before  # they are encoded again


def describe(
  encoder: Encoder, side: str, dtype: str, input_sha256: str, topic: str = 'infer'
) -> manifest.Meta:
  """The manifest description of vectors, for at most one prompt."""
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
    # The SHA-256 of a query-only prompt implies it, and passages do not share it.
    shift_positions=entry.shift_positions and not query_only,
    **entry.spec.of_side(side),
    arithmetic=encoder.dtype,
    input_sha256=input_sha256,
    topic=topic if encoder.topics else '',
  )
