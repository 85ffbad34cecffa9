"""Prompts without labels: queries from passages or from a small decoder, against judged queries.

    python experiments/gguf_backbone.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/no_labels.py --data=../shared/data --out=runs/no-labels \\
        --decoder=runs/smollm2

Each run is the pipeline of configs/nolabels.py, in this process, on the corpus of a set. The
judgements of its test queries measure the systems and are hidden from the training. Runs and
tables are as in experiments/decoder.py (experiments/ledgers/no_labels.jsonl).

Rules, fixed before the runs:

- There are four sets: SciFact, Cranfield, MedQuAD and QNLI, at most 2,000 passages each. All
  systems read 64 tokens of a passage. 300 passages get queries.
- Sources of queries are the passages themselves (`extracted`, up to three a passage), and
  SmolLM2-135M-Instruct (`generated`): greedy, one query a passage, with two training queries as
  examples. A server of the OpenAI interface gives the same answers as a file of them.
- 60 updates of 16 queries; everything else as in the config. No rate or option is chosen by judged
  queries.
- Half of a step is the sum of the cosines of the frozen encoder and of the prompt.
- `judged` trains with a hundred judged queries and the same updates, as dptdr.py:beir,query does;
  `continued` does so from the prompt of `extracted`.
- Gains are differences of nDCG@10 from the frozen encoder, on the test queries, with a paired
  bootstrap; one seed first, more where there is time. The worst of the sets is named.
"""

import functools
import importlib
import json
import pathlib
import shutil

import jax
import numpy as np
from etils import epath

import evaluation
import gain_sets
import systems
import trials
from dprjax.asking import pipeline
from dprjax.data import text
from dprjax.formats import texts, trec
from dprjax.formats.qrels import read_qrels
from dprjax.retrieval import best, embeddings, exact
from dprjax.runtime import config as configs
from dprjax.runtime import mesh, stages

SETS = ('cranfield', 'qnli', 'medquad', 'scifact')
PARTS = ('extracted', 'generated', 'judged', 'continued')
JUDGED = 100
UPDATES, BATCH = 60, 16
QUERY_LENGTH, PASSAGE_LENGTH = 48, 64
ASKED = 300  # passages
MODEL = 'SmolLM2-135M-Instruct'
BACK = 'queries that find their passages'
TEMPLATE = '{examples}\nPassage: {passage}\nQueries:\n'
PROMPT_WORDS, EXAMPLE_WORDS, EXAMPLES, NEW_TOKENS = 80, 40, 2, 24
TRAINING = (
  f'batch_size={BATCH}',
  f'steps={UPDATES}',
  'epochs=0.0',
  f'data.query_max_length={QUERY_LENGTH}',
  f'data.query_buckets=({QUERY_LENGTH},)',
  f'data.passage_max_length={PASSAGE_LENGTH}',
  'eval.corpus_limit=100',  # no checkpoint is chosen
  'eval.choose=False',
)
LABELS = {
  'bm25': 'BM25',
  'fused': 'frozen with BM25',
  'extracted': 'prompt, extracted queries',
  'extracted/half': 'the same, half of a step',
  'extracted/fused': 'the same, with BM25',
  'generated': 'prompt, generated queries',
  'generated/half': 'the same, half of a step',
  'generated/fused': 'the same, with BM25',
  'judged': f'prompt, {JUDGED} judged queries',
  'continued': f'prompt, extracted queries, then {JUDGED} judged ones',
}


def main():
  parser = trials.parser(__doc__, PARTS, '0')
  parser.add_argument('--sets', default=','.join(SETS), help='some of them, separated by commas')
  parser.add_argument('--decoder', help='the folder of SmolLM2-135M, for generated queries')
  stages._run = run_here
  Experiment(trials.begin(parser, PARTS)).go()


def run_here(command):
  """Runs ``python -m dprjax.COMMAND`` in this process; returns its status."""
  module = importlib.import_module(command[2])
  try:
    module.main(list(command[3:]))
  except SystemExit as end:
    return end.code or 0
  return 0


