"""The prompt file: an adapter and its metadata, in one npz.

``meta`` is JSON in a 0-d unicode array. ``queries/train`` and ``queries/dev`` hold hashes (uint64)
of the queries used in training and selection (``text.seen``). The other members are float
arrays. ``numpy.load(path, allow_pickle=False)`` reads all of it, so a prompt file cannot run code.

The kind of adapter (`models.adapter`) decides the arrays and additional keys of meta:

- prefix: ``prefix`` [L, 2, P, N, D] (index 0 of axis 1: keys, 1: values), or ``query/prefix`` and
  ``passage/prefix`` if untied, or only ``query/prefix`` if ``sides`` in meta is 'query'
- lora: ``attention/query/a`` [L, I, R] and ``attention/query/b`` [L, R, O], and so on
- linear: ``change`` [D, D]
- topic: ``prefix`` [K, L, 2, P, N, D] and the arrays of the topic model
- template: ``slots/query/P1`` [P, H] and so on; none if the template has only words
"""

import dataclasses
import json
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from etils import epath

from dprjax.base import provenance, repository
from dprjax.base.arrays import read_arrays, write_arrays
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import convert, parse
from dprjax.models import adapter as adapters
from dprjax.models import hub
from dprjax.models import pooling as poolings
from dprjax.models.adapter import Adapter, Kind
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.hub import Backbone
from dprjax.text import seen
from dprjax.text.vector_spec import SIDES

FORMAT = 'dprjax.prompt'
VERSION = 1

_Score = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _Gain(msgspec.Struct, forbid_unknown_fields=True):
  measure: str
  baseline: _Score
  best: _Score
  difference: _Score
  low: _Score | None
  high: _Score | None
  queries: _Count
  better: bool
  folds: _Count
  new: _Score | None = None
  new_queries: _Count | None = None


class _Meta(msgspec.Struct):
  """The keys of meta. Others, such as task and metrics, are free."""

  format: str
  version: int
  kind: str
  backbone: str
  backbone_sha256: str | dict[str, str]  # by side, if there are two encoders
  tokenizer_sha256: str
  pooling: str
  normalize: bool
  temperature: Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
  query_max_length: _Length
  passage_max_length: _Length
  dprjax_version: str
  query_prefix: str = ''
  passage_prefix: str = ''
  sides: Literal['both', 'query'] = 'both'
  gain: _Gain | msgspec.UnsetType = msgspec.UNSET


_QUERIES = 'queries/'
_MOST_COMPRESSED = 20  # limit of compression against zip bombs, as floats hardly compress


@dataclasses.dataclass(frozen=True)
class Prompt:
  """The content of a prompt file.

  Attributes:
    meta: the JSON object with the keys of ``_Meta``.
    queries: hashes of the queries used in training and selection.
  """

  meta: dict[str, Any]
  arrays: dict[str, np.ndarray]
  path: str = 'prompt'
  queries: seen.Seen = dataclasses.field(default_factory=dict)

  @property
  def kind(self) -> Kind:
    return adapters.find(self.meta['kind'], f'{self.path}: kind in meta')

  @property
  def tied(self) -> bool:
    return not self.kind.sided or not any(name.split('/')[0] in SIDES for name in self.arrays)

  @property
  def query_only(self) -> bool:
    return self.meta.get('sides') == 'query'

  def of_side(self, side: str) -> dict[str, np.ndarray]:
    """The arrays for a side, 'query' or 'passage'; empty for the bare backbone."""
    if self.tied:
      return self.arrays
    return {
      name.removeprefix(f'{side}/'): array
      for name, array in self.arrays.items()
      if name.startswith(f'{side}/')
    }

  def adapters(self, side: str) -> list[Adapter | None]:
    """The adapters for a side: one, or one for each topic. None is the bare backbone."""
    arrays, load = self.of_side(side), self.kind.load
    if load is None:
      raise InputError(f'{self.path}: {self.kind.text}; expected an adapter beside the tokens')
    return [*load(self.meta, arrays)] if arrays else [None]


def save_prompt(path: PathLike, prompt: Prompt) -> None:
  """Writes the npz atomically. Equal prompts give equal bytes."""
  arrays = {name: np.asarray(array) for name, array in prompt.arrays.items()}
  check_content(dataclasses.replace(prompt, path=str(path), arrays=arrays))
  meta = np.array(json.dumps(prompt.meta, ensure_ascii=False))
  hashes = {f'{_QUERIES}{role}': values for role, values in prompt.queries.items()}
  write_arrays(path, {'meta': meta, **arrays, **hashes})


def check_gain(where: str, gain: Any) -> None:
  """Checks the types of ``gain`` in meta: the dev score before and after training."""
  convert(gain, f'{where}: gain', _Gain)


def load_prompt(path: PathLike) -> Prompt:
  """Reads a prompt file."""
  path = locate(path)
  arrays = read_arrays(path, 'prompt', _MOST_COMPRESSED, 'export or fetch it again')
  text = arrays.pop('meta', None)
  if text is None or text.ndim or text.dtype.kind != 'U':
    raise InputError(f'{path}: not a dprjax prompt: it has no JSON string meta')
  meta = parse(text.item(), f'{path}, meta', dict[str, Any])
  hashes = {
    name.removeprefix(_QUERIES): arrays.pop(name) for name in [*arrays] if name.startswith(_QUERIES)
  }
  prompt = Prompt(meta, arrays, str(path), hashes)
  check_content(prompt)
  return prompt


