"""Trains a prompt, a backbone or a reranker: one loop for all methods.

    python -m dprjax.train --config=configs/dptdr.py:beir --workdir=runs/mine --config.data.dir=DIR

The workdir holds config.json, the token cache, checkpoints, metrics.jsonl and TensorBoard files.
The same command again goes on where it stopped, bit for bit. SIGTERM has it save and end with
status 143 (that of a process which SIGTERM ended): it is not done.

On several hosts the same command runs on each, with a workdir that all of them see; config.mesh
says over how many devices the batch ('data'), the weights ('model') or both ('fsdp') are split.
"""

import dataclasses
import signal
from collections.abc import Sequence

from dprjax.runtime import cli, flags
from dprjax.runtime import config as configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  experiment: tuple[str, ...] = flags.config(
    'an experiment, for instance configs/dptdr.py:local',
    'override an option, for instance --config.prompt.length=32; dprjax configs --options lists '
    'and explains them all',
  )
  workdir: str = flags.flag(
    'where everything of this run is kept; the same command again resumes it'
  )
  job: flags.Job = flags.job()


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> int:
  config = configs.parse(args.experiment)
  with cli.loading():
    from dprjax.methods import training
    from dprjax.runtime import checkpoint
  checkpoint.pass_over_closed_loops()
  done = training.train(config, args.workdir).done
  # So that a later stage does not take the run for done, and a cluster starts it again.
  return 0 if done else 128 + signal.SIGTERM


if __name__ == '__main__':
  main()
