"""All options of an experiment, with their effects and allowed values."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dprjax.base.errors import InputError

SET: Any = object()
"""In ``Option.requires``: any value but an unused one."""


class Option(NamedTuple):
  """The default and the allowed values of an option.

  Attributes:
    value: the default.
    fits, expected: a test of values, and the allowed values in words.
    optional: only methods that list it in `Method.options` may change it.
    requires: full names of other options and the values (`SET` or one value) that they need when
      this option differs from its default. False, 0 and () mean an unused option.
  """

  value: Any
  fits: Callable[[Any], bool]
  expected: str
  optional: bool = False
  requires: Mapping[str, Any] = types.MappingProxyType({})

  def only(self, optional: bool = False, **requires: Any) -> 'Option':
    """A copy with rules; ``prompt__length=SET`` requires ``prompt.length``."""
    rules = {name.replace('__', '.'): value for name, value in requires.items()}
    return self._replace(optional=optional, requires=rules)


def check(table: Mapping[str, Option], given: Mapping[str, Any], name: str, start: str) -> None:
  """Checks that exactly the options of a table are given, with allowed values.

  Args:
    name: put before names in messages, such as ``config``.
    start: in messages, the place with all options.
  """
  for key in sorted(given.keys() ^ table.keys()):
    fault = 'there is no such option' if key in given else 'it is missing'
    raise InputError(f'{name}.{key}: {fault}; {start} has all options')
  for key, spec in table.items():
    if not spec.fits(given[key]):
      raise InputError(f'{name}.{key}: expected {spec.expected}, not {given[key]!r:.60}')


def text(value: str) -> Option:
  """Any text without control characters."""
  return Option(value, lambda v: isinstance(v, str) and v.isprintable(), 'a text on one line')


def choice(*values: str) -> Option:
  """One of these words; the default is the first."""
  return Option(values[0], lambda v: v in values, ' or '.join(map(repr, values)))


def switch(value: bool) -> Option:
  """True or False."""
  return Option(value, lambda v: isinstance(v, bool), 'True or False')


def whole(value: int, *, least: int, most: int, also: int | None = None) -> Option:
  """A whole number from ``least`` to ``most``, or ``also``."""
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
  """A number within bounds (``above`` and ``below`` are exclusive), or ``also``."""

  def fits(v: Any) -> bool:
    if not isinstance(v, int | float) or isinstance(v, bool):
      return False
    low = v > above if above is not None else v >= (least or 0)
    high = v < below if below is not None else most is not None and v <= most
    return (low and high) or (also is not None and v == also)

  low = f'above {above:g}' if above is not None else f'from {least or 0:g}'
  high = f'below {below:g}' if below is not None else f'up to {most:g}'
  return Option(value, fits, f'a number {low} and {high}{"" if also is None else f", or {also:g}"}')


def several(*values: Any) -> Option:
  """A tuple that is not empty; the items are checked at their use."""
  return Option(values, lambda v: isinstance(v, tuple | list) and len(v) > 0, 'a tuple')


def texts(*values: str) -> Option:
  """A tuple of texts, possibly empty; the items are checked at their use."""
  return Option(
    values,
    lambda v: isinstance(v, tuple | list) and all(isinstance(one, str) for one in v),
    'a tuple of texts',
  )


def phrases(*values: str) -> Option:
  """A tuple of texts, possibly empty."""
  return Option(
    values,
    lambda v: (
      isinstance(v, tuple | list)
      and len(v) <= 9
      and all(isinstance(text, str) and text.isprintable() and len(text) <= 1000 for text in v)
    ),
    'a tuple of at most 9 texts on one line',
  )


def lengths(*values: int) -> Option:
  """Ascending lengths in tokens."""
  return Option(
    values,
    lambda v: (
      isinstance(v, tuple | list)
      and len(v) > 0
      and all(isinstance(n, int) and 1 <= n <= 8192 for n in v)
      and list(v) == sorted(set(v))
    ),
    'ascending lengths from 1 to 8192',
  )


def descending(*values: int) -> Option:
  """Descending numbers of dimensions, possibly none."""
  return Option(
    values,
    lambda v: (
      isinstance(v, tuple | list)
      and all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 2**20 for n in v)
      and list(v) == sorted(set(v), reverse=True)
    ),
    'descending whole numbers from 1 to 1048576, or ()',
  )


TASK_DATA = (
  'format',
  'dir',
  'columns',
  'mined_negatives',
  'train_split',
  'dev_split',
  'hold_out',
  'max_queries',
  'strict',
  'query_prefix',
  'passage_prefix',
)
"""Options of ``config.data`` that each entry of ``config.tasks`` sets itself."""


def table() -> types.SimpleNamespace:
  """All options."""
  c = types.SimpleNamespace()
  # training method: a module of dprjax/methods, or the full name of your own
  c.method = text('dpr')
  c.task = text('')  # a name for the prompt meta
  # the workdir of a finished training, whose parameters start this one
  c.init_from = text('').only(prompt__init_from='', tasks=(), data__folds=0)
  c.seed = whole(42, least=0, most=2**31 - 1)  # of initialisation, dropout and shuffling

  c.backbone = types.SimpleNamespace()
  # a Hugging Face folder or hub id; 'package:NAME', the folder model/ of an installed package;
  # 'scratch:tiny|mini|small|base', random weights and a vocabulary trained on the data
  c.backbone.path = text('')
  # of a backbone from scratch
  c.backbone.vocab_size = whole(8000, least=100, most=10**6)
  # 'wordpiece' (uncased; a BERT) or 'sentencepiece' (cased, any language; an XLM-R)
  c.backbone.vocabulary = choice('wordpiece', 'sentencepiece')
  # one encoder each for queries and passages (DPR), or one for both
  c.backbone.two_encoders = switch(False).only(optional=True)
  # of computation; scores and losses stay float32. 'auto': bfloat16 on accelerators, float32 on
  # CPUs. 'mixed': float32 with bfloat16 products in dense layers, faster on CPUs with AMX
  c.backbone.dtype = choice('auto', 'float32', 'bfloat16', 'mixed')
  # 'fused': a TPU kernel that keeps scores on the chip (slow elsewhere); 'library':
  # jax.nn.dot_product_attention, cuDNN on GPUs in bfloat16, for long texts; 'auto': fused on TPUs,
  # else plain
  c.backbone.attention = choice('auto', 'plain', 'fused', 'library')
  # of frozen weights; trained ones are always float32
  c.backbone.frozen_dtype = choice('auto', 'float32', 'bfloat16')
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
    optional=True, prompt__length=SET, backbone__two_encoders=False, tasks=()
  )
  # one prompt for queries and passages, or one for each
  c.prompt.tied = switch(True).only(optional=True)
  # 'none': train the prompt itself; 'mlp': Embedding -> Linear -> Tanh -> Linear (Table 5)
  c.prompt.reparam = choice('none', 'mlp').only(prompt__kind='prefix')
  c.prompt.reparam_hidden = whole(512, least=1, most=10**5)  # width of that MLP
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

  # for c.prompt.kind = 'lora': projections y = x W become x W + alpha / rank * x A B
  c.lora = types.SimpleNamespace()
  c.lora.alpha = number(16.0, above=0, most=1e6).only(prompt__kind='lora')
  # whole-name regular expressions: attention/query, attention/key, attention/value,
  # attention/output, mlp/up, mlp/down and, if the backbone has it, mlp/gate
  c.lora.targets = several('attention/.*', 'mlp/.*').only(prompt__kind='lora')
  # of A: 'kaiming', uniform within 1 / sqrt(inputs), as in PEFT; 'gaussian', N(0, prompt.init_std).
  # B starts as 0
  c.lora.init = choice('kaiming', 'gaussian').only(prompt__kind='lora')

  c.trainable = several('prompt/.*')  # whole-name regular expressions; all else is frozen
  # 'cls', 'mean', 'lasttoken' or another of `models.pooling`; for nir_retriever 'mask', 'cls' or
  # 'mean' (over the tokens of the text)
  c.pooling = text('cls')
  c.normalize = switch(False)  # unit length, so that scores are cosines
  c.temperature = number(1.0, above=0, most=1e4)  # scores are divided by it
  c.in_batch = switch(True)  # passages of other queries on all devices are negatives
  # queries (in pretraining: texts) scored at a time on a device; bounds the memory of the loss
  c.loss_rows = whole(1024, least=1, most=2**20)
  # Matryoshka: lengths of shortened vectors, such as (384, 256, 128, 64); the loss is the mean over
  # these and full vectors. (): only full vectors
  c.matryoshka = descending().only(optional=True)
  # the positive of a query: 'rotate', the next one in each epoch; 'first', always the first
  c.positive = choice('rotate', 'first')
  c.negatives = whole(1, least=0, most=4096)  # hard negatives per query; 0: in-batch only
  # with prompt.sides='query', further negatives: 0, none; a number, drawn for each update; -1, the
  # whole corpus, kept on every device
  c.corpus_negatives = whole(0, least=0, most=2**20, also=-1).only(prompt__sides='query')
  # fraction of hard negatives from each source; they add up to 1
  c.mix = types.SimpleNamespace()
  c.mix.denoised = number(0.0, least=0, most=1)  # of mined negatives that a reranker passed
  # of all mined negatives, and of those in a file without sources
  c.mix.undenoised = number(1.0, least=0, most=1)
  c.mix.random = number(0.0, least=0, most=1)  # of passages drawn from the whole corpus

  # for c.method = 'dpr' and 'cross_encoder': learn the scores of a teacher for the passages of each
  # query
  c.distillation = types.SimpleNamespace()
  # 'margin_mse': score of the positive minus that of each negative; 'kl': the softmax over the list
  c.distillation.loss = choice('none', 'margin_mse', 'kl').only(
    optional=True, negatives=SET, tasks=()
  )
  # a run, such as one of dprjax.rerank or dprjax.fuse, or a jsonl of dprjax.mine with scores;
  # '': data.mined_negatives
  c.distillation.scores = text('')
  # of this loss; the loss on labels has weight 1 - this
  c.distillation.weight = number(1.0, above=0, most=1)
  c.distillation.temperature = number(1.0, above=0, most=1e4)  # divides the teacher scores

  c.batch_size = whole(64, least=1, most=2**20)  # queries per batch, over all devices
  # batches per update: the loss uses the negatives of all, with the memory of one batch
  c.accumulate = whole(1, least=1, most=2**16)
  # chunks of a batch: the loss of the whole batch, with the memory of one chunk
  c.grad_cache = whole(1, least=1, most=2**16)
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
  c.optim.b1 = number(0.9, least=0, below=1)
  c.optim.b2 = number(0.999, least=0, below=1)
  c.optim.eps = number(1e-8, above=0, most=1)
  # first match: whether weight decay applies
  c.optim.weight_decay_rules = several((r'.*(bias|scale)', False), (r'.*', True))
  c.optim.learning_rate_rules = several((r'.*', 1.0))  # first match: factor on the learning rate

  c.data = types.SimpleNamespace()
  # beir, msmarco, dpr, tevatron, tevatron2, flagembedding, arxiv, table, ids, labels, docstrings,
  # or auto: detect it
  c.data.format = text('auto')
  # folder (or file) of the training text, irds:ID of ir_datasets, or hf:NAME of the Hugging Face
  # hub; for docstrings: packages, separated by commas
  c.data.dir = text('')
  # columns of a table with unusual names, as query=COLUMN,positive=COLUMN
  c.data.columns = text('')
  # training jsonl with mined negatives, in the Tevatron format, for queries of data.dir
  c.data.mined_negatives = text('')
  c.data.train_split = text('train')  # qrels/NAME.tsv
  c.data.dev_split = text('')  # qrels/NAME.tsv for evaluation during training; '': see hold_out
  # fraction of training queries held out as the dev split, by a hash of their ids
  c.data.hold_out = number(0.0, least=0, below=1)
  # k-fold cross-validation when hold_out would leave too few dev queries: each fold is held out
  # once, and a final training on all queries uses the best mean number of updates; 0: never. A
  # hold_out on the command line sets 0, unless folds_below is also set there
  c.data.folds = whole(0, least=2, most=100, also=0).only(optional=True, tasks=())
  # cross-validate below this many training queries; with folds on the command line, always
  c.data.folds_below = whole(200, least=1, most=10**9)
  # the held-out fold, from 1, set by training; 0: none
  c.data.fold = whole(0, least=0, most=100)
  # training queries used, chosen by a hash of their ids; 0: all. Also the most dev queries of a
  # task, and pairs of each label
  c.data.max_queries = whole(0, least=0, most=10**12)
  # read categories of passages (beir, arxiv, docstrings); a passage without any is never a positive
  c.data.categories = switch(False)
  c.data.strict = switch(False)  # unknown ids in qrels are an error
  c.data.query_max_length = whole(32, least=3, most=8192)  # tokens, with special ones
  c.data.passage_max_length = whole(128, least=3, most=8192)
  c.data.query_prefix = text('')  # text before every query
  c.data.passage_prefix = text('')
  c.data.query_buckets = lengths(16, 32, 64, 128, 256, 512)  # padded lengths of batches
  c.data.passage_buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  # relevant passages listed per query, to mask false negatives
  c.data.max_relevant = whole(32, least=1, most=10**5)
  c.data.token_cache = text('')  # folder of the token cache; '': workdir/token_cache
  # with prompt.sides='query': passage vectors by the frozen backbone, a folder of dprjax.encode or
  # NAME.npy with an id a line in NAME.txt; '': encoded into workdir/passages
  c.data.passage_embeddings = text('').only(prompt__sides='query')
  c.data.threads = whole(2, least=0, most=256)  # threads that prepare batches

  # for c.method = 'pretrain'; c.data.dir lists files and folders, separated by commas
  c.pretrain = types.SimpleNamespace()
  # texts of a passage: 'one'; 'siblings', two units; 'ict', a sentence and the rest
  c.pretrain.views = choice('one', 'siblings', 'ict')
  # of siblings: 'sentence' (RIP) or 'span' (coCondenser); DPTDR Table 7 calls both coCondenser
  c.pretrain.unit = choice('sentence', 'span')
  c.pretrain.span_length = whole(64, least=1, most=8192)  # most tokens of a span
  c.pretrain.max_length = whole(128, least=3, most=8192)  # tokens of a text, with special ones
  # padded lengths of batches
  c.pretrain.buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  # documents are cut into passages of whole sentences, up to this many tokens
  c.pretrain.passage_length = whole(256, least=5, most=10**6)
  c.pretrain.language = text('en')  # whose rules split sentences
  # fraction of tokens masked, in whole words
  c.pretrain.mask_rate = number(0.15, above=0, below=1)
  # weight of the masked-token losses; 0: none
  c.pretrain.mlm_weight = number(1.0, least=0, most=1e6)
  # whether the last layer has a masked-token loss; False: only the Condenser head
  c.pretrain.late_mlm = switch(True)
  # weight of the contrastive loss, if a passage has two texts
  c.pretrain.contrast_weight = number(1.0, least=0, most=1e6)
  # layers of the Condenser head; 0: no head
  c.pretrain.head_layers = whole(0, least=0, most=100).only(pretrain__mlm_weight=SET)
  # the layer that feeds the Condenser head; 0: L // 2
  c.pretrain.skip_from = whole(0, least=0, most=1000)

  # for c.method = 'topic_dpr': the positives of a document share a category
  c.topics = types.SimpleNamespace()
  # topics.npz of dprjax.topics, with a prompt for each topic; 'hlda' or 'lda': find topics of the
  # training passages at the start; '': none
  c.topics.path = text('')
  c.topics.keep = whole(0, least=0, most=1000)  # number of topics, the largest; 0: all
  # a training query has the topic of its 'document', as published, or its 'own'
  c.topics.query = choice('document', 'own')
  c.topics.alpha = number(0.1, least=0, below=0.5)  # of the query-query and topic-topic losses
  c.topics.margin = number(0.1, least=0, most=2)  # of the topic-topic loss
  # rows of a batch that the topic-topic loss encodes under every prompt; 0: all
  c.topics.batch = whole(0, least=0, most=2**20)
  c.topics.topic_topic = switch(True)  # use the topic-topic loss
  # tokens of topic words put before texts, in place of prompts; 0: none tokens of the words of the
  # topic of a text that stand before it, in place of prompts; 0: none
  c.topics.words = whole(0, least=0, most=512).only(topics__path=SET, prompt__length=0)
  # control: random words for each document
  c.topics.random_words = switch(False).only(topics__words=SET)
  # control: random topics for documents, in equal shares
  c.topics.random_topics = switch(False).only(topics__path=SET, topics__random_words=False)

  # for c.method = 'cross_encoder'; each positive is compared with c.negatives passages
  c.cross_encoder = types.SimpleNamespace()
  # 'listwise': softmax cross-entropy of the positive; 'pointwise': binary, of each pair
  c.cross_encoder.loss = choice('listwise', 'pointwise')
  # labels of a new head: 1 (relevance) or 2 (irrelevant, relevant); an existing head keeps its
  # labels
  c.cross_encoder.labels = whole(1, least=1, most=2)
  # passages re-ranked for a dev query: its relevant ones, its negatives, then random ones
  c.cross_encoder.candidates = whole(20, least=1, most=10**6)
  # only the first queries of the dev split; 0: all
  c.cross_encoder.dev_queries = whole(500, least=0, most=10**9)

  # several data sets in one run: NAME = an entry of `task_table`; c.data.dir stays empty. Tasks are
  # numbered in sorted order of names
  c.tasks = types.SimpleNamespace()
  # batches (NIR-Prompt, Table 13): 'alternate', from one task, in turn; 'random_task', from one
  # task, in random order; 'balanced', equal rows of each task; 'random', rows of all tasks shuffled
  c.arrangement = choice('alternate', 'random_task', 'balanced', 'random')
  # examples of a task in an epoch; large sets continue in the next epoch, small ones repeat; 0: the
  # size of the smallest set
  c.per_task = whole(0, least=0, most=10**9)

  # for c.method = 'nir_retriever' and 'nir_reranker' (NIR-Prompt): the template around each text
  c.template = types.SimpleNamespace()
  # slots P1, P2, P3: 'continuous', learned vectors; 'manual', words of c.tasks.NAME.words;
  # 'hybrid', for pairs, only P3 in words; 'none', empty
  c.template.kind = choice('continuous', 'manual', 'hybrid', 'none')
  c.template.text = text('[CLS] P1 text P2 [MASK] [SEP]')  # of a query or passage
  # of a pair
  c.template.pair = text('[CLS] P1 first [SEP] P2 second [SEP] P3 [MASK] [SEP]')
  c.template.lengths = several(6, 6, 7)  # of P1, P2, P3, in vectors
  # layers whose inputs keep the learned vectors unchanged; 0: none; -1: all but the last
  c.template.fixed_layers = whole(-1, least=0, most=1000, also=-1)
  c.template.verbalizer = several('yes', 'no')  # answers at [MASK] of a pair; one token each
  # the score of a pair: 'logit', logit(yes) - logit(no), as in the released code; 'probability',
  # P(yes) - P(no), as in the paper
  c.template.score = choice('logit', 'probability')

  # candidates for a choice by held-out queries: NAME = the options that differ
  c.alternatives = types.SimpleNamespace()

  # for the same methods and a new task: its prompt is a weighted sum of trained prompts
  c.adapt = types.SimpleNamespace()
  c.adapt.fusion = switch(False)  # False: new prompt encoders, or the prompt file
  # prompt files of trained tasks or their folders, separated by commas; '': the folder prompts
  # beside the backbone
  c.adapt.prompts = text('')

  # devices along each axis; -1: all remaining ones
  c.mesh = types.SimpleNamespace()
  c.mesh.data = whole(-1, least=1, most=10**6, also=-1)
  c.mesh.fsdp = whole(1, least=1, most=10**6, also=-1)
  c.mesh.model = whole(1, least=1, most=10**6, also=-1)

  c.eval = types.SimpleNamespace()
  # updates between evaluations; 0: see c.eval.epochs
  c.eval.every = whole(0, least=0, most=10**9)
  c.eval.epochs = number(1.0, above=0, most=1e6)  # epochs between evaluations
  c.eval.measure = text('nDCG@10')  # chooses the best checkpoint
  # passages searched: those of the dev queries and a sample, up to this many; 0: all
  c.eval.corpus_limit = whole(0, least=0, most=10**12)
  # choose among frozen encoder, trained models, BM25 and fusions with BM25 (docs/choosing.md)
  c.eval.choose = switch(False).only(optional=True, tasks=(), eval__measure='nDCG@10')
  c.eval.batch_size = whole(64, least=1, most=2**20)  # texts encoded at a time
  # skip training if the initial score is too high for a significant gain (docs/how-to-tune.md)
  c.eval.skip_saturated = switch(True)
  # evaluations without a gain before the run stops; 0: never
  c.eval.patience = whole(0, least=0, most=10**9)

  c.checkpoint = types.SimpleNamespace()
  # updates between checkpoints; 0: once an epoch
  c.checkpoint.every = whole(0, least=0, most=10**9)
  c.checkpoint.keep = whole(2, least=1, most=10**6)  # latest checkpoints kept, besides the best
  c.log_every = whole(10, least=1, most=10**9)  # updates between console lines
  c.log = types.SimpleNamespace()
  # beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, separated by commas; '': none
  c.log.to = text('tensorboard')
  c.log.project = text('dprjax')  # of wandb, mlflow (its experiment) and trackio
  c.log.name = text('')  # name of the run there; '': the name of the workdir
  # folder for compiled programs, kept between runs; 'auto': below ~/.cache/dprjax; '': none
  c.compilation_cache = text('auto')
  return c


def task_table() -> types.SimpleNamespace:
  """The options of an entry of ``config.tasks``."""
  t = types.SimpleNamespace()
  # 'retrieval': queries and passages; 'pairs': two texts and a label
  t.form = choice('retrieval', 'pairs')
  # for 'nir_retriever' and 'nir_reranker': the task prompt file, kept fixed; '': a new prompt
  t.prompt = text('')
  # words of P1, P2, ... around each text, for c.template.kind = 'manual'; (): the words of the
  # paper, for 'retrieval', 'qa', 'dialogue', 'paraphrase' and 'inference'
  t.words = types.SimpleNamespace()
  t.words.query, t.words.passage, t.words.pair = phrases(), phrases(), phrases()
  # on the dev split: for a ranking, such as 'RR@10'; for pairs 'accuracy' or 'F1'
  t.measure = text('RR@10')
  # as in c.data, which has the settings shared by all tasks; prefixes precede first and second
  # texts
  shared = vars(table().data)
  t.data = types.SimpleNamespace(**{name: shared[name] for name in TASK_DATA})
  return t
