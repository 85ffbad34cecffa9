"""The whole chain on a ModernBERT: pretrain, train a prompt, resume, export, encode and serve."""

import importlib.util
import pathlib
import shutil

import jax
import numpy as np
import pytest

from dprjax import encode, export, load_backbone, train
from dprjax.formats.texts import read_texts
from dprjax.formats.vector_spec import VectorSpec
from dprjax.models import family as families
from dprjax.models import hub
from dprjax.retrieval.embeddings import load_embeddings
from dprjax.runtime import checkpoint

ROOT = pathlib.Path(__file__).parent.parent


def write_backbone(folder, source):
  """A fresh ModernBERT with the tokenizer of another backbone."""
  config = families.find('modernbert').read_config(
    {
      'model_type': 'modernbert',
      'vocab_size': load_backbone(source).config.vocab_size,
      'hidden_size': 16,
      'num_hidden_layers': 4,
      'num_attention_heads': 2,
      'intermediate_size': 24,
      'max_position_embeddings': 64,
      'local_attention': 8,
      'initializer_range': 0.2,
      'pad_token_id': 0,
    }
  )
  hub.save_backbone(
    folder,
    config,
    hub.init_params(config, jax.random.key(0)),
    source=source,
    spec=VectorSpec('mean', True, 32, 32),
  )


@pytest.mark.slow
def test_a_modernbert_is_pretrained_prompted_exported_and_served(trained, tmp_path, command):
  pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")
  from dprjax.serving.engine import Engine, ServerOptions

  write_backbone(tmp_path / 'fresh', trained / 'backbone')
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
  log = run('rip.py:local', 'rip', 'fresh', *text, '--config.mesh.fsdp=2')
  assert 'done at step 4' in log
  status, log = command(
    export, f'--workdir={tmp_path}/rip', f'--out={tmp_path}/backbone', '--step=4', '--force'
  )
  assert status == 0, log
  backbone = load_backbone(tmp_path / 'backbone', heads=('mlm',))
  assert backbone.hf_config['architectures'] == ['ModernBertForMaskedLM']
  assert backbone.sha256 != load_backbone(tmp_path / 'fresh').sha256
  assert {'dense', 'norm', 'bias'} == set(backbone.heads['mlm'].params)

  # A prompt, resumed on the same mesh and on another one.
  data = (f'--config.data.dir={trained}/data', '--config.data.format=beir')
  run('dptdr.py:local', 'whole', 'backbone', *data, '--config.mesh.fsdp=2')
  prompts = {}
  for name, mesh in (('same', 'fsdp'), ('other', 'model')):
    shutil.copytree(tmp_path / 'whole', tmp_path / name)
    shutil.rmtree(tmp_path / name / 'checkpoints' / '4')
    log = run('dptdr.py:local', name, 'backbone', *data, f'--config.mesh.{mesh}=2')
    assert 'step 2' in log
  for name in ('whole', 'same', 'other'):
    saved = checkpoint.Checkpoints(tmp_path / name, '')
    prompts[name] = saved.restore_trainable(4)['prompt/prefix']
  assert prompts['whole'].shape[:2] == (4, 2) and prompts['whole'].shape[3:] == (2, 8)
  np.testing.assert_array_equal(prompts['whole'], prompts['same'])
  np.testing.assert_allclose(prompts['whole'], prompts['other'], rtol=0, atol=1e-5)

  # Exported as a prompt and as a folder of sentence-transformers.
  folder = tmp_path / 'prompts'
  folder.mkdir()
  for name in ('whole', 'other'):
    out = ('--out', str(folder / f'{name}.npz'), '--force')
    assert command(export, f'--workdir={tmp_path / name}', *out)[0] == 0
  status, log = command(
    export,
    *(f'--workdir={tmp_path}/whole', f'--out={tmp_path}/st', '--force'),
    '--format=sentence-transformers',
  )
  assert status == 0, log
  assert load_backbone(tmp_path / 'st').sha256 == backbone.sha256
  out = f'--workdir={tmp_path}/whole', f'--out={tmp_path}/peft', '--force', '--format=peft'
  status, log = command(export, *out)
  assert status == 2 and 'modernbert' in log  # whose class takes no past keys and values

  # Encoded, and served with another prompt's texts and none's in the same batches.
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
  engine = Engine.load(tmp_path / 'backbone', folder, options=options)
  try:
    engine.ready.result(60)
    asked = [engine.submit(name, 'passage', some) for name in ('whole', 'other')]
    served, other = (one.result(60) for one in asked)
  finally:
    engine.close()
  np.testing.assert_allclose(served, stored.vectors()[:5], atol=1e-5)
  assert np.abs(served - other).max() < 1e-3
  if importlib.util.find_spec('sentence_transformers'):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / 'st'), trust_remote_code=True, device='cpu')
    np.testing.assert_allclose(model.encode_document(some), served, atol=2e-6)
