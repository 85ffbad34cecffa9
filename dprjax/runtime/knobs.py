"""The knobs of an experiment, all of them: what each changes, and what it may be."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SET: Any = object()
"""In ``Knob.requires``: any value that an option has when it is used."""


class Knob(NamedTuple):
  """A knob's first value, and whether it may have another.

  Attributes:
    value: the first one.
    fits, expected: whether it may be another, and what it may be, in words.
    optional: whether methods must declare it, `Method.options`, to have it; without them it stays
      as it is.
    requires: where it is not at its first value, other options by their full names, and what these
      have to be: `SET`, or a value. False, 0 and () stand for an option that is not used.
  """

  value: Any
  fits: Callable[[Any], bool]
  expected: str
  optional: bool = False
  requires: Mapping[str, Any] = types.MappingProxyType({})

  def only(self, optional: bool = False, **requires: Any) -> 'Knob':
    """This knob with rules; ``prompt__length=SET`` requires ``prompt.length``."""
    rules = {name.replace('__', '.'): value for name, value in requires.items()}
    return self._replace(optional=optional, requires=rules)


def text(value: str) -> Knob:
  """Any text without control characters."""
  return Knob(value, lambda v: isinstance(v, str) and v.isprintable(), 'a text on one line')


def choice(*values: str) -> Knob:
  """One of some words; the first is the default."""
  return Knob(values[0], lambda v: v in values, ' or '.join(map(repr, values)))


def switch(value: bool) -> Knob:
  """True or False."""
  return Knob(value, lambda v: isinstance(v, bool), 'True or False')


def whole(value: int, *, least: int, most: int, also: int | None = None) -> Knob:
  """A whole number from ``least`` to ``most``, or ``also``."""
  return Knob(
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
) -> Knob:
  """A number within bounds, of which ``above`` and ``below`` are outside; or ``also``."""

  def fits(v: Any) -> bool:
    if not isinstance(v, int | float) or isinstance(v, bool):
      return False
    low = v > above if above is not None else v >= (least or 0)
    high = v < below if below is not None else most is not None and v <= most
    return (low and high) or (also is not None and v == also)

  low = f'above {above:g}' if above is not None else f'from {least or 0:g}'
  high = f'below {below:g}' if below is not None else f'up to {most:g}'
  return Knob(value, fits, f'a number {low} and {high}{"" if also is None else f", or {also:g}"}')


def several(*values: Any) -> Knob:
  """A tuple of such values; whoever uses them checks them further."""
  return Knob(values, lambda v: isinstance(v, tuple | list) and len(v) > 0, 'a tuple')


def phrases(*values: str) -> Knob:
  """A tuple of texts, which may be empty."""
  return Knob(
    values,
    lambda v: (
      isinstance(v, tuple | list)
      and len(v) <= 9
      and all(isinstance(text, str) and text.isprintable() and len(text) <= 1000 for text in v)
    ),
    'a tuple of at most 9 texts on one line',
  )


def lengths(*values: int) -> Knob:
  """Ascending lengths in tokens."""
  return Knob(
    values,
    lambda v: (
      isinstance(v, tuple | list)
      and len(v) > 0
      and all(isinstance(n, int) and 1 <= n <= 8192 for n in v)
      and list(v) == sorted(set(v))
    ),
    'ascending lengths from 1 to 8192',
  )


def descending(*values: int) -> Knob:
  """Descending numbers of dimensions; there may be none."""
  return Knob(
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
  'mined_negatives',
  'train_split',
  'dev_split',
  'hold_out',
  'max_queries',
  'strict',
  'query_prefix',
  'passage_prefix',
)
"""Knobs of ``config.data`` that each entry of ``config.tasks`` has for itself."""


def table() -> types.SimpleNamespace:
  """All knobs: a value to begin with, and what else it may be."""
  c = types.SimpleNamespace()
  # how to train: a module of dprjax/methods, or the full name of a module of your own
  c.method = text('dpr')
  c.task = text('')  # a name, written into the prompt's meta
  c.seed = whole(42, least=0, most=2**31 - 1)  # of initialisation, dropout and shuffling

  c.backbone = types.SimpleNamespace()
  # a Hugging Face directory or hub id; 'package:NAME' = the folder model/ in an installed package;
  # 'scratch:tiny|mini|small|base' = random weights and a vocabulary trained on the data
  c.backbone.path = text('')
  # of the vocabulary trained for a backbone from scratch
  c.backbone.vocab_size = whole(8000, least=100, most=10**6)
  # 'wordpiece' (uncased; a BERT) or 'sentencepiece' (cased, any language; an XLM-R)
  c.backbone.vocabulary = choice('wordpiece', 'sentencepiece')
  # one encoder each for queries and passages (DPR), or one for both
  c.backbone.two_encoders = switch(False).only(optional=True)
  # of the arithmetic: 'float32' or 'bfloat16'; scores and losses stay float32. 'auto': bfloat16 on
  # accelerators, float32 on processors. 'mixed': float32, but dense layers multiply factors rounded
  # to bfloat16: faster on processors with AMX
  c.backbone.dtype = choice('auto', 'float32', 'bfloat16', 'mixed')
  # 'fused': scores stay on the chip, by a kernel for TPUs, which a processor interprets, slowly;
  # 'library': jax.nn.dot_product_attention, on GPUs in bfloat16 cuDNN's, for long texts;
  # 'auto': fused on TPUs, else plain
  c.backbone.attention = choice('auto', 'plain', 'fused', 'library')
  # of frozen weights; trained ones are always float32
  c.backbone.frozen_dtype = choice('auto', 'float32', 'bfloat16')
  # hidden and attention dropout in training; -1: as in the backbone's config.json
  c.backbone.dropout = number(-1.0, least=0, below=1, also=-1)
  # recompute activations in the backward pass: less memory, a third more arithmetic
  c.backbone.remat = switch(False)
  # layers per step of the scan; 0: all of them, a faster step that takes longer to compile
  c.backbone.unroll = whole(1, least=0, most=1000)

  c.prompt = types.SimpleNamespace()
  # the kind of adapter that is trained: 'prefix', or one of your own (`models.adapter`)
  c.prompt.kind = text('prefix').only(optional=True, prompt__length=SET)
  # its size, of a prefix P, key/value vectors per layer; 0: none (full fine-tuning)
  c.prompt.length = whole(0, least=0, most=4096).only(optional=True)
  # 'query': passages are the bare backbone's, encoded once; then `tied` says nothing
  c.prompt.sides = choice('both', 'query').only(
    optional=True, prompt__length=SET, backbone__two_encoders=False, tasks=()
  )
  # one prompt for queries and passages, or one each
  c.prompt.tied = switch(True).only(optional=True)
  # 'none': the prompt itself is trained; 'mlp': Embedding -> Linear -> Tanh -> Linear (Table 5)
  c.prompt.reparam = choice('none', 'mlp')
  c.prompt.reparam_hidden = whole(512, least=1, most=10**5)  # width of that MLP
  # N(0, std) for the initial values of the prompt, or of its embedding and the MLP's kernels
  c.prompt.init_std = number(0.02, least=0, most=10)
  c.prompt.init_from = text('')  # start from this prompt.npz instead (Table 6)
  # the weight of the regularization to the frozen encoder: of how far the prompt leads away from
  # it; 0: none. It costs another forward pass, but not where `sides` is 'query'
  c.prompt.regularization = number(0.0, least=0, most=1e6).only(optional=True, prompt__length=SET)
  # of what: 'vectors', their mean squared distance; 'scores', the divergence of a query's softmax
  # over its positive and negatives from the frozen encoder's
  c.prompt.regularization_on = choice('vectors', 'scores')
  c.prompt.dropout = number(0.1, least=0, below=1)  # on the expanded prompt, in training
  # 'example': a mask for each, as in the released code; 'batch': one mask for all
  c.prompt.dropout_scope = choice('example', 'batch')
  c.prompt.shift_positions = switch(False)  # tokens count from P, as the released prompts expect

  c.trainable = several('prompt/.*')  # whole-name regular expressions; everything else is frozen
  # 'cls', 'mean', 'lasttoken', or another one of `models.pooling`; of nir_retriever 'mask', 'cls',
  # or 'mean', which is over the text's own tokens
  c.pooling = text('cls')
  c.normalize = switch(False)  # unit length, so that scores are cosines
  c.temperature = number(1.0, above=0, most=1e4)  # scores are divided by it
  c.in_batch = switch(True)  # other rows' passages are negatives too, over all devices
  # queries (in pretraining: texts) that a device scores at a time; it bounds the loss's memory
  c.loss_rows = whole(1024, least=1, most=2**20)
  # Matryoshka: lengths that vectors can be cut to afterwards, (384, 256, 128, 64) say; the loss is
  # the mean over them and the whole vector. (): it is of whole vectors alone
  c.matryoshka = descending().only(optional=True)
  # which of a query's positives: 'rotate', the next one in each epoch; 'first', always the first
  c.positive = choice('rotate', 'first')
  c.negatives = whole(1, least=0, most=4096)  # hard negatives per query; 0: in-batch negatives only
  # where c.prompt.sides is 'query', more negatives of every query: 0: none; a number: passages that
  # are drawn for each update; -1: the whole corpus, which is kept on every device
  c.corpus_negatives = whole(0, least=0, most=2**20, also=-1).only(prompt__sides='query')
  # the fraction of hard negatives from each pool; they add up to 1
  c.mix = types.SimpleNamespace()
  c.mix.denoised = number(0.0, least=0, most=1)  # of mined negatives that a reranker passed
  # of all mined negatives, and of those in a file that names no pools
  c.mix.undenoised = number(1.0, least=0, most=1)
  c.mix.random = number(0.0, least=0, most=1)  # of passages drawn from the whole corpus

  # for c.method = 'dpr': scores of a cross-encoder to learn from, of each query's own passages
  c.distillation = types.SimpleNamespace()
  # 'margin_mse', on the positive's score less each negative's; 'kl', on the softmax over the list
  c.distillation.loss = choice('none', 'margin_mse', 'kl').only(
    optional=True, negatives=SET, tasks=()
  )
  # a run of dprjax.rerank, or a jsonl of dprjax.mine with scores; '': c.data.mined_negatives
  c.distillation.scores = text('')
  c.distillation.weight = number(1.0, above=0, most=1)  # of this loss; the rest is InfoNCE's
  c.distillation.temperature = number(1.0, above=0, most=1e4)  # the teacher's scores by it

  c.batch_size = whole(64, least=1, most=2**20)  # queries per batch, over all devices
  # batches per update: the loss sees the negatives of all of them, memory holds one
  c.accumulate = whole(1, least=1, most=2**16)
  # chunks that a batch is encoded in: the memory of one chunk, the loss of the whole batch
  c.grad_cache = whole(1, least=1, most=2**16)
  c.epochs = number(10.0, least=0, most=1e6)  # passes over the training queries
  c.steps = whole(0, least=0, most=10**9)  # updates; if above 0, it replaces epochs

  # decay a step of an exponential moving average of the trained parameters, which is what is scored
  # on the dev split and exported; step t has at most (1 + t) / (10 + t). 0: no average
  c.ema = number(0.0, least=0, below=1)
  # training examples that the start of the trained parameters counts as: what is scored and
  # exported lies n / (n + this) of the way from it to where they are, with n in an epoch's updates
  c.weight_interpolation = number(0.0, least=0, most=1e9)

  c.optim = types.SimpleNamespace()
  c.optim.learning_rate = number(7e-3, least=0, most=100)
  c.optim.warmup = number(0.1, least=0, most=1)  # fraction of the steps
  c.optim.decay = choice('linear', 'cosine', 'none')  # 'linear', 'cosine' or 'none'
  # global norm of the trained parameters' gradient; 0: none
  c.optim.clip = number(1.0, least=0, most=1e9)
  c.optim.weight_decay = number(0.0, least=0, most=10)
  c.optim.b1 = number(0.9, least=0, below=1)
  c.optim.b2 = number(0.999, least=0, below=1)
  c.optim.eps = number(1e-8, above=0, most=1)
  # first match: does weight decay apply
  c.optim.weight_decay_rules = several((r'.*(bias|scale)', False), (r'.*', True))
  c.optim.learning_rate_rules = several((r'.*', 1.0))  # first match: factor on the learning rate

  c.data = types.SimpleNamespace()
  # beir, msmarco, dpr, tevatron, flagembedding, arxiv, docstrings, or auto: detect it
  c.data.format = text('auto')
  # the folder (or file) of the training text, or irds:ID, a data set of ir_datasets; for
  # docstrings: packages, separated by commas
  c.data.dir = text('')
  # a training jsonl with mined negatives, in Tevatron's format, for queries of data.dir
  c.data.mined_negatives = text('')
  c.data.train_split = text('train')  # qrels/NAME.tsv
  c.data.dev_split = text('')  # qrels/NAME.tsv for evaluation during training; '': see hold_out
  # fraction of the training queries held out as the dev split, by a hash of their ids
  c.data.hold_out = number(0.0, least=0, below=1)
  # where hold_out would leave too few to choose by: the training is run once for each of so many
  # parts of the training queries, which is held out and measured on, and then on all of them for as
  # many updates as were best in the mean; 0: never. A hold_out on the command line sets 0,
  # unless folds_below stands there too
  c.data.folds = whole(0, least=2, most=100, also=0).only(optional=True, tasks=())
  # training queries, for folds to be made; where the command line has folds alone, any number
  c.data.folds_below = whole(200, least=1, most=10**9)
  # the part that is held out, from 1; such trainings set it for themselves; 0: none
  c.data.fold = whole(0, least=0, most=100)
  # training queries used, chosen by a hash of their ids; 0: all. Of a task so many dev queries, at
  # most, and of labelled pairs so many of each label
  c.data.max_queries = whole(0, least=0, most=10**12)
  # the passages' categories come with the batch (beir, arxiv, docstrings); one without any is never
  # a positive
  c.data.categories = switch(False)
  c.data.strict = switch(False)  # unknown ids in qrels are an error, and not only counted
  c.data.query_max_length = whole(32, least=3, most=8192)  # tokens, special ones included
  c.data.passage_max_length = whole(128, least=3, most=8192)
  c.data.query_prefix = text('')  # text put before every query
  c.data.passage_prefix = text('')
  c.data.query_buckets = lengths(16, 32, 64, 128, 256, 512)  # padded lengths that a batch may have
  c.data.passage_buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  # relevant passages listed per query, to mask false negatives
  c.data.max_relevant = whole(32, least=1, most=10**5)
  c.data.store = text('')  # the folder of tokenised text; '': workdir/store
  # where c.prompt.sides is 'query': embeddings of the passages by the bare backbone, a folder of
  # dprjax.encode, or NAME.npy with an id a line in NAME.txt; '': they are made in workdir/passages
  c.data.passage_embeddings = text('').only(prompt__sides='query')
  c.data.threads = whole(2, least=0, most=256)  # that prepare batches ahead

  # for c.method = 'pretrain'; c.data.dir then lists files and folders, separated by commas
  c.pretrain = types.SimpleNamespace()
  # texts of a passage: 'one'; 'siblings': two units of it; 'ict': a sentence and the rest
  c.pretrain.views = choice('one', 'siblings', 'ict')
  # what siblings are: 'sentence' (RIP) or 'span' (coCondenser); DPTDR Table 7 has both under
  # coCondenser
  c.pretrain.unit = choice('sentence', 'span')
  c.pretrain.span_length = whole(64, least=1, most=8192)  # tokens of a span, at most
  c.pretrain.max_length = whole(128, least=3, most=8192)  # tokens of a text, special ones included
  # padded lengths that a batch may have
  c.pretrain.buckets = lengths(32, 64, 96, 128, 192, 256, 384, 512)
  # tokens of whole sentences that longer documents are cut into
  c.pretrain.passage_length = whole(256, least=1, most=10**6)
  c.pretrain.language = text('en')  # its rules split sentences
  # fraction of tokens that masked language modelling hides, in whole words
  c.pretrain.mask_rate = number(0.15, above=0, below=1)
  # of the masked-token losses; 0: none, and nothing is masked
  c.pretrain.mlm_weight = number(1.0, least=0, most=1e6)
  # the last layer's masked-token loss; False leaves it to the Condenser head
  c.pretrain.late_mlm = switch(True)
  # of the contrastive loss, where a passage has two texts
  c.pretrain.contrast_weight = number(1.0, least=0, most=1e6)
  # of the Condenser head; 0: no head
  c.pretrain.head_layers = whole(0, least=0, most=100).only(pretrain__mlm_weight=SET)
  # the layer whose tokens the Condenser head sees; 0: L // 2
  c.pretrain.skip_from = whole(0, least=0, most=1000)

  # for c.method = 'topic_dpr': the positives of a document are those of its categories
  c.topics = types.SimpleNamespace()
  # topics.npz of dprjax.topics, whose words make a prompt each; or 'hlda' or 'lda': topics of the
  # training passages, found when the run begins; '': none
  c.topics.path = text('')
  c.topics.keep = whole(0, least=0, most=1000)  # of its topics, the largest ones; 0: all
  # whose topic a training query has: that of its 'document', as published, or its 'own'
  c.topics.query = choice('document', 'own')
  c.topics.alpha = number(0.1, least=0, below=0.5)  # of the query-query and topic-topic losses
  c.topics.margin = number(0.1, least=0, most=2)  # of the topic-topic loss
  # rows of a batch that the topic-topic loss encodes under every prompt; 0: all
  c.topics.batch = whole(0, least=0, most=2**20)
  c.topics.topic_topic = switch(True)  # whether there is that loss at all
  # tokens of the words of a text's topic that stand before it, in place of prompts; 0: none
  c.topics.words = whole(0, least=0, most=512).only(topics__path=SET, prompt__length=0)
  # controls: the words are any of the topics' vocabulary, drawn for each document
  c.topics.random_words = switch(False).only(topics__words=SET)
  # topics dealt to documents, as many of each
  c.topics.random_topics = switch(False).only(topics__path=SET, topics__random_words=False)

  # for c.method = 'cross_encoder'; each positive is compared with c.negatives passages
  c.cross_encoder = types.SimpleNamespace()
  # 'listwise': softmax cross-entropy of the positive among its negatives; 'pointwise': binary, of
  # each pair
  c.cross_encoder.loss = choice('listwise', 'pointwise')
  # of a new head: 1 (relevance) or 2 (irrelevant, relevant); an existing head keeps its own
  c.cross_encoder.labels = whole(1, least=1, most=2)
  # passages re-ranked for a dev query beside its relevant ones: its negatives, then random ones
  c.cross_encoder.candidates = whole(20, least=1, most=10**6)
  # the first ones of the dev split; 0: all
  c.cross_encoder.dev_queries = whole(500, least=0, most=10**9)

  # several data sets in one run: NAME = an entry of `task_table`; then c.data.dir stays empty. A
  # task's number is its place among the names in sorted order
  c.tasks = types.SimpleNamespace()
  # how batches are made of them (NIR-Prompt, Table 13): 'alternate', of one task each in turn;
  # 'random_task', of one task each in a random order; 'balanced', as many rows of each task;
  # 'random', rows of all tasks shuffled
  c.arrangement = choice('alternate', 'random_task', 'balanced', 'random')
  # examples of a task in an epoch: large sets go on in the next epoch, small ones begin again; 0:
  # as many as the smallest set has
  c.per_task = whole(0, least=0, most=10**9)

  # for c.method = 'nir_retriever' and 'nir_reranker' (NIR-Prompt): what stands around each text
  c.template = types.SimpleNamespace()
  # what the segments P1, P2, P3 are: 'continuous', learned vectors; 'manual', the words of
  # c.tasks.NAME.words; 'hybrid', of pairs, with P3 in words; 'none', nothing
  c.template.kind = choice('continuous', 'manual', 'hybrid', 'none')
  c.template.text = text('[CLS] P1 text P2 [MASK] [SEP]')  # a query's form, and a passage's
  # a pair's form
  c.template.pair = text('[CLS] P1 first [SEP] P2 second [SEP] P3 [MASK] [SEP]')
  c.template.lengths = several(6, 6, 7)  # of P1, P2, P3, in vectors
  # layers whose inputs hold the learned vectors unchanged; 0: none; -1: all but the last
  c.template.fixed_layers = whole(-1, least=0, most=1000, also=-1)
  c.template.verbalizer = several('yes', 'no')  # the answers at [MASK] of a pair; one token each
  # a pair's score: 'logit', logit(yes) - logit(no), as in the released code; 'probability',
  # P(yes) - P(no), as in the paper
  c.template.score = choice('logit', 'probability')

  # experiments of which held-out queries choose one: NAME = the knobs that differ from these
  c.alternatives = types.SimpleNamespace()

  # for the same methods and a task that is new: its prompt is a weighted sum of trained ones
  c.adapt = types.SimpleNamespace()
  c.adapt.fusion = switch(False)  # False: its own prompt encoders, or its prompt's file
  # the trained tasks' prompt files or folders of them, separated by commas; '': the folder prompts
  # beside the backbone
  c.adapt.prompts = text('')

  # devices along each axis; -1: all remaining ones
  c.mesh = types.SimpleNamespace()
  c.mesh.data = whole(-1, least=1, most=10**6, also=-1)
  c.mesh.fsdp = whole(1, least=1, most=10**6, also=-1)
  c.mesh.model = whole(1, least=1, most=10**6, also=-1)

  c.eval = types.SimpleNamespace()
  # updates between evaluations on the dev split; 0: see c.eval.epochs
  c.eval.every = whole(0, least=0, most=10**9)
  c.eval.epochs = number(1.0, above=0, most=1e6)  # epochs between evaluations
  c.eval.measure = text('nDCG@10')  # decides which checkpoint is best
  # passages searched: the dev queries' own and a sample up to this many; 0: all
  c.eval.corpus_limit = whole(0, least=0, most=10**12)
  c.eval.batch_size = whole(64, least=1, most=2**20)  # texts encoded at a time
  # nothing is trained where the score before the training is so high that no gain could be told
  # from chance (docs/how-to-tune.md)
  c.eval.skip_saturated = switch(True)
  # evaluations without a gain before the run stops; 0: never
  c.eval.patience = whole(0, least=0, most=10**9)

  c.checkpoint = types.SimpleNamespace()
  # updates between checkpoints; 0: once an epoch
  c.checkpoint.every = whole(0, least=0, most=10**9)
  c.checkpoint.keep = whole(2, least=1, most=10**6)  # of the latest, beside the best
  c.log_every = whole(10, least=1, most=10**9)  # updates between console lines
  # a folder that keeps compiled programs between runs; 'auto': below ~/.cache/dprjax; '': none
  c.compilation_cache = text('auto')
  return c


def task_table() -> types.SimpleNamespace:
  """The knobs of an entry of ``config.tasks``, as ``table``."""
  t = types.SimpleNamespace()
  # 'retrieval': queries and passages; 'pairs': two texts and a label
  t.form = choice('retrieval', 'pairs')
  # for 'nir_retriever' and 'nir_reranker': the prompt file of the task, which stays as it is; '': a
  # new prompt, which is trained
  t.prompt = text('')
  # and the words of P1, P2, ... around each kind of text, for c.template.kind = 'manual'; (): those
  # of the paper's tables, for 'retrieval', 'qa', 'dialogue', 'paraphrase' and 'inference'
  t.words = types.SimpleNamespace()
  t.words.query, t.words.passage, t.words.pair = phrases(), phrases(), phrases()
  # of its dev split: a ranking's, 'RR@10' or 'nDCG@10' for instance; of pairs 'accuracy' or 'F1'
  t.measure = text('RR@10')
  # as in c.data, whose other knobs are the same for all tasks; the two prefixes stand before each
  # first and second text
  shared = vars(table().data)
  t.data = types.SimpleNamespace(**{name: shared[name] for name in TASK_DATA})
  return t
