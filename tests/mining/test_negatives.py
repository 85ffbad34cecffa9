"""Mining: whole files, against a miner of a few plain lines, and what it must not depend on."""

import json
import math
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.mining import negatives as mining

ROOT = pathlib.Path(mining.__file__).parents[1]


class World:
  """Sixty passages of which some say the same, twenty queries, two retrievers and a reranker, made
  by a seed.
  """

  def __init__(self, folder, seed=0, queries=20):
    rng = random.Random(seed)
    self.folder = folder
    texts = [f'words {number} and more' for number in range(50)]
    self.corpus = {
      f'd{number}': texts[number] if number < 50 else texts[rng.randrange(50)].replace(' ', '\n ')
      for number in range(60)
    }
    self.queries = {f'q{number}': f'what is {number}' for number in range(queries)}
    self.queries['q3'] = self.queries['q4']  # two queries of one text
    self.positives = {
      query: rng.sample(sorted(self.corpus), rng.choice([1, 1, 2])) for query in self.queries
    }
    self.runs = {
      name: {
        query: sorted(
          ((round(rng.uniform(0, 9), 2), doc) for doc in rng.sample(sorted(self.corpus), 25)),
          reverse=True,
        )
        for query in self.queries
      }
      for name in ('bm25', 'dense')
    }
    self.logits = {
      query: {doc: rng.choice([rng.gauss(-1, 3), rng.gauss(-1, 3), -5000.0]) for doc in self.corpus}
      for query in self.queries
    }
    (folder / 'corpus.jsonl').write_text(
      ''.join(
        json.dumps({'_id': doc, 'title': '', 'text': text}) + '\n'
        for doc, text in self.corpus.items()
      )
    )
    (folder / 'queries.jsonl').write_text(
      ''.join(
        json.dumps({'_id': query, 'text': text}) + '\n' for query, text in self.queries.items()
      )
    )
    (folder / 'train.tsv').write_text(
      'query-id\tcorpus-id\tscore\n'
      + ''.join(f'{query}\t{doc}\t1\n' for query, docs in self.positives.items() for doc in docs)
      + 'q0\td59\t0\n'
    )
    for name in self.runs:
      self.write(f'{name}.trec', self.lines(name))
    self.write(
      'reranked.trec',
      [
        f'{query} Q0 {doc} {rank} {score!r} ce'
        for query, scores in self.logits.items()
        for rank, (doc, score) in enumerate(
          sorted(scores.items(), key=lambda item: -item[1]), start=1
        )
      ],
    )

  def write(self, name, lines):
    (self.folder / name).write_text('\n'.join(lines) + '\n')

  def lines(self, name):
    return [
      f'{query} Q0 {doc} {rank} {score} {name}'
      for query, found in self.runs[name].items()
      for rank, (score, doc) in enumerate(found, start=1)
    ]

  def mine(
    self, out='out.jsonl', reranked=None, score=None, retrievers=('bm25', 'dense'), **options
  ):
    report = mining.mine(
      queries=str(self.folder / 'queries.jsonl'),
      corpus=str(self.folder / 'corpus.jsonl'),
      qrels=str(self.folder / 'train.tsv'),
      retrievers={name: str(self.folder / f'{name}.trec') for name in retrievers},
      out=str(self.folder / out),
      reranked=str(self.folder / reranked) if reranked else None,
      score=score,
      options=mining.Options(**options),
    )
    return report, [json.loads(line) for line in (self.folder / out).read_text().splitlines()]

  def expected(self, depth):
    """query -> text -> (the runs that have it, with rank and score, best first; the document that
    stands for it).
    """
    result = {}
    for query in self.queries:
      twins = [other for other in self.queries if self.queries[other] == self.queries[query]]
      forbidden = {
        ' '.join(self.corpus[doc].split()) for other in twins for doc in self.positives[other]
      }
      found = {}
      for number, (name, run) in enumerate(self.runs.items()):
        for rank, (score, doc) in enumerate(run[query][:depth], start=1):
          text = ' '.join(self.corpus[doc].split())
          if text not in forbidden and not any(
            other == name for _, _, other, _, _ in found.get(text, [])
          ):
            found.setdefault(text, []).append((rank, number, name, score, doc))
      result[query] = {text: sorted(rows) for text, rows in found.items()}
    return result


