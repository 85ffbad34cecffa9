"""Views: their part of a passage, and that every process draws the same at any time."""

import numpy as np
import pytest
import tokenizers

from dprjax.papers.condenser import segments, views
from dprjax.papers.condenser.segments import PassageCache
from dprjax.text import table
from dprjax.text.batches import open_batches
from dprjax.text.tokenizing import Tokenizer
from tests.refusals import refused

PASSAGES, BATCH = 43, 8
PAD, CLS, SEP = 0, 1, 2
BUCKETS = [16, 32, 48, 64]


def special(single):
  """A tokenizer whose post-processor puts these tokens around a text, ``$A``."""
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({'?': 0}, unk_token='?'))
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=[('[CLS]', CLS), ('[SEP]', SEP)]
  )
  return Tokenizer(backend, '', 10**6, PAD, None, False)


BERT = special('[CLS] $A [SEP]')


def cache(path, lengths):
  """A cache whose passages have sentences of these lengths; token j of passage i is 1000 * (i + 1)
  + j, and words are 1 to 3 tokens long.
  """
  rng = np.random.default_rng(2)
  with table.TableWriter(path / 'passages', 'passages', segments.COLUMNS) as writer:
    for i, sentences in enumerate(lengths):
      ends = np.cumsum(sentences)
      begins = rng.random(ends[-1]) < 0.5
      begins[::3] = begins[ends[:-1]] = True
      words = np.cumsum(begins) - 1
      tokens = 1000 * (i + 1) + np.arange(ends[-1])
      writer.write(
        f'p{i}',
        {
          name: np.asarray(value, np.int32)
          for name, value in (('tokens', tokens), ('words', words), ('ends', ends))
        },
      )
  sizes = np.array([(sum(sentences), len(sentences)) for sentences in lengths], np.int32).T
  return PassageCache(path, {}, *sizes, table.Table(path / 'passages', 'passages'))


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """Passages of one to six sentences of 3 to 24 tokens."""
  rng = np.random.default_rng(1)
  lengths = [rng.integers(3, 25, size=1 + i % 6).tolist() for i in range(PASSAGES)]
  return cache(tmp_path_factory.mktemp('made'), lengths), lengths


def start(texts, tokenizer=BERT, **changes):
  options = {
    'batch_size': BATCH,
    'views': 'one',
    'max_length': 50,
    'buckets': BUCKETS,
    'seed': 0,
  } | changes
  return views.make_view_batches(texts, tokenizer, **options)


def take(texts, count, **changes):
  batches, _ = start(texts, **changes)
  return [batches[step] for step in range(count)]


