"""Tiny encoders compiled for TPUs that are not there."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from etils import epath

from benchmarks import hlo
from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.planning import backbones, compiling, programs
from dprjax.text import vocabularies
from dprjax.training import config as configs
from dprjax.training import method as methods
from tests.refusals import refused

ROOT = pathlib.Path(__file__).parent.parent.parent

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason="pip install -e '.[plan]' (libtpu)"
)
needs_cuda = pytest.mark.skipif(
  importlib.util.find_spec('jax_cuda12_plugin') is None,
  reason="pip install -e '.[plan-cuda]' (jax-cuda12-plugin)",
)
DPT = (f'--config={ROOT}/configs/dptdr.py:local', '--config.backbone.dtype=bfloat16')
FT = (
  f'--config={ROOT}/configs/ft.py:local',
  '--config.backbone.dtype=bfloat16',
  '--config.mesh.fsdp=4',
)


def compiled(target, config, **options):
  """A program, its cost, and its collectives by kind."""
  made = compiling.compile_program(programs.CompileJob(target, config, **options), 300, text=True)
  assert made.failure == ''
  cost = hlo.HloProgram(made.answer['text']).cost()
  return made, cost, {one.kind: one for one in cost.collectives}


@needs_libtpu
@pytest.mark.slow
def test_a_prompt_on_a_slice_has_what_the_mesh_promises():
  (made, found, kinds), chips = compiled('v5e:2x4', DPT), 8
  assert made.fits and 0 < made.needs < 2**28
  # Products of the whole update: 16 queries of 16 tokens and 16 passages of 32, with 4 vectors.
  layers, hidden, prompt = 2, 128, 4
  whole = sum(
    16 * layers * (2 * 24 * length * hidden**2 + 12 * length * (prompt + length) * hidden)
    for length in (16, 32)
  )
  assert found.flops == pytest.approx(whole / chips, rel=0.02)
  # One gather of passages [16, 1, 128], and none of frozen weights. Reduced are the prompt's
  # gradient (in each layer's loop or after it), that of the passages, and numbers.
  assert kinds['all-reduce'].times <= 8
  assert kinds['all-gather'].times == 1
  assert found.gathered == (16 * hidden * 4,)
  held = made.answer['held']
  assert held['trained'] == 2 * layers * prompt * hidden * 4
  assert held['optimizer'] == pytest.approx(2 * held['trained'], abs=64)
  assert made.answer['mesh'] == {'data': chips, 'fsdp': 1, 'model': 1}


@needs_libtpu
@pytest.mark.slow
def test_split_weights_are_gathered_layer_by_layer_and_their_gradients_scattered():
  """FT over 2 x 4: activations stay split by rows, and are never reduced over devices."""
  made, found, kinds = compiled('v5e:2x4', FT)
  layers, hidden = 2, 128
  products = sum(
    16 * layers * (3 * 24 * length * hidden**2 + 12 * length**2 * hidden) for length in (16, 32)
  )
  assert found.flops == pytest.approx(products / 8, rel=0.02)
  weights = 2 * layers * 12 * hidden**2 * 2  # two calls of the encoder, two bytes
  # Kernels before each pass; in the embeddings' gradient the rows of the batch, too.
  gathers = 2 * 2 * layers * 6
  assert gathers <= kinds['all-gather'].times <= gathers + 8
  assert kinds['all-gather'].bytes == pytest.approx(2 * weights, rel=0.2)
  assert weights <= kinds['reduce-scatter'].bytes <= 1.01 * weights
  # The parts of the gradients of layers, and all of the embeddings', over the other axis.
  assert kinds['all-reduce'].times <= 16
  held = made.answer['held']
  whole = 4 * sum(size for size in (8000 * hidden, layers * 12 * hidden**2))
  assert held['trained'] < 0.5 * whole
  assert held['optimizer'] == pytest.approx(2 * held['trained'], abs=64)


@needs_cuda
@pytest.mark.slow
def test_gpus_that_are_not_there():
  made, found, kinds = compiled('h100:8', DPT)
  assert made.fits
  products = sum(16 * 2 * (2 * 24 * n * 128**2 + 12 * n * (4 + n) * 128) for n in (16, 32))
  assert found.flops == pytest.approx(products / 8, rel=0.02)
  assert kinds['all-gather'].times == 1


def config(*flags):
  return programs.read_config((DPT[0], *flags), 'cpu')


def test_a_backbone_is_a_name_a_size_or_a_folder(tmp_path):
  made = configs.default()
  for path, layers in (('roberta-large', 24), ('bert-base', 12), ('scratch:mini', 4)):
    made.backbone.path = path
    assert backbones.shape_of(made).num_layers == layers
  (tmp_path / 'config.json').write_text(
    '{"model_type": "bert", "vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 3, '
    '"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}'
  )
  for path in (tmp_path, tmp_path / 'config.json'):
    made.backbone.path = str(path)
    assert backbones.shape_of(made).num_layers == 3
  made.backbone.path = 'nonesuch/model'
  with refused('nonesuch/model'):
    backbones.shape_of(made)


def test_the_batch_is_that_of_the_training():
  made = config('--config.negatives=2', '--config.batch_size=8')
  shapes = programs.batch_of(made, backbones.shape_of(made))
  assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in shapes.arrays.items()} == {
    'query_tokens': ((8, 16), 'int32'),
    'query_mask': ((8, 16), 'bool'),
    'query_index': ((8,), 'int32'),
    'passage_index': ((8, 3), 'int32'),
    'relevant': ((8, 32), 'int32'),
    'passage_tokens': ((8, 3, 32), 'int32'),
    'passage_mask': ((8, 3, 32), 'bool'),
    'negative_source': ((8, 2), 'int8'),
  }
  assert shapes.calls == ((8, 16), (24, 32))
  assert shapes.texts == {'queries': 8, 'passages': 24}


# Those whose examples the local recipes read from docstrings.
TEXTS = ('dptdr', 'cross_encoder', 'topic_dpr', 'nir_retriever', 'nir_reranker')
RECIPES = (
  *('dptdr.py:local', 'dptdr.py:local,query', 'rip.py:local', 'cross_encoder.py:local'),
  'condenser.py:cocondenser,local',
  *(f'../experiments/lab/configs/{name}.py:local' for name in ('sections', 'stsb')),
  *('topic_dpr.py:local', 'topic_dpr.py:words,local'),
  *('nir_retriever.py:local', 'nir_retriever.py:ft,local'),
  *('nir_reranker.py:mdm=qa,local', 'nir_reranker.py:ft,local'),
)


@pytest.mark.slow_but_first
@pytest.mark.parametrize('recipe', RECIPES)
def test_every_recipe_can_be_planned(recipe):
  """Its loss and its embedding take the batch of the plan."""
  made = programs.read_config([f'--config={ROOT}/configs/{recipe}'], 'cpu')
  experiment = programs.Experiment(made, jax.devices()[:1])
  shapes = experiment.batch
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = tree.unflatten(experiment.params)
  loss, metrics = jax.eval_shape(experiment.model.loss, params, shapes.arrays, key)
  assert loss.shape == () and set(experiment.model.shown) <= set(metrics)
  rows, length = shapes.calls[-1]
  columns = [jax.ShapeDtypeStruct((rows, *shape), dtype) for dtype, *shape in shapes.columns]
  tokens, mask = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (np.int32, np.bool_))

  def embed(params, *batch):
    return experiment.model.embed(params, 'passage', *batch)

  assert jax.eval_shape(embed, params, tokens, mask, *columns).shape[0] == rows
  assert shapes.programs >= 1 and shapes.longest <= 512


@pytest.mark.slow
@pytest.mark.parametrize(
  'recipe',
  # A prompt for queries only needs files of a backbone: it encodes the passages first.
  [one for one in RECIPES if one.partition('.')[0] in TEXTS and 'query' not in one],
)
def test_the_planned_batch_is_as_large_as_the_first_one_of_the_training(recipe, tmp_path):
  made = programs.read_config([f'--config={ROOT}/configs/{recipe}'], 'cpu')
  devices = meshes.make_mesh(made.mesh, jax.devices()[:1])
  found = methods.load(made.method).data(made.data, made, epath.Path(tmp_path), devices)
  tokenizer = vocabularies.train_wordpiece(found.read(), 2000, tmp_path / 'tokenizer')
  model = backbones.shape_of(made)
  batch = found.open(tokenizer, model).batches[0]
  planned = programs.batch_of(made, model).arrays
  assert set(batch) <= set(planned)
  for name, leaf in batch.items():
    assert leaf.dtype == planned[name].dtype and leaf.ndim == len(planned[name].shape), name
    assert np.all(np.array(leaf.shape) <= planned[name].shape), name
  # Docstrings are cut at the longest lengths, so nothing is planned larger than it comes.
  tokens = [name for name in batch if name.endswith('_tokens')]
  assert tokens and all(batch[name].shape == planned[name].shape for name in tokens)


@pytest.mark.slow
def test_a_compiler_ends_with_the_process_that_started_it(tmp_path):
  """Which holds the other end of its standard input, however it ends."""
  job = json.dumps([dataclasses.asdict(programs.CompileJob('cpu', DPT)), False])
  command = [sys.executable, *compiling.COMMAND, str(tmp_path / 'answer.json')]
  with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
    process.stdin.write(f'{job}\n')
    process.stdin.close()
    assert process.wait(60) == programs.ORPHANED
  assert not (tmp_path / 'answer.json').exists()


def test_a_compiler_that_dies_is_no_traceback(monkeypatch):
  """The program of the process ends itself by a signal, or never ends."""
  job = programs.CompileJob('cpu', DPT)
  for code, limit, message in (
    ('import os; print("F0101 Check failed: chips"); os.abort()', 60, 'SIGABRT.*Check failed'),
    ('import time; time.sleep(60)', 0.5, 'no program after 0.5 s'),
  ):
    monkeypatch.setattr(compiling, 'COMMAND', ('-c', code))
    made = compiling.compile_program(job, limit)
    assert made.fits is None
    assert re.search(message, made.failure)
