"""What a run trained, as files that others read: a prompt.npz, or a Hugging Face directory.

    python -m dprjax.export --workdir=runs/mine --out=prompt.npz

A run that trained the backbone writes a directory instead, which `transformers` and
`sentence-transformers` load.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from dprjax.base import files, version
from dprjax.base.errors import InputError
from dprjax.base.progress import size
from dprjax.data import text
from dprjax.models import artifact, hub, prompts
from dprjax.models.head_specs import Head
from dprjax.runtime import checkpoint, cli, tree
from dprjax.runtime import config as configs

logger = logging.getLogger('dprjax')
KINDS = prompts.KINDS
# The heads of a checkpoint that a method goes on with.
HEADS = {'pretrain': ('mlm', 'condenser'), 'cross_encoder': ('classifier',)}


def export(workdir: epath.PathLike, out: epath.PathLike, step: int | None = None) -> epath.Path:
  """Writes the trained parameters of ``workdir`` to ``out``, whole or not at all, and returns
  where.

  Args:
    workdir: of the training run.
    out: a file name ending in ``.npz`` where only a prompt was trained; a directory where the
      backbone was (with ``query/`` and ``passage/`` in it where each has its own encoder, and
      ``prompt.npz`` where there is a prompt too).
    step: which checkpoint; the best on the dev split by default, else the latest.

  Raises:
    InputError: there is no run or no checkpoint, or ``out`` is of the wrong kind.
  """
  config = configs.load_workdir(workdir)
  backbone = hub.load_backbone(configs.backbone_path(config, workdir), HEADS.get(config.method, ()))
  saved = checkpoint.Checkpoints(workdir, backbone.sha256)
  try:
    step = saved.best() if step is None else step
    if step is None:
      raise InputError(
        f'{workdir} holds no checkpoint yet; train first: python -m dprjax.train '
        f'--workdir={workdir} ...'
      )
    trainable, extra = saved.restore_trainable(step), saved.extra(step)
  finally:
    saved.close()
  if extra['backbone_sha256'] != backbone.sha256:
    raise InputError(
      f'{backbone.path} is not the backbone that {workdir} was trained on (its sha256 has changed)'
    )
  out = epath.Path(out)
  # A cross-encoder is a model even where its head alone was trained.
  trained_backbone = config.method == 'cross_encoder' or any(
    name.startswith('backbone/') for name in trainable
  )
  if trained_backbone and out.suffix == '.npz':
    what = 'a cross-encoder' if config.method == 'cross_encoder' else 'the backbone'
    raise InputError(f'--out={out}: this run trained {what}; name a directory, not an npz file')
  if not trained_backbone and out.suffix != '.npz':
    raise InputError(f'--out={out}: this run trained a prompt alone; name a file that ends in .npz')
  if (
    trained_backbone
    and out.is_dir()
    and any(out.iterdir())
    and not any((out / kind / 'config.json').exists() for kind in ('', *KINDS))
  ):
    raise InputError(
      f'--out={out}: exists and holds no model; choose another folder, it would be replaced'
    )
  metrics = (
    {}
    if extra.get('best') is None or extra['best_step'] != step
    else {f'dev/{config.eval.measure}': extra['best']}
  )
  if not trained_backbone:
    artifact.save_prompt(out, make_prompt(config, backbone, trainable, backbone.sha256, metrics))
    logger.info(
      '%s: step %d, %s values, %s',
      out,
      step,
      size(tree.count(trainable)),
      size(out.stat().length, 'B'),
    )
    return out
  with files.atomic_path(out) as folder:
    sha256 = {
      kind: write_backbone(config, backbone, trainable, kind, folder)
      for kind in (KINDS if config.backbone.two_encoders else ('',))
    }
    if any(name.startswith('prompt/') for name in trainable):
      exported: Any = sha256.get('') or sha256
      artifact.save_prompt(
        folder / 'prompt.npz', make_prompt(config, backbone, trainable, exported, metrics)
      )
  logger.info('%s: step %d, %s parameters', out, step, size(tree.count(trainable)))
  return out


def make_prompt(
  config: Any,
  backbone: hub.Backbone,
  trainable: dict[str, np.ndarray],
  sha256: Any,
  metrics: dict[str, float],
) -> artifact.Prompt:
  """The prompt's file: the expanded key/value vectors, whatever they were trained as."""
  params = tree.unflatten(
    {name: leaf for name, leaf in trainable.items() if name.startswith('prompt/')}
  )['prompt']
  prefixes = {
    kind: np.asarray(prefix)
    for kind, prefix in prompts.expand_prompt(backbone.config, params).items()
    if prefix is not None
  }
  arrays = (
    {'prefix': prefixes['query']}
    if config.prompt.tied
    else {f'{kind}/prefix': prefixes[kind] for kind in KINDS}
  )
  return artifact.Prompt(
    {
      'format': artifact.FORMAT,
      'version': artifact.VERSION,
      'kind': 'prefix',
      'backbone': config.backbone.path,
      'backbone_sha256': sha256,
      'tokenizer_sha256': text.load_tokenizer(backbone.path).sha256,
      'pooling': config.pooling,
      'normalize': bool(config.normalize),
      'temperature': float(config.temperature),
      'shift_positions': bool(config.prompt.shift_positions),
      **lengths(config),
      **{name: config.data[name] for name in ('query_prefix', 'passage_prefix')},
      'dprjax_version': version.__version__,
      'task': config.task,
      'metrics': metrics,
    },
    arrays,
  )


