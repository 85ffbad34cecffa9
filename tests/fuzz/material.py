"""Material of the scenes, outside pytest: a small training, its prompt, a cross-encoder."""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent.parent


def make(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
  """A workdir, a prompt and a cross-encoder, below ``folder``."""
  from dprjax import train
  from dprjax.exports import exporting

  workdir = folder / 'workdir'
  train.main([f'--config={ROOT}/configs/dptdr.py:local', f'--workdir={workdir}'])
  prompt = folder / 'prompt.npz'
  exporting.export(workdir, prompt, force=True)
  reranker = folder / 'reranker'
  train.main(
    [f'--config={ROOT}/configs/cross_encoder.py:local', f'--workdir={reranker}', '--config.steps=2']
  )
  exporting.export(reranker, folder / 'cross_encoder', force=True)
  return workdir, prompt, folder / 'cross_encoder'
