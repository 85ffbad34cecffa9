"""From documents without judgements to a prompt: its options, its choice, and all of it, small."""

import json
import pathlib
import shutil
import time

import numpy as np
import pytest

from dprjax import load_backbone, load_prompt
from dprjax import pipeline as command_module
from dprjax.asking import pipeline
from dprjax.data import text
from dprjax.formats.vector_spec import VectorSpec
from dprjax.methods import choice as choices
from dprjax.models import hub
from dprjax.models.encoder_config import EncoderConfig
from dprjax.retrieval.embeddings import load_embeddings
from dprjax.runtime import checkpoint, stages
from dprjax.runtime import config as configs
from tests import devices, starts
from tests.refusals import command_refused, refused
from tests.test_pipeline import run_here

ROOT = pathlib.Path(__file__).parent.parent.parent
LOCAL = f'--config={ROOT}/configs/nolabels.py:local'
MADE = ('prompt.npz', 'prompt/prompt.npz', 'prompt/README.md', 'choice.json', 'report.md')


def corpus(folder, count=40):
  """Passages about numbered things, and judged queries of a few."""
  (folder / 'qrels').mkdir(parents=True)
  things = ['json', 'http', 'socket', 'header', 'message', 'thread', 'string', 'value']
  rows = []
  for n in range(count):
    one, other = things[n % 8], things[(n // 8 + n + 1) % 8]
    said = (
      f'The {one} of item{n} parses every {other} in turn. Each {other} has a name{n}. '
      f'When is the {one} of item{n} closed? After the last {other} was read from the {one}.'
    )
    rows.append({'_id': f'p{n}', 'title': f'{one} number {n} and its {other}', 'text': said})
  queries = [{'_id': f'q{n}', 'text': f'close {rows[n]["title"]}'} for n in range(9)]
  for name, own in (('corpus', rows), ('queries', queries)):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in own))
  lines = [f'q{n}\tp{n}\t1\n' for n in range(9)]
  (folder / 'qrels' / 'test.tsv').write_text('query-id\tcorpus-id\tscore\n' + ''.join(lines))
  return folder


def backbone_of(folder, data):
  """A small random encoder with a vocabulary of the corpus."""
  rows = (data / 'corpus.jsonl').read_text().splitlines()
  tokenizer = text.train_wordpiece([json.loads(row)['text'] for row in rows], 300, folder)
  config = EncoderConfig('bert', tokenizer.vocab_size, 16, 2, 2, 24, max_positions=64)
  params = starts.draw_params(config, np.random.default_rng(0), 0.5)
  spec = VectorSpec('mean', True, 32, 32)
  hub.save_backbone(folder / 'model', config, params, source=folder, spec=spec)
  return folder / 'model'