@pytest.fixture
def world(tmp_path):
  return World(tmp_path)


def origins(negative):
  rows = [negative, *negative.get('also', [])]
  return [(row['rank'], row['retriever'], row['score']) for row in rows]


@pytest.mark.parametrize('depth', [25, 10])
def test_everything_there_is(world, depth):
  """A sample larger than the pool is the pool: just what a plain miner finds."""
  report, lines = world.mine(depth=depth, sample=1000)
  expected = world.expected(depth)
  assert [line['query_id'] for line in lines] == list(world.queries)
  for line in lines:
    query = line['query_id']
    assert line['query'] == world.queries[query]
    assert [passage['docid'] for passage in line['positive_passages']] == world.positives[query]
    found = {' '.join(negative['text'].split()): negative for negative in line['negative_passages']}
    assert len(found) == len(line['negative_passages']) and found.keys() == expected[query].keys()
    for text, negative in found.items():
      assert [(rank, name, score) for rank, _, name, score, _ in expected[query][text]] == origins(
        negative
      )
      assert (
        negative['docid'] == expected[query][text][0][4]
        and negative['text'] == world.corpus[negative['docid']]
      )
      assert negative['pools'] == ['undenoised'] and 'reranker_score' not in negative
  assert report['counts']['candidates'] == sum(len(found) for found in expected.values())
  assert any('also' in negative for line in lines for negative in line['negative_passages'])


def test_samples_are_part_of_larger_samples(world):
  _, everything = world.mine(sample=1000)
  for sample in (1, 5):
    _, lines = world.mine(sample=sample)
    assert [line['negative_passages'] for line in lines] == [
      line['negative_passages'][:sample] for line in everything
    ]
  _, other = world.mine(sample=5, seed=1)
  assert [line['negative_passages'] for line in lines] != [
    line['negative_passages'] for line in other
  ]


def sigmoid(logit):
  return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def denoised_by_hand(world, line, everything, sample):
  """The pools that the definition gives: the first of all candidates, and the first of those that
  the reranker passes.
  """
  query = line['query_id']
  candidates = next(
    other['negative_passages'] for other in everything if other['query_id'] == query
  )

  def logit(negative):
    same = [doc for doc, text in world.corpus.items() if text.split() == negative['text'].split()]
    return max(world.logits[query][doc] for doc in same)

  clean = [negative['docid'] for negative in candidates if sigmoid(logit(negative)) < 0.1]
  return {negative['docid'] for negative in candidates[:sample]}, set(clean[:sample]), set(clean)


def test_a_reranked_run_denoises(world):
  _, everything = world.mine(sample=1000)
  report, lines = world.mine(reranked='reranked.trec', sample=4)
  seen = set()
  for line in lines:
    undenoised, denoised, clean = denoised_by_hand(world, line, everything, 4)
    assert {negative['docid'] for negative in line['negative_passages']} == undenoised | denoised
    for negative in line['negative_passages']:
      assert ('undenoised' in negative['pools']) == (negative['docid'] in undenoised)
      assert ('denoised' in negative['pools']) == (negative['docid'] in clean)
      seen.add(tuple(negative['pools']))
      assert (sigmoid(negative['reranker_score']) < 0.1) == ('denoised' in negative['pools'])
  assert seen == {('undenoised',), ('denoised',), ('undenoised', 'denoised')}
  assert report['counts']['candidates with a reranker score'] == report['counts']['candidates']


