import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.base.errors import InputError
from dprjax.models import hub
from tests.refusals import named_in


def error(path):
  with pytest.raises(InputError) as info:
    hub.load_backbone(path, ('mlm', 'condenser'))
  assert '\n' not in str(info.value)
  return str(info.value)


@pytest.fixture
def tensors(golden):
  """``tensors('bert')``: the float32 tensors of the golden ForMaskedLM checkpoint, under
  transformers' names.
  """

  def read(model_type):
    return {
      name.removeprefix('weights/'): value.astype(np.float32)
      for name, value in golden(f'heads_{model_type}').items()
      if name.startswith('weights/')
    }

  return read


def test_copies_of_tied_tensors(write_heads, tensors):
  plain = hub.load_backbone(write_heads(), ('mlm', 'condenser'))
  weights = tensors('bert')
  table, bias = weights['bert.embeddings.word_embeddings.weight'], weights['cls.predictions.bias']
  norm = 'cls.predictions.transform.LayerNorm'
  for edits in (
    {'cls.predictions.decoder.weight': table, 'cls.predictions.decoder.bias': bias},
    {
      'cls.predictions.decoder.bias': bias,
      'cls.predictions.bias': None,
    },  # one of the two is enough
    {
      f'{norm}.gamma': weights[f'{norm}.weight'],
      f'{norm}.beta': weights[f'{norm}.bias'],
      f'{norm}.weight': None,
      f'{norm}.bias': None,
    },
  ):
    same = hub.load_backbone(write_heads(tensors=edits), ('mlm', 'condenser'))
    assert same.sha256 == plain.sha256
    jax.tree.map(np.testing.assert_array_equal, same.heads['mlm'].params, plain.heads['mlm'].params)
  assert named_in(
    error(write_heads(tensors={'cls.predictions.decoder.weight': table + 1})),
    'cls.predictions.decoder.weight',
    'embeddings.word_embeddings.weight',
  )
  assert named_in(
    error(write_heads(tensors={'cls.predictions.decoder.bias': bias + 1})),
    'cls.predictions.decoder.bias',
    'cls.predictions.bias',
  )


@pytest.mark.parametrize(
  ('model_type', 'edits', 'names'),
  [
    (
      'roberta',
      {'lm_head.bias': None, 'lm_head.layer_norm.weight': None},
      ('lm_head.layer_norm.weight', 'lm_head.bias'),
    ),
    (
      'bert',
      {'cls.predictions.decoder.weight': np.zeros((44, 20), np.float32)},
      ('cls.predictions.decoder.weight', '[44, 20]', '[43, 20]'),
    ),
  ],
)
def test_head_that_does_not_fit(write_heads, model_type, edits, names):
  assert named_in(error(write_heads(model_type, tensors=edits)), *names, 'transformers.AutoModel')


def test_condenser_head_that_does_not_fit(write_heads):
  assert named_in(
    error(write_heads(metadata={'split': '3'})), 'condenser.safetensors', 'num_layers'
  )
  assert named_in(error(write_heads(metadata={'num_layers': '1'})), 'layer.1.attention.')
  assert named_in(
    error(write_heads(metadata={'num_layers': '3'})), 'layer.2.attention.self.query.weight'
  )
  shape = {'layer.0.output.dense.bias': np.zeros(21, np.float32)}
  assert named_in(
    error(write_heads(condenser=shape)), 'layer.0.output.dense.bias', '[21]', 'config.json', '[20]'
  )


@pytest.mark.parametrize('name', ['family_modernbert', 'family_nomic', 'family_t5', 'llama_qwen3'])
def test_parameters_on_disk_are_those_in_memory(name, write_golden):
  _, folder = write_golden(name)
  whole, there = (hub.load_backbone(folder, on_disk=on_disk) for on_disk in (False, True))
  lazy = tree.flatten(there.params)
  for key, leaf in tree.flatten(whole.params).items():
    assert lazy[key].shape == leaf.shape
    np.testing.assert_array_equal(lazy[key], leaf, err_msg=key)
    part = tuple(slice(size // 2, size) for size in leaf.shape)
    np.testing.assert_array_equal(lazy[key][part], leaf[part], err_msg=key)
