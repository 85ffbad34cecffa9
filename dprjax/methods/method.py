"""What a method is: one value, `METHOD`, in one module of this package.

    config.method = 'dpr'        dprjax/methods/dpr.py
    config.method = 'lab.toy'    a module of your own: lab/toy.py in the working folder, beside the
                                 config file, or anywhere on Python's path

The training loop and the exporter know a method only by this value. A new method often replaces one
function of another: ``METHOD = dpr.METHOD._replace(build=build)``.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base.errors import InputError, place
from dprjax.runtime import config as configs

if TYPE_CHECKING:
  from dprjax.data.text import Tokenizer
  from dprjax.models.artifact import Prompt
  from dprjax.models.encoder_config import EncoderConfig
  from dprjax.models.head_specs import Head
  from dprjax.models.hub import Backbone

_PACKAGE = 'dprjax.methods'

Params = Mapping[str, Any]
Batch = Mapping[str, Array]


class Scores(NamedTuple):
  """What an evaluation on the dev split finds.

  Attributes:
    means: by measure.
    values: of ``config.eval.measure``, one of each dev example in an order that does not change, by
      data set ('' where there is one). Their mean, and over data sets the mean of these means, is
      the measure. One that is no such mean (F1, a correlation) gives its linearisation: the measure
      plus each example's influence on it. Without values there are no intervals.
  """

  means: Mapping[str, float]
  values: Mapping[str, Float[np.ndarray, ' _']] = types.MappingProxyType({})


Evaluate = Callable[[Mapping[str, Array]], Scores]


def as_it_begins(params: Mapping[str, Array]) -> Mapping[str, Array]:
  """``Model.baseline`` of a method whose start is a model of its own."""
  return params


def never(_: ConfigDict, __: Collection[str]) -> bool:
  """``Method.intermediate`` of most methods."""
  return False


class Parts(NamedTuple):
  """What initial parameters are made from.

  Attributes:
    encoder: the backbone's parameters.
    heads: the heads in the backbone's directory, of those that ``Method.parts`` names.
    prompt: the file that ``config.prompt.init_from`` names.
    text: what the text gives, ``Texts.parts``.
    sha256: of the backbone; '': of a plan, which has no weights.
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
    loss: ``(params, batch, key or None) -> (loss, metrics)``. Without a key there is no dropout.
    embed: ``(params, kind, tokens, mask) -> [B, H]`` without dropout, for evaluation. That of a
      cross-encoder takes where each second text starts as well, and gives scores ``[B, 1]``.
    shown: the metrics of the console's line, beside the loss, and their labels.
    baseline: ``params -> params`` by flat names, from those before the first step to those that a
      training has to beat on the dev split. Of a prompt it leaves the frozen encoder.
    sharding: ``(regular expression, PartitionSpec)`` of parameter names that ``mesh.RULES`` lacks.
  """

  init: Callable[[Parts, Array], dict[str, Any]]
  loss: Callable[[Params, Batch, Array | None], tuple[Float[Array, ''], dict[str, Array]]]
  embed: Callable[..., Float[Array, 'B H']]
  shown: Mapping[str, str]
  baseline: Callable[[Mapping[str, Array]], Mapping[str, Array]] = as_it_begins
  sharding: tuple[tuple[str, PartitionSpec], ...] = ()


class Data(NamedTuple):
  """Tokenised training data.

  Attributes:
    batches: this process's rows of each global batch, for the steps of an epoch. Its index is the
      step's number, and goes on from epoch to epoch.
    unit: what a row of a batch is, in the plural.
    description: the data in a line, for the start of the run.
    ids: names what a batch holds, for the message when its loss is not finite.
    evaluation: makes the evaluation on the dev split; None where there is no such split.
    frozen: the scores to beat on the dev split, or with ``Texts.folds`` on all training queries:
      those of the encoder as `dprjax.encode` runs it without a prompt. None: those of
      ``Model.baseline``. All processes call it.
    whole: ``(model, params, seconds) -> (scores to beat, scores)`` in the whole corpus, where the
      evaluation searches a part of it; None where it would take longer.
    arrays: what the loss takes as parameters that are never trained, by their flat names. They are
      whole on every device.
  """

  batches: grain.MapDataset
  unit: str
  description: str
  ids: Callable[[Mapping[str, np.ndarray]], str]
  evaluation: Callable[[Model], Evaluate] | None
  frozen: Callable[[], Scores] | None = None
  whole: Callable[[Model, Mapping[str, Array], float], tuple[Scores, Scores] | None] | None = None
  arrays: Mapping[str, np.ndarray] = types.MappingProxyType({})


class BatchShapes(NamedTuple):
  """The longest batch of a training, without what it holds; see `dprjax.plan`.

  Attributes:
    arrays: of the global batch, by key: shapes and types.
    calls: (texts, tokens) of each time that the loss encodes some of them.
    texts: how many are encoded, by what they are, in the plural.
    programs: how many lengths a training's batches may have; each is compiled when it first comes.
    longest: text that is embedded after the training, in tokens.
    columns: what ``Model.embed`` takes behind the mask, ``(dtype, *shape)`` of a row.
    parts: in place of ``Texts.parts``, which are not known without the text.
  """

  arrays: Mapping[str, jax.ShapeDtypeStruct]
  calls: tuple[tuple[int, int], ...]
  texts: Mapping[str, int]
  programs: int
  longest: int
  columns: tuple[tuple[Any, ...], ...] = ()
  parts: Mapping[str, Any] = {}


class Folds(NamedTuple):
  """Training queries in equal parts, of which each is held out once.

  Attributes:
    parts: how many.
    queries: to train on where the largest part is held out.
  """

  parts: int
  queries: int


class Texts(NamedTuple):
  """Training text that was located but not tokenised.

  Attributes:
    read: streams the texts that a vocabulary is learnt from.
    open: ``(tokenizer, model) -> Data``. Builds the token store in the workdir, or opens it.
    files: all files that decide what is trained and evaluated on, by role. A run that has begun
      does not go on when one of them changes.
    parts: what initial parameters need of the text.
    folds: how to find the number of updates, where there are too few queries to hold some out.
  """

  read: Callable[[], Iterator[str]]
  open: Callable[[Tokenizer, EncoderConfig], Data]
  files: Mapping[str, epath.Path] = types.MappingProxyType({})
  parts: Mapping[str, Any] = types.MappingProxyType({})
  folds: Folds | None = None


class Product(NamedTuple):
  """What `dprjax.export` writes.

  Attributes:
    encoders: arguments of ``hub.save_backbone`` by subfolder ('' is the folder itself); empty where
      no encoder was trained.
    prompt: arrays of the prompt file; empty where no prompt was trained.
    meta: the prompt file's meta, as far as the method decides it.
    noun: what the encoders are, for messages.
    prompts: arrays and meta of the prompt files beside the encoders, by the names of their tasks.
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

  Data and exports do not depend on a model, and a backbone from scratch needs the text before there
  is one. So ``build`` is a step of its own: it gives what does depend on it.

  Attributes:
    build: ``(config, model, mesh, tokenizer) -> Model``.
    data: ``(section, config, workdir, mesh) -> Texts``. The section is ``config.data``, or another
      of its form: a method may open several data sets.
    export: ``(config, workdir, backbone, trained) -> Product``, from the flat tree of trained
      parameters.
    parts: heads that it reads from the backbone's directory, names of ``head_specs.HEADS``.
    needs: those of them without which it cannot begin; a backbone from scratch is made with them.
    options: optional knobs that it has, by their full names, see `knobs.Knob`; 'tasks' where it
      takes several data sets.
    requires: what other options have to be, likewise.
    shapes: ``(config, model, tokenizer) -> BatchShapes``, for a plan; None: it cannot be planned.
    intermediate: ``(config, names of trained parameters) -> whether`` they are only the start of
      another training. They are then exported whether or not they beat the baseline.
  """

  build: Callable[[ConfigDict, EncoderConfig, Mesh, Tokenizer], Model]
  data: Callable[[ConfigDict, ConfigDict, epath.Path, Mesh], Texts]
  export: Callable[[ConfigDict, epath.Path, Backbone, Mapping[str, np.ndarray]], Product]
  parts: tuple[str, ...] = ()
  needs: tuple[str, ...] = ()
  options: tuple[str, ...] = ()
  requires: Mapping[str, Any] = types.MappingProxyType({})
  shapes: Callable[[ConfigDict, EncoderConfig, Tokenizer], BatchShapes] | None = None
  intermediate: Callable[[ConfigDict, Collection[str]], bool] = never


def load(name: str) -> Method:
  """The method that ``config.method`` names.

  Raises:
    InputError: there is no such module, it cannot be imported, or it is not a method; those of this
      package are listed.
  """
  path = name if outside(name) else f'{_PACKAGE}.{name}'
  module = None
  if re.fullmatch(r'\w+(\.\w+)*', path):
    try:
      module = importlib.import_module(path)
    except ModuleNotFoundError as error:
      if error.name is None or not f'{path}.'.startswith(f'{error.name}.'):
        # The method is there; something that it imports is not.
        raise InputError(f'config.method: {name!r} cannot be imported ({place(error)})') from error
    except MemoryError:
      raise
    except Exception as error:  # of code that is not ours
      raise InputError(f'config.method: {name!r} cannot be imported ({place(error)})') from error
  method = getattr(module, 'METHOD', None)
  if not isinstance(method, Method):
    raise InputError(
      f'config.method: {name!r} is not a method; use one of {", ".join(names())}, or the full name '
      'of a module with a METHOD, in the working folder, beside the config or on PYTHONPATH'
    )
  return method


def of(config: ConfigDict) -> Method:
  """The method of an experiment. Raises InputError for options that it cannot do; as ``load``."""
  method = load(config.method)
  configs.check_rules(config, method.options, method.requires)
  return method


def outside(name: str) -> bool:
  """Whether a method is a module outside this package, one of the user's own."""
  package = importlib.import_module(_PACKAGE)
  ours = {module.name for module in pkgutil.iter_modules(package.__path__)}
  return name not in ours and not name.startswith(f'{_PACKAGE}.')


def load_named(stored: str, named: str | None) -> Method:
  """The method that a file names: one of this package, or the one that its reader names too.

  Args:
    stored: ``config.method`` of a workdir's config.json, which may come from a stranger.
    named: ``--method``.

  Raises:
    InputError: as ``load``; ``stored`` is a module of its own, which ``named`` is not.
  """
  if named is not None and named != stored:
    raise InputError(f'--method={named}: the run was trained by the method {stored!r}')
  if named is None and outside(str(stored)):
    raise InputError(
      f'config.json of the workdir names the method {stored!r}, a module outside dprjax; where you '
      f'trust its code, name it too: --method={stored}'
    )
  return load(stored)


def names() -> list[str]:
  """The methods of this package."""
  package = importlib.import_module(_PACKAGE)
  modules = (module.name for module in pkgutil.iter_modules(package.__path__))
  return [
    name for name in modules if hasattr(importlib.import_module(f'{_PACKAGE}.{name}'), 'METHOD')
  ]
