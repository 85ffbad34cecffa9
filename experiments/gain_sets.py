"""Settings of experiments: sets of ../shared/data and of docstrings as BEIR folders.

A setting is a source and a choice of its training queries. All settings of a source share its
corpus and its test queries. A corpus has all judged passages of the queries here and others, by a
hash, up to 2,000 (ClariQ, which has no more, and the larger MedQuAD: 4,000; the largest: 8,000).
Queries are split by a hash of their ids where a source has no splits of its own. Texts are never
changed.
"""

import functools
import hashlib
import json
import pathlib
import re
import tempfile
from typing import NamedTuple

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.papers.topic_dpr import papers as records
from dprjax.text import docstrings, texts
from dprjax.text.qrels import read_qrels, write_qrels

PASSAGES = 2000  # of a corpus, but all judged ones
LARGER = {'clariq': 2, 'medquad-large': 2, 'medquad-8000': 4, 'medquad-cut': 4}  # times as many
WRONG = 0.2  # of the positives, where labels are degraded so
JUDGED = 40  # passages of a query of TREC, at most
# Words of a question without content.
FUNCTION_WORDS = (
  'a about an and are as at be being by can do does for from has have how in is it many much of on '
  'or the there to what which who with you'
)


class Setting(NamedTuple):
  """The training queries of a setting.

  Attributes:
    source: of the corpus and of the test queries.
    train: training queries, at most.
    degraded: '', or 'one': each query keeps one of its positives; 'wrong': a fifth of the queries
      have another passage as their positive.
  """

  source: str
  train: int
  degraded: str = ''


SETTINGS = {
  'scifact': Setting('scifact', 809),
  'cranfield': Setting('cranfield', 112),
  'clariq': Setting('clariq', 187),
  'msmarco-dl': Setting('msmarco-dl', 43),
  'arxiv-300': Setting('arxiv', 300),
  'qnli-300': Setting('qnli', 300),
  'medquad-50': Setting('medquad', 50),
  'medquad-100': Setting('medquad', 100),
  'medquad-300': Setting('medquad', 300),
  'medquad-1000': Setting('medquad', 1000),
  'docstrings-50': Setting('docstrings', 50),
  'docstrings-100': Setting('docstrings', 100),
  'docstrings-300': Setting('docstrings', 300),
  'docstrings-1000': Setting('docstrings', 1000),
  'clariq-one': Setting('clariq', 187, 'one'),
  'cranfield-one': Setting('cranfield', 112, 'one'),
  'medquad-300-wrong': Setting('medquad', 300, 'wrong'),
}


class Source(NamedTuple):
  """Entries of a corpus, texts of queries, and judgements to train and to test on."""

  entries: list[texts.PassageRecord]
  queries: dict[str, str]
  train: dict[str, dict[str, int]]
  test: dict[str, dict[str, int]]


def only(folder, pattern):
  """The file of a data set. Raises InputError where it is not there."""
  if found := sorted(folder.glob(pattern)):
    return found[0]
  raise InputError(
    f'--data: there is no {folder / pattern}; name the folder that holds the data sets'
  )


def hashed(id_):
  """The hash that assigns a query or passage to a split."""
  return hashlib.blake2b(id_.encode()).digest()


def first(judgements, count):
  """So many queries, by the hash."""
  return {query: judgements[query] for query in sorted(judgements, key=hashed)[:count]}


def prepare(data, out, name, setting):
  """The folder OUT/NAME of a setting, unless it is there; returns it."""
  folder = out / name
  if not (folder / 'qrels' / 'test.tsv').exists():
    source = read(data, setting.source)
    (folder / 'qrels').mkdir(parents=True, exist_ok=True)
    ids = [entry.id for entry in source.entries]
    train = degrade(first(source.train, setting.train), ids, setting.degraded)
    with files.atomic_write(folder / 'corpus.jsonl') as file:
      for entry in source.entries:
        file.write(json.dumps({'_id': entry.id, 'title': entry.title, 'text': entry.text}) + '\n')
    with files.atomic_write(folder / 'queries.jsonl') as file:
      for query in (*train, *source.test):
        file.write(json.dumps({'_id': query, 'text': source.queries[query]}) + '\n')
    write_qrels(folder / 'qrels' / 'train.tsv', train)
    write_qrels(folder / 'qrels' / 'test.tsv', source.test)  # last: the folder is whole
  return folder


def cut(docs, count):
  """So many judged passages of a query, by the hash."""
  return {doc: docs[doc] for doc in sorted(docs, key=hashed)[:count]}


def degrade(judgements, ids, how):
  """Training judgements with worse labels."""
  if how == 'one':
    return {
      query: {max(found, key=lambda doc: (found[doc], hashed(query + doc))): 1}
      for query, docs in judgements.items()
      if (found := {doc: grade for doc, grade in docs.items() if grade > 0})
    }
  if how == 'wrong':
    changed = set(first(judgements, round(WRONG * len(judgements))))
    return {
      query: {min(ids, key=lambda doc: hashed(query + doc)): 1} if query in changed else docs
      for query, docs in judgements.items()
    }
  return judgements


