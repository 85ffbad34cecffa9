"""Makes BEIR folders of papers, for retrieval by their categories (Topic-DPR section 4.1).

    dprjax papers --input=arxiv.jsonl.xz --out=papers --train=3000 --dev=500 --test=1000

The input has id, title, abstract and categories on each line. Titles are queries, abstracts are
passages without titles. A hash of the id puts a paper into OUT/train, OUT/dev or OUT/test. In
train, only the abstract of the same paper is relevant to a title (batches compare categories); in
dev and test, every abstract with a common category is. Papers without title, abstract or categories
are skipped.
"""

import dataclasses
import logging
from collections.abc import Sequence

from dprjax.base import cli, files, hashes, outputs, provenance
from dprjax.base.counts import ReadReport
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress
from dprjax.papers.topic_dpr.paper_records import Paper, read_papers, write_beir

logger = logging.getLogger('dprjax')

FORMAT = 'dprjax.papers'
SPLITS = ('train', 'dev', 'test')
_LACKS = 'papers without {}: skipped'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  input: str = flag('papers: an arXiv jsonl, perhaps compressed', metavar='FILE')
  out: str = flag('the new folder', metavar='DIR')
  train: int = flag('papers for training; 0: all not in dev or test', 0, least=0)
  dev: int = flag('papers of dev', 0, least=0)
  test: int = flag('papers of test', 0, least=0)
  seed: int = flag('of the choice', 0, least=0)


def convert(path: str, out: str, sizes: dict[str, int], seed: int = 0) -> dict[str, int]:
  """Writes a folder for each split with papers; returns numbers of judgements.

  Args:
    path: see ``papers.topic_dpr.paper_records``.
    sizes: papers of each split; 0: none, but for train all that are left.
  """
  report = ReadReport()
  whole = []
  progress = Progress('papers', task=f'reading {path}')
  for paper in read_papers(path):
    lacks = [
      name
      for name, there in (
        ('title', paper.title),
        ('abstract', paper.passage),
        ('categories', paper.categories),
      )
      if not there
    ]
    report.count('papers')
    for name in lacks:
      report.count(_LACKS.format(name), paper.id)
    if not lacks:
      whole.append(paper)
    progress.advance()
  logger.info('%s\n%s', path, report)
  whole.sort(key=lambda paper: hashes.draw(paper.id, seed, ''))
  needed = sum(sizes.values()) + (not sizes['train'])
  if len(whole) < needed:
    raise InputError(
      f'{path}: {len(whole):,} complete papers; --train, --dev and --test need {needed:,}'
    )
  # Train last, so that test and dev do not depend on its size.
  parts: dict[str, list[Paper]] = {}
  start = 0
  for split in ('test', 'dev', 'train'):
    stop = start + sizes[split] if sizes[split] or split != 'train' else len(whole)
    parts[split] = whole[start:stop]
    start = stop
  judgements = {}
  with files.atomic_path(out) as folder:
    folder.mkdir(parents=True)
    for split in SPLITS:
      if parts[split]:
        qrels = write_beir(folder / split, parts[split], split, own=split == 'train')
        judgements[split] = sum(map(len, qrels.values()))
    counts = {split: len(papers) for split, papers in parts.items()}
    provenance.write_mark(folder, FORMAT, seed=seed, papers=counts)
  for split, count in judgements.items():
    logger.info(
      '%s/%s: %s papers, %.1f relevant a title',
      out,
      split,
      f'{len(parts[split]):,}',
      count / len(parts[split]),
    )
  return judgements


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  with outputs.claim_folder(
    args.out,
    {'--input': args.input},
    what='papers of dprjax.papers',
    ours=lambda folder: provenance.read_mark(folder).get('format') == FORMAT,
  ):
    sizes = {'train': args.train, 'dev': args.dev, 'test': args.test}
    convert(args.input, args.out, sizes, args.seed)


if __name__ == '__main__':
  main()
