"""Makes the golden files of sequence classifiers with PyTorch transformers.

    python tests/golden/make_classifier_golden.py

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.23.0.
Each classifier_*.npz holds one random encoder with a ForSequenceClassification head of 1 label and
one of 2 (float16, so that they are small; exact in float32), a padded batch of pairs, and the
logits that PyTorch gives for them, with the token types that transformers gives the family and
without.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
QUERIES, PASSAGES = (4, 1, 2, 3), (5, 3, 1, 0)  # tokens of the texts of each row

# Odd on purpose: 3 heads of 6, an MLP that is no multiple of anything.
SHAPE = {
  'vocab_size': 43,
  'hidden_size': 18,
  'num_attention_heads': 3,
  'intermediate_size': 29,
  'num_hidden_layers': 2,
}
CONFIGS = {
  'bert': {
    'max_position_embeddings': 17,
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
    'hidden_act': 'gelu',
  },
  'xlm-roberta': {
    'max_position_embeddings': 19,
    'type_vocab_size': 1,
    'pad_token_id': 3,
    'layer_norm_eps': 1e-5,
    'hidden_act': 'gelu_new',
  },
}
# Whatever these numbers stand for: no token is special to a model.
CLS, SEP = 4, 5


def randomize(model, rng, known):
  """Values that float16 holds exactly, larger than an initialiser's; those of ``known`` where it
  has them.
  """
  state = {}
  for name, tensor in sorted(model.state_dict().items()):
    if tensor.dtype != torch.float32:
      continue
    norm = name.endswith('LayerNorm.weight')
    value = rng.standard_normal(tuple(tensor.shape)) * (
      0.2 if norm or name.endswith('bias') else 0.35
    ) + (1.0 if norm else 0.0)
    state[name] = torch.from_numpy(known.get(name, value).astype(np.float16).astype(np.float32))
  model.load_state_dict(state)
  return {name: tensor.numpy().astype(np.float16) for name, tensor in state.items()}


def make(model_type, seed):
  rng = np.random.default_rng(seed)
  settings = CONFIGS[model_type]
  between = 1 if model_type == 'bert' else 2
  length = (
    max(q + p for q, p in zip(QUERIES, PASSAGES, strict=True)) + 2 + between + 1
  )  # one more: no row fills the batch
  tokens = np.full((len(QUERIES), length), settings['pad_token_id'], np.int32)
  types, mask, starts = np.zeros_like(tokens), np.zeros(tokens.shape, bool), []
  for row, (q, p) in enumerate(zip(QUERIES, PASSAGES, strict=True)):
    pair = [CLS, *rng.integers(6, 43, q), *[SEP] * between, *rng.integers(6, 43, p), SEP]
    tokens[row, : len(pair)], mask[row, : len(pair)] = pair, True
    starts.append(1 + q + between)
    types[row, starts[-1] : len(pair)] = 1
  arrays = {'tokens': tokens, 'mask': mask, 'starts': np.array(starts, np.int32)}
  shared = {}
  for labels in (1, 2):
    config = transformers.AutoConfig.for_model(
      model_type, **SHAPE, **settings, num_labels=labels, attn_implementation='eager'
    )
    model = transformers.AutoModelForSequenceClassification.from_config(
      config, attn_implementation='eager'
    ).eval()
    made = randomize(model, rng, shared)
    # Only the last layer differs; the rest is stored once.
    shared = {
      name: value
      for name, value in made.items()
      if not name.startswith(('classifier.weight', 'classifier.bias', 'classifier.out_proj'))
    }
    arrays |= {
      f'{"both" if name in shared else labels}/weights/{name}': value
      for name, value in made.items()
    }
    keep = (
      'model_type',
      *SHAPE,
      *settings,
      'hidden_dropout_prob',
      'attention_probs_dropout_prob',
      'id2label',
    )
    arrays[f'{labels}/config'] = np.array(json.dumps({key: getattr(config, key) for key in keep}))
    inputs = {
      'input_ids': torch.from_numpy(tokens).long(),
      'attention_mask': torch.from_numpy(mask).long(),
    }
    with torch.no_grad():
      arrays[f'{labels}/untyped'] = model(**inputs).logits.numpy()
      if settings['type_vocab_size'] > 1:
        arrays[f'{labels}/typed'] = model(
          **inputs, token_type_ids=torch.from_numpy(types).long()
        ).logits.numpy()
  np.savez_compressed(HERE / f'classifier_{model_type}.npz', **arrays)


if __name__ == '__main__':
  for index, name in enumerate(CONFIGS):
    make(name, seed=200 + index)
  for file in sorted(HERE.glob('classifier_*.npz')):
    print(file.name, file.stat().st_size)
