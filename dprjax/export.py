"""What a run trained, as files that others read: a prompt.npz, or a Hugging Face directory.

    python -m dprjax.export --workdir=runs/mine --out=prompt.npz

A run that trained the backbone writes a directory instead, which `transformers` and
`sentence-transformers` load. A prompt becomes a folder of PEFT's or of sentence-transformers', with
a model card, and goes to the Hugging Face hub:

    python -m dprjax.export --workdir=runs/mine --out=adapter --format=peft
    python -m dprjax.export --workdir=runs/mine --out=model --format=sentence-transformers \\
        --base_model=sentence-transformers/all-MiniLM-L6-v2 --push=USER/NAME

--from takes what was exported before, or a prefix adapter of PEFT's, in place of a workdir:

    python -m dprjax.export --from=adapter --backbone=DIR --out=prompt.npz
"""

import argparse
import logging
import re
from collections.abc import Sequence

from etils import epath

from dprjax.base import repository, version
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import size
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

FORMATS = ('npz', 'peft', 'sentence-transformers')
_SETTINGS = ('pooling', 'normalize', 'query_max_length', 'passage_max_length')


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('export', __doc__ or '')
  flag = parser.add_argument
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--workdir', help='of the training run')
  source.add_argument(
    '--from',
    dest='source',
    metavar='PATH|USER/NAME',
    help='in place of a workdir: a prompt.npz, or the folder or repository of one or of a prefix '
    "adapter of PEFT's",
  )
  flag(
    '--out',
    required=True,
    help='prompt.npz; a directory where the backbone was trained, and for --format and --card',
  )
  flag(
    '--format', choices=FORMATS, help='default: npz; where an encoder was trained, its directory'
  )
  flag(
    '--step',
    type=cli.positive,
    help='which checkpoint; default: the best on the dev split, else the latest',
  )
  flag(
    '--method',
    help="the module of the run's method, where it is one of your own (lab.toy): a workdir alone "
    'does not decide which code is imported',
  )
  flag(
    '--force',
    action='store_true',
    help='exports also where no checkpoint is better on the dev split than what the training began '
    'with',
  )
  flag('--backbone', help='with --from: the frozen encoder; default: the one that it names')
  for name, kind, given_text in (
    ('pooling', None, "cls, mean, lasttoken, ...; default: the backbone's"),
    ('normalize', cli.boolean, "whether vectors have unit length; default: the backbone's"),
    ('query_max_length', cli.positive, 'tokens; default: as many as the backbone takes'),
    ('passage_max_length', cli.positive, 'likewise'),
  ):
    flag(
      f'--{name}',
      type=kind or str,
      metavar='true|false' if kind is cli.boolean else None,
      help=f'with --from, of an adapter that PEFT made: {given_text}',
    )
  flag(
    '--base_model',
    type=_reference,
    metavar='USER/NAME[@COMMIT]',
    help='the backbone on the hub, for the card and for adapters',
  )
  flag(
    '--backbone_files',
    type=cli.boolean,
    default=True,
    metavar='true|false',
    help='whether a sentence-transformers folder holds those of a frozen backbone; else it names '
    '--base_model=USER/NAME@COMMIT (default: true)',
  )
  flag(
    '--card',
    type=cli.boolean,
    metavar='true|false',
    help='whether to write a model card, README.md (default: true with --push)',
  )
  flag('--license', type=_licence, metavar='ID', help='for the card, such as apache-2.0')
  flag(
    '--metrics',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=metrics.json',
    help='of dprjax.evaluate, for the card; may be repeated',
  )
  flag(
    '--push',
    metavar='USER/NAME',
    help='puts the folder into this repository of the Hugging Face hub',
  )
  flag(
    '--private',
    type=cli.boolean,
    default=True,
    metavar='true|false',
    help='whether nobody else sees the repository (default: true)',
  )
  flag(
    '--dry_run',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help='shows what --push would send, and sends nothing (default: false)',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  pushed = args.push is not None
  if pushed:
    repository.check_owned(args.push, '--push')
  metrics = _by_name(args.metrics)
  with_card = pushed if args.card is None else args.card
  if pushed and epath.Path(args.out).suffix == '.npz':
    raise InputError(f'--out={args.out}: --push sends a folder; name one, not an npz file')
  if not with_card and (args.license or metrics):
    raise InputError('--license and --metrics are for a card; say --card=true')
  if args.source is None:
    if given := [name for name in ('backbone', *_SETTINGS) if getattr(args, name) is not None]:
      raise InputError(f'--{given[0]} goes with --from; a workdir knows it')
  else:
    given = [name for name in ('step', 'method') if getattr(args, name) is not None]
    if given := given + ['force'] * args.force:
      raise InputError(f'--{given[0]} goes with --workdir')
  with cli.loading():
    from dprjax.methods import exporting
  options = exporting.Options(
    args.format,
    args.base_model,
    args.backbone_files,
    with_card,
    args.license,
    metrics,
    args.push,
  )
  if args.source is None:
    out = exporting.export(args.workdir, args.out, args.step, args.method, options, args.force)
  else:
    settings = {name: getattr(args, name) for name in _SETTINGS}
    out = exporting.convert(args.source, args.out, args.backbone, settings, options)
  if pushed:
    _push(out, args.push, args.private, args.dry_run)


def _push(out: epath.Path, name: str, private: bool, dry: bool) -> None:
  found = repository.entries(out)
  who = 'private' if private else 'public'
  verb = 'would go' if dry else 'goes'
  for entry in found:
    logger.info('  %s  %s  %s', entry.sha256[:12], size(entry.bytes, 'B'), entry.name)
  total = size(sum(entry.bytes for entry in found), 'B')
  logger.info('%s: %s, %s, %s to %s, %s', out, counted(len(found), 'files'), total, verb, name, who)
  if dry:
    return
  message = f'dprjax {version.__version__}: {counted(len(found), "files")}'
  commit = repository.push(out, name, message, private=private)
  logger.info('%s is at commit %s', name, commit)


def _by_name(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
  named = dict(pairs)
  if len(named) < len(pairs):
    raise InputError('--metrics: two files have one name; give each its own')
  return named


def _reference(given_text: str) -> repository.Reference:
  found = repository.parse(given_text)
  if found is None:
    raise argparse.ArgumentTypeError(
      f'expected USER/NAME or USER/NAME@COMMIT, not {given_text!r:.80}'
    )
  return found


def _licence(given_text: str) -> str:
  if not re.fullmatch(r'[a-z0-9][a-z0-9.+-]{0,63}', given_text):
    raise argparse.ArgumentTypeError(
      f"expected a licence's name on the hub, such as apache-2.0 or other, not {given_text!r:.80}"
    )
  return given_text


if __name__ == '__main__':
  main()
