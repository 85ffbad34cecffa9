"""The tensors of a Hugging Face checkpoint: their names and shapes, and their places in our tree.

An encoder's tensor has its name in ``BertModel`` or ``RobertaModel``, without the prefix of a
larger model (``bert.``, ``roberta.``) or of a wrapper (``module.``). LayerNorm has ``weight`` and
``bias`` (old files: ``gamma``, ``beta``). Heads have the names of the ForMaskedLM and
ForSequenceClassification classes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dprjax.base.errors import InputError
from dprjax.models.encoder_config import EncoderConfig

Params = dict[str, Any]

# What larger models add to the encoder, and buffers that old versions of transformers stored.
EXTRAS = re.compile(
  r'(pooler|cls|lm_head|classifier|qa_outputs)\.|embeddings\.(position_ids|token_type_ids)$'
)
# What PyTorch, sentence-transformers and training scripts put before names.
_WRAPPERS = re.compile(
  r'((module|model|auto_model|base_model|_orig_mod|_fsdp_wrapped_module|encoder|backbone|'
  r'transformer|\d+)\.)*'
)
# numpy's names for the types of floats, and safetensors'.
DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float64': 'F64'}


class Tensor(NamedTuple):
  """One tensor of a checkpoint and its place in our tree (kernels transposed, layers stacked)."""

  name: str
  shape: tuple[int, ...]
  path: tuple[str, ...]
  layer: int | None = None
  num_layers: int = 0  # in the stack of ``layer``

  @property
  def kernel(self) -> bool:
    return self.path[-1] == 'kernel'


def encoder_tensors(config: EncoderConfig) -> Iterator[Tensor]:
  """Every tensor of the encoder."""
  width = config.hidden_size
  for name, ours, rows in (
    ('word_embeddings', 'word', config.vocab_size),
    ('position_embeddings', 'position', config.max_positions),
    ('token_type_embeddings', 'token_type', config.type_vocab_size),
  ):
    yield Tensor(f'embeddings.{name}.weight', (rows, width), ('embeddings', ours, 'embedding'))
  yield Tensor('embeddings.LayerNorm.weight', (width,), ('embeddings', 'norm', 'scale'))
  yield Tensor('embeddings.LayerNorm.bias', (width,), ('embeddings', 'norm', 'bias'))
  for tensor in layer_tensors(config, config.num_layers):
    yield tensor._replace(name=f'encoder.{tensor.name}', path=('layers', *tensor.path))


def layer_tensors(config: EncoderConfig, num_layers: int) -> Iterator[Tensor]:
  """A stack of layers, of the encoder or Condenser's head: ``layer.0.output.dense.bias``, ..."""
  width, inner = config.hidden_size, config.intermediate_size
  dense = [
    (f'attention.self.{name}', ('attention', name), width, width)
    for name in ('query', 'key', 'value')
  ]
  dense += [
    ('attention.output.dense', ('attention', 'output'), width, width),
    ('intermediate.dense', ('mlp', 'up'), inner, width),
    ('output.dense', ('mlp', 'down'), width, inner),
  ]
  norms = (('attention.output.LayerNorm', 'attention'), ('output.LayerNorm', 'mlp'))
  for layer in range(num_layers):
    for name, path, out, into in dense:
      yield Tensor(
        f'layer.{layer}.{name}.weight', (out, into), (*path, 'kernel'), layer, num_layers
      )
      yield Tensor(f'layer.{layer}.{name}.bias', (out,), (*path, 'bias'), layer, num_layers)
    for name, part in norms:
      yield Tensor(
        f'layer.{layer}.{name}.weight', (width,), (part, 'norm', 'scale'), layer, num_layers
      )
      yield Tensor(
        f'layer.{layer}.{name}.bias', (width,), (part, 'norm', 'bias'), layer, num_layers
      )


