"""Papers (title, abstract, categories) from an arXiv jsonl or a BEIR corpus.

| record | id | title | passage | categories |
|---|---|---|---|---|
| arXiv: `{id, title, abstract, categories}` | id | title | the abstract | categories |
| BEIR: `{_id, title, text, categories}` | _id | title | title and text, as encoded | categories |

`write_beir` leaves titles of passages empty, since titles are the queries. Categories are a list,
or a text with spaces in between.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text import records, texts
from dprjax.text.fields import Id, UniqueIds, check_id, labels
from dprjax.text.qrels import Qrels, write_dataset

_MOST_RELATED = 10**8


class Paper(NamedTuple):
  """One paper; fields missing in the file are empty."""

  id: str
  title: str
  passage: str
  categories: tuple[str, ...]


class _Record(msgspec.Struct):
  """A line of arXiv, or of a BEIR corpus."""

  bare_id: Id | None = msgspec.field(default=None, name='id')
  id: Id | None = msgspec.field(default=None, name='_id')
  title: str | None = None
  abstract: str | None = None
  text: str | None = None
  categories: str | list[str] | None = None


def read_papers(path: files.PathLike) -> Iterator[Paper]:
  """Reads an arXiv jsonl, a BEIR corpus.jsonl or, without categories, a tsv; perhaps compressed.

  The first record of a jsonl decides between the first two.
  """
  if not records.is_json(path):
    for found in texts.read_texts(path, 'passage'):
      yield Paper(found.id, '', found.text, ())
    return
  ids = UniqueIds(path, 'paper')
  arxiv: bool | None = None
  for number, where, record in reading.read_records(path, 'papers', _Record):
    if arxiv is None:
      arxiv = record.abstract is not None or (record.id is None and record.bare_id is not None)
    given, text = (record.bare_id, record.abstract or '') if arxiv else (record.id, record.text)
    if given is None or text is None:
      raise InputError(f'{where}: {"id" if arxiv else "_id or text"} is missing')
    id_, title = check_id(given, where), (record.title or '').strip()
    ids.add(id_, number)
    passage = text.strip() if arxiv else f'{title} {text}'.strip()
    yield Paper(id_, title, passage, labels(record.categories, where))


def write_beir(folder: files.PathLike, papers: Sequence[Paper], split: str, own: bool) -> Qrels:
  """Writes papers as a BEIR folder: titles are queries, abstracts passages, without a title.

  Args:
    papers: with title, passage and categories.
    own: whether only the abstract of the same paper is relevant to a title; otherwise all abstracts
      with a common category are.

  Returns:
    The judgements.
  """
  qrels = {paper.id: {paper.id: 1} for paper in papers} if own else related(papers)
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
