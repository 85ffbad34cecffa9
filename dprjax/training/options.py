"""The options of every experiment, with their effects and allowed values.

Those of a method lie with it, see `training.methods`.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dprjax.base.errors import InputError

SET: Any = object()
"""In ``Option.requires``: any value but an unused one."""
AUTO = 'auto'
"""A value to be resolved; of the encoder by `dual_encoder.resolve_settings`."""


class Option(NamedTuple):
  """The default and the allowed values of an option.

  Attributes:
    value: the default.
    fits, expected: a test of values, and the allowed values in words.
    optional: only methods that list it in `Method.options` may change it.
    requires: values of other options (`SET` or one value), by full name, if this option differs
      from its default. False, 0 and () mean an unused option.
    mixed: whether values have several types.
  """

  value: Any
  fits: Callable[[Any], bool]
  expected: str
  optional: bool = False
  requires: Mapping[str, Any] = types.MappingProxyType({})
  mixed: bool = False

  def only(self, optional: bool = False, **requires: Any) -> 'Option':
    """A copy with rules; ``prompt__length=SET`` requires ``prompt.length``."""
    rules = {name.replace('__', '.'): value for name, value in requires.items()}
    return self._replace(optional=optional, requires=rules)


def check(table: Mapping[str, Option], settings: Mapping[str, Any], name: str, start: str) -> None:
  """Checks that exactly the options of a table are given, with allowed values.

  Messages have ``name``, such as ``config``, before options, and ``start``, the place with all.
  """
  for key in sorted(settings.keys() ^ table.keys()):
    fault = 'there is no such option' if key in settings else 'it is missing'
    raise InputError(f'{name}.{key}: {fault}; {start} has all options')
  for key, spec in table.items():
    if not spec.fits(settings[key]):
      raise InputError(f'{name}.{key}: expected {spec.expected}, not {settings[key]!r:.60}')


def text(value: str) -> Option:
  return Option(value, lambda v: isinstance(v, str) and v.isprintable(), 'a text on one line')


def lines(value: str) -> Option:
  return Option(value, lambda v: isinstance(v, str), 'a text')


def choice(*values: str) -> Option:
  return Option(values[0], lambda v: v in values, ' or '.join(map(repr, values)))


def switch(value: bool) -> Option:
  return Option(value, lambda v: isinstance(v, bool), 'True or False')


def auto(one: Option) -> Option:
  return Option(
    AUTO, lambda v: v == AUTO or one.fits(v), f'{one.expected}, or {AUTO!r}', mixed=True
  )


def whole(value: int, *, least: int, most: int, also: int | None = None) -> Option:
  return Option(
    value,
    lambda v: isinstance(v, int) and not isinstance(v, bool) and (least <= v <= most or v == also),
    f'a whole number from {least} to {most}{"" if also is None else f", or {also}"}',
  )


def number(
  value: float,
  *,
  least: float | None = None,
  above: float | None = None,
  most: float | None = None,
  below: float | None = None,
  also: float | None = None,
) -> Option:
  def fits(v: Any) -> bool:
    if not isinstance(v, int | float) or isinstance(v, bool):
      return False
    low = v > above if above is not None else v >= (least or 0)
    high = v < below if below is not None else most is not None and v <= most
    return (low and high) or (also is not None and v == also)

  low = f'above {above:g}' if above is not None else f'from {least or 0:g}'
  high = f'below {below:g}' if below is not None else f'up to {most:g}'
  return Option(value, fits, f'a number {low} and {high}{"" if also is None else f", or {also:g}"}')


def several(*values: Any, each: Option | None = None, least: int = 1, most: int = 10**6) -> Option:
  """A tuple of ``least`` to ``most`` items; without ``each``, they are checked at their use."""

  def fits(v: Any) -> bool:
    right = isinstance(v, tuple | list) and least <= len(v) <= most
    return right and (each is None or all(map(each.fits, v)))

  return Option(values, fits, f'a tuple{"" if each is None else f", each item {each.expected}"}')


def lengths(*values: int) -> Option:
  """Ascending lengths in tokens."""
  tuples = several(*values, each=whole(1, least=1, most=8192))
  return tuples._replace(
    fits=lambda v: tuples.fits(v) and list(v) == sorted(set(v)),
    expected='ascending lengths from 1 to 8192',
  )


def table() -> types.SimpleNamespace:
  """The options of every experiment."""
  c = types.SimpleNamespace()
  # training method: a name in training/methods.py, or the full name of a module of your own
  c.method = text('dpr')
  c.task = text('')  # a name for the prompt meta
  c.seed = whole(42, least=0, most=2**31 - 1)  # of initialisation, dropout and shuffling

  c.backbone = types.SimpleNamespace()
  # a Hugging Face folder or hub id; 'package:NAME', the folder model/ of an installed package;
  # 'scratch:tiny|mini|small|base', random weights and a vocabulary trained on the data
  c.backbone.path = text('')
  # of a backbone from scratch
  c.backbone.vocab_size = whole(8000, least=100, most=10**6)
  # 'wordpiece' (uncased; a BERT) or 'sentencepiece' (cased, any language; an XLM-R)
  c.backbone.vocabulary = choice('wordpiece', 'sentencepiece')
  # of computation and frozen weights; scores, losses and trained weights stay float32. 'auto':
  # bfloat16 on accelerators, float32 on CPUs. 'mixed': float32 with bfloat16 products in dense
  # layers, faster on CPUs with AMX
  c.backbone.dtype = choice('auto', 'float32', 'bfloat16', 'mixed')
  # 'fused': a TPU kernel that keeps scores on the chip (slow elsewhere); 'library':
  # jax.nn.dot_product_attention, cuDNN on GPUs in bfloat16, for long texts; 'auto': fused on TPUs,
  # else plain
  c.backbone.attention = choice('auto', 'plain', 'fused', 'library')
  # hidden and attention dropout; -1: as in the backbone config.json
  c.backbone.dropout = number(-1.0, least=0, below=1, also=-1)
  # recompute activations in the backward pass: less memory, a third more computation
  c.backbone.remat = switch(False)
  # layers per scan step; 0: all, which runs faster and compiles longer
  c.backbone.unroll = whole(1, least=0, most=1000)

  c.prompt = types.SimpleNamespace()
  # kind of the trained adapter: 'prefix', 'lora', 'linear', or your own (`models.adapter`)
  c.prompt.kind = text('prefix').only(optional=True, prompt__length=SET)
  # its size: of a prefix, key/value vectors per layer; of LoRA, the rank; of a linear map, any
  # number above 0. 0: no adapter (full fine-tuning)
  c.prompt.length = whole(0, least=0, most=4096).only(optional=True)
  # 'query': the frozen backbone encodes passages once; `tied` then has no effect
  c.prompt.sides = choice('both', 'query').only(
    optional=True, prompt__length=SET, backbone__two_encoders=False
  )
  # one prompt for queries and passages, or one for each
  c.prompt.tied = switch(True).only(optional=True)
  # 'none': train the prompt itself; 'mlp': Embedding -> Linear -> Tanh -> Linear (Table 5)
  c.prompt.reparam = choice('none', 'mlp').only(prompt__kind='prefix')
  # N(0, std) initialises the prompt, or its embedding and the kernels of the MLP
  c.prompt.init_std = number(0.02, least=0, most=10)
  # initialise with the keys and values of the frozen encoder for this text, with tokens cut or
  # repeated to `length`; '': random numbers; 'auto': a text for causal backbones, else ''
  c.prompt.init_text = text('auto').only(optional=True, prompt__length=SET, prompt__init_from='')
  c.prompt.init_from = text('')  # start from this prompt.npz instead (Table 6)
  # weight of the regularization to the frozen encoder; 0: none. Costs another forward pass, unless
  # `sides` is 'query'
  c.prompt.regularization = number(0.0, least=0, most=1e6).only(optional=True, prompt__length=SET)
  # 'vectors': mean squared distance; 'scores': divergence of the softmax of a query over its
  # positive and negatives
  c.prompt.regularization_on = choice('vectors', 'scores')
  c.prompt.dropout = number(0.1, least=0, below=1)  # on the expanded prompt
  # 'example': one mask each, as in the released code; 'batch': one for all
  c.prompt.dropout_scope = choice('example', 'batch')
  # tokens count from P, as released prompts expect
  c.prompt.shift_positions = switch(False).only(prompt__kind='prefix')

  # for c.prompt.kind = 'lora': projections y = x W become x W + alpha / rank * x A B.
  c.lora = types.SimpleNamespace()
  c.lora.alpha = number(16.0, above=0, most=1e6).only(prompt__kind='lora')
  # whole-name regular expressions: attention/query, attention/key, attention/value,
  # attention/output, mlp/up, mlp/down and, if the backbone has it, mlp/gate
  c.lora.targets = several('attention/.*', 'mlp/.*').only(prompt__kind='lora')

  c.trainable = several('prompt/.*')  # whole-name regular expressions; all else is frozen
  # 'cls', 'mean', 'lasttoken' or another of `models.pooling`; for nir_retriever 'mask', 'cls' or
  # 'mean' (over the tokens of the text); 'auto', here and below: as dprjax encode has it without a
  # prompt (docs/backbones.md)
  c.pooling = text(AUTO)
  c.normalize = auto(switch(True))  # unit length, so that scores are cosines
  c.temperature = number(1.0, above=0, most=1e4)  # scores are divided by it
  c.batch_size = whole(64, least=1, most=2**20)  # queries per update, over all devices
  # chunks of a batch: the loss of the whole batch, with the memory of one chunk
  c.grad_cache = whole(1, least=1, most=2**16).only(optional=True)
  c.epochs = number(10.0, least=0, most=1e6)  # passes over the training queries
  c.steps = whole(0, least=0, most=10**9)  # updates; above 0, it replaces epochs

  # decay per step of a moving average of parameters, which is evaluated and exported; at most (1 +
  # t) / (10 + t) at step t. 0: no average
  c.ema = number(0.0, least=0, below=1)
  # weight interpolation (WiSE-FT): with n examples in an epoch, evaluated and exported parameters
  # are n / (n + this) of the way from initial to trained ones
  c.weight_interpolation = number(0.0, least=0, most=1e9)

  c.optim = types.SimpleNamespace()
  c.optim.learning_rate = number(7e-3, least=0, most=100)
  c.optim.warmup = number(0.1, least=0, most=1)  # fraction of the steps
  c.optim.decay = choice('linear', 'cosine', 'none')  # of the learning rate after the warmup
  # limit of the global norm of the gradient; 0: none
  c.optim.clip = number(1.0, least=0, most=1e9)
  c.optim.weight_decay = number(0.0, least=0, most=10)
  c.optim.eps = number(1e-8, above=0, most=1)
  c.optim.learning_rate_rules = several((r'.*', 1.0))  # first match: factor on the learning rate

  c.data = types.SimpleNamespace()
  # beir, msmarco, dpr, tevatron, flagembedding, arxiv, table, ids, docstrings,
  # or auto: detect it
  c.data.format = text('auto')
  # folder (or file) of the training text, or hf:NAME of the Hugging Face hub; for docstrings:
  # packages, separated by commas
  c.data.dir = text('')
  # columns of a table with unusual names, as query=COLUMN,positive=COLUMN
  c.data.columns = text('')
  # training jsonl with mined negatives, in the Tevatron format, for queries of data.dir
  c.data.mined_negatives = text('')
  c.data.train_split = text('train')  # qrels/NAME.tsv
  c.data.dev_split = text('')  # qrels/NAME.tsv for evaluation during training; '': see hold_out
  # fraction of training queries held out as the dev split, by a hash of their ids
  c.data.hold_out = number(0.0, least=0, below=1)
  # the held-out fold, from 1, set by training; 0: none
  c.data.fold = whole(0, least=0, most=100)
  # training queries used, chosen by a hash of their ids; 0: all. Also the most dev queries of a
  # task, and pairs of each label
  c.data.max_queries = whole(0, least=0, most=10**12)
  # tokens, with special ones; 'auto' is at most 8192 and adds longer buckets
  c.data.query_max_length = auto(whole(512, least=3, most=8192))
  c.data.passage_max_length = auto(whole(512, least=3, most=8192))
  c.data.query_prefix = lines(AUTO)  # text before every query
  c.data.passage_prefix = lines(AUTO)
  c.data.query_buckets = lengths(16, 32, 64, 128, 256, 512)  # padded lengths of batches
  c.data.passage_buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  c.data.token_cache = text('')  # folder of the token cache; '': workdir/token_cache

  # candidates for a choice by held-out queries: NAME = the options that differ.
  c.alternatives = types.SimpleNamespace()

  # devices along each axis; -1: all remaining ones.
  c.mesh = types.SimpleNamespace()
  c.mesh.data = whole(-1, least=1, most=10**6, also=-1)
  c.mesh.fsdp = whole(1, least=1, most=10**6, also=-1)
  c.mesh.model = whole(1, least=1, most=10**6, also=-1)

  c.eval = types.SimpleNamespace()
  # updates between evaluations; 0: see c.eval.epochs
  c.eval.every = whole(0, least=0, most=10**9)
  c.eval.epochs = number(1.0, above=0, most=1e6)  # epochs between evaluations
  c.eval.measure = text('nDCG@10')  # chooses the best checkpoint
  # what training has to beat: 'encoder', as dprjax encode runs it without a prompt; 'equal', with
  # the lengths, pooling and prefixes of this training
  c.eval.baseline = choice('encoder', 'equal')
  # passages searched: those of the dev queries and a sample, up to this many; 0: all
  c.eval.corpus_limit = whole(0, least=0, most=10**12)
  # choose among frozen encoder, trained models, BM25 and fusions with BM25 (docs/choosing.md)
  c.eval.choose = switch(False).only(optional=True, eval__measure='nDCG@10')
  c.eval.batch_size = whole(64, least=1, most=2**20)  # texts encoded at a time
  # skip training if the initial score is too high for a significant gain (docs/how-to-tune.md)
  c.eval.skip_saturated = switch(True)
  # evaluations without a gain before the run stops; 0: never
  c.eval.patience = whole(0, least=0, most=10**9)

  c.checkpoint = types.SimpleNamespace()
  # updates between checkpoints, of which the latest two are kept; 0: once an epoch
  c.checkpoint.every = whole(0, least=0, most=10**9)
  c.log_every = whole(10, least=1, most=10**9)  # updates between console lines
  c.log = types.SimpleNamespace()
  # beside metrics.jsonl: tensorboard, wandb, or both, separated by a comma; '': none
  c.log.to = text('')
  c.log.project = text('dprjax')  # of wandb
  return c
