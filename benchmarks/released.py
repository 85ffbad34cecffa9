"""Public models against PyTorch: their config.json, with fewer and random weights.

    pip install torch transformers sentence-transformers
    python benchmarks/released.py [--only=modernbert,xlm-roberta]

A row has the keys of a public config.json: rotary bases and scalings, windows, positions, epsilons,
token ids and so on. Only sizes are smaller (`SIZES`), and the weights are
random. transformers makes the twin. The columns are the largest differences of

- `states`: of texts of 60, 17 and 1 tokens, padded on the right, in float32 from float64
- `long`: of a text of 1,101 tokens, or as many as there are positions
- `vectors`: of dprjax from those of sentence-transformers, queries and passages,
  with the pooling, modules and prompts of the public folder; empty without such files

The configs were typed in without the hub at hand, so compare one with its file before relying on a
key. Dense modules are left out. A config with keys of
remote code is read by dprjax, and the twin has the same shape in the keys of transformers. Prints
the rows of the table in docs/backbones.md.
"""

import argparse
import json
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer

from dprjax.encoding.text_encoder import Encoder
from dprjax.models import encoder, hub
from dprjax.models import family as families
from dprjax.text import vocabularies

TEXTS = ('how does sweep change lift', 'the lift of a wing grows with its angle', 'sweep')
MOST = 1101
VOCABULARY = 120
SIZES = {  # in place of the published ones
  'vocab_size': VOCABULARY,
  **dict.fromkeys(('hidden_size', 'd_model', 'dim', 'n_embd'), 48),
  **dict.fromkeys(('num_hidden_layers', 'num_layers', 'n_layers', 'n_layer'), 4),
  **dict.fromkeys(('intermediate_size', 'd_ff', 'hidden_dim', 'n_inner'), 72),
  **dict.fromkeys(('num_attention_heads', 'num_heads', 'n_heads', 'n_head'), 4),
  'num_key_value_heads': 2,
  'head_dim': 16,
  'd_kv': 12,
  'embedding_size': 24,
  'layer_types': None,
}
BERT = {
  'hidden_act': 'gelu',
  'hidden_size': 384,
  'intermediate_size': 1536,
  'layer_norm_eps': 1e-12,
  'max_position_embeddings': 512,
  'num_attention_heads': 12,
  'num_hidden_layers': 6,
  'pad_token_id': 0,
  'position_embedding_type': 'absolute',
  'type_vocab_size': 2,
  'vocab_size': 30522,
}
ROBERTA = {
  **BERT,
  'layer_norm_eps': 1e-5,
  'max_position_embeddings': 514,
  'pad_token_id': 1,
  'type_vocab_size': 1,
  'vocab_size': 50265,
}
LONG_XLMR = {**ROBERTA, 'max_position_embeddings': 8194, 'vocab_size': 250002}
LLAMA = {
  'hidden_act': 'silu',
  'hidden_size': 576,
  'intermediate_size': 1536,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'num_hidden_layers': 30,
  'rms_norm_eps': 1e-5,
  'vocab_size': 49152,
}
MISTRAL = {
  **LLAMA,
  'max_position_embeddings': 32768,
  'rope_theta': 10000.0,
  'sliding_window': 4096,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
GEMMA = {
  **LLAMA,
  'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'layer_types': ['sliding_attention', 'full_attention'],
  'query_pre_attn_scalar': 256,
  'rms_norm_eps': 1e-6,
  'rope_local_base_freq': 10000.0,
  'rope_scaling': None,
  'rope_theta': 1000000.0,
  'pad_token_id': 0,
}
MODERNBERT = {
  'attention_bias': False,
  'classifier_pooling': 'mean',
  'decoder_bias': True,
  'deterministic_flash_attn': False,
  'embedding_dropout': 0.0,
  'global_attn_every_n_layers': 3,
  'global_rope_theta': 160000.0,
  'hidden_activation': 'gelu',
  'hidden_size': 768,
  'initializer_cutoff_factor': 2.0,
  'intermediate_size': 1152,
  'layer_norm_eps': 1e-5,
  'local_attention': 128,
  'local_rope_theta': 10000.0,
  'max_position_embeddings': 8192,
  'mlp_bias': False,
  'norm_bias': False,
  'norm_eps': 1e-5,
  'num_attention_heads': 12,
  'num_hidden_layers': 22,
  'pad_token_id': 50283,
  'position_embedding_type': 'absolute',
  'reference_compile': None,
  'repad_logits_with_grad': False,
  'sparse_prediction': False,
  'vocab_size': 50368,
}
GTE = {
  **BERT,
  'layer_norm_type': 'layer_norm',
  'logn_attention_scale': False,
  'max_position_embeddings': 8192,
  'pack_qkv': True,
  'position_embedding_type': 'rope',
  'use_memory_efficient_attention': False,
}
MEAN, CLS, LAST = ({'pooling_mode': name} for name in ('mean', 'cls', 'lasttoken'))
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, str]]] = {
  # name: (model type, config.json, pooling or None, prompts)
  'all-MiniLM-L6-v2': ('bert', BERT, MEAN, {}),
  'bge-small-en-v1.5': ('bert', BERT, CLS, {}),
  'multilingual-e5-small': ('bert', {**BERT, 'vocab_size': 250037}, MEAN, {}),
  'all-roberta-large-v1': ('roberta', ROBERTA, MEAN, {}),
  'BGE-M3': ('xlm-roberta', LONG_XLMR, CLS, {}),
  'arctic-embed-l-v2.0': ('xlm-roberta', LONG_XLMR, CLS, {'query': 'query: '}),
  'sentence-camembert-base': ('camembert', {**ROBERTA, 'vocab_size': 32005}, MEAN, {}),
  'SmolLM2-135M': (
    'llama',
    {**LLAMA, 'max_position_embeddings': 8192, 'rope_theta': 100000, 'rope_scaling': None},
    None,
    {},
  ),
  'Llama-3.2-1B': (
    'llama',
    {
      **LLAMA,
      'max_position_embeddings': 131072,
      'rope_theta': 500000.0,
      'rope_scaling': {
        'factor': 32.0,
        'high_freq_factor': 4.0,
        'low_freq_factor': 1.0,
        'original_max_position_embeddings': 8192,
        'rope_type': 'llama3',
      },
    },
    None,
    {},
  ),
  'e5-mistral-7b-instruct': (
    'mistral',
    MISTRAL,
    LAST,
    {'web_search_query': 'Instruct: x\nQuery: '},
  ),
  'SFR-Embedding-Mistral': ('mistral', MISTRAL, LAST, {}),
  'gte-Qwen2-1.5B-instruct': (
    'qwen2',
    {
      **LLAMA,
      'is_causal': False,
      'max_position_embeddings': 131072,
      'max_window_layers': 21,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1000000.0,
      'sliding_window': 131072,
      'use_sliding_window': False,
    },
    LAST,
    {'query': 'Instruct: Given a web search query\nQuery: '},
  ),
  'Qwen3-Embedding-0.6B': (
    'qwen3',
    {
      **LLAMA,
      'attention_bias': False,
      'head_dim': 128,
      'max_position_embeddings': 32768,
      'max_window_layers': 28,
      'rms_norm_eps': 1e-6,
      'rope_scaling': None,
      'rope_theta': 1000000,
      'sliding_window': None,
      'use_sliding_window': False,
    },
    LAST,
    {'query': 'Instruct: Given a web search query\nQuery:', 'document': ''},
  ),
  'gemma-3-270m': (
    'gemma3_text',
    {**GEMMA, 'max_position_embeddings': 32768, 'sliding_window': 512},
    None,
    {},
  ),
  'embeddinggemma-300m': (
    'gemma3_text',
    {
      **GEMMA,
      'max_position_embeddings': 2048,
      'sliding_window': 512,
      'use_bidirectional_attention': True,
    },
    MEAN,
    {'query': 'task: search result | query: ', 'document': 'title: none | text: '},
  ),
  'EuroBERT-210m': (
    'eurobert',
    {
      **LLAMA,
      'max_position_embeddings': 8192,
      'pad_token_id': 128001,
      'rope_scaling': None,
      'rope_theta': 250000,
    },
    None,
    {},
  ),
  'ModernBERT-base': ('modernbert', MODERNBERT, None, {}),
  'gte-modernbert-base': ('modernbert', MODERNBERT, CLS, {}),
  'ettin-encoder-150m': ('modernbert', {**MODERNBERT, 'local_rope_theta': 160000.0}, None, {}),
  'granite-embedding-english-r2': (
    'modernbert',
    {**MODERNBERT, 'global_rope_theta': 80000.0},
    CLS,
    {},
  ),
  'mmBERT-base': (
    'modernbert',
    {
      **MODERNBERT,
      'local_rope_theta': 160000.0,
      'pad_token_id': 0,
      'position_embedding_type': 'sans_pos',
      'vocab_size': 256000,
    },
    None,
    {},
  ),
  'nomic-embed-text-v1.5': (
    'nomic_bert',
    {
      'activation_function': 'swiglu',
      'attn_pdrop': 0.0,
      'causal': False,
      'embd_pdrop': 0.0,
      'layer_norm_epsilon': 1e-12,
      'max_trained_positions': 2048,
      'mlp_fc1_bias': False,
      'mlp_fc2_bias': False,
      'n_embd': 768,
      'n_head': 12,
      'n_inner': 3072,
      'n_layer': 12,
      'n_positions': 8192,
      'prenorm': False,
      'qkv_proj_bias': False,
      'rotary_emb_base': 1000,
      'rotary_emb_fraction': 1.0,
      'rotary_emb_interleaved': False,
      'rotary_emb_scale_base': None,
      'rotary_scaling_factor': None,
      'type_vocab_size': 2,
      'use_rms_norm': False,
      'vocab_size': 30528,
    },
    MEAN,
    {},
  ),
  'gte-multilingual-base': (
    'new',
    {**GTE, 'pad_token_id': 1, 'rope_theta': 20000, 'type_vocab_size': 1, 'vocab_size': 250048},
    CLS,
    {},
  ),
  'arctic-embed-m-v2.0': (
    'gte',
    {**GTE, 'pad_token_id': 1, 'rope_theta': 20000, 'type_vocab_size': 1, 'vocab_size': 250048},
    CLS,
    {'query': 'query: '},
  ),
  'all-mpnet-base-v2': (
    'mpnet',
    {
      **ROBERTA,
      'relative_attention_num_buckets': 32,
      'vocab_size': 30527,
    },
    MEAN,
    {},
  ),
  'msmarco-distilbert-base-tas-b': (
    'distilbert',
    {
      'activation': 'gelu',
      'dim': 768,
      'hidden_dim': 3072,
      'max_position_embeddings': 512,
      'n_heads': 12,
      'n_layers': 6,
      'pad_token_id': 0,
      'sinusoidal_pos_embds': False,
      'vocab_size': 30522,
    },
    CLS,
    {},
  ),
  'electra-small-discriminator': ('electra', {**BERT, 'embedding_size': 128}, None, {}),
  'gtr-t5-base': (
    't5',
    {
      'd_ff': 3072,
      'd_kv': 64,
      'd_model': 768,
      'feed_forward_proj': 'relu',
      'layer_norm_epsilon': 1e-6,
      'num_heads': 12,
      'num_layers': 12,
      'pad_token_id': 0,
      'relative_attention_num_buckets': 32,
      'vocab_size': 32128,
    },
    MEAN,
    {},
  ),
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='', help='some model types, separated by commas')
  args = parser.parse_args()
  transformers.logging.set_verbosity_error()
  wanted = [name for name in args.only.split(',') if name]
  print('| `model_type` | public model | states | long | vectors |\n|---|---|---|---|---|')
  for name, (model_type, *published) in MODELS.items():
    if not wanted or model_type in wanted:
      shown = ['' if one is None else f'{one:.0e}' for one in compare(model_type, *published)]
      print(f'| `{model_type}` | {name} | {" | ".join(shown)} |', flush=True)


