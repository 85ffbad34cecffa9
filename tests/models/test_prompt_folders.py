"""The layout of PEFT, adapters of strangers, and folders of sentence-transformers.

`tests/test_other_tools.py` compares vectors.
"""

import json

import numpy as np
import pytest
import safetensors.numpy
from etils import epath

from dprjax import load_backbone, load_prompt
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, hub, prompt_folders
from dprjax.models.adapters.prefix import ADAPTER as PREFIX
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.vector_spec import same_length
from tests import other_tools
from tests.refusals import refused

CONFIG = EncoderConfig('bert', 50, 24, 2, 3, 40)
ADAPTER = {'peft_type': 'PREFIX_TUNING', 'num_virtual_tokens': 4, 'num_layers': 2, 'token_dim': 24}
META = {
  'pooling': 'mean',
  'normalize': True,
  'temperature': 0.05,
  'query_max_length': 8,
  'passage_max_length': 16,
  'dprjax_version': '0.1.0',
}


def stored(**change):
  return {'dprjax': json.dumps(META | change)}


def test_a_position_has_keys_then_values_of_every_layer():
  prefix = np.arange(2 * 2 * 4 * 3 * 8, dtype=np.float32).reshape(2, 2, 4, 3, 8)
  meta = META | {'shift_positions': True}
  _, tensors = PREFIX.peft.write('p.npz', CONFIG, meta, {'prefix': prefix})
  flat = tensors['prompt_embeddings']
  assert flat.shape == (4, 2 * 2 * 24)
  # Values of the third position in the first layer: the second quarter of its row.
  np.testing.assert_array_equal(flat[2, 24:48], prefix[0, 1, 2].ravel())
  np.testing.assert_array_equal(flat[2, 48:72], prefix[1, 0, 2].ravel())


@pytest.fixture
def read(tmp_path):
  """Writes an adapter and reads it; a value of None leaves a file out."""
  backbone = hub.Backbone(CONFIG, {}, 'a' * 64, str(tmp_path), same_length(), {})

  def read(config=None, tensors=None, metadata=None, raw=None):
    if config is None or isinstance(config, dict):
      config = json.dumps(ADAPTER | (config or {}))
    (tmp_path / 'adapter_config.json').write_text(config)
    if tensors is None:
      tensors = {'prompt_embeddings': np.ones((4, 96), np.float32)}
    content = safetensors.numpy.save(tensors, metadata) if raw is None else raw
    (tmp_path / 'adapter_model.safetensors').write_bytes(content)
    return prompt_folders.read_prompt(tmp_path, backbone, 'b' * 64, 'tiny', {})

  return read


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'config': {'peft_type': 'IA3'}}, ('peft_type', 'IA3', 'LORA', 'PREFIX_TUNING')),
    ({'config': {'num_virtual_tokens': 5}}, ('(5, 96)', 'adapter_config.json')),
    ({'config': {'token_dim': 32}}, ('token_dim', '32', '24')),
    (
      {'tensors': {'prompt_embeddings': np.ones((4, 96), np.float32), 'score': np.ones(1)}},
      ('adapter_model.safetensors', 'prompt_embeddings'),
    ),
    (
      {'tensors': {'prompt_embeddings': np.full((4, 96), np.nan, np.float32)}},
      'prefix',
    ),
    ({'metadata': stored(backbone_sha256='c' * 64)}, 'c' * 64),
  ],
)
def test_adapters_that_cannot_be_read(read, change, message):
  with refused(message):
    read(**change)


def test_pickles_are_not_loaded(tmp_path, read):
  read()
  (tmp_path / 'adapter_model.safetensors').unlink()
  (tmp_path / 'adapter_model.bin').write_bytes(b'x')
  backbone = hub.Backbone(CONFIG, {}, 'a' * 64, str(tmp_path), same_length(), {})
  with refused('adapter_model.safetensors'):
    prompt_folders.read_prompt(tmp_path, backbone, 'b' * 64, 'tiny', {})


@pytest.fixture(scope='module')
def material(tmp_path_factory):
  return other_tools.write(tmp_path_factory.mktemp('prompted'), 'bert')


def test_a_folder_that_is_read_without_its_prompt_says_so(material, tmp_path, caplog):
  prompt, backbone = load_prompt(material / 'plain.npz'), load_backbone(material / 'backbone')
  prompt_folders.write_prompted(epath.Path(tmp_path), prompt, backbone)
  Encoder.load(tmp_path, tmp_path)
  assert caplog.messages == []
  Encoder.load(tmp_path)
  assert [str(tmp_path) in message for message in caplog.messages] == [True]


def test_topics_are_not_expressed(tmp_path):
  topics = artifact.Prompt({'kind': 'topic'}, {}, 'topics.npz')
  with refused('topics.npz'):
    prompt_folders.add_prompt(epath.Path(tmp_path), topics)
