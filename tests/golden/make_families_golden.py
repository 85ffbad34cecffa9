"""Makes the golden files of further families of encoders with PyTorch transformers.

    python tests/golden/make_families_golden.py [NAME ...]

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.24.0.
Each family_*.npz holds a random checkpoint (float16, so that it is small; exact in float32),
inputs, and the hidden states, prompt gradients and logits of heads that PyTorch gives for them. All
but those of a classifier are in float64: float32 is off by up to 8e-6, and differs between
processors. Most of these classes take no past keys and values. So an attention function here puts
those of a prompt in front, behind rotation; without a prompt it is checked against transformers.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors
import torch
import transformers
from make_encoder_golden import half, loss_weights
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

HERE = pathlib.Path(__file__).parent
PROMPT = 5
LENGTHS = (19, 6, 1)  # real tokens of each row

# Odd on purpose: 3 heads of 8, an MLP that is no multiple of anything.
SHAPE = {
  'vocab_size': 41,
  'hidden_size': 24,
  'num_hidden_layers': 4,
  'num_attention_heads': 3,
  'intermediate_size': 37,
  'max_position_embeddings': 30,
  'pad_token_id': 0,
}
SMALL = {**SHAPE, 'num_hidden_layers': 2}
MODERNBERT = {
  **SHAPE,
  'local_attention': 6,
  'rope_parameters': {
    'full_attention': {'rope_type': 'default', 'rope_theta': 1000.0},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 30.0},
  },
  **dict.fromkeys(('bos_token_id', 'cls_token_id'), 1),
  **dict.fromkeys(('eos_token_id', 'sep_token_id'), 2),
}
T5 = {
  'vocab_size': 41,
  'd_model': 24,
  'd_kv': 6,
  'd_ff': 37,
  'num_layers': 2,
  'num_heads': 3,
  'relative_attention_num_buckets': 12,
  'relative_attention_max_distance': 15,
  'pad_token_id': 0,
}
# The model type, its settings, and whether padding on the left gives the same vectors.
CONFIGS = {
  'distilbert': (
    'distilbert',
    {
      'vocab_size': 41,
      'dim': 24,
      'n_layers': 2,
      'n_heads': 3,
      'hidden_dim': 37,
      'max_position_embeddings': 30,
      'pad_token_id': 0,
      'activation': 'relu',
    },
    False,
  ),
  'electra': ('electra', {**SMALL, 'embedding_size': 16, 'hidden_act': 'gelu_new'}, False),
  'mpnet': ('mpnet', {**SMALL, 'pad_token_id': 1}, True),
  'modernbert': (
    'modernbert',
    {**MODERNBERT, 'hidden_activation': 'gelu', 'classifier_pooling': 'mean'},
    True,
  ),
  'modernbert-biases': (
    'modernbert',
    {
      **MODERNBERT,
      **dict.fromkeys(('norm_bias', 'attention_bias', 'mlp_bias', 'classifier_bias'), True),
      'decoder_bias': False,
      'hidden_activation': 'silu',
      'layer_types': ['sliding_attention', 'full_attention'] * 2,
    },
    True,
  ),
  'nomic': (
    'nomic_bert',
    {**SMALL, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 50.0}},
    True,
  ),
  'gte': (
    'gte',
    {**SMALL, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 50.0}},
    True,
  ),
  'gte-no-types': (
    'gte',
    {
      **SMALL,
      'type_vocab_size': 0,
      'hidden_act': 'gelu_new',
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 200.0},
    },
    True,
  ),
  't5': ('t5', {**T5, 'feed_forward_proj': 'relu'}, True),
  't5-gated': ('t5', {**T5, 'feed_forward_proj': 'gated-gelu', 'd_kv': 8}, True),
}


class Prefix:
  """The prompt of the forward pass that runs, and the number of the layer that comes next."""

  prompt = None
  layer = 0


def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
  """Attention over the keys and values of a prompt, which no mask or position bias touches."""
  scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
  if Prefix.prompt is not None:
    keys, values = Prefix.prompt[Prefix.layer].to(query.dtype).permute(0, 2, 1, 3)[:, None]
    key = torch.cat([keys.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([values.expand(len(value), -1, -1, -1), value], dim=2)
  Prefix.layer += 1
  scores = query @ key.transpose(2, 3) * scaling
  for bias in (position_bias, attention_mask):
    if bias is not None:
      scores = scores + torch.nn.functional.pad(bias, (key.shape[2] - bias.shape[3], 0))
  weights = scores.softmax(dim=-1)
  return (weights @ value).transpose(1, 2).contiguous(), weights


def mpnet_attention(self, hidden_states, attention_mask=None, position_bias=None, **_):
  """The attention of MPNet, which calls no attention function."""
  shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
  heads = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
  mixed, _ = attend(self, *heads, attention_mask, position_bias=position_bias)
  return (self.o(mixed.flatten(2)),)


AttentionInterface.register('prefixed', attend)
AttentionMaskInterface.register('prefixed', ALL_MASK_ATTENTION_FUNCTIONS['eager'])


def randomize(model, rng):
  """Larger than initial values, so that attention is peaked and every term matters."""
  state = {}
  for name, tensor in sorted(model.state_dict().items()):
    norm = 'norm' in name.lower() and name.endswith('weight')
    value = half(rng, tuple(tensor.shape), 0.2 if norm or name.endswith('bias') else 0.3)
    state[name] = torch.from_numpy(value + np.float32(norm)).half().float()
  model.load_state_dict(state)
  model.tie_weights()


def stored(model):
  """Tensors of a model as in its files."""
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    with safetensors.safe_open(f'{folder}/model.safetensors', 'np') as file:
      return {name: file.get_tensor(name).astype(np.float16) for name in file.keys()}  # noqa: SIM118


def run(model, tokens, mask, types, prompt=None):
  """The outputs, and the prompt as a leaf."""
  leaf = None if prompt is None else torch.from_numpy(prompt).to(model.dtype).requires_grad_()
  Prefix.prompt, Prefix.layer = leaf, 0
  kwargs = {} if types is None else {'token_type_ids': torch.from_numpy(types).long()}
  if model.config.model_type in ('modernbert', 'nomic_bert', 'gte'):  # padding is not counted
    kwargs['position_ids'] = torch.from_numpy(np.cumsum(mask, axis=1) - 1).clamp(min=0)
  found = model(
    input_ids=torch.from_numpy(tokens).long(),
    attention_mask=torch.from_numpy(mask).long(),
    output_hidden_states=True,
    **kwargs,
  )
  return found, leaf


def classify(model, config, rng, *inputs):
  """The tensors of a classifier upon the encoder of ``model``, and its logits."""
  whole = transformers.AutoModelForSequenceClassification.from_config(
    config, attn_implementation='eager'
  ).eval()
  randomize(whole, rng)
  start = whole.base_model_prefix
  encoder = {f'{start}.{key}': value for key, value in getattr(model, start).state_dict().items()}
  whole.load_state_dict(encoder, strict=False)
  found = {
    key: value
    for key, value in stored(whole).items()
    if not key.startswith(f'{start}.') or 'pooler' in key
  }
  return found, run(whole, *inputs)[0].logits.detach().numpy()


def make(name, seed):
  model_type, settings, left = CONFIGS[name]
  rng = np.random.default_rng(seed)
  config = transformers.AutoConfig.for_model(model_type, **settings)
  if model_type == 't5':
    kind = transformers.T5EncoderModel
  else:
    kind = transformers.AutoModelForMaskedLM
  build = getattr(kind, '_from_config', None) or kind.from_config
  model = build(config, attn_implementation='eager').eval()
  model.requires_grad_(False)
  randomize(model, rng)
  original = MPNetSelfAttention.forward
  mask = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
  pad = settings['pad_token_id']
  tokens = np.where(mask, rng.integers(5, settings['vocab_size'], mask.shape), pad).astype(np.int32)
  count = getattr(config, 'type_vocab_size', 0)
  types = rng.integers(0, count, mask.shape).astype(np.int32) if count else None
  written = config.to_dict()
  arrays = {
    'tokens': tokens,
    'mask': mask,
    'config': np.array(json.dumps({key: written[key] for key in ('model_type', *settings)})),
  }
  if types is not None:
    arrays['token_types'] = types
  arrays |= {f'weights/{key}': value for key, value in stored(model).items()}
  heads = config.num_attention_heads
  size = getattr(config, 'd_kv', config.hidden_size // heads)
  prompt = half(rng, (config.num_hidden_layers, 2, PROMPT, heads, size))
  arrays['prompt'] = prompt.astype(np.float16)

  def states(found):
    return (found.last_hidden_state if model_type == 't5' else found.hidden_states[-1]).detach()

  def flip(array):
    return None if array is None else array[:, ::-1].copy()

  if model_type != 't5':
    config.num_labels = 1
    head, arrays['scores'] = classify(model, config, rng, tokens, mask, types)
    arrays |= {f'classifier/{key}': value for key, value in head.items()}
  own = states(run(model, tokens, mask, types)[0])
  model.double()
  MPNetSelfAttention.forward = mpnet_attention
  model.set_attn_implementation('prefixed')
  sides = {'': (tokens, mask, types)}
  if left:
    sides['left-'] = tuple(map(flip, sides['']))
  for side, inputs in sides.items():
    found, _ = run(model, *inputs)
    arrays[f'{side}plain/hidden'] = states(found).float().numpy()
    if not side:
      np.testing.assert_allclose(states(found)[mask], own[mask], rtol=0, atol=1e-5)
      if model_type != 't5':
        arrays['logits'] = found.logits.float().numpy()
    found, leaf = run(model, *inputs, prompt)
    arrays[f'{side}prefix/hidden'] = states(found).float().numpy()
    if not side:
      hidden = found.last_hidden_state if model_type == 't5' else found.hidden_states[-1]
      there = torch.from_numpy(loss_weights(hidden) * mask[:, :, None])
      (hidden * there).sum().backward()
      arrays['gradient'] = leaf.grad.float().numpy()
  found, _ = run(model.to(torch.bfloat16), tokens, mask, types)
  arrays['bfloat16/hidden'] = states(found).float().numpy()
  MPNetSelfAttention.forward = original
  np.savez_compressed(HERE / f'family_{name}.npz', **arrays)


if __name__ == '__main__':
  for index, name in enumerate(CONFIGS):
    if not sys.argv[1:] or name in sys.argv[1:]:
      make(name, seed=index)
  for file in sorted(HERE.glob('family_*.npz')):
    print(file.name, file.stat().st_size)