def test_a_reranker_scores_no_more_than_it_must_and_gives_the_same_pools(world):
  asked = []

  def score(pairs):
    asked.append(len(pairs))
    ids = [
      (next(q for q, t in world.queries.items() if t == query and (q != 'q4')), doc)
      for query, text in pairs
      for doc in [next(doc for doc, other in world.corpus.items() if other == text)]
    ]
    return np.array([world.logits[query][doc] for query, doc in ids], np.float32)

  # One score a text, whoever asks: copies of a text and of a query have one score.
  for query in world.queries:
    for doc, text in world.corpus.items():
      first = next(other for other, said in world.corpus.items() if said.split() == text.split())
      world.logits[query][doc] = float(
        np.float32(world.logits['q3' if query == 'q4' else query][first])
      )
  world.write(
    'reranked.trec',
    [
      f'{query} Q0 {doc} {rank} {score!r} ce'
      for query, scores in world.logits.items()
      for rank, (doc, score) in enumerate(
        sorted(scores.items(), key=lambda item: -item[1]), start=1
      )
    ],
  )
  report, lines = world.mine(score=score, sample=2)
  _, expected = world.mine('expected.jsonl', reranked='reranked.trec', sample=2)
  assert lines == expected
  assert (
    sum(asked)
    == report['counts']['candidates with a reranker score']
    < report['counts']['candidates'] / 2
  )


@pytest.mark.parametrize('shuffled', ['lines', 'buckets', 'blocks'])
def test_the_same_file_byte_for_byte(world, monkeypatch, shuffled):
  options = {'sample': 5, 'reranked': 'reranked.trec'}
  world.mine('first.jsonl', **options)
  if shuffled == 'lines':
    for name in (*world.runs, 'reranked'):
      lines = (world.folder / f'{name}.trec').read_text().splitlines()
      random.Random(1).shuffle(lines)
      world.write(f'{name}.trec', lines)
  elif shuffled == 'buckets':
    monkeypatch.setattr(mining, '_BUCKET', 200 * 2 * 3)  # three queries a bucket
  else:
    monkeypatch.setattr('dprjax.formats.runs.read_blocks.__defaults__', (100, True))
  world.mine('second.jsonl', **options)
  assert (world.folder / 'first.jsonl').read_bytes() == (world.folder / 'second.jsonl').read_bytes()
  assert not [path for path in world.folder.iterdir() if path.name.startswith('.')]


@pytest.mark.slow
def test_the_hash_seed_of_a_process_says_nothing(world):
  world.mine('here.jsonl', sample=5)
  for seed in ('1', '2'):
    subprocess.run(
      [
        sys.executable,
        '-m',
        'dprjax.mine',
        '--queries=queries.jsonl',
        '--corpus=corpus.jsonl',
        '--qrels=train.tsv',
        '--run=bm25.trec',
        '--run=dense.trec',
        '--sample=5',
        '--out=there.jsonl',
      ],
      cwd=world.folder,
      check=True,
      capture_output=True,
      env=os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': str(ROOT)},
    )
    assert (world.folder / 'here.jsonl').read_bytes() == (world.folder / 'there.jsonl').read_bytes()


def test_ids_alone(world):
  _, whole = world.mine(sample=5)
  _, lines = world.mine(sample=5, texts=False)
  for line, other in zip(lines, whole, strict=True):
    assert [set(passage) for passage in line['positive_passages']] == [{'docid'}] * len(
      line['positive_passages']
    )
    negatives = [
      {**negative, 'title': '', 'text': world.corpus[negative['docid']]}
      for negative in line['negative_passages']
    ]
    assert negatives == other['negative_passages']


def test_a_passage_with_the_querys_own_id(world):
  for name in world.runs:
    text = (world.folder / f'{name}.trec').read_text()
    (world.folder / f'{name}.trec').write_text(text.replace('q0 Q0', 'd30 Q0'))
  for name in ('queries.jsonl', 'train.tsv'):
    text = (world.folder / name).read_text()
    (world.folder / name).write_text(text.replace('"q0"', '"d30"').replace('q0\t', 'd30\t'))
  world.positives['d30'] = world.positives.pop('q0')
  _, (line, *_) = world.mine(sample=1000)
  kept = [negative['docid'] for negative in line['negative_passages']]
  _, (line, *_) = world.mine(sample=1000, drop_same_id=True)
  assert [negative['docid'] for negative in line['negative_passages']] == [
    doc for doc in kept if doc != 'd30'
  ]


