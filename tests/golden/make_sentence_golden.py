"""Makes sentence_files.npz with sentence-transformers and PyTorch, which share no code with dprjax.

    python tests/golden/make_sentence_golden.py MINILM_DIR

Made with torch 2.13.0, transformers 5.24.0 and sentence-transformers 6.2.0. It holds the first
numbers of vectors of all-MiniLM-L6-v2 with changed settings, the keys and module types that
sentence-transformers writes, and the hidden states of tokens among which padding is written out.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers
from make_encoder_golden import CONFIGS, load_encoder
from sentence_transformers import CrossEncoder, SentenceTransformer, base, sentence_transformer

HERE = pathlib.Path(__file__).parent
NUMBERS = 24  # of a vector
TEXTS = (
  'How do PLANES fly? Über den Wolken',
  'The LIFT of a swept wing, [SEP] [PAD] and ein Ärger mit Größe',
  'the lift of a swept wing ' * 10,
)
TRANSFORMER, MODEL = 'sentence_bert_config.json', 'config_sentence_transformers.json'
TOKENIZER, POOLING = 'tokenizer_config.json', '1_Pooling/config.json'
MODULES = [
  ('', 'base.modules.transformer.Transformer'),
  ('1_Pooling', 'sentence_transformer.modules.pooling.Pooling'),
  ('2_Normalize', 'base.modules.normalize.Normalize'),
  ('3_Dropout', 'sentence_transformer.modules.dropout.Dropout'),
]
CASED = {TOKENIZER: {'do_lower_case': False}}
# Keys that change, by file. A list replaces the file.
VARIANTS = {
  'plain': {},
  'cased': CASED,
  'do_lower_case': CASED | {TRANSFORMER: {'do_lower_case': True}},
  'tokenizer_args': {TRANSFORMER: {'tokenizer_args': {'do_lower_case': False}}},
  'processor_kwargs': {
    TRANSFORMER: {'processor_kwargs': {'strip_accents': False, 'model_max_length': 40}}
  },
  'strip_accents': {TOKENIZER: {'strip_accents': False}},
  'max_seq_length': {TRANSFORMER: {'max_seq_length': 30}},
  'model_max_length': {
    TOKENIZER: {'model_max_length': 50},
    TRANSFORMER: {'max_seq_length': None},
  },
  'model_args': {TRANSFORMER: {'model_args': {'attn_implementation': 'eager'}}},
  'cls': {POOLING: {'pooling_mode_mean_tokens': False, 'pooling_mode_cls_token': True}},
  'pooling_mode': {POOLING: {'pooling_mode': 'cls'}},
  'prompts': {MODEL: {'prompts': {'query': 'query: ', 'document': 'passage: '}}},
  'null prompts': {MODEL: {'prompts': {'query': None, 'document': 'title: none | text: '}}},
  'default': {
    MODEL: {'prompts': {'query': 'q: ', 'document': '', 'x': 'x: '}, 'default_prompt_name': 'x'}
  },
  'cosine': {'modules.json': MODULES[:2], MODEL: {'similarity_fn_name': 'cosine'}},
  'dot': {'modules.json': MODULES[:2], MODEL: {'similarity_fn_name': 'dot'}},
  'dropout': {'modules.json': MODULES, '3_Dropout/config.json': {'dropout': 0.5}},
}
# sentence-transformers applies these, dprjax refuses them.
REFUSED = {
  'truncation_side': {TOKENIZER: {'truncation_side': 'left'}},
  'truncation_side of tokenizer_args': {
    TRANSFORMER: {'tokenizer_args': {'truncation_side': 'left'}}
  },
  'padding_side': {TOKENIZER: {'padding_side': 'left'}},
  'split_special_tokens': {TOKENIZER: {'split_special_tokens': True}},
  'pooling': {POOLING: {'pooling_mode': ['cls', 'mean']}},
  'euclidean': {MODEL: {'similarity_fn_name': 'euclidean'}},
  'truncate_dim': {MODEL: {'truncate_dim': 64}},
}


def write(source, folder, files):
  """A copy of the model folder with these changes."""
  shutil.copytree(source, folder)
  for name, changes in files.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(changes, list):
      changes = [
        {'idx': i, 'name': str(i), 'path': where, 'type': f'sentence_transformers.{kind}'}
        for i, (where, kind) in enumerate(changes)
      ]
    elif path.exists():
      changes = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(changes))


def compared(model, vectors):
  """The vectors whose inner products are the similarities of the model."""
  if model.similarity_fn_name == 'cosine':
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors[:, :NUMBERS].astype(np.float32)


def written(source, folder):
  """The keys that saved models have, by file, and those that classes name."""
  dense = SentenceTransformer(str(source), device='cpu', truncate_dim=64)
  dense.save(str(folder / 'dense'))
  CrossEncoder(str(source), num_labels=1, device='cpu').save(str(folder / 'cross'))
  keys = {
    'modules.json': {'idx', 'name', 'path', 'type', 'kwargs'},
    TRANSFORMER: set(base.modules.Transformer.config_keys),
    POOLING: set(sentence_transformer.modules.Pooling.config_keys),
    '2_Normalize/config.json': set(base.modules.Normalize.config_keys),
  }
  for path in folder.glob('*/**/*.json'):
    name = str(pathlib.Path(*path.relative_to(folder).parts[1:]))
    if name in (*keys, MODEL):
      found = json.loads(path.read_text())
      for one in found if isinstance(found, list) else [found]:
        keys.setdefault(name, set()).update(one)
  return {name: sorted(found) for name, found in keys.items()}


def types():
  """All classes of modules."""
  found = set()
  for package in (base.modules, sentence_transformer.modules):
    for name in package.__all__:
      one = getattr(package, name)
      if isinstance(one, type) and issubclass(one, base.modules.Module):
        found.add(f'{one.__module__}.{name}')
  return sorted(found)


def with_padding(model_type):
  """Hidden states of tokens, the padding token among them."""
  model, stored = load_encoder(model_type, 3)
  tokens = stored['tokens'][:1].copy()
  tokens[0, [2, 5, 6]] = CONFIGS[model_type]['pad_token_id']
  mask = np.ones_like(tokens)
  hidden = model(
    input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask)
  ).last_hidden_state
  return {f'{model_type}/tokens': tokens, f'{model_type}/hidden': hidden.numpy()}


def main(source):
  arrays = {'texts': np.array(TEXTS)}
  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    for variant, files in VARIANTS.items():
      write(source, root / variant, files)
      model = SentenceTransformer(str(root / variant), device='cpu')
      for side, encode in (('query', model.encode_query), ('passage', model.encode_document)):
        vectors = np.concatenate([encode([text]) for text in TEXTS])
        arrays[f'{variant}/{side}'] = compared(model, vectors)
    for variant, files in REFUSED.items():
      write(source, root / variant, files)
      SentenceTransformer(str(root / variant), device='cpu').encode(list(TEXTS))
    arrays['keys'] = np.array(json.dumps(written(source, root / 'saved')))
  for model_type in CONFIGS:
    arrays |= with_padding(model_type)
  changes = {'applied': VARIANTS, 'refused': REFUSED}
  for name, variants in changes.items():
    arrays[name] = np.array(json.dumps(variants))
  arrays['types'] = np.array(types())
  np.savez_compressed(HERE / 'sentence_files.npz', **arrays)


if __name__ == '__main__':
  os.environ['HF_HUB_OFFLINE'] = '1'
  transformers.logging.set_verbosity_error()
  main(pathlib.Path(sys.argv[1]))
