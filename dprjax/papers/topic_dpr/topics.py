"""Finds the topics of a corpus, for topic-based prompts (Topic-DPR section 3.2).

    dprjax topics --input=arxiv.jsonl.xz --out=topics.npz

The input is a corpus (BEIR jsonl or tsv), or the abstracts of an arXiv jsonl. A hash of the ids
chooses at most --max_documents.

hlda: hierarchical LDA with three levels; topics are the largest branches under the root.
lda: LDA.

The agreement is the share of documents whose words lead to the topic that the method gave them.
topics.npz.json has the numbers. The same documents, settings and seed give the same topics on the
same kind of CPU.
"""

import dataclasses
import heapq
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dprjax.base import cli, flags, hashes, outputs
from dprjax.base.counts import ReadReport, counted
from dprjax.base.flags import flag
from dprjax.base.progress import Progress, duration
from dprjax.papers.topic_dpr import topic_models
from dprjax.papers.topic_dpr.papers import read_papers
from dprjax.papers.topic_dpr.topic_models import MOST_DOCUMENTS, Fitted, TopicSettings

logger = logging.getLogger('dprjax')

_WORDS = 10  # of a topic, shown in a line
_USUAL = TopicSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  input: str = flag('a corpus, or an arXiv jsonl', metavar='FILE')
  out: str = flag('the topics', metavar='topics.npz')
  kind: str = flag('how', _USUAL.kind, choices=topic_models.KINDS)
  topics: int = flag('number of topics kept, the largest', _USUAL.topics, most=1000, metavar='K')
  max_documents: int = flag('most documents used to find topics', MOST_DOCUMENTS, metavar='N')
  sweeps: int = flag('of Gibbs sampling', _USUAL.sweeps, most=10**6)
  alpha: float = flag('Dirichlet parameter for the topics of a document', _USUAL.alpha, most=10**6)
  eta: float = flag('Dirichlet parameter for the words of a topic', _USUAL.eta, most=10**6)
  gamma: float = flag('larger values make hlda open more topics', _USUAL.gamma, most=10**6)
  min_documents: int = flag('fewest documents with a word', _USUAL.min_documents, metavar='N')
  seed: int = flag('', _USUAL.seed, least=0, most=2**31 - 1)


def read_documents(path: str, most: int, seed: int) -> tuple[list[str], dict[str, int]]:
  report = ReadReport()
  progress = Progress('documents', task=f'reading {path}')

  def drawn() -> Iterator[tuple[bytes, bytes, str]]:
    for paper in read_papers(path):
      report.count('documents')
      if paper.passage:
        chosen, place = (hashes.draw(paper.id, seed, choice) for choice in ('topics', ''))
        yield chosen, place, paper.passage
      else:
        report.count('documents without text or abstract: skipped', paper.id)
      progress.advance()

  # Keeps only as many as are used.
  documents = heapq.nsmallest(most, drawn())
  logger.info('%s\n%s', path, report)
  documents.sort(key=lambda document: document[1])  # the order affects the topics
  return [text for *_, text in documents], dict(report.counts)


def describe(fitted: Fitted) -> dict[str, Any]:
  topics = fitted.topics
  return {
    'kind': topics.meta['kind'],
    'agreement': fitted.agreement,
    'sizes': fitted.all_sizes,
    'dropped': int(np.count_nonzero(fitted.sampled < 0)),
    'topics': [
      {
        'words': topics.names[k],
        'documents': int(topics.sizes[k]),
        'assigned': int(np.count_nonzero(fitted.assigned == k)),
      }
      for k in range(len(topics))
    ],
    'vocabulary': len(topics.vocabulary),
    'settings': topics.meta,
  }


def _command(args: Flags) -> None:
  if args.kind != 'hlda':
    flags.refuse(args, ['gamma'], 'kind=hlda')
  with outputs.claim(args.out, {'--input': args.input}):
    _find(args)


def _find(args: Flags) -> None:
  settings = TopicSettings(**{name: getattr(args, name) for name in TopicSettings._fields})
  texts, counts = read_documents(args.input, args.max_documents, settings.seed)
  began = time.monotonic()
  fitted = topic_models.fit(texts, settings, args.input)
  seconds = time.monotonic() - began
  report = describe(fitted)
  topic_models.save_topics(args.out, fitted.topics)
  outputs.write_report(args.out, {**report, 'counts': counts, 'seconds': round(seconds, 1)})
  cli.print_table(
    ['topic', 'documents', 'by their words'],
    [
      [' '.join(topic['words'][:_WORDS]), f'{topic["documents"]:,}', f'{topic["assigned"]:,}']
      for topic in report['topics']
    ],
  )
  others = fitted.all_sizes[len(fitted.topics) :]
  print(
    f'{counted(len(fitted.all_sizes), "topics")} in '
    f'{counted(fitted.topics.meta["documents"], "documents")}'
    + (f'; not kept: {", ".join(f"{size:,}" for size in others[:20])} documents' if others else '')
    + f'. Among documents of kept topics, {fitted.agreement:.1%} have the same topic by their '
    f'words. {duration(seconds)}.'
  )


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
