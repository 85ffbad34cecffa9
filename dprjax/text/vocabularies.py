"""Vocabularies trained from scratch: WordPiece as in BERT, sentencepiece as in XLM-R."""

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece
import tokenizers
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.text.tokenizing import Tokenizer, load_tokenizer

_SPECIAL = {
  'pad_token': '[PAD]',
  'unk_token': '[UNK]',
  'cls_token': '[CLS]',
  'sep_token': '[SEP]',
  'mask_token': '[MASK]',
}


def train_wordpiece(
  texts: Iterable[str], vocab_size: int, out_dir: files.PathLike, lowercase: bool = True
) -> Tokenizer:
  """Trains a BERT WordPiece vocabulary and writes it as a directory for ``AutoTokenizer``.

  Writes tokenizer.json, tokenizer_config.json and vocab.txt (an id a line).
  """

  def wordpiece(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
      tokenizers.models.WordPiece(vocabulary, unk_token=_SPECIAL['unk_token'])
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer

  backend, texts = wordpiece({}), list(texts)
  words = {
    word
    for text in texts
    for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
  }
  # The trainer numbers pieces such as '##a' in random order and breaks ties by number; listing them
  # first makes the vocabulary repeatable.
  pieces = sorted({f'##{letter}' for word in words for letter in word[1:]})
  trainer = tokenizers.trainers.WordPieceTrainer(
    vocab_size=vocab_size, special_tokens=[*_SPECIAL.values(), *pieces], show_progress=False
  )
  backend.train_from_iterator(texts, trainer)
  # Keep only the vocabulary, since these pieces are not special tokens.
  backend = wordpiece(backend.get_vocab())
  backend.add_special_tokens(list(_SPECIAL.values()))
  cls_id, sep_id = backend.token_to_id('[CLS]'), backend.token_to_id('[SEP]')
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='[CLS] $A [SEP]',
    pair='[CLS] $A [SEP] $B:1 [SEP]:1',
    special_tokens=[('[CLS]', cls_id), ('[SEP]', sep_id)],
  )
  folder = epath.Path(out_dir)
  folder.mkdir(parents=True, exist_ok=True)
  with files.atomic_write(folder / 'tokenizer.json') as file:
    file.write(backend.to_str(pretty=True))
  settings: dict[str, Any] = {
    'tokenizer_class': 'BertTokenizer',
    'do_lower_case': lowercase,
    'model_max_length': 512,
    **_SPECIAL,
  }
  files.write_json(folder / 'tokenizer_config.json', settings)
  vocabulary = backend.get_vocab()
  with files.atomic_write(folder / 'vocab.txt') as file:
    file.writelines(f'{token}\n' for token in sorted(vocabulary, key=vocabulary.__getitem__))
  return load_tokenizer(folder)


def train_sentencepiece(
  texts: Iterable[str], vocab_size: int, out_dir: files.PathLike
) -> Tokenizer:
  """Trains a sentencepiece unigram vocabulary as in XLM-R, and writes it for ``AutoTokenizer``.

  Writes sentencepiece.bpe.model and tokenizer_config.json. Small texts give fewer than
  ``vocab_size`` pieces.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      # XLM-R adds a padding and a mask token. One thread makes the vocabulary repeatable.
      sentence_iterator=iter(texts),
      model_writer=model,
      vocab_size=vocab_size - 2,
      model_type='unigram',
      character_coverage=0.9995,
      num_threads=1,
      hard_vocab_limit=False,
      max_sentence_length=1 << 20,
      minloglevel=2,
    )
  except (RuntimeError, OSError) as error:
    raise InputError(
      f'no vocabulary can be trained: {" ".join(str(error).split())[-200:]}'
    ) from error
  folder = epath.Path(out_dir)
  folder.mkdir(parents=True, exist_ok=True)
  with files.atomic_write(folder / 'sentencepiece.bpe.model', 'wb') as file:
    file.write(model.getvalue())
  files.write_json(
    folder / 'tokenizer_config.json',
    {'tokenizer_class': 'XLMRobertaTokenizer', 'model_max_length': 512},
  )
  return load_tokenizer(folder)
