"""Small backbones, and prompts for them, that other tools load: golden files are made from these.

    python -m tests.other_tools FOLDER

writes them and their exports, for tests/golden/make_other_tools_golden.py.
"""

import json
import pathlib
import sys

import numpy as np

from dprjax.models import artifact, hub, model_folders
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES
from tests import starts

MODELS = ('bert', 'roberta')
SPECIAL = {
  'pad_token': '[PAD]',
  'unk_token': '[UNK]',
  'cls_token': '[CLS]',
  'sep_token': '[SEP]',
  'mask_token': '[MASK]',
}
WORDS = ('json', 'decodes', 'a', 'string', 'http', 'server', 'sends', 'query', ':', 'tree', '##s')
# The last of each is cut.
TEXTS = {
  'query': ['json server', 'tree', 'a string sends http trees a json query'],
  'passage': [
    'a server sends a string',
    'http',
    'json decodes a string : the server sends trees a query decodes http a tree',
  ],
}
CASES = {
  'tied': {'shift_positions': True},
  'sides': {'shift_positions': True, 'pooling': 'cls', 'normalize': False},
  'plain': {'query_prefix': 'query : ', 'pooling': 'cls', 'normalize': True},
  'unlike': {'passage_prefix': 'a ', 'normalize': False},
  'alone': {'sides': 'query', 'shift_positions': True},
}
LENGTHS = {'query': 3, 'passage': 5}  # of the prompts of 'sides' and 'unlike'


def write(folder: pathlib.Path, model_type: str) -> pathlib.Path:
  """A backbone, and NAME.npz for every case, in FOLDER/MODEL_TYPE."""
  root = folder / model_type
  (root / 'tokenizer').mkdir(parents=True)
  vocabulary = [*SPECIAL.values(), *WORDS]
  (root / 'tokenizer' / 'vocab.txt').write_text('\n'.join(vocabulary) + '\n')
  settings = {'tokenizer_class': 'BertTokenizer', 'do_lower_case': True, 'model_max_length': 40}
  (root / 'tokenizer' / 'tokenizer_config.json').write_text(json.dumps(settings | SPECIAL))
  config = EncoderConfig(
    model_type, len(vocabulary), 16, 2, 2, 24, max_positions=41, pad_token_id=0
  )
  rng = np.random.default_rng(MODELS.index(model_type))
  params = starts.draw_params(config, rng, 0.4)  # large ones make every term matter
  model_folders.save_backbone(root / 'backbone', config, params, source=root / 'tokenizer')
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'somebody/tiny',
    'backbone_sha256': hub.load_backbone(root / 'backbone').sha256,
    'tokenizer_sha256': tokenizing.load_tokenizer(root / 'backbone').sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 0.05,
    'shift_positions': False,
    'query_max_length': 6,
    'passage_max_length': 12,
    'dprjax_version': '0.1.0',
  }
  for name, change in CASES.items():
    arrays = {
      f'{side}/prefix': rng.standard_normal((2, 2, length, 2, 8)).astype(np.float32)
      for side, length in LENGTHS.items()
    }
    if name in ('tied', 'plain'):
      arrays = {'prefix': arrays['query/prefix']}
    if name == 'alone':
      del arrays['passage/prefix']
    artifact.save_prompt(root / f'{name}.npz', artifact.Prompt(meta | change, arrays))
  return root


def main(folder: pathlib.Path) -> None:
  from dprjax.exports import exporting

  for model_type in MODELS:
    root = write(folder, model_type)
    for name, change in CASES.items():
      for tool in ('peft', 'sentence-transformers'):
        if tool == 'peft' and 'shift_positions' not in change:
          continue
        options = exporting.ExportOptions(format=tool)
        out = root / f'{name}-{tool}'
        exporting.convert(root / f'{name}.npz', out, str(root / 'backbone'), options=options)
  (folder / 'texts.json').write_text(json.dumps(TEXTS))
  assert set(TEXTS) == set(SIDES)


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
