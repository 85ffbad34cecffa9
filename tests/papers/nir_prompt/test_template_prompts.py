"""Prompts of kind template in use: vectors and scores are those of the training code, and tasks
that share a batch do not change each other's.
"""

import jax
import numpy as np
import pytest

from dprjax import CrossEncoder, PromptReranker, Retriever
from dprjax.base import mesh as meshes
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, hub, model_folders
from dprjax.papers.nir_prompt import nir_reranker, nir_retriever
from dprjax.retrieval import reranker
from dprjax.text import tokenizing
from dprjax.training.method import Parts
from tests.papers.nir_prompt import nir
from tests.refusals import refused

pytestmark = pytest.mark.xdist_group('encoder')  # one worker makes the shared files
TASKS = ('chat', 'qa', 'words')
TEXTS = ['oak elm', '[MASK] fir', '', 'oak ash fir yew elm larch pine', 'pine', 'yew [MASK] oak']
NEAR = {'rtol': 2e-5, 'atol': 2e-5}


@pytest.fixture(scope='module')
def bank(templates):
  prompts = {task: templates / f'{task}.npz' for task in TASKS}
  return Retriever.load(templates / 'backbone', prompts, batch_size=8)


def trained(build, method, templates, tasks):
  """The evaluation of a run with the prompts of these files."""
  backbone = hub.load_backbone(templates / 'backbone', ('mlm',))
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  config = nir.make_config(method, tasks=tasks, trainable=('backbone/.*',))
  for task in tasks:
    config.tasks[task].prompt = str(templates / f'{task}.npz')
  devices = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  made = build(config, backbone.config, devices, tokenizer)
  parts = Parts(backbone.params, backbone.heads, sha256=backbone.sha256)
  return made, made.init(parts, jax.random.key(0)), tokenizer


@pytest.mark.slow
def test_vectors_of_several_tasks_equal_the_training_code(bank, templates):
  made, params, tokenizer = trained(nir_retriever.build, 'nir_retriever', templates, TASKS)
  embed = jax.jit(made.embed, static_argnums=1)
  texts = [one for one in TEXTS for _ in TASKS]
  numbers = np.tile(np.arange(3, dtype=np.int32), len(TEXTS))
  for side, length, prefix in (('query', 7, 'ash '), ('passage', 9, '')):
    rows, _ = tokenizer.encode([prefix + one for one in texts], length)
    tokens, mask = tokenizing.pad_batch(rows, length, tokenizer.pad_id)
    expected = np.asarray(embed(params, side, tokens, mask, numbers))
    found = bank.encode(texts, side, prompt=[TASKS[number] for number in numbers])
    np.testing.assert_allclose(found, expected, **NEAR)
    # The prompt of a task matters.
    assert np.abs(np.diff(found.reshape(len(TEXTS), 3, -1), axis=1)).max(axis=2).min() > 0.01
  assert bank.encoder.truncated['query'] == 3


@pytest.mark.slow
def test_a_bank_of_several_kinds_equals_each_alone(bank, templates, tmp_path):
  chat = artifact.load_prompt(templates / 'chat.npz')
  longer = {'pooling': 'mean', 'normalize': True, 'query_max_length': 9}
  fewer = {'fixed_layers': 0, 'pooling': 'cls'}
  paths = {'qa': templates / 'qa.npz', 'bare': None}
  for name, change in (('mean', longer), ('ordinary', fewer)):
    paths[name] = tmp_path / f'{name}.npz'
    artifact.save_prompt(paths[name], artifact.Prompt(chat.meta | change, chat.arrays))
  several = Encoder.load(templates / 'backbone', paths)
  names = [name for _ in TEXTS for name in paths]
  together = several.encode([one for one in TEXTS for _ in paths], 'query', prompt=names)
  for place, (name, path) in enumerate(paths.items()):
    alone = Encoder.load(templates / 'backbone', path)
    found = together[place :: len(paths)]
    np.testing.assert_allclose(found, alone.encode(TEXTS, 'query'), **NEAR)
    if name == 'mean':
      np.testing.assert_allclose(np.linalg.norm(found, axis=1)[:2], 1, atol=1e-5)


