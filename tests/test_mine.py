"""The command, and a training run on what it wrote. What it mines is tested in test_mining.py."""

import json
import pathlib

import numpy as np
import pytest
from scipy.special import expit

from dprjax import bm25, mine, train
from dprjax.base.errors import InputError
from dprjax.data import docstrings
from tests.mining.test_negatives import World

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def world(tmp_path):
  return World(tmp_path)


def arguments(world, **changes):
  flags = {
    'queries': 'queries.jsonl',
    'corpus': 'corpus.jsonl',
    'qrels': 'train.tsv',
    'out': 'out.jsonl',
  } | changes
  return [f'--{name}={world.folder / value}' for name, value in flags.items()]


def test_the_command_writes_the_file_and_its_report(world, command, capsys):
  folder = world.folder
  status, said = command(
    mine,
    *arguments(world),
    f'--run={folder}/bm25.trec',
    f'--run=dpt={folder}/dense.trec',
    f'--reranked={folder}/reranked.trec',
    '--sample=5',
    '--depth=20',
    '--threshold=0.2',
  )
  assert status == 0, said
  report = json.loads((folder / 'out.jsonl.json').read_text())
  assert (
    report['retrievers'] == {'bm25': f'{folder}/bm25.trec', 'dpt': f'{folder}/dense.trec'}
    and report['queries'] == 20
  )
  assert (
    report['settings']['sample'] == 5
    and report['settings']['depth'] == 20
    and report['settings']['threshold'] == 0.2
  )
  lines = (folder / 'out.jsonl').read_text()
  world.mine('expected.jsonl', reranked='reranked.trec', sample=5, depth=20, threshold=0.2)
  assert lines == (folder / 'expected.jsonl').read_text().replace(
    '"retriever": "dense"', '"retriever": "dpt"'
  )
  assert f'{report["counts"]["negatives in the file"]:,} negatives in the file' in said


def test_names_of_retrievers(world):
  a, b = world.folder / 'bm25.trec', world.folder / 'dense.trec'
  assert mine.name_retrievers([str(a), f'new={b}']) == {'bm25': str(a), 'new': str(b)}
  # Two of one tag are called after their files.
  (world.folder / 'other.trec').write_text(a.read_text())
  assert mine.name_retrievers([str(a), str(world.folder / 'other.trec')]) == {
    'bm25': str(a),
    'other': str(world.folder / 'other.trec'),
  }
  # An equals sign in a path makes no name.
  odd = world.folder / 'k=3.trec'
  odd.write_text(a.read_text())
  assert mine.name_retrievers([str(odd)]) == {'bm25': str(odd)}
  with pytest.raises(
    InputError, match=r'there is already a retriever called x .*; give --run=NAME='
  ):
    mine.name_retrievers([f'x={a}', f'x={b}'])


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--run=lost.trec'], 'run not found: lost.trec'),
    (['--threshold=1'], '--threshold=1.0: a probability between 0 and 1 is needed'),
    (['--seed=-1'], '--seed=-1: a whole number from 0 on is needed'),
    (['--sample=0'], "expected a whole number above 0, not '0'"),
    (['--reranked=lost.trec'], 'run not found: lost.trec'),
    (['--corpus=lost.jsonl'], 'corpus not found: lost.jsonl'),
  ],
)
def test_bad_flags(world, command, flags, message):
  status, said = command(mine, *arguments(world), f'--run={world.folder}/bm25.trec', *flags)
  assert status == 2 and message in said and said.count('dprjax: error: ') == 1
  assert not (world.folder / 'out.jsonl').exists() and not list(world.folder.glob('.*'))


