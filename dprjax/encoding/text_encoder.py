"""Encodes texts with a backbone and a bank of prompts."""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float, Int32

from dprjax.base import given
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.encoding import codes, manifest
from dprjax.encoding.embedder import (
  Embedder,
  EmbedFn,
  ProgressFn,
  check_size,
  count_from,
  local_mesh,
  local_parts,
  place,
  place_backbone,
)
from dprjax.models import encoder_config, hub
from dprjax.models import pooling as poolings
from dprjax.models.adapter import Adapter, stack
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.text import tokenizing, vector_spec
from dprjax.text.vector_spec import SIDES, VectorSpec

if TYPE_CHECKING:
  from dprjax.models import artifact
  from dprjax.text import seen

logger = logging.getLogger('dprjax')

# The default name, also for the bare backbone.
UNNAMED = ''


class BankEntry(NamedTuple):
  """A prompt in a bank (None: the bare backbone), and its settings for vectors."""

  prompt: 'artifact.Prompt | None'
  spec: VectorSpec

  @property
  def shift_positions(self) -> bool:
    """Whether positions of tokens start at the prompt length."""
    return self.prompt is not None and bool(self.prompt.meta.get('shift_positions'))


class _Group(NamedTuple):
  """Prompts whose texts can share a batch."""

  numbers: dict[str, int]  # places of prompts in the bank; for topics, the first place
  size: int  # of the bank
  embedder: Embedder
  params: Any  # for the embedder


