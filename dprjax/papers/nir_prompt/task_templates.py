"""Templates, for several tasks at once (NIR-Prompt, section 3.3).

    P1, P2, P3              describe the task: literal words, or P learned vectors
    text, first, second     the text of a query or passage; the texts of a pair
    [MASK]                  the model answer

A batch may hold texts of several tasks. The learned vectors of all tasks are rows of one table. All
token types are 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.models import embed, encoder, heads
from dprjax.models import pooling as poolings
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.models.head_specs import Head
from dprjax.models.template import Filled, Piece, Template, TextRows, fill
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import VectorSpec

# By kind of input.
FORMS = {
  'query': '[CLS] P1 text P2 [MASK] [SEP]',
  'passage': '[CLS] P1 text P2 [MASK] [SEP]',
  'pair': '[CLS] P1 first [SEP] P2 second [SEP] P3 [MASK] [SEP]',
}
SLOTS = {kind: tuple(form.split()) for kind, form in FORMS.items()}
# Slots that describe the task, such as ``query/P1``.
PROMPTS = {
  kind: [f'{kind}/{slot}' for slot in slots if slot[0] == 'P'] for kind, slots in SLOTS.items()
}

# NIR-Prompt, Tables 1 and 2: the words of P1, P2 (and P3) by task and kind of input.
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
  'retrieval': {
    'query': ('The query:', 'Representation for document retrieval is:'),
    'passage': ('The passage:', 'Representation for document retrieval is:'),
    'pair': (
      'Query:',
      'Passage:',
      'Does the passage include the content that matches the query?',
    ),
  },
  'qa': {
    'query': ('The question:', 'Representation for question answering is:'),
    'passage': ('The passage:', 'Representation for question answering is:'),
    'pair': ('Question:', 'Passage:', 'Does the passage include the answer of the question?'),
  },
  'dialogue': {
    'query': ('The first sentence:', 'Representation for retrieval-based dialogue is:'),
    'passage': ('The second sentence:', 'Representation for retrieval-based dialogue is:'),
    'pair': ('The first text:', 'The second text:', 'Can the second text reply to the first text?'),
  },
  'paraphrase': {
    'pair': ('The first text:', 'The second text:', 'Do these two texts mean the same thing?'),
  },
  'inference': {
    'pair': ('Premise:', 'Hypothesis:', 'Can the hypothesis be concluded from the premise?'),
  },
}
# P3 of every task in the hybrid template (section 3.3.3).
HYBRID = 'Do these two sentences match?'


class Spec(NamedTuple):
  """The templates of one task.

  Attributes:
    words: of prompt slots with literal words, such as ``query/P1``.
    lengths: P of the other prompt slots.
  """

  kinds: tuple[str, ...]
  words: Mapping[str, str]
  lengths: Mapping[str, int]


class TaskTemplates(NamedTuple):
  """The templates of several tasks, by task number.

  ``rows`` has the slots of the table in order: task number, name and P.
  """

  templates: Mapping[str, tuple[Template, ...]]
  rows: tuple[tuple[int, str, int], ...]
  pad_id: int

  @classmethod
  def make(
    cls,
    specs: Sequence[Spec],
    tokenizer: Tokenizer,
    vocab_size: int,
  ) -> Self:
    """Builds the templates; token ids from ``vocab_size`` on are learned vectors."""
    if tokenizer.mask_id is None:
      raise InputError('the tokenizer has no token for [MASK]; choose another backbone')
    pieces: dict[str, list[Template]] = {kind: [] for kind in specs[0].kinds}
    rows: list[tuple[int, str, int]] = []
    start = vocab_size
    for number, spec in enumerate(specs):
      tokens = tokenizer.encode_bare(spec.words.values())
      for kind in pieces:
        parts: list[Piece] = []
        for place, slot in enumerate(SLOTS[kind]):
          name = f'{kind}/{slot}'
          if slot in ('text', 'first', 'second'):
            parts.append(Piece(None))
          elif slot == '[MASK]':
            parts.append(Piece((tokenizer.mask_id,)))
          elif slot == '[CLS]':
            parts.append(Piece(tokenizer.opening))
          elif slot == '[SEP]':
            last = place == len(SLOTS[kind]) - 1
            parts.append(Piece(tokenizer.closing if last else tokenizer.around_pair.middle))
          elif name in spec.words:
            parts.append(Piece(tuple(tokens[spec.words[name]].tolist())))
          else:
            length = spec.lengths[name]
            parts.append(Piece(tuple(range(start, start + length))))
            rows.append((number, name, length))
            start += length
        pieces[kind].append(Template(tuple(parts)))
    templates = {kind: tuple(several) for kind, several in pieces.items()}
    return cls(templates, tuple(rows), tokenizer.pad_id)

  def table(self, vectors: Sequence[Mapping[str, Float[Array, 'P H']]]) -> Float[Array, 'E H']:
    return jnp.concatenate([vectors[number][name] for number, name, _ in self.rows])

  def without_prompts(self) -> Self:
    def empty(kind: str, template: Template) -> Template:
      pieces = zip(SLOTS[kind], template.pieces, strict=True)
      return Template(tuple(Piece(()) if name[0] == 'P' else piece for name, piece in pieces))

    templates = {
      kind: tuple(empty(kind, template) for template in several)
      for kind, several in self.templates.items()
    }
    return self._replace(templates=templates, rows=())

  def extra(self, kind: str) -> int:
    return max(template.num_tokens for template in self.templates[kind])

  def places(self, kind: str, filled: Filled, slot: str) -> Bool[Array, 'B T']:
    return filled.pieces == SLOTS[kind].index(slot)


def need_head(heads: Mapping[str, Head], path: str) -> Head:
  if 'mlm' not in heads:
    raise InputError(
      f'{path} has no masked-LM head; train one with --config=configs/condenser.py:mlm'
    )
  return heads['mlm']


def label_ids(words: Sequence[str], tokenizer: Tokenizer, where: str) -> tuple[int, int]:
  tokens = tokenizer.encode_bare(words)
  ids = [id_ for word in words for id_ in tokens[word].tolist()]
  if not len(words) == len(ids) == len({*ids} - {*tokenizer.special_ids}) == 2:
    raise InputError(
      f'{where}: expected two different words, for yes and no, each a single token of the '
      f'vocabulary, not {words!r:.60}'
    )
  return ids[0], ids[1]


def encode(
  config: EncoderConfig,
  params: Mapping[str, Any],
  templates: TaskTemplates,
  kind: str,
  texts: Sequence[TextRows],
  length: int,
  numbers: Int[Array, ' B'],
  **kwargs: Any,
) -> tuple[Filled, Float[Array, 'B T H']]:
  filled = fill(templates.templates[kind], texts, length, templates.pad_id, numbers)
  return filled, encoder.encode(config, params, filled.tokens, filled.mask, **kwargs)


def answer(
  config: EncoderConfig,
  params: Mapping[str, Any],
  head: Mapping[str, Any],
  templates: TaskTemplates,
  texts: Sequence[TextRows],
  length: int,
  numbers: Int[Array, ' B'],
  *,
  options: EncoderOptions,
  **kwargs: Any,
) -> Float[Array, 'B V']:
  filled, hidden = encode(
    config, params, templates, 'pair', texts, length, numbers, options=options, **kwargs
  )
  places = templates.places('pair', filled, '[MASK]')
  states = poolings.find('mean').pool(hidden, places)  # the mean of one state
  words = params['embeddings']['word']['embedding']
  return heads.mlm_logits(config, head, words, states, options.dtype)


def vectors(
  config: EncoderConfig,
  params: Mapping[str, Any],
  templates: TaskTemplates,
  kind: str,
  text: TextRows,
  length: int,
  numbers: Int[Array, ' B'],
  specs: Sequence[VectorSpec],
  **kwargs: Any,
) -> Float[Array, 'B H']:
  """The vectors of texts in their templates, by one spec for all or one for each task.

  Templates have their own poolings: 'mask', the state at [MASK]; 'mean', over the tokens of the
  text; 'cls'.
  """
  filled, hidden = encode(config, params, templates, kind, [text], length, numbers, **kwargs)
  pooled = [{'mask': '[MASK]', 'mean': 'text'}.get(spec.pooling) for spec in specs]
  masks = {
    name: filled.mask if name is None else templates.places(kind, filled, name)
    for name in dict.fromkeys(pooled)
  }
  mask = masks[pooled[0]]
  if len(masks) > 1:
    number = jnp.take(jnp.array([[*masks].index(name) for name in pooled]), numbers)
    stacked = jnp.stack([*masks.values()])
    mask = jnp.take_along_axis(stacked, number[None, :, None], axis=0)[0]
  # The mean over one place is its state.
  specs = [spec.replace(pooling='mean') if spec.pooling == 'mask' else spec for spec in specs]
  return embed.of_states(config, params, hidden, mask, specs, numbers)


def answer_score(logits: Float[Array, 'B V'], yes: int, no: int, kind: str) -> Float[Array, ' B']:
  """The preference for yes over no (NIR-Prompt, section 3.5).

  Args:
    kind: 'logit', logit(yes) - logit(no), as in the released code: its sigmoid is
      P(yes | yes or no); 'probability', P(yes) - P(no), as in the paper. Both have the same sign.
  """
  if kind == 'logit':
    return logits[:, yes] - logits[:, no]
  total = jax.nn.logsumexp(logits, axis=1)
  return jnp.exp(logits[:, yes] - total) - jnp.exp(logits[:, no] - total)
