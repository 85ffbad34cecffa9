"""Trains a prompt, a backbone or a reranker: one loop for all methods.

    python -m dprjax.train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=DIR

The workdir holds config.json, the token store, checkpoints, metrics.jsonl and TensorBoard files.
The same command again goes on where it stopped, bit for bit. SIGTERM has it save and end with
status 143 (that of a process which SIGTERM ended): it is not done.

On several hosts the same command runs on each, with a workdir that all of them see; config.mesh
says over how many devices the batch ('data'), the weights ('model') or both ('fsdp') are split.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from dprjax.base.errors import InputError
from dprjax.runtime import cli
from dprjax.runtime import config as configs


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('train', __doc__ or '', processes=True)
  parser.add_config(
    'an experiment, for instance configs/dptdr.py:local',
    'override an option, for instance --config.prompt.length=32; dprjax configs --options lists '
    'and explains them all',
  )
  parser.add_argument(
    '--workdir', help='where everything of this run is kept; the same command again resumes it'
  )
  own, experiment = cli.split_config(argv)
  done: list[bool] = []

  def command(args: argparse.Namespace) -> None:
    if not args.workdir:
      raise InputError('--workdir is missing; name the folder that this run is kept in')
    config = configs.parse(experiment)
    with cli.loading():
      from dprjax.methods import training
    done.append(training.train(config, args.workdir).done)

  cli.run(parser, command, own)
  if not done[0]:
    # So a later stage does not take the run for done, and a cluster starts it again.
    sys.exit(128 + signal.SIGTERM)


if __name__ == '__main__':
  main()
