"""Trains a prompt, a backbone or a reranker: one loop for all methods.

    python -m dprjax.train --config=configs/dptdr.py --config.data.dir=DIR

Without a data folder, recipes for any data train on docstrings of the Python library. The workdir,
by default runs/CONFIG-RECIPE, has config.json, the token cache, checkpoints, metrics.jsonl and
TensorBoard files. The same command continues where it stopped, bit for bit. After SIGTERM it saves
and ends with status 143, which means that it is not done.

On several hosts, run the same command on each, with a workdir on a shared file system; config.mesh
sets how many devices split the batch ('data'), the weights ('model') or both ('fsdp').
"""

import dataclasses
import logging
import signal

from dprjax.base import cli, flags
from dprjax.training import config as configs

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  experiment: tuple[str, ...] = flags.config(
    'an experiment, for example configs/dptdr.py:local',
    'override an option, for example --config.prompt.length=32; dprjax configs --options lists '
    'and explains all options',
  )
  workdir: str | None = flags.flag(
    'the folder of this run; the same command resumes it (default: runs/CONFIG-RECIPE)', None
  )
  job: flags.Job = flags.job()


def _command(args: Flags) -> int:
  config = configs.parse(args.experiment)
  embedded = configs.embed(config, configs.given(args.experiment))
  with cli.loading():
    from dprjax.training import checkpoint, train
    from dprjax.training import workdir as workdirs
  checkpoint.pass_over_closed_loops()
  workdir = args.workdir or workdirs.default_workdir(args.experiment, config)
  if args.workdir is None:
    logger.info('--workdir=%s', workdir)
  if embedded:
    logger.info('no --config.data.dir: docstrings of %s are the text', config.data.dir)
  done = train.train(config, workdir).done
  # So that later stages do not take the run for done, and clusters restart it.
  return 0 if done else 128 + signal.SIGTERM


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
