"""The whole chain on a ModernBERT: pretrain, train a prompt, resume, export, encode and serve.

And a prompt of a decoder, which begins as a text.
"""

import pathlib

import jax
import numpy as np
import pytest

from dprjax import encode, export, load_backbone, train
from dprjax.encoding.embeddings import load_embeddings
from dprjax.models import encoder, hub
from dprjax.models import family as families
from dprjax.text import tokenizing
from dprjax.text.texts import read_texts
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import checkpoint, stored_config
from dprjax.training import train as training
from tests import devices

ROOT = pathlib.Path(__file__).parent.parent


def write_backbone(folder, source, model_type='modernbert', pooling='mean', **keys):
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


@pytest.mark.slow
def test_a_modernbert_is_pretrained_prompted_exported_and_served(trained, tmp_path, command):
  pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")
  from dprjax.serving.engine import Engine
  from dprjax.serving.options import ServerOptions

  write_backbone(tmp_path / 'fresh', trained / 'backbone', local_attention=8)
  corpus = trained / 'data' / 'corpus.jsonl'

  def run(config, workdir, backbone, *more):
    status, log = command(
      train,
      f'--config={ROOT}/configs/{config}',
      f'--workdir={tmp_path / workdir}',
      f'--config.backbone.path={tmp_path / backbone}',
      *('--config.steps=4', '--config.checkpoint.every=2', '--config.eval.every=4'),
      *more,
    )
    assert status == 0, log
    return log

  # RIP trains the backbone and its masked-LM head, whose checkpoint has transformers' names.
  text = ('--config.data.format=corpus', f'--config.data.dir={corpus}', '--config.batch_size=16')
  with devices.one():
    log = run('rip.py:local', 'rip', 'fresh', *text)
  assert 'done at step 4' in log
  status, log = command(
    export, f'--workdir={tmp_path}/rip', f'--out={tmp_path}/backbone', '--step=4', '--force'
  )
  assert status == 0, log
  backbone = load_backbone(tmp_path / 'backbone', heads=('mlm',))
  assert backbone.hf_config['architectures'] == ['ModernBertForMaskedLM']
  assert backbone.sha256 != load_backbone(tmp_path / 'fresh').sha256
  assert {'dense', 'norm', 'bias'} == set(backbone.heads['mlm'].params)

  # A prompt, trained on another mesh.
  data = (f'--config.data.dir={trained}/data', '--config.data.format=beir')
  data += ('--config.data.dev_split=',)
  run('dptdr.py:local', 'whole', 'backbone', *data, '--config.mesh.fsdp=2')

  # Exported as a prompt.
  folder = tmp_path / 'prompts'
  folder.mkdir()
  out = f'--out={folder}/whole.npz', '--force'
  assert command(export, f'--workdir={tmp_path}/whole', *out)[0] == 0
  out = f'--workdir={tmp_path}/whole', f'--out={tmp_path}/peft', '--force', '--format=peft'
  status, log = command(export, *out)
  assert status == 2 and 'modernbert' in log  # whose class takes no past keys and values

  # Encoded and served.
  status, log = command(
    encode,
    *(f'--backbone={tmp_path}/backbone', f'--prompt={folder}/whole.npz', '--side=passage'),
    *('--batch_size=8', f'--input={corpus}', f'--out={tmp_path}/embeddings'),
  )
  assert status == 0, log
  stored = load_embeddings(tmp_path / 'embeddings')
  texts = {passage.id: passage.text for passage in read_texts(corpus, 'passage')}
  some = [texts[id_] for id_ in stored.ids[:5]]
  options = ServerOptions(rows=(1, 8), lengths=(32,), budget=8 * 48, slots=10, prompt_length=32)
  engine = Engine(tmp_path / 'backbone', folder, options=options)
  try:
    engine.ready.result(60)
    served = engine.submit('whole', 'passage', some).result(60)
  finally:
    engine.close()
  np.testing.assert_allclose(served, stored.vectors()[:5], atol=1e-5)


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
