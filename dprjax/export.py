"""Exports a trained run: a prompt.npz, or a Hugging Face directory.

    python -m dprjax.export --workdir=runs/mine --out=prompt.npz

A run that trained the backbone writes a directory instead, which `transformers` and
`sentence-transformers` load. A prompt can also become a PEFT or sentence-transformers folder with a
model card:

    python -m dprjax.export --workdir=runs/mine --out=adapter --format=peft
    python -m dprjax.export --workdir=runs/mine --out=model --format=sentence-transformers \\
        --base_model=sentence-transformers/all-MiniLM-L6-v2 --card=true

--from takes an exported prompt in place of a workdir.
"""

import argparse
import dataclasses
import re

from dprjax.base import cli, flags, repository
from dprjax.base.flags import flag

FORMATS = ('npz', 'peft', 'sentence-transformers')


def _reference(text: str) -> repository.Reference:
  reference = repository.parse(text)
  if reference is None:
    raise argparse.ArgumentTypeError(f'expected USER/NAME or USER/NAME@COMMIT, not {text!r:.80}')
  return reference


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
    'a prompt.npz, or a folder or repository with one',
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
  base_model: repository.Reference | None = flag(
    'the backbone on the hub, for the card and for adapters',
    None,
    read=_reference,
    metavar='USER/NAME[@COMMIT]',
  )
  card: bool = flag('write a model card, README.md', False)
  license: str | None = flag('for the card, such as apache-2.0', None, read=_licence, metavar='ID')
  metrics: dict[str, str] = flag(
    'of dprjax.evaluate, for the card; may be repeated', {}, metavar='NAME=metrics.json'
  )
  name: str | None = flag('the repository of the card on the hub', None, metavar='USER/NAME')


def _command(args: Flags) -> None:
  if not args.card:
    flags.refuse(args, ('license', 'metrics', 'name'), 'card=true')
  if args.source is None:
    flags.refuse(args, ('backbone',), 'from')
  else:
    flags.refuse(args, ('step', 'method', 'force'), 'workdir')
  with cli.loading():
    from dprjax.exports import exporting
    from dprjax.training import checkpoint
  checkpoint.pass_over_closed_loops()
  options = exporting.ExportOptions(
    args.format, args.base_model, args.card, args.license, args.metrics, args.name
  )
  if args.workdir is not None:
    exporting.export(args.workdir, args.out, args.step, args.method, options, args.force)
  else:
    exporting.convert(args.source or '', args.out, args.backbone, options)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
