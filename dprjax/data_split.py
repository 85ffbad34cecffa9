"""Makes a test split for data without one.

    dprjax data split pairs.csv --out=mytext

Writes a BEIR folder with corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv.
--by=document keeps documents that answer test queries out of training; --by=query does not, and
suits data where most documents answer many queries. The last line names the rule.
"""

import dataclasses
import logging

from dprjax.base import cli, flags, outputs
from dprjax.base.counts import counted
from dprjax.base.flags import flag
from dprjax.text import sources, splitting

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flags.data()
  columns: str = flags.data_columns()
  split: str = flag('the split to divide', 'train')
  out: str = flag('the new folder', metavar='DIR')
  fraction: float = flag('approximate share of test queries', 0.2, most=0.9)
  by: str = flag(
    'the unit kept in one split; auto: documents, if this gives about the fraction',
    'auto',
    choices=splitting.BY,
  )
  seed: int = flag('of the random choice', 0, least=0)


def _command(args: Flags) -> None:
  with outputs.claim(args.out, {'DATA': args.data}, endings=('',)):
    dataset = sources.load_dataset(
      sources.Source(args.data, split=args.split, columns=args.columns)
    )
    split = splitting.choose(dataset, args.fraction, args.seed, args.by)
    passages, _ = splitting.write(dataset, split, args.out)
  logger.info(
    '%s: %s; %s to train on, %d to test on, split by %s%s',
    args.out,
    counted(passages, 'passages'),
    counted(len(split.train), 'queries'),
    len(split.test),
    split.by,
    ': no document answers queries of both' if split.by == 'document' else '',
  )


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
