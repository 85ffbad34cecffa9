"""Makes BEIR folders of papers, for retrieval by their categories (Topic-DPR section 4.1).

    dprjax papers --input=arxiv.jsonl.xz --out=papers --train=3000 --dev=500 --test=1000

The input is an arXiv jsonl with id, title, abstract and categories on each line; categories are a
list, or a text with spaces in between. Titles are queries, abstracts are passages without titles. A
hash of the id puts a paper into OUT/train, OUT/dev or OUT/test. In train, only the abstract of the
same paper is relevant to a title (batches compare categories); in dev and test, every abstract with
a common category is. Papers without title, abstract or categories are skipped.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from dprjax.base import cli, files, hashes, outputs, provenance, reading
from dprjax.base.counts import ReadReport
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress
from dprjax.text import records, texts
from dprjax.text.fields import Id, UniqueIds, check_id, labels
from dprjax.text.qrels import Qrels, write_dataset

logger = logging.getLogger('dprjax')

FORMAT = 'dprjax.papers'
SPLITS = ('train', 'dev', 'test')
_LACKS = 'papers without {}: skipped'
_MOST_RELATED = 10**8


class Paper(NamedTuple):  # fields missing in the file are empty
  id: str
  title: str
  passage: str
  categories: tuple[str, ...]


class _Record(msgspec.Struct):
  bare_id: Id | None = msgspec.field(default=None, name='id')
  id: Id | None = msgspec.field(default=None, name='_id')
  title: str | None = None
  abstract: str | None = None
  text: str | None = None
  categories: str | list[str] | None = None


def read_papers(path: files.PathLike) -> Iterator[Paper]:
  """Reads an arXiv jsonl, a BEIR corpus.jsonl or, without categories, a tsv; perhaps compressed.

  The first record of a jsonl tells its kind. A passage of a corpus begins with its title.
  """
  if not records.is_json(path):
    for row in texts.read_texts(path, 'passage'):
      yield Paper(row.id, '', row.text, ())
    return
  ids = UniqueIds(path, 'paper')
  arxiv: bool | None = None
  for number, where, record in reading.read_records(path, 'papers', _Record):
    if arxiv is None:
      arxiv = record.abstract is not None or (record.id is None and record.bare_id is not None)
    raw_id, text = (record.bare_id, record.abstract or '') if arxiv else (record.id, record.text)
    if raw_id is None or text is None:
      raise InputError(f'{where}: {"id" if arxiv else "_id or text"} is missing')
    id_, title = check_id(raw_id, where), (record.title or '').strip()
    ids.add(id_, number)
    passage = text.strip() if arxiv else f'{title} {text}'.strip()
    yield Paper(id_, title, passage, labels(record.categories, where))


def write_beir(folder: files.PathLike, papers: Sequence[Paper], split: str, paired: bool) -> Qrels:
  """Writes papers as a BEIR folder and returns its judgements.

  If ``paired``, only the abstract of the same paper is relevant to a title; otherwise all abstracts
  with a common category are.
  """
  qrels = {paper.id: {paper.id: 1} for paper in papers} if paired else related(papers)
  passages = (
    {'_id': paper.id, 'title': '', 'text': paper.passage, 'categories': list(paper.categories)}
    for paper in papers
  )
  titles = ({'_id': paper.id, 'text': paper.title} for paper in papers)
  write_dataset(folder, passages, titles, {split: qrels})
  return qrels


def related(papers: Sequence[Paper]) -> Qrels:
  """Paper id -> ids of papers with a common category; InputError above 100 million pairs."""
  members: dict[str, list[int]] = {}
  for number, paper in enumerate(papers):
    for category in paper.categories:
      members.setdefault(category, []).append(number)
  if (most := sum(len(rows) ** 2 for rows in members.values())) > _MOST_RELATED:
    raise InputError(
      f'{len(papers):,} papers have up to {most:,} pairs with a common category, too many; '
      'choose fewer papers to measure on'
    )
  return {
    paper.id: {
      papers[number].id: 1
      for number in sorted({i for category in paper.categories for i in members[category]})
    }
    for paper in papers
  }


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

  ``sizes`` are the papers of each split; 0: none, but for train all that are left.
  """
  report = ReadReport()
  whole = []
  progress = Progress('papers', task=f'reading {path}')
  for paper in read_papers(path):
    parts_of = {'title': paper.title, 'abstract': paper.passage, 'categories': paper.categories}
    lacks = [name for name, part in parts_of.items() if not part]
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
        qrels = write_beir(folder / split, parts[split], split, paired=split == 'train')
        judgements[split] = sum(map(len, qrels.values()))
    counts = {split: len(papers) for split, papers in parts.items()}
    provenance.write_mark(folder, FORMAT, seed=seed, papers=counts)
  for split, count in judgements.items():
    each = count / counts[split]
    logger.info('%s/%s: %s papers, %.1f relevant a title', out, split, f'{counts[split]:,}', each)
  return judgements


def _command(args: Flags) -> None:
  with outputs.claim_folder(
    args.out,
    {'--input': args.input},
    what='papers of dprjax.papers',
    ours=lambda folder: provenance.read_mark(folder).get('format') == FORMAT,
  ):
    sizes = {'train': args.train, 'dev': args.dev, 'test': args.test}
    convert(args.input, args.out, sizes, args.seed)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
