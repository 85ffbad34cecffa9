import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import encoder_config
from dprjax.models.encoder_config import EncoderOptions
from dprjax.runtime import mesh as meshes
from tests.options import with_options
from tests.refusals import refused


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'model_type': 'gpt2'}, ('model_type', 'gpt2')),
    ({'hidden_act': 'xielu'}, ('hidden_act', 'xielu')),
    ({'num_heads': 5}, ('hidden_size', '32', 'num_attention_heads')),
  ],
)
def test_config_errors(small, change, message):
  with refused(message):
    dataclasses.replace(small[0], **change)


def test_the_arithmetic_by_name():
  # On a processor.
  assert encoder_config.arithmetic('auto', 'dtype') == ('float32', np.float32, None)
  assert encoder_config.arithmetic('bfloat16', 'dtype') == ('bfloat16', jnp.bfloat16, None)
  assert encoder_config.arithmetic('mixed', 'dtype') == ('mixed', np.float32, jnp.bfloat16)
  with refused('--dtype', 'auto', 'float32', 'bfloat16', 'mixed'):
    encoder_config.arithmetic('float16', '--dtype')


def test_which_attention_devices_have(monkeypatch):
  heads = meshes.activations(meshes.make_mesh({'data': -1}))[1]
  for platform, words in (('cpu', 'plain'), ('gpu', 'plain'), ('tpu', 'fused')):
    monkeypatch.setattr(encoder_config, 'platform_of', lambda split, platform=platform: platform)
    config = with_options()
    assert EncoderOptions.from_config(config.backbone, None, heads).attention == words
    arithmetic = encoder_config.arithmetic('float32', 'dtype')
    assert EncoderOptions.of(arithmetic, heads).attention == words
    config.backbone.attention = 'fused'
    if platform == 'gpu':
      with refused('config.backbone.attention', 'fused'):
        EncoderOptions.from_config(config.backbone, None, heads)
    else:
      assert EncoderOptions.from_config(config.backbone, None, heads).attention == 'fused'
