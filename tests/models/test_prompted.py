"""sentence-transformers folders under a prompt; `tests/test_other_tools.py` compares vectors."""

import pytest
from etils import epath

from dprjax import load_backbone, load_prompt
from dprjax.inference.text_encoder import Encoder
from dprjax.models import artifact, prompted
from tests import other_tools
from tests.refusals import refused


@pytest.fixture(scope='module')
def material(tmp_path_factory):
  return other_tools.write(tmp_path_factory.mktemp('prompted'), 'bert')


def test_a_folder_that_is_read_without_its_prompt_says_so(material, tmp_path, caplog):
  prompt, backbone = load_prompt(material / 'plain.npz'), load_backbone(material / 'backbone')
  prompted.write_folder(epath.Path(tmp_path), prompt, backbone)
  Encoder.load(tmp_path, tmp_path)
  assert caplog.messages == []
  Encoder.load(tmp_path)
  assert [str(tmp_path) in message for message in caplog.messages] == [True]


def test_topics_are_not_expressed(tmp_path):
  topics = artifact.Prompt({'kind': 'topic'}, {}, 'topics.npz')
  with refused('topics.npz'):
    prompted.add_prompt(epath.Path(tmp_path), topics)
