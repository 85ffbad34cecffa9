"""NIR-Prompt by the commands: the prompt of a task, the backbone on two tasks, and a new task."""

import pathlib

import numpy as np
import pytest

from dprjax import PromptReranker, Retriever, encode, export, load_prompt, train
from dprjax.base import tree
from dprjax.encoding.embeddings import load_embeddings
from dprjax.models import artifact, head_specs, hub
from dprjax.papers.nir_prompt import learned_tokens
from dprjax.papers.nir_prompt.pairs import PairSource, measure_pairs, read_pairs
from dprjax.text import sources
from tests.workdirs import assert_goes_on, metrics_of, trainable_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]
ROOT = pathlib.Path(__file__).parents[3]
SHORT = ['--config.steps=2', '--config.eval.every=2', '--config.checkpoint.every=1']
SHORT += ['--config.eval.corpus_limit=20']
SHORT += ['--config.backbone.vocab_size=1000', '--config.template.lengths=(2,2,2)']
OF = {'retriever': ('qa', 'retrieval', 'dialogue'), 'reranker': ('paraphrase', 'qa', 'inference')}


def load(folder):
  """The parameters of an encoder and its head, by name, and the SHA-256 of the encoder."""
  found = hub.load_backbone(str(folder), heads=('mlm',))
  heads = {name: head.params for name, head in found.heads.items()}
  return tree.flatten({'backbone': found.params, 'head': heads}), found


