"""A server in bad company for some minutes: does its memory grow, is anything lost, or wrong?

    python benchmarks/soak.py [--seconds=600] [--faults=300] [--prompts=1000] [--rate=0]

Twelve clients ask under prompts drawn at random, of which 40 fit on the device and 200 in host
memory, and compare every vector with that of an ``Encoder`` with only this prompt (to 1e-5). One
more client uploads prompts under new and old names and removes others; one leaves before it is
answered. In the middle the server is killed (SIGKILL) and started again: it must still have
everything that it accepted. At the end, when its memory is warm, the clients do one thing at a
time: ask, change prompts, leave. A last server also has faults: the disk takes no more
(a limit on the size of files), the folder of prompts is gone for a while, a file is there by half,
the clock jumps by days, 500 connections are idle or send a byte a second, and hostile files are
uploaded. Failures meanwhile must be answered by 422, 429 or 503, and nothing may be lost. This
server lives for --faults seconds, each of the first two for half of --seconds. --rate limits the
requests a second of the twelve clients; 0: as many as they can. Prints the slope of the memory
(RSS) over the second half of each part, in megabytes an hour. Writes
benchmarks/results/soak-DEVICE.json.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import pathlib
import random
import resource
import tempfile
import time
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import record
import serve
from dprjax.encoding.text_encoder import Encoder
from dprjax.models import artifact

ASKERS = 12
TEXTS = 4  # whose vectors are known under every prompt
KINDS = 24  # different prompts; files of one kind hold the same vectors, and no two the same bytes


COUNTS = (
  *('answers', 'uploads', 'removals', 'left', 'wrong', 'busy', 'refused', 'refused in a fault'),
  *('faults', 'hostile uploads', 'idle connections'),
)
# The clock of the server is off by the seconds in a file.
JUMPING = """
import runpy, sys, time
path, now = sys.argv.pop(1), time.time
time.time = lambda: now() + float(open(path).read() or 0)
runpy.run_module('dprjax.serve', run_name='__main__', alter_sys=True)
"""


class Soak:
  """State shared by the clients."""

  def __init__(
    self,
    vectors: np.ndarray,
    texts: list[str],
    kinds: pathlib.Path,
    prompts: int,
    rate: float = 0.0,
  ):
    self.vectors, self.texts, self._rate = vectors, texts, rate
    self._kinds = [artifact.load_prompt(kinds / f'p{kind}.npz') for kind in range(KINDS)]
    self._aside, self._made = kinds / 'made.npz', 0
    self.kind_of = {f'p{i}': i % KINDS for i in range(prompts)}
    self.busy: set[str] = set()  # names that are being replaced
    self.counts = dict.fromkeys(COUNTS, 0)
    self.worst, self.fault_at = 0.0, -60.0
    self.faulty: tuple[int, pathlib.Path, pathlib.Path] | None = None
    self.said: list[str] = []  # by the server, of what it refused
    self.pause = 0.5  # seconds before a change, in which requests under the old prompt are answered
    self._most = prompts + prompts // 10  # the number of prompts does not grow for ever

  def content(self, kind: int) -> bytes:
    """A file of this kind, like no other."""
    prompt, self._made = self._kinds[kind], self._made + 1
    meta = prompt.meta | {'task': f'number {self._made}'}
    artifact.save_prompt(self._aside, artifact.Prompt(meta, prompt.arrays))
    return self._aside.read_bytes()

  def draw(self, rng: random.Random) -> str:
    """A name; some are asked for more often than others."""
    names = list(self.kind_of)
    return rng.choice(names[:100] if rng.random() < 0.7 else names)

  async def ask(self, port: int, rng: random.Random, end: float) -> None:
    connection = serve.Connection()
    while time.monotonic() < end:
      if self._rate:
        await asyncio.sleep(rng.expovariate(self._rate / ASKERS))
      name = self.draw(rng)
      if name in self.busy:
        continue
      kind, number = self.kind_of[name], rng.randrange(TEXTS)
      sent = time.monotonic()
      try:
        answer = await connection.ask(port, serve.request(f'{name}:query', self.texts[number]))
      except serve.Refused as error:
        if self.fault_at + 2 > sent:
          self.counts['refused in a fault'] += 1
        elif 'rate_limit' in str(error):
          self.counts['busy'] += 1
        elif name not in self.busy and self.kind_of.get(name) == kind:
          self.refused(f'{name}: {error}')
        continue
      if name in self.busy or self.kind_of.get(name) != kind:
        continue  # it was replaced meanwhile: either vector is right
      content = base64.b64decode(json.loads(answer)['data'][0]['embedding'])
      found = np.frombuffer(content, '<f4')
      off = float(np.abs(found - self.vectors[kind, number]).max())
      self.worst = max(self.worst, off)
      self.counts['answers'] += 1
      self.counts['wrong'] += off > 1e-5

  async def change(self, port: int, rng: random.Random, end: float) -> None:
    number = len(self.kind_of)
    while time.monotonic() < end:
      kind = rng.randrange(KINDS)
      old = rng.random() < 0.5 or len(self.kind_of) >= self._most
      name = rng.choice(list(self.kind_of)) if old else f'n{number}-{kind}'
      number += 1
      self.busy.add(name)
      await asyncio.sleep(self.pause)
      if name in self.kind_of and rng.random() < 0.3 and len(self.kind_of) > 500:
        if await self.send(port, 'DELETE', name, b''):
          del self.kind_of[name]
          self.counts['removals'] += 1
      elif await self.send(port, 'PUT', name, self.content(kind)):
        self.kind_of[name] = kind
        self.counts['uploads'] += 1
      self.busy.discard(name)

  async def send(self, port: int, method: str, name: str, content: bytes) -> bool:
    """Whether the server did it. A fault may hide that, so it is asked again after a fault."""
    head = f'{method} /v1/prompts/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n'
    sent = f'{head}Content-Length: {len(content)}\r\n\r\n'.encode() + content
    for number in range(100):
      began = time.monotonic()
      reader, writer = await asyncio.open_connection('127.0.0.1', port)
      writer.write(sent)
      said = (await reader.read()).decode(errors='replace')
      writer.close()
      status = said.split()[1] if said else 'nothing'
      if status in ('200', '201', '204') or (method == 'DELETE' and number and status == '404'):
        return True
      if self.fault_at + 2 < began or status not in ('422', '429', '503'):
        break
      self.counts['refused in a fault'] += 1
      await asyncio.sleep(0.2)
    self.refused(f'{method} {name}: {said}')
    return False

  def refused(self, said: str) -> None:
    self.counts['refused'] += 1
    self.said.append(said[-300:])

  async def leave(self, port: int, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
      _, writer = await asyncio.open_connection('127.0.0.1', port)
      whole = serve.request('p0:query', self.texts * 8)
      writer.write(whole[: rng.randrange(20, 2 * len(whole))])
      await asyncio.sleep(rng.random() / 20)
      writer.close()
      self.counts['left'] += 1
      await asyncio.sleep(0.1)

  async def idle(self, port: int, rng: random.Random, end: float) -> None:
    """Keeps 500 connections that say nothing, or a byte a second."""
    opened: list[Any] = []
    head = b'POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    slow = head + b'Content-Length: 1000\r\n\r\n' + b' ' * 1000
    while time.monotonic() < end:
      for _, writer, _ in opened[:25]:  # each lasts for 20 seconds
        writer.close()
      opened = [one for one in opened[25:] if not one[0].done()]
      while len(opened) < 500:
        reader, writer = await asyncio.open_connection('127.0.0.1', port)
        opened.append((asyncio.create_task(_read_all(reader)), writer, [0]))
        self.counts['idle connections'] += 1
      for _, writer, sent in opened[::2]:
        start = len(head) if sent[0] == 0 and rng.random() < 0.5 else 1
        writer.write(slow[sent[0] : sent[0] + start])
        sent[0] += start
      await asyncio.sleep(1)
    for _, writer, _ in opened:
      writer.close()
    await asyncio.gather(*(ended for ended, _, _ in opened))

  async def upload_hostile(self, port: int, rng: random.Random, end: float) -> None:
    """Uploads files that are no prompts; none may be taken, and none may be a fault."""
    sound = self.content(0)
    while time.monotonic() < end:
      at = rng.randrange(len(sound))
      bomb = io.BytesIO()
      with zipfile.ZipFile(bomb, 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('prefix.npy', bytes(64 << 20))
      contents = (
        *(b'', b'PK', sound[:at], sound[at:], rng.randbytes(9999), bomb.getvalue()),
        sound[:at] + rng.randbytes(64) + sound[at + 64 :],
      )
      for content in contents:
        reader, writer = await asyncio.open_connection('127.0.0.1', port)
        head = 'PUT /v1/prompts/hostile HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n'
        writer.write(f'{head}Content-Length: {len(content)}\r\n\r\n'.encode() + content)
        status = (await reader.read()).split(b' ')[1:2]
        writer.close()
        self.counts['hostile uploads'] += 1
        if status not in ([b'422'], [b'429'], [b'503']):
          self.refused(f'a hostile file: {status}')
      await asyncio.sleep(0.5)

  async def fail(self, port: int, rng: random.Random, end: float) -> None:
    """Faults of the machine, one after the other."""
    assert self.faulty is not None
    pid, folder, jump = self.faulty
    size = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    gone = folder.with_name('gone')
    half = folder / 'half.npz'
    while time.monotonic() + 8 < end:
      self.fault_at = time.monotonic() + 2
      kind = self.counts['faults'] % 4
      if kind == 0:  # the disk is full
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, size[1]))
        await asyncio.sleep(2)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, size)
      elif kind == 1:
        folder.rename(gone)
        await asyncio.sleep(2)
        gone.rename(folder)
      elif kind == 2:
        content = self.content(1)
        half.write_bytes(content[: len(content) // 2])
        connection = serve.Connection()
        try:
          await self.difference(connection, port, 'half', 1)
          self.refused('half a file was served')
        except serve.Refused:
          pass
        half.write_bytes(content)
        self.counts['wrong'] += await self.difference(connection, port, 'half', 1) > 1e-5
        half.unlink()
      else:
        jump.write_text(str(rng.choice((-86_400, 86_400 * 30, 0))))
      self.counts['faults'] += 1
      self.fault_at = time.monotonic()
      await asyncio.sleep(4)

  async def live(
    self, server: serve.Server, seconds: float, doing: Sequence[str] = ('ask', 'change', 'leave')
  ) -> dict[str, Any]:
    """The clients that do these things, for some time; returns the memory of the server."""
    began, sizes = time.monotonic(), []
    end = began + seconds

    async def weigh() -> None:
      while time.monotonic() < end:
        sizes.append((time.monotonic() - began, server.megabytes()))
        await asyncio.sleep(1)

    port = server.port
    clients = [
      getattr(self, what)(port, random.Random(1000 * len(what) + i), end)
      for what in doing
      for i in range(ASKERS if what == 'ask' else 1)
    ]
    await asyncio.gather(weigh(), *clients)
    late = np.array(sizes)[len(sizes) // 2 :]
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0] * 3600
    return {
      'megabytes': [round(float(x), 1) for x in (sizes[0][1], late[0, 1], late[-1, 1])],
      'megabytes_an_hour': round(float(slope), 1),
    }

  async def check_all(self, server: serve.Server) -> int:
    """Asks under every name; returns how many were lost or wrong."""
    connection, bad = serve.Connection(), 0
    for name, kind in self.kind_of.items():
      bad += await self.difference(connection, server.port, name, kind) > 1e-5
    return bad

  async def difference(
    self, connection: serve.Connection, port: int, name: str, kind: int
  ) -> float:
    """The largest difference of a vector under a name from the one of its kind.

    Asks again while the server is busy.
    """
    while True:
      try:
        answer = await connection.ask(port, serve.request(f'{name}:query', self.texts[0]))
      except serve.Refused as error:
        if 'rate_limit' not in str(error):
          raise
        self.counts['busy'] += 1
        await asyncio.sleep(1)
        continue
      content = base64.b64decode(json.loads(answer)['data'][0]['embedding'])
      return float(np.abs(np.frombuffer(content, '<f4') - self.vectors[kind, 0]).max())


async def _read_all(reader: asyncio.StreamReader) -> None:
  with contextlib.suppress(ConnectionError):
    await reader.read()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (('seconds', 600), ('faults', 300), ('prompts', 1000), ('rate', 0)):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args()
  texts = serve.texts_of(random.Random(1), TEXTS)
  with tempfile.TemporaryDirectory() as made:
    folder, kinds = pathlib.Path(made, 'prompts'), pathlib.Path(made, 'kinds')
    folder.mkdir()
    kinds.mkdir()
    size = serve.write_prompts(kinds, KINDS)
    paths = {str(kind): kinds / f'p{kind}.npz' for kind in range(KINDS)}
    encoder = Encoder.load(serve.BACKBONE, paths, batch_size=8)
    vectors = np.stack([encoder.encode(texts, 'query', prompt=str(kind)) for kind in range(KINDS)])
    soak = Soak(vectors, texts, kinds, args.prompts, args.rate)
    for name, kind in soak.kind_of.items():
      (folder / f'{name}.npz').write_bytes(soak.content(kind))
    flags = ('--rows=1,4,16', f'--host_memory={max(1, 200 * size >> 20)}')
    cases: dict[str, Any] = {}
    for life in ('first', 'second'):
      server = serve.start(folder, 41, flags)
      bad = asyncio.run(soak.check_all(server))
      memory = asyncio.run(soak.live(server, args.seconds / 2))
      cases[f'{life} life'] = {'lost_or_wrong_at_the_start': bad, **memory}
      print(life, cases[f'{life} life'], soak.counts, flush=True)
      if life == 'first':
        server.kill()
    soak.pause = 0.0  # there is no request beside
    for doing in ('ask', 'change', 'leave'):
      cases[f'{doing} alone'] = asyncio.run(soak.live(server, args.seconds / 6, [doing]))
      print(doing, cases[f'{doing} alone'], flush=True)
    server.end()
    soak.pause, jump = 0.5, pathlib.Path(made, 'jump')
    jump.write_text('0')
    server = serve.start(folder, 41, flags, ['-c', JUMPING, str(jump)])
    soak.faulty = server.pid, folder, jump
    everything = ('ask', 'change', 'leave', 'idle', 'upload_hostile', 'fail')
    memory = asyncio.run(soak.live(server, args.faults, everything))
    bad = asyncio.run(soak.check_all(server))
    left = [path.name for path in folder.glob('.*')]
    soak.said += [line for line in server.said().splitlines() if 'a fault of' in line]
    cases['with faults'] = {'lost_or_wrong_at_the_end': bad, 'files_left': left, **memory}
    print('faults', cases['with faults'], soak.counts, flush=True)
    server.end()
    cases['all'] = {**soak.counts, 'largest_difference': soak.worst, 'said': soak.said[:10]}
  for name, case in cases.items():
    print(name, case)
  record.write('soak', cases, vars(args), {'jax': jax.__version__}, jax.devices()[0].device_kind)


if __name__ == '__main__':
  main()
