"""Made-up inputs for benchmarks: encoders of known shapes, texts, batches."""

import json
import pathlib

import jax
import numpy as np

from dprjax.models import model_folders, scratch
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import vocabularies
from dprjax.text.vector_spec import VectorSpec

# From config.json of all-MiniLM-L6-v2, roberta-base and roberta-large, without dropout, so that
# systems can be compared.
_ROBERTA = {'max_positions': 514, 'type_vocab_size': 1, 'layer_norm_eps': 1e-5, 'pad_token_id': 1}
_CALM = {'hidden_dropout': 0.0, 'attention_dropout': 0.0}
SHAPES = {
  'tiny': EncoderConfig('bert', 1000, 64, 2, 2, 256, max_positions=160, **_CALM),
  'minilm': EncoderConfig('bert', 30522, 384, 6, 12, 1536, **_CALM),
  'base': EncoderConfig('roberta', 50265, 768, 12, 12, 3072, **_ROBERTA, **_CALM),
  'large': EncoderConfig('roberta', 50265, 1024, 24, 16, 4096, **_ROBERTA, **_CALM),
}


def batch(
  model: EncoderConfig,
  queries: int,
  query_length: int,
  passage_length: int,
  candidates: int = 1,
  shortest: float = 1.0,
) -> dict[str, np.ndarray]:
  """A batch of random tokens, as in docs/architecture.md.

  The length of a row is at least ``shortest`` times the padded length.
  """
  rng = np.random.default_rng(0)

  def rows(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    lengths = rng.integers(round(shortest * shape[-1]), shape[-1], shape[:-1], endpoint=True)
    mask = np.arange(shape[-1]) < lengths[..., None]
    # Special tokens have the lowest ids.
    tokens = np.where(
      mask, rng.integers(10, model.vocab_size, shape), getattr(model, 'pad_token_id', 0)
    )
    return tokens.astype(np.int32), mask

  query_tokens, query_mask = rows((queries, query_length))
  passage_tokens, passage_mask = rows((queries, candidates, passage_length))
  passage_index = np.arange(queries * candidates, dtype=np.int32).reshape(queries, candidates)
  return {
    'query_tokens': query_tokens,
    'query_mask': query_mask,
    'passage_tokens': passage_tokens,
    'passage_mask': passage_mask,
    'query_index': np.arange(queries, dtype=np.int32),
    'passage_index': passage_index,
    'relevant': passage_index[:, :1].copy(),
  }


def texts(count: int, shortest: int = 20, longest: int = 100, seed: int = 0) -> list[str]:
  """Texts of ``shortest`` to ``longest`` random words; MS MARCO passages have about 20 to 100."""
  rng = np.random.default_rng(seed)
  words = _words()
  return [' '.join(rng.choice(words, size)) for size in rng.integers(shortest, longest, count)]


def beir_folder(folder: pathlib.Path, count: int = 20_000) -> pathlib.Path:
  """A BEIR folder of random words, 6 a query and about 60 a passage, as in MS MARCO.

  Passage i answers query i.
  """
  (folder / 'qrels').mkdir(parents=True)
  for name, prefix, shortest, longest in (('corpus', 'd', 20, 100), ('queries', 'q', 3, 10)):
    rows = (
      {'_id': f'{prefix}{i}', 'text': content}
      for i, content in enumerate(texts(count, shortest, longest, seed=longest))
    )
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  (folder / 'qrels/train.tsv').write_text(''.join(f'q{i}\td{i}\t1\n' for i in range(count)))
  return folder


def backbone_folder(
  folder: pathlib.Path,
  model: EncoderConfig,
  spec: VectorSpec | None = None,
) -> pathlib.Path:
  """A Hugging Face directory with random weights and a WordPiece vocabulary of the random words."""
  tokenizer_folder = folder.with_name(f'{folder.name}-tokenizer')
  tokenizer_folder.mkdir(parents=True)
  vocabularies.train_wordpiece(list(_words()), min(model.vocab_size, 8000), tokenizer_folder)
  model_folders.save_backbone(
    folder,
    model,
    scratch.init_params(model, jax.random.key(0)),
    source=tokenizer_folder,
    spec=spec,
  )
  return folder


def _words() -> np.ndarray:
  rng = np.random.default_rng(0)
  letters = np.array(list('abcdefghijklmnopqrstuvwxyz'))
  return np.array([''.join(rng.choice(letters, size)) for size in rng.integers(2, 9, 5_000)])
