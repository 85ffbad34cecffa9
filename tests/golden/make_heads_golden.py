"""Makes the golden files of the heads with PyTorch transformers.

    python tests/golden/make_heads_golden.py

needs torch and transformers; the files here were made with torch 2.13.0 and transformers 5.23.0.
Each heads_*.npz holds a random ForMaskedLM checkpoint and the layers of a Condenser head (float16,
so that they are small; exact in float32), inputs with some tokens masked, and what PyTorch gives
for them: logits, losses, hidden states, attention and gradients. Condenser is built here from
transformers' layers after its paper (Eqs. 6 to 11).
"""

import json
import pathlib

import numpy as np
import torch
import torch.nn.functional
import transformers
from transformers import DynamicCache
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaLayer

HERE = pathlib.Path(__file__).parent
LENGTHS, PADDED = (11, 7, 2), 12  # real tokens of each row, and all
MASKED = ((2, 3, 9), (1, 5), ())  # places of the masked tokens
SPLIT, PROMPT = 1, 4

# Odd on purpose: 5 heads of 4, an MLP that is no multiple of anything. The activation is none of
# GELU by the error function, where the masked-LM head of transformers has it all the same.
SHAPE = {
  'vocab_size': 43,
  'hidden_size': 20,
  'num_attention_heads': 5,
  'intermediate_size': 27,
  'num_hidden_layers': 3,
}
CONFIGS = {
  'bert': (
    {
      'max_position_embeddings': 15,
      'type_vocab_size': 2,
      'pad_token_id': 0,
      'layer_norm_eps': 1e-12,
      'hidden_act': 'gelu_new',
    },
    BertLayer,
  ),
  'roberta': (
    {
      'max_position_embeddings': 17,
      'type_vocab_size': 1,
      'pad_token_id': 1,
      'layer_norm_eps': 1e-5,
      'hidden_act': 'silu',
    },
    RobertaLayer,
  ),
  'xlm-roberta': (
    {
      'max_position_embeddings': 19,
      'type_vocab_size': 1,
      'pad_token_id': 3,
      'layer_norm_eps': 1e-5,
      'hidden_act': 'relu',
    },
    XLMRobertaLayer,
  ),
}
# One weight that the loss reaches through every layer, and the table that is both input and output.
WATCHED = ('encoder.layer.0.attention.self.value.weight', 'embeddings.word_embeddings.weight')


def randomize(module, rng):
  """Values that float16 holds exactly, larger than an initialiser's, so that attention is peaked
  and every term matters.
  """
  state = {}
  for name, tensor in sorted(module.state_dict().items()):
    if tensor.dtype != torch.float32 or '.decoder.' in name:  # the decoder is tied
      continue
    norm = 'orm.weight' in name
    value = rng.standard_normal(tuple(tensor.shape)) * (
      0.2 if norm or name.endswith('bias') else 0.35
    ) + (1.0 if norm else 0.0)
    state[name] = torch.from_numpy(value.astype(np.float16).astype(np.float32))
  found = module.load_state_dict(state, strict=False)
  assert all(
    '.decoder.' in name or not name.endswith(('weight', 'bias')) for name in found.missing_keys
  ), found
  return {name: tensor.numpy().astype(np.float16) for name, tensor in state.items()}


