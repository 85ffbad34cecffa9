"""The manifest of a folder of embeddings: settings of its vectors, and checksums of its files."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.base.files import write_json
from dprjax.encoding import codes

if TYPE_CHECKING:
  from dprjax.text.vector_spec import VectorSpec

_FORMAT = 'dprjax.embeddings'
_VERSION = 2
MANIFEST, PROGRESS, PROGRESS_OF_OTHERS = 'manifest.json', 'progress.json', 'progress-*.json'
DTYPES = ('float32', 'float16', *codes.LEVELS)
# The files of a shard and their suffixes.
FILES = {'embeddings': 'npy', 'ids': 'txt'}

_Sha256 = Annotated[str, msgspec.Meta(pattern='^[0-9a-f]{64}$')]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # search numbers rows in int32


def _one_of(*words: str) -> Any:
  return msgspec.Meta(pattern=f'^({"|".join(words)})$')


@dataclasses.dataclass(frozen=True)
class Meta:
  """Everything that decides the vectors; the same for all vectors in a folder.

  Attributes:
    dtype: of the stored vectors, one of ``DTYPES``.
    config_sha256: of the encoder shape: heads, activation, epsilon and so on.
    prompt_sha256: of the prompt file; None without a prompt, or with a query-only prompt.
    query_prompt_sha256: of the query-only prompt file, for queries.
    shift_positions: whether positions start at the prompt length; False under a query-only
      prompt.
    pooling, normalize, prefix, max_length: `text.vector_spec.VectorSpec.of_side`.
    arithmetic: 'float32', 'bfloat16' or 'mixed' (``models.encoder_config.Arithmetic``).
    topic: with a topic prompt, 'infer' or the number of a topic; else empty.
  """

  dimension: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
  dtype: Annotated[str, _one_of(*DTYPES)]
  side: Annotated[str, _one_of('query', 'passage')]
  backbone_sha256: str
  config_sha256: str
  tokenizer_sha256: str
  prompt_sha256: str | None
  shift_positions: bool
  pooling: str
  normalize: bool
  prefix: str
  max_length: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
  arithmetic: Annotated[str, _one_of('float32', 'bfloat16', 'mixed')]
  input_sha256: str
  topic: str = ''
  query_prompt_sha256: str | None = None

  def space(self) -> dict[str, Any]:
    """What decides the vectors, as far as `differences` compares it."""
    return {name: getattr(self, name) for name in SPACE}


_SHARED = (  # by queries and passages
  'dimension',
  'backbone_sha256',
  'config_sha256',
  'tokenizer_sha256',
  'prompt_sha256',
  'shift_positions',
  'pooling',
  'normalize',
)
_OF_SIDE = ('prefix', 'max_length', 'topic')  # by vectors of one side
SPACE = (*_SHARED, 'side', *_OF_SIDE)


def describe(
  encoder: Any, side: str, dtype: str, input_sha256: str, topic: int | None = None
) -> Meta:
  """The description of the vectors of an `Encoder` with at most one prompt."""
  entry = encoder.entry()
  prompt = entry.prompt
  sha256 = None if prompt is None else files.sha256_file(prompt.path)
  query_only = prompt is not None and prompt.query_only
  return Meta(
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
    topic=('infer' if topic is None else str(topic)) if encoder.topics else '',
  )


def of_prompt(spec: 'VectorSpec', prompt: str | None, shift_positions: bool) -> dict[str, Any]:
  """What a prompt decides of the space of its passages; None: it does not change passages."""
  return {
    'prompt_sha256': prompt,
    'shift_positions': shift_positions and prompt is not None,
    'pooling': spec.pooling,
    'normalize': spec.normalize,
    'side': 'passage',
    'prefix': spec.passage_prefix,
  }


def differences(space: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
  """The fields in which two spaces (`Meta.space`) differ, with both values.

  Vectors of one side share all fields that both spaces have: a prompt does not know all of them.
  """
  same = space.get('side') == other.get('side')
  fields = [*_SHARED, *(field for field in _OF_SIDE if same and field in space and field in other)]
  return {
    field: f'{field} {shown(space.get(field))} and {shown(other.get(field))}'
    for field in fields
    if space.get(field) != other.get(field)
  }


def check_same_space(
  name: str,
  space: Mapping[str, Any],
  other_name: str,
  other: Mapping[str, Any],
  remedy: str = 'encode both with the same backbone, prompt and settings',
) -> None:
  """Raises InputError, with the fields and the remedy, if two spaces differ."""
  if fields := differences(space, other):
    if [*fields] == ['dimension']:
      shorter = min(space['dimension'], other['dimension'])
      remedy = f'encode both with the same --dimensions, or search with --dimensions={shorter}'
    raise InputError(
      f'{name} and {other_name} do not belong together: {"; ".join(fields.values())}; {remedy}'
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


class Checksums(NamedTuple):
  """Checksums of the files of a shard, and how many of its texts were cut."""

  embeddings_sha256: str
  ids_sha256: str
  cut: int = 0

  @property
  def of_files(self) -> tuple[str, str]:
    return self.embeddings_sha256, self.ids_sha256


class _Counts(msgspec.Struct):
  format: Literal['dprjax.embeddings']
  version: Literal[2]
  rows: _Rows
  shard_rows: _Rows
  ids_sha256: _Sha256
  shards: list['_Shard']


class _Shard(msgspec.Struct):
  index: int
  embeddings_sha256: _Sha256
  ids_sha256: _Sha256
  cut: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Ranges(msgspec.Struct):
  low: list[float]
  high: list[float]


class _Coded(msgspec.Struct):
  ranges: _Ranges


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A manifest, or the progress of an unfinished folder.

  Attributes:
    ids_sha256: of all ids, a line each.
    ranges: of codes; None for plain vectors, or if not measured yet.
  """

  meta: Meta
  rows: int
  shard_rows: int
  ids_sha256: str
  checksums: dict[int, Checksums]
  ranges: codes.Ranges | None = None

  def shards(self) -> list[Shard]:
    return cut_shards(self.rows, self.shard_rows)

  def header(self) -> dict[str, Any]:
    """Everything except shards and measured values."""
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
    content = self.header()
    if self.ranges:
      content['ranges'] = {name: x.tolist() for name, x in self.ranges._asdict().items()}
    content['shards'] = [
      {
        'index': number,
        'rows': shards[number].stop - shards[number].start,
        **shard_names(number, len(shards)),
        **{name: one for name, one in self.checksums[number]._asdict().items() if one},
      }
      for number in sorted(self.checksums)
    ]
    write_json(path, content)

  @classmethod
  def read(cls, path: epath.Path) -> 'Manifest':
    """Raises InputError for anything not written by `write`."""
    values = _open(path)
    what = f'embeddings manifest {path}'
    counts = reading.convert(values, what, _Counts)
    checksums: dict[int, Checksums] = {}
    for shard in counts.shards:
      checksums[shard.index] = Checksums(shard.embeddings_sha256, shard.ids_sha256, shard.cut)
    meta = reading.convert(values, what, Meta)
    ranges = None
    # An interrupted command may have no ranges yet.
    if meta.dtype in codes.LEVELS and ('ranges' in values or checksums):
      found_ranges = reading.convert(values, what, _Coded).ranges
      low, high = (np.array(ends, np.float32) for ends in (found_ranges.low, found_ranges.high))
      ranges = codes.Ranges(low, high)
    return cls(meta, counts.rows, counts.shard_rows, counts.ids_sha256, checksums, ranges)


def _open(path: epath.Path) -> dict[str, Any]:
  files.regular_file(path, 'embeddings manifest')
  return reading.read_json_object(path, 'embeddings manifest')


def is_embeddings(folder: epath.Path) -> bool:
  """Whether a folder has embeddings, finished or not, of any version."""
  paths = (folder / name for name in (MANIFEST, PROGRESS))
  return any(path.exists() and _open(path).get('format') == _FORMAT for path in paths)
