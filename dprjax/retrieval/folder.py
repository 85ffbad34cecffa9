"""The folder of a retriever: the ranking that was chosen, and perhaps the corpus that it searches.

    retriever.json           the encoder, the settings of its vectors, and what was chosen
    prompt.npz               its prompt
    fusion.json              the weight of BM25
    README.md                a card
    index/vectors            embeddings of the passages (`dprjax.encoding.folders`)
    index/bm25               their BM25 index, for a fusion
    index/passages.jsonl     their texts, as encoded
    index/trained            before there is an index: the embeddings that the training made

A retriever without a prompt, BM25 or index lacks these files. Nothing in a folder runs.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError
from dprjax.encoding import embeddings, folders, manifest
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import hub
from dprjax.retrieval import bm25_index, fusion
from dprjax.retrieval.fusion import Fusion
from dprjax.text.texts import Text, digest

logger = logging.getLogger('dprjax')

FILE, FUSION, INDEX = 'retriever.json', 'fusion.json', 'index'
HERE = '.'
"""The name of a backbone that lies in the folder itself."""

_FORMAT, _VERSION = 'dprjax.retriever', 1
_VECTORS, _BM25, _PASSAGES, _TRAINED = 'vectors', 'bm25', 'passages.jsonl', 'trained'
_AGAIN = 'remove the index and fill it again'
_CARD = """---
{head}
---

# {name}

A retriever of dprjax: {what}.{choice}

```sh
dprjax index --retriever={name} --input=corpus.jsonl
dprjax search --retriever={name} --queries=queries.jsonl --out=run.trec
```

