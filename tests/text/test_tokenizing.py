"""Tokenizers: frozen results of Hugging Face; cutting; training a vocabulary; padding."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
import tokenizers

# Its log goes to the stderr of its first import, which must outlive a test.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
import transformers

from dprjax.models.template import Template, fill, unpack
from dprjax.text import tokenizing, vocabularies
from tests.refusals import refused

SENTENCES = [
  'the cat sat on the mat',
  'the dog sat on the log',
  'a cat and a dog met at the mat',
] * 20


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('wordpiece')
  return folder, vocabularies.train_wordpiece(SENTENCES, 80, folder)


def test_padding_and_truncation_baked_into_a_file_are_removed(minilm):
  # all-MiniLM-L6-v2's own file pads to 128 and cuts there.
  assert json.loads((minilm / 'tokenizer.json').read_text())['padding'] is not None
  (row,), cut = tokenizing.load_tokenizer(minilm).encode(['word ' * 300], 512)
  assert len(row) == 302 and cut == 0


def test_sha256_tells_tokenizers_apart_and_not_their_padding(trained, tmp_path):
  folder, tokenizer = trained
  other = vocabularies.train_wordpiece([*SENTENCES, 'zebra zebra zebra'], 80, tmp_path / 'other')
  assert other.sha256 != tokenizer.sha256
  shutil.copytree(folder, tmp_path / 'padded')
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  backend.enable_padding(length=128)
  backend.enable_truncation(128)
  backend.save(str(tmp_path / 'padded' / 'tokenizer.json'))
  assert tokenizing.load_tokenizer(tmp_path / 'padded').sha256 == tokenizer.sha256


def test_directories_without_a_usable_tokenizer(trained, tmp_path):
  with refused('nowhere'):
    tokenizing.load_tokenizer(tmp_path / 'nowhere')
  with refused(tmp_path):
    tokenizing.load_tokenizer(tmp_path)
  # transformers would make one from nothing, and all vectors would be wrong.
  (tmp_path / 'config.json').write_text('{"model_type": "bert", "vocab_size": 30522}')
  with refused('tokenizer.json', tmp_path):
    tokenizing.load_tokenizer(tmp_path)
  shutil.copytree(trained[0], tmp_path / 'broken')
  (tmp_path / 'broken' / 'tokenizer.json').write_text('{"version":')
  with refused('broken'):
    tokenizing.load_tokenizer(tmp_path / 'broken')
  shutil.copytree(trained[0], tmp_path / 'typed')
  (tmp_path / 'typed' / 'config.json').write_text('{"model_type": "bert", "layer_norm_eps": null}')
  with refused('layer_norm_eps'):
    tokenizing.load_tokenizer(tmp_path / 'typed')
  shutil.copytree(trained[0], tmp_path / 'bare')
  (tmp_path / 'bare' / 'tokenizer_config.json').write_text(
    '{"tokenizer_class": "PreTrainedTokenizerFast"}'
  )
  # A vocabulary without special tokens but in its post-processor is read too.
  bare = tokenizing.load_tokenizer(tmp_path / 'bare')
  assert bare.pad_id == 0 and bare.opening == trained[1].opening and bare.mask_id is None


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    (
      'tokenizer_config.json',
      '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}',
      'auto_map',
    ),
    ('tokenizer_config.json', '{"tokenizer_class": 5}', ''),
    ('config.json', '{"model_type": 7, "auto_map": {"AutoTokenizer": "own.Own"}}', None),
  ],
)
def test_a_tokenizer_from_a_stranger(trained, tmp_path, capfd, name, content, message):
  folder = tmp_path / 'model'
  shutil.copytree(trained[0], folder)
  (folder / 'own.py').write_text(f'import os\nos.mkdir("{tmp_path}/ran")')
  (folder / name).write_text(content)
  if message is None:
    tokenizing.load_tokenizer(folder)
  else:
    with refused(message or 'model'):
      tokenizing.load_tokenizer(folder)
  assert not (tmp_path / 'ran').exists() and 'Traceback' not in capfd.readouterr().err


@pytest.mark.parametrize('named', [True, False])
@pytest.mark.parametrize('begins', [True, False])
def test_a_closing_token_that_only_the_config_names(tmp_path, named, begins):
  """As in E5-Mistral; transformers 5 leaves it out, and 4 did not."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({'<s>': 0, '</s>': 1, 'a': 2, 'b': 3}, []))
  backend.add_special_tokens(['<s>', '</s>'])
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 0)]
  )
  backend.save(str(tmp_path / 'tokenizer.json'))
  config = {'tokenizer_class': 'LlamaTokenizer', 'bos_token': '<s>', 'eos_token': '</s>'}
  config |= {'add_eos_token': named, 'add_bos_token': begins}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  tokenizer = tokenizing.load_tokenizer(tmp_path)
  assert tokenizer.closing == ((1,) if named else ())
  assert tokenizer.opening == ((0,) if begins or not named else ())