@pytest.mark.slow
def test_from_a_corpus_to_a_prompt_with_a_card_and_the_same_bytes_after_a_kill(
  tmp_path, monkeypatch, capsys, command, make_cross_encoder, one_device
):
  data, work = corpus(tmp_path / 'data'), tmp_path / 'work'
  backbone = backbone_of(tmp_path / 'backbone', data)
  flags = [
    *(LOCAL, f'--workdir={work}', f'--config.data.dir={data}'),
    *(f'--config.retriever.backbone.path={backbone}', '--config.queries.passages=30'),
    *('--config.retriever.checkpoint.every=3', '--config.retriever.steps=6'),
    *('--config.retriever.eval.every=3', '--config.retriever.data.hold_out=0.3'),
    *('--config.within=40', f'--config.reranker_path={make_cross_encoder()}'),
  ]
  # Trainings are processes of their own; the other stages run in this one.
  monkeypatch.chdir(ROOT)
  for name, value in devices.environment().items():
    monkeypatch.setenv(name, value)
  run, start = stages._run, stages._start
  monkeypatch.setattr(
    stages, '_run', lambda line: run(line) if line[2] == 'dprjax.train' else run_here(line)
  )
  command_module.main(flags)
  said = capsys.readouterr().out
  assert 'nothing could be checked' in said
  last = said.splitlines()[-1]
  assert last.startswith('Next: ') and f'{work}/report.md' in last and f'{work}/prompt' in last
  lines = [line for line in said.splitlines() if line.startswith('[')]
  numbers = [line.split(']')[0] for line in lines]
  assert numbers == [f'[{n}/{len(lines)}' for n in range(1, len(lines) + 1)]
  kept = choices.read(work)
  assert not kept.choice.judged and kept.choice.queries > 0
  models = {name.model for name in kept.choice.estimates}
  assert 'prompt' in models and 'bm25' not in models
  for title in ('BM25', 'frozen encoder', '+ prompt'):
    assert f'| {title} |' in (work / 'report.md').read_text()
  assert 'queries that nobody judged' in (work / 'prompt' / 'README.md').read_text()

  # Only the prompt for queries was trained; passages are those of the backbone.
  prompt = load_prompt(work / 'prompt.npz')
  assert prompt.meta['sides'] == 'query'
  assert prompt.meta['backbone_sha256'] == load_backbone(backbone).sha256
  saved = checkpoint.Checkpoints(work / 'training', '', read_only=True)
  first, last = (saved.restore_trainable(step) for step in (3, 6))
  saved.close()
  assert set(last) == {'prompt/query/prefix'}
  assert not np.array_equal(first['prompt/query/prefix'], last['prompt/query/prefix'])
  config = configs.load_workdir(work / 'training')
  assert tuple(config.trainable) == ('prompt/.*',) and config.distillation.loss == 'margin_mse'
  assert load_embeddings(work / 'passages').meta.prompt_sha256 is None
  # The teacher is the cross-encoder, whose margins get the size of those of cosines.
  assert config.distillation.scores.endswith('reranked.train.trec')
  assert config.distillation.temperature != 1.0

  # Killed while it trains: the same command goes on from a checkpoint.
  before = {name: (work / name).read_bytes() for name in MADE}
  made = json.loads((work / 'stages.json').read_text())
  late = ('training', 'prompt', 'metrics', 'runs/prompt', 'embeddings/prompt')
  for name in [name for name in made if name.removeprefix(f'{work}/').startswith(late)]:
    del made[name]
  (work / 'stages.json').write_text(json.dumps(made))
  for name in ('training', 'prompt', 'metrics', 'embeddings/prompt-train'):
    shutil.rmtree(work / name)
  (work / 'prompt.npz').unlink()

  def start_and_kill(line):
    child = start(line)
    deadline = time.monotonic() + 300
    while not (work / 'training' / 'checkpoints' / '3' / 'SHA256SUMS').exists():
      assert child.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    child.kill()
    return child

  monkeypatch.setattr(stages, '_start', start_and_kill)
  command_refused(command(command_module, *flags), 'dprjax.train', 'signal 9')
  monkeypatch.setattr(stages, '_start', start)
  assert not (work / 'prompt.npz').exists()
  command_module.main(flags)
  assert 'Mine negatives: done before' in capsys.readouterr().out
  assert {name: (work / name).read_bytes() for name in MADE} == before

  # Judged queries choose, also those of a split that the made queries have; nothing is trained
  # again.
  made = {path: path.read_bytes() for path in (work / 'runs').iterdir()}
  (data / 'qrels' / 'test.tsv').rename(data / 'qrels' / 'train.tsv')
  judged = [f'--config.data.judged={data}', '--config.data.judged_split=train']
  command_module.main([*flags, *judged])
  said = capsys.readouterr().out
  assert 'Train: the prompt: done before' in said and 'nothing could be checked' not in said
  kept = choices.read(work)
  assert kept.choice.judged and kept.choice.queries == 9
  assert (work / 'prompt.npz').read_bytes() == before['prompt.npz']
  assert {path: path.read_bytes() for path in made} == made


def parse(*flags):
  return configs.parse([LOCAL.replace('local', 'beir'), *flags])


@pytest.mark.parametrize('recipe', ['beir', 'local'])
def test_every_recipe_holds_a_training_of_a_prompt_for_queries(recipe):
  config = configs.parse([f'--config={ROOT}/configs/nolabels.py:{recipe}'])
  flags = stages.differences(config.retriever_recipe, config.retriever, pipeline.OURS)
  parsed = configs.parse([f'--config={config.retriever_recipe}', *flags])
  parsed.data.dir = 'x'
  configs.check(parsed)
  assert parsed.prompt.sides == 'query' and tuple(parsed.trainable) == ('prompt/.*',)
  assert parsed.distillation.loss == 'margin_mse' and parsed.negatives > 0
  assert parsed.steps == config.retriever.steps and parsed.data.hold_out == 0.1


