"""Topic-DPR: a prompt for every topic, and losses over documents that share a category.

Without ``config.topics.path`` the encoder has one ordinary prompt, or none: the baselines of the
paper, with the same positives. With ``config.topics.words`` the topic words precede both texts, and
there is no prompt (Table 2).
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from dprjax.base import hashes, tree
from dprjax.base import mesh as meshes
from dprjax.base.errors import InputError
from dprjax.losses import contrastive
from dprjax.losses.grad_cache import embed_chunked
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models import hub
from dprjax.models.adapter import SUBTREE, Adapter
from dprjax.models.adapters import prefix
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.topic_dpr import topic, topic_losses, topic_models
from dprjax.text import sources, token_cache, vector_spec
from dprjax.text.qrels import Qrels
from dprjax.text.tokenizing import Tokenizer, load_tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import dual_encoder, retrieval_data
from dprjax.training.method import BatchShapes, DataSource, Method, Model, Parts, Product

_KEPT = 'topics.npz'  # in the workdir
_CATEGORIES = 8  # of a document in a plan; the cost hardly depends on this


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  check_options(config, devices)
  dual_encoder.check_pooling(config, model)
  settings, spec = config.topics, vector_spec.of_config(config)
  prompted = bool(settings.path) and not settings.words
  encoders = dual_encoder.build(config, model, devices)
  options = dual_encoder.encoder_options(config, devices)
  chunks = config.grad_cache

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    if not prompted:
      return encoders.init(parts, key)
    topics = parts.text['topics']
    rows = word_tokens(topics, tokenizer, config.prompt.length)
    words = parts.encoder['embeddings']['word']['embedding'][rows]
    return {
      'backbone': parts.encoder,
      SUBTREE: topic.init(config, model, key),
      # The initial embeddings, which are not trained.
      'topics': {'words': words.astype(np.float32)},
    }

  def expand(params: Params) -> Adapter | None:
    """One adapter for all texts, or a bank with one for each topic."""
    if not prompted or SUBTREE not in params:
      return encoders.adapters(params)['query']
    words = params['topics']['words'].astype(jnp.float32)
    prefixes = topic.expand(model, params[SUBTREE], words)
    count, length, _ = words.shape
    shift = length if config.prompt.shift_positions else 0
    if count == 1:  # a shared prefix is faster than a bank
      return Prefix(prefixes[:, 0], shift=shift)
    lengths, shifts = (jnp.full(count, number, jnp.int32) for number in (length, shift))
    return Prefix(prefixes, lengths, shifts)

  def encode(
    params: Params,
    adapter: Adapter | None,
    tokens: Int[Array, 'B T'],
    mask: Array,
    numbers: Int[Array, 'B ...'],
    key: Array | None,
  ) -> Float[Array, 'B H']:
    if settings.words:
      tokens, mask = put_before(tokens, mask, numbers)
    dropout_key, drawn = None, options
    if key is not None:
      dropout_key, _ = jax.random.split(key)
      if topic_count(adapter) == 1:
        drawn = dual_encoder.example_dropout(config, adapter, options)
    if adapter is not None and topic_count(adapter) > 1:
      adapter = adapter.choose(numbers)
    return embed_text(
      model,
      params['backbone'],
      tokens,
      mask,
      spec,
      adapter=adapter,
      options=drawn,
      dropout_key=dropout_key,
    )

  def drop(adapter: Adapter | None, key: Array | None) -> Adapter | None:
    """Dropout shared by all texts; in a bank, a mask for each topic."""
    if adapter is None or topic_count(adapter) == 1:
      return dual_encoder.batch_dropout(config, adapter, key)
    if key is None or not config.prompt.dropout:
      return adapter
    return adapter.drop(config.prompt.dropout, jax.random.split(key)[1])

  def embed_rows(
    params: Params, adapter: Adapter | None, rows: Sequence[Array], key: Array | None
  ) -> Float[Array, 'B C H']:
    with_prompts = functools.partial(encode, params, drop(adapter, key))
    return embed_chunked(with_prompts, rows, key, chunks, devices)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    adapter = expand(params)
    keys = (None,) * 3 if key is None else tuple(jax.random.split(key, 3))
    passages = batch['passage_tokens'], batch['passage_mask'], batch['passage_number']
    # A training query has the topic of its document, as published.
    queries = batch['query_tokens'][:, None], batch['query_mask'][:, None], passages[2]
    q = embed_rows(params, adapter, queries, keys[0])[:, 0]
    p = embed_rows(params, adapter, passages, keys[1])[:, 0]
    alpha, count = settings.alpha, topic_count(adapter)
    topic_topic = jnp.zeros((), jnp.float32)
    if alpha and count > 1 and settings.topic_topic:
      # Evenly spaced rows, equally many on every device.
      every = len(q) // (settings.batch or len(q))
      tokens, mask = (jnp.repeat(array[::every], count, axis=1) for array in passages[:2])
      every_topic = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), tokens.shape[:2])
      under_all = embed_rows(params, adapter, (tokens, mask, every_topic), keys[2])
      topic_topic = topic_losses.topic_topic_loss(under_all, devices, margin=settings.margin)
    qp, qq, accuracy = topic_losses.document_losses(
      q,
      p,
      batch['categories'],
      batch['passage_index'],
      batch['relevant'],
      devices,
      temperature=config.temperature,
    )
    query_passage, query_query = jnp.mean(qp), jnp.mean(qq)
    value = (1 - 2 * alpha) * query_passage + alpha * query_query + alpha * topic_topic
    return value, {
      'query_passage': query_passage,
      'query_query': query_query,
      'topic_topic': topic_topic,
      'accuracy': jnp.mean(accuracy),
    }

  def embed(
    params: Params, side: str, tokens: Array, mask: Array, numbers: Array
  ) -> Float[Array, 'B H']:
    return encode(params, expand(params), tokens, mask, numbers, None)

  shown = {'accuracy': 'in-batch accuracy', 'query_query': 'qq', 'topic_topic': 'tt'}
  return Model(init, loss, embed, shown, dual_encoder.without_adapter)


def check_options(config: ConfigDict, devices: Mesh) -> None:
  settings = config.topics
  contrastive.check_update(config)
  prompt, prompted = config.prompt, settings.path and not settings.words
  if prompted and not (prompt.length and prompt.reparam == 'none' and not prompt.init_from):
    raise InputError(
      f'config.topics.path: {settings.path} has prompts that start from words; set '
      "config.prompt.length above 0, config.prompt.reparam='none' and no config.prompt.init_from"
    )
  update = config.batch_size
  parts = config.grad_cache * meshes.batch_devices(devices)
  if settings.batch and (update % settings.batch or settings.batch % parts):
    raise InputError(
      f'config.topics.batch: {settings.batch} must divide the {update} rows of an update and be a '
      f'multiple of {parts} (devices by chunks)'
    )


def put_before(
  tokens: Int[Array, 'B T'], mask: Array, words: Int[Array, 'B W']
) -> tuple[Int[Array, 'B T+W'], Array]:
  """Words before each text, after its first special token (section 5.1)."""
  return (
    jnp.concatenate([tokens[:, :1], words, tokens[:, 1:]], axis=1),
    jnp.concatenate([mask[:, :1], jnp.ones(words.shape, mask.dtype), mask[:, 1:]], axis=1),
  )


def topic_count(adapter: Adapter | None) -> int:
  return len(adapter.lengths) if isinstance(adapter, Prefix) and adapter.lengths is not None else 1


def word_tokens(
  topics: topic_models.Topics,
  tokenizer: Tokenizer,
  length: int,
  option: str = 'config.prompt.length',
) -> Int[np.ndarray, 'K P']:
  """The first P tokens of the concatenated words of each topic."""
  rows = []
  for number, words in enumerate(topics.names):
    pieces, _ = tokenizer.encode([' '.join(words)], 10**6)
    inner = [token for token in pieces[0].tolist() if token not in tokenizer.special_ids]
    if len(inner) < length:
      raise InputError(
        f'{option}: topic {number} ({", ".join(words[:3])}, ...) has {len(inner)} tokens of words, '
        f'fewer than {length}; use topics with more words, or a smaller value'
      )
    rows.append(inner[:length])
  return np.array(rows, np.int32)


def find_data(
  section: ConfigDict, config: ConfigDict, workdir: epath.Path, devices: Mesh
) -> DataSource:
  """Titles, abstracts and categories; see ``Method.data``. Fits or reads the topics."""
  data = retrieval_data.find_splits(
    section, config, workdir, devices, kind=TopicData, categories=True
  )
  if not config.topics.path:
    return data.texts()
  path = workdir / _KEPT
  roles = {}
  if config.topics.path in topic_models.KINDS:
    if path.exists():
      topics = topic_models.load_topics(path)
    else:
      settings = topic_models.TopicSettings(kind=config.topics.path, seed=config.seed)
      if config.topics.keep:
        settings = settings._replace(topics=config.topics.keep)
      topics = topic_models.fit(
        topic_models.choose(data.read_passages()), settings, where=section.dir
      ).topics
  else:
    roles = {'config.topics.path': epath.Path(config.topics.path)}
    topics = topic_models.load_topics(config.topics.path)
  topics = keep(topics, config.topics.keep)
  topics.check_shares(list(itertools.islice(data.read_passages(), 1000)), section.dir)
  if jax.process_index() == 0 and not path.exists():
    topic_models.save_topics(path, topics)
  texts = dataclasses.replace(data, topics=topics).texts({'topics': topics})
  return texts._replace(files={**texts.files, **roles})


@dataclasses.dataclass(frozen=True)
class TopicData(retrieval_data.Retrieval):
  topics: topic_models.Topics | None = None

  def assign(
    self, source: sources.Source, tokens: token_cache.TokenCache, tokenizer: Tokenizer
  ) -> Mapping[str, np.ndarray]:
    """The topics of texts in a split, or the words before them; zeros without topics.

    The words of a query decide its topic, since the topic of the document would leak the answer.
    Random topics depend on the id, so that a title and its abstract agree.
    """
    topics, settings, seed = self.topics, self.config.topics, self.config.seed
    if topics is None:
      sizes = zip(SIDES, (tokens.num_queries, tokens.num_passages), strict=True)
      return {side: np.zeros(size, np.int32) for side, size in sizes}
    dataset = sources.load_dataset(source)
    numbers = {}
    for side, texts, ids in (
      ('query', dataset.queries, tokens.query_ids(np.arange(tokens.num_queries))),
      ('passage', dataset.passages, tokens.passage_ids(np.arange(tokens.num_passages))),
    ):
      if settings.random_words:
        numbers[side] = random_words(topics, tokenizer, settings.words, ids, seed)
        continue
      if settings.random_topics:
        assigned = random_topics(topics, ids, seed)
      else:
        by_id = {text.id: text.text for text in texts}
        assigned = topics.assign([by_id[id_] for id_ in ids])
      if settings.words:
        assigned = word_tokens(topics, tokenizer, settings.words, 'config.topics.words')[assigned]
      numbers[side] = assigned
    return numbers

  def relate(self, judged: Qrels, relevant: Qrels, passage_ids: Sequence[str]) -> Qrels:
    """All passages that share a category with the document of a query are relevant.

    The document is the passage with the query id, or else the only relevant passage, if any.
    """
    categories = sources.load_dataset(self.dev or self.train).read_categories()
    members: dict[str, list[str]] = {}
    for id_ in passage_ids:
      for category in categories[id_]:
        members.setdefault(category, []).append(id_)
    related = {}
    for query, grades in relevant.items():
      positives = [id_ for id_, grade in judged[query].items() if grade > 0 and id_ in categories]
      documents = [query] if query in positives else positives
      shared = categories[documents[0]] if len(documents) == 1 else ()
      others = (id_ for category in shared for id_ in members.get(category, ()))
      related[query] = dict.fromkeys(others, 1) | grades
    return related

  def check_negatives(self, tokens: token_cache.TokenCache) -> None:
    assert tokens.categories is not None
    rows = np.split(tokens.categories.flat, tokens.categories.starts[1:])
    different = {frozenset(row.tolist()) for row in rows} - {frozenset()}
    if all(first & second for first, second in itertools.combinations(different, 2)):
      raise InputError(
        f'{tokens.path}: all pairs of documents share a category, so there are no negatives; add '
        'documents of other categories'
      )


def keep(topics: topic_models.Topics, count: int) -> topic_models.Topics:
  if not count or count == len(topics):
    return topics
  return dataclasses.replace(
    topics,
    names=topics.names[:count],
    sizes=topics.sizes[:count],
    distributions=topics.distributions[: 1 + count],
  )


def random_words(
  topics: topic_models.Topics, tokenizer: Tokenizer, length: int, ids: Sequence[str], seed: int
) -> Int[np.ndarray, 'n W']:
  """Tokens of words that each document draws from the vocabulary, by its id."""
  encoded = tokenizer.encode_bare(topics.vocabulary)
  pieces = [row for row in encoded.values() if len(row)]
  rows = np.zeros((len(ids), length), np.int32)
  for row, id_ in zip(rows, ids, strict=True):
    rng = np.random.default_rng(int.from_bytes(hashes.draw(id_, seed, 'random words')))
    drawn = rng.permutation(len(pieces))[:length].tolist()
    row[:] = np.concatenate([pieces[i] for i in drawn])[:length]
  return rows


def random_topics(
  topics: topic_models.Topics, ids: Sequence[str], seed: int
) -> Int[np.ndarray, ' n']:
  """A topic for each document, drawn by its id in proportion to topic sizes."""
  chances = np.array([hashes.fraction(id_, seed, 'random topics') for id_ in ids])
  shares = np.cumsum(topics.sizes) / topics.sizes.sum()
  return np.searchsorted(shares[:-1], chances, side='right').astype(np.int32)


def export(
  config: ConfigDict, workdir: epath.Path, backbone: hub.Backbone, trained: Mapping[str, np.ndarray]
) -> Product:
  if config.topics.random_topics:
    raise InputError(
      'config.topics.random_topics: topics are random (a control run) and cannot be inferred '
      'from text, so this is not exported'
    )
  product = dual_encoder.export(
    config,
    workdir,
    backbone,
    trained
    if not config.topics.path or config.topics.words
    else dual_encoder.without_adapter(trained),
  )
  if config.topics.words:  # words add to the length of texts
    encoders = {
      name: {**checkpoint, 'spec': checkpoint['spec'].longer(config.topics.words)}
      for name, checkpoint in product.encoders.items()
    }
    return product._replace(encoders=encoders)
  if not config.topics.path or not dual_encoder.trains(trained, SUBTREE):
    return product
  topics = topic_models.load_topics(workdir / _KEPT)
  rows = word_tokens(topics, load_tokenizer(backbone.path), config.prompt.length)
  words = np.asarray(backbone.params['embeddings']['word']['embedding'])[rows].astype(np.float32)
  prefixes = topic.expand(backbone.config, tree.unflatten(trained)[SUBTREE], words)
  return product._replace(
    prompt={'prefix': np.moveaxis(np.asarray(prefixes), 1, 0), **topics.arrays()},
    meta=dual_encoder.meta_of(config, vector_spec.of_config(config), topic.ADAPTER.name)
    | prefix.meta_of(config),
  )


def shapes(config: ConfigDict, model: EncoderConfig, tokenizer: Tokenizer) -> BatchShapes:
  """See ``Method.shapes``. Topics not fitted yet count with the number to keep."""
  settings = config.topics
  batch = retrieval_data.batch_shapes(config, model, tokenizer)
  size = config.batch_size
  width = (settings.words,) if settings.words else ()
  numbers = {
    'query_number': jax.ShapeDtypeStruct((size, *width), np.int32),
    'passage_number': jax.ShapeDtypeStruct((size, 1, *width), np.int32),
    'categories': jax.ShapeDtypeStruct((size, _CATEGORIES), np.int32),
  }
  batch = batch._replace(
    arrays={**batch.arrays, **numbers},
    calls=tuple((rows, length + settings.words) for rows, length in batch.calls),
    columns=((np.int32, *width),),
  )
  if not settings.path or settings.words:
    return batch
  count = settings.keep or topic_models.TopicSettings().topics
  if settings.path not in topic_models.KINDS:
    count = len(keep(topic_models.load_topics(settings.path), settings.keep))
  if count > 1 and settings.alpha and settings.topic_topic:
    some = (settings.batch or size) * count
    batch = batch._replace(calls=(*batch.calls, (some, batch.calls[1][1])))
  # Placeholder words for any tokenizer.
  topics = topic_models.Topics(
    {},
    [['yes'] * config.prompt.length] * count,
    np.ones(count, np.int64),
    ['yes'],
    np.ones((1 + count, 1), np.float32),
  )
  return batch._replace(parts={'topics': topics})


METHOD = Method(
  build,
  find_data,
  export,
  options={build: ('grad_cache', 'prompt.length')},
  requires={'negatives': 0, 'normalize': True, 'in_batch': True},
  shapes=shapes,
)