def test_a_sentencepiece_vocabulary_is_trained(tmp_path):
  one = vocabularies.train_sentencepiece(SENTENCES, 40, tmp_path / 'one')
  assert (one.opening, one.pad_id, one.closing, one.special_ids) == (
    (0,),
    1,
    (2,),
    [0, 1, 2, 3, one.mask_id],
  )
  assert one.mask_id == one.vocab_size - 1 and 20 < one.vocab_size <= 40
  (row,), cut = one.encode(['the cat sat on the mat'], 64)
  assert cut == 0 and one.backend.decode(row.tolist()) == 'the cat sat on the mat'
  # The same texts, the same vocabulary; the directory is enough to read it.
  vocabularies.train_sentencepiece(SENTENCES, 40, tmp_path / 'two')
  assert tokenizing.load_tokenizer(tmp_path / 'two').sha256 == one.sha256


FAMILIES = {
  # opening, closing; middle of a pair
  'bert': ('[CLS]', '[SEP]', '[SEP]'),
  'roberta': ('<s>', '</s>', '</s></s>'),
  'xlm-roberta': ('<s>', '</s>', '</s></s>'),
  'qwen': ('', '<|endoftext|>', '<|endoftext|>'),
  'llama': ('<s>', '', '<s>'),
  't5': ('', '</s>', '</s>'),
}


def byte_level(special):
  """A byte-level BPE, as of Qwen and Llama 3, without a post-processor."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=special,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(SENTENCES, trainer)
  return backend


def unigram(special):
  """A sentencepiece vocabulary, as T5's, without a post-processor."""
  backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  trainer = tokenizers.trainers.UnigramTrainer(
    vocab_size=60, special_tokens=special, unk_token='<unk>', show_progress=False
  )
  backend.train_from_iterator(SENTENCES, trainer)
  return backend


def write(folder, backend, single, pair, **settings):
  """The folder of a tokenizer whose post-processor puts special tokens around texts."""
  names = {word.partition(':')[0] for word in pair.split() if word[0] != '$'}
  backend.post_processor = tokenizers.processors.Sequence(
    [
      tokenizers.processors.ByteLevel(trim_offsets=False),
      tokenizers.processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(name, backend.token_to_id(name)) for name in names],
      ),
    ]
  )
  folder.mkdir()
  backend.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


@pytest.fixture(scope='module')
def families(trained, tmp_path_factory):
  """A tokenizer of each family, ours and those of transformers."""
  root = tmp_path_factory.mktemp('families')
  shutil.copytree(trained[0], root / 'bert')
  (root / 'roberta').mkdir()
  backend = tokenizers.ByteLevelBPETokenizer()
  backend.train_from_iterator(
    SENTENCES, 300, special_tokens=['<s>', '<pad>', '</s>', '<unk>', '<mask>'], show_progress=False
  )
  backend.save_model(str(root / 'roberta'))
  (root / 'roberta' / 'tokenizer_config.json').write_text('{"tokenizer_class": "RobertaTokenizer"}')
  vocabularies.train_sentencepiece(SENTENCES, 40, root / 'xlm-roberta')
  write(
    root / 'qwen',
    byte_level(['<|endoftext|>']),
    '$A <|endoftext|>',
    '$A <|endoftext|> $B <|endoftext|>',
    tokenizer_class='Qwen2Tokenizer',
    eos_token='<|endoftext|>',
    pad_token='<|endoftext|>',
    padding_side='left',
    chat_template='{{ messages }}',
  )
  write(
    root / 'llama',
    byte_level(['<s>', '</s>']),
    '<s> $A',
    '<s> $A <s>:1 $B:1',
    tokenizer_class='TokenizersBackend',
    bos_token='<s>',
    eos_token='</s>',  # no padding token
  )
  write(
    root / 't5',
    unigram(['<pad>', '</s>', '<unk>']),
    '$A </s>',
    '$A </s> $B </s>',
    tokenizer_class='TokenizersBackend',
    eos_token='</s>',
    pad_token='<pad>',
    unk_token='<unk>',
  )
  return {
    name: (
      tokenizing.load_tokenizer(root / name),
      transformers.AutoTokenizer.from_pretrained(root / name),
    )
    for name in FAMILIES
  }


