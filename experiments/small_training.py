"""Trainings in memory for experiments/small_labels.py, by losses and updates of the recipes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import systems
from dprjax.base import tree
from dprjax.encoding.embedder import Embedder, place
from dprjax.losses import contrastive
from dprjax.models.embed import unit
from dprjax.text import tokenizing
from dprjax.training import dpr, train, updates
from dprjax.training.dual_encoder import Vectors
from dprjax.training.method import Parts

BATCH = 16
SCORED = (0.5, 1.0)  # parts of the updates
NEGATIVES, RELEVANT = 2000, 64  # of a query: passages of the corpus; judgements that are known
LENGTHS = {'query': 32, 'passage': 64}
RECIPES = {
  'linear': ('dptdr.py:beir,linear', ()),
  'query': ('dptdr.py:beir,query', ()),
  'lora': ('dptdr.py:beir,lora,query', ()),
  'both': ('dptdr.py:beir,both', ()),
  'query-text': ('dptdr.py:beir,query,text', ()),
  'both-text': ('dptdr.py:beir,both,text', ()),
  'ft': ('dptdr.py:beir,both', (*systems.FINE_TUNED, 'ema=0.0', 'weight_interpolation=0.0')),
}


class Tokens:
  """Token ids of texts with the prefix of their side, cut."""

  def __init__(self, tokenizer, prefixes):
    self.tokenizer, self._prefixes = tokenizer, prefixes
    self.pad_id = tokenizer.pad_id

  def __call__(self, side, texts):
    prefix = self._prefixes[side]
    return self.tokenizer.encode([prefix + one for one in texts], LENGTHS[side])[0]


class Trainer:
  """Trains a way in memory, by loss and update of the recipe."""

  def __init__(self, way, rate, steps, encoder, backbone, tokens, devices):
    recipe, options = RECIPES[way]
    self.way, self.steps, self.tokens = way, steps, tokens
    self.config = config = systems.parse(
      recipe,
      [
        'backbone.unroll=0',
        f'batch_size={BATCH}',
        f'steps={steps}',
        f'optim.learning_rate={rate}',
        *encoder.options,
        *options,
      ],
    )
    self.sides = ('query',) if config.prompt.sides == 'query' else ('query', 'passage')
    self.model = dpr.build(config, backbone.config, devices)
    if way == 'linear':
      self.model = self.model._replace(loss=self._loss_of_vectors(devices))
    self.backbone, self.devices = backbone, devices
    prompt = None
    if start := train.start_text(config, backbone.config):
      prompt = train.prompt_of_text(config, backbone, tokens.tokenizer, start)
    self._parts = Parts(backbone.params, prompt=prompt)
    params = tree.flatten(self.model.init(self._parts, jax.random.key(0)))
    self.trainable = tree.trainable_names(config.trainable, list(params))
    layout = updates.lay_out(config, params, self.trainable, devices, steps)
    self.frozen = layout.place(params)[1]

    def update(state, frozen, batch, key, number, interpolate):
      made = updates.make_update(self.model, layout._replace(interpolate=interpolate))
      return made(state, frozen, batch, key, number)

    self._update = jax.jit(update)
    self._embedders = {
      side: Embedder(
        functools.partial(self._embed, side), devices, 64, LENGTHS[side], tokens.pad_id
      )
      for side in self.sides
    }

  def _embed(self, side, params, *batch):
    return self.model.embed(tree.unflatten(params), side, *batch)

  def _loss_of_vectors(self, devices):
    """The loss of the recipe, for queries given as frozen vectors."""

    def loss(params, batch, key):
      change = params['prompt']['query']['change']
      rows = batch['query_tokens']
      frozen = Vectors(rows, batch['passage_vectors'])
      vectors = frozen._replace(query=unit(rows + rows @ change))
      corpus = contrastive.corpus(params, batch)
      return dpr.contrast(self.config, devices, batch, vectors, corpus, frozen)

    return loss

  def _initial(self, seed):
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return tree.flatten(self.model.init(self._parts, key))

  def start(self, seed):
    """The initial values of the trained parameters."""
    params = self._initial(seed)
    return {name: params[name] for name in self.trainable}

  def train(self, data, rows, seed):
    """Trained parameters by number of updates, on these rows of a set."""
    config = self.config
    params = self._initial(seed)
    layout = updates.lay_out(config, params, self.trainable, self.devices, self.steps, len(rows))
    state, _ = layout.place(params)
    frozen = dict(self.frozen)
    rng = np.random.default_rng([seed, len(rows)])
    if config.corpus_negatives:
      judged = np.unique(np.concatenate([[*data.grades[row]] for row in rows]))
      others = rng.permutation(np.setdiff1d(np.arange(len(data.ids)), judged))
      # One shape for all sets, so that the update is compiled once.
      drawn = np.resize(np.concatenate([judged, others]), NEGATIVES).astype(np.int32)
      frozen |= {
        contrastive.VECTORS: data.vectors['passage'][drawn],
        contrastive.ROWS: drawn,
      }
    tokens = self.tokens('query', data.queries)
    key, found, order = jax.random.key(seed), {}, np.zeros(0, int)
    wanted = {max(round(part * self.steps), 1) for part in SCORED}
    for step in range(1, self.steps + 1):
      if len(order) < BATCH:
        order = np.concatenate(
          [order, *(rng.permutation(rows) for _ in range(-(-BATCH // len(rows))))]
        )
      own, order = order[:BATCH], order[BATCH:]
      batch = self._batch(data, own, tokens, rng)
      state, _ = self._update(state, frozen, batch, key, step, np.float32(layout.interpolate))
      if step in wanted:
        found[step] = dict(state.model)
    return found

  def _batch(self, data, rows, tokens, rng):
    positives = np.array([rng.choice([*data.grades[row]]) for row in rows], np.int32)
    relevant = np.full((len(rows), RELEVANT), -1, np.int32)
    for number, row in enumerate(rows):
      known = [*data.grades[row]][:RELEVANT]
      relevant[number, : len(known)] = known
    batch = {'passage_index': positives[:, None], 'relevant': relevant}
    frozen = data.vectors['query'][rows]
    if self.way == 'linear':
      batch |= {'query_tokens': frozen, 'query_mask': np.ones(frozen.shape, bool)}
    else:
      batch |= self._padded('query', [tokens[row] for row in rows])
    if self.sides == ('query',):
      batch |= {
        'passage_vectors': data.vectors['passage'][positives][:, None],
        contrastive.FROZEN: frozen,
      }
    else:
      texts = [data.passages[row] for row in positives]
      padded = self._padded('passage', self.tokens('passage', texts))
      batch |= {name: values[:, None] for name, values in padded.items()}
    return batch

  def _padded(self, side, tokens):
    longest = max(map(len, tokens))
    length = LENGTHS[side] if longest > LENGTHS[side] // 2 else LENGTHS[side] // 2
    made, mask = tokenizing.pad_batch(tokens, length, self.tokens.pad_id)
    return {f'{side}_tokens': made, f'{side}_mask': mask}

  def scores(self, data, params, rows):
    """Scores of all passages for these queries [queries, passages]."""
    if self.way == 'linear':
      vectors = data.vectors['query'][rows]
      vectors = np.asarray(unit(jnp.asarray(vectors + vectors @ params['prompt/query/change'])))
      return vectors @ data.vectors['passage'].T
    params = place(self.devices, {**self.frozen, **params})
    vectors = self._vectors('query', params, [data.queries[row] for row in rows])
    if self.sides == ('query',):
      return vectors @ data.vectors['passage'].T
    return vectors @ self._vectors('passage', params, data.passages).T

  def _vectors(self, side, params, texts):
    return self._embedders[side](params, self.tokens(side, texts))
