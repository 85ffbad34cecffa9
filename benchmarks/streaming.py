"""Memory and time of `dprjax.encode` around the model, for millions of passages.

    python benchmarks/streaming.py --passages=1000000 [--texts=corpus.jsonl] [--folder=DIR]

Passages are the sentences of a corpus of 30 to 80 characters, again and again with a number behind.
A stub in place of the backbone gives vectors of 32 numbers, so the process holds all but the model:
it reads the passages twice, compares their ids, and writes vectors, ids and manifest. At the end
ids and vectors are compared with the passages. Prints the peak memory of the process (VmHWM), its
memory after the imports, and CPU seconds.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator

import numpy as np

DIMENSION = 32


def sentences(corpus: str) -> list[str]:
  """The sentences of a BEIR corpus that have 30 to 80 characters."""
  with open(corpus, encoding='utf-8') as file:
    texts = [json.loads(line)['text'] for line in file]
  return [part.strip() for text in texts for part in text.split('. ') if 30 < len(part) < 80]


def passages(texts: list[str], count: int) -> Iterator[tuple[str, str]]:
  for number in range(count):
    yield f'passage-{number:09d}', f'{texts[number % len(texts)]} {number}'


def vectors(texts: Iterable[str]) -> np.ndarray:
  """Bits of the hash of each text, float32 [n, 32]."""
  digests = b''.join(hashlib.blake2b(text.encode(), digest_size=4).digest() for text in texts)
  keys = np.frombuffer(digests, '<u4')
  bits = keys[:, None] >> np.arange(DIMENSION, dtype=np.uint32) & np.uint32(1)
  return bits.astype(np.float32)


class Stub:
  """The part of an encoder that `folders.fill_folder` uses."""

  dimension, dtype = DIMENSION, 'float32'
  space_sha256 = config_sha256 = '0' * 64
  tokenizer = types.SimpleNamespace(sha256='0' * 64)

  def __init__(self) -> None:
    self.truncated = {'passage': 0, 'query': 0}
    self.topics: dict[str, object] = {}

  def queries(self) -> dict[str, object]:
    return {}

  def entry(self) -> types.SimpleNamespace:
    side = {'pooling': 'mean', 'normalize': False, 'prefix': '', 'max_length': 256}
    spec = types.SimpleNamespace(of_side=lambda _: side)
    return types.SimpleNamespace(prompt=None, shift_positions=False, spec=spec)

  def encode(self, texts: list[str], *_: object, **__: object) -> np.ndarray:
    return vectors(texts)


def memory(name: str) -> int:
  """A value of /proc/self/status, in MB."""
  found = re.search(rf'{name}:\s+(\d+)', pathlib.Path('/proc/self/status').read_text())
  assert found is not None
  return int(found[1]) // 1024


def child(path: str, out: str) -> None:
  """Encodes a file, and prints memory after the imports, peak memory, wall and CPU seconds."""
  from dprjax.encoding import folders
  from dprjax.text.texts import Texts

  before, began = memory('VmRSS'), time.monotonic()
  texts = Texts(path, 'passage')
  folders.fill_folder(Stub(), 'passage', texts, out, source=path)  # type: ignore[arg-type]
  numbers = (before, memory('VmHWM'), time.monotonic() - began, time.process_time())
  print(json.dumps(numbers), flush=True)


def check(out: str, expected: Iterator[tuple[str, str]]) -> None:
  """Compares ids and vectors with the passages."""
  from dprjax.encoding import embeddings

  for ids, found in embeddings.load_embeddings(out).blocks(20_000):
    part = [next(expected) for _ in ids]
    assert ids == [id_ for id_, _ in part]
    np.testing.assert_array_equal(found, vectors(text for _, text in part))
  assert next(expected, None) is None


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--passages', type=int, default=1_000_000)
  data = os.environ.get('DPRJAX_DATA', '.')
  parser.add_argument('--texts', default=f'{data}/scifact/corpus.jsonl')
  parser.add_argument('--folder', help='for the passages and vectors')
  parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    child(*args.child)
    return
  texts = sentences(args.texts)
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    path, out = f'{folder}/corpus.jsonl', f'{folder}/out'
    with open(path, 'w', encoding='utf-8') as file:
      for id_, text in passages(texts, args.passages):
        file.write(json.dumps({'_id': id_, 'text': text}) + '\n')
    done = subprocess.run(
      [sys.executable, __file__, '--child', path, out],
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      check=True,
    )
    before, peak, wall, cpu = json.loads(done.stdout)
    check(out, passages(texts, args.passages))
  print(
    f'{args.passages:,} passages: {peak} MB at most, {before} MB after the imports; '
    f'{cpu:.0f} CPU s, {wall:.0f} s'
  )


if __name__ == '__main__':
  main()
