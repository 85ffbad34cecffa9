"""Makes golden files of the encoder with PyTorch transformers, which shares no code with dprjax.

    python tests/golden/make_encoder_golden.py [MINILM_DIR]

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.23.0.
Each encoder_*.npz holds random checkpoints (float16, so that they are small; exact in float32),
inputs, and the hidden states and prompt gradients that PyTorch gives for them. With the directory
of all-MiniLM-L6-v2 it also makes minilm.npz: outputs only, the weights are not stored.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import DynamicCache

HERE = pathlib.Path(__file__).parent
PROMPT = 5
LENGTHS = (9, 6, 1)  # real tokens of each row

# Odd on purpose: 3 heads of 8, an MLP that is no multiple of anything, a vocabulary and positions
# that no axis shares.
SHAPE = {'vocab_size': 41, 'hidden_size': 24, 'num_attention_heads': 3, 'intermediate_size': 37}
CONFIGS = {
  'bert': {
    'max_position_embeddings': 15,
    'type_vocab_size': 2,
    'pad_token_id': 0,
    'layer_norm_eps': 1e-12,
    'hidden_act': 'gelu',
  },
  'roberta': {
    'max_position_embeddings': 17,
    'type_vocab_size': 1,
    'pad_token_id': 1,
    'layer_norm_eps': 1e-5,
    'hidden_act': 'gelu_new',
  },
  'xlm-roberta': {
    'max_position_embeddings': 19,
    'type_vocab_size': 1,
    'pad_token_id': 3,
    'layer_norm_eps': 1e-5,
    'hidden_act': 'relu',
  },
}
SENTENCES = (
  'Prompts are key and value vectors that every layer attends to.',
  'What is the capital of France?',
  'Dense retrieval maps questions and passages into one space, where near means relevant; the '
  'index then finds the nearest.',
)


def half(rng, shape, scale=1.0):
  """Normal values that float16 holds exactly, as float32."""
  return (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)


def randomize(model, rng):
  """Larger than initial values, so that attention is peaked and every term matters."""
  state = {}
  for name, tensor in sorted(model.state_dict().items()):
    if tensor.dtype != torch.float32:
      continue
    scale, offset = (
      (0.2, 1.0)
      if name.endswith('LayerNorm.weight')
      else (0.2, 0.0)
      if name.endswith('bias')
      else (0.35, 0.0)
    )
    state[name] = (
      torch.from_numpy(half(rng, tuple(tensor.shape), scale) + np.float32(offset)).half().float()
    )
  model.load_state_dict(state)
  return {name: tensor.numpy().astype(np.float16) for name, tensor in state.items()}


def load_encoder(model_type, layers):
  """The frozen encoder with the weights of encoder_*.npz, and the other content of that file."""
  with np.load(HERE / f'encoder_{model_type}.npz') as golden:
    stored = dict(golden)
  settings = json.loads(stored[f'{layers}/config'].item())
  config = transformers.AutoConfig.for_model(
    settings.pop('model_type'), **settings, attn_implementation='eager'
  )
  model = transformers.AutoModel.from_config(config, add_pooling_layer=False).eval()
  model.requires_grad_(False)
  start = f'{layers}/weights/'
  weights = {
    name.removeprefix(start): torch.from_numpy(value.astype(np.float32))
    for name, value in stored.items()
    if name.startswith(start)
  }
  missing, unexpected = model.load_state_dict(weights, strict=False)
  assert not unexpected and all(not name.endswith(('weight', 'bias')) for name in missing)
  return model, stored


def loss_weights(hidden):
  """The scalar of the gradient is sum(hidden * these) over real tokens, as in the tests."""
  return (
    np.cos(np.arange(np.prod(hidden.shape), dtype=np.float32))
    .reshape(hidden.shape)
    .astype(np.float32)
  )


def run(model, config, tokens, mask, types, prompt, shift):
  """Hidden states as numpy, and the gradient of the loss with respect to the prompt (None without
  one).
  """
  tokens, types, length = torch.from_numpy(tokens).long(), torch.from_numpy(types).long(), 0
  kwargs, leaf = {}, None
  positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
  if config.model_type != 'bert':
    positions = model.embeddings.create_position_ids_from_input_ids(tokens, config.pad_token_id)
  if prompt is not None:
    leaf = torch.from_numpy(prompt).requires_grad_()
    length = prompt.shape[2]
    # [P, N, D] a layer -> [B, N, P, D]. A cache is written to by the model: a new one each call.
    batched = leaf.permute(0, 1, 3, 2, 4)[:, :, None].expand(-1, -1, len(tokens), -1, -1, -1)
    kwargs['past_key_values'] = DynamicCache([(keys, values) for keys, values in batched])
  if shift:
    positions = None  # of transformers: it adds the length of the cache
  full_mask = torch.from_numpy(
    np.concatenate([np.ones((len(mask), length), bool), mask], axis=1)
  ).long()
  hidden = model(
    input_ids=tokens,
    attention_mask=full_mask,
    token_type_ids=types,
    position_ids=positions,
    **kwargs,
  ).last_hidden_state
  if leaf is None:
    return hidden.detach().numpy(), None
  loss = (hidden * torch.from_numpy(loss_weights(hidden) * mask[:, :, None])).sum()
  loss.backward()
  return hidden.detach().numpy(), leaf.grad.numpy()


def make_random(model_type, seed):
  rng = np.random.default_rng(seed)
  arrays = {}
  settings = CONFIGS[model_type]
  pad = settings['pad_token_id']
  mask = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
  tokens = np.where(mask, rng.integers(5, SHAPE['vocab_size'], mask.shape), pad).astype(np.int32)
  types = rng.integers(0, settings['type_vocab_size'], mask.shape).astype(np.int32)
  arrays |= {'tokens': tokens, 'mask': mask, 'token_types': types}
  for layers in (1, 3):
    config = transformers.AutoConfig.for_model(
      model_type, **SHAPE, **settings, num_hidden_layers=layers, attn_implementation='eager'
    )
    model = transformers.AutoModel.from_config(config, add_pooling_layer=False).eval()
    model.requires_grad_(False)
    weights = randomize(model, rng)
    prompt = half(rng, (layers, 2, PROMPT, 3, 8))
    keep = (
      'model_type',
      *SHAPE,
      *settings,
      'num_hidden_layers',
      'hidden_dropout_prob',
      'attention_probs_dropout_prob',
    )
    arrays[f'{layers}/config'] = np.array(json.dumps({key: getattr(config, key) for key in keep}))
    arrays |= {f'{layers}/weights/{name}': value for name, value in weights.items()}
    arrays[f'{layers}/prompt'] = prompt.astype(np.float16)
    for case, args in (
      ('plain', (None, False)),
      ('prefix', (prompt, False)),
      ('shifted', (prompt, True)),
    ):
      hidden, gradient = run(model, config, tokens, mask, types, *args)
      arrays[f'{layers}/{case}/hidden'] = hidden
      if gradient is not None:
        arrays[f'{layers}/{case}/gradient'] = gradient
  np.savez_compressed(HERE / f'encoder_{model_type}.npz', **arrays)


def make_minilm(folder):
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  config = transformers.AutoConfig.from_pretrained(folder, attn_implementation='eager')
  model = transformers.AutoModel.from_pretrained(folder, config=config).eval()
  model.requires_grad_(False)
  batch = tokenizer(list(SENTENCES), padding='longest', truncation=True, return_tensors='np')
  tokens, mask = batch['input_ids'].astype(np.int32), batch['attention_mask'].astype(bool)
  prompt = half(np.random.default_rng(7), (6, 2, 3, 12, 32), 0.5)
  arrays = {
    'sentences': np.array(SENTENCES),
    'tokens': tokens,
    'mask': mask,
    'prompt': prompt.astype(np.float16),
  }
  for case, args in (
    ('plain', (None, False)),
    ('prefix', (prompt, False)),
    ('shifted', (prompt, True)),
  ):
    hidden, gradient = run(model, config, tokens, mask, np.zeros_like(tokens), *args)
    arrays[f'{case}/hidden'] = hidden[:, :, ::16]
    # Mean pooling, unit length, as its sentence-transformers files say.
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    arrays[f'{case}/embedding'] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    if gradient is not None:
      arrays[f'{case}/gradient'] = gradient[..., ::3, ::4]
  np.savez_compressed(HERE / 'minilm.npz', **arrays)


if __name__ == '__main__':
  torch.manual_seed(0)
  for index, name in enumerate(CONFIGS):
    make_random(name, seed=index)
  if len(sys.argv) > 1:
    make_minilm(sys.argv[1])
  for file in sorted(HERE.glob('*.npz')):
    print(file.name, file.stat().st_size)
