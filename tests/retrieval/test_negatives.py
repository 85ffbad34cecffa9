"""Mining of whole files, compared with a plain independent miner; changes without effect."""

import json
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from dprjax.base.hashes import keys_of
from dprjax.base.progress import watched
from dprjax.retrieval import negatives as mining
from tests.refusals import named_in, refused


def trec_lines(rankings, tag):
  """Lines of a run from query -> [(score, document)], best first."""
  return [
    f'{query} Q0 {doc} {rank} {score!r} {tag}'
    for query, ranking in rankings.items()
    for rank, (score, doc) in enumerate(ranking, start=1)
  ]


class World:
  """Sixty passages, some with the same text, twenty queries, two retrievers and a reranker, made by
  a seed.
  """

  def __init__(self, folder, seed=0, queries=20):
    rng = random.Random(seed)
    self.folder = folder
    texts = [f'words {number} and more' for number in range(50)]
    self.corpus = {
      f'd{number}': texts[number]
      if number < 50
      else texts[rng.randrange(50)].title().replace(' ', '\n ')
      for number in range(60)
    }
    self.queries = {f'q{number}': f'what is {number}' for number in range(queries)}
    self.queries['q3'] = self.queries['q4']  # two queries with one text
    docs = sorted(self.corpus)
    self.positives = {query: rng.sample(docs, rng.choice([1, 1, 2])) for query in self.queries}

    def ranking():
      scored = ((round(rng.uniform(0, 9), 2), doc) for doc in rng.sample(docs, 25))
      return sorted(scored, reverse=True)

    self.runs = {name: {query: ranking() for query in self.queries} for name in ('bm25', 'dense')}
    self.logits = {
      query: {doc: rng.choice([rng.gauss(-1, 3), rng.gauss(-1, 3), -5000.0]) for doc in self.corpus}
      for query in self.queries
    }
    passages = [{'_id': doc, 'title': '', 'text': text} for doc, text in self.corpus.items()]
    self.write('corpus.jsonl', map(json.dumps, passages))
    queries = [{'_id': query, 'text': text} for query, text in self.queries.items()]
    self.write('queries.jsonl', map(json.dumps, queries))
    judged = [f'{query}\t{doc}\t1' for query, docs in self.positives.items() for doc in docs]
    self.write('train.tsv', ['query-id\tcorpus-id\tscore', *judged, 'q0\td59\t0'])
    for name in self.runs:
      self.write(f'{name}.trec', self.lines(name))
    self.write_reranked()

  def write_reranked(self):
    rankings = {
      query: sorted(((score, doc) for doc, score in scores.items()), key=lambda pair: -pair[0])
      for query, scores in self.logits.items()
    }
    self.write('reranked.trec', trec_lines(rankings, 'ce'))

  def write(self, name, lines):
    (self.folder / name).write_text('\n'.join(lines) + '\n')

  def lines(self, name):
    return trec_lines(self.runs[name], name)

  def mine(
    self,
    out='out.jsonl',
    reranked=None,
    score=None,
    retrievers=('bm25', 'dense'),
    corpus='corpus.jsonl',
    **options,
  ):
    report = mining.mine(
      queries=str(self.folder / 'queries.jsonl'),
      corpus=str(self.folder / corpus),
      qrels=str(self.folder / 'train.tsv'),
      retrievers={name: str(self.folder / f'{name}.trec') for name in retrievers},
      out=str(self.folder / out),
      reranked=str(self.folder / reranked) if reranked else None,
      score=score,
      options=mining.MiningOptions(**options),
    )
    return report, [json.loads(line) for line in (self.folder / out).read_text().splitlines()]

  def expected(self, depth):
    """query -> text -> [(rank, number of the run, run, score, document)], best first; without the
    positives' texts and, for each run, without later documents of the same text.
    """
    result = {}
    for query in self.queries:
      twins = [other for other in self.queries if self.queries[other] == self.queries[query]]
      forbidden = {
        ' '.join(self.corpus[doc].lower().split())
        for other in twins
        for doc in self.positives[other]
      }
      found = {}
      for number, (name, run) in enumerate(self.runs.items()):
        for rank, (score, doc) in enumerate(run[query][:depth], start=1):
          text = ' '.join(self.corpus[doc].lower().split())
          if text not in forbidden and not any(
            other == name for _, _, other, _, _ in found.get(text, [])
          ):
            found.setdefault(text, []).append((rank, number, name, score, doc))
      result[query] = {text: sorted(rows) for text, rows in found.items()}
    return result