def compare(
  model_type: str,
  published: dict[str, Any],
  pooling: dict[str, Any] | None,
  prompts: dict[str, str],
) -> tuple[float, float, float | None]:
  """The largest differences of a model: of states, of a long text, and of vectors."""
  config = {key: value for key, value in published.items() if key not in SIZES}
  config |= {key: SIZES[key] for key in published if key in SIZES and published[key] is not None}
  for key in ('pad_token_id', 'bos_token_id', 'eos_token_id'):
    if config.get(key, 0) is not None and config.get(key, 0) >= VOCABULARY:
      config[key] = 3
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    (folder / 'published').mkdir()
    vocabularies.train_wordpiece(TEXTS, VOCABULARY, folder / 'published')
    text = json.dumps({'model_type': model_type, **config})
    (folder / 'published' / 'config.json').write_text(text)
    twin = make(folder, model_type, {k: v for k, v in config.items() if v is not None})
    if pooling is not None:
      for one in ('published', 'twin'):
        write_modules(folder / one, pooling, prompts)
    backbone, pad = hub.load_backbone(folder / 'published'), config.get('pad_token_id') or 0
    rng = np.random.default_rng(0)
    mask = np.arange(60)[None] < np.array([60, 17, 1])[:, None]
    length = min(MOST, backbone.config.max_tokens)
    found = []
    for there in (mask, np.ones((1, length), bool)):
      tokens = np.where(there, rng.integers(5, VOCABULARY, there.shape), pad)
      ours = jax.jit(encoder.encode, static_argnums=0)(
        backbone.config, backbone.params, tokens.astype(np.int32), there
      )
      with torch.no_grad():
        theirs = twin(
          input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(there).long()
        ).last_hidden_state.numpy()
      found.append(float(np.abs(np.asarray(ours) - theirs)[there].max()))
    if pooling is None:
      return found[0], found[1], None
    model, own = SentenceTransformer(str(folder / 'twin')), Encoder.load(folder / 'published')
    sides = {
      'query': model.encode_query(list(TEXTS)),
      'passage': model.encode_document(list(TEXTS)),
    }
    apart = [np.abs(own.encode(list(TEXTS), side) - made).max() for side, made in sides.items()]
    return found[0], found[1], float(max(apart))