def mlm_tensors(config: EncoderConfig) -> Iterator[Tensor]:
  """The masked-LM head of the ForMaskedLM classes and BertForPreTraining."""
  width = config.hidden_size
  bert = config.model_type == 'bert'
  dense, norm = (
    ('cls.predictions.transform.dense', 'cls.predictions.transform.LayerNorm')
    if bert
    else ('lm_head.dense', 'lm_head.layer_norm')
  )
  yield Tensor(f'{dense}.weight', (width, width), ('dense', 'kernel'))
  yield Tensor(f'{dense}.bias', (width,), ('dense', 'bias'))
  yield Tensor(f'{norm}.weight', (width,), ('norm', 'scale'))
  yield Tensor(f'{norm}.bias', (width,), ('norm', 'bias'))
  yield Tensor('cls.predictions.bias' if bert else 'lm_head.bias', (config.vocab_size,), ('bias',))


def decoder_tensors(config: EncoderConfig) -> Mapping[str, str]:
  """Tensors of the masked-LM head that some files store twice, each with the name it copies."""
  head = 'cls.predictions' if config.model_type == 'bert' else 'lm_head'
  return {
    f'{head}.decoder.weight': 'embeddings.word_embeddings.weight',
    f'{head}.decoder.bias': f'{head}.bias',
  }


def classifier_tensors(config: EncoderConfig, labels: int) -> Iterator[Tensor]:
  """The head of the ForSequenceClassification classes; of BERT's the pooler is the first half."""
  width = config.hidden_size
  dense, output = (
    ('pooler.dense', 'classifier')
    if config.model_type == 'bert'
    else ('classifier.dense', 'classifier.out_proj')
  )
  yield Tensor(f'{dense}.weight', (width, width), ('dense', 'kernel'))
  yield Tensor(f'{dense}.bias', (width,), ('dense', 'bias'))
  yield Tensor(f'{output}.weight', (labels, width), ('output', 'kernel'))
  yield Tensor(f'{output}.bias', (labels,), ('output', 'bias'))


def prefix(config: EncoderConfig) -> str:
  """What classes with a head put before the names of the encoder and the pooler."""
  return 'bert.' if config.model_type == 'bert' else 'roberta.'


def wrapper(config: EncoderConfig, stored: Iterable[str]) -> str:
  """What a tool put before all names: ``module.``, ``0.auto_model.``; it may be empty.

  It stands before the name of the word embeddings.

  Raises:
    InputError: it is of no known tool, or there are several.
  """
  word = 'embeddings.word_embeddings.weight'
  before = {name.removesuffix(word) for name in stored if f'.{name}'.endswith(f'.{word}')}
  found = sorted({name.removesuffix(prefix(config)) for name in before})
  if len(found) > 1:
    raise InputError(
      'holds several encoders, whose names begin with '
      f'{" and ".join(map(repr, found[:8]))}; keep one of them'
    )
  for name in found:
    if not _WRAPPERS.fullmatch(name):
      raise InputError(
        f'all names begin with {name!r}, which is not part of a {config.model_type} encoder; save '
        'the encoder itself, without what it is wrapped in'
      )
  return found[0] if found else ''


def canonical(config: EncoderConfig, name: str, before: str = '') -> str:
  """A tensor's name as this module has it; ``before`` is its `wrapper`."""
  name = name.removeprefix(before).removeprefix(prefix(config))
  return re.sub(
    r'LayerNorm\.beta$', 'LayerNorm.bias', re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name)
  )


def place(params: Params, tensor: Tensor, array: np.ndarray) -> None:
  """Puts a checkpoint's tensor into our tree, as float32."""
  node = params
  for key in tensor.path[:-1]:
    node = node.setdefault(key, {})
  array = array.T if tensor.kernel else array
  if tensor.layer is None:
    node[tensor.path[-1]] = np.array(array, np.float32)
    return
  if tensor.path[-1] not in node:
    node[tensor.path[-1]] = np.empty((tensor.num_layers, *array.shape), np.float32)
  node[tensor.path[-1]][tensor.layer] = array


def export(tensors: Iterable[Tensor], params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Our tree as a checkpoint's tensors, float32."""
  arrays = {}
  for tensor in tensors:
    array: Any = params
    for key in tensor.path:
      array = array[key]
    if tensor.layer is not None:
      array = array[tensor.layer]
    value = np.asarray(array, np.float32)
    arrays[tensor.name] = np.ascontiguousarray(value.T if tensor.kernel else value)
  return arrays
