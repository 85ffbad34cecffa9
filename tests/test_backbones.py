"""Prompts of other backbones than BERT: a decoder's begins as a text; PEFT does not take all."""

import pathlib

import jax
import numpy as np
import pytest

from dprjax import export, load_backbone, load_prompt, train
from dprjax.models import artifact, encoder, hub
from dprjax.models import family as families
from dprjax.text import tokenizing
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import checkpoint, stored_config
from dprjax.training import train as training
from tests.refusals import command_refused

ROOT = pathlib.Path(__file__).parent.parent


def write_backbone(folder, source, model_type, pooling='mean', **keys):
  """A fresh model of four layers with the tokenizer of another backbone."""
  config = families.find(model_type).read_config(
    {
      'model_type': model_type,
      'vocab_size': load_backbone(source).config.vocab_size,
      'hidden_size': 16,
      'num_hidden_layers': 4,
      'num_attention_heads': 2,
      'intermediate_size': 24,
      'max_position_embeddings': 64,
      'initializer_range': 0.2,
      'pad_token_id': 0,
      **keys,
    }
  )
  hub.save_backbone(
    folder,
    config,
    hub.init_params(config, jax.random.key(0)),
    source=source,
    spec=VectorSpec(pooling, True, 32, 32),
  )


def test_peft_has_no_prompts_of_a_model_without_past_keys_and_values(
  trained, prompt, tmp_path, command
):
  write_backbone(tmp_path / 'model', trained / 'backbone', 'modernbert', local_attention=8)
  change = {'backbone_sha256': load_backbone(tmp_path / 'model').sha256, 'shift_positions': True}
  arrays = {'prefix': np.zeros((4, 2, 3, 2, 8), np.float32)}
  artifact.save_prompt(
    tmp_path / 'p.npz', artifact.Prompt(load_prompt(prompt).meta | change, arrays)
  )
  flags = f'--from={tmp_path}/p.npz', f'--backbone={tmp_path}/model', f'--out={tmp_path}/peft'
  command_refused(command(export, *flags, '--format=peft'), 'modernbert')


@pytest.mark.slow
def test_a_prompt_of_a_decoder_begins_as_a_text(trained, tmp_path, command):
  keys = {'num_key_value_heads': 1, 'head_dim': 8}
  write_backbone(tmp_path / 'qwen3', trained / 'backbone', 'qwen3', 'lasttoken', **keys)
  backbone = load_backbone(tmp_path / 'qwen3')
  assert backbone.config.causal
  status, log = command(
    train,
    f'--config={ROOT}/configs/dptdr.py:local',
    *(f'--workdir={tmp_path}/run', f'--config.backbone.path={tmp_path}/qwen3'),
    *(f'--config.data.dir={trained}/data', '--config.data.format=beir', '--config.steps=3'),
    *('--config.optim.learning_rate=1e-30', '--config.optim.warmup=0'),
  )
  assert status == 0, log
  found = checkpoint.Checkpoints(tmp_path / 'run', '').restore_trainable(3)['prompt/prefix']
  # 'auto' is the default, and a text where tokens see only earlier ones.
  start = training.start_text(stored_config.load_workdir(tmp_path / 'run'), backbone.config)
  (tokens,) = tokenizing.load_tokenizer(backbone.path).encode_bare([start]).values()
  tokens = np.resize(tokens, found.shape[2])
  expected = encoder.keys_and_values(backbone.config, backbone.params, tokens)
  assert found.shape == expected.shape and expected.shape[3:] == (1, 8)
  # Its keys are turned to the places before the input, so their lengths stay.
  np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=0, atol=1e-5)
  lengths = [np.linalg.norm(one[:, 0], axis=-1) for one in (found, expected)]
  np.testing.assert_allclose(*lengths, rtol=1e-4)