@pytest.fixture
def world(tmp_path):
  return World(tmp_path)


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """A world for tests that change none of its files."""
  return World(tmp_path_factory.mktemp('world'))


@pytest.fixture(scope='module')
def everything(shared):
  """All candidates: the lines of a sample larger than the pools."""
  return shared.mine('everything.jsonl', sample=1000)[1]


def origins(negative):
  rows = [negative, *negative.get('also', [])]
  return [(row['rank'], row['retriever'], row['score']) for row in rows]


def test_a_sample_larger_than_the_pool_is_what_a_plain_miner_finds(shared):
  report, lines = shared.mine(depth=10, sample=1000)
  expected = shared.expected(10)
  assert [line['query_id'] for line in lines] == list(shared.queries)
  for line in lines:
    query = line['query_id']
    assert line['query'] == shared.queries[query]
    assert [passage['docid'] for passage in line['positive_passages']] == shared.positives[query]
    negatives = {
      ' '.join(negative['text'].lower().split()): negative for negative in line['negative_passages']
    }
    assert len(negatives) == len(line['negative_passages'])
    assert negatives.keys() == expected[query].keys()
    for text, negative in negatives.items():
      rows = expected[query][text]
      assert [(rank, name, score) for rank, _, name, score, _ in rows] == origins(negative)
      assert negative['docid'] == rows[0][4]
      assert negative['text'] == shared.corpus[negative['docid']]
      assert negative['sources'] == ['undenoised'] and 'reranker_score' not in negative
  assert report['counts']['candidates'] == sum(map(len, expected.values()))
  assert any('also' in negative for line in lines for negative in line['negative_passages'])


def test_samples_are_part_of_larger_samples(shared, everything):
  def negatives(lines, stop=None):
    return [line['negative_passages'][:stop] for line in lines]

  for sample in (1, 5):
    lines = shared.mine(sample=sample)[1]
    assert negatives(lines) == negatives(everything, sample)
  assert negatives(shared.mine(sample=5, seed=1)[1]) != negatives(lines)


def sigmoid(logit):
  return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def denoised_by_hand(world, line, everything, sample):
  """The sources by their definition: the first of all candidates, and the first of those that the
  reranker passes.
  """
  query = line['query_id']
  (candidates,) = (other['negative_passages'] for other in everything if other['query_id'] == query)

  def logit(negative):
    same = [
      doc
      for doc, text in world.corpus.items()
      if text.lower().split() == negative['text'].lower().split()
    ]
    return max(world.logits[query][doc] for doc in same)

  clean = [negative['docid'] for negative in candidates if sigmoid(logit(negative)) < 0.1]
  return {negative['docid'] for negative in candidates[:sample]}, set(clean[:sample]), set(clean)


def test_a_reranked_run_denoises(shared, everything):
  report, lines = shared.mine(reranked='reranked.trec', sample=4)
  seen = set()
  for line in lines:
    undenoised, denoised, clean = denoised_by_hand(shared, line, everything, 4)
    assert {negative['docid'] for negative in line['negative_passages']} == undenoised | denoised
    for negative in line['negative_passages']:
      assert ('undenoised' in negative['sources']) == (negative['docid'] in undenoised)
      assert ('denoised' in negative['sources']) == (negative['docid'] in clean)
      seen.add(tuple(negative['sources']))
      assert (sigmoid(negative['reranker_score']) < 0.1) == ('denoised' in negative['sources'])
  assert seen == {('undenoised',), ('denoised',), ('undenoised', 'denoised')}
  assert report['counts']['candidates with a reranker score'] == report['counts']['candidates']


def test_a_reranker_scores_no_more_than_it_must_and_finds_the_same(world):
  asked = []

  def score(pairs, progress):
    asked.append(len(pairs))
    ids = [
      (next(q for q, t in world.queries.items() if t == query and (q != 'q4')), doc)
      for query, text in pairs
      for doc in [next(doc for doc, other in world.corpus.items() if other == text)]
    ]
    return np.array([world.logits[query][doc] for query, doc in ids], np.float32)

  # One score for each text: copies of a text and of a query have the same.
  for query in world.queries:
    for doc, text in world.corpus.items():
      first = next(
        other
        for other, same in world.corpus.items()
        if same.lower().split() == text.lower().split()
      )
      logit = world.logits['q3' if query == 'q4' else query][first]
      world.logits[query][doc] = float(np.float32(logit))
  world.write_reranked()
  shown = []
  with watched(lambda task, done, _: shown.append((task, done))):
    report, lines = world.mine(score=score, sample=2)
  _, expected = world.mine('expected.jsonl', reranked='reranked.trec', sample=2)
  assert lines == expected
  scored = report['counts']['candidates with a reranker score']
  assert sum(asked) == scored < report['counts']['candidates'] / 2
  assert [done for task, done in shown if task == 'scoring'][-1] == scored


