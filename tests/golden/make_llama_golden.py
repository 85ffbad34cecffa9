"""Makes the golden files of Llama and its relatives with PyTorch transformers.

    python tests/golden/make_llama_golden.py

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.24.0.
Each llama_*.npz holds a random checkpoint (float16, so that it is small; exact in float32), inputs,
and the hidden states and prompt gradients that PyTorch gives for them in float64, whose float32 is
off by up to 7e-6 and differs between processors: padding on the right and on the left, without a
prompt, and with one as past keys and values. Where there is a prompt, the masks are made here: in
transformers' own ones the prompt falls out of a window.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from make_encoder_golden import half, loss_weights
from transformers import DynamicCache

HERE = pathlib.Path(__file__).parent
PROMPT = 5
LENGTHS = (13, 6, 1)  # real tokens of each row

# Odd on purpose: heads of 8 where the hidden size over the heads is 6.
SHAPE = {
  'vocab_size': 41,
  'hidden_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'intermediate_size': 37,
  'max_position_embeddings': 64,
  'pad_token_id': 0,
  'rms_norm_eps': 1e-5,
}
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 48,
}
LONGROPE = {
  'rope_type': 'longrope',
  'short_factor': [1.0, 1.25, 1.5, 2.0],
  'long_factor': [1.0, 2.0, 4.0, 8.0],
  'original_max_position_embeddings': 20,
}
GEMMA = {
  'query_pre_attn_scalar': 11,
  'sliding_window': 4,
  'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
  'rope_parameters': {
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 30.0},
    'full_attention': {'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 2.0},
  },
}
CONFIGS = {
  'llama': ('llama', {'rope_parameters': {'rope_theta': 100.0, **LLAMA3}}),
  'llama-yarn': (
    'llama',
    {
      'attention_bias': True,
      'mlp_bias': True,
      'hidden_act': 'gelu',
      'num_key_value_heads': 4,
      'rope_parameters': {'rope_theta': 100.0, **YARN},
    },
  ),
  'mistral': (
    'mistral',
    {
      'sliding_window': 4,
      'rope_parameters': {'rope_theta': 100.0, 'rope_type': 'linear', 'factor': 2.0},
    },
  ),
  # transformers lets it see 3 to each side.
  'mistral-both': (
    'mistral',
    {
      'is_causal': False,
      'sliding_window': 3,
      'rope_parameters': {'rope_theta': 100.0, 'rope_type': 'default'},
    },
  ),
  'qwen2': (
    'qwen2',
    {
      'head_dim': 6,
      'use_sliding_window': True,
      'sliding_window': 3,
      'max_window_layers': 1,
      'rope_parameters': {'rope_theta': 1000.0, 'rope_type': 'default'},
    },
  ),
  'qwen3': ('qwen3', {'rope_parameters': {'rope_theta': 1000.0, 'rope_type': 'default'}}),
  'gemma3': ('gemma3_text', GEMMA),
  'embeddinggemma': (
    'gemma3_text',
    # transformers reads 6 as 4 tokens: the own one and 3 to each side.
    {**GEMMA, 'use_bidirectional_attention': True, 'sliding_window': 6},
  ),
  'eurobert': (
    'eurobert',
    {'rope_parameters': {'rope_theta': 1000.0, 'rope_type': 'default'}},
  ),
  'llama-longrope': ('llama', {'rope_parameters': {'rope_theta': 100.0, **LONGROPE}}),
}


def randomize(model, rng):
  """Larger than initial values, so that attention is peaked and every term matters."""
  state = {}
  for name, tensor in sorted(model.state_dict().items()):
    norm = name.endswith('norm.weight')
    offset = float(norm and model.config.model_type != 'gemma3_text')
    value = half(rng, tuple(tensor.shape), 0.2 if norm or name.endswith('bias') else 0.25)
    state[name] = torch.from_numpy(value + np.float32(offset)).half().float()
  model.load_state_dict(state)
  return {name: tensor.numpy().astype(np.float16) for name, tensor in state.items()}


def pad_left(rows, mask):
  """Rows that are padded on the right, padded on the left."""
  return np.stack(
    [np.roll(row, len(row) - there.sum()) for row, there in zip(rows, mask, strict=True)]
  )


def masks(config, mask, length, dtype):
  """[B, 1, T, P + T] of each kind of layer: every token sees the keys of a prompt."""
  rows, width = mask.shape
  distance = np.arange(width)[None] - np.arange(width)[:, None]  # of a key from a query
  both = config.model_type == 'eurobert' or not getattr(config, 'is_causal', True)
  both |= getattr(config, 'use_bidirectional_attention', False)
  whole = np.ones_like(distance, bool) if both else distance <= 0
  window = getattr(config, 'sliding_window', None) or len(distance)
  window += not getattr(config, 'is_causal', True)
  near = whole & (np.abs(distance) < window)
  found = {}
  for kind, seen in (('full_attention', whole), ('sliding_attention', near)):
    seen = seen[None] & mask[:, None]
    seen = np.concatenate([np.ones((rows, width, length), bool), seen], axis=2)
    hidden = torch.tensor(torch.finfo(torch.float32).min, dtype=dtype)
    found[kind] = torch.where(torch.from_numpy(seen), torch.zeros_like(hidden), hidden)[:, None]
  if config.model_type == 'mistral':
    return found['sliding_attention']
  if getattr(config, 'layer_types', None) is None:
    return found['full_attention']
  return found


def run(model, config, tokens, mask, prompt=None, shift=0):
  """Hidden states as numpy, and the gradient of the loss with respect to the prompt."""
  positions = torch.from_numpy(np.cumsum(mask, axis=1) - 1 + shift).clamp(min=0)
  kwargs, leaf = {'attention_mask': torch.from_numpy(mask).long()}, None
  if prompt is not None:
    leaf = torch.from_numpy(prompt).to(model.dtype).requires_grad_()
    # [P, K, D] a layer -> [B, K, P, D]. A cache is written to by the model: a new one each call.
    batched = leaf.permute(0, 1, 3, 2, 4)[:, :, None].expand(-1, -1, len(tokens), -1, -1, -1)
    kwargs['past_key_values'] = DynamicCache([(keys, values) for keys, values in batched])
    kwargs['attention_mask'] = masks(config, mask, prompt.shape[2], model.dtype)
  hidden = model(
    input_ids=torch.from_numpy(tokens).long(), position_ids=positions, **kwargs
  ).last_hidden_state
  if leaf is None:
    return hidden.detach().float().numpy(), None
  (hidden * torch.from_numpy(loss_weights(hidden) * mask[:, :, None])).sum().backward()
  return hidden.detach().float().numpy(), leaf.grad.float().numpy()


def make(name, seed):
  model_type, settings = CONFIGS[name]
  rng = np.random.default_rng(seed)
  config = transformers.AutoConfig.for_model(
    model_type, **SHAPE | settings, attn_implementation='sdpa'
  )
  model = transformers.AutoModel.from_config(config).eval().requires_grad_(False)
  mask = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
  tokens = np.where(mask, rng.integers(5, SHAPE['vocab_size'], mask.shape), 0).astype(np.int32)
  written = config.to_dict()
  arrays = {
    'tokens': tokens,
    'mask': mask,
    'config': np.array(
      json.dumps({key: written[key] for key in ('model_type', *(SHAPE | settings))})
    ),
  }
  arrays |= {f'weights/{key}': value for key, value in randomize(model, rng).items()}
  prompt = half(
    rng, (3, 2, PROMPT, config.num_key_value_heads, config.head_dim if model_type != 'qwen2' else 6)
  )
  arrays['prompt'] = prompt.astype(np.float16)
  model.double()
  left = tuple(pad_left(rows, mask) for rows in (tokens, mask))
  for case, args in (
    ('plain', (tokens, mask)),
    ('left', left),
    ('prefix', (tokens, mask, prompt)),
    ('left-prefix', (*left, prompt)),
    ('shifted', (tokens, mask, prompt, PROMPT)),
  ):
    hidden, gradient = run(model, config, *args)
    arrays[f'{case}/hidden'] = hidden
    if case == 'prefix':
      arrays[f'{case}/gradient'] = gradient
  model.set_attn_implementation('eager')
  arrays['bfloat16/hidden'] = run(model.to(torch.bfloat16), config, tokens, mask)[0]
  np.savez_compressed(HERE / f'llama_{name}.npz', **arrays)


if __name__ == '__main__':
  for index, name in enumerate(CONFIGS):
    make(name, seed=index)
  for file in sorted(HERE.glob('llama_*.npz')):
    print(file.name, file.stat().st_size)