```python
from dprjax import Retriever

retriever = Retriever.load('{name}')
retriever.index(['The backbone is frozen.', 'Bread needs flour.'])
retriever.search(['how to bake'], k=1)
```
"""


class _Settings(msgspec.Struct, kw_only=True, omit_defaults=True):
  pooling: str | None = None
  normalize: bool | None = None
  query_max_length: int | None = None
  passage_max_length: int | None = None
  dimensions: int | None = None


class _Description(msgspec.Struct, kw_only=True):
  format: Literal['dprjax.retriever']
  version: Literal[1]
  backbone: str
  backbone_sha256: str
  settings: _Settings = msgspec.field(default_factory=_Settings)
  choice: dict[str, Any] | None = None
  data: dict[str, str] | None = None


class Parts(NamedTuple):
  """What a folder says of its retriever.

  Attributes:
    backbone: its path or name, and its SHA-256.
    settings: keywords of ``Encoder.load``.
    choice: the record of the choice (`choosing.Choice.record`), if there was one.
  """

  backbone: str
  backbone_sha256: str
  prompt: epath.Path | None
  settings: dict[str, Any]
  fusion: Fusion | None
  choice: dict[str, Any] | None


def is_folder(path: files.PathLike) -> bool:
  return (epath.Path(path) / FILE).exists()


def below(path: files.PathLike) -> list[str]:
  """The folders of retrievers in a folder. Raises InputError if there is none."""
  folder = files.existing(path, 'folder of retrievers')
  retrievers = sorted(str(one) for one in folder.iterdir() if is_folder(one))
  if not retrievers:
    raise InputError(f'{path} has no folder of a retriever, with {FILE}')
  return retrievers


def shared_backbone(paths: Sequence[files.PathLike]) -> str:
  """The name of the backbone of retrievers. Raises InputError if they have different ones."""
  first, *others = (read(path) for path in paths)
  for path, parts in zip(paths[1:], others, strict=True):
    if parts.backbone_sha256 != first.backbone_sha256:
      raise InputError(f'{path} has another backbone than {paths[0]}; serve it apart')
  return first.backbone


def read(path: files.PathLike) -> Parts:
  """Reads retriever.json and the weights beside it."""
  folder = epath.Path(path)
  description = reading.read(files.existing(folder / FILE, 'retriever'), 'retriever', _Description)
  prompt = folder / hub.PROMPT
  weights = folder / FUSION
  return Parts(
    str(folder) if description.backbone == HERE else description.backbone,
    description.backbone_sha256,
    prompt if prompt.exists() else None,
    msgspec.to_builtins(description.settings),
    fusion.read_hybrid(weights) if weights.exists() else None,
    description.choice,
  )


def load_encoder(path: files.PathLike, **options: Any) -> tuple[Parts, Encoder]:
  """Reads a folder and loads its encoder; ``options`` of ``Encoder.load`` replace its settings."""
  parts = read(path)
  encoder = Encoder.load(parts.backbone, parts.prompt, **{**parts.settings, **options})
  if encoder.space_sha256 != parts.backbone_sha256:
    raise InputError(
      f'{path}: {parts.backbone} is not the encoder of this retriever (its sha256 has changed)'
    )
  return parts, encoder


def describe(
  folder: epath.Path,
  backbone: str,
  backbone_sha256: str,
  *,
  name: str,
  settings: Mapping[str, Any] | None = None,
  choice: Mapping[str, Any] | None = None,
  data: Mapping[str, str] | None = None,
  how: Fusion | None = None,
) -> None:
  """Writes retriever.json, the weights and the card; the caller writes the prompt.

  Args:
    backbone: its path or name, or `HERE`.
    name: of the folder, for the card.
    data: the SHA-256 of the files that it was chosen by, by their role.
  """
  content = {
    'format': _FORMAT,
    'version': _VERSION,
    'backbone': backbone,
    'backbone_sha256': backbone_sha256,
    'settings': {key: value for key, value in (settings or {}).items() if value is not None},
    'choice': choice,
    'data': data,
  }
  files.write_json(folder / FILE, content)
  if how is not None:
    fusion.write(folder / FUSION, how)
  parts = ['a fine-tuned encoder' if backbone == HERE else f'the frozen encoder `{backbone}`']
  if (folder / hub.PROMPT).exists():
    parts.append(f'the prompt `{hub.PROMPT}`')
  if how is not None:
    parts.append('a fusion with BM25')
  if not (folder / 'README.md').exists():
    import huggingface_hub  # slow to import

    head = huggingface_hub.ModelCardData(
      library_name='dprjax', tags=['dprjax', 'dense-retrieval'], pipeline_tag='sentence-similarity'
    )
    verdict = f'\n\nChosen by held-out queries: {choice["verdict"]}.' if choice else ''
    card = _CARD.format(head=head, name=name, what=', '.join(parts), choice=verdict)
    with files.atomic_write(folder / 'README.md') as file:
      file.write(card)


class Index(NamedTuple):
  """An indexed corpus.

  Attributes:
    texts: as encoded, in their order.
    words: the search with BM25, for a fusion.
  """

  corpus: embeddings.Embeddings
  texts: list[str]
  words: fusion.Hybrid | None


class _Passage(msgspec.Struct):
  id: str
  text: str


def vectors_of(path: files.PathLike) -> epath.Path:
  return epath.Path(path) / INDEX / _VECTORS


def passages_of(path: files.PathLike) -> epath.Path:
  """The passages as encoded: a file of texts."""
  return epath.Path(path) / INDEX / _PASSAGES


def check_index(path: files.PathLike, flag: str) -> None:
  files.existing(epath.Path(path) / FILE, 'retriever')
  if not passages_of(path).exists():
    raise InputError(
      f'{flag}={path} has no index; fill it: dprjax index --retriever={path} --input=corpus.jsonl'
    )


@contextlib.contextmanager
def claim_index(path: files.PathLike, inputs: outputs.Inputs) -> Iterator[epath.Path]:
  """Claims the index of a retriever, which several runs may fill."""
  known = {_VECTORS, _BM25, _PASSAGES, _TRAINED, outputs.LOCK}

  def ours(folder: epath.Path) -> bool:
    return all(child.name in known or child.name.startswith('.') for child in folder.iterdir())

  out = epath.Path(path) / INDEX
  with outputs.claim_folder(
    out, inputs, what='the index of a retriever', ours=ours, flag='--retriever', grows=True
  ) as claimed:
    yield claimed


def fill(
  index: epath.Path,
  encoder: Encoder,
  passages: Iterable[Text],
  source: str,
  how: Fusion | None,
  vectors: Callable[[slice], Float[np.ndarray, 'n H']] | None = None,
) -> None:
  """Encodes passages into an index claimed by the caller; continues after an interruption.

  What the training encoded (`take`) is not encoded again.

  Args:
    passages: at least one; the same in each iteration.
    how: the fusion, whose BM25 is indexed too.
    vectors: gives those of a slice of the passages, if they are encoded already.
  """
  trained = index / _TRAINED
  folders.fill_folder(
    encoder,
    'passage',
    passages,
    index / _VECTORS,
    source=source,
    vectors=_known(trained, encoder, passages) if vectors is None else vectors,
  )
  if how is not None and not bm25_index.is_index(index / _BM25):
    bm25_index.save(bm25_index.build_texts(passages, **(how.bm25 or {})), index / _BM25, source)
  with files.atomic_write(index / _PASSAGES, 'wb') as file:
    for passage in passages:
      file.write(msgspec.json.encode(_Passage(*passage)) + b'\n')
  files.discard(trained)


def take(folder: epath.Path, trained: epath.Path) -> None:
  """Links finished embeddings of a training into the folder of a retriever, for `fill`."""
  if not (trained / manifest.MANIFEST).exists():
    return
  place = folder / INDEX / _TRAINED
  place.mkdir(parents=True)
  for path in trained.iterdir():
    if not path.name.startswith('.'):
      try:
        os.link(path, place / path.name)
      except OSError:  # another file system
        path.copy(place / path.name)


def _known(
  trained: epath.Path, encoder: Encoder, passages: Iterable[Text]
) -> Callable[[slice], Float[np.ndarray, 'n H']] | None:
  """Gives the vectors of these passages, if the training encoded them with this encoder."""
  if not trained.exists():
    return None
  corpus = embeddings.load_embeddings(trained)
  meta = manifest.describe(encoder, 'passage', corpus.meta.dtype, corpus.meta.input_sha256)
  if manifest.differences(corpus.meta.space(), meta.space()):
    return None
  if digest(passages) != corpus.meta.input_sha256:
    return None
  logger.info('%s: the training encoded these passages', trained)
  return lambda some: corpus.take(np.arange(some.start, some.stop))


def open_index(path: files.PathLike, how: Fusion | None) -> Index:
  index = epath.Path(path) / INDEX
  corpus = embeddings.load_embeddings(index / _VECTORS)
  texts = [one for _, one in reading.read_jsonl(index / _PASSAGES, 'passages', _Passage)]
  ids = [text.id for text in texts]
  if ids != corpus.ids:
    raise InputError(f'{index / _PASSAGES} has other ids than {index / _VECTORS}; {_AGAIN}')
  words = None if how is None else fusion.open_hybrid(how, index / _BM25, ids)
  return Index(corpus, [text.text for text in texts], words)


def check_encoder(path: files.PathLike, corpus: embeddings.Embeddings, encoder: Encoder) -> None:
  """Raises InputError if an index was made with another encoder, prompt or settings."""
  meta = manifest.describe(encoder, 'passage', corpus.meta.dtype, corpus.meta.input_sha256)
  index = str(epath.Path(path) / INDEX)
  manifest.check_same_space(index, corpus.meta.space(), str(path), meta.space(), _AGAIN)


def settings_of(encoder: Encoder) -> dict[str, Any]:
  """The settings of an encoder of one prompt, as keywords of ``Encoder.load``."""
  spec = encoder.entry().spec
  names: Sequence[str] = ('pooling', 'normalize', 'query_max_length', 'passage_max_length')
  return {name: getattr(spec, name) for name in names} | {'dimensions': spec.dimension}