@pytest.mark.slow
def test_search_under_a_task(bank):
  bank.index(TEXTS, prompt='qa')
  hits = bank.search(['oak'], 2)
  assert hits == bank.search(['oak'], 2, prompt='qa')
  with refused('chat'):
    bank.search(['oak'], 2, prompt='chat')
  with refused('prompt', 'chat', 'other'):
    bank.encode(['oak'], prompt='other')


PAIRS = [(first, second) for first in TEXTS[:4] for second in TEXTS]


@pytest.mark.slow
def test_scores_of_pairs_equal_the_training_code(templates):
  made, params, tokenizer = trained(nir_reranker.build, 'nir_reranker', templates, ('pairs',))
  loaded = PromptReranker.load(templates / 'backbone', templates / 'pairs.npz', batch_size=8)
  scores = loaded.score(PAIRS)
  # Each text as a cache has it, cut at its own maximum.
  sides = [
    [row[1:-1] for row in tokenizer.encode([prefix + pair[i] for pair in PAIRS], length)[0]]
    for i, prefix, length in ((0, 'ash ', 7), (1, '', 9))
  ]
  lengths = np.array([[len(row) for row in side] for side in sides], np.int32).T
  rows = [np.concatenate(pair) for pair in zip(*sides, strict=True)]
  tokens, mask = tokenizing.pad_batch(rows, loaded.max_length, tokenizer.pad_id)
  embed = jax.jit(made.embed, static_argnums=1)
  zeros = np.zeros(len(PAIRS), np.int32)
  expected = np.asarray(embed(params, 'pair', tokens, mask, lengths, zeros))[:, 0]
  np.testing.assert_allclose(scores, expected, **NEAR)
  assert scores.std() > 0.02
  assert loaded.max_length == 5 + 7 + 11
  assert loaded.truncated == 6  # the fourth text is too long as a query
  short = PromptReranker.load(
    templates / 'backbone', templates / 'pairs.npz', max_length=15, score='probability'
  )
  assert np.abs(short.score(PAIRS)).max() < 1
  assert short.settings != loaded.settings and short.sha256 == loaded.sha256
  assert (np.sign(short.score(PAIRS[:2])) == np.sign(scores[:2])).all()


def changed(templates, tmp_path, name, **meta):
  prompt = artifact.load_prompt(templates / f'{name}.npz')
  path = tmp_path / 'prompt.npz'
  artifact.save_prompt(path, artifact.Prompt(prompt.meta | meta, prompt.arrays))
  return path


@pytest.mark.parametrize(
  ('name', 'meta', 'message'),
  [
    ('qa', {'backbone_sha256': 'c' * 64}, 'BACKBONE'),
    ('qa', {'query_max_length': 36}, ('query_max_length', '36')),
    ('pairs', {}, 'template'),
  ],
)
def test_prompts_that_do_not_fit(name, meta, message, templates, tmp_path):
  path = changed(templates, tmp_path, name, **meta)
  with refused('prompt.npz', message) as info:
    Encoder.load(templates / 'backbone', {'qa': templates / 'qa.npz', 'other': path})
  assert '\n' not in str(info.value)


@pytest.mark.parametrize(
  ('name', 'meta', 'message'),
  [
    ('qa', {}, 'template'),
    ('pairs', {'head_sha256': 'd' * 64}, 'prompt.npz'),
    ('pairs', {'passage_max_length': 30}, ('passage_max_length', '30')),
  ],
)
def test_prompts_that_judge_no_pairs(name, meta, message, templates, tmp_path):
  path = changed(templates, tmp_path, name, **meta)
  with refused(message) as info:
    reranker.load(templates / 'backbone', path)
  assert '\n' not in str(info.value)


def test_backbones_without_the_head(templates, tmp_path, make_cross_encoder):
  backbone = hub.load_backbone(templates / 'backbone')
  plain = tmp_path / 'plain'
  model_folders.save_backbone(plain, backbone.config, backbone.params, source=backbone.path)
  with refused('plain', 'configs/condenser.py:mlm'):
    reranker.load(plain, templates / 'pairs.npz')
  assert isinstance(reranker.load(make_cross_encoder()), CrossEncoder)
