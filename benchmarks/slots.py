"""Large batches of a server by themselves, for two lengths of slots, and those of Encoder.encode.

    python benchmarks/slots.py [--rounds=5]

all-MiniLM-L6-v2 from its package. Every row of a server batch has the prompt of its own slot. Slots
hold 32 vectors or 16, as many as the prompt; `Encoder.encode` has one prompt for all rows. All take
turns. Writes benchmarks/results/slots-DEVICE.json.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import record
import serve
import timing
from dprjax.encoding import embedder
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import adapter as adapters
from dprjax.models import hub
from dprjax.models.adapters.prefix import Prefix
from dprjax.serving.bank import AdapterChoice, Bank
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.options import ServerOptions
from dprjax.text import tokenizing

SLOTS = (32, 16)  # vectors
ROWS, LENGTHS, TOKENS = (32, 64), (16, 32), 2048  # of a batch


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()
  backbone = hub.load_backbone(serve.BACKBONE)
  rows = {length: np.full(length, 1000, np.int32) for length in LENGTHS}
  ways: dict[str, Callable[[], Any]] = {}
  for size in SLOTS:
    ways |= of_server(backbone, rows, size)
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    serve.write_prompts(folder, 1)
    [group] = Encoder.load(serve.BACKBONE, folder / 'p0.npz', batch_size=ROWS[-1])._groups['query']
  for length in LENGTHS:
    ways[f'encode, {ROWS[-1]} rows of {length}'] = lambda length=length: group.embedder(
      group.params, [rows[length]] * ROWS[-1]
    )
  seconds = timing.take_turns(ways, args.rounds)
  cases = {name: round(1e3 * float(np.median(own)), 1) for name, own in seconds.items()}
  for name, milliseconds in cases.items():
    print(f'{name}: {milliseconds} ms')
  record.write_jax('slots', cases, {'rounds': args.rounds})


def of_server(
  backbone: hub.Backbone, rows: dict[int, np.ndarray], size: int
) -> dict[str, Callable[[], Any]]:
  """Calls of the compiled batches, by name."""
  bank = Bank(
    backbone.config,
    backbone.params,
    options=ServerOptions(ROWS, LENGTHS, TOKENS, slots=65),
    rows={Prefix: adapters.every()['prefix'].row(backbone.config, size)},
    pad_id=tokenizing.load_tokenizer(backbone.path).pad_id,
    metrics=ServerMetrics(),
    mesh=embedder.server_mesh(1),
  )
  bank.compile()
  no_prompt = AdapterChoice(None, None, backbone.spec)

  def call(count: int, length: int) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(
      bank.run([rows[length]] * count, [no_prompt] * count, count, length)
    )

  return {
    f'slots of {size}, {count} rows of {length}': call(count, length)
    for count, length in bank.options.shapes()
  }


if __name__ == '__main__':
  main()