@pytest.mark.parametrize('stage', ['retriever', 'reranker'])
def test_from_the_tasks_prompts_to_a_new_task(stage, command, tmp_path):
  first, second, new = OF[stage]

  def trains(recipe, name, *flags):
    return command(
      train,
      f'--config={ROOT}/configs/nir_{stage}.py:{recipe},local',
      f'--workdir={tmp_path}/{name}',
      *SHORT,
      *(['--config.cross_encoder.dev_queries=4'] if stage == 'reranker' else []),
      *flags,
    )

  def made(recipe, name, *flags, out):
    status, err = trains(recipe, name, *flags)
    assert status == 0, err
    # Two updates are no gain. Prompts for other stages are exported all the same.
    force = () if recipe.startswith('mdm') else ('--force',)
    status, err = command(export, *force, f'--workdir={tmp_path}/{name}', f'--out={tmp_path}/{out}')
    assert status == 0, err
    return tmp_path / out

  def bare(task):  # without evaluations
    return f'--config.tasks.{task}.data.dev_split='

  # The prompt of a task on a frozen backbone, and as if of another task.
  files = {first: made(f'mdm={first}', 'first', bare(first), out=f'{first}.npz')}
  _, trained = trainable_of(tmp_path / 'first')
  assert {name.split('/')[0] for name in trained} == {'prompt'}
  backbone = tmp_path / 'first' / 'backbone'
  on = f'--config.backbone.path={backbone}'
  start, before = load(backbone)
  prompt, files[second] = load_prompt(files[first]), tmp_path / f'{second}.npz'
  other = {name: array[::-1] + 0.1 for name, array in prompt.arrays.items()}
  artifact.save_prompt(files[second], artifact.Prompt(prompt.meta | {'task': second}, other))
  prompts = {task: load_prompt(file) for task, file in files.items()}
  for task, prompt in prompts.items():
    assert prompt.meta['task'] == task and prompt.meta['backbone_sha256'] == before.sha256
    assert len(learned_tokens.vectors(prompt)) == (4 if stage == 'retriever' else 3)

  # The backbone on both tasks, under these prompts.
  named = [f'--config.tasks.{task}.prompt={file}' for task, file in files.items()]
  model = made(f'emm={first}+{second}', 'both', on, *named, out='model')
  # As if it had been killed between two tasks.
  assert_goes_on(tmp_path / 'both', lambda: trains(f'emm={first}+{second}', 'both', on, *named))
  _, trained = trainable_of(tmp_path / 'both')
  ends, after = load(model)
  moved = {name for name in ends if name in start and (ends[name] != start[name]).any()}
  # The bias of keys adds the same to all scores of a query: softmax does not see it.
  assert moved >= {name for name in trained if not name.endswith('attention/key/bias')}
  assert moved <= set(trained)
  assert 'backbone/embeddings/word/embedding' in start.keys() - moved
  assert ('mlm' in after.heads) == (stage == 'reranker')
  for task, prompt in prompts.items():
    own = load_prompt(model / 'prompts' / f'{task}.npz')
    assert own.meta['backbone_sha256'] == after.sha256 != before.sha256
    assert own.meta['template'] == prompt.meta['template']
    for name, vectors in learned_tokens.vectors(prompt).items():
      assert learned_tokens.vectors(own)[name].tobytes() == vectors.tobytes()
    if stage == 'reranker':
      digest = head_specs.sha256('mlm', after.config, after.heads['mlm'])
      assert own.meta['head_sha256'] == digest != prompt.meta['head_sha256']

  if stage == 'retriever':  # and encoded with, each task for itself
    (tmp_path / 'queries.tsv').write_text('a\thow is a list sorted\nb\tread a file\n')
    vectors = []
    for task in files:
      flags = (f'--prompt={model}/prompts/{task}.npz', f'--out={tmp_path}/vectors-{task}')
      status, err = command(
        *(encode, f'--backbone={model}', '--side=query', f'--input={tmp_path}/queries.tsv'), *flags
      )
      assert status == 0, err
      vectors.append(load_embeddings(tmp_path / f'vectors-{task}').vectors())
    assert vectors[0].shape == vectors[1].shape == (2, after.config.hidden_size)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3

  if stage == 'reranker':
    pairs = tmp_path / 'both' / 'data' / first
    reranker = PromptReranker.load(model, model / 'prompts' / f'{first}.npz')
    found = measure_pairs(reranker, pairs)
    rows = read_pairs(PairSource(str(pairs), 'test'))
    said = reranker.score([row[:2] for row in rows]) > 0
    right = np.mean([answer == row.label for answer, row in zip(said, rows, strict=True)])
    assert found['accuracy'] == right and found['yes'] == said.mean()
    assert found['one answer'] == 0.5 and 0 <= found['F1'] <= 1 and 0 < found['AP'] <= 1
    return  # the same code adapts both
  # A new task, whose prompt is a sum of theirs.
  one = f'--config.backbone.path={model}'
  flags = (one, bare(new))
  prompt = load_prompt(made(f'adapt={new},frozen', 'frozen', *flags, out='new.npz'))
  _, trained = trainable_of(tmp_path / 'frozen')
  (weights,) = trained.values()
  assert list(trained) == [f'prompt/{new}/weights'] and not np.allclose(weights, 0.5, atol=1e-6)
  assert list(prompt.meta['weights']) == sorted(files)
  for name, vectors in learned_tokens.vectors(prompt).items():
    expected = sum(
      weight * learned_tokens.vectors(prompts[task])[name]
      for weight, task in zip(weights, sorted(files), strict=True)
    )
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
  out = made(f'adapt={new}', 'adapted', *flags, out='new')
  assert [file.name for file in (out / 'prompts').iterdir()] == [f'{new}.npz']
  assert load_prompt(out / 'prompts' / f'{new}.npz').meta['backbone_sha256'] == load(out)[1].sha256


def test_the_baseline_of_a_tasks_prompt_is_the_bare_encoder(command, tmp_path):
  status, err = command(
    train,
    f'--config={ROOT}/configs/nir_retriever.py:mdm=qa,local',
    f'--workdir={tmp_path}/run',
    *SHORT,
    '--config.eval.corpus_limit=0',
  )
  assert status == 0, err
  data = tmp_path / 'run' / 'data' / 'qa'
  dataset = sources.load_dataset(sources.Source(str(data), split='dev'))
  retriever = Retriever.load(tmp_path / 'run' / 'backbone')
  retriever.index(data / 'corpus.jsonl')
  hits = retriever.search([query.text for query in dataset.queries], k=10)
  ranks = [
    next((1 / (i + 1) for i, hit in enumerate(row) if hit.id in dataset.qrels[query.id]), 0)
    for query, row in zip(dataset.queries, hits, strict=True)
  ]
  found = metrics_of(tmp_path / 'run')[0]
  assert found['step'] == 0 and found['dev/qa/RR@10'] == pytest.approx(np.mean(ranks), abs=1e-6)