@functools.cache
def read(data, name):
  """A source."""
  source = {
    'arxiv': read_arxiv,
    'qnli': read_qnli,
    'docstrings': read_docstrings,
    'medquad-large': lambda data, _: read_beir(data, 'medquad', 2000),
    'medquad-8000': lambda data, _: read_beir(data, 'medquad', 2000),
    'medquad-cut': lambda data, _: cut_questions(read_beir(data, 'medquad', 2000)),
  }.get(name, read_beir)(data, name)
  judged = {doc for split in source[2:] for docs in split.values() for doc in docs}
  most = max(LARGER.get(name, 1) * PASSAGES, len(judged))
  entries = sorted(source.entries, key=lambda entry: (entry.id not in judged, hashed(entry.id)))
  return source._replace(entries=entries[:most])


def read_beir(data, name, most=1000):
  """One of the sets in the form of BEIR."""
  folder = data / name
  wanted = {'cranfield': ('test',), 'clariq': ('train', 'dev', 'test')}
  splits = ('dl19', 'dl20') if name == 'msmarco-dl' else wanted.get(name, ('train', 'test'))
  found = {split: read_qrels(only(folder / 'qrels', f'{split}.tsv')) for split in splits}
  if name == 'cranfield':  # one split: half of it to train on
    half = first(found['test'], len(found['test']) // 2)
    train, test = half, {query: found['test'][query] for query in found['test'].keys() - half}
  elif name == 'msmarco-dl':  # a year to train on, the next one to test on
    train, test = (
      {query: cut(docs, JUDGED) for query, docs in found[year].items()} for year in ('dl19', 'dl20')
    )
  elif name == 'clariq':  # 111 queries in place of 61
    train, test = found['train'], found['dev'] | found['test']
  else:
    train, test = found['train'], found['test']
  return from_beir(folder, first(train, most), first(test, 300))


def cut_questions(source):
  """A source whose questions are keywords.

  A question of more than two words lacks one, by the hash.
  """
  queries, left_out = {}, FUNCTION_WORDS.split()
  for query, question in source.queries.items():
    words = [word for word in re.findall(r"[\w'.-]+", question.lower()) if word not in left_out]
    if len(words) > 2:
      words.remove(min(words, key=lambda word: hashed(f'{query} {word}')))
    queries[query] = ' '.join(words)
  return source._replace(queries=queries)


def from_beir(folder, train, test):
  """A source whose texts are in a BEIR folder."""
  entries = [entry.record for entry in texts.read_entries(folder / 'corpus.jsonl', 'passage')]
  queries = {one.id: one.text for one in texts.read_texts(folder / 'queries.jsonl', 'query')}
  return Source(entries, queries, train, test)


def read_arxiv(data, name):
  """Titles that find their own abstracts."""
  whole = sorted(
    (
      paper
      for paper in records.read_papers(only(data / name, '*.jsonl*'))
      if paper.title and paper.passage
    ),
    key=lambda paper: hashed(paper.id),
  )[:PASSAGES]
  own = {paper.id: {paper.id: 1} for paper in whole}
  test = first(own, 300)
  return Source(
    [texts.PassageRecord(paper.id, '', paper.passage) for paper in whole],
    {paper.id: paper.title for paper in whole},
    first({query: docs for query, docs in own.items() if query not in test}, 1000),
    test,
  )


def read_qnli(data, name):
  """Questions that find the sentence with their answer; no sentence is in both splits."""
  lines = only(data / name / 'raw', 'dev.tsv').read_text().splitlines()[1:]
  rows = [line.split('\t') for line in lines]
  numbers = {sentence: f's{n}' for n, sentence in enumerate(dict.fromkeys(row[2] for row in rows))}
  queries = {f'q{row[0]}': row[1] for row in rows if row[3] == 'entailment'}
  answers = {f'q{row[0]}': {numbers[row[2]]: 1} for row in rows if row[3] == 'entailment'}
  order = sorted(answers, key=lambda query: hashed(next(iter(answers[query]))))
  tested = {doc for query in order[:300] for doc in answers[query]}
  test = {query: docs for query, docs in answers.items() if docs.keys() & tested}
  train = {query: docs for query, docs in answers.items() if query not in test}
  entries = [texts.PassageRecord(id_, '', sentence) for sentence, id_ in numbers.items()]
  return Source(entries, queries, first(train, 1000), first(test, 300))


def read_docstrings(data, name):
  """Summaries that find the rest of their docstring, in the installed packages; split by page."""
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    docstrings.build(folder)
    found = {split: read_qrels(folder / 'qrels' / f'{split}.tsv') for split in ('train', 'test')}
    return from_beir(folder, first(found['train'], 1000), first(found['test'], 300))
