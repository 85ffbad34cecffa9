"""The heads in a model directory: initial values and storage.

    mlm         the masked-LM head, in model.safetensors
    classifier  the sequence-classification head, in model.safetensors
    condenser   the layers of the Condenser head, in condenser.safetensors

model.safetensors has at most one of them.
"""

import contextlib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dprjax.base.errors import InputError
from dprjax.models import checkpoint_names as names
from dprjax.models import heads, weights
from dprjax.models.encoder_config import EncoderConfig

Params = dict[str, Any]


class Head(NamedTuple):
  """A head of a checkpoint.

  Attributes:
    params: numpy float32, as from ``init`` of the spec. A classifier has only ``dense`` if the
      checkpoint has the BERT pooler and no classifier.
    settings: of the Condenser head ``split``, the number of early layers.
  """

  params: Params
  settings: Mapping[str, int] = types.MappingProxyType({})


class HeadSpec(NamedTuple):
  """One kind of head.

  Attributes:
    tensors: ``(config, head) -> tensors``.
    read: ``(checkpoint, stack) -> Head | None``. Raises InputError for a head that does not fit.
    model_class: the suffix of the class name in transformers, if there is one.
    hf_config: ``(config.json, head) -> config.json`` for that class.
  """

  init: Callable[..., Params]
  tensors: Callable[[EncoderConfig, Head], Iterable[names.Tensor]]
  read: Callable[[weights.Checkpoint, contextlib.ExitStack], Head | None]
  model_class: str = ''
  hf_config: Callable[[dict[str, Any], Head], dict[str, Any]] = lambda base, head: base
  file: str = weights.WEIGHTS
  metadata: Callable[[Head], dict[str, int]] = lambda head: {}


def sha256(name: str, config: EncoderConfig, head: Head) -> str:
  """The SHA-256 of the tensors of a head, as ``Backbone.sha256``."""
  return weights.sha256(
    sorted(names.export(HEADS[name].tensors(config, head), head.params).items())
  )


def _known(config: EncoderConfig, name: str) -> Callable[..., Iterable[names.Tensor]]:
  tensors = getattr(config.family, f'{name}_tensors')
  if tensors is None:
    raise InputError(f'a {name} head of {config.model_type} models is not supported')
  return tensors


def _mlm_tensors(config: EncoderConfig, head: Head) -> Iterable[names.Tensor]:
  return _known(config, 'mlm')(config)


def _read_mlm(checkpoint: weights.Checkpoint, stack: contextlib.ExitStack) -> Head | None:
  config, family = checkpoint.config, checkpoint.config.family
  if family.mlm_tensors is None:
    return None
  params = _read_head(
    checkpoint, 'masked-LM head', family.mlm_tensors(config), family.mlm_copies(config)
  )
  return None if params is None else Head(params)


def _labels(head: Head) -> int:
  return head.params['output']['bias'].shape[0]


def _classifier_tensors(config: EncoderConfig, head: Head) -> Iterable[names.Tensor]:
  return _known(config, 'classifier')(config, _labels(head))


def _read_classifier(checkpoint: weights.Checkpoint, stack: contextlib.ExitStack) -> Head | None:
  stored, config = checkpoint.tensors, checkpoint.config
  classifier_tensors = _known(config, 'classifier')
  tensors = list(classifier_tensors(config, 1))
  output = next(tensor.name for tensor in tensors if tensor.path == ('output', 'kernel'))
  if output in stored:
    shape = stored[output][0].shape
    labels = shape[0] if shape else 0
    id2label = checkpoint.hf_config.get('id2label')
    mismatch = isinstance(id2label, dict) and len(id2label) != labels
    relevant = None
    if labels in heads.LABELS and not mismatch:
      relevant = 1 if labels == 1 else _relevant(id2label)
    if relevant is None:
      raise InputError(
        f'{checkpoint.folder / "config.json"}: id2label, {id2label!r:.80}, does not say which of '
        f'{labels} labels of {output} means relevant; a cross-encoder has 1 label, or 2 called '
        'irrelevant and relevant'
      )
    tensors = list(classifier_tensors(config, labels))
  elif not any(
    tensor.name in stored for tensor in tensors if tensor.name.startswith('classifier.')
  ):
    # The BERT pooler is half a head.
    tensors = [tensor for tensor in tensors if tensor.path[0] == 'dense']
  params = _read_head(checkpoint, 'sequence-classification head', tensors)
  if params is None:
    return None
  if output in stored and relevant == 0:  # ours is the second label
    params['output'] = {key: np.flip(array, -1) for key, array in params['output'].items()}
  return Head(params)


