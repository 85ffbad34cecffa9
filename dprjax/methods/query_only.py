"""A prompt for queries alone, ``config.prompt.sides='query'``: passages are the bare backbone's.

The passages are encoded once, into a folder of embeddings in the workdir, or they come from one
that exists (``config.data.passage_embeddings``). A step then encodes queries alone, and the same
folder is searched under any such prompt of the backbone.
"""

from collections.abc import Callable, Sequence

import jax
import jaxtyping as jt
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dprjax.base import files as base_files
from dprjax.base.errors import InputError
from dprjax.data import sources, store
from dprjax.data.text import Tokenizer
from dprjax.formats import vector_spec
from dprjax.formats.fields import read_ids
from dprjax.formats.texts import KINDS, Text
from dprjax.inference import folders
from dprjax.inference.encoder import UNNAMED, Encoder, Entry
from dprjax.methods import contrastive
from dprjax.models import hub
from dprjax.retrieval import embeddings, manifest
from dprjax.runtime import config as configs
from dprjax.runtime import distributed
from dprjax.runtime import mesh as meshes

FOLDER = 'passages'  # of the workdir
_QUERIES = 'queries'  # the folder that they are from
_KNOB = 'config.data.passage_embeddings'
_SHARD_ROWS = 5000  # an interruption loses at most so many
_COMPARED = 16  # texts that are encoded to compare vectors without a manifest
MOST_BYTES = 4 << 30  # of a corpus that is all queries' negatives
_MOST_APART = 0.05  # of their length: float16 and another library's rounding are far below it


class Vectors:
  """Vectors of passages, or of queries, on disk.

  Attributes:
    folder: that they are in.
    width: H.
  """

  def __init__(self, found: embeddings.Embeddings, ids: Sequence[str]):
    """Opens them.

    Args:
      found: a folder of embeddings.
      ids: of the texts that are asked for, in the order of the rows that name them.

    Raises:
      InputError: one of these ids is not there.
    """
    self.folder = found.folder
    # Of files that are far away a batch's rows cannot be read alone.
    remote = base_files.is_remote(found.folder)
    self._files = [np.asarray(shard) if remote else shard for shard in found.shards]
    self._starts = np.cumsum([0, *map(len, self._files)])
    self.width = found.meta.dimension
    self._place_of = {id_: place for place, id_ in enumerate(found.ids)}
    self._places = self._find(ids)

  def take(self, rows: jt.Int[np.ndarray, '*n']) -> jt.Float32[np.ndarray, '*n H']:
    """The vectors of the texts with these numbers."""
    return self._read(self._places[rows.ravel()]).reshape(*rows.shape, self.width)

  def of_ids(self, ids: Sequence[str]) -> jt.Float32[np.ndarray, 'n H']:
    """The vectors of these texts. Raises InputError where one is not there."""
    return self._read(self._find(ids))

  def _find(self, ids: Sequence[str]) -> jt.Int64[np.ndarray, ' n']:
    places = np.array([self._place_of.get(id_, -1) for id_ in ids], np.int64)
    if (missing := np.flatnonzero(places < 0)).size:
      raise InputError(
        f'{_KNOB}: {self.folder} has no passage {ids[missing[0]]!r:.60} ({len(missing):,} of '
        f'{len(ids):,} are missing); encode the corpus that is trained on'
      )
    return places

  def _read(self, places: jt.Int64[np.ndarray, ' n']) -> jt.Float32[np.ndarray, 'n H']:
    vectors = np.empty((len(places), self.width), np.float32)
    files = np.searchsorted(self._starts, places, side='right') - 1
    for number in np.unique(files):
      where, file = np.flatnonzero(files == number), self._files[number]
      rows = places[where] - self._starts[number]
      vectors[where] = file.take(rows) if isinstance(file, embeddings.Rows) else file[rows]
    return vectors


def check(config: ConfigDict, devices: Mesh) -> None:
  """Raises InputError for negatives from the corpus that cannot be drawn."""
  if config.corpus_negatives < 0 and config.negatives:
    raise InputError(
      f'config.negatives: {config.negatives}, and config.corpus_negatives is -1: the whole corpus '
      'holds them already; set config.negatives=0'
    )
  parts = meshes.batch_devices(devices)
  if config.corpus_negatives > 0 and config.corpus_negatives % parts:
    raise InputError(
      f'config.corpus_negatives: {config.corpus_negatives} passages cannot be divided over {parts} '
      f'devices; use a multiple of {parts}'
    )


def files(config: ConfigDict) -> dict[str, epath.Path]:
  """The files that decide the given vectors, by role; none where they are made.

  Raises InputError where there is no such folder or file.
  """
  given = config.data.passage_embeddings
  if not given:
    return {}
  if given.endswith('.npy'):
    found = {'passage embeddings': given, 'ids of the passage embeddings': _ids_of(given)}
    return {role: base_files.regular_file(path, role) for role, path in found.items()}
  folder = embeddings.load_embeddings(given, verify=False).folder
  return {'passage embeddings': folder / manifest.MANIFEST}


