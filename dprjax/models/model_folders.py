"""Writes models as Hugging Face folders, for ``transformers`` and ``sentence-transformers``.

A folder written here has a mark with the SHA-256 of its files; only an unchanged one is replaced.
"""

import contextlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import safetensors.numpy
from etils import epath

from dprjax.base import files, outputs, provenance
from dprjax.base.files import PathLike, atomic_path, write_json
from dprjax.base.reading import read_json_object
from dprjax.models import checkpoint_names as names
from dprjax.models import pooling, sentence, weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.hub import Backbone, head_kind
from dprjax.text.sentence_files import TOKENIZER_FILES, tokenizer_settings
from dprjax.text.vector_spec import VectorSpec

if TYPE_CHECKING:
  from dprjax.models.head_specs import Head

FORMAT = 'dprjax.model'  # of the mark
OURS = 'an unchanged model exported by dprjax'

_LICENCES = ('LICENSE', 'LICENSE.txt', 'LICENSE.md', 'NOTICE')


def save_backbone(
  directory: PathLike,
  config: EncoderConfig,
  params: Mapping[str, Any],
  *,
  source: PathLike | None = None,
  spec: VectorSpec | None = None,
  hf_config: Mapping[str, Any] | None = None,
  heads: Mapping[str, 'Head'] = types.MappingProxyType({}),
  max_length: int | None = None,
) -> None:
  """Writes a Hugging Face directory for ``transformers`` and ``sentence-transformers``, atomically.

  It replaces only an unchanged model written by dprjax (`is_ours`). Tensors have the names in the
  class of transformers for the head, if there is one; AutoModel also reads them. Only a classifier
  has the pooler. The Condenser head has its own file.

  Args:
    spec: how texts become vectors, for sentence-transformers files; None writes none.
    heads: by names of ``head_specs.HEADS``; at most one with a class of ``transformers``.
    max_length: tokens of an input, for the tokenizer ``model_max_length``.
  """
  tensors = {name: list(head_kind(name).tensors(config, head)) for name, head in heads.items()}
  with (
    claim(directory, {'source': _tokenizer_files(source)}, 'directory') as final,
    atomic_path(final) as aside,
  ):
    aside.mkdir(parents=True)
    write_json(aside / 'config.json', _hf_config(config, hf_config or {}, heads))
    tokenizer = tokenizer_keys(source) if source is not None else {}
    if spec is not None:
      write_sentence_files(aside, config, params, spec, tokenizer)
    elif tokenizer:
      write_json(aside / 'sentence_bert_config.json', tokenizer)
    copy_tokenizer(
      source, aside, **({} if max_length is None else {'model_max_length': max_length})
    )
    arrays = names.export(config.family.tensors(config), params)
    for name, head in heads.items():
      kind, stored = head_kind(name), names.export(tensors[name], head.params)
      if kind.model_class:
        # The pooler is part of the encoder model.
        pooler = {key for key in stored if key.startswith('pooler.')}
        arrays = {
          (config.family.prefix if key in pooler or key not in stored else '') + key: array
          for key, array in (arrays | stored).items()
        }
      else:
        metadata = {key: str(value) for key, value in kind.metadata(head).items()}
        (aside / kind.file).write_bytes(safetensors.numpy.save(stored, {'format': 'pt'} | metadata))
    # transformers refuses files without the name of the format.
    (aside / weights.WEIGHTS).write_bytes(safetensors.numpy.save(arrays, {'format': 'pt'}))
    mark(aside)


def copy_files(backbone: Backbone, folder: epath.Path) -> None:
  source = epath.Path(backbone.path)
  for file in (
    source / 'config.json',
    *weights.weight_files(source),
    *_tokenizer_files(source),
    *(source / name for name in _LICENCES if (source / name).exists()),
  ):
    file.copy(folder / file.name)


def copy_tokenizer(source: PathLike | None, folder: epath.Path, **settings: Any) -> None:
  """Copies a tokenizer; ``settings`` replace those of its tokenizer_config.json."""
  for file in _tokenizer_files(source):
    file.copy(folder / file.name)
  if settings:
    path = folder / 'tokenizer_config.json'
    stored = read_json_object(path, 'tokenizer_config.json') if path.exists() else {}
    write_json(path, stored | settings)


def _tokenizer_files(source: PathLike | None) -> list[epath.Path]:
  if source is None:
    return []
  paths = (epath.Path(source) / name for name in TOKENIZER_FILES)
  return [file for file in paths if file.exists()]


