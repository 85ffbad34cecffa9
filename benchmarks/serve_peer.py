"""The peer of benchmarks/serve.py: one sentence-transformers model behind the same HTTP libraries.

    python benchmarks/serve_peer.py --backbone=DIR [--port=0]

It answers ``POST /v1/embeddings`` with one text or several in base64. As in ``dprjax.serve``, one
thread encodes waiting texts together: at most 64 at a time, after 3 milliseconds at the latest. It
is only for the benchmark and checks nothing.
"""

import argparse
import asyncio
import base64
import os
import socket
from typing import Any

import msgspec
import orjson
import sentence_transformers
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

ROWS, DEADLINE = 64, 0.003


class Asked(msgspec.Struct):
  input: str | list[str]
  model: str = ''
  encoding_format: str = 'base64'


class Peer:
  """The model and the texts that wait for it."""

  def __init__(self, folder: str):
    self._model = sentence_transformers.SentenceTransformer(folder, device='cpu')
    self._model.max_seq_length = 64
    self._queue: asyncio.Queue[tuple[list[str], asyncio.Future]] | None = None
    self._task: asyncio.Task | None = None

  def _encode(self, texts: list[str]) -> Any:
    with torch.inference_mode():
      return self._model.encode(
        texts, batch_size=ROWS, normalize_embeddings=True, show_progress_bar=False
      )

  async def _batches(self) -> None:
    assert self._queue is not None
    while True:
      waiting = [await self._queue.get()]
      until = asyncio.get_running_loop().time() + DEADLINE
      while sum(len(texts) for texts, _ in waiting) < ROWS:
        left = until - asyncio.get_running_loop().time()
        try:
          waiting.append(await asyncio.wait_for(self._queue.get(), max(0.0, left)))
        except TimeoutError:
          break
      vectors = await asyncio.to_thread(self._encode, [t for texts, _ in waiting for t in texts])
      start = 0
      for texts, answer in waiting:
        answer.set_result(vectors[start : start + len(texts)])
        start += len(texts)

  async def embeddings(self, request: Request) -> Response:
    if self._queue is None:
      self._queue = asyncio.Queue()
      self._task = asyncio.create_task(self._batches())
    asked = msgspec.json.decode(await request.body(), type=Asked)
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    answer: asyncio.Future = asyncio.get_running_loop().create_future()
    await self._queue.put((texts, answer))
    data = [
      {'object': 'embedding', 'index': i, 'embedding': base64.b64encode(vector.tobytes()).decode()}
      for i, vector in enumerate(await answer)
    ]
    return Response(orjson.dumps({'object': 'list', 'data': data}), media_type='application/json')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--backbone', required=True, help='a sentence-transformers directory')
  parser.add_argument('--port', type=int, default=0)
  args = parser.parse_args()
  torch.set_num_threads(os.cpu_count() or 1)
  peer = Peer(args.backbone)
  routes = [
    Route('/v1/embeddings', peer.embeddings, methods=['POST']),
    Route('/readyz', lambda _: PlainTextResponse('ready')),
  ]
  listening = socket.create_server(('127.0.0.1', args.port))
  print(f'listening on http://127.0.0.1:{listening.getsockname()[1]}', flush=True)
  config = uvicorn.Config(Starlette(routes=routes), log_level='warning', access_log=False)
  uvicorn.Server(config).run(sockets=[listening])


if __name__ == '__main__':
  main()
