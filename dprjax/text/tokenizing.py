"""Text to token arrays: a Hugging Face tokenizer, frozen, and padding."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jaxtyping as jt
import numpy as np
import tokenizers
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text import sentence_files

_KEPT_FORMAT = 'dprjax.tokenizer.4'
_PACKAGES = ('transformers', 'tokenizers', 'sentencepiece')
_MOST = 64  # tokenizers kept, the newest
# Files that a tokenizer may be read from; not weights.
_TOKENIZER_ENDINGS = ('.json', '.txt', '.model', '.bpe', '.vocab', '.jinja')


# Characters first read for each token. English has 4 or 5.
_CHARACTERS = 16
_MORE = 16  # times as many if these give too few tokens
_MARGIN = 64  # extra tokens: text after a cut can change only the last tokens before it
_SPACE = re.compile(r'\s')


class PairFormat(NamedTuple):
  """Special tokens around two texts: ``opening first middle second closing``.

  Attributes:
    opening, middle, closing: ``[CLS]``, ``[SEP]``, ``[SEP]`` (BERT); ``<s>``, ``</s></s>``,
      ``</s>`` (RoBERTa, XLM-R); none, ``</s>``, ``</s>`` (T5).
    second_type: the token type of ``second closing``; 0 for models without token types.
  """

  opening: tuple[int, ...]
  middle: tuple[int, ...]
  closing: tuple[int, ...]
  second_type: int

  @property
  def specials(self) -> int:
    return len(self.opening) + len(self.middle) + len(self.closing)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to ids, with the special tokens of the tokenizer post-processor.

  These are ``[CLS] text [SEP]`` for an encoder, ``<bos> text`` or ``text <eos>`` for a decoder.

  Attributes:
    backend: the ``tokenizers.Tokenizer``, without padding and truncation; do not change it.
    sha256: of the JSON of the backend; names the tokenizer in caches and prompts.
    pad_id: any token if the vocabulary has no padding token, since padding is masked.
    mask_id: None if the vocabulary has no mask token.
    typed: whether the model takes token types.
  """

  backend: tokenizers.Tokenizer
  sha256: str
  vocab_size: int
  pad_id: int
  mask_id: int | None
  typed: bool

  @property
  def opening(self) -> tuple[int, ...]:
    """Special tokens that begin every text; may be empty."""
    return self._around_one[0]

  @property
  def closing(self) -> tuple[int, ...]:
    """Special tokens that end every text, even after a cut; may be empty."""
    return self._around_one[1]

  @property
  def num_specials(self) -> int:
    """Special tokens of a single text."""
    return len(self.opening) + len(self.closing)

  @functools.cached_property
  def _around_one(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    probe = self._probe('a')
    at = probe.special_tokens_mask.index(0)
    return tuple(probe.ids[:at]), tuple(probe.ids[at + 1 :])

  @functools.cached_property
  def around_pair(self) -> PairFormat:
    """Special tokens of a pair; ``middle`` may be empty."""
    probe = self._probe('a', 'a')
    first, second = (at for at, special in enumerate(probe.special_tokens_mask) if not special)
    return PairFormat(
      tuple(probe.ids[:first]),
      tuple(probe.ids[first + 1 : second]),
      tuple(probe.ids[second + 1 :]),
      probe.type_ids[second] if self.typed else 0,
    )

  def _probe(self, text: str, pair: str | None = None) -> tokenizers.Encoding:
    """Encodes texts of one token each, with special tokens, for any vocabulary."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, unk_token='a'))
    if self.backend.post_processor is not None:
      backend.post_processor = self.backend.post_processor
    return backend.encode(text, pair)

  @property
  def special_ids(self) -> list[int]:
    """Ids of special tokens, ascending."""
    return sorted(
      number for number, token in self.backend.get_added_tokens_decoder().items() if token.special
    )

  def encode(
    self, texts: Sequence[str], max_length: int
  ) -> tuple[list[jt.Int32[np.ndarray, ' T']], int]:
    """Token ids of each text with special tokens, and the number of cut texts.

    A cut text keeps its closing special tokens.
    """
    if max_length <= self.num_specials:
      raise InputError(
        f'a maximum length of {max_length} tokens leaves no room beside the special tokens'
      )
    encoded = [
      np.array(encoding.ids, np.int32) for encoding in self.backend.encode_batch_fast(list(texts))
    ]
    cut = [self.cut(ids, max_length) for ids in encoded]
    return cut, sum(len(ids) > max_length for ids in encoded)

  def shorten(self, texts: Sequence[str], max_length: int) -> list[str]:
    """Drops the ends of texts that lie beyond ``max_length`` tokens, found by counting characters.

    The first ``max_length`` tokens stay the same, and a text with more tokens still has more. So a
    text of megabytes costs no more than one that is slightly too long.
    """
    enough = max_length + _MARGIN
    starts = [_start(one, _CHARACTERS * enough) for one in texts]
    for number, (one, start) in enumerate(zip(texts, starts, strict=True)):
      if len(start) == len(one) or len(self.backend.encode(start).ids) >= enough:
        continue
      starts[number] = start = _start(one, _MORE * _CHARACTERS * enough)
      if len(start) < len(one) and (count := len(self.backend.encode(start).ids)) < enough:
        raise InputError(
          f'text {number}: its first {len(start):,} characters have only {count:,} tokens; send '
          'fewer characters, without long runs of spaces or of one letter'
        )
    return starts

  def cut(self, ids: jt.Int32[np.ndarray, ' _'], max_length: int) -> jt.Int32[np.ndarray, ' T']:
    """At most ``max_length`` ids, still with the closing special tokens."""
    if len(ids) <= max_length:
      return ids
    closing = np.array(self.closing, np.int32)
    return np.concatenate([ids[: max_length - len(closing)], closing])

  @property
  def pair_format(self) -> PairFormat:
    """Special tokens of a pair; raises InputError if no token separates the texts."""
    if not self.around_pair.middle:
      raise InputError(
        'a cross-encoder needs a special token between two texts, and the tokenizer has none'
      )
    return self.around_pair

  def pair_length(self, first: int, second: int) -> int:
    """Length of a pair from the lengths of its texts, all with special tokens."""
    return first + second - 2 * self.num_specials + self.pair_format.specials

  def encode_bare(self, texts: Iterable[str]) -> dict[str, jt.Int32[np.ndarray, ' T']]:
    """Token ids of each distinct text, uncut and without special tokens."""
    distinct = list(dict.fromkeys(texts))
    encoded = self.backend.encode_batch_fast(distinct, add_special_tokens=False)
    return {
      text: np.array(encoding.ids, np.int32)
      for text, encoding in zip(distinct, encoded, strict=True)
    }


def _start(text: str, most: int) -> str:
  """The first characters, up to a nearby space if there is one."""
  if len(text) <= most:
    return text
  spaces = [match.start() for match in _SPACE.finditer(text, most - most // 8, most)]
  return text[: spaces[-1] if spaces else most]


def load_tokenizer(directory: files.PathLike) -> Tokenizer:
  """The fast tokenizer of a Hugging Face directory, read by transformers.

  Settings of sentence_bert_config.json apply too: ``do_lower_case``, and arguments of
  ``AutoTokenizer``. The result is cached below ``~/.cache/dprjax`` (or ``XDG_CACHE_HOME``).
  """
  folder = files.existing(directory, 'tokenizer directory')
  if not folder.is_dir() or not any(
    (folder / name).exists() for name in sentence_files.VOCABULARIES
  ):
    raise InputError(
      f'no tokenizer in {folder}: expected tokenizer.json, or vocab.txt, or vocab.json and '
      'merges.txt'
    )
  files.refuse_special(folder)
  if 'auto_map' in _config_of(folder):
    raise InputError(
      f'{folder}/tokenizer_config.json: auto_map names Python code, which never runs; remove it'
    )
  settings = sentence_files.tokenizer_settings(folder)
  key = _key_of(folder)
  if (cached := _read_kept(key)) is not None:
    backend = tokenizers.Tokenizer.from_str(cached.pop('backend'))
    return Tokenizer(backend, **cached)
  tokenizer = _load(folder, settings)
  fields = {field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)}
  _keep(key, {**fields, 'backend': tokenizer.backend.to_str()})
  return tokenizer


def _key_of(folder: epath.Path) -> str:
  """A hash of everything that the tokenizer of a folder depends on."""
  digest = hashlib.sha256(_KEPT_FORMAT.encode())
  for package in _PACKAGES:
    digest.update(f'{package} {metadata.version(package)}\n'.encode())
  for path in sorted(folder.iterdir(), key=lambda path: path.name):
    if path.name.endswith(_TOKENIZER_ENDINGS) and path.is_file():
      digest.update(f'{path.name} {files.sha256_file(path)}\n'.encode())
  return digest.hexdigest()


def _read_kept(key: str) -> dict[str, Any] | None:
  """The fields given to `_keep`; None if the file is missing or damaged."""
  path = _place(key)
  if path is None or not path.is_file():
    return None
  try:
    record = reading.read_json_object(path, 'kept tokenizer')
  except (InputError, OSError):
    return None
  fields = record.get('fields')
  return fields if isinstance(fields, dict) and record.get('sha256') == _digest(fields) else None


def _keep(key: str, fields: dict[str, Any]) -> None:
  """Writes JSON values, if the cache directory can be written."""
  path = _place(key)
  if path is None:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {'sha256': _digest(fields), 'fields': fields})
    by_age = sorted(
      path.parent.glob('*.json'), key=lambda file: file.stat().st_mtime_ns, reverse=True
    )
    for old in by_age[_MOST:]:
      old.unlink(missing_ok=True)
  except (InputError, OSError):
    return


def _place(key: str) -> pathlib.Path | None:
  try:
    return files.user_cache() / 'tokenizers' / f'{key}.json'
  except RuntimeError:  # no home directory
    return None


def _digest(fields: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _config_of(folder: epath.Path) -> dict[str, Any]:
  path = folder / 'tokenizer_config.json'
  return reading.read_json_object(path, path.name) if path.exists() else {}


def _load(folder: epath.Path, settings: sentence_files.TokenizerSettings) -> Tokenizer:
  # transformers suggests installing PyTorch on its first import.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  import transformers

  try:
    wrapper = transformers.AutoTokenizer.from_pretrained(
      str(folder), local_files_only=True, trust_remote_code=False, **settings.arguments
    )
    backend = wrapper.backend_tokenizer
  except (KeyboardInterrupt, SystemExit, MemoryError):
    raise
  # transformers and tokenizers raise Exception for malformed files; a panic is a BaseException.
  except BaseException as error:
    why = ' '.join(str(error).split())
    raise InputError(f'cannot read the tokenizer in {folder}: {why}') from error
  config = _config_of(folder)
  # transformers 4 applied these keys, 5 ignores them. E5-Mistral pools the state of this token.
  if (
    config.get('add_eos_token')
    and type(wrapper).__name__.startswith(('Llama', 'Gemma'))
    and wrapper('a')['input_ids'][-1] != wrapper.eos_token_id
  ):
    wrapper.add_bos_token, wrapper.add_eos_token = config.get('add_bos_token', True), True
  for name, expected, why in (
    ('truncation_side', 'right', 'long texts lose their end'),
    ('split_special_tokens', False, 'special tokens in a text are special'),
  ):
    if (value := getattr(wrapper, name, expected)) != expected:
      raise InputError(
        f'{folder}: {name} of the tokenizer is {value!r:.40}, but here {why}; remove it from '
        'tokenizer_config.json, tokenizer.json or sentence_bert_config.json'
      )
  if settings.lower and not _lowers(backend.normalizer):
    first = [tokenizers.normalizers.Lowercase()]
    second = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = tokenizers.normalizers.Sequence([*first, *second])
  backend = tokenizers.Tokenizer.from_str(backend.to_str())
  backend.no_padding()
  backend.no_truncation()
  canonical = json.dumps(
    json.loads(backend.to_str()), sort_keys=True, ensure_ascii=False, separators=(',', ':')
  )
  pads = (wrapper.pad_token_id, wrapper.eos_token_id, 0)
  return Tokenizer(
    backend=backend,
    sha256=hashlib.sha256(canonical.encode()).hexdigest(),
    # The largest id plus one, since a vocabulary may have gaps.
    vocab_size=max([backend.get_vocab_size(), *(n + 1 for n in backend.get_vocab().values())]),
    pad_id=next(one for one in pads if one is not None),
    mask_id=wrapper.mask_token_id,
    typed='token_type_ids' in wrapper.model_input_names,
  )


def _lowers(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
  """Whether a normalizer lower-cases."""
  if isinstance(normalizer, tokenizers.normalizers.Sequence):
    return any(_lowers(one) for one in normalizer)  # type: ignore[attr-defined]  # by __getitem__
  return isinstance(normalizer, tokenizers.normalizers.Lowercase)


def pad_batch(
  rows: Sequence[jt.Int32[np.ndarray, ' _']], length: int, pad_id: int
) -> tuple[jt.Int32[np.ndarray, 'B T'], jt.Bool[np.ndarray, 'B T']]:
  """Rows of tokens padded on the right to ``length``, and the mask of real tokens.

  Raises:
    ValueError: a row is longer than ``length``.
  """
  return pad_flat(
    np.concatenate([*rows, np.empty(0, np.int32)]),
    np.array([len(row) for row in rows], np.int32),
    length,
    pad_id,
  )


def length_buckets(
  lengths: jt.Int[np.ndarray, ' rows'], buckets: Mapping[int, int]
) -> list[tuple[jt.Int[np.ndarray, ' rows'], int]]:
  """Groups rows of similar length for encoding: (row numbers, padded length), shortest first.

  Every row is in one group. The last group of a bucket is filled by repeating its last row, so each
  bucket has one shape; ``embeddings[rows] = encode(...)`` writes the repeated values again.

  Args:
    lengths: tokens of each row.
    buckets: padded length -> rows of a group.
  """
  ends = np.array(sorted(buckets))
  order = np.argsort(lengths, kind='stable')
  groups = []
  borders = np.searchsorted(lengths[order], ends, side='right')
  for start, stop, end in zip([0, *borders], borders, ends, strict=False):
    size = buckets[int(end)]
    for i in range(start, stop, size):
      rows = order[i : min(i + size, stop)]
      groups.append((np.pad(rows, (0, size - len(rows)), mode='edge'), int(end)))
  return groups


def pad_flat(
  flat: jt.Int32[np.ndarray, ' _'], lengths: jt.Int32[np.ndarray, ' B'], length: int, pad_id: int
) -> tuple[jt.Int32[np.ndarray, 'B T'], jt.Bool[np.ndarray, 'B T']]:
  """``pad_batch`` of rows concatenated to ``flat``."""
  if len(lengths) and lengths.max() > length:
    raise ValueError(f'a row of {lengths.max()} tokens does not fit into {length}')
  mask = np.arange(length, dtype=np.int32)[None, :] < lengths[:, None]
  tokens = np.full(mask.shape, pad_id, np.int32)
  tokens[mask] = flat
  return tokens, mask