def claim(
  folder: PathLike, inputs: outputs.Inputs, flag: str = '--out'
) -> contextlib.AbstractContextManager[epath.Path]:
  return outputs.claim_folder(folder, inputs, what=OURS, ours=is_ours, flag=flag)


def mark(folder: epath.Path) -> None:
  """Marks a folder as a model written by dprjax, with the SHA-256 of its files."""
  (folder / provenance.MARK).unlink(missing_ok=True)
  provenance.write_mark(folder, FORMAT, files=provenance.sums(folder))


def is_ours(folder: epath.Path) -> bool:
  """Whether a folder has only an unchanged model written by dprjax."""
  marked = provenance.read_mark(folder)
  digests = marked.get('files')
  if marked.get('format') != FORMAT or not isinstance(digests, dict):
    return False
  count = 0
  for file in files.below(folder):
    name = str(file.relative_to(folder))
    if name == provenance.MARK:
      continue
    count += 1
    if name not in digests or files.is_special(file) or files.sha256_file(file) != digests[name]:
      return False
  return count == len(digests)


def write_sentence_files(
  folder: epath.Path,
  config: EncoderConfig,
  params: Mapping[str, Any],
  spec: VectorSpec,
  tokenizer: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
  """Writes the files of ``models.sentence`` into a new folder, in a format for all versions.

  Args:
    spec: how it embeds texts; the folder gets the longer of its two maximum lengths.
    tokenizer: keys of sentence_bert_config.json that the tokenizer needs (`tokenizer_keys`).
  """
  modules = [
    ('Transformer', ''),
    ('Pooling', '1_Pooling'),
    *(('Dense', f'{number}_Dense') for number in range(2, 2 + len(config.projection))),
  ]
  if spec.normalize:
    modules.append(('Normalize', f'{len(modules)}_Normalize'))
  write_json(
    folder / 'modules.json',
    [
      {'idx': i, 'name': str(i), 'path': path, 'type': f'sentence_transformers.models.{name}'}
      for i, (name, path) in enumerate(modules)
    ],
  )
  for _, path in modules[1:]:
    (folder / path).mkdir()
  flags = {one.flag: one.name == spec.pooling for one in pooling.every().values() if one.flag}
  write_json(
    folder / '1_Pooling' / 'config.json',
    {'word_embedding_dimension': config.hidden_size, **flags, 'include_prompt': True},
  )
  for number, dense in enumerate(config.projection):
    path = folder / f'{number + 2}_Dense'
    write_json(
      path / 'config.json',
      {
        'in_features': dense.inputs,
        'out_features': dense.outputs,
        'bias': dense.bias,
        'activation_function': dense.activation,
      },
    )
    stored = names.export(dense.tensors(), params['projection'][str(number)])
    (path / weights.WEIGHTS).write_bytes(safetensors.numpy.save(stored, {'format': 'pt'}))
  write_json(
    folder / 'sentence_bert_config.json',
    {'max_seq_length': spec.longest, 'do_lower_case': False, **tokenizer},
  )
  write_json(
    folder / sentence.MODEL,
    {
      'prompts': {'query': spec.query_prefix, 'document': spec.passage_prefix},
      'default_prompt_name': None,
      'similarity_fn_name': spec.similarity,
    },
  )


def tokenizer_keys(folder: PathLike) -> dict[str, Any]:
  """The keys of sentence_bert_config.json that the tokenizer in a folder needs."""
  return tokenizer_settings(epath.Path(folder)).kept


def _hf_config(
  config: EncoderConfig, base: Mapping[str, Any], heads: Mapping[str, 'Head']
) -> dict[str, Any]:
  """``base`` with the shape of this encoder and the class of its head."""
  family = config.family
  classes = [head_kind(name).model_class for name in heads if head_kind(name).model_class] or [
    'Model'
  ]
  if len(classes) > 1:
    raise ValueError(f'one checkpoint cannot be {" and ".join(classes)}')
  # These keys describe the earlier checkpoint.
  stored = {
    key: value
    for key, value in base.items()
    if key not in ('_name_or_path', 'torch_dtype', 'transformers_version')
  }
  for name, head in heads.items():
    stored = head_kind(name).hf_config(stored, head)
  return stored | {
    'architectures': [family.class_name + classes[0]],
    'model_type': family.model_type,
    **family.write_config(config),
    'dtype': 'float32',
  }
