"""Makes lora_models.npz with PyTorch, transformers and peft, from two other golden files.

    python tests/golden/make_lora_golden.py

Made with torch 2.13.0, transformers 5.23.0 and peft 0.21.2. It holds, by model, adapters that peft
saved, hidden states under them, and gradients of the sum of states times random weights.
"""

import json
import pathlib
import tempfile

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
# The golden file, the prefix of names in its checkpoint, and the modules of LoRA.
MODELS = {
  'bert': ('encoder_bert', '3/', ['query', 'value', 'intermediate.dense']),
  'modernbert': ('family_modernbert', '', ['Wqkv', 'Wo', 'Wi']),
}


def load(name):
  """The encoder of a golden checkpoint, its tokens and mask."""
  file, start, _ = MODELS[name]
  with np.load(HERE / f'{file}.npz') as arrays:
    config = json.loads(arrays[f'{start}config'].item())
    own = {
      key.removeprefix(f'{start}weights/'): arrays[key]
      for key in arrays
      if key.startswith(f'{start}weights/')
    }
    tokens, mask = (torch.tensor(arrays[key]).long() for key in ('tokens', 'mask'))
  config = transformers.AutoConfig.for_model(**config, attn_implementation='eager')
  model = transformers.AutoModel.from_config(config)
  state = {key.removeprefix('model.'): torch.tensor(value).float() for key, value in own.items()}
  missing, _ = model.load_state_dict(state, strict=False)
  assert all('pooler' in key or 'position_ids' in key for key in missing), missing
  return model.eval(), tokens, mask


def main():
  arrays = {}
  for seed, (name, (_, _, targets)) in enumerate(MODELS.items()):
    model, tokens, mask = load(name)
    config = peft.LoraConfig(
      r=3, lora_alpha=7, target_modules=targets, use_rslora=name == 'modernbert'
    )
    model = peft.get_peft_model(model, config).eval()
    draw = np.random.default_rng(seed)
    trained = {key: leaf for key, leaf in model.named_parameters() if 'lora_' in key}
    for leaf in trained.values():
      leaf.data = torch.tensor(0.1 * draw.standard_normal(tuple(leaf.shape))).half().float()
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = np.random.default_rng(9).standard_normal(tuple(hidden.shape)).astype(np.float32)
    loss = (hidden * torch.tensor(weights) * mask[:, :, None]).sum()
    gradients = torch.autograd.grad(loss, list(trained.values()))
    arrays[f'{name}/hidden'] = hidden.detach().numpy()
    for key, gradient in zip(trained, gradients, strict=True):
      arrays[f'{name}/gradients/{key.replace(".default", "")}'] = gradient.numpy()
    with tempfile.TemporaryDirectory() as made:
      model.save_pretrained(made)
      stored = load_file(f'{made}/adapter_model.safetensors')
      arrays |= {f'{name}/weights/{key}': value.astype(np.float16) for key, value in stored.items()}
      arrays[f'{name}/config'] = np.array((pathlib.Path(made) / 'adapter_config.json').read_text())
  np.savez_compressed(HERE / 'lora_models.npz', **arrays)
  print((HERE / 'lora_models.npz').stat().st_size)
  print({module.__name__: module.__version__ for module in (torch, transformers, peft)})


if __name__ == '__main__':
  main()