class Experiment:
  """The runs on all sets."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.source = pathlib.Path(args.data).resolve()
    self.settings = {
      'lengths': [QUERY_LENGTH, PASSAGE_LENGTH],
      'training': TRAINING,
      'asked': ASKED,
      'judged': JUDGED,
    }
    self.kept = trials.LEDGERS / 'no_labels.jsonl'
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, self.kept, self.settings)
    self.devices = mesh.make_mesh({'data': 1}, jax.devices()[:1])

  def go(self):
    for part in self.args.part.split(','):
      if part == 'tables':
        self.tables()
        continue
      for seed in map(int, self.args.seeds.split(',')):
        for name in self.args.sets.split(','):
          work = functools.partial(getattr(self, part), name, seed)
          trials.measure(self.out, f'{name}/{part}', seed, work)

  @functools.cache  # noqa: B019
  def folder(self, name):
    setting = gain_sets.Setting(name, JUDGED)
    return gain_sets.prepare(self.source, self.out / 'data', name, setting)

  def extracted(self, name, seed):
    return self.pipeline(name, seed, 'extracted', [f'queries.passages={ASKED}'])

  def generated(self, name, seed):
    return self.pipeline(name, seed, 'generated', [f'queries.answers={self.answers(name)}'])

  def pipeline(self, name, seed, source, settings):
    """Runs the pipeline; nDCG@10 of each test query by each system."""
    folder, work = self.folder(name), self.workdir(name, seed, source)
    config = configs.parse(
      [
        f'--config={trials.ROOT}/configs/nolabels.py:beir',
        f'--config.data.dir={folder}',
        f'--config.data.judged={folder}',
        f'--config.seed={seed}',
        *(f'--config.{one}' for one in settings),
        *(f'--config.retriever.{one}' for one in TRAINING),
        f'--config.retriever.eval.every={UPDATES}',
        f'--config.retriever.checkpoint.every={UPDATES}',
        f'--config.retriever.backbone.path={self.args.backbone}',
      ]
    )
    resumed = (work / 'stages.json').exists()
    try:
      pipeline.NoLabels(config, epath.Path(work)).run()
    except SystemExit:  # a stage has said why
      counted = self.counted(work)
      if counted['found'].get(BACK, 0) > BATCH:
        raise
      return counted | {'scores': {}, 'resumed': resumed}  # too few to train on
    scores = {}
    for system in ('frozen', 'bm25', 'fused', 'prompt', 'prompt-fused'):
      found = json.loads((work / 'metrics' / f'{system}.json').read_text())
      scores[system] = found['per_query']['nDCG@10']
    ids = sorted(scores['frozen'])
    scores = {system: [own.get(id_, 0.0) for id_ in ids] for system, own in scores.items()}
    scores['half'] = self.half(work, folder)
    return self.counted(work) | {'scores': scores, 'resumed': resumed}

  def counted(self, work):
    """The number of queries made, and of those left by the filters."""
    report = json.loads((work / 'queries' / 'report.json').read_text())
    found = json.loads((work / 'queries' / 'qrels' / 'found.tsv.json').read_text())
    return {'queries': report['counts'], 'kinds': report['kinds'], 'found': found['counts']}

  def half(self, work, folder):
    """nDCG@10 of each test query by the mean of both vectors."""
    frozen, prompt = (
      embeddings.load_embeddings(work / 'embeddings' / f'{one}-judged')
      for one in ('frozen', 'prompt')
    )
    passages = embeddings.load_embeddings(work / 'passages')
    vectors = frozen.vectors() + prompt.vectors()
    top = exact.search(
      vectors, passages.vectors(), evaluation.DEPTH, ids_at=best.ids_of(passages.ids)
    )
    run = trec.run_from_rows(frozen.ids, passages.ids, top.rows, top.scores)
    values = evaluation.measures.measure(
      run, read_qrels(folder / 'qrels' / 'test.tsv'), evaluation.MEASURES
    )['per_query']['nDCG@10']
    return [values[id_] for id_ in sorted(values)]

  def workdir(self, name, seed, source):
    return self.out / 'runs' / f'{name}-{source}-{seed}'

  def answers(self, name):
    """A file with answers of the decoder about passages of a set; made if it is missing."""
    path = self.out / 'answers' / f'{name}.answers.jsonl'
    if not path.exists():
      import generation

      folder = path.parent / name
      folder.mkdir(parents=True, exist_ok=True)
      self.write_examples(name, folder / 'examples.jsonl')
      (folder / 'template.txt').write_text(TEMPLATE)
      decoder = generation.Decoder(self.args.decoder, 16, 320, '{prompt}', '\u010a')
      server = generation.serve(decoder.answer)
      flags = {
        'corpus': self.folder(name) / 'corpus.jsonl',
        'out': path.parent / f'{name}.part',
        'passages': ASKED,
        'per_passage': 1,
        'endpoint': f'http://127.0.0.1:{server.server_port}/v1',
        'model': MODEL,
        'template': folder / 'template.txt',
        'examples': folder / 'examples.jsonl',
        'prompt_words': PROMPT_WORDS,
        'concurrency': 16,
        'temperature': 0,
        'max_tokens': NEW_TOKENS,
        'timeout': 3600,
      }
      command = ['python', '-m', 'dprjax.queries']
      command += [f'--{flag}={value}' for flag, value in flags.items()]
      if status := run_here(command):
        raise SystemExit(status)
      pathlib.Path(f'{flags["out"]}.answers.jsonl').rename(path)
    return path

  def write_examples(self, name, path):
    """The first training queries and beginnings of their passages."""
    folder = self.folder(name)
    passages = {one.id: one.text for one in texts.read_texts(folder / 'corpus.jsonl', 'passage')}
    queries = {one.id: one.text for one in texts.read_texts(folder / 'queries.jsonl', 'query')}
    rows = []
    for query, docs in read_qrels(folder / 'qrels' / 'train.tsv').items():
      passage = next((passages[doc] for doc, grade in docs.items() if grade > 0), None)
      if passage is not None and len(rows) < EXAMPLES:
        words = passage.split()[:EXAMPLE_WORDS]
        rows.append({'passage': ' '.join(words), 'query': queries[query]})
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))

  def judged(self, name, seed):
    return self.train(name, seed, 'judged')

  def continued(self, name, seed):
    prompt = self.workdir(name, seed, 'extracted') / 'prompt.npz'
    trials.check_here(self.out, {'run': f'{name}/extracted', 'seed': seed}, prompt)
    return self.train(name, seed, 'continued', f'prompt.init_from={prompt}')

  def train(self, name, seed, part, *options):
    """Trains on judged queries only; nDCG@10 of each test query."""
    folder, work = self.folder(name), self.workdir(name, seed, part)
    passages = self.workdir(name, seed, 'extracted') / 'passages'
    trials.check_here(self.out, {'run': f'{name}/extracted', 'seed': seed}, passages)
    config = systems.parse(
      'dptdr.py:beir,query',
      [
        f'backbone.path={self.args.backbone}',
        f'data.dir={folder}',
        f'data.passage_embeddings={passages}',
        'data.folds=0',
        'data.hold_out=0.0',
        f'checkpoint.every={UPDATES}',
        f'seed={seed}',
        *TRAINING,
        *options,
      ],
    )
    step = systems.train(config, work).step
    backbone = systems.load(self.args.backbone)
    trained = trials.restore(work, backbone, step)
    model = (backbone, text.load_tokenizer(backbone.path), self.devices, config, trained)
    found = evaluation.search(*model, folder, passages)
    shutil.rmtree(work)
    return {'scores': {'prompt': found['scores']['nDCG@10']}}

  def tables(self):
    """Prints tables of all finished runs; with --docs, writes them there and keeps the ledger."""
    lines = trials.ledger(self.out)
    found = {}  # scores by system, seed and set
    for line in lines:
      name, part = line['run'].split('/')
      scores = {key: np.array(own) for key, own in line['scores'].items()}
      plain = {'frozen': 'frozen', 'bm25': 'bm25', 'fused': 'fused'} if part == 'extracted' else {}
      own = {'prompt': part, 'half': f'{part}/half', 'prompt-fused': f'{part}/fused'}
      for key, system in (plain | own).items():
        if key in scores:
          found.setdefault(system, {}).setdefault(line['seed'], {})[name] = scores[key]
    names = [name for name in SETS if any(name in own for own in found['frozen'].values())]
    head = ['nDCG@10', *names, 'mean gain over frozen', 'worst']
    rows = [['frozen encoder', *(self.cell(found['frozen'], name) for name in names), '', '']]
    rows += [
      [label, *(self.cell(found[system], name) for name in names), *self.gain(found, system)]
      for system, label in LABELS.items()
      if system in found
    ]
    made = f'{trials.table(head, rows)}\n{self.counts(lines)}'
    commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
    made += f'\n{len(lines)} runs; commit {commits}.\n'
    print(made)
    trials.write(self.out / 'results.md', made)
    if self.args.docs:
      self.publish(made)
      trials.keep(self.out, self.kept, self.settings)

  def publish(self, made):
    trials.publish(self.args.docs, 'no_labels', made, [])

  def cell(self, seeds, name):
    return trials.cell(own[name].mean() for own in seeds.values() if name in own)

  def gain(self, found, system):
    """The mean gain over the sets that a system has, its interval, and its worst set."""
    frozen, ours = found['frozen'], found[system]
    names = [name for name in SETS if all(name in own for own in ours.values())]
    compared = trials.compare(ours, frozen, names)
    if not names or compared is None:
      return ['', '']
    worst = {
      name: np.mean([ours[s][name].mean() - frozen[s][name].mean() for s in ours if s in frozen])
      for name in names
    }
    low = min(worst, key=worst.get)
    mean, under, over, _ = compared
    return [f'{mean:+.4f} [{under:+.4f}, {over:+.4f}]', f'{worst[low]:+.4f} ({low})']

  def counts(self, lines):
    """The numbers of queries made and left."""
    rows = []
    for line in lines:
      if 'queries' in line:
        name, part = line['run'].split('/')
        left = sum(n for what, n in line['queries'].items() if what.startswith('queries left out'))
        kept = line['queries']['queries']
        back = line['found'].get(BACK, 0)
        rows.append([name, part, str(line['seed']), str(kept + left), str(kept), str(back)])
    return trials.table(['set', 'queries', 'seed', 'made', 'usable', 'find their passages'], rows)


if __name__ == '__main__':
  main()
