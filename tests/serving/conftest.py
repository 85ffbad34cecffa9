"""A small backbone (of a cross-encoder), and prompts for it."""

import types

import numpy as np
import pytest

from dprjax.data import text
from dprjax.models import artifact, hub

SHAPE = (2, 2, 2, 8)  # layers, keys and values, heads, head size


@pytest.fixture(scope='session')
def small(make_cross_encoder):
  """``path``, and ``write(folder, name, length, **meta)``, which writes a random prompt."""
  path = make_cross_encoder()
  backbone, tokenizer = hub.load_backbone(path), text.load_tokenizer(path)
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'small',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizer.sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 1.0,
    'shift_positions': False,
    'query_max_length': 16,
    'passage_max_length': 16,
    'dprjax_version': '0',
  }

  def write(folder, name, length, passage=None, scale=1.0, **changes):
    rng = np.random.default_rng([*name.encode()])

    def prefix(count):
      layers, two, heads, size = SHAPE
      values = scale * rng.standard_normal((layers, two, count, heads, size))
      return values.astype(np.float32)

    arrays = {'query/prefix' if changes.get('sides') == 'query' else 'prefix': prefix(length)}
    if passage is not None:
      arrays = {'query/prefix': prefix(length), 'passage/prefix': prefix(passage)}
    folder.mkdir(exist_ok=True)
    file = folder / f'{name}.npz'
    artifact.save_prompt(file, artifact.Prompt(meta | changes, arrays))
    return file

  return types.SimpleNamespace(path=path, write=write, meta=meta, tokenizer=tokenizer)