class Encoder:
  """A backbone (or one each for queries and passages) and any number of prompts by name.

      encoder = Encoder.load('backbone', {'qa': 'qa.npz', 'chat': 'chat.npz'})
      encoder.encode(['a question', 'hello'], 'query', prompt=['qa', 'chat'])    # float32 [2, H]

  Attributes:
    backbones: by side; may be the same object. Parameters from `load` stay in their files.
    bank: prompts by name, with their settings for vectors.
    topics: topic models by prompt name.
    truncated: the number of texts cut at the maximum length, by side.
  """

  def __init__(
    self,
    backbones: Mapping[str, hub.Backbone],
    tokenizer: tokenizing.Tokenizer,
    bank: Mapping[str, BankEntry],
    *,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
  ):
    """See ``load``. All prompts give vectors of the same dimension."""
    self.backbones, self.tokenizer, self.bank = backbones, tokenizer, dict(bank)
    whole = min(backbone.config.vector_size for backbone in backbones.values())
    (dimension,) = {entry.spec.dimension for entry in self.bank.values()}
    self.dimension = whole if dimension is None else dimension
    check_size('dimensions', self.dimension, whole, backbones['query'].path)
    self.truncated: collections.Counter[str] = collections.Counter()
    self._batch_size, self._arithmetic = batch_size, encoder_config.arithmetic(dtype)
    if mesh is None:
      weights = {id(backbone): backbone.params for backbone in backbones.values()}
      mesh = local_mesh(local_parts(self._arithmetic, *weights.values()))
    self.mesh = mesh
    self._options = EncoderOptions.of(self._arithmetic, mesh)
    self.topics: dict[str, Any] = {}
    for name, (prompt, _) in self.bank.items():
      if prompt is not None and prompt.kind.topics is not None:
        self.topics[name] = prompt.kind.topics(prompt)
    placed: dict[int, Any] = {}
    self._groups: dict[str, list[_Group]] = {}
    for side in SIDES:
      backbone = backbones[side]
      for name, entry in self.bank.items():
        check_length(name, entry, side, backbone)
        if not _is_template(entry):
          check_prefix(_whose(name) or f'{backbone.path}: ', entry.spec, side, tokenizer)
      if id(backbone) not in placed:
        placed[id(backbone)] = place_backbone(
          mesh, backbone.config, backbone.params, self._arithmetic
        )
      # A compiled batch has one form. The bare backbone fits any adapter.
      names: dict[Any, list[str]] = {}
      for name, entry in self.bank.items():
        names.setdefault(_form(entry), []).append(name)
      others = [form for form in names if isinstance(form, str)]
      if None in names and others:
        names[others[0]] += names.pop(None)
      self._groups[side] = [
        self._group(side, group, placed[id(backbone)]) for group in names.values()
      ]

  @classmethod
  def load(
    cls,
    backbone: PathLike,
    prompt: PathLike | Mapping[str, PathLike | None] | None = None,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    query_max_length: int | None = None,
    passage_max_length: int | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
    dimensions: int | None = None,
  ) -> Self:
    """Loads a backbone and its prompts.

    Args:
      backbone: a Hugging Face directory, a hub id, ``package:NAME``, or a folder with two encoders
        in ``query/`` and ``passage/``.
      prompt: a ``prompt.npz``, or a folder or ``USER/NAME@COMMIT`` on the hub with one; a mapping
        of names for several; None: the bare backbone.
      pooling: a name of `models.pooling`. This and the next three override the settings of every
        prompt and the backbone. With a template, 'mean' covers only the tokens of the text.
      normalize: whether vectors have unit length.
      query_max_length: tokens, including special ones but not those of a template.
      passage_max_length: the same for passages.
      mesh: the devices. A mesh with fsdp or model splits the backbone among them
        (`mesh.make_mesh`). Default: all local devices, each with the whole backbone if this takes
        at most half of their memory.
      batch_size: the most texts at a time, over all devices.
      dtype: a name for ``models.encoder_config.arithmetic``.
      dimensions: keep this many leading numbers of each vector, normalized again if vectors are.
    """
    if pooling is not None:
      poolings.find(pooling)
    folder = epath.Path(hub.package_path(str(backbone)))
    if all((folder / side / 'config.json').exists() for side in SIDES):
      backbones = {side: hub.load_backbone(str(folder / side), on_disk=True) for side in SIDES}
    else:
      source = folder if folder.is_dir() else backbone
      backbones = dict.fromkeys(SIDES, hub.load_backbone(source, on_disk=True))
    tokenizer = tokenizing.load_tokenizer(backbones['query'].path)
    if backbones['passage'].path != backbones['query'].path:
      passage_tokenizer = tokenizing.load_tokenizer(backbones['passage'].path)
      _check_same(folder, 'the tokenizer', tokenizer.sha256, passage_tokenizer.sha256)
    for one in backbones.values():
      hub.check_vocabulary(one, tokenizer.vocab_size, one.path)
    bank = {}
    for name, path in (prompt if isinstance(prompt, Mapping) else {UNNAMED: prompt}).items():
      loaded = None
      if path is not None:
        from dprjax.models import artifact  # not for the bare backbone

        loaded = artifact.load_prompt_for(path, tokenizer.sha256, *backbones.values())
      both = {
        side: vector_spec.of_meta(loaded.meta if loaded else {}, one.spec).replace(
          pooling=pooling,
          normalize=normalize,
          query_max_length=query_max_length,
          passage_max_length=passage_max_length,
          dimension=dimensions,
        )
        for side, one in backbones.items()
      }
      bank[name] = BankEntry(loaded, _joined(both['query'], both['passage'], folder))
    if prompt is None and (folder / hub.PROMPT).exists():
      logger.warning(
        '%s contains a prompt that is not applied; to apply it, give prompt=%s',
        folder,
        folder,
      )
    return cls(backbones, tokenizer, bank, mesh=mesh, batch_size=batch_size, dtype=dtype)

  @property
  def space_sha256(self) -> str:
    """Identifies the backbones. Equal values mean comparable vectors of queries and passages."""
    return '+'.join(dict.fromkeys(self.backbones[side].sha256 for side in SIDES))

  @property
  def config_sha256(self) -> str:
    """Identifies the shapes of the backbones, which affect vectors besides tensors."""
    return '+'.join(dict.fromkeys(config_sha256(self.backbones[side].config) for side in SIDES))

  @property
  def dtype(self) -> str:
    """The arithmetic: 'float32', 'bfloat16' or 'mixed'."""
    return self._arithmetic.name

  def entry(self, name: str | None = None) -> BankEntry:
    """The named prompt, or the only one."""
    return self.bank[self._names(name, 1)[0]]

  def queries(self, name: str | None = None) -> 'seen.Seen':
    """Hashes of the queries used to train and select the backbone and the named prompt."""
    from dprjax.text import seen

    prompt = self.entry(name).prompt
    folders = dict.fromkeys(backbone.path for backbone in self.backbones.values())
    known = [seen.read(epath.Path(folder) / seen.FILE) for folder in folders]
    return seen.join(*known, *([] if prompt is None else [prompt.queries]))

  def tokenize(
    self, texts: Iterable[str], side: str, prompt: str | Sequence[str] | None = None
  ) -> list[np.ndarray]:
    """Token ids of texts, with prefixes, cut at the maximum length."""
    texts = given.texts(texts)
    names = self._names(prompt, len(texts))
    rows: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
    for name in dict.fromkeys(names):
      spec = self.bank[name].spec
      places = [i for i, one in enumerate(names) if one == name]
      prefixed = [spec.prefix(side) + texts[i] for i in places]
      encoded, cut = self.tokenizer.encode(prefixed, spec.max_length(side))
      self.truncated[side] += cut
      for i, row in zip(places, encoded, strict=True):
        rows[i] = row
    return rows

  def encode(
    self,
    texts: Iterable[str],
    side: str = 'passage',
    progress: ProgressFn | None = None,
    *,
    prompt: str | Sequence[str] | None = None,
    topic: int | Sequence[int] | None = None,
  ) -> Float[np.ndarray, 'n H']:
    """Encodes texts to float32 ``[n, dimension]``, in order.

    Args:
      texts: strings: a list, another iterable, or a column of pandas, pyarrow, polars or numpy.
      side: 'query' or 'passage'; decides maximum length, prefix text and prompt.
      progress: called with the number of texts done.
      prompt: a name in ``bank``, or one for each text; optional with a single prompt.
      topic: of all texts or of each, if all prompts are of kind topic; default: chosen by words.
    """
    texts = given.texts(texts)
    names = self._names(prompt, len(texts))
    rows = self.tokenize(texts, side, names)
    topics = self._assign(texts, names, topic)
    vectors = np.zeros((len(texts), self.backbones[side].config.vector_size), np.float32)
    done = 0
    for group in self._groups[side]:
      numbers = np.array([group.numbers.get(name, -1) for name in names], np.int32)
      places = np.flatnonzero(numbers >= 0)
      if not len(places):
        continue
      numbers = numbers + topics
      vectors[places] = group.embedder(
        group.params,
        [rows[i] for i in places],
        count_from(done, progress),
        (numbers[places],) if group.size > 1 else (),
      )
      done += len(places)
    if self.dimension == vectors.shape[1]:
      return vectors
    return codes.cut(vectors, self.dimension, [self.bank[n].spec.normalize for n in names])

  def check_topic(self, topic: int | None, name: str | None = None) -> None:
    """Raises InputError if the named (or only) prompt has no such topic."""
    name = self._names(name, 1)[0]
    if topic is not None and not 0 <= topic < (count := len(self.topics.get(name, ()))):
      whose = f'{count} topics, 0 to {count - 1}' if count else 'no topics'
      raise InputError(
        f'topic: {topic} is unknown: the prompt{f" {name!r}" if name else ""} has {whose}'
      )

  def check_comparable(self, queries: Sequence[str], passages: str | None) -> None:
    """Checks that queries with these prompts can be compared with passages with another prompt.

    They can with the same prompt, or if both encode passages with the bare backbone.
    """

    def space(name: str) -> dict[str, Any]:
      prompt, spec = entry = self.bank[name]
      bare = prompt is None or prompt.query_only
      return manifest.of_prompt(spec, None if bare else name, entry.shift_positions)

    (indexed,) = self._names(passages, 1)
    for name in dict.fromkeys(self._names(queries, len(queries))):
      if manifest.differences(space(name), space(indexed)):
        raise InputError(
          f'prompt: queries with {name!r} cannot be compared with passages with {indexed!r}; use '
          'the same prompt for both, or query-only prompts of one pooling, normalisation and '
          'passage_prefix'
        )

  def _assign(
    self, texts: Sequence[str], names: Sequence[str], topic: int | Sequence[int] | None
  ) -> Int32[np.ndarray, ' n']:
    """The topic of each text; 0 for a prompt without topics."""
    numbers = np.zeros(len(texts), np.int32)
    if topic is not None:
      chosen = np.broadcast_to(np.asarray(topic, np.int64), len(texts))
      for number, name in dict.fromkeys(zip(chosen.tolist(), names, strict=True)):
        self.check_topic(number, name)
      return chosen.astype(np.int32)
    for name, model in self.topics.items():
      places = [i for i, one in enumerate(names) if one == name]
      numbers[places] = model.assign([texts[i] for i in places])
    return numbers

  def _names(self, prompt: str | Sequence[str] | None, count: int) -> list[str]:
    """The prompt name for each text."""
    if prompt is None and len(self.bank) == 1:
      return [*self.bank] * count
    names = [prompt] * count if prompt is None or isinstance(prompt, str) else list(prompt)
    if len(names) != count or not set(names) <= set(self.bank):
      known = ', '.join(map(repr, self.bank))
      raise InputError(f'prompt: expected {count} of {known}, not {names!r:.200}')
    return [name for name in names if name is not None]

  def _group(self, side: str, names: list[str], backbone: Any) -> _Group:
    whole = self.backbones[side]
    numbers: dict[str, int] = {}
    of_rows: list[VectorSpec] = []
    adapters: list[Adapter | None] = []
    prompts: list[artifact.Prompt] = []
    for name in names:
      prompt, spec = entry = self.bank[name]
      of_prompt: list[Adapter | None] = [None]
      if prompt is not None and _is_template(entry):
        prompts.append(prompt)
      elif prompt is not None:
        of_prompt = prompt.adapters(side)
      numbers[name] = len(of_rows)
      adapters += of_prompt
      of_rows += [spec] * len(of_prompt)
    embed: EmbedFn
    if prompts:
      in_texts = prompts[0].kind.in_texts
      assert in_texts is not None
      template = in_texts(prompts, of_rows, side, self.tokenizer, whole, self._options)
      embed, adapter = template.embed, template.adapter
    else:
      embed = _embed_fn(whole.config, tuple(of_rows), self._options)
      # No adapter is faster than an empty one, and a single one is faster than a bank.
      adapter = stack(adapters) if len(adapters) > 1 else adapters[0]
    embedder = Embedder(
      embed,
      self.mesh,
      self._batch_size,
      max(one.max_length(side) for one in of_rows),
      self.tokenizer.pad_id,
    )
    return _Group(numbers, len(of_rows), embedder, (backbone, place(self.mesh, adapter)))


