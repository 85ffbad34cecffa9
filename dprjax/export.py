"""What a run trained, as files that others read: a prompt.npz, or a Hugging Face directory.

    python -m dprjax.export --workdir=runs/mine --out=prompt.npz

A run that trained the backbone writes a directory instead, which `transformers` and
`sentence-transformers` load.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from dprjax.base import files, outputs, version
from dprjax.base.errors import InputError
from dprjax.base.progress import size
from dprjax.data import text
from dprjax.methods import method as methods
from dprjax.models import artifact, hub
from dprjax.runtime import checkpoint, cli, tree
from dprjax.runtime import config as configs

logger = logging.getLogger('dprjax')


def export(
  workdir: epath.PathLike,
  out: epath.PathLike,
  step: int | None = None,
  method: str | None = None,
) -> epath.Path:
  """Writes the trained parameters of ``workdir`` to ``out``, whole or not at all.

  Args:
    workdir: of the training run.
    out: a file name ending in ``.npz`` where only a prompt was trained; a directory where an
      encoder was (with ``query/`` and ``passage/`` in it where each has its own, and ``prompt.npz``
      where there is a prompt too).
    step: the checkpoint's step; by default the best on the dev split, else the latest.
    method: the module of the run's method, where that is none of this package. A workdir alone does
      not decide which code is imported.

  Returns:
    The path of what was written.

  Raises:
    InputError: there is no run or no checkpoint; ``out`` does not fit what was trained, lies in the
      workdir or another input, or holds anything but an earlier export.
  """
  config = configs.load_workdir(workdir)
  trained_by = methods.load_named(config.method, method)
  out, path = epath.Path(out), configs.backbone_path(config, workdir)
  inputs = {
    '--workdir': workdir,
    'config.backbone.path': path,
    'config.prompt.init_from': config.prompt.init_from,
    'config.adapt.prompts': [part.strip() for part in config.adapt.prompts.split(',')],
    **{f'config.tasks.{name}.prompt': entry.prompt for name, entry in config.tasks.items()},
  }
  check_out(out, inputs)
  backbone = hub.load_backbone(path, heads=trained_by.parts)
  saved = checkpoint.Checkpoints(workdir, backbone.sha256, read_only=True)
  try:
    step = saved.best() if step is None else step
    if step is None:
      raise InputError(
        f'{workdir} holds no checkpoint yet; train first: python -m dprjax.train '
        f'--workdir={workdir} ...'
      )
    trained, extra = saved.restore_trainable(step), saved.extra(step)
  finally:
    saved.close()
  if extra['backbone_sha256'] != backbone.sha256:
    raise InputError(
      f'{backbone.path} is not the backbone that {workdir} was trained on (its sha256 has changed)'
    )
  product = trained_by.export(config, epath.Path(workdir), backbone, trained)
  check_ending(out, product)
  # In the order of the file's format.
  meta: dict[str, Any] = {
    'format': artifact.FORMAT,
    'version': artifact.VERSION,
    'kind': product.meta.get('kind'),
    'backbone': config.backbone.path,
    'backbone_sha256': backbone.sha256,
    'tokenizer_sha256': text.load_tokenizer(backbone.path).sha256,
    **product.meta,
    'dprjax_version': version.__version__,
    'task': product.meta.get('task', config.task),
    'metrics': {f'dev/{config.eval.measure}': extra['best']}
    if extra.get('best') is not None and extra['best_step'] == step
    else {},
  }
  if not product.encoders:
    with outputs.claim(out, inputs, endings=('',)):
      artifact.save_prompt(out, artifact.Prompt(meta, dict(product.prompt)))
    stored = '' if files.is_special(out) else f', {size(out.stat().length, "B")}'
    logger.info('%s: step %d, %s values%s', out, step, size(tree.count(trained)), stored)
    return out
  with hub.claim_model(out, inputs), files.atomic_path(out) as folder:
    sha256 = {}
    for name, arguments in product.encoders.items():
      hub.save_backbone(
        folder / name,
        backbone.config,
        source=backbone.path,
        hf_config=backbone.hf_config,
        **arguments,
      )
      sha256[name] = hub.load_backbone(str(folder / name)).sha256
    meta['backbone_sha256'] = sha256.get('') or sha256
    if product.prompt:
      artifact.save_prompt(folder / 'prompt.npz', artifact.Prompt(meta, dict(product.prompt)))
    for name, (arrays, own) in product.prompts.items():
      path = folder / 'prompts' / f'{name}.npz'
      path.parent.mkdir(exist_ok=True)
      artifact.save_prompt(path, artifact.Prompt({**meta, **own}, dict(arrays)))
    hub.mark(folder)
  logger.info('%s: step %d, %s parameters', out, step, size(tree.count(trained)))
  return out


def check_out(out: epath.Path, inputs: outputs.Inputs) -> None:
  """Raises InputError where ``out`` would harm something; before anything is read."""
  claim = (
    outputs.claim(out, inputs, endings=('',), lock=False)
    if out.suffix == '.npz'
    else outputs.claim_folder(out, inputs, what=hub.OURS, ours=hub.is_ours, lock=False)
  )
  with claim:
    pass


def check_ending(out: epath.Path, product: methods.Product) -> None:
  """Raises InputError where ``out`` is of the wrong type."""
  if not product.encoders and out.suffix != '.npz':
    raise InputError(f'--out={out}: this run trained a prompt alone; name a file that ends in .npz')
  if product.encoders and out.suffix == '.npz':
    raise InputError(
      f'--out={out}: this run trained {product.noun}; name a directory, not an npz file'
    )


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('export', __doc__ or '')
  parser.add_argument('--workdir', required=True, help='of the training run')
  parser.add_argument(
    '--out', required=True, help='prompt.npz; a directory where the backbone was trained'
  )
  parser.add_argument(
    '--step',
    type=cli.positive,
    help='which checkpoint; default: the best on the dev split, else the latest',
  )
  parser.add_argument(
    '--method',
    help="the module of the run's method, where it is one of your own (lab.toy): a workdir alone "
    'does not decide which code is imported',
  )

  def command(args: argparse.Namespace) -> None:
    export(args.workdir, args.out, args.step, args.method)

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
