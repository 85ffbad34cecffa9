"""Methods of training: each is a value `METHOD` in a module, see `training.methods`.

A new method often replaces one function of another: ``METHOD = dpr.METHOD._replace(build=build,
options={build: dual_encoder.OPTIONS})``.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from dprjax.base.errors import InputError, describe_error
from dprjax.losses.types import Batch, Loss, Params
from dprjax.training import config as configs
from dprjax.training.methods import METHODS, Modules, names

if TYPE_CHECKING:
  from dprjax.models.artifact import Prompt
  from dprjax.models.encoder_config import EncoderConfig
  from dprjax.models.head_specs import Head
  from dprjax.models.hub import Backbone
  from dprjax.text.tokenizing import Tokenizer


class Scores(NamedTuple):
  """Scores on the dev split.

  Attributes:
    means: by measure.
    values: ``config.eval.measure`` of each dev example, by data set ('' if there is only one);
      their mean is the measure. F1 and others that are no means are linearised: the measure plus
      the influence of each example. Without values there are no intervals.
    new: by data set, whether no training query has a relevant passage of the dev query.
    fused: by data set, nDCG@10 of each dev query with BM25 fused into the ranking, for each weight
      in `fusion.candidates`; with ``config.eval.choose``.
    note: for the log.
  """

  means: Mapping[str, float]
  values: Mapping[str, Float[np.ndarray, ' _']] = types.MappingProxyType({})
  new: Mapping[str, Bool[np.ndarray, ' _']] = types.MappingProxyType({})
  fused: Mapping[str, Float[np.ndarray, '_ weights']] = types.MappingProxyType({})
  note: str = ''


Evaluate = Callable[[Mapping[str, Array]], Scores]


class Parts(NamedTuple):
  """Sources of the initial parameters.

  Attributes:
    encoder: the backbone parameters; ``sha256`` is '' in a plan, which has no weights.
    heads: the heads of ``Method.parts`` in the backbone directory.
    prompt: from ``config.prompt.init_from`` or ``config.prompt.init_text``.
    text: ``DataSource.parts``.
  """

  encoder: Params
  heads: Mapping[str, Head] = {}
  prompt: Prompt | None = None
  text: Mapping[str, Any] = {}
  sha256: str = ''


class Model(NamedTuple):
  """The functions of a method, for one config, backbone and mesh.

  Attributes:
    init: ``(parts, key) -> params``, a tree with the subtrees ``backbone``, ``prompt``, ``head``.
    loss: ``(params, batch, key or None) -> (loss, other metrics)``. Without a key there is no
      dropout.
    embed: ``(params, side, tokens, mask) -> [B, H]`` without dropout, for evaluation. A
      cross-encoder also takes the start of each second text, and returns scores ``[B, 1]``.
    shown: metrics on the console beside the loss, with their labels.
    baseline: ``params -> params`` by flat names: the model to beat on the dev split, such as the
      frozen encoder.
    sharding: ``(regular expression, PartitionSpec)`` of parameters that ``mesh.RULES`` lacks.
  """

  init: Callable[[Parts, Array], dict[str, Any]]
  loss: Callable[[Params, Batch, Array | None], Loss]
  embed: Callable[..., Float[Array, 'B H']]
  shown: Mapping[str, str]
  baseline: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda params: params
  sharding: tuple[tuple[str, PartitionSpec], ...] = ()


class TrainingData(NamedTuple):
  """Tokenised training data.

  Attributes:
    batches: the rows of this process in each global batch of an epoch, by step; steps continue
      from epoch to epoch.
    unit: name of the rows of a batch, in the plural.
    description: one line for the log.
    ids: names the content of a batch whose loss is not finite.
    evaluation: makes the evaluation on the dev split; None without one.
    frozen: baseline scores of the encoder as `dprjax.encode` runs it without a prompt, on the dev
      split or, with ``DataSource.folds``, on all training queries. All processes call it. None:
      ``Model.baseline`` is scored.
    shorter: whether training cuts texts more than ``frozen``; ``Model.baseline`` is then scored
      too.
    floor: the baseline, given the scores of ``Model.baseline``.
    arrays: constant inputs of the loss by flat names, replicated on every device.
  """

  batches: grain.MapDataset
  unit: str
  description: str
  ids: Callable[[Mapping[str, np.ndarray]], str]
  evaluation: Callable[[Model], Evaluate] | None
  frozen: Callable[[], Scores] | None = None
  shorter: Callable[[], bool] = lambda: False
  floor: Callable[[Scores], Scores] = lambda scores: scores
  arrays: Mapping[str, np.ndarray] = types.MappingProxyType({})


class BatchShapes(NamedTuple):
  """Shapes of the longest batch of a training, for `dprjax.plan`.

  Attributes:
    arrays: of the global batch, by key.
    calls: (texts, tokens) of each encoder call of the loss.
    texts: number of encoded texts, by their name in the plural.
    programs: number of compiled batch lengths.
    longest: tokens of the longest text embedded after training.
    columns: ``(dtype, *shape)`` of a row of each argument of ``Model.embed`` after the mask.
    parts: replaces ``DataSource.parts``, which need the text.
  """

  arrays: Mapping[str, jax.ShapeDtypeStruct]
  calls: tuple[tuple[int, int], ...]
  texts: Mapping[str, int]
  programs: int
  longest: int
  columns: tuple[tuple[Any, ...], ...] = ()
  parts: Mapping[str, Any] = {}


class Folds(NamedTuple):
  """Cross-validation in ``parts`` folds; the largest one leaves ``queries`` for training."""

  parts: int
  queries: int


class DataSource(NamedTuple):
  """Training data that was located but not tokenised.

  Attributes:
    read: streams texts for a new vocabulary.
    open: builds or opens the token cache in the workdir.
    files: every file that the run depends on, by role. It stops if one changes.
    parts: data from the text for the initial parameters.
    folds: with too few queries to hold some out.
  """

  read: Callable[[], Iterator[str]]
  open: Callable[[Tokenizer, EncoderConfig], TrainingData]
  files: Mapping[str, epath.Path] = types.MappingProxyType({})
  parts: Mapping[str, Any] = types.MappingProxyType({})
  folds: Folds | None = None


class Product(NamedTuple):
  """The output of `dprjax.export`.

  Attributes:
    encoders: arguments of ``model_folders.save_backbone`` by subfolder ('' is the folder itself);
      empty if no encoder was trained.
    prompt: arrays of the prompt file; empty if no prompt was trained.
    meta: entries in the meta of the prompt file that the method decides.
    noun: names the encoders in messages.
    prompts: arrays and meta of prompt files beside the encoders, by task.
  """

  encoders: Mapping[str, Mapping[str, Any]]
  prompt: Mapping[str, np.ndarray]
  meta: Mapping[str, Any]
  noun: str = 'the backbone'
  prompts: Mapping[str, tuple[Mapping[str, np.ndarray], Mapping[str, Any]]] = (
    types.MappingProxyType({})
  )


class Method(NamedTuple):
  """A way to train.

  Attributes:
    build: ``(config, model, mesh, tokenizer) -> Model``; after ``data``, since a backbone from
      scratch needs the text.
    data: ``(section, config, workdir, mesh) -> DataSource``, for ``config.data`` or that of a task.
    export: ``(config, workdir, backbone, trained) -> Product``; ``trained`` is a flat tree.
    parts: heads to read from the backbone directory, names of ``head_specs.HEADS``.
    needs: the required ones of these; a backbone from scratch gets them.
    options: full names of the optional options (`options.Option`) that a function of the method
      uses, by function. So another ``build`` declares its own.
    requires: values that other options must have.
    shapes: ``(config, model, tokenizer) -> BatchShapes`` for a plan; None: it cannot be planned.
    intermediate: ``(config, names of trained parameters) ->`` whether another training starts from
      them; they are then exported even without a gain.
  """

  build: Callable[[ConfigDict, EncoderConfig, Mesh, Tokenizer], Model]
  data: Callable[[ConfigDict, ConfigDict, epath.Path, Mesh], DataSource]
  export: Callable[[ConfigDict, epath.Path, Backbone, Mapping[str, np.ndarray]], Product]
  parts: tuple[str, ...] = ()
  needs: tuple[str, ...] = ()
  options: Mapping[Callable[..., Any], tuple[str, ...]] = types.MappingProxyType({})
  requires: Mapping[str, Any] = types.MappingProxyType({})
  shapes: Callable[[ConfigDict, EncoderConfig, Tokenizer], BatchShapes] | None = None
  intermediate: Callable[[ConfigDict, Collection[str]], bool] = lambda config, trained: False

  @property
  def declared(self) -> tuple[str, ...]:
    return self.options.get(self.build, ()) + self.options.get(self.data, ())


def load(name: str) -> Method:
  path, _, value = METHODS.get(name, Modules(name))
  module = None
  if re.fullmatch(r'\w+(\.\w+)*', path):
    try:
      module = importlib.import_module(path)
    except MemoryError:
      raise
    except Exception as error:  # from code outside dprjax
      absent = error.name if isinstance(error, ModuleNotFoundError) else None
      if absent is None or not f'{path}.'.startswith(f'{absent}.'):  # not the method itself
        raise InputError(
          f'config.method: {name!r} cannot be imported ({describe_error(error)})'
        ) from error
  method = getattr(module, value, None)
  if not isinstance(method, Method):
    raise InputError(
      f'config.method: {name!r} is not a method; use one of {", ".join(names())}, or a module '
      'with a METHOD, in the working folder, beside the config or on PYTHONPATH; configs/unm.py '
      'describes a pipeline: dprjax pipeline'
    )
  return method


def of(config: ConfigDict) -> Method:
  """The method of an experiment; checks its options."""
  method = load(config.method)
  configs.check_rules(config, method.declared, method.requires)
  return method


def outside(name: str) -> bool:
  return name not in METHODS


def load_named(stored: str, named: str | None) -> Method:
  """The method of a stored config. Code outside this package runs only if the user names it too.

  Args:
    stored: ``config.method`` of the config.json of a workdir, which may come from an untrusted
      source.
  """
  if named != stored and (named is not None or outside(str(stored))):
    raise InputError(
      f'config.json of the workdir names the method {stored!r}; if it is a module outside dprjax '
      f'whose code you trust, set --method={stored}'
    )
  return load(stored)
