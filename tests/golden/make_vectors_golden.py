"""Makes the golden files of vectors in place of words, with PyTorch transformers.

    python tests/golden/make_vectors_golden.py

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.23.0.
The weights are those of encoder_*.npz, with three layers. Each vectors_*.npz holds tokens, some of
which are rows of a table of vectors; the table; and for n = 0, 1 and 2 fixed layers the hidden
states and the table's gradients. Where n is above 0, hooks overwrite the inputs of the first n
layers at these tokens.
"""

import pathlib

import numpy as np
import torch
from make_encoder_golden import half, load_encoder, loss_weights

HERE = pathlib.Path(__file__).parent
VECTORS, LAYERS = 7, 3


def run(model, config, tokens, mask, types, table, fixed_layers):
  """Hidden states, and the gradient of the loss with respect to the table."""
  leaf = torch.from_numpy(table).requires_grad_()
  ids = torch.from_numpy(tokens).long()
  places = ids >= config.vocab_size
  rows = leaf[(ids - config.vocab_size).clamp(min=0)]
  words = model.embeddings.word_embeddings(ids.clamp(max=config.vocab_size - 1))
  positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
  if config.model_type != 'bert':
    positions = model.embeddings.create_position_ids_from_input_ids(ids, config.pad_token_id)

  def overwrite(module, args):
    return (torch.where(places[:, :, None], rows, args[0]), *args[1:])

  hooks = [
    layer.register_forward_pre_hook(overwrite) for layer in model.encoder.layer[:fixed_layers]
  ]
  hidden = model(
    inputs_embeds=torch.where(places[:, :, None], rows, words),
    attention_mask=torch.from_numpy(mask).long(),
    token_type_ids=torch.from_numpy(types).long(),
    position_ids=positions,
  ).last_hidden_state
  for hook in hooks:
    hook.remove()
  (hidden * torch.from_numpy(loss_weights(hidden) * mask[:, :, None])).sum().backward()
  return hidden.detach().numpy(), leaf.grad.numpy()


def make(model_type, seed):
  rng = np.random.default_rng(seed)
  model, stored = load_encoder(model_type, LAYERS)
  config = model.config
  # In each row vectors before, between and behind words; the rows use different ranges.
  tokens, mask, types = stored['tokens'].copy(), stored['mask'], stored['token_types']
  tokens[0, [1, 2, 6, 8]] = config.vocab_size + np.array([0, 1, 2, 0])
  tokens[1, [1, 2, 4]] = config.vocab_size + np.array([5, 6, 3])
  table = half(rng, (VECTORS, config.hidden_size))
  arrays = {'tokens': tokens, 'vectors': table.astype(np.float16)}
  for fixed_layers in (0, LAYERS // 2, LAYERS - 1):
    hidden, gradient = run(model, config, tokens, mask, types, table, fixed_layers)
    arrays |= {f'{fixed_layers}/hidden': hidden, f'{fixed_layers}/gradient': gradient}
  np.savez_compressed(HERE / f'vectors_{model_type}.npz', **arrays)


if __name__ == '__main__':
  for seed, model_type in enumerate(('bert', 'roberta')):
    make(model_type, seed)
