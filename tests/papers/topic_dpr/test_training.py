"""configs/topic_dpr.py: trained, resumed, exported, encoded with."""

import dataclasses
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from dprjax import Retriever, encode, export, load_prompt, train
from dprjax.encoding.embeddings import load_embeddings
from dprjax.encoding.text_encoder import Encoder
from dprjax.exports import exporting
from dprjax.models import hub
from dprjax.models.embed import embed_text
from dprjax.papers.topic_dpr import topic_dpr, topic_models
from dprjax.text.tokenizing import load_tokenizer, pad_batch
from dprjax.text.vector_spec import VectorSpec
from tests.refusals import named_in, refused
from tests.workdirs import (
  assert_goes_on,
  metrics_of,
  trainable_of,
)

pytestmark = [
  pytest.mark.slow,
  pytest.mark.xdist_group('topic_dpr'),
  pytest.mark.usefixtures('one_device'),
]
CONFIGS = pathlib.Path(__file__).parents[3] / 'configs'
TEXTS = ['read a file of messages', 'the http server', 'zzz', 'an object of json and its errors']


@pytest.fixture(scope='module')
def run(one_device, tmp_path_factory):
  """The workdir of configs/topic_dpr.py:local."""
  workdir = tmp_path_factory.mktemp('topic_dpr') / 'run'
  train.main([f'--config={CONFIGS}/topic_dpr.py:local', f'--workdir={workdir}'])
  return workdir


def test_trains_resumes_and_changes_what_is_trainable_alone(run, command, tmp_path):
  step, trainable = trainable_of(run)
  assert step == 12 and {name.split('/')[0] for name in trainable} == {'prompt'}
  rows = metrics_of(run)
  assert all(row['topic_topic'] > 0 for row in rows if 'loss' in row)
  shutil.copytree(run, tmp_path / 'run')
  flags = (f'--config={CONFIGS}/topic_dpr.py:local', f'--workdir={tmp_path}/run')
  assert_goes_on(tmp_path / 'run', lambda: command(train, *flags))


@pytest.mark.parametrize(
  ('recipe', 'subtrees'),
  [
    ('topic,tuned,local', {'prompt', 'backbone'}),
    ('dptdr,local', {'prompt'}),
    ('random_words,local', {'backbone'}),
  ],
)
def test_recipes(tmp_path, command, recipe, subtrees):
  flags = (f'--config={CONFIGS}/topic_dpr.py:{recipe}', f'--workdir={tmp_path}/run')
  status, err = command(train, *flags, '--config.steps=4')
  assert status == 0, err
  assert {name.split('/')[0] for name in trainable_of(tmp_path / 'run')[1]} == subtrees
  out = tmp_path / ('prompt.npz' if subtrees == {'prompt'} else 'model')
  status, err = command(export, '--force', f'--workdir={tmp_path}/run', f'--out={out}')
  assert status == 0, err
  if subtrees == {'backbone'}:  # of passages, and of the words before them
    longest = 32 + (4 if 'words' in recipe else 0)
    assert Encoder.load(out).entry().spec.passage_max_length == longest


def test_words_before_a_text_by_hand_are_those_of_the_training(tmp_path, command):
  flags = (f'--config={CONFIGS}/topic_dpr.py:words,local', f'--workdir={tmp_path}/run')
  flags += ('--config.data.passage_max_length=10', '--config.data.dev_split=')
  status, err = command(train, *flags, '--config.steps=2')
  assert status == 0, err
  status, err = command(export, '--force', f'--workdir={tmp_path}/run', f'--out={tmp_path}/model')
  assert status == 0, err
  found = topic_models.load_topics(tmp_path / 'run' / 'topics.npz')
  tokenizer = load_tokenizer(tmp_path / 'model')
  # As docs/topic-dpr.md has it; the third text is cut.
  rows = topic_dpr.word_tokens(found, tokenizer, 4)
  words = [tokenizer.backend.decode(row) for row in rows.tolist()]
  texts = [*TEXTS[:2], ' '.join(TEXTS)]
  own = found.assign(texts)
  retriever = Retriever.load(tmp_path / 'model', passage_max_length=14)
  made = retriever.encode([f'{words[k]} {text}' for k, text in zip(own, texts, strict=True)])
  # As the training puts tokens before tokens.
  backbone = hub.load_backbone(tmp_path / 'model')
  batch = pad_batch(tokenizer.encode(texts, 10)[0], 10, tokenizer.pad_id)
  expected = embed_text(
    *(backbone.config, backbone.params),
    *topic_dpr.put_before(*map(jnp.asarray, batch), jnp.asarray(rows[own])),
    VectorSpec('mean', True),
  )
  np.testing.assert_allclose(made, expected, atol=1e-5)


