"""Plain text as the training loop gets it in pretraining."""

import json

import pytest

from dprjax.papers.condenser import pretrain
from tests.refusals import refused
from tests.training.conftest import WORDS

# Five words and a full stop make a sentence that stands alone; two of them, or three, a document.
# The last has one.
TEXTS = {
  f'd{i}': ' '.join(
    ' '.join(WORDS[(i + n + k * (1 + i % 3)) % len(WORDS)] for k in range(5)).capitalize() + '.'
    for n in range(2 + i % 2)
  )
  for i in range(12)
} | {'alone': 'Oak elm yew fir ash.'}


def split(text):
  return [sentence.strip() for sentence in text.split('.') if sentence.strip()]


@pytest.fixture
def folder(tmp_path):
  lines = [json.dumps({'_id': name, 'text': text}) + '\n' for name, text in TEXTS.items()]
  (tmp_path / 'one.jsonl').write_text(''.join(lines[:5]))
  (tmp_path / 'two.jsonl').write_text(''.join(lines[5:]))
  return tmp_path


@pytest.fixture
def start(folder, settings, devices, tokenizer, model):
  """``start(option=value)`` -> the data, on both files above."""

  def run(**changes):
    options = {
      'method': 'pretrain',
      'data__dir': f'{folder}/one.jsonl, {folder}/two.jsonl',
      'data__format': 'corpus',
      'batch_size': 4,
      'pretrain__views': 'siblings',
      'pretrain__max_length': 24,
      'pretrain__buckets': (8, 16, 24),
      'pretrain__passage_length': 64,
    } | changes
    config = settings(**options)
    return pretrain.find_data(config.data, config, folder / 'run', devices).open(tokenizer, model)

  return run


@pytest.mark.parametrize(
  ('views', 'said'),
  [
    ('one', '13 of 13 passages'),
    ('siblings', '12 of 13 passages; up to 6 negatives'),
    ('ict', '12 of 13 passages; up to 3 negatives'),
  ],
)
def test_what_the_loop_is_given(start, words_of, views, said, batches_of):
  data = start(pretrain__views=views)
  iterator = batches_of(data)
  assert (len(data.batches), data.unit, data.evaluation) == (3, 'passages', None)
  assert data.description.startswith(said)
  names = []
  for batch in (next(iterator) for _ in range(3)):
    both = ['first'] if views == 'one' else ['first', 'second']
    # The texts are of the passages that it names.
    named = data.ids(batch).removeprefix('passages ').split(', ')
    for row, name in enumerate(named):
      document, number = name.split('#')
      sentences = split(TEXTS[document].lower())
      for view in both:
        shown = split(' '.join(words_of(batch[f'{view}_tokens'][row])))
        assert number == '0' and shown and set(shown) <= set(sentences)
        if views != 'ict':
          assert len(shown) == (len(sentences) if views == 'one' else 1)
    names += named
  assert len(set(names)) == 12  # an epoch has each once


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'pretrain__max_length': 30, 'prompt__length': 3, 'prompt__shift_positions': True},
      ('config.pretrain.max_length', '30', '29'),
    ),
    ({'batch_size': 13}, ('config.batch_size', '13', '12')),
    ({'data__format': 'beir'}, ('config.data.format', 'beir')),
  ],
)
def test_what_cannot_be(start, changes, message):
  with refused(message):
    start(**changes)
