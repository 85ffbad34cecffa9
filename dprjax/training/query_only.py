"""Prompts for queries only, ``config.prompt.sides='query'``; passages come from the base encoder.

Passages are encoded once into a folder of embeddings in the workdir, or given
(``config.data.passage_embeddings``). A step encodes only queries. All query-only prompts for a
backbone search the same folder.
"""

from collections.abc import Sequence

import jax
import jaxtyping as jt
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dprjax.base import distributed
from dprjax.base import files as base_files
from dprjax.base import mesh as meshes
from dprjax.base.errors import InputError
from dprjax.encoding import embeddings, folders, manifest
from dprjax.encoding.text_encoder import Encoder
from dprjax.losses import contrastive
from dprjax.text import sources, token_cache, vector_spec
from dprjax.text.texts import Text, digest
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import dev_ranking
from dprjax.training import workdir as workdirs

_QUERIES = 'queries'  # in the workdir
_OPTION = 'config.data.passage_embeddings'
_SHARD_ROWS = 5000  # at most this many rows are lost by an interruption


class DiskVectors:
  """Vectors on disk; ``take`` finds ``ids`` by number."""

  def __init__(self, stored: embeddings.Embeddings, ids: Sequence[str]):
    self.folder = stored.folder
    # Remote files cannot be read row by row.
    remote = base_files.is_remote(stored.folder)
    self._files = [np.asarray(shard) if remote else shard for shard in stored.shards]
    self._starts = np.cumsum([0, *map(len, self._files)])
    self._width = stored.meta.dimension
    self._place_of = {id_: place for place, id_ in enumerate(stored.ids)}
    self._places = self._find(ids)

  def take(self, rows: jt.Int[np.ndarray, '*n']) -> jt.Float32[np.ndarray, '*n H']:
    return self._read(self._places[rows.ravel()]).reshape(*rows.shape, self._width)

  def of_ids(self, ids: Sequence[str]) -> jt.Float32[np.ndarray, 'n H']:
    return self._read(self._find(ids))

  def _find(self, ids: Sequence[str]) -> jt.Int64[np.ndarray, ' n']:
    places = np.array([self._place_of.get(id_, -1) for id_ in ids], np.int64)
    if (missing := np.flatnonzero(places < 0)).size:
      raise InputError(
        f'{_OPTION}: {self.folder} has no passage {ids[missing[0]]!r:.60} ({len(missing):,} of '
        f'{len(ids):,} are missing); encode the training corpus'
      )
    return places

  def _read(self, places: jt.Int64[np.ndarray, ' n']) -> jt.Float32[np.ndarray, 'n H']:
    vectors = np.empty((len(places), self._width), np.float32)
    files = np.searchsorted(self._starts, places, side='right') - 1
    for number in np.unique(files):
      where, file = np.flatnonzero(files == number), self._files[number]
      rows = places[where] - self._starts[number]
      vectors[where] = file.take(rows) if isinstance(file, embeddings.ShardRows) else file[rows]
    return vectors


def check_corpus_negatives(config: ConfigDict, devices: Mesh) -> None:
  count, parts = config.corpus_negatives, meshes.batch_devices(devices)
  if config.negatives if count < 0 else count % parts:
    raise InputError(
      f'config.corpus_negatives: {count} is neither a multiple of the {parts} devices nor -1, the '
      f'whole corpus, with config.negatives=0 instead of {config.negatives}'
    )


def open_passages(
  source: sources.Source,
  tokens: token_cache.TokenCache,
  config: ConfigDict,
  workdir: epath.Path,
  tokenizer: Tokenizer,
) -> DiskVectors:
  encoder = _encoder(config, workdir, tokenizer)
  dataset = sources.load_dataset(source)
  path = config.data.passage_embeddings
  folder = path or workdir / workdirs.PASSAGES
  if not path:
    texts, named = list(dataset.passages), str(dataset.files['corpus'])
    stored = _encode(encoder, 'passage', texts, folder, named)
  else:
    stored = _load(folder)
    stored.check_side('passage', _OPTION)
    manifest.check_same_space(
      _OPTION,
      stored.meta.space(),
      'the backbone of this config',
      manifest.describe(encoder, 'passage', stored.meta.dtype, '').space(),
      'set config.pooling, config.normalize, config.data.passage_max_length and '
      'config.data.passage_prefix as in the folder, or encode again',
    )
  passages = DiskVectors(stored, tokens.passage_ids(np.arange(tokens.num_passages)))
  # The digest of a larger folder cannot be compared.
  if (
    path
    and len(stored) == dataset.total_passages()
    and digest(dataset.passages) != stored.meta.input_sha256
  ):
    raise InputError(
      f'{_OPTION}: {folder} was made from other texts, or in another order, than '
      f'{dataset.files["corpus"]}; encode that file again'
    )
  return passages


def open_queries(
  source: sources.Source,
  tokens: token_cache.TokenCache,
  config: ConfigDict,
  workdir: epath.Path,
  tokenizer: Tokenizer,
) -> DiskVectors:
  """The frozen vectors of the queries in a cache, for regularization; kept in the workdir.

  They save a forward pass in every update. All processes call this.
  """
  dataset, encoder = sources.load_dataset(source), _encoder(config, workdir, tokenizer)
  named = str(dataset.files['queries'])
  stored = _encode(encoder, 'query', dataset.queries, workdir / _QUERIES, named)
  return DiskVectors(stored, tokens.query_ids(np.arange(tokens.num_queries)))


def _encode(
  encoder: Encoder, side: str, texts: Sequence[Text], folder: epath.Path, source: str
) -> embeddings.Embeddings:
  folders.fill_folder(encoder, side, texts, folder, source=source, shard_rows=_SHARD_ROWS)
  distributed.barrier(f'{side} vectors')  # process 0 has finished the folder
  return _load(folder)


def _load(folder: base_files.PathLike) -> embeddings.Embeddings:
  process, processes = jax.process_index(), jax.process_count()
  return embeddings.load_embeddings(folder, process=process, processes=processes)


def arrays(
  config: ConfigDict, passages: DiskVectors, rows: jt.Int32[np.ndarray, ' M']
) -> dict[str, np.ndarray]:
  """``TrainingData.arrays`` with the whole corpus, if all of it serves as negatives.

  ``rows`` are passages with distinct tokens.
  """
  if config.corpus_negatives >= 0:
    return {}
  return {contrastive.VECTORS: passages.take(rows), contrastive.ROWS: rows}


def _encoder(config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer) -> Encoder:
  path = workdirs.backbone_path(config, workdir)
  return dev_ranking.bare_encoder(config, path, tokenizer, vector_spec.of_config(config))