def test_equal_scores_are_cut_by_id(world):
  """Ranks by the rows of an index, as other tools write them, do not count. The scores are equal
  as float32.
  """
  docs = [doc for doc in world.corpus if doc not in ('d0', 'd1')]
  for name in world.runs:
    lines = []
    for query in world.queries:
      lines += [
        f'{query} Q0 {doc} {rank} {1.5 - 1e-10 * rank} {name}' for rank, doc in enumerate(docs, 1)
      ]
    world.write(f'{name}.trec', lines)
  _, lines = world.mine(depth=7, sample=99)
  best = sorted(docs, reverse=True)[:7]
  negatives = [negative for line in lines for negative in line['negative_passages']]
  assert len(negatives) > 100
  assert all(best[negative['rank'] - 1] == negative['docid'] for negative in negatives)


def test_the_order_of_the_lines_does_not_change_the_file(world, monkeypatch):
  options = {'sample': 5, 'reranked': 'reranked.trec'}
  world.mine('first.jsonl', **options)
  for name in (*world.runs, 'reranked'):
    lines = (world.folder / f'{name}.trec').read_text().splitlines()
    random.Random(1).shuffle(lines)
    world.write(f'{name}.trec', lines)
  monkeypatch.setattr('dprjax.text.runs.read_blocks.__defaults__', (3000, True))
  world.mine('second.jsonl', **options)
  assert (world.folder / 'first.jsonl').read_bytes() == (world.folder / 'second.jsonl').read_bytes()
  assert not [path for path in world.folder.iterdir() if path.name.startswith('.')]


def test_ids_alone(shared, everything):
  _, lines = shared.mine(sample=1000, texts=False)
  for line, whole in zip(lines, everything, strict=True):
    assert all(set(passage) == {'docid'} for passage in line['positive_passages'])
    negatives = [
      {**negative, 'title': '', 'text': shared.corpus[negative['docid']]}
      for negative in line['negative_passages']
    ]
    assert negatives == whole['negative_passages']


def test_a_passage_with_the_querys_own_id(world, everything):
  kept = [negative['docid'] for negative in everything[0]['negative_passages']]
  texts = [text.lower().split() for text in world.corpus.values()]
  own = next(doc for doc in kept if texts.count(world.corpus[doc].lower().split()) == 1)
  for name in ('bm25.trec', 'dense.trec', 'queries.jsonl', 'train.tsv'):
    path = world.folder / name
    path.write_text(re.sub(r'\bq0\b', own, path.read_text()))

  def negatives(**options):
    (line, *_) = world.mine(sample=1000, **options)[1]
    return {negative['docid'] for negative in line['negative_passages']}

  assert negatives() == {*kept}
  assert negatives(drop_same_id=True) == {*kept} - {own}


def test_unknown_ids_are_counted_and_named(world, caplog):
  caplog.set_level('INFO')
  lines = world.lines('bm25')
  lines[7:7] = ['q0 Q0 lost 7 6.0 bm25', 'q99 Q0 d1 1 6.0 bm25']
  lines = [line for line in lines if not line.startswith('q0 ')] + [
    'q0 Q0 d1 1 2.0 bm25',
    'q0 Q0 lost 2 1.0 bm25',
  ]
  world.write('bm25.trec', lines)
  (world.folder / 'train.tsv').write_text(
    (world.folder / 'train.tsv').read_text() + 'q98\td1\t1\nq5\tmissing\t1\n'
  )
  report, _ = world.mine(sample=5)
  assert named_in(caplog.text, 'q98', 'q99', 'q0 document lost rank 2 score 1.0', 'q5 missing')
  assert report['counts']['positives that are not in the corpus: ignored'] == 1


