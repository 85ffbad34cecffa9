"""A sound call of every command, with its inputs in a folder that can be copied and harmed."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import NamedTuple

import numpy as np

WORDS = ('json', 'decodes', 'a', 'string', 'http', 'server', 'sends', 'xml', 'tree', 'error')
NEIGHBOUR = 'somebody else wrote this\n'


class Scene(NamedTuple):
  """A command that succeeds.

  Attributes:
    name: of the scene.
    argv: the command and its flags; paths are relative to the folder of the scene.
    files: the input files, to be harmed.
    kept: those of them whose bytes are checked: with them changed, the output is the same or there
      is an error.
    out: its output: files, or one folder.
    keeps: whether a failed command may leave a part of the output, which the next one goes on from.
    then: further commands, before the output is compared.
  """

  name: str
  argv: tuple[str, ...]
  files: tuple[str, ...]
  kept: tuple[str, ...]
  out: tuple[str, ...]
  keeps: bool = False
  then: tuple[tuple[str, ...], ...] = ()


def write_texts(folder: pathlib.Path) -> None:
  """A small BEIR folder, two runs, metrics, and neighbours that nobody may touch."""
  rng = np.random.default_rng(0)

  def text(words: int) -> str:
    return ' '.join(WORDS[word] for word in rng.integers(len(WORDS), size=words))

  (folder / 'qrels').mkdir(parents=True)
  corpus = {f'd{number}': text(3 + number % 9) for number in range(40)}
  queries = {f'q{number}': text(2 + number % 3) for number in range(8)}
  for name, texts in (('corpus', corpus), ('queries', queries)):
    lines = (json.dumps({'_id': id_, 'text': value}) + '\n' for id_, value in texts.items())
    (folder / f'{name}.jsonl').write_text(''.join(lines))
    (folder / f'{name}.tsv').write_text(''.join(f'{i}\t{value}\n' for i, value in texts.items()))
  (folder / 'qrels' / 'test.tsv').write_text(
    'query-id\tcorpus-id\tscore\n' + ''.join(f'q{i}\td{i * 3}\t1\n' for i in range(8))
  )
  for name in ('a', 'b'):
    rows = []
    for query in queries:
      ranked = rng.permutation(40)[:10]
      rows += [f'{query} Q0 d{d} {r} {10.5 - r} {name}\n' for r, d in enumerate(ranked, start=1)]
    (folder / f'{name}.trec').write_text(''.join(rows))
  papers = (
    {'id': f'p{i}', 'title': text(4), 'abstract': text(9), 'categories': [f'c{i % 3}', f'd{i % 2}']}
    for i in range(12)
  )
  (folder / 'papers.jsonl').write_text(''.join(json.dumps(paper) + '\n' for paper in papers))
  for name in ('neighbour', '.hidden', 'config.json'):
    (folder / name).write_text(NEIGHBOUR)


def write_embeddings(folder: pathlib.Path) -> None:
  from dprjax.encoding.folders import EmbeddingsWriter, summary
  from dprjax.encoding.manifest import Meta

  rng = np.random.default_rng(1)
  made = {
    'dimension': 8,
    'dtype': 'float32',
    'backbone_sha256': 'b' * 64,
    'prompt_sha256': None,
    'pooling': 'mean',
    'normalize': True,
    'max_length': 32,
    'arithmetic': 'float32',
    'input_sha256': 'i' * 64,
  }
  # Later versions of the format record more.
  made |= {
    field.name: {str: 'x', bool: False}.get(field.type)
    for field in dataclasses.fields(Meta)
    if field.name not in made
  }
  for side, count in (('passage', 40), ('query', 8)):
    ids = [f'{"dq"[side == "query"]}{number}' for number in range(count)]
    writer = EmbeddingsWriter(folder / side, Meta(**(made | {'side': side})), summary(ids), 16)
    vectors = rng.standard_normal((count, 8), np.float32)
    for shard in writer.pending():
      rows = slice(shard.start, shard.stop)
      writer.write(shard, vectors[rows], ids[rows])
    writer.finish()


def build(folder: pathlib.Path) -> dict[str, Scene]:
  """Fills ``folder`` with the inputs of the scenes without a model; returns them by name.

  Inputs are in its folder ``in``; outputs go to its folder ``out``.
  """
  data = folder / 'in'
  write_texts(data)
  write_embeddings(data / 'embeddings')
  metrics = {
    'mean': {'nDCG@10': 0.5},
    'per_query': {'nDCG@10': {f'q{i}': i / 8 for i in range(8)}},
    'counts': {'queries_with_own_id': 0},
    'settings': {'drop_same_id': False},
  }
  (data / 'metrics.json').write_text(json.dumps(metrics))
  (folder / 'out').mkdir()
  (folder / 'out' / 'neighbour').write_text(NEIGHBOUR)
  shards = tuple(
    f'in/embeddings/{side}/{path.name}'
    for side in ('passage', 'query')
    for path in sorted((data / 'embeddings' / side).iterdir())
  )
  lines = (
    (
      'evaluate',
      '--run=in/a.trec --qrels=in/qrels/test.tsv --corpus=in/corpus.tsv',
      'metrics.json',
    ),
    (
      'bm25',
      '--corpus=in/corpus.jsonl --queries=in/queries.tsv --qrels=in/qrels/test.tsv --k=5 --k1=1.2'
      ' --b=0.7',
      'run.trec run.trec.json',
    ),
    (
      'fuse',
      '--run=bm25=in/a.trec --run=dense=in/b.trec --method=learned --qrels=in/qrels/test.tsv',
      'run.trec run.trec.json run.trec.fusion.json',
    ),
    (
      'mine',
      '--queries=in/queries.jsonl --corpus=in/corpus.jsonl --qrels=in/qrels/test.tsv'
      ' --run=in/a.trec --run=in/b.trec --reranked=in/b.trec --threshold=0.9999 --depth=8'
      ' --sample=4 --seed=1',
      'train.jsonl train.jsonl.json',
    ),
    ('report', '--metrics=A=in/metrics.json --metrics=B=in/metrics.json', 'r.md'),
    ('papers', '--input=in/papers.jsonl --dev=3 --test=4', 'papers'),
    (
      'topics',
      '--input=in/corpus.jsonl --topics=2 --sweeps=3 --seed=1 --eta=0.2 --min_documents=3',
      'topics.npz topics.npz.json',
    ),
  )
  scenes = {name: _scene(name, line, out) for name, line, out in lines}
  vectors = '--corpus=in/embeddings/passage --queries=in/embeddings/query --index=exact --k=5'
  search = _scene('search', vectors, 'run.trec run.trec.json')
  return scenes | {'search': search._replace(files=shards, kept=shards)}


def _scene(name: str, line: str, out: str, command: str = '') -> Scene:
  """A scene of the flags in a line, which name its inputs, and of its files below ``out``."""
  outs = tuple(f'out/{one}' for one in out.split())
  flags = line.split()
  inputs = (flag.rpartition('=')[2] for flag in flags)
  files = tuple(dict.fromkeys(one for one in inputs if one.startswith('in/')))
  return Scene(name, (command or name, *flags, f'--out={outs[0]}'), files, (), outs)


def add_models(
  folder: pathlib.Path,
  workdir: pathlib.Path,
  prompt: pathlib.Path,
  cross_encoder: pathlib.Path,
) -> dict[str, Scene]:
  """Adds models to the folder of `build`; returns the scenes with a model by name.

  Args:
    folder: as for `build`.
    workdir: of a finished training with a backbone from scratch.
    prompt: its export.
    cross_encoder: the folder of a model.
  """
  from dprjax import Retriever

  data = folder / 'in'
  shutil.copytree(workdir, data / 'workdir')
  shutil.copytree(workdir / 'backbone', data / 'backbone')
  shutil.copy(prompt, data / 'prompt.npz')
  shutil.copytree(cross_encoder, data / 'reranker')
  retriever = Retriever.load(data / 'backbone', data / 'prompt.npz')
  retriever.index(data / 'corpus.jsonl')
  retriever.save(data / 'retriever')
  searched = tuple(
    str(path.relative_to(folder))
    for path in sorted((data / 'retriever').rglob('*'))
    if path.is_file() and path.name not in ('README.md', 'dprjax.json')
  )
  models = {
    name: tuple(f'in/{name}/{path.name}' for path in sorted((data / name).iterdir()))
    for name in ('backbone', 'reranker')
  }
  latest = max(int(path.name) for path in (data / 'workdir' / 'checkpoints').iterdir())
  steps = tuple(
    str(path.relative_to(folder))
    for path in sorted((data / 'workdir' / 'checkpoints' / str(latest)).rglob('*'))
    if path.is_file()
  )
  texts = ('in/queries.jsonl', 'in/prompt.npz')
  weights = ('model.safetensors', 'tokenizer.json', 'vocab.txt')
  encode = _scene(
    'encode',
    '--backbone=in/backbone --prompt=in/prompt.npz --side=query --input=in/queries.jsonl'
    ' --max_length=8 --batch_size=8 --shard_rows=4',
    'queries',
  )
  retriever = _scene(
    'retriever',
    '--retriever=in/retriever --queries=in/queries.jsonl --k=5',
    'run.trec run.trec.json',
    'search',
  )
  rerank = _scene(
    'rerank',
    '--backbone=in/reranker --run=in/a.trec --queries=in/queries.jsonl --corpus=in/corpus.jsonl'
    ' --depth=3 --max_length=16 --batch_size=8 --shard_pairs=8',
    'run.trec run.trec.json',
  )
  export = _scene('export', f'--force --workdir=in/workdir --step={latest}', 'prompt.npz')
  convert = _scene(
    'convert',
    '--from=in/prompt.npz --backbone=in/backbone --format=npz --card=true',
    'model',
    'export',
  )
  trained = tuple(f'in/workdir/{name.removeprefix("in/")}' for name in models['backbone'])
  scenes = (
    encode._replace(
      files=(*texts, *models['backbone']),
      kept=tuple(name for name in models['backbone'] if name.endswith(weights)),
      keeps=True,
    ),
    retriever._replace(
      files=('in/queries.jsonl', *searched),
      kept=tuple(name for name in searched if '/vectors/' in name or name.endswith('.npz')),
    ),
    rerank._replace(
      files=('in/corpus.jsonl', 'in/queries.jsonl', 'in/a.trec', *models['reranker']), keeps=True
    ),
    export._replace(files=('in/workdir/config.json', *steps, *trained), kept=steps),
    convert._replace(
      files=('in/prompt.npz', *models['backbone']),
      kept=tuple(name for name in models['backbone'] if name.endswith('model.safetensors')),
    ),
  )
  return {scene.name: scene for scene in scenes}


def more(scenes: dict[str, Scene]) -> dict[str, Scene]:
  """Scenes that take seconds: only killed, not harmed."""
  search = scenes['search']
  flags = tuple(word for word in search.argv if not word.startswith('--index='))
  vectors = '--uri=milvus:out/index.db --queries=in/embeddings/query --k=5 --out=out/run.trec'
  index = ('index', '--uri=milvus:out/index.db', '--upsert=in/embeddings/passage')
  bm25 = scenes['bm25']
  extra = (
    search._replace(
      name='scann', argv=(*flags, '--index=scann', '--index_dir=out/index'), keeps=True
    ),
    bm25._replace(name='kept_bm25', argv=(*bm25.argv, '--index_dir=out/index'), keeps=True),
    Scene(
      'index',
      index,
      search.files,
      (),
      ('out/run.trec',),
      keeps=True,
      then=(('search', *vectors.split()),),
    ),
  )
  return {scene.name: scene for scene in extra}


def copy(source: pathlib.Path, target: pathlib.Path, harmed: str | None = None) -> None:
  """Copies the folder of a scene; large files are links, except the one to be harmed."""

  def place(one: str, other: str) -> None:
    relative = pathlib.Path(other).relative_to(target)
    if os.path.getsize(one) < 1 << 16 or str(relative) == harmed:
      shutil.copyfile(one, other)
    else:
      os.link(one, other)

  shutil.copytree(source, target, copy_function=place)


def content(folder: pathlib.Path, below: str = '') -> dict[str, str]:
  """The digest of every file, and the kind of other entries, by path."""
  found = {}
  for path in sorted((folder / below).rglob('*')):
    name = str(path.relative_to(folder))
    if path.is_symlink() or not path.is_file():
      found[name] = 'folder' if path.is_dir() else 'special'
    else:
      found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
  return found


def output(folder: pathlib.Path, scene: Scene) -> dict[str, object]:
  """The content of the output without values that differ between runs, such as seconds."""
  found: dict[str, object] = {}
  for name in scene.out:
    path = folder / name
    for file in sorted(path.rglob('*')) if path.is_dir() else [path]:
      if file.suffix == '.json':
        found[str(file.relative_to(folder))] = _steady(json.loads(file.read_text()))
      elif file.is_file():
        found[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
  return found


def _steady(value: object) -> object:
  if isinstance(value, dict):
    return {
      key: _steady(item)
      for key, item in value.items()
      if key not in ('seconds', 'queries_per_second') and not key.endswith('sha256')
    }
  return [_steady(item) for item in value] if isinstance(value, list) else value
