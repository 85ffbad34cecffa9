import jax.numpy as jnp
import numpy as np

from dprjax.models import encoder_config


def test_the_arithmetic_by_name():
  # On a processor.
  assert encoder_config.arithmetic('auto') == ('float32', np.float32, None)
  assert encoder_config.arithmetic('bfloat16') == ('bfloat16', jnp.bfloat16, None)
  assert encoder_config.arithmetic('mixed') == ('mixed', np.float32, jnp.bfloat16)