@pytest.mark.slow
def test_a_cross_encoder_and_a_run_that_it_rescored_denoise_alike(tmp_path, command, request):
  pytest.importorskip('dprjax.inference.reranker')
  from dprjax import rerank

  model, world = request.getfixturevalue('make_cross_encoder')(), World(tmp_path)
  words = [
    'json',
    'decodes',
    'string',
    'objects',
    'http',
    'server',
    'sends',
    'message',
    'xml',
    'tree',
  ]
  corpus = tmp_path / 'corpus.jsonl'
  records = [json.loads(line) for line in corpus.read_text().splitlines()]
  for record in records:
    record['text'] = ' '.join(words[int(digit)] for digit in record['text'] if digit.isdecimal())
  corpus.write_text(''.join(json.dumps(record) + '\n' for record in records))
  texts = [f'--queries={tmp_path}/queries.jsonl', f'--corpus={corpus}']
  # Both runs' passages in one, to be rescored.
  pairs = {tuple(line.split()[::2][:2]) for name in world.runs for line in world.lines(name)}
  world.write('union.trec', [f'{query} Q0 {doc} 1 1 union' for query, doc in sorted(pairs)])
  assert (
    command(
      rerank,
      *texts,
      f'--backbone={model}',
      f'--run={tmp_path}/union.trec',
      f'--out={tmp_path}/reranked.trec',
    )[0]
    == 0
  )
  scores = np.unique(
    [float(line.split()[4]) for line in (tmp_path / 'reranked.trec').read_text().splitlines()]
  )
  # Half are below it, and none is near it.
  middle = len(scores) // 2 + np.argmax(np.diff(scores[len(scores) // 2 : len(scores) // 2 + 20]))
  threshold = expit((scores[middle] + scores[middle + 1]) / 2)
  given = [
    *texts,
    f'--qrels={tmp_path}/train.tsv',
    f'--run={tmp_path}/bm25.trec',
    f'--run={tmp_path}/dense.trec',
    '--sample=4',
    f'--threshold={threshold}',
  ]
  assert command(mine, *given, f'--reranker={model}', f'--out={tmp_path}/a.jsonl')[0] == 0
  assert (
    command(mine, *given, f'--reranked={tmp_path}/reranked.trec', f'--out={tmp_path}/b.jsonl')[0]
    == 0
  )
  mined = [
    [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    for name in ('a.jsonl', 'b.jsonl')
  ]
  pools = set()
  for one, other in zip(*mined, strict=True):
    for left, right in zip(one['negative_passages'], other['negative_passages'], strict=True):
      assert left.pop('reranker_score') == pytest.approx(right.pop('reranker_score'), abs=1e-4)
      assert left == right
      pools.add(tuple(left['pools']))
  assert len(pools) > 1


@pytest.mark.slow
def test_training_on_what_was_mined(tmp_path, command):
  """BM25's negatives of docstrings, denoised by made-up scores, mixed and trained on; metrics say
  what the negatives were.
  """
  data = tmp_path / 'data'
  docstrings.build(str(data), packages=['email', 'json', 'logging', 'unittest', 'http'])
  given = [
    f'--corpus={data}/corpus.jsonl',
    f'--queries={data}/queries.jsonl',
    f'--qrels={data}/qrels/train.tsv',
  ]
  assert command(bm25, *given, '--k=50', f'--out={tmp_path}/bm25.trec')[0] == 0
  scores = [
    (line.split(), -5 if number % 3 else 5)
    for number, line in enumerate((tmp_path / 'bm25.trec').read_text().splitlines())
  ]
  scores.sort(key=lambda row: -row[1])
  (tmp_path / 'reranked.trec').write_text(
    ''.join(f'{row[0]} Q0 {row[2]} {rank} {score} ce\n' for rank, (row, score) in enumerate(scores))
  )
  status, said = command(
    mine,
    *given,
    f'--run={tmp_path}/bm25.trec',
    f'--reranked={tmp_path}/reranked.trec',
    '--sample=10',
    '--texts=false',
    f'--out={tmp_path}/mined.jsonl',
  )
  assert status == 0, said
  workdir = tmp_path / 'run'
  train.main(
    [
      f'--config={ROOT}/configs/dptdr.py:local',
      f'--workdir={workdir}',
      '--config.data.format=beir',
      f'--config.data.dir={data}',
      f'--config.data.train={tmp_path}/mined.jsonl',
      '--config.negatives=4',
      '--config.mix.denoised=0.5',
      '--config.mix.undenoised=0.25',
      '--config.mix.random=0.25',
      '--config.steps=4',
    ]
  )
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  shares = [
    {
      name.removeprefix('negatives/'): value
      for name, value in row.items()
      if name.startswith('negatives/')
    }
    for row in rows
    if 'loss' in row
  ]
  assert len(shares) == 2
  for share in shares:
    short = share.pop('queries_short_of_a_pool')
    assert sum(share.values()) == pytest.approx(1) and share['random'] == pytest.approx(0.25)
    assert (
      share['denoised'] + share['random_for_denoised'] == pytest.approx(0.5)
      and share['denoised'] > 0.3
    )
    assert 0 <= short < 0.5