def _joined(query: VectorSpec, passage: VectorSpec, folder: epath.Path) -> VectorSpec:
  """The spec of two encoders, each with its own length and prefix."""
  for name in ('pooling', 'normalize'):
    _check_same(folder, f'--{name}', getattr(query, name), getattr(passage, name))
  return dataclasses.replace(
    query, passage_max_length=passage.passage_max_length, passage_prefix=passage.passage_prefix
  )


def _check_same(folder: epath.Path, what: str, query: Any, passage: Any) -> None:
  if query != passage:
    raise InputError(f'{folder}: {what} differs, {query!r} in query and {passage!r} in passage')


def config_sha256(config: EncoderConfig) -> str:
  """Identifies the shape of an encoder by its fields that matter after training."""
  training = ('hidden_dropout', 'attention_dropout', 'initializer_range')
  values = {
    name: value for name, value in dataclasses.asdict(config).items() if name not in training
  }
  if not config.projection:
    del values['projection']
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_length(name: str, entry: BankEntry, side: str, backbone: hub.Backbone) -> None:
  """Raises InputError if the longest texts of a side exceed the backbone positions."""
  prompt, spec = entry
  room: float = backbone.config.max_tokens
  if _is_template(entry):  # checked with the tokenizer
    room = math.inf
  elif prompt is not None and (adapter := prompt.adapters(side)[0]) is not None:
    room -= int(adapter.shift_positions())
  check_size(f'{_whose(name)}{side}_max_length', spec.max_length(side), room, backbone.path)