@pytest.mark.parametrize('family', FAMILIES)
def test_texts_are_those_of_transformers(families, family):
  tokenizer, theirs = families[family]
  found = (tokenizer.opening, tokenizer.closing, tokenizer.around_pair.middle)
  assert tuple(theirs.decode(ids).replace(' ', '') for ids in found) == FAMILIES[family]
  assert tokenizer.num_specials == theirs.num_special_tokens_to_add()
  texts = [*SENTENCES[:3], '', 'cat', 'Zebra!']
  for max_length in (64, 5, tokenizer.num_specials + 1):
    rows, cut = tokenizer.encode(texts, max_length)
    expected = theirs(texts, truncation=True, max_length=max_length)['input_ids']
    assert [row.tolist() for row in rows] == expected
    assert cut == sum(len(one) > max_length for one in theirs(texts)['input_ids'])
  with refused('length'):
    tokenizer.encode(texts, tokenizer.num_specials)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_pairs_are_those_of_transformers(families, family):
  tokenizer, theirs = families[family]
  form = tokenizer.pair_format
  assert form.second_type == (family == 'bert')
  assert form.specials == theirs.num_special_tokens_to_add(pair=True)
  assert tokenizer.pair_length(12, 40) == 52 - 2 * tokenizer.num_specials + form.specials
  template = Template.pair(*form)
  firsts = ['the cat', 'a dog met', '', 'the cat', 'mat']
  seconds = [
    'the dog sat on the log',
    '',
    'a cat and a dog',
    'a dog',
    'the cat sat on the mat ' * 5,
  ]
  tokens = tokenizer.encode_bare([*firsts, *seconds])
  assert len(tokens) == 8
  uncut = theirs(firsts, seconds)['input_ids']
  for max_length in (64, 12):
    texts = [[tokens[text] for text in texts] for texts in (firsts, seconds)]
    packed = template.pack(texts, max_length, tokenizer.pad_id)
    rows, mask = tokenizing.pad_batch(packed.rows, max_length, tokenizer.pad_id)
    filled = jax.device_get(
      fill([template], unpack(rows, packed.lengths), max_length, tokenizer.pad_id)
    )
    np.testing.assert_array_equal(filled.mask, mask)
    assert (filled.tokens[~mask] == tokenizer.pad_id).all()
    expected = theirs(firsts, seconds, truncation='only_second', max_length=max_length)
    pairs = [row[seen].tolist() for row, seen in zip(filled.tokens, mask, strict=True)]
    assert pairs == expected['input_ids']
    if family == 'bert':
      types = [row[seen].tolist() for row, seen in zip(filled.token_types, mask, strict=True)]
      assert types == expected['token_type_ids']
    else:
      assert 'token_type_ids' not in expected and not filled.token_types.any()
    assert packed.cut == sum(
      pair != whole for pair, whole in zip(expected['input_ids'], uncut, strict=True)
    )
    assert packed.cut >= (max_length == 12)


def test_a_tokenizer_without_pairs(tmp_path):
  write(tmp_path / 'model', byte_level(['<eos>']), '$A <eos>', '$A $B <eos>', eos_token='<eos>')
  tokenizer = tokenizing.load_tokenizer(tmp_path / 'model')
  assert tokenizer.around_pair.middle == () and len(tokenizer.closing) == 1
  with refused('tokenizer'):
    _ = tokenizer.pair_format


def test_a_vocabulary_with_gaps_is_as_long_as_its_largest_id(trained, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  shutil.copytree(trained[0], tmp_path / 'model')
  path = tmp_path / 'model' / 'tokenizer.json'
  tokenizer = json.loads(path.read_text())
  tokenizer['model']['vocab']['zzz'] = 10**6
  path.write_text(json.dumps(tokenizer))
  assert tokenizing.load_tokenizer(tmp_path / 'model').vocab_size == 10**6 + 1


def test_length_buckets():
  lengths = np.array([5, 9, 3, 10, 4, 17, 2])
  groups = [
    (rows.tolist(), length)
    for rows, length in tokenizing.length_buckets(lengths, {10: 2, 4: 2, 20: 3})
  ]
  assert groups == [([6, 2], 4), ([4, 4], 4), ([0, 1], 10), ([3, 3], 10), ([5, 5, 5], 20)]
  assert tokenizing.length_buckets(np.array([], np.int32), {4: 2}) == []
