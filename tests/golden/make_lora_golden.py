"""Makes lora_models.npz with PyTorch, transformers and peft, from the golden files of encoders.

    python tests/golden/make_lora_golden.py

Made with torch 2.13.0, transformers 5.23.0 and peft 0.21.2. It holds, by model, adapters that peft
saved, and hidden states under them; for two models also gradients of the sum of states times random
weights.
"""

import pathlib
import tempfile

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent
# The golden file, the prefix of names in its checkpoint, and the modules of LoRA.
MODELS = {
  'bert': ('encoder_bert', '3/', ['query', 'value', 'intermediate.dense']),
  'modernbert': ('family_modernbert', '', ['Wqkv', 'Wo', 'Wi']),
  **{
    name: (f'encoder_{name}', '3/', ['key', 'output.dense']) for name in ('roberta', 'xlm-roberta')
  },
  'distilbert': ('family_distilbert', '', ['q_lin', 'out_lin', 'lin2']),
  'electra': ('family_electra', '', ['key', 'output.dense']),
  'mpnet': ('family_mpnet', '', ['attn.q', 'attn.o', 'intermediate.dense']),
  't5': ('family_t5-gated', '', ['k', 'o', 'wi_1']),
  'gte': ('family_gte', '', ['k_proj', 'o_proj', 'gate_proj', 'down_proj']),
  'nomic': ('family_nomic', '', ['q_proj', 'v_proj', 'up_proj', 'down_proj']),
  **{
    name: (f'llama_{name}', '', ['q_proj', 'o_proj', 'gate_proj', 'down_proj'])
    for name in ('eurobert', 'gemma3', 'llama', 'mistral', 'qwen2', 'qwen3')
  },
}
GRADIENTS = ('bert', 'modernbert')


def load(name):
  """The encoder of a golden checkpoint, its tokens and mask."""
  file, start, _ = MODELS[name]
  with np.load(HERE / f'{file}.npz') as arrays:
    config = arrays[f'{start}config'].item()
    own = {
      key.removeprefix(f'{start}weights/'): arrays[key].astype(np.float32)
      for key in arrays
      if key.startswith(f'{start}weights/')
    }
    tokens, mask = (torch.tensor(arrays[key]).long() for key in ('tokens', 'mask'))
  kind = transformers.T5EncoderModel if name == 't5' else transformers.AutoModel
  with tempfile.TemporaryDirectory() as made:
    (pathlib.Path(made) / 'config.json').write_text(config)
    save_file(own, f'{made}/model.safetensors')
    model, found = kind.from_pretrained(
      made, attn_implementation='eager', dtype=torch.float32, output_loading_info=True
    )
  missing = [key for key in found['missing_keys'] if 'pooler' not in key]
  assert not missing, missing
  model.name_or_path = model.config._name_or_path = ''  # not that of this machine
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
    arrays[f'{name}/hidden'] = hidden.detach().numpy()
    if name in GRADIENTS:
      weights = np.random.default_rng(9).standard_normal(tuple(hidden.shape)).astype(np.float32)
      loss = (hidden * torch.tensor(weights) * mask[:, :, None]).sum()
      gradients = torch.autograd.grad(loss, list(trained.values()))
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
