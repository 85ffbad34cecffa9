"""Prints what a data set holds, and what is wrong with it.

    dprjax data check mytext

Of each split and of the passages: counts, lengths, copies, queries without positives, judgements of
unknown passages, and what --backbone will cut. Of each pair of splits: queries and answers that
both have. With three samples of each. DATA is what --config.data.dir takes, but irds: and hf:.
"""

import dataclasses
from collections.abc import Sequence

from dprjax.runtime import cli, flags
from dprjax.runtime.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flags.data()
  columns: str = flags.data_columns()
  split: tuple[str, ...] = flag('splits to check (default: all); may be repeated', ())
  backbone: str | None = flags.backbone(None, ' whose lengths and tokens count')


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  with cli.loading():
    from dprjax.data import checking
  limits = None
  if args.backbone is not None:
    with cli.loading():
      from dprjax.data import text
      from dprjax.formats.vector_spec import SIDES
      from dprjax.models import hub
    folder = hub.package_path(args.backbone)
    spec = hub.load_spec(folder)
    tokenizer = text.load_tokenizer(folder)
    limits = checking.Limits(tokenizer, {side: spec.max_length(side) for side in SIDES})
  splits = args.split or checking.splits_of(args.data)
  for title, findings in checking.check(args.data, splits, args.columns, limits):
    print(title)
    for finding in findings:
      print(f'  {finding}')
    print(flush=True)


if __name__ == '__main__':
  main()