def make(folder: pathlib.Path, model_type: str, config: dict[str, Any]) -> Any:
  """The twin in float64; writes its random weights beside config.json and into ``twin``."""
  found = families.find(model_type)
  native = {'new': 'gte'}.get(model_type, model_type)
  if native in ('gte', 'nomic_bert'):
    shape = hub.read_shape(folder / 'published')
    config = found.write_config(shape)
    config.pop('model_type', None)
  made = transformers.AutoConfig.for_model(native, **config)
  torch.manual_seed(0)
  kind = transformers.T5EncoderModel if native == 't5' else transformers.AutoModel
  twin = kind(made) if native == 't5' else kind.from_config(made, attn_implementation='eager')
  for parameter in twin.parameters():
    with torch.no_grad():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  twin.eval().save_pretrained(folder / 'twin')
  weights = (folder / 'twin' / 'model.safetensors').read_bytes()
  (folder / 'published' / 'model.safetensors').write_bytes(weights)
  for file in (folder / 'published').glob('*tokenizer*'):
    (folder / 'twin' / file.name).write_bytes(file.read_bytes())
  return twin.double()


def write_modules(folder: pathlib.Path, pooling: dict[str, Any], prompts: dict[str, str]) -> None:
  """The sentence-transformers files of a folder, with unit length."""
  kinds = {'Transformer': '', 'Pooling': '1_Pooling', 'Normalize': '2_Normalize'}
  modules = [
    {'idx': n, 'name': str(n), 'path': path, 'type': f'sentence_transformers.models.{kind}'}
    for n, (kind, path) in enumerate(kinds.items())
  ]
  for path in ('1_Pooling', '2_Normalize'):
    (folder / path).mkdir()
  width = {'embedding_dimension': SIZES['hidden_size']}
  for name, content in {
    'modules': modules,
    '1_Pooling/config': {**width, **pooling, 'include_prompt': True},
    'sentence_bert_config': {'max_seq_length': 64, 'do_lower_case': False},
    'config_sentence_transformers': {'prompts': prompts, 'similarity_fn_name': 'cosine'},
  }.items():
    (folder / f'{name}.json').write_text(json.dumps(content))


if __name__ == '__main__':
  main()