@pytest.mark.parametrize(
  'flags, names',
  [
    ((), ('config.data.dir',)),
    (('data.dir=DATA', 'within=0'), ('config.within',)),
    (('data.dir=DATA', 'measures=("what",)'), ('what',)),
    (('data.dir=missing',), ('missing',)),
    (('data.dir=DATA', 'data.judged=DATA', 'data.judged_split=dev'), ('dev.tsv',)),
    (('data.dir=DATA', 'queries.endpoint=http://a/v1'), ('config.queries.model',)),
    (
      ('data.dir=DATA', 'queries.endpoint=http://a/v1', 'queries.answers=b'),
      ('config.queries.answers', 'config.queries.endpoint'),
    ),
    (('data.dir=DATA', 'queries.answers=missing'), ('missing',)),
    (
      ('data.dir=DATA', 'retriever.backbone.path=scratch:tiny'),
      ('config.retriever.backbone.path', 'scratch:tiny'),
    ),
    (('data.dir=DATA', 'retriever.prompt.sides=both'), ('config.retriever',)),
    (('data.dir=DATA', 'retriever.data.hold_out=0.0'), ('config.retriever.data.hold_out',)),
    (('data.dir=DATA', 'retriever.negatives=-1'), ('config.retriever.negatives',)),
  ],
)
def test_bad_options(tmp_path, monkeypatch, flags, names):
  monkeypatch.chdir(tmp_path)
  data = str(corpus(tmp_path / 'data', 9))
  with refused(*names):
    pipeline.check(parse(*(f'--config.{flag.replace("DATA", data)}' for flag in flags)))


def test_an_option_of_the_pipeline_and_an_unknown_recipe(command, tmp_path):
  workdir = f'--workdir={tmp_path / "work"}'
  result = command(command_module, LOCAL, workdir, '--config.retriever.data.dir=x')
  command_refused(result, 'config.retriever.data.dir')
  result = command(command_module, f'{LOCAL},ft', workdir)
  command_refused(result, 'local,ft')
  assert not (tmp_path / 'work').exists()


def test_the_choice_without_judgements_goes_half_the_way_and_says_so():
  rng = np.random.default_rng(0)
  ids = [f'q{n:03}' for n in range(200)]

  def scores(gain):
    return dict(zip(ids, np.clip(0.5 + gain + 0.1 * rng.standard_normal(200), 0, 1), strict=True))

  found = {
    name: scores(gain) for name, gain in zip(pipeline._SYSTEMS, (0, 0, 0, 0, 0), strict=True)
  }
  found['prompt'] = {id_: value + 0.2 for id_, value in found['frozen'].items()}
  choice = pipeline.choose(found, False)
  assert choice.candidate == ('prompt', 0.5, False) and 0 < choice.expected < 0.2
  assert 'nothing could be checked' in choice.verdict
  choice = pipeline.choose(found, True)
  assert choice.candidate == ('prompt', 1.0, False) and choice.expected > 0.1
  # A query that a run lacks scores 0.
  found['prompt'].pop('q000')
  assert pipeline.choose(found, True).expected > 0.1


def test_margins_of_the_teacher_get_the_size_of_frozen_ones(tmp_path):
  rows = {
    'teacher': (('a', 10), ('b', 4), ('x', 3)),
    'frozen': (('a', 0.9), ('b', 0.6), ('y', 0.5)),
  }
  for name, own in rows.items():
    lines = [f'q Q0 {doc} 0 {score} x\n' for doc, score in own]
    (tmp_path / name).write_text(''.join(lines))
  runs = tmp_path / 'teacher', tmp_path / 'frozen'
  assert pipeline.scale(*runs, {'q': {'a': 1}, 'other': {'b': 1}}) == pytest.approx(20)
  assert pipeline.scale(*runs, {'q': {'z': 1, 'b': 1}}) == pytest.approx(20)
  with refused(str(runs[0]), str(runs[1])):
    pipeline.scale(*runs, {'q': {'y': 1}})
