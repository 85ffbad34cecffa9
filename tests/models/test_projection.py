"""Dense layers behind the pooling, as modules of a sentence-transformers folder."""

import json

import numpy as np
import pytest
import safetensors.numpy

from dprjax.encoding.text_encoder import Encoder
from dprjax.models import hub, model_folders
from dprjax.text.vector_spec import same_length
from tests.refusals import refused
from tests.resuming import export_to, served, train_small

TANH = 'torch.nn.modules.activation.Tanh'
IDENTITY = 'torch.nn.modules.linear.Identity'
TEXTS = ['json decoder', 'a text', '']


def add(folder, layers, normalize=True):
  """Puts dense layers into a folder; gives their weights and biases."""
  rng = np.random.default_rng(0)
  modules = json.loads((folder / 'modules.json').read_text())[:2]
  arrays = []
  for place, (inputs, outputs, bias, activation) in enumerate(layers, start=2):
    path = folder / f'{place}_Dense'
    path.mkdir()
    config = {
      'in_features': inputs,
      'out_features': outputs,
      'bias': bias,
      'activation_function': activation,
    }
    (path / 'config.json').write_text(json.dumps(config))
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32) / inputs**0.5
    own = {'linear.weight': weight}
    if bias:
      own['linear.bias'] = rng.standard_normal(outputs).astype(np.float32)
    safetensors.numpy.save_file(own, path / 'model.safetensors', {'format': 'pt'})
    modules.append({'path': path.name, 'type': 'sentence_transformers.models.Dense'})
    arrays.append(own)
  if normalize:
    modules.append({'path': 'Normalize', 'type': 'sentence_transformers.models.Normalize'})
  for place, module in enumerate(modules):
    module |= {'idx': place, 'name': str(place)}
  (folder / 'modules.json').write_text(json.dumps(modules))
  return arrays


@pytest.fixture
def plain(trained, tmp_path):
  """A folder without dense layers, whose vectors have 128 numbers."""
  loaded = hub.load_backbone(trained / 'backbone')
  folder = tmp_path / 'plain'
  model_folders.save_backbone(
    folder, loaded.config, loaded.params, source=loaded.path, spec=same_length(32, 'mean')
  )
  return folder


@pytest.fixture
def projected(plain, tmp_path):
  """The folder with two layers, and their arrays."""
  size = hub.read_shape(plain).hidden_size
  model_folders.save_backbone(
    folder := tmp_path / 'projected',
    (loaded := hub.load_backbone(plain)).config,
    loaded.params,
    source=plain,
    spec=loaded.spec,
  )
  return folder, add(folder, [(size, 24, False, IDENTITY), (24, 12, True, TANH)])


@pytest.mark.parametrize(
  ('file', 'content', 'message'),
  [
    ('3_Dense/config.json', {'in_features': 23}, ('3_Dense/model.safetensors', '23', '24')),
    ('3_Dense/config.json', {'activation_function': 'os.system'}, ('activation_function',)),
    ('3_Dense/config.json', {'bias': False}, ('3_Dense/model.safetensors',)),
  ],
)
def test_layers_that_do_not_fit(projected, file, content, message):
  folder, _ = projected
  path = folder / file
  path.write_text(json.dumps(json.loads(path.read_text()) | content))
  with refused(*message):
    hub.load_backbone(folder)


def test_pickled_layers_are_not_loaded(projected):
  folder, _ = projected
  (folder / '2_Dense' / 'model.safetensors').rename(folder / '2_Dense' / 'pytorch_model.bin')
  with refused('2_Dense', 'pytorch_model.bin'):
    hub.load_backbone(folder)


@pytest.mark.slow
def test_prompt_and_layers_are_trained_exported_and_served(trained, projected, tmp_path, command):
  folder, _ = projected

  def run(workdir, *more):
    workdir = tmp_path / workdir
    status, log = train_small(
      command, trained, folder, workdir, '--config.mesh.fsdp=2', *more, steps=2
    )
    assert status == 0, log

  run('prompt')
  prompt = tmp_path / 'prompts' / 'own.npz'
  export_to(command, tmp_path / 'prompt', prompt)
  expected = Encoder.load(folder, prompt).encode(TEXTS, 'query')
  assert expected.shape == (3, 12)
  np.testing.assert_allclose(served(folder, prompt, 'query', TEXTS), expected, atol=1e-5)

  # The layers are part of the encoder, and are trained with it.
  whole = ('--config.trainable=backbone/.*', '--config.prompt.length=0')
  run('encoder', *whole, '--config.optim.learning_rate=0.01')
  export_to(command, tmp_path / 'encoder', tmp_path / 'out')
  before, after = (hub.load_backbone(path) for path in (folder, tmp_path / 'out'))
  assert after.config == before.config and after.sha256 != before.sha256
  for number in '01':
    kernels = [one.params['projection'][number]['kernel'] for one in (before, after)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4


@pytest.mark.slow
def test_vectors_go_through_the_layers(plain, projected):
  folder, (first, second) = projected
  pooled = Encoder.load(plain).encode(TEXTS)
  wanted = np.tanh(
    pooled @ first['linear.weight'].T @ second['linear.weight'].T + second['linear.bias']
  )
  wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
  encoder = Encoder.load(folder)
  assert encoder.dimension == 12
  np.testing.assert_allclose(encoder.encode(TEXTS), wanted, atol=1e-5)
  # Only the whole names a space: its tensors, and its shape.
  bare = Encoder.load(plain)
  assert encoder.space_sha256 != bare.space_sha256
  assert encoder.config_sha256 != bare.config_sha256
