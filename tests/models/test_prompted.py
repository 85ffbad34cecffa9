"""sentence-transformers folders under a prompt; `tests/test_other_tools.py` compares vectors."""

import json

import pytest
from etils import epath

from dprjax import load_backbone, load_prompt
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, hub, prompted
from dprjax.text.vector_spec import of_meta, same_length
from tests import other_tools
from tests.refusals import refused


@pytest.fixture(scope='module')
def material(tmp_path_factory):
  return other_tools.write(tmp_path_factory.mktemp('prompted'), 'bert')


def test_a_trained_encoder_takes_a_prompt_too(material, tmp_path):
  prompt = load_prompt(material / 'plain.npz')
  backbone = load_backbone(material / 'backbone')
  hub.save_backbone(
    tmp_path / 'model',
    backbone.config,
    backbone.params,
    source=backbone.path,
    spec=of_meta(prompt.meta),
  )
  plain = json.loads((tmp_path / 'model' / 'modules.json').read_text())
  prompted.add_prompt(epath.Path(tmp_path / 'model'), prompt)
  modules = json.loads((tmp_path / 'model' / 'modules.json').read_text())
  assert modules[0]['type'] == 'dprjax_prompt.PromptedTransformer' and modules[1:] == plain[1:]
  after = load_backbone(tmp_path / 'model')
  assert after.sha256 == backbone.sha256
  assert after.spec == same_length(12, 'cls', True, 'query : ', '')
  assert load_prompt(tmp_path / 'model').meta == prompt.meta


def test_a_folder_that_is_read_without_its_prompt_says_so(material, tmp_path, caplog):
  prompt, backbone = load_prompt(material / 'plain.npz'), load_backbone(material / 'backbone')
  prompted.write_folder(epath.Path(tmp_path), prompt, backbone)
  Encoder.load(tmp_path, tmp_path)
  assert caplog.messages == []
  Encoder.load(tmp_path)
  assert [str(tmp_path) in message for message in caplog.messages] == [True]


def test_a_sharded_backbone_is_copied_whole(material, tmp_path):
  source = tmp_path / 'sharded'
  source.mkdir()
  for path in (material / 'backbone').iterdir():
    if path.name != 'model.safetensors':
      (source / path.name).write_bytes(path.read_bytes())
  shard = 'model-00001-of-00001.safetensors'
  (source / shard).write_bytes((material / 'backbone' / 'model.safetensors').read_bytes())
  index = {'weight_map': {'embeddings.LayerNorm.bias': shard}}
  (source / 'model.safetensors.index.json').write_text(json.dumps(index))
  (source / 'LICENSE').write_text('all of it')
  (source / 'pytorch_model.bin').write_text('pickled')
  out = epath.Path(tmp_path / 'out')
  out.mkdir()
  prompted.write_folder(out, load_prompt(material / 'sides.npz'), load_backbone(source))
  names = {path.name for path in out.iterdir()}
  assert {shard, 'model.safetensors.index.json', 'LICENSE'} <= names
  assert 'pytorch_model.bin' not in names and 'dprjax.json' not in names
  assert load_backbone(out).sha256 == load_backbone(source).sha256


def test_topics_are_not_expressed(tmp_path):
  topics = artifact.Prompt({'kind': 'topic'}, {}, 'topics.npz')
  with refused('topics.npz'):
    prompted.add_prompt(epath.Path(tmp_path), topics)
