"""Sequence-classification heads: logits, files and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dprjax.base.errors import InputError
from dprjax.models import heads, hub, model_folders
from dprjax.models.encoder_config import EncoderConfig
from tests.refusals import named_in

FAMILIES = ('bert', 'roberta', 'xlm-roberta')
EVERY = [(family, labels) for family in FAMILIES for labels in (1, 2)]


def error(path):
  with pytest.raises(InputError) as info:
    hub.load_backbone(path, ('classifier',))
  assert '\n' not in str(info.value)
  return str(info.value)


@pytest.mark.slow
@pytest.mark.parametrize(('model_type', 'labels'), EVERY)
def test_equals_pytorch(golden, write_classifier, model_type, labels):
  arrays = golden(f'classifier_{model_type}')
  loaded = hub.load_backbone(write_classifier(model_type, labels), ('classifier',))
  assert loaded.heads['classifier'].params['output']['kernel'].shape == (18, labels)
  tokens, mask, starts = arrays['tokens'], arrays['mask'], arrays['starts']
  assert not mask.all(axis=1).any()  # every row is padded
  run = jax.jit(heads.score_pairs, static_argnums=0)
  head = loaded.heads['classifier'].params
  second = (np.arange(tokens.shape[1]) >= starts[:, None]).astype(np.int32)
  for types in (None, second):
    # RoBERTa encoders have one type: that of the second text does not reach them.
    typed = types is not None and model_type == 'bert'
    logits = arrays[f'{labels}/{"typed" if typed else "untyped"}'].astype(np.float64)
    scores = run(loaded.config, loaded.params, head, tokens, mask, types)
    np.testing.assert_allclose(
      scores, logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0], rtol=0, atol=2e-5
    )
    assert scores.dtype == jnp.float32


@pytest.mark.parametrize('names', [('relevant', 'irrelevant'), ('Entailment', 'not_entailment')])
def test_the_names_of_labels_say_which_one_means_relevant(write_classifier, tmp_path, names):
  usual = hub.load_backbone(write_classifier('bert', 2), ('classifier',))
  stored = safetensors.numpy.load_file(tmp_path / 'classifier' / 'model.safetensors')
  heads = ('classifier.weight', 'classifier.bias')
  turned = {key: np.ascontiguousarray(stored[key][::-1]) for key in heads}
  labels = dict(zip('01', names, strict=True))
  path = write_classifier('bert', 2, tensors=turned, change={'id2label': labels}, folder='turned')
  found = hub.load_backbone(path, ('classifier',))
  heads = usual.heads['classifier'], found.heads['classifier']
  jax.tree.map(np.testing.assert_array_equal, *(head.params for head in heads))
  # What is written is read as it was meant.
  model_folders.save_backbone(
    tmp_path / 'out', found.config, found.params, hf_config=found.hf_config, heads=found.heads
  )
  again = hub.load_backbone(tmp_path / 'out', ('classifier',))
  jax.tree.map(np.testing.assert_array_equal, again.heads['classifier'].params, heads[0].params)
  assert again.hf_config['id2label'] == {'0': names[1], '1': names[0]}
  unknown = {'id2label': {'0': 'apples', '1': 'pears'}}
  assert named_in(error(write_classifier('bert', 2, change=unknown, folder='u')), 'apples', 'pears')


def test_heads_that_do_not_fit(write_classifier):
  three = {
    'classifier.weight': np.zeros((3, 18), np.float32),
    'classifier.bias': np.zeros(3, np.float32),
  }
  assert named_in(error(write_classifier('bert', tensors=three)), 'classifier.weight')
  assert named_in(
    error(write_classifier('bert', change={'id2label': {'0': 'a', '1': 'b'}})),
    'classifier.weight',
    'id2label',
    'config.json',
  )
  # A model that labels tokens has no pooler.
  assert named_in(
    error(
      write_classifier(
        'bert',
        tensors={'bert.pooler.dense.weight': None, 'bert.pooler.dense.bias': None},
        folder='c',
      )
    ),
    'pooler.dense.weight',
    'pooler.dense.bias',
  )
  assert named_in(
    error(
      write_classifier(
        'bert', tensors={'bert.pooler.dense.weight': np.zeros((18, 17), np.float32)}, folder='e'
      )
    ),
    'pooler.dense.weight',
    '[18, 17]',
    'config.json',
    '[18, 18]',
  )
  # Without id2label in config.json the tensors decide.
  assert hub.load_backbone(
    write_classifier('bert', 1, change={'id2label': 'absent'}, folder='f'), ('classifier',)
  ).heads


@pytest.mark.slow
def test_dropout_is_where_transformers_has_it():
  config = EncoderConfig('bert', 50, 32, 3, 4, 64, hidden_dropout=0.5)
  # A tanh of 1 everywhere: drops can be counted in the sum of the last layer.
  head = {
    'dense': {'kernel': jnp.eye(32), 'bias': jnp.zeros(32)},
    'output': {'kernel': jnp.ones((32, 1)), 'bias': jnp.zeros(1)},
  }
  first = jnp.full((400, 32), 50.0)
  assert (heads.classify(config, head, first) == 32).all()
  dropped = (
    np.asarray(heads.classify(config, head, first, dropout_key=jax.random.key(1)))[:, 0] / 2
  )  # those kept count double
  assert (
    (dropped == dropped.round()).all() and abs(dropped.mean() - 16) < 0.5 and 6 < dropped.var() < 10
  )  # binomial: 32 / 4
  # That of RoBERTa drops features too, of which 0 gives tanh 0: a quarter is left.
  config = EncoderConfig('roberta', 50, 32, 3, 4, 64, hidden_dropout=0.5)
  dropped = np.asarray(heads.classify(config, head, first, dropout_key=jax.random.key(1)))[:, 0] / 2
  assert abs(dropped.mean() - 8) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(('model_type', 'labels'), [('bert', 1), ('roberta', 2)])
def test_transformers_loads_what_was_saved(golden, write_classifier, tmp_path, model_type, labels):
  torch = pytest.importorskip(
    'torch', reason='PyTorch is an oracle here, not a dependency: pip install torch'
  )
  import transformers

  loaded = hub.load_backbone(write_classifier(model_type, labels), ('classifier',))
  model_folders.save_backbone(tmp_path / 'out', loaded.config, loaded.params, heads=loaded.heads)
  model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / 'out', output_loading_info=True
  )
  assert not any(info[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), (
    info
  )
  arrays = golden(f'classifier_{model_type}')
  with torch.no_grad():
    logits = model.eval()(
      input_ids=torch.from_numpy(arrays['tokens']).long(),
      attention_mask=torch.from_numpy(arrays['mask']).long(),
    ).logits.numpy()
  np.testing.assert_allclose(logits, arrays[f'{labels}/untyped'], rtol=0, atol=2e-5)
  # Files of transformers are read back, bit for bit.
  model.save_pretrained(tmp_path / 'theirs')
  theirs = hub.load_backbone(tmp_path / 'theirs', ('classifier',))
  jax.tree.map(
    np.testing.assert_array_equal,
    (theirs.params, theirs.heads['classifier'].params),
    (loaded.params, loaded.heads['classifier'].params),
  )
