"""What a folder of embeddings says of itself: what made its vectors, and its files' checksums.

``embeddings.py`` writes and reads the folder.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.base.files import write_json
from dprjax.formats import seen
from dprjax.formats.fields import Record
from dprjax.retrieval import codes

_FORMAT = 'dprjax.embeddings'
_VERSION = 2
MANIFEST, PROGRESS, PROGRESS_OF_OTHERS = 'manifest.json', 'progress.json', 'progress-*.json'
DTYPES = ('float32', 'float16', *codes.LEVELS)
_ARITHMETIC = ('float32', 'bfloat16', 'mixed')
# A shard's files, as its entry in the manifest names them, and their suffixes.
FILES = {'embeddings': 'npy', 'ids': 'txt'}
_MOST_ROWS, _MOST_DIMENSIONS = 2**31 - 1, 2**20  # search numbers rows in int32
_SHA256 = re.compile('[0-9a-f]{64}')


@dataclasses.dataclass(frozen=True)
class Meta:
  """What made the vectors: all that decides them. A folder holds vectors of one `Meta`.

  Attributes:
    dimension: numbers of a vector: H, or fewer where it was cut.
    dtype: of the stored vectors, one of ``DTYPES``.
    kind: 'query' or 'passage'.
    backbone_sha256: of the encoder's tensors.
    config_sha256: of the encoder's shape: heads, activation, epsilon and so on.
    tokenizer_sha256: of the tokenizer.
    prompt_sha256: of the prompt's file; None without a prompt, and under one for queries alone.
    query_prompt_sha256: of the file of a prompt for queries alone, where these are queries.
    shift_positions: whether tokens count their positions from the prompt's length; False under a
      prompt for queries alone.
    pooling: 'cls', 'mean', ...
    normalize: whether the vectors were scaled to length 1.
    prefix: what was put before every text of this kind.
    max_length: tokens at which a text was cut.
    arithmetic: 'float32', 'bfloat16' or 'mixed' (``models.encoder.Arithmetic``).
    input_sha256: of the ids and texts, which shows whether a text changed under its old id.
    topic: under a prompt of kind topic, which topic's prompt: 'infer', each text's own, or a
      topic's number. Else empty.
  """

  dimension: int
  dtype: str
  kind: str
  backbone_sha256: str
  config_sha256: str
  tokenizer_sha256: str
  prompt_sha256: str | None
  shift_positions: bool
  pooling: str
  normalize: bool
  prefix: str
  max_length: int
  arithmetic: str
  input_sha256: str
  topic: str = ''
  query_prompt_sha256: str | None = None

  @classmethod
  def read(cls, record: Record) -> 'Meta':
    """From a manifest. Raises InputError for a key that is missing or of another type."""
    return cls(
      dimension=record.whole('dimension', 1, _MOST_DIMENSIONS),
      dtype=record.choice('dtype', *DTYPES),
      kind=record.choice('kind', 'query', 'passage'),
      backbone_sha256=record.text('backbone_sha256'),
      config_sha256=record.text('config_sha256'),
      tokenizer_sha256=record.text('tokenizer_sha256'),
      prompt_sha256=record.optional_text('prompt_sha256'),
      shift_positions=record.boolean('shift_positions'),
      pooling=record.text('pooling'),
      normalize=record.boolean('normalize'),
      prefix=record.text('prefix'),
      max_length=record.whole('max_length', 1, 2**31),
      arithmetic=record.choice('arithmetic', *_ARITHMETIC),
      input_sha256=record.text('input_sha256'),
      topic=record.text('topic', ''),
      # Younger than the format's version.
      query_prompt_sha256=record.optional_text('query_prompt_sha256')
      if 'query_prompt_sha256' in record.values
      else None,
    )

  def space(self) -> dict[str, Any]:
    """The fields that queries and passages must share for their inner product to mean anything."""
    return {name: getattr(self, name) for name in SPACE}


SPACE = (
  'dimension',
  'backbone_sha256',
  'config_sha256',
  'tokenizer_sha256',
  'prompt_sha256',
  'shift_positions',
  'pooling',
  'normalize',
)


def check_same_space(
  name: str, space: Mapping[str, Any], other_name: str, other: Mapping[str, Any]
) -> None:
  """Raises InputError where two spaces (`Meta.space`) differ, and says in what."""

  differences = {
    field: f'{field} {shown(space.get(field))} and {shown(value)}'
    for field, value in other.items()
    if space.get(field) != value
  }
  if differences:
    remedy = 'encode both with the same backbone, prompt and settings'
    if [*differences] == ['dimension']:
      shorter = min(space['dimension'], other['dimension'])
      remedy = f'encode both with the same --dimensions, or search with --dimensions={shorter}'
    raise InputError(
      f'{name} and {other_name} do not belong together: {"; ".join(differences.values())}; {remedy}'
    )


def shown(value: Any) -> str:
  if not isinstance(value, str) or value.isalnum():
    text = str(value)
    return text if len(text) <= 20 else f'{text[:12]}...'
  return repr(value if len(value) <= 20 else f'{value[:12]}...')  # a prefix text


class Shard(NamedTuple):
  """The rows of one file: ``ids[start:stop]``."""

  number: int
  start: int
  stop: int


def cut_shards(rows: int, shard_rows: int) -> list[Shard]:
  starts = range(0, rows, shard_rows)
  return [
    Shard(number, start, min(start + shard_rows, rows)) for number, start in enumerate(starts)
  ]


def shard_names(number: int, count: int) -> dict[str, str]:
  """The files of shard ``number`` of ``count``."""
  return {what: f'{what}-{number:05d}-of-{count:05d}.{suffix}' for what, suffix in FILES.items()}


class Entry(NamedTuple):
  """A shard in the manifest: its files' checksums."""

  embeddings_sha256: str
  ids_sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A manifest, or the progress of a folder that is not finished.

  Attributes:
    ids_sha256: of all ids, a line each.
    entries: by the shard's number.
    ranges: of codes; None where vectors are stored as they are, or there are none yet.
    seen: ids of queries that the model was trained on, or chosen by (`formats.seen.ids`).
  """

  meta: Meta
  rows: int
  shard_rows: int
  ids_sha256: str
  entries: dict[int, Entry]
  ranges: codes.Ranges | None = None
  seen: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  def shards(self) -> list[Shard]:
    return cut_shards(self.rows, self.shard_rows)

  def header(self) -> dict[str, Any]:
    """All but the shards and what was measured."""
    return {
      'format': _FORMAT,
      'version': _VERSION,
      'rows': self.rows,
      'shard_rows': self.shard_rows,
      'ids_sha256': self.ids_sha256,
      **dataclasses.asdict(self.meta),
    }

  def write(self, path: epath.Path) -> None:
    shards = self.shards()
    ranges = self.ranges and {name: x.tolist() for name, x in self.ranges._asdict().items()}
    write_json(
      path,
      self.header()
      | ({'ranges': ranges} if ranges else {})
      | ({'seen': dict(self.seen)} if self.seen else {})
      | {
        'shards': [
          {
            'index': number,
            'rows': shards[number].stop - shards[number].start,
            **shard_names(number, len(shards)),
            **self.entries[number]._asdict(),
          }
          for number in sorted(self.entries)
        ]
      },
    )

  @classmethod
  def read(cls, path: epath.Path) -> 'Manifest':
    """Raises InputError for anything that `write` does not write."""
    what = 'embeddings manifest'
    files.regular_file(path, what)
    record = Record(reading.read_json_object(path, what), f'{what} {path}')
    if record.values.get('format') != _FORMAT:
      raise InputError(f'{path} is not a {_FORMAT} manifest')
    version = record.values.get('version')
    if version != _VERSION or not isinstance(version, int):
      raise InputError(
        f'{path} is of version {version!r:.20}, expected {_VERSION}: another dprjax made these '
        'embeddings; encode again, into another folder'
      )
    try:
      rows, shard_rows = (record.whole(key, 1, _MOST_ROWS) for key in ('rows', 'shard_rows'))
      count = -(-rows // shard_rows)
      entries: dict[int, Entry] = {}
      number = -1
      for shard in record.records('shards', 'a list of objects'):
        number = shard.whole('index', number + 1, count - 1)
        size = min(shard_rows, rows - number * shard_rows)
        shard.whole('rows', size, size)
        for key, name in shard_names(number, count).items():
          shard.choice(key, name)
        entries[number] = Entry(*(_sha256(shard, f'{what}_sha256') for what in FILES))
      meta = Meta.read(record)
      ranges = _ranges(record, meta)
      known = seen.of_json(record)
      return cls(meta, rows, shard_rows, _sha256(record, 'ids_sha256'), entries, ranges, known)
    except InputError as error:
      raise InputError(f'{error}; encode again, into another folder') from error


def _ranges(record: Record, meta: Meta) -> codes.Ranges | None:
  """The ranges of codes. Raises InputError where they are no ranges, or shards have none."""
  if meta.dtype not in codes.LEVELS:
    return None
  if 'ranges' not in record.values and not record.values.get('shards'):
    return None  # the command was interrupted before it had measured them
  inside = record.record('ranges')
  with np.errstate(over='ignore'):
    ranges = codes.Ranges(
      *(np.array(inside.numbers(key, meta.dimension), np.float32) for key in codes.Ranges._fields)
    )
  if not (np.isfinite(ranges).all() and (ranges.low <= ranges.high).all()):
    raise InputError(f'{inside.where}: a low value is above its high one, or beyond float32')
  return ranges


def _sha256(record: Record, key: str) -> str:
  value = record.text(key)
  if not _SHA256.fullmatch(value):
    raise InputError(f'{record.where}: {key!r} is {value!r:.40}; expected a SHA-256')
  return value


def is_embeddings(folder: epath.Path) -> bool:
  """Whether a folder is one of embeddings, finished or not, of any version.

  Raises:
    InputError: its manifest cannot be read.
  """
  for name in (MANIFEST, PROGRESS):
    if (folder / name).exists():
      files.regular_file(folder / name, 'embeddings manifest')
      manifest = reading.read_json_object(folder / name, 'embeddings manifest')
      return manifest.get('format') == _FORMAT
  return False
