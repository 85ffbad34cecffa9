"""Prompts of other backbones than BERT: a decoder's begins as a text; PEFT does not take all."""

import jax
import numpy as np

from dprjax import export, load_backbone, load_prompt
from dprjax.models import artifact, model_folders, scratch
from dprjax.models import family as families
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import config as configs
from dprjax.training import train as training
from tests.options import with_options
from tests.refusals import command_refused


def shape_of(model_type, words, **keys):
  """A small model of four layers."""
  sizes = {'hidden_size': 16, 'num_hidden_layers': 4, 'num_attention_heads': 2}
  sizes |= {'intermediate_size': 24, 'max_position_embeddings': 64, 'vocab_size': words}
  made = {'model_type': model_type, 'pad_token_id': 0, **sizes, **keys}
  return families.find(model_type).read_config(made)


def test_peft_has_no_prompts_of_a_model_without_past_keys_and_values(
  trained, prompt, tmp_path, command
):
  words = load_backbone(trained / 'backbone').config.vocab_size
  shape = shape_of('modernbert', words, local_attention=8)
  made = scratch.init_params(shape, jax.random.key(0))
  spec = VectorSpec('mean', True, 32, 32)
  model_folders.save_backbone(
    tmp_path / 'model', shape, made, source=trained / 'backbone', spec=spec
  )
  change = {'backbone_sha256': load_backbone(tmp_path / 'model').sha256, 'shift_positions': True}
  arrays = {'prefix': np.zeros((4, 2, 3, 2, 8), np.float32)}
  artifact.save_prompt(
    tmp_path / 'p.npz', artifact.Prompt(load_prompt(prompt).meta | change, arrays)
  )
  flags = f'--from={tmp_path}/p.npz', f'--backbone={tmp_path}/model', f'--out={tmp_path}/peft'
  command_refused(command(export, *flags, '--format=peft'), 'modernbert')


def test_a_prompt_of_a_decoder_begins_as_a_text_where_none_is_named():
  config = with_options(prompt__length=3)
  assert config.prompt.init_text == 'auto'
  for model_type, causal in (('qwen3', True), ('modernbert', False)):
    shape = shape_of(model_type, 40, num_key_value_heads=1, head_dim=8, local_attention=8)
    assert shape.causal == causal
    assert training.start_text(config, shape) == (configs.START if causal else '')
