"""The layout of PEFT, and folders of sentence-transformers.

`tests/test_other_tools.py` compares vectors.
"""

import numpy as np
import pytest
from etils import epath

from dprjax import load_backbone, load_prompt
from dprjax.encoding.text_encoder import Encoder
from dprjax.exports import prompt_folders
from dprjax.models import artifact
from dprjax.models.adapters.prefix import ADAPTER as PREFIX
from dprjax.models.encoder_config import EncoderConfig
from tests import other_tools
from tests.refusals import refused

CONFIG = EncoderConfig('bert', 50, 24, 2, 3, 40)
META = {
  'pooling': 'mean',
  'normalize': True,
  'temperature': 0.05,
  'query_max_length': 8,
  'passage_max_length': 16,
  'dprjax_version': '0.1.0',
}


def test_a_position_has_keys_then_values_of_every_layer():
  prefix = np.arange(2 * 2 * 4 * 3 * 8, dtype=np.float32).reshape(2, 2, 4, 3, 8)
  meta = META | {'shift_positions': True}
  _, tensors = PREFIX.peft.write('p.npz', CONFIG, meta, {'prefix': prefix})
  flat = tensors['prompt_embeddings']
  assert flat.shape == (4, 2 * 2 * 24)
  # Values of the third position in the first layer: the second quarter of its row.
  np.testing.assert_array_equal(flat[2, 24:48], prefix[0, 1, 2].ravel())
  np.testing.assert_array_equal(flat[2, 48:72], prefix[1, 0, 2].ravel())


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
