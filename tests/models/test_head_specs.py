"""The table of heads: the promises of each spec on its head."""

import jax
import numpy as np
import pytest

from dprjax.models import checkpoint_names, head_specs, hub, model_folders
from dprjax.models.head_specs import HEADS, Head


@pytest.mark.slow
@pytest.mark.parametrize('name', HEADS)
def test_a_fresh_head_has_the_tensors_of_its_spec_and_survives_its_files(name, small, tmp_path):
  config, params = small
  spec = HEADS[name]
  fresh = jax.device_get(spec.init(config, jax.random.key(0)))
  head = Head(fresh, {'split': 2} if name == 'condenser' else {})
  tensors = list(spec.tensors(config, head))
  stored = checkpoint_names.export(tensors, fresh)
  assert {tensor.name: tensor.shape for tensor in tensors} == {
    name: array.shape for name, array in stored.items()
  }
  model_folders.save_backbone(tmp_path / 'model', config, params, heads={name: head})
  assert (tmp_path / 'model' / spec.file).exists()
  loaded = hub.load_backbone(tmp_path / 'model', HEADS).heads
  assert loaded.keys() == {name} and loaded[name].settings == head.settings
  jax.tree.map(np.testing.assert_array_equal, loaded[name].params, fresh)
  alone = hub.load_head(tmp_path / 'model', name)
  digest = head_specs.sha256(name, config, head)
  assert head_specs.sha256(name, config, alone) == digest
  changed = jax.tree.map(lambda leaf: leaf + np.float32(1), fresh)
  assert head_specs.sha256(name, config, head._replace(params=changed)) != digest


def test_one_checkpoint_has_one_class(small, tmp_path):
  config, params = small
  heads = {
    name: Head(jax.device_get(HEADS[name].init(config, jax.random.key(0))))
    for name in ('mlm', 'classifier')
  }
  with pytest.raises(ValueError, match='cannot be ForMaskedLM and ForSequenceClassification'):
    model_folders.save_backbone(tmp_path / 'model', config, params, heads=heads)
  assert not (tmp_path / 'model').exists()