def locate(path: PathLike) -> epath.Path:
  """The prompt file: ``path`` itself, or prompt.npz in a folder or a repository of the hub.

  A repository is USER/NAME or USER/NAME@REVISION. `repository.commit_of` of the file folder is
  its commit.
  """
  folder = epath.Path(path)
  if folder.is_dir() and not (folder / hub.PROMPT).exists():
    trained = provenance.read_mark(folder).get('format') == 'dprjax.training'
    if trained or any((folder / side / 'adapter_config.json').exists() for side in ('', *SIDES)):
      raise InputError(
        f'prompt: {path} holds no {hub.PROMPT}; make one by dprjax export '
        f'--{"workdir" if trained else "from"}={path} --out={hub.PROMPT}'
      )
  return repository.locate(path, hub.PROMPT, 'prompt')


def unsupported(prompt: Prompt, tool: str) -> InputError:
  """The error for a kind of adapter that another tool does not support."""
  return InputError(
    f'{prompt.path}: {tool} does not support prompts of kind {prompt.meta["kind"]!r} '
    f'({prompt.kind.text}); export with --format=npz'
  )


def load_prompt_for(path: PathLike, tokenizer_sha256: str, *backbones: Backbone) -> Prompt:
  """Reads a prompt file and checks that it fits these backbones and this tokenizer."""
  prompt = load_prompt(path)
  for backbone in backbones:
    check_prompt(prompt, backbone.config, backbone.sha256, tokenizer_sha256)
  return prompt


def check_prompt(
  prompt: Prompt, config: EncoderConfig, backbone_sha256: str, tokenizer_sha256: str
) -> None:
  problems = []
  recorded = prompt.meta['backbone_sha256']
  if backbone_sha256 not in (recorded.values() if isinstance(recorded, dict) else (recorded,)):
    problems.append(
      f'was made for backbone {prompt.meta["backbone"]} with SHA-256 {recorded}, not '
      f'{backbone_sha256}'
    )
  sizes = adapters.sizes(config)
  for name, axes in _axes(prompt).items():
    shape = prompt.arrays[name].shape
    missing = [axis for axis in axes if '/' in axis and axis not in sizes]
    if missing:
      problems.append(f'{name}: this backbone has no {missing[0].rpartition("/")[0]}')
    elif any(sizes.get(axis, size) != size for axis, size in zip(axes, shape, strict=True)):
      takes = _listed([str(sizes.get(axis, axis)) for axis in axes])
      problems.append(
        f'{name} has shape {list(shape)}; this backbone takes {_listed(axes)} = {takes}'
      )
  recorded = prompt.meta['tokenizer_sha256']
  if tokenizer_sha256 != recorded:
    problems.append(f'was made with a tokenizer with SHA-256 {recorded}, not {tokenizer_sha256}')
  if problems:
    raise InputError(
      f'{prompt.path}: {"; ".join(problems)}; give the backbone that it was trained on'
    )


def _axes(prompt: Prompt) -> dict[str, list[str]]:
  by_name = {
    name: axes.split() for name, axes in prompt.kind.arrays(prompt.path, prompt.meta).items()
  }
  if prompt.tied and not prompt.query_only:
    return by_name
  sides = ('query',) if prompt.query_only else SIDES
  return {f'{side}/{name}': axes for side in sides for name, axes in by_name.items()}


def _listed(axes: list[str]) -> str:
  return f'[{", ".join(axes)}]'


def check_content(prompt: Prompt) -> None:
  """Raises InputError, as ``load_prompt``, for invalid arrays or meta."""
  _check_meta(prompt.path, prompt.meta)
  problems, needed = [], _axes(prompt)
  for name, axes in needed.items():
    if (array := prompt.arrays.get(name)) is None:
      problems.append(f'{name} is missing')
      continue
    fixed = array.ndim == len(axes) and all(
      size == int(axis) for axis, size in zip(axes, array.shape, strict=True) if axis.isdigit()
    )
    if array.dtype != np.float32 or not fixed or 0 in array.shape:
      problems.append(
        f'{name} is {array.dtype} {list(array.shape)}; expected float32 {_listed(axes)}'
      )
  for name, array in prompt.arrays.items():
    if name not in needed and not prompt.kind.topics:
      problems.append(f'{name} is unexpected')
    if array.dtype.kind == 'f' and not np.isfinite(array).all():
      problems.append(f'{name} has values that are not finite')
  if problems:
    raise InputError(f'{prompt.path}, of kind {prompt.meta["kind"]!r}: {"; ".join(problems)}')


def _check_meta(path: str, meta: dict[str, Any]) -> None:
  if (pair := (meta.get('format'), meta.get('version'))) != (FORMAT, VERSION):
    raise InputError(
      f'{path}: format and version in meta are {pair!r:.80}; this dprjax reads {(FORMAT, VERSION)}'
    )
  fields = convert(meta, f'{path}: meta', _Meta)
  where = f"{path}: meta's"
  kind = adapters.find(fields.kind, f'{where} kind')
  if kind.load is not None:  # templates have their own poolings
    poolings.find(fields.pooling, f'{where} pooling')
