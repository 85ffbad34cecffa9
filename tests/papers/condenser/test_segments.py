"""The cache of passages: where it cuts, whole words, and when it is built again."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
import regex
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dprjax.papers.condenser import segments
from dprjax.text import fingerprint, tokenizing, vocabularies
from tests.refusals import refused

SENTENCES = [
  'The unbelievablest cat sat.',
  'Dogs bark loudly at night.',
  'Fish swim in the sea.',
  "They don't believe it, do they?",
  'Birds unbelievably fly.',
]
# How GPT-2, and therefore byte-level BPE, splits words.
GPT2_WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+")


SPECIAL = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']


def unigram():
  """An XLM-R-like tokenizer: Metaspace of sentencepiece, a unigram vocabulary, <s> text </s>."""
  backend = tokenizers.Tokenizer(models.Unigram())
  backend.normalizer = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(' {2,}'), ' ')]
  )
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
  )
  backend.decoder = decoders.Metaspace()
  trainer = trainers.UnigramTrainer(
    vocab_size=70, special_tokens=SPECIAL, unk_token='<unk>', show_progress=False
  )
  backend.train_from_iterator(SENTENCES * 20, trainer)
  backend.post_processor = processors.TemplateProcessing(
    single='<s> $A </s>',
    special_tokens=[(token, backend.token_to_id(token)) for token in ('<s>', '</s>')],
  )
  return tokenizing.Tokenizer(backend, '', 10**6, 1, 4, False)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """One token for each word of SENTENCES, and the letters."""
  return vocabularies.train_wordpiece(SENTENCES * 20, 200, tmp_path_factory.mktemp('tokenizer'))


def build(tmp_path, tokenizer, *texts, passage_length=64, **options):
  path = tmp_path / 'text.jsonl'
  path.write_text(
    ''.join(json.dumps({'id': f'd{i}', 'text': words}) + '\n' for i, words in enumerate(texts))
  )
  return segments.build_documents(
    [path], tokenizer, tmp_path / 'token_cache', passage_length=passage_length, **options
  )


def rows(built):
  """Every passage as (tokens, words, ends), lists."""
  columns = built.passages.read(np.arange(built.num_passages), segments.COLUMNS)
  return [
    tuple(np.frombuffer(value, np.int32).tolist() for value in row)
    for row in zip(*columns, strict=True)
  ]


def counts(built):
  return json.loads((built.path / 'documents.json').read_text())['report']


def made(built):
  path = built.path / 'documents.json'
  return os.stat(path).st_mtime_ns, path.read_text()


def test_passages_are_whole_sentences(tmp_path, tokenizer, caplog):
  caplog.set_level(logging.INFO)
  built = build(tmp_path, tokenizer, ' '.join(SENTENCES), SENTENCES[2], '', passage_length=12)
  encoded = [
    tokenizer.backend.encode(sentence, add_special_tokens=False).ids for sentence in SENTENCES
  ]
  assert [len(ids) for ids in encoded] == [5, 6, 6, 10, 4]
  # The last, of four tokens, is joined to the one before. These fourteen tokens are more than
  # twelve, and are cut into halves.
  last = encoded[3] + encoded[4]
  assert [(tokens, ends) for tokens, _, ends in rows(built)] == [
    (encoded[0] + encoded[1], [5, 11]),
    (encoded[2], [6]),
    (last[:7], [7]),
    (last[7:], [7]),
  ]
  assert built.passage_ids(np.array([3, 0])) == ['d0#3', 'd0#0']
  assert built.num_tokens.tolist() == [11, 6, 7, 7] and built.num_sentences.tolist() == [2, 1, 1, 1]
  assert counts(built) == {
    'documents': 2,
    'documents without text: skipped': 1,
    'sentences of fewer than 5 tokens: joined to a neighbour': 1,
    'sentences of more than 12 tokens: cut': 1,
    'passages that came before: left out': 1,
    'passages': 4,
    'passages of one sentence': 3,
  }
  assert '1 passage that came before: left out (d1#0)' in caplog.text


@pytest.mark.parametrize(
  ('lengths', 'passages'),
  [
    ([4, 4, 2, 9], [(0, [4, 8, 10]), (10, [19])]),  # two do not fit into the last
    ([3, 3, 3, 7], [(0, [3, 6]), (6, [9, 16])]),
    ([5, 5, 3], [(0, [5, 10]), (10, [13])]),  # the passage before has only two
    ([10, 10, 1], [(0, [10]), (10, [20]), (20, [21])]),
    ([4], [(0, [4])]),
  ],
)
def test_sentences_are_packed_into_passages(lengths, passages):
  assert segments._pack(np.cumsum(lengths).tolist(), 10) == passages


def test_long_sentences_are_cut_between_words():
  begins = np.ones(25, bool)
  ends = np.array([4, 25])
  assert segments._cut_long(ends, begins, 10) == [4, 11, 18, 25]  # 21 tokens: three times seven
  begins[8:12] = False  # a word of tokens 7 to 11
  assert segments._cut_long(ends, begins, 10) == [4, 7, 16, 25]
  begins[:] = False  # one word: no good place
  assert segments._cut_long(np.array([25]), begins, 10) == [9, 17, 25]


@pytest.fixture(params=['bert', 'roberta', 'unigram'])
def kind(request, tmp_path):
  """(tokenizer, family), where `begins` finds words of the family by the names of tokens."""
  name = request.param
  if name in ('bert', 'roberta'):
    folder = {'bert': 'bert-base-uncased'}.get(name, name)
    source = request.getfixturevalue('data_dir') / 'tokenizers' / folder
    shutil.copytree(source, tmp_path / 'vocabulary')
    (tmp_path / 'vocabulary').chmod(0o755)
    (tmp_path / 'vocabulary' / 'config.json').write_text(json.dumps({'model_type': name}))
    kind = {'bert': 'bert', 'roberta': 'bpe'}[name]
    return tokenizing.load_tokenizer(tmp_path / 'vocabulary'), kind
  return unigram(), 'unigram'


def begins(names, family):
  """Whether each token begins a word, by its name."""
  if family == 'bert':
    return [not name.startswith('##') for name in names]
  if family == 'unigram':
    return [name.startswith('▁') for name in names]
  written = ''.join(names).replace('Ġ', ' ')
  starts = {match.start() for match in GPT2_WORDS.finditer(written)}
  return [len(''.join(names[:number])) in starts for number in range(len(names))]


def test_text_that_spells_special_tokens_is_text(tmp_path, tokenizer):
  built = build(tmp_path, tokenizer, 'The [MASK] and [SEP] of the cat sat.')
  ((tokens, *_),) = rows(built)
  assert {tokenizer.mask_id, tokenizer.closing[0]}.isdisjoint(tokens)
  assert tokenizer.mask_id in tokenizer.backend.encode('The [MASK]').ids  # as it would be otherwise


def test_it_is_built_once_and_again_for_anything_else(tmp_path, tokenizer, caplog, monkeypatch):
  caplog.set_level(logging.INFO)
  first = made(build(tmp_path, tokenizer, *SENTENCES))
  caplog.clear()
  assert made(build(tmp_path, tokenizer, *SENTENCES)) == first
  assert 'documents: 5 passages, built before' in caplog.text
  assert made(build(tmp_path, tokenizer, *SENTENCES, process_index=1)) == first
  for texts, options in (
    (SENTENCES, {'passage_length': 32}),
    (SENTENCES, {'language': 'de'}),
    (SENTENCES[:4], {}),
  ):
    again = made(build(tmp_path, tokenizer, *texts, **options))
    assert again != first
    first = again
  monkeypatch.setattr(fingerprint, '_WAIT_S', 0.0)
  with refused('token_cache', '0'):
    build(tmp_path, tokenizer, *SENTENCES, process_index=1)


def test_no_text_at_all(tmp_path, tokenizer):
  (tmp_path / 'note.txt').write_text('\n \n')
  with refused('text.jsonl'):
    build(tmp_path, tokenizer, '', ' ')
  with refused('note.txt'):
    segments.build_documents(
      [tmp_path / 'note.txt'], tokenizer, tmp_path / 'token_cache', passage_length=64
    )
  assert not (tmp_path / 'token_cache').exists()


@pytest.mark.slow_but_first
def test_words_are_whole(tmp_path, kind):
  tokenizer, family = kind
  ((tokens, words, ends),) = rows(
    build(tmp_path, tokenizer, ' '.join(SENTENCES[:4]), passage_length=512)
  )
  first = begins([tokenizer.backend.id_to_token(token) for token in tokens], family)
  assert not all(first)  # else the test would show nothing
  assert words == (np.cumsum(first) - 1).tolist()
  # Tokens of running text, as if the passage were tokenised whole.
  assert tokens == tokenizer.backend.encode(' '.join(SENTENCES[:4]), add_special_tokens=False).ids
  assert len(ends) == 4 and ends[-1] == len(tokens)
  numbers = []  # of the words of each sentence
  for start, end, sentence in zip([0, *ends[:-1]], ends, SENTENCES[:4], strict=True):
    decoded = ''.join(tokenizer.backend.decode(tokens[start:end]).split())
    expected = ''.join(sentence.split())
    assert decoded in (expected, expected.lower())
    numbers.append(set(words[start:end]))
  assert len(set.union(*numbers)) == sum(map(len, numbers))  # no word is in two sentences
