"""A small server of chat completions in the OpenAI interface, on a decoder of dprjax.

    python experiments/gguf_backbone.py SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/generation.py --decoder=runs/smollm2 --port=8000
    python -m dprjax.queries --corpus=... --endpoint=http://127.0.0.1:8000/v1 --model=smollm2 ...

It serves tests and experiments on machines without a network: greedy, a batch at a time, and slow.
The cache of keys and values is a `Prefix`, the adapter of prompts: the tokens read so far stand
before the one new token.
"""

import argparse
import functools
import http.server
import json
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from dprjax.models import encoder, hub
from dprjax.models.adapter import BARE
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import DEFAULT_OPTIONS
from dprjax.text import tokenizing

CHAT = '<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n'
END = '<|im_end|>'
BUCKET = 64  # prompts are padded to multiples of it
WAIT_S = 0.05  # for others to share a batch


@functools.partial(jax.jit, static_argnames='config')
def read(config, params, tokens, mask, adapter):
  """The logits after the last token of each row, and all keys and values [L, B, 2, T, N, D]."""
  x, scanned, shared = encoder.embed_tokens(config, params, tokens, mask, adapter)
  (x, _), kept = encoder.stack(config, config.num_layers, DEFAULT_OPTIONS, True).apply(
    {'params': params['layers']}, x, scanned, shared, mutable=['intermediates']
  )
  x = config.family.final(config, jnp.float32).apply({'params': params['final']}, x)
  last = jnp.sum(mask, axis=1, dtype=jnp.int32) - 1
  state = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
  logits = state @ params['embeddings']['word']['embedding'].T
  kept = [kept['intermediates']['attention'][name][0] for name in ('keys', 'values')]
  shape = config.num_layers, *tokens.shape, config.num_kv_heads, config.head_dim
  return logits, jnp.stack([one.reshape(shape) for one in kept], axis=2)


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def step(config, params, cache, lengths, tokens):
  """The logits after one more token of each row, and the cache with its keys and values."""
  adapter = Prefix(cache, lengths, lengths)
  mask = jnp.ones((len(tokens), 1), bool)
  logits, new = read(config, params, tokens[:, None], mask, adapter)
  rows = jnp.arange(len(tokens), dtype=jnp.int32)
  return logits, cache.at[:, rows, :, lengths].set(jnp.moveaxis(new[:, :, :, 0], 1, 0))


def generate(config, params, prompts, most, end=None):
  """The likeliest next tokens of each prompt, up to ``most`` or the token ``end``.

  Args:
    config, params: of a decoder whose words are also its output layer.
    prompts: lists of tokens.
    most: new tokens.
    end: ends a row, and is not returned.
  """
  width = -(-max(map(len, prompts)) // BUCKET) * BUCKET
  tokens, mask = tokenizing.pad_batch([np.asarray(one, np.int32) for one in prompts], width, 0)
  logits, cache = read(config, params, tokens, mask, BARE)
  cache = jnp.pad(cache, ((0, 0), (0, 0), (0, 0), (0, most), (0, 0), (0, 0)))
  lengths = np.array([len(one) for one in prompts], np.int32)
  found = [[] for _ in prompts]
  running = np.ones(len(prompts), bool)
  for number in range(most):
    chosen = np.asarray(jnp.argmax(logits, axis=1)).astype(np.int32)
    for row in np.flatnonzero(running):
      if chosen[row] == end:
        running[row] = False
      else:
        found[row].append(int(chosen[row]))
    if number + 1 == most or not running.any():
      break
    logits, cache = step(config, params, cache, lengths, chosen)
    lengths = lengths + 1
  return found


class Decoder:
  """A decoder that answers in batches.

  ``chat`` surrounds a prompt, and the token ``end`` ends an answer.
  """

  def __init__(self, folder, batch=8, longest=512, chat=CHAT, end=END):
    backbone = hub.load_backbone(folder)
    self.config, self.params = backbone.config, jax.tree.map(jnp.asarray, backbone.params)
    self.tokenizer = tokenizing.load_tokenizer(folder).backend
    self.batch, self.longest, self.chat = batch, longest, chat
    self.end = self.tokenizer.token_to_id(end)
    self.waiting = queue.Queue()
    threading.Thread(target=self.work, daemon=True).start()

  def answer(self, prompt, most):
    """The answer, how it ended, and the tokens of prompt and answer. From any thread."""
    own = queue.Queue()
    self.waiting.put((prompt, most, own))
    found = own.get()
    if isinstance(found, Exception):
      raise found
    return found

  def work(self):
    while True:
      batch = [self.waiting.get()]
      deadline = time.monotonic() + WAIT_S
      while len(batch) < self.batch:
        try:
          batch.append(self.waiting.get(timeout=max(deadline - time.monotonic(), 0)))
        except queue.Empty:
          break
      try:
        answers = self.complete([one[0] for one in batch], max(one[1] for one in batch))
      except Exception as error:
        answers = [error] * len(batch)
      for (_, most, own), answer in zip(batch, answers, strict=True):
        own.put(answer if isinstance(answer, Exception) else self.cut(*answer, most))

  def complete(self, prompts, most):
    """The tokens of each prompt and of its answer. The batch is filled up: one program a shape."""
    encoded = [
      self.tokenizer.encode(self.chat.format(prompt=one), add_special_tokens=False).ids
      for one in prompts
    ]
    encoded = [ids if len(ids) <= self.longest else ids[-self.longest :] for ids in encoded]
    filled = encoded + encoded[:1] * (self.batch - len(encoded))
    made = generate(self.config, self.params, filled, most, self.end)
    return list(zip(encoded, made[: len(encoded)], strict=True))

  def cut(self, prompt, tokens, most):
    ended = 'length' if len(tokens) >= most else 'stop'
    return self.tokenizer.decode(tokens[:most]), ended, len(prompt), len(tokens[:most])


class Handler(http.server.BaseHTTPRequestHandler):
  """``POST /v1/chat/completions``."""

  protocol_version = 'HTTP/1.1'

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    content, ended, read, made = self.server.answer(
      body['messages'][-1]['content'], body.get('max_tokens', 64)
    )
    self.reply(
      200,
      {
        'object': 'chat.completion',
        'model': body['model'],
        'choices': [
          {
            'index': 0,
            'message': {'role': 'assistant', 'content': content},
            'finish_reason': ended,
          }
        ],
        'usage': {'prompt_tokens': read, 'completion_tokens': made},
      },
    )

  def reply(self, status, body, headers=()):
    content = json.dumps(body).encode()
    self.send_response(status)
    for name, value in (('Content-Type', 'application/json'), *headers):
      self.send_header(name, value)
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, *_):
    pass


def serve(answer, port=0, handler=Handler):
  """A running server on the loopback interface; ``answer`` as of `Decoder`."""
  server = http.server.ThreadingHTTPServer(('127.0.0.1', port), handler)
  server.daemon_threads = True
  server.answer = answer
  threading.Thread(target=server.serve_forever, daemon=True).start()
  return server


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--decoder', required=True, help='the folder of a decoder')
  parser.add_argument('--port', type=int, default=8000)
  parser.add_argument('--batch', type=int, default=8, help='answers at a time')
  args = parser.parse_args()
  server = serve(Decoder(args.decoder, args.batch).answer, args.port)
  print(f'http://127.0.0.1:{server.server_port}/v1', flush=True)
  threading.Event().wait()


if __name__ == '__main__':
  main()
