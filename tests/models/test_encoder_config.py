import jax.numpy as jnp
import numpy as np

from dprjax.base import mesh as meshes
from dprjax.models import encoder_config
from dprjax.models.encoder_config import EncoderOptions
from tests.options import with_options
from tests.refusals import refused


def test_the_arithmetic_by_name():
  # On a processor.
  assert encoder_config.arithmetic('auto') == ('float32', np.float32, None)
  assert encoder_config.arithmetic('bfloat16') == ('bfloat16', jnp.bfloat16, None)
  assert encoder_config.arithmetic('mixed') == ('mixed', np.float32, jnp.bfloat16)


def test_which_attention_devices_have(monkeypatch):
  heads = meshes.activations(meshes.make_mesh({'data': -1}))[1]
  for platform, words in (('cpu', 'plain'), ('gpu', 'plain'), ('tpu', 'fused')):
    monkeypatch.setattr(encoder_config, 'platform_of', lambda split, platform=platform: platform)
    config = with_options()
    assert EncoderOptions.from_config(config.backbone, None, heads).attention == words
    arithmetic = encoder_config.arithmetic('float32')
    assert EncoderOptions.of(arithmetic, heads).attention == words
    config.backbone.attention = 'fused'
    if platform == 'gpu':
      with refused('config.backbone.attention', 'fused'):
        EncoderOptions.from_config(config.backbone, None, heads)
    else:
      assert EncoderOptions.from_config(config.backbone, None, heads).attention == 'fused'
