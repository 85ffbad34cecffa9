"""Model cards: YAML that the hub reads, and statements."""

import json
import types

import numpy as np
import pytest
import yaml

from dprjax.base import repository
from dprjax.base.files import sha256_file
from dprjax.exports import card
from dprjax.training.method import Product
from tests.models.test_artifact import GAIN

META = {
  'backbone': '/home/me/models/secret-backbone',
  'backbone_sha256': 'a' * 64,
  'pooling': 'mean',
  'normalize': True,
  'query_max_length': 32,
  'passage_max_length': 128,
  'task': 'my | *task*',
}
TRAINING = card.Training(
  {'method': 'dpr', 'data': {'dir': '/home/me/data/scifact', 'format': 'beir'}, 'batch_size': 32},
  60,
  {
    'train corpus': {'name': 'corpus.jsonl', 'bytes': 12, 'sha256': 'c' * 64, 'mtime': 1.0},
    'backbone (config.json)': {'name': 'config.json', 'bytes': 1, 'sha256': 'd' * 64},
  },
  {'dev/nDCG@10': 0.51234},
)
METRICS = {
  'mean': {'nDCG@10': 0.5},
  'per_query': {'nDCG@10': {'q1': 0.25, 'q2': 0.75}},
  'counts': {},
  'settings': {},
}


def write(tmp_path, options, meta=META, training=None, encoders=(), embeds=True, **prompt):
  """The YAML of a card, and the rest."""
  shapes = {} if encoders else prompt or {'prefix': (6, 2, 16, 12, 32)}
  arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  product = Product({name: {'spec': embeds or None} for name in encoders}, arrays, meta)
  shape = types.SimpleNamespace(family=types.SimpleNamespace(class_name=''))
  backbone = types.SimpleNamespace(path=str(tmp_path), config=shape)
  text = card.write(options, card.Draft(product, meta, backbone, '', {}, training), 'folder')
  _, front, rest = text.split('---\n', 2)
  return yaml.safe_load(front), rest


def test_a_card_of_a_prompt(tmp_path):
  (tmp_path / 'README.md').write_text('---\nlanguage: en\nlicense: apache-2.0\n---\n# x\n')
  reference = repository.parse('somebody/minilm@v1')
  (tmp_path / 'metrics.json').write_text(json.dumps(METRICS))
  options = card.ExportOptions(
    'sentence-transformers',
    reference,
    licence='mit',
    metrics={'test split': str(tmp_path / 'metrics.json')},
    name='me/it',
  )
  front, rest = write(tmp_path, options, training=TRAINING)
  assert front == {
    'base_model': 'somebody/minilm',
    'base_model_relation': 'adapter',
    'library_name': 'sentence-transformers',
    'license': 'mit',
    'pipeline_tag': 'sentence-similarity',
    'tags': ['dprjax', 'dense-retrieval', 'prefix-tuning'],
  }
  for words in (
    '# me/it',
    "Retriever.load('somebody/minilm', prompt='me/it')",
    '`scifact`',
    f'| train corpus | `corpus.jsonl` | 12 | `{"c" * 64}` |',
    # A quarter of the draws from two queries have only one of them.
    '| nDCG@10 | 0.5000 | 0.2500 to 0.7500 | 2 |',
    f'its file has the SHA-256 `{sha256_file(tmp_path / "metrics.json")}`',
    f'SHA-256 `{"a" * 64}`',
    '`mit`. The card of the backbone says `apache-2.0`.',
  ):
    assert words in rest, words
  assert '/home/me' not in rest and 'd' * 64 not in rest


@pytest.mark.parametrize(
  ('change', 'words', 'absent'),
  [
    ({'low': 0.01}, '95 % interval +0.0100 to +0.0700, paired bootstrap over 40 queries', 'chance'),
    (
      {'best': 0.4, 'difference': -0.1, 'better': False},
      '**It is not better than the initial model.**',
      'chance',
    ),
  ],
)
def test_what_was_gained(tmp_path, change, words, absent):
  options, meta = card.ExportOptions('npz'), META | {'gain': GAIN | change}
  _, rest = write(tmp_path, options, meta, TRAINING)
  said = rest.partition('## How good it is')[2].partition('## Limits')[0]
  assert words in said and absent not in said and 'against 0.5000 before the training' in said


SENTENCE = 'sentence-transformers'


@pytest.mark.parametrize(
  ('format', 'encoders', 'embeds', 'library', 'words', 'absent'),
  [
    ('npz', (), True, 'dprjax', 'Retriever.load', 'SentenceTransformer'),
    ('peft', (), True, 'peft', "PeftModel.from_pretrained(backbone, 'DIR')", 'Retriever'),
    (None, ('',), True, SENTENCE, "SentenceTransformer('DIR')", 'trust_remote'),
    (None, ('query', 'passage'), True, SENTENCE, 'Retriever', 'SentenceTransformer'),
    (None, ('',), False, 'transformers', 'With `transformers`', 'Retriever'),
  ],
)
def test_every_format(tmp_path, format, encoders, embeds, library, words, absent):
  options = card.ExportOptions(format, repository.parse('somebody/minilm'))
  front, rest = write(tmp_path, options, encoders=encoders, embeds=embeds)
  assert front['library_name'] == library
  assert front['base_model_relation'] == ('finetune' if encoders else 'adapter')
  assert ('prefix-tuning' in front['tags']) == (not encoders)
  assert 'license' not in front and 'Not stated by its author.' in rest
  assert words in rest and absent not in rest
  assert 'Unknown' in rest and 'Not measured here.' in rest


def test_what_a_stranger_wrote_stays_text(tmp_path):
  (tmp_path / 'README.md').write_bytes(b'---\nlicense: \xff\n---\n')
  meta = META | {'task': 'a\n---\nlicense: x', 'query_prefix': '`|\n# loud', 'backbone': 'x\n# y'}
  options = card.ExportOptions('npz')
  front, rest = write(tmp_path, options, meta, TRAINING._replace(inputs=None))
  assert front.keys() == {'library_name', 'pipeline_tag', 'tags'}
  headings = [line for line in rest.splitlines() if line.startswith('#')]
  assert len(headings) == 7 and not any('loud' in line or line == '# y' for line in headings)
  assert 'The workdir has no record of these files.' in rest


def test_a_prompt_for_queries_alone(tmp_path):
  options = card.ExportOptions('peft', repository.parse('a/b'))
  meta = META | {'sides': 'query'}
  _, rest = write(tmp_path, options, meta, **{'query/prefix': (2, 2, 3, 2, 8)})
  assert "from_pretrained(backbone, 'DIR', subfolder='query')" in rest
  assert 'for queries only' in rest