def shown(batches, *names):
  """(passage, places of its tokens in each view) of every row."""
  for batch in batches:
    for row, passage in enumerate(batch['passage_index'].tolist()):
      places = [
        batch[f'{name}_tokens'][row, 1 : batch[f'{name}_mask'][row].sum() - 1] for name in names
      ]
      assert all((place // 1000 == passage + 1).all() for place in places)
      yield (passage, *((place % 1000).tolist() for place in places))


def bounds(lengths):
  return list(zip(np.cumsum([0, *lengths[:-1]]).tolist(), np.cumsum(lengths).tolist(), strict=True))


def same(left, right):
  return left.keys() == right.keys() and all(
    np.array_equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left
  )


KINDS = [
  {'views': 'one'},
  {'views': 'siblings'},
  {'views': 'siblings', 'unit': 'span', 'span_length': 16},
  {'views': 'ict'},
]


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_the_layout_of_a_batch(made, kind):
  texts, _ = made
  names = ['first'] if kind['views'] == 'one' else ['first', 'second']
  widths = set()
  for batch in take(texts, 12, **kind):
    assert {key: (value.dtype.name, value.ndim) for key, value in batch.items()} == {
      'passage_index': ('int32', 1)
    } | {
      f'{name}_{what}': (dtype, 2)
      for name in names
      for what, dtype in (('tokens', 'int32'), ('mask', 'bool'), ('words', 'int32'))
    }
    passage_words = [
      np.frombuffer(value, np.int32)
      for value in texts.passages.read(batch['passage_index'], ('words',))[0]
    ]
    for name in names:
      tokens, mask, words = (batch[f'{name}_{what}'] for what in ('tokens', 'mask', 'words'))
      lengths = mask.sum(axis=1)
      width = min(bucket for bucket in BUCKETS if bucket >= lengths.max())
      assert tokens.shape == mask.shape == words.shape == (BATCH, width)
      assert lengths.max() <= 50 and lengths.min() > 2
      widths.add(tokens.shape[1])
      for row, length in enumerate(lengths):
        assert mask[row, :length].all() and not mask[row, length:].any()
        assert tokens[row, 0] == CLS and tokens[row, length - 1] == SEP
        assert (tokens[row, length:] == PAD).all()
        assert words[row, 0] == -1 and (words[row, length - 1 :] == -1).all()
        inner = slice(1, length - 1)
        expected = passage_words[row][tokens[row, inner] % 1000]
        assert words[row, inner].tolist() == expected.tolist()
  assert len(widths) > 1 or kind not in ({'views': 'siblings'}, {'views': 'ict'})


def test_one_shows_the_passage_or_a_window_from_the_start_of_a_sentence(made):
  texts, lengths = made
  whole, starts = 0, set()
  for passage, places in shown(take(texts, 150), 'first'):
    size = sum(lengths[passage])
    assert places == list(range(places[0], places[0] + len(places)))
    if size <= 48:
      assert len(places) == size
      whole += 1
    else:
      assert places[0] in [begin for begin, _ in bounds(lengths[passage])]
      assert len(places) == 48 or places[-1] == size - 1
      starts.add((passage, places[0]))
  assert whole > 100
  # Every sentence up to the first from which the rest fits is a start, none after it.
  expected = {
    (passage, begin)
    for passage, sentences in enumerate(lengths)
    if sum(sentences) > 48
    for number, (begin, _) in enumerate(bounds(sentences))
    if number == 0 or sum(sentences) - bounds(sentences)[number - 1][0] > 48
  }
  assert starts == expected


def test_siblings_are_two_sentences_of_a_passage(made):
  texts, lengths = made
  seen = {}
  for passage, first, second in shown(
    take(texts, 100, batch_size=32, views='siblings'), 'first', 'second'
  ):
    sentences = [list(range(*bound)) for bound in bounds(lengths[passage])]
    numbers = sentences.index(first), sentences.index(second)
    assert numbers[0] != numbers[1]
    seen.setdefault(passage, set()).add(numbers)
  # No passage of one sentence; in time, all six pairs of one of three sentences.
  assert seen.keys() == {passage for passage in range(PASSAGES) if len(lengths[passage]) > 1}
  assert all(len(seen[passage]) == 6 for passage in seen if len(lengths[passage]) == 3)


def test_ict_pairs_a_sentence_with_the_rest(made):
  texts, lengths = made
  kept, total, numbers = 0, 0, {}
  for passage, first, second in shown(
    take(texts, 150, batch_size=32, views='ict', max_length=160, buckets=[160]), 'first', 'second'
  ):
    sentences = [list(range(*bound)) for bound in bounds(lengths[passage])]
    number = sentences.index(first)
    numbers.setdefault(passage, set()).add(number)
    everything = list(range(sum(lengths[passage])))
    assert second in (everything, [place for place in everything if place not in first])
    kept += second == everything
    total += 1
  assert total == 4800 and 0.08 < kept / total < 0.12
  for passage, seen in numbers.items():
    assert len(lengths[passage]) > 1 and seen == set(range(len(lengths[passage])))


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_resumes_exactly_and_divides_the_global_batch(made, kind):
  texts, _ = made
  whole = take(texts, 14, seed=3, **kind)
  assert not same(take(texts, 1, seed=4, **kind)[0], whole[0])
  fresh = open_batches(start(texts, seed=3, **kind).batches)
  fresh.set_state({'next_index': 6})
  assert all(same(next(fresh), expected) for expected in whole[6:])
  fresh.close()
  for count in (2, 4):
    parts = [
      take(texts, 14, seed=3, process_index=i, process_count=count, **kind) for i in range(count)
    ]
    for step, batch in enumerate(whole):
      for key in batch:
        assert np.array_equal(np.concatenate([part[step][key] for part in parts]), batch[key]), key


def test_a_corpus_of_single_sentences(tmp_path):
  texts = cache(tmp_path, [[20]] * 10)
  for kind in ({'views': 'siblings'}, {'views': 'ict'}, {'views': 'siblings', 'unit': 'span'}):
    with refused('config.batch_size', '0'):
      start(texts, **kind)
  assert start(texts).eligible == 10


@pytest.mark.parametrize(
  ('lengths', 'number', 'keep', 'room', 'window'),
  [
    ([5, 5, 5, 5, 5], 2, False, 10, (5, 20)),  # one on either side, without the middle
    ([5, 5, 5, 5, 5], 2, True, 15, (5, 20)),
    ([5, 5, 5, 5, 5], 0, False, 10, (0, 15)),
    ([5, 5, 5, 9, 5], 2, False, 12, (0, 15)),  # the right neighbour is too long: two from the left
    ([5, 20, 9], 0, False, 12, (0, 17)),  # the next does not fit: its beginning
    ([9, 20, 5], 2, False, 12, (17, 34)),  # or the end of the one before
    ([5, 20, 5], 1, True, 12, (5, 25)),  # kept, and too long itself: cut later
  ],
)
def test_windows_by_hand(lengths, number, keep, room, window):
  assert views._around(np.cumsum(lengths), number, keep, room) == window
