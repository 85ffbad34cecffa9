"""Prints the content of a data set and its faults.

    dprjax data check mytext

For each split and for the passages: counts, lengths, copies, queries without positives, and
judgements of unknown passages. For each pair of splits: common queries and
answers. Each with three samples. DATA is a value of --config.data.dir, except hf:.
"""

import dataclasses

from dprjax.base import cli, flags
from dprjax.base.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flags.data()
  columns: str = flags.data_columns()
  split: tuple[str, ...] = flag('splits to check (default: all); may be repeated', ())


def _command(args: Flags) -> None:
  with cli.loading():
    from dprjax.text import checks
  splits = args.split or checks.splits_of(args.data)
  for title, findings in checks.check(args.data, splits, args.columns):
    print(title)
    for finding in findings:
      print(f'  {finding}')
    print(flush=True)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