def test_what_is_unknown_is_counted_and_named(world, caplog):
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
  for said in (
    '1 judged queries that are not in the queries: left out: q98',
    '1 rows of bm25 of queries that are not in the queries: ignored: q99',
    '1 rows of bm25 with a passage that is not in the corpus: ignored: line',
    'query q0 document lost rank 2 score 1.0',
    '1 positives that are not in the corpus: ignored: q5 missing',
  ):
    assert said in caplog.text, said
  assert report['counts']['positives that are not in the corpus: ignored'] == 1


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda world: world.write('bm25.trec', [*world.lines('bm25'), 'q99 Q0 d1 1 6.0 bm25']),
      'queries that are not in the queries: ignored: q99',
    ),
    (
      lambda world: world.write('bm25.trec', [*world.lines('bm25'), 'q0 Q0 lost 99 -6.0 bm25']),
      'with a passage that is not in the corpus.*lost',
    ),
    (
      lambda world: (
        world.write('bm25.trec', [line for line in world.lines('bm25') if 'q7 ' not in line])
        or world.write('dense.trec', [line for line in world.lines('dense') if 'q7 ' not in line])
      ),
      'queries that no run has: kept, without negatives: q7',
    ),
    (
      lambda world: world.write(
        'bm25.trec', [line.replace(' 25 ', ' 24 ') for line in world.lines('bm25')]
      ),
      'share their rank with.*rank 24',
    ),
  ],
)
def test_strict_refuses(world, change, message):
  change(world)
  with pytest.raises(InputError, match=message):
    world.mine(strict=True)
  assert not (world.folder / 'out.jsonl').exists()
  world.mine()


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    (
      ['q0 Q0 d1 1 0.1 x', 'q0 Q0 d2 2 0.9 x'],
      r'bm25\.trec, line 1: query q0 document d1 rank 1 score 0\.1: another document of the query '
      r'has a '
      'higher score and a worse rank',
    ),
    (
      ['q0 Q0 d1 1 3 x', 'q1 Q0 d1 1 3 x', 'q0 Q0 d1 2 1 x'],
      'a document comes twice for a query: line 1: query q0 document d1 .*, line 3: query q0',
    ),
    (['q0 Q0 d1 1 nan x'], r"bm25\.trec, line 1: the score 'nan'"),
    (['q0 Q0 d1 1 3'], r'line 1: 5 columns'),
    (
      ['q0 Q0 lost 1 3 x'],
      'no candidate is left for any of 20 queries.*1 rows of bm25 with a passage that is not in '
      'the corpus',
    ),
  ],
)
def test_runs_that_cannot_be_used(world, lines, message):
  world.write('bm25.trec', lines)
  with pytest.raises(InputError, match=message):
    world.mine(retrievers=['bm25'])
  assert sorted(path.suffix for path in world.folder.iterdir()) == [
    '.jsonl',
    '.jsonl',
    '.trec',
    '.trec',
    '.trec',
    '.tsv',
  ]


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
  assert (
    '1 queries with no candidate left beside their positives: kept, without negatives: q1'
    in caplog.text
  )
  assert (
    '18 queries that no run has: kept, without negatives: q2, q3, q4, q5, q6, ...' in caplog.text
  )


def test_queries_whose_positives_are_lost_are_left_out(world):
  (world.folder / 'train.tsv').write_text('q0\tlost\t1\nq1\td1\t1\nq2\td2\t0\n')
  report, lines = world.mine()
  assert [line['query_id'] for line in lines] == ['q1']
  assert (
    report['counts']['queries whose positives are not in the corpus or have no text: left out'] == 1
  )
  (world.folder / 'train.tsv').write_text('q2\td2\t0\n')
  with pytest.raises(InputError, match=r'no query of .* has a passage graded above 0'):
    world.mine()


def test_a_reranker_that_gives_no_number(world):
  with pytest.raises(
    InputError, match="no finite score for the query 'what is 0' and the passage 'words"
  ):
    world.mine(score=lambda pairs: np.full(len(pairs), np.nan))


def test_half_a_surrogate_pair(world):
  corpus = world.folder / 'corpus.jsonl'
  corpus.write_text(corpus.read_text().replace('words 7 and', 'words \\ud83d é and'))
  _, lines = world.mine(sample=1000)
  assert any(
    '\ud83d é' in negative['text'] for line in lines for negative in line['negative_passages']
  )
