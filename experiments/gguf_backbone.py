"""Makes a backbone folder from a GGUF file: config.json, model.safetensors, tokenizer.json.

    pip install gguf
    python experiments/gguf_backbone.py MODEL.gguf FOLDER
    python -m dprjax.encode --backbone=FOLDER ...

The weights are dequantised to float32, so the folder is larger than the file. It reads the
architectures llama and gemma3, and tokenizers of byte pairs (``gpt2``, as in SmolLM2); another
tokenizer gives no tokenizer.json. A text ends with the end-of-sequence token, whose state the
pooling ``lasttoken`` takes.
"""

import argparse
import json
import pathlib
import re

import numpy as np
import safetensors.numpy

# Names of tensors in GGUF and in transformers.
_TENSORS = {
  'token_embd': 'embed_tokens',
  'output_norm': 'norm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'attn_norm': 'input_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_NORMS = {
  'llama': {'ffn_norm': 'post_attention_layernorm'},
  'gemma3': {
    'post_attention_norm': 'post_attention_layernorm',
    'ffn_norm': 'pre_feedforward_layernorm',
    'post_ffw_norm': 'post_feedforward_layernorm',
  },
}
_CONTROL = 3  # the type of special tokens


def read(path):
  """config.json, the tensors under their names in transformers, and tokenizer.json or None."""
  import gguf

  reader = gguf.GGUFReader(path)
  fields = fields_of(reader)
  kind = fields['general.architecture']
  if kind not in _NORMS:
    raise SystemExit(f'{path}: the architecture {kind!r} is none of {", ".join(_NORMS)}')
  tensors = {}
  for tensor in reader.tensors:
    place, _, name = tensor.name.removesuffix('.weight').rpartition('.')
    name = (_TENSORS | _NORMS[kind])[name]
    place = re.sub(r'^blk\.', 'layers.', place)
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {'self_attn.q_proj': 'head_count', 'self_attn.k_proj': 'head_count_kv'}
    if kind == 'llama' and name in heads:
      array = halves(array, fields[f'llama.attention.{heads[name]}'])
    if kind == 'gemma3' and name.endswith('norm'):
      array -= 1  # the file holds 1 and the scale
    tensors[f'{place}.{name}.weight'.lstrip('.')] = array
  return config_of(kind, fields, tensors), tensors, tokenizer_of(fields)


def fields_of(reader):
  """The fields of the file, by name."""
  return {name: field.contents() for name, field in reader.fields.items()}


def vocabulary(path):
  """The tokens of the file, by their numbers."""
  import gguf

  return fields_of(gguf.GGUFReader(path))['tokenizer.ggml.tokens']


def halves(array, heads):
  """Rows whose rotary pairs are neighbours, with the pairs in the two halves of each head."""
  rows, width = array.shape
  return np.ascontiguousarray(
    array.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
  )


def config_of(kind, fields, tensors):
  """config.json."""

  def find(name, default=None):
    return fields.get(f'{kind}.{name}', default)

  vocabulary, width = tensors['embed_tokens.weight'].shape
  heads = find('attention.head_count')
  config = {
    'model_type': 'llama',
    'architectures': ['LlamaModel'],
    'vocab_size': vocabulary,
    'hidden_size': width,
    'num_hidden_layers': find('block_count'),
    'num_attention_heads': heads,
    'num_key_value_heads': find('attention.head_count_kv', heads),
    'head_dim': find('attention.key_length', width // heads),
    'intermediate_size': find('feed_forward_length'),
    'max_position_embeddings': find('context_length'),
    'rms_norm_eps': round(find('attention.layer_norm_rms_epsilon'), 9),
    'rope_theta': find('rope.freq_base'),
    'hidden_act': 'silu',
    'tie_word_embeddings': True,
    'bos_token_id': fields.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': fields.get('tokenizer.ggml.eos_token_id'),
    'pad_token_id': fields.get('tokenizer.ggml.padding_token_id'),
  }
  if kind == 'gemma3':
    config |= {
      'model_type': 'gemma3_text',
      'architectures': ['Gemma3TextModel'],
      'hidden_activation': 'gelu_pytorch_tanh',
      'query_pre_attn_scalar': config['head_dim'],
      'sliding_window': find('attention.sliding_window'),
      'rope_local_base_freq': 10000.0,
      'sliding_window_pattern': 6,
    }
  return config


def tokenizer_of(fields):
  """tokenizer.json of byte pairs, or None for another kind."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

  def find(name, default=None):
    return fields.get(f'tokenizer.ggml.{name}', default)

  if find('model') != 'gpt2' or find('pre') != 'smollm':
    return None
  tokens, merges = find('tokens'), [tuple(merge.split(' ')) for merge in find('merges')]
  vocabulary = {token: number for number, token in enumerate(tokens)}
  tokenizer = Tokenizer(models.BPE(vocabulary, merges))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  special = [
    token for token, type_ in zip(tokens, find('token_type'), strict=True) if type_ == _CONTROL
  ]
  tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
  end = find('eos_token_id')
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f'$A {tokens[end]}',
    pair=f'$A {tokens[end]} $B:1 {tokens[end]}:1',
    special_tokens=[(tokens[end], end)],
  )
  return tokenizer


def write(path, folder):
  """Makes the folder."""
  config, tensors, tokenizer = read(path)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(config, indent=2))
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})
  if tokenizer is not None:
    tokenizer.save(str(folder / 'tokenizer.json'))
    tokens = {
      name: tokenizer.id_to_token(config[f'{name}_id'])
      for name in ('bos_token', 'eos_token', 'pad_token')
    }
    (folder / 'tokenizer_config.json').write_text(
      json.dumps(
        {
          'tokenizer_class': 'PreTrainedTokenizerFast',
          'model_max_length': config['max_position_embeddings'],
          **tokens,
        }
      )
    )


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file')
  parser.add_argument('folder')
  arguments = parser.parse_args()
  write(arguments.file, arguments.folder)
