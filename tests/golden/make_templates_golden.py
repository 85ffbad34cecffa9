"""Makes the golden file of prompt encoders and templates, with PyTorch.

    python tests/golden/make_templates_golden.py

needs torch and transformers; the file here was made with torch 2.13.0 and transformers 5.23.0.
The encoders' weights are those of encoder_*.npz, with three layers. prompt_templates.npz holds the
prompt encoders (Embedding, nn.LSTM, Linear, ReLU, Linear) of two tasks and the vectors that they
give; and for BERT and RoBERTa a padded batch of both tasks' texts in the template
``[CLS] P1 text P2 [MASK] [SEP]``, and for n = 0, 1 and 2 fixed layers the hidden states and the
prompt encoders' gradients. Where n is above 0, hooks overwrite the inputs of the first n layers at
the prompts' places.
"""

import pathlib

import numpy as np
import torch
from make_encoder_golden import half, load_encoder, loss_weights

HERE = pathlib.Path(__file__).parent
LAYERS, WIDTH = 3, 24
CLS, SEP, MASK = 5, 2, 4
# Two tasks whose slots differ in length.
LENGTHS = {'qa/P1': 2, 'qa/P2': 3, 'dialogue/P1': 1, 'dialogue/P2': 2}
# Texts; one holds the mask id, which is a word like others there. The second task comes first.
TEXTS = (('dialogue', (7, 8, MASK, 9)), ('qa', (10, 11, 12)), ('qa', (13,)), ('dialogue', (14, 7)))


class PromptEncoder(torch.nn.Module):
  def __init__(self, length):
    super().__init__()
    self.embedding = torch.nn.Embedding(length, WIDTH)
    self.lstm = torch.nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
    self.mlp = torch.nn.Sequential(
      torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )

  def forward(self):
    return self.mlp(self.lstm(self.embedding.weight[None])[0])[0]


def run(model, encoders, fixed_layers):
  """Hidden states of the padded batch, and its mask; differentiable."""
  config = model.config
  vectors = {name: encoder() for name, encoder in encoders.items()}
  words = model.embeddings.word_embeddings.weight
  rows, places, ids = [], [], []
  for task, text in TEXTS:
    first, second = vectors[f'{task}/P1'], vectors[f'{task}/P2']
    rows.append(torch.cat([words[[CLS]], first, words[list(text)], second, words[[MASK, SEP]]]))
    places.append([0, *[1] * len(first), *[0] * len(text), *[1] * len(second), 0, 0])
    # Any ids but that of padding: positions of RoBERTa come from them.
    ids.append([CLS] * len(places[-1]))
  length = max(map(len, ids))
  pad = config.pad_token_id
  ids = torch.tensor([row + [pad] * (length - len(row)) for row in ids])
  places = torch.tensor([row + [0] * (length - len(row)) for row in places]).bool()[:, :, None]
  mask = ids != pad
  inputs = torch.stack([torch.cat([row, words[[pad] * (length - len(row))]]) for row in rows])
  raw = torch.where(places, inputs, torch.zeros(()))
  positions = torch.arange(length).expand(ids.shape)
  if config.model_type != 'bert':
    positions = model.embeddings.create_position_ids_from_input_ids(ids, pad)

  def overwrite(module, args):
    return (torch.where(places, raw, args[0]), *args[1:])

  hooks = [
    layer.register_forward_pre_hook(overwrite) for layer in model.encoder.layer[:fixed_layers]
  ]
  hidden = model(
    inputs_embeds=inputs,
    attention_mask=mask.long(),
    token_type_ids=torch.zeros_like(ids),
    position_ids=positions,
  ).last_hidden_state
  for hook in hooks:
    hook.remove()
  return hidden, mask


def main():
  rng = np.random.default_rng(50)
  encoders, arrays = {}, {}
  for name, length in LENGTHS.items():
    encoders[name] = PromptEncoder(length)
    state = {
      key: torch.from_numpy(half(rng, tuple(tensor.shape), 0.4))
      for key, tensor in sorted(encoders[name].state_dict().items())
    }
    encoders[name].load_state_dict(state)
    for key, tensor in state.items():
      arrays[f'weights/{name}/{key}'] = tensor.numpy().astype(np.float16)
    arrays[f'vectors/{name}'] = encoders[name]().detach().numpy()
  for model_type in ('bert', 'roberta'):
    model, _ = load_encoder(model_type, LAYERS)
    for fixed_layers in (0, LAYERS // 2, LAYERS - 1):
      hidden, mask = run(model, encoders, fixed_layers)
      loss = (hidden * torch.from_numpy(loss_weights(hidden) * mask.numpy()[:, :, None])).sum()
      case = f'{model_type}/{fixed_layers}'
      arrays |= {f'{model_type}/mask': mask.numpy(), f'{case}/hidden': hidden.detach().numpy()}
      for name, encoder in encoders.items():
        parameters = dict(encoder.named_parameters())
        gradients = torch.autograd.grad(loss, parameters.values(), retain_graph=True)
        for key, gradient in zip(parameters, gradients, strict=True):
          # All vectors of one slot once; else those that have passed through all parts.
          if (name, fixed_layers) == ('qa/P2', 1) or key == 'embedding.weight':
            arrays[f'{case}/gradient/{name}/{key}'] = gradient.numpy()
  np.savez_compressed(HERE / 'prompt_templates.npz', **arrays)
  print((HERE / 'prompt_templates.npz').stat().st_size)


if __name__ == '__main__':
  main()