def open_passages(
  source: sources.Source,
  tokens: store.Store,
  config: ConfigDict,
  workdir: epath.Path,
  tokenizer: Tokenizer,
) -> Vectors:
  """The vectors of a store's passages. All processes call this.

  Args:
    source: what the store was made of.
    tokens: the store.
    config: the experiment.
    workdir: of the run.
    tokenizer: the backbone's.

  Raises:
    InputError: the given folder cannot be read, is of another backbone, pooling or normalisation,
      or lacks passages; or that of the workdir holds other embeddings.
  """
  encoder = _encoder(config, workdir, tokenizer)
  process, processes = jax.process_index(), jax.process_count()
  dataset = sources.load_dataset(source)
  given = config.data.passage_embeddings
  made = not given or given.endswith('.npy')
  folder = workdir / FOLDER if made else given
  if made:
    texts = list(dataset.passages)
    folders.fill_folder(
      encoder,
      'passage',
      texts,
      folder,
      source=str(dataset.files['corpus']),
      shard_rows=_SHARD_ROWS,
      vectors=_vectors_of(given, texts, encoder) if given else None,
    )
    distributed.barrier('passages')  # process 0 has finished the folder
  found = embeddings.load_embeddings(folder, process=process, processes=processes)
  if not made:
    found.check_kind('passage', _KNOB)
    manifest.check_same_space(
      _KNOB,
      found.meta.space(),
      'the backbone of this config',
      folders.describe(encoder, 'passage', found.meta.dtype, '').space(),
    )
  passages = Vectors(found, tokens.passage_ids(np.arange(tokens.num_passages)))
  # Of a larger folder it cannot be known whether the texts agree as the ids do.
  if (
    not made
    and len(found) == dataset.total_passages()
    and folders.digest(dataset.passages) != found.meta.input_sha256
  ):
    raise InputError(
      f'{_KNOB}: {folder} was made of other texts, or in another order, than '
      f'{dataset.files["corpus"]} has under these ids; encode that file again'
    )
  return passages


def open_queries(
  source: sources.Source,
  tokens: store.Store,
  config: ConfigDict,
  workdir: epath.Path,
  tokenizer: Tokenizer,
) -> Vectors:
  """The frozen encoder's vectors of a store's queries, for the regularization; made in the workdir.

  Nothing changes them in a training: made once, they spare every update a forward pass. All
  processes call this; the arguments are `open_passages`'.
  """
  dataset, folder = sources.load_dataset(source), workdir / _QUERIES
  encoder = _encoder(config, workdir, tokenizer)
  texts = dataset.queries
  named = str(dataset.files['queries'])
  folders.fill_folder(encoder, 'query', texts, folder, source=named, shard_rows=_SHARD_ROWS)
  distributed.barrier('queries')  # process 0 has finished the folder
  process, processes = jax.process_index(), jax.process_count()
  found = embeddings.load_embeddings(folder, process=process, processes=processes)
  return Vectors(found, tokens.query_ids(np.arange(tokens.num_queries)))


def arrays(
  config: ConfigDict, passages: Vectors | None, rows: jt.Int32[np.ndarray, ' M']
) -> dict[str, np.ndarray]:
  """The whole corpus as ``Data.arrays``, where it is all queries' negatives.

  Args:
    config: the experiment.
    passages: the vectors of all.
    rows: of the passages with different tokens.

  Raises:
    InputError: it is too large to lie on every device.
  """
  if passages is None or config.corpus_negatives >= 0:
    return {}
  total = len(rows)
  if (size := total * passages.width * 4) > MOST_BYTES:
    raise InputError(
      f'config.corpus_negatives: -1 keeps all {total:,} passages on every device, '
      f'{size / 2**30:.1f} GiB, and {MOST_BYTES / 2**30:g} are the most; set how many are drawn '
      'for each update, --config.corpus_negatives=65536 say'
    )
  return {contrastive.VECTORS: passages.take(rows), contrastive.ROWS: rows}


def _ids_of(path: str) -> str:
  """The file beside a .npy that has the id of each row on a line."""
  return path.removesuffix('.npy') + '.txt'


def _vectors_of(
  path: str, texts: Sequence[Text], encoder: Encoder
) -> Callable[[slice], jt.Float[np.ndarray, 'n H']]:
  """The vectors of a .npy for these texts, which may be some of its rows, in any order.

  Raises:
    InputError: the files cannot be read, a text's id is not there, or some texts' vectors are not
      those that the backbone gives them.
  """
  ids = read_ids(_ids_of(path), 'ids of the passage embeddings')
  rows = embeddings.open_array(path, len(ids))
  if rows.shape[1] != (width := encoder.backbones['passage'].config.vector_size):
    raise InputError(f'{_KNOB}: {path} has vectors of {rows.shape[1]}, and the backbone of {width}')
  place_of = {id_: place for place, id_ in enumerate(ids)}
  if missing := [text.id for text in texts if text.id not in place_of]:
    raise InputError(
      f'{_KNOB}: {_ids_of(path)} has no passage {missing[0]!r:.60} ({len(missing):,} of '
      f'{len(texts):,} are missing)'
    )
  values = np.asarray(rows)
  places = np.array([place_of[text.id] for text in texts])
  chosen = np.unique(np.linspace(0, len(texts) - 1, _COMPARED).astype(int))
  own = encoder.encode([texts[i].text for i in chosen], 'passage')
  there = values[places[chosen]].astype(np.float32)
  # An empty text's vector may be zero.
  apart = np.linalg.norm(there - own, axis=1) / np.maximum(np.linalg.norm(own, axis=1), 1e-6)
  if not (worst := float(apart.max())) <= _MOST_APART:
    id_ = texts[chosen[np.argmax(apart)]].id
    raise InputError(
      f'{_KNOB}: {path} holds other vectors than the backbone gives: that of {id_!r:.60} differs '
      f'by {worst:.0%} of its length; compare config.pooling, config.normalize, '
      'config.data.passage_max_length, config.data.passage_prefix and the model'
    )
  return lambda some: values[places[some]]


def _encoder(config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer) -> Encoder:
  """The bare backbone, as ``dprjax.encode`` would load it with this config's settings."""
  backbone = hub.load_backbone(configs.backbone_path(config, workdir))
  return Encoder(
    dict.fromkeys(KINDS, backbone),
    tokenizer,
    {UNNAMED: Entry(None, vector_spec.of_config(config))},
    batch_size=config.eval.batch_size,
    dtype=config.backbone.dtype,
  )