def make(model_type, seed):
  rng = np.random.default_rng(seed)
  settings, layer_class = CONFIGS[model_type]
  config = transformers.AutoConfig.for_model(
    model_type, **SHAPE, **settings, attn_implementation='eager'
  )
  model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation='eager').eval()
  arrays = {f'weights/{name}': value for name, value in randomize(model, rng).items()}
  head = torch.nn.ModuleList(layer_class(model.config, layer_idx=i) for i in range(2)).eval()
  arrays |= {f'condenser/layer.{name}': value for name, value in randomize(head, rng).items()}
  keep = ('model_type', *SHAPE, *settings, 'hidden_dropout_prob', 'attention_probs_dropout_prob')
  arrays['config'] = np.array(json.dumps({key: getattr(config, key) for key in keep}))

  mask = np.arange(PADDED)[None] < np.array(LENGTHS)[:, None]
  tokens = np.where(
    mask, rng.integers(5, SHAPE['vocab_size'], mask.shape), settings['pad_token_id']
  ).astype(np.int32)
  types = rng.integers(0, settings['type_vocab_size'], mask.shape).astype(np.int32)
  labels = np.full(mask.shape, -100)
  for row, places in enumerate(MASKED):
    labels[row, list(places)] = rng.integers(5, SHAPE['vocab_size'], len(places))
  arrays |= {
    'tokens': tokens,
    'mask': mask,
    'token_types': types,
    'labels': labels.astype(np.int32),
  }

  labels, seen = torch.from_numpy(labels).long(), torch.from_numpy(mask)
  inputs = {
    'input_ids': torch.from_numpy(tokens).long(),
    'token_type_ids': torch.from_numpy(types).long(),
  }
  out = model(**inputs, attention_mask=seen.long(), labels=labels, output_hidden_states=True)
  base = getattr(model, model.base_model_prefix)
  watched = {name: base.get_parameter(name) for name in WATCHED}

  def gradients(case, loss, parameters):
    for name, gradient in zip(
      parameters, torch.autograd.grad(loss, parameters.values(), retain_graph=True), strict=True
    ):
      arrays[f'{case}/gradient/{name}'] = gradient.numpy()

  early, late = out.hidden_states[SPLIT], out.hidden_states[-1]
  arrays |= {
    'mlm/logits': out.logits.detach().numpy(),
    'mlm/loss': out.loss.detach().numpy(),
    'early': early.detach().numpy(),
    'late': late.detach().numpy(),
  }
  gradients('mlm', out.loss, watched)

  states = torch.cat([late[:, :1], early[:, 1:]], dim=1)
  bias = torch.zeros(mask.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[
    :, None, None, :
  ]
  for layer in head:
    states = layer(states, bias)
  logits = (model.cls if model_type == 'bert' else model.lm_head)(states)
  loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
  arrays |= {'condenser/states': states.detach().numpy(), 'condenser/loss': loss.detach().numpy()}
  gradients(
    'condenser',
    loss,
    watched | {'layer.1.attention.self.query.weight': head[1].attention.self.query.weight},
  )

  # Attention of the first token, [L, B, N, S], without and with a prompt.
  prompt = rng.standard_normal((3, 2, PROMPT, 5, 4)).astype(np.float16)
  arrays['prompt'] = prompt
  inputs['token_type_ids'] = torch.zeros_like(inputs['token_type_ids'])
  positions = torch.arange(PADDED).expand(mask.shape)
  if model_type != 'bert':
    positions = base.embeddings.create_position_ids_from_input_ids(
      inputs['input_ids'], config.pad_token_id
    )
  # [P, N, D] a layer -> [B, N, P, D]
  batched = (
    torch.from_numpy(prompt)
    .float()
    .permute(0, 1, 3, 2, 4)[:, :, None]
    .expand(-1, -1, len(tokens), -1, -1, -1)
  )
  for case, length, cache in (
    ('attention', 0, {}),
    ('prompt_attention', PROMPT, {'past_key_values': DynamicCache(list(map(tuple, batched)))}),
  ):
    long_mask = torch.from_numpy(
      np.concatenate([np.ones((len(mask), length), bool), mask], axis=1)
    ).long()
    with torch.no_grad():
      out = base(
        **inputs, attention_mask=long_mask, position_ids=positions, output_attentions=True, **cache
      )
    arrays[case] = np.stack([layer[:, :, 0].numpy() for layer in out.attentions])
  np.savez_compressed(HERE / f'heads_{model_type}.npz', **arrays)


if __name__ == '__main__':
  for index, name in enumerate(CONFIGS):
    make(name, seed=100 + index)
  for file in sorted(HERE.glob('heads_*.npz')):
    print(file.name, file.stat().st_size)
