"""Makes other_tools.npz with PyTorch, peft and sentence-transformers, which load files of dprjax.

    python -m tests.other_tools FOLDER                         in the environment of dprjax
    python tests/golden/make_other_tools_golden.py FOLDER      in one with the three

Made with torch 2.13.0, transformers 5.23.0, peft 0.21.2 and sentence-transformers 6.2.0.
It holds vectors of the texts by model, prompt, tool and side, what peft read, and an adapter that
peft itself made, with its vectors.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import peft
import sentence_transformers
import torch
import transformers
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
ADAPTER = ('adapter_config.json', 'adapter_model.safetensors')


def embed(model, tokenizer, texts, meta, side):
  """As in the metadata of the prompt, without dprjax."""
  prefix = meta.get(f'{side}_prefix', '')
  batch = tokenizer(
    [prefix + text for text in texts],
    padding=True,
    truncation=True,
    max_length=meta[f'{side}_max_length'],
    return_tensors='pt',
  )
  with torch.no_grad():
    hidden = model(**batch).last_hidden_state
  mask = batch['attention_mask'][..., None].float()
  vectors = (hidden * mask).sum(1) / mask.sum(1) if meta['pooling'] == 'mean' else hidden[:, 0]
  return (torch.nn.functional.normalize(vectors, dim=-1) if meta['normalize'] else vectors).numpy()


def load(root):
  return (
    transformers.AutoModel.from_pretrained(root / 'backbone', add_pooling_layer=False).eval(),
    transformers.AutoTokenizer.from_pretrained(root / 'backbone'),
  )


def main(folder):
  arrays = {}
  texts = json.loads((folder / 'texts.json').read_text())
  for path in sorted(folder.glob('*/*.npz')):
    root, name = path.parent, path.stem
    with np.load(path) as npz:
      meta = json.loads(npz['meta'].item())
    for side, own in texts.items():
      where = f'{root.name}/{name}'
      adapter = root / f'{name}-peft'
      adapter = adapter if (adapter / ADAPTER[0]).exists() else adapter / side
      if adapter.exists():
        model, tokenizer = load(root)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
        arrays[f'{where}/peft/{side}'] = embed(model, tokenizer, own, meta, side)
        stored = load_file(adapter / ADAPTER[1])
        arrays[f'{where}/peft/{side}/embeddings'] = stored['prompt_embeddings']
      model = sentence_transformers.SentenceTransformer(
        str(root / f'{name}-sentence-transformers'), trust_remote_code=True, device='cpu'
      )
      encode = {'query': model.encode_query, 'passage': model.encode_document}[side]
      arrays[f'{where}/sentence-transformers/{side}'] = encode(own, batch_size=2)
      # It can be saved and loaded again.
      with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again)
        model = sentence_transformers.SentenceTransformer(
          again, trust_remote_code=True, device='cpu'
        )
        encode = {'query': model.encode_query, 'passage': model.encode_document}[side]
        np.testing.assert_array_equal(
          encode(own, batch_size=2), arrays[f'{where}/sentence-transformers/{side}']
        )
  for root in sorted(path for path in folder.iterdir() if path.is_dir()):
    torch.manual_seed(0)
    model, tokenizer = load(root)
    config = peft.PrefixTuningConfig(
      task_type='FEATURE_EXTRACTION',
      num_virtual_tokens=4,
      prefix_projection=True,
      encoder_hidden_size=9,
    )
    model = peft.get_peft_model(model, config).eval()
    with tempfile.TemporaryDirectory() as made:
      model.save_pretrained(made)
      for file in ADAPTER:
        content = (pathlib.Path(made) / file).read_bytes()
        if file.endswith('.json'):
          values = json.loads(content) | {'base_model_name_or_path': None}
          content = json.dumps(values, indent=1).encode()
        arrays[f'{root.name}/theirs/{file}'] = np.frombuffer(content, np.uint8)
    for side, own in texts.items():
      meta = {'pooling': 'mean', 'normalize': False, f'{side}_max_length': 12}
      arrays[f'{root.name}/theirs/{side}'] = embed(model, tokenizer, own, meta, side)
  np.savez_compressed(HERE / 'other_tools.npz', **arrays)
  print('other_tools.npz', (HERE / 'other_tools.npz').stat().st_size)
  print({module.__name__: module.__version__ for module in (peft, sentence_transformers)})


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