def test_what_is_exported_encodes_under_each_texts_topic(run, tmp_path):
  out = exporting.export(run, tmp_path / 'prompt.npz', force=True)
  prompt = load_prompt(out)
  found = topic_models.Topics.from_arrays(prompt.arrays)
  assert prompt.meta['kind'] == 'topic' and prompt.arrays['prefix'].shape[0] == len(found) == 3
  encoder = Encoder.load(run / 'backbone', out, batch_size=8)
  own = found.assign(TEXTS)
  each = np.stack([encoder.encode(TEXTS, 'query', topic=k) for k in range(3)])
  assert not np.allclose(each[0], each[1], atol=1e-4)
  inferred = encoder.encode(TEXTS, 'query')
  np.testing.assert_allclose(inferred, each[own, np.arange(len(TEXTS))], atol=1e-6)
  np.testing.assert_array_equal(encoder.encode(TEXTS, 'query', topic=own.tolist()), inferred)
  with refused('topic'):
    encoder.encode(TEXTS, 'query', topic=3)
  # Beside a prompt of another kind, and the bare backbone.
  both = Encoder.load(run / 'backbone', {'topics': out, 'bare': None}, batch_size=8)
  names = ['topics', 'bare', 'topics', 'bare']
  mixed = both.encode(TEXTS, 'query', prompt=names)
  np.testing.assert_allclose(mixed[::2], inferred[::2], atol=1e-6)
  with refused('bare'):
    both.encode(TEXTS, 'query', prompt=names, topic=0)


def test_embeddings_name_their_topic(run, tmp_path, command):
  prompt = exporting.export(run, tmp_path / 'prompt.npz', force=True)
  source = tmp_path / 'texts.tsv'
  source.write_text(''.join(f'{i}\t{text}\n' for i, text in enumerate(TEXTS)))
  flags = (f'--backbone={run}/backbone', f'--prompt={prompt}', '--side=query', f'--input={source}')
  expected = Encoder.load(run / 'backbone', prompt, batch_size=8)
  for topic in (None, 2):
    out = tmp_path / f'under-{topic}'
    more = () if topic is None else (f'--topic={topic}',)
    status, err = command(encode, *flags, *more, f'--out={out}')
    assert status == 0, err
    made = load_embeddings(out)
    assert made.meta.topic == ('infer' if topic is None else '2')
    np.testing.assert_allclose(
      made.vectors(), expected.encode(TEXTS, 'query', topic=topic), atol=1e-6
    )
  status, err = command(encode, *flags, '--topic=1', f'--out={out}')
  assert status == 2 and named_in(err, 'topic', '2', '1'), err
  status, err = command(encode, *flags, '--topic=3', f'--out={tmp_path}/other')
  assert status == 2 and named_in(err, 'topics', '3'), err
  assert not (tmp_path / 'other').exists()
  corpus = tmp_path / 'corpus.tsv'
  corpus.write_text('1\tzzz\n2\tzzzz\n')
  of_corpus = (*flags[:2], '--side=passage', f'--input={corpus}', f'--out={tmp_path}/other')
  status, err = command(encode, *of_corpus)
  assert status == 2 and named_in(err, 'topics', '2'), err
  assert not (tmp_path / 'other').exists()


def test_a_training_does_not_go_on_with_other_topics(run, tmp_path, command):
  path = tmp_path / 'topics.npz'
  shutil.copy(run / 'topics.npz', path)
  flags = (f'--config={CONFIGS}/topic_dpr.py:local', f'--workdir={tmp_path}/run')
  flags += (f'--config.topics.path={path}', '--config.steps=2')
  status, err = command(train, *flags)
  assert status == 0, err
  found = topic_models.load_topics(path)
  topic_models.save_topics(path, dataclasses.replace(found, names=found.names[::-1]))
  status, err = command(train, *flags)
  assert status == 2 and named_in(err, 'config.topics.path'), err