def _whose(name: str) -> str:
  return f'prompt {name!r}: ' if name != UNNAMED else ''


def check_prefix(whose: str, spec: VectorSpec, side: str, tokenizer: tokenizing.Tokenizer) -> None:
  """Raises InputError if the prefix leaves no room for text. All vectors would be equal."""
  tokens = len(tokenizer.backend.encode(spec.prefix(side)).ids) if spec.prefix(side) else 0
  if tokens >= spec.max_length(side):
    raise InputError(
      f'{whose}{side}_prefix has {tokens} tokens, but {side}_max_length is '
      f'{spec.max_length(side)}: no room is left for text'
    )


def _is_template(entry: BankEntry) -> bool:
  return entry.prompt is not None and entry.prompt.kind.load is None


def _form(entry: BankEntry) -> Any:
  """The properties shared by all prompts of a compiled batch."""
  if entry.prompt is None:
    return None
  if not _is_template(entry):
    return entry.prompt.kind.name
  meta = entry.prompt.meta
  return *sorted(meta['template'].items()), meta['fixed_layers']


@functools.lru_cache(maxsize=16)  # equal encoders share a compiled program
def _embed_fn(
  model: EncoderConfig,
  of_rows: tuple[VectorSpec, ...],
  options: EncoderOptions,
) -> EmbedFn:
  """The function for one prompt, or for the prompts of a bank in order."""

  def embed(
    params: Any, tokens: jax.Array, mask: jax.Array, prompt_ids: jax.Array | None = None
  ) -> jax.Array:
    backbone, adapter = params
    if adapter is not None and prompt_ids is not None:
      adapter = adapter.choose(prompt_ids)
    return embed_text(
      model, backbone, tokens, mask, of_rows, prompt_ids, adapter=adapter, options=options
    )

  return embed