def without(lines, query):
  return [line for line in lines if not line.startswith(f'{query} ')]


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    (['q0 Q0 d1 1 0.1 x', 'q0 Q0 d2 2 0.9 x'], ('bm25.trec', 'line 1', 'q0', 'd1', '0.1')),
    (['q0 Q0 d1 1 3 x', 'q1 Q0 d1 1 3 x', 'q0 Q0 d1 2 1 x'], ('line 1', 'q0', 'd1', 'line 3')),
    (['q0 Q0 lost 1 3 x'], ('20', 'bm25')),
  ],
)
def test_runs_that_cannot_be_used(world, lines, message):
  world.write('bm25.trec', lines)
  with refused(message):
    world.mine(retrievers=['bm25'])
  suffixes = sorted(path.suffix for path in world.folder.iterdir())
  assert suffixes == ['.jsonl'] * 2 + ['.trec'] * 3 + ['.tsv']


def test_queries_without_candidates_are_kept_and_named(world, caplog):
  caplog.set_level('INFO')
  world.write(
    'bm25.trec',
    [
      'q0 Q0 d1 1 3 x',
      *(f'q1 Q0 {doc} {rank} {-rank} x' for rank, doc in enumerate(world.positives['q1'])),
    ],
  )
  _, lines = world.mine(retrievers=['bm25'])
  assert [line['query_id'] for line in lines] == list(world.queries)
  assert [len(line['negative_passages']) for line in lines[:3]] == [1, 0, 0]
  assert named_in(caplog.text, '(q1)', '18', '(q2, q3, q4, q5, q6, ...)')


def test_queries_whose_positives_are_lost_are_left_out(world):
  (world.folder / 'train.tsv').write_text('q0\tlost\t1\nq1\td1\t1\nq2\td2\t0\n')
  report, lines = world.mine()
  assert [line['query_id'] for line in lines] == ['q1']
  what = 'queries whose positives are not in the corpus or have no text: left out'
  assert report['counts'][what] == 1
  (world.folder / 'train.tsv').write_text('q2\td2\t0\n')
  with refused('train.tsv', 'queries.jsonl', '0'):
    world.mine()


def test_scores_of_positives(world):
  """Two positives with one text are scored once, and each is written once."""
  copy = next(doc for doc in world.corpus if '\n' in world.corpus[doc])
  (same,) = [
    doc
    for doc in list(world.corpus)[:50]
    if world.corpus[doc].lower().split() == world.corpus[copy].lower().split()
  ]
  (world.folder / 'train.tsv').write_text(f'q0\t{copy}\t1\nq0\t{same}\t1\n')
  _, [line] = world.mine(
    score=lambda pairs, progress: np.full(len(pairs), -0.5), score_positives=True
  )
  found = [(one['docid'], one['reranker_score']) for one in line['positive_passages']]
  assert found == [(copy, -0.5), (same, -0.5)]


def test_a_reranker_that_passes_no_candidate_ends_the_mining(world):
  with refused('--threshold=0.1'):
    world.mine(score=lambda pairs, progress: np.full(len(pairs), 9.0))
  assert not (world.folder / 'train.jsonl').exists()


def test_lots_are_fair():
  queries, docs = keys_of(['q']), keys_of([f'd{number}' for number in range(20)])
  first = [int(np.argmin(mining.lots(queries, docs, seed))) for seed in range(2000)]
  counts = np.bincount(first, minlength=20)
  # 100 each, within 4 standard deviations.
  assert counts.min() > 60 and counts.max() < 145


def test_ids_in_another_form_of_unicode_are_counted(world):
  (world.folder / 'train.tsv').write_text('q0\tcafe\u0301\t1\nq1\td1\t1\n')
  with (world.folder / 'corpus.jsonl').open('a') as file:
    file.write(json.dumps({'_id': 'caf\u00e9', 'text': 'coffee'}) + '\n')
  report, _ = world.mine()
  what = 'positives whose ids have another Unicode form (NFC, NFD) in the corpus'
  assert report['counts'][what] == 1


# Interrupts itself where C++ code of DuckDB calls Python for its first enumeration.
_INTERRUPTED = """
import os, signal, sys
from dprjax.base import errors
from dprjax.retrieval import negatives
def interrupt(frame, event, _):
  if event == 'call' and 'duckdb' in sys.modules and frame.f_code.co_filename.endswith('enum.py'):
    sys.setprofile(None)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, errors.raise_interrupt)
sys.setprofile(interrupt)
with negatives._database():
  print('went on')
"""


def test_an_interrupt_while_duckdb_is_imported_ends_the_command():
  program = [sys.executable, '-c', _INTERRUPTED]
  done = subprocess.run(program, capture_output=True, text=True, check=False)
  assert done.returncode == 130 and 'Traceback' not in done.stderr, done
