"""Exports a trained run: a prompt.npz, or a Hugging Face directory.

    python -m dprjax.export --workdir=runs/mine --out=prompt.npz

A run that trained the backbone writes a directory instead, which `transformers` and
`sentence-transformers` load. A prompt can also become a PEFT or sentence-transformers folder with a
model card, and go to the Hugging Face hub:

    python -m dprjax.export --workdir=runs/mine --out=adapter --format=peft
    python -m dprjax.export --workdir=runs/mine --out=model --format=sentence-transformers \\
        --base_model=sentence-transformers/all-MiniLM-L6-v2 --push=USER/NAME

--from takes an earlier export, or a prefix adapter of PEFT, in place of a workdir:

    python -m dprjax.export --from=adapter --backbone=DIR --out=prompt.npz
"""

import argparse
import dataclasses
import logging
import re
from collections.abc import Sequence

from etils import epath

from dprjax.base import cli, flags, repository, version
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import rounded

logger = logging.getLogger('dprjax')

FORMATS = ('npz', 'peft', 'sentence-transformers')
_SETTINGS = ('pooling', 'normalize', 'query_max_length', 'passage_max_length')


def _reference(text: str) -> repository.Reference:
  found = repository.parse(text)
  if found is None:
    raise argparse.ArgumentTypeError(f'expected USER/NAME or USER/NAME@COMMIT, not {text!r:.80}')
  return found


def _licence(text: str) -> str:
  if not re.fullmatch(r'[a-z0-9][a-z0-9.+-]{0,63}', text):
    raise argparse.ArgumentTypeError(
      f'expected the name of a licence on the hub, such as apache-2.0 or other, not {text!r:.80}'
    )
  return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  workdir: str | None = flag('of the training run', None, either='source')
  source: str | None = flag(
    'a prompt.npz, or a folder or repository of one or of a PEFT prefix adapter',
    None,
    name='from',
    metavar='PATH|USER/NAME',
    either='source',
  )
  out: str = flag('prompt.npz; a directory for a trained backbone, --format and --card')
  format: str | None = flag(
    'default: npz, or the directory of a trained encoder', None, choices=FORMATS
  )
  step: int | None = flag(
    'of the checkpoint (default: the best on the dev split, else the latest)', None
  )
  method: str | None = flag(
    'the module of a custom method (lab.toy); a workdir must not choose it',
    None,
  )
  force: bool = flags.switch('export a model that gained nothing, or is expected to lose')
  backbone: str | None = flag(
    'with --from: the frozen encoder (default: the one named there)', None
  )
  pooling: str | None = flag(
    'with --from, for PEFT adapters: cls, mean, ... (default: that of the backbone)', None
  )
  normalize: bool | None = flag('with --from, for PEFT adapters: unit length', None)
  query_max_length: int | None = flag('likewise: tokens', None)
  passage_max_length: int | None = flag('likewise: tokens', None)
  base_model: repository.Reference | None = flag(
    'the backbone on the hub, for the card and for adapters',
    None,
    read=_reference,
    metavar='USER/NAME[@COMMIT]',
  )
  backbone_files: bool = flag(
    'copy a frozen backbone into a sentence-transformers folder; else name --base_model', True
  )
  card: bool | None = flag('write a model card, README.md (default: with --push)', None)
  license: str | None = flag('for the card, such as apache-2.0', None, read=_licence, metavar='ID')
  metrics: dict[str, str] = flag(
    'of dprjax.evaluate, for the card; may be repeated', {}, metavar='NAME=metrics.json'
  )
  push: str | None = flag(
    'upload the folder to this repository on the Hugging Face hub', None, metavar='USER/NAME'
  )
  private: bool = flag('hide the repository from others', True)
  dry_run: bool = flag('show the files that --push would send', False)


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  with_card = args.push is not None if args.card is None else args.card
  if args.push is not None:
    repository.check_owned(args.push, '--push')
    if epath.Path(args.out).suffix == '.npz':
      raise InputError(f'--out={args.out}: --push sends a folder; name one, not an npz file')
  if not with_card and (args.license or args.metrics):
    raise InputError('--license and --metrics are for a card; add --card=true')
  if args.source is None:
    flags.refuse(args, ('backbone', *_SETTINGS), 'from')
  else:
    flags.refuse(args, ('step', 'method', 'force'), 'workdir')
  with cli.loading():
    from dprjax.training import checkpoint, exporting
  checkpoint.pass_over_closed_loops()
  options = exporting.ExportOptions(
    args.format,
    args.base_model,
    args.backbone_files,
    with_card,
    args.license,
    args.metrics,
    args.push,
  )
  if args.workdir is not None:
    out = exporting.export(args.workdir, args.out, args.step, args.method, options, args.force)
    exporting.send(args.workdir, out)
  else:
    settings = {name: getattr(args, name) for name in _SETTINGS}
    out = exporting.convert(args.source or '', args.out, args.backbone, settings, options)
  if args.push is not None:
    _push(out, args.push, args.private, args.dry_run)


def _push(out: epath.Path, name: str, private: bool, dry: bool) -> None:
  found = repository.uploads(out)
  who = 'private' if private else 'public'
  verb = 'would go' if dry else 'goes'
  for entry in found:
    logger.info('  %s  %s  %s', entry.sha256[:12], rounded(entry.bytes, 'B'), entry.name)
  total = rounded(sum(entry.bytes for entry in found), 'B')
  logger.info('%s: %s, %s, %s to %s, %s', out, counted(len(found), 'files'), total, verb, name, who)
  if dry:
    return
  message = f'dprjax {version.__version__}: {counted(len(found), "files")}'
  commit = repository.push(out, name, message, private=private)
  logger.info('%s is at commit %s', name, commit)


if __name__ == '__main__':
  main()