def lengths(config: Any) -> dict[str, int]:
  """The maximum lengths that the prompt was trained with; pretraining has one for all texts."""
  both = {
    kind: config.pretrain.max_length
    if config.method == 'pretrain'
    else config.data[f'{kind}_max_length']
    for kind in KINDS
  }
  return {f'{kind}_max_length': length for kind, length in both.items()}


def write_backbone(
  config: Any,
  backbone: hub.Backbone,
  trainable: dict[str, np.ndarray],
  kind: str,
  folder: epath.Path,
) -> str:
  """One trained encoder as a Hugging Face directory. Returns its SHA-256."""
  prefix = f'backbone/{kind}/' if kind else 'backbone/'
  frozen = tree.flatten(backbone.params)
  params = tree.unflatten(
    {
      **frozen,
      **{
        name.removeprefix(prefix): leaf
        for name, leaf in trainable.items()
        if name.startswith(prefix)
      },
    }
  )
  where = folder / kind if kind else folder
  sentence: hub.SentenceSettings | None = None
  max_length = None
  if config.method == 'pretrain':
    # No sentence-transformers files unless the defaults (first token, raw) would be wrong: what it
    # is for comes later.
    if config.pooling != 'cls' or config.normalize:
      sentence = hub.SentenceSettings(
        pooling=config.pooling,
        normalize=bool(config.normalize),
        max_length=backbone.config.max_tokens,
      )
  elif config.method == 'cross_encoder':
    # No sentence-transformers files: those of a model with vectors would be wrong, and CrossEncoder
    # needs none.
    max_length = text.load_tokenizer(backbone.path).pair_length(
      config.data.query_max_length, config.data.passage_max_length
    )
  else:
    sentence = hub.SentenceSettings(
      pooling=config.pooling,
      normalize=bool(config.normalize),
      max_length=max(config.data.query_max_length, config.data.passage_max_length),
      query_prefix=config.data.query_prefix,
      passage_prefix=config.data.passage_prefix,
    )
  hub.save_backbone(
    where,
    backbone.config,
    params,
    source=backbone.path,
    sentence=sentence,
    hf_config=backbone.hf_config,
    heads=trained_heads(config, backbone, trainable),
    max_length=max_length,
  )
  return hub.load_backbone(str(where)).sha256


def trained_heads(
  config: Any, backbone: hub.Backbone, trainable: dict[str, np.ndarray]
) -> dict[str, Head]:
  """The heads of the checkpoint, trained here or as they were: training can go on from them."""
  stored = {'head': {name: head.params for name, head in backbone.heads.items()}}
  trained = {name: leaf for name, leaf in trainable.items() if name.startswith('head/')}
  settings = {name: head.settings for name, head in backbone.heads.items()}
  if any(name.startswith('head/condenser/') for name in trained):
    split = config.pretrain.skip_from or backbone.config.num_layers // 2
    settings['condenser'] = {'split': split}
  params = tree.unflatten(tree.flatten(stored) | trained).get('head', {})
  return {name: Head(leaves, settings.get(name, {})) for name, leaves in params.items()}


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

  def command(args: argparse.Namespace) -> None:
    export(args.workdir, args.out, args.step)

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