def _read_head(
  checkpoint: weights.Checkpoint,
  title: str,
  tensors: Iterable[names.Tensor],
  copies: Mapping[str, str] = types.MappingProxyType({}),
) -> Params | None:
  """The parameters of a head; None if the checkpoint has none of its tensors."""
  head = {tensor.name: tensor for tensor in tensors}
  config = checkpoint.config
  encoder = {tensor.name: tensor for tensor in config.family.tensors(config)}
  expected = head | {
    copy: (head | encoder)[original]._replace(name=copy) for copy, original in copies.items()
  }
  stored = {name: places for name, places in checkpoint.tensors.items() if name in expected}
  if not stored:
    return None
  problems = weights.find_problems(expected.values(), stored)
  present = [name for name in expected if name in stored]
  for copy, original in copies.items():
    if copy in stored:
      stored.setdefault(original, checkpoint.tensors.get(original, stored[copy]))
  if missing := [name for name in head if name not in stored]:
    problems.append(
      f'{weights.listed(present)} {"is" if len(present) == 1 else "are"} there, but missing '
      f'{weights.listed(missing)}'
    )
  for copy, original in copies.items() if not problems else ():
    if copy in stored and not np.array_equal(stored[copy][0].read(), stored[original][0].read()):
      problems.append(f'{copy} differs from {original}; untied decoders are not supported')
  if problems:
    raise InputError(
      f'{checkpoint.folder}: the {title} does not fit the encoder: '
      f'{weights.listed(problems, "; ")}; for a fresh head, save only the encoder, as '
      'transformers.AutoModel does'
    )
  params: Params = {}
  for name, tensor in head.items():
    names.place(params, tensor, stored[name][0].read())
  return params


# Names of labels, in lower case without other signs than letters and digits.
_RELEVANT = {'relevant', 'positive', 'entailment', 'yes', 'true', 'match', 'label1', '1'}
_OTHERS = {
  *('irrelevant', 'notrelevant', 'nonrelevant', 'negative', 'notentailment', 'contradiction'),
  *('no', 'false', 'nomatch', 'label0', '0'),
}


def _relevant(id2label: Any) -> int | None:
  """The place of the label of relevance by the names of two labels, or None if they do not say."""
  if not isinstance(id2label, dict):
    return 1
  names = [re.sub(r'[^a-z0-9]', '', str(id2label.get(str(place))).lower()) for place in (0, 1)]
  for place, name in enumerate(names):
    if name in _RELEVANT and names[1 - place] not in _RELEVANT:
      return place
    if name in _OTHERS and names[1 - place] not in _OTHERS:
      return 1 - place
  return None


def _classifier_config(base: dict[str, Any], head: Head) -> dict[str, Any]:
  labels = _labels(head)
  id2label = base.get('id2label')
  written = [f'LABEL_{i}' for i in range(labels)]
  if isinstance(id2label, dict) and len(id2label) == labels:
    relevant = 1 if labels == 1 else _relevant(id2label)
    if relevant == 1:
      return base
    if relevant == 0:  # ours is the second label
      written = [id2label['1'], id2label['0']]
  # These keys describe another head.
  rest = {key: value for key, value in base.items() if key not in ('num_labels', 'problem_type')}
  return rest | {
    'id2label': {str(place): name for place, name in enumerate(written)},
    'label2id': {name: place for place, name in enumerate(written)},
  }


def _num_layers(head: Head) -> int:
  return int(jax.tree.leaves(head.params)[0].shape[0])


def _condenser_tensors(config: EncoderConfig, head: Head) -> Iterable[names.Tensor]:
  return config.family.layer_tensors(config, _num_layers(head))


def _read_condenser(checkpoint: weights.Checkpoint, stack: contextlib.ExitStack) -> Head | None:
  file, config = checkpoint.folder / HEADS['condenser'].file, checkpoint.config
  if not file.exists():
    return None
  metadata = weights.open_file(file, stack).metadata() or {}
  layers, split = (
    int(value) if re.fullmatch('[0-9]{1,4}', value := metadata.get(key, '')) else 0
    for key in ('num_layers', 'split')
  )
  if not layers or not 0 < split < config.num_layers:
    raise InputError(
      f'{file}: the metadata has num_layers {metadata.get("num_layers")!r:.20} and split '
      f'{metadata.get("split")!r:.20}; expected at least 1 layer, and a split of the encoder with '
      f'{config.num_layers} layers'
    )
  where = f'not a Condenser head of {layers} layers for this encoder'
  params = weights.read_file(file, where, list(config.family.layer_tensors(config, layers)), stack)
  return Head(params, {'split': split})


HEADS = {
  'mlm': HeadSpec(
    init=heads.init_mlm_head,
    tensors=_mlm_tensors,
    read=_read_mlm,
    model_class='ForMaskedLM',
    hf_config=lambda base, head: base | {'tie_word_embeddings': True},
  ),
  'classifier': HeadSpec(
    init=heads.init_classifier,
    tensors=_classifier_tensors,
    read=_read_classifier,
    model_class='ForSequenceClassification',
    hf_config=_classifier_config,
  ),
  'condenser': HeadSpec(
    init=heads.init_condenser_head,
    tensors=_condenser_tensors,
    read=_read_condenser,
    file='condenser.safetensors',
    metadata=lambda head: {'num_layers': _num_layers(head), **head.settings},
  ),
}
