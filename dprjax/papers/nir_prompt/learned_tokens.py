"""Words and learned vectors among the tokens of the input, and the prompts that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models.adapter import Adapter, InTexts
from dprjax.models.artifact import Prompt
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.models.hub import Backbone
from dprjax.models.template import bare
from dprjax.papers.nir_prompt import task_templates
from dprjax.papers.nir_prompt.task_templates import TaskTemplates
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES, VectorSpec

NAME = 'template'  # of the kind of adapter
POOLINGS = ('mask', 'cls', 'mean')
SLOTS = 'slots/'  # before the names of arrays


class _Meta(msgspec.Struct):
  pooling: Literal['mask', 'cls', 'mean']
  template: dict[str, str]
  words: dict[str, Annotated[str, msgspec.Meta(max_length=1000)]]  # of slots without vectors
  fixed_layers: Annotated[int, msgspec.Meta(ge=0, le=1000)]


class _PairMeta(_Meta):
  pooling: Literal['mask']
  verbalizer: Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=2, max_length=2)
  ]
  score: Literal['logit', 'probability']
  head_sha256: str


@flax.struct.dataclass
class LearnedTokens(Adapter):
  """Token ids from the vocabulary size on select rows of a table.

  Attributes:
    vectors: the table. An id beyond it gives NaN.
    fixed_layers: this many first layers get the unchanged rows at these tokens, without position
      embedding, LayerNorm or dropout. 0: the rows are ordinary inputs of the embedding layer.
  """

  vectors: Float[Array, 'E H']
  fixed_layers: int = flax.struct.field(pytree_node=False, default=0)

  def at(self, config: Any, tokens: Int[Array, 'B T']) -> Adapter:
    if self.vectors.shape[1] != config.embedding_size:
      raise InputError(
        f'vectors of {self.vectors.shape[1]} numbers among the tokens: {config.model_type} embeds '
        f'words in {config.embedding_size}'
      )
    numbers = jnp.maximum(tokens - config.vocab_size, 0)
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    return _Placed(
      (tokens >= config.vocab_size)[:, :, None],
      jnp.take(self.vectors, numbers, axis=0).astype(jnp.float32),
      layers < self.fixed_layers if self.fixed_layers else None,
    )


@flax.struct.dataclass
class _Placed(Adapter):
  """Rows at the places of their tokens, and the layers that keep them."""

  places: Bool[Array, 'B T 1']
  rows: Float[Array, 'B T H']
  is_fixed: Bool[Array, ' L'] | None

  by_layer = ('is_fixed',)

  def embed_tokens(
    self, tokens: Int[Array, 'B T'], embed: Callable[[Array], Array]
  ) -> Float[Array, 'B T H']:
    words = embed(jnp.where(self.places[:, :, 0], 0, tokens))
    return jnp.where(self.places, self.rows, words)

  def enter_layer(self, x: Float[Array, 'B T H']) -> Float[Array, 'B T H']:
    if self.is_fixed is None:
      return x
    return jnp.where(self.places & self.is_fixed, self.rows.astype(x.dtype), x)


def vectors(prompt: Prompt) -> dict[str, Float[np.ndarray, 'P H']]:
  return {name.removeprefix(SLOTS): array for name, array in prompt.arrays.items()}


def spec(prompt: Prompt) -> task_templates.Spec:
  lengths = {name: len(array) for name, array in vectors(prompt).items()}
  return task_templates.Spec(tuple(prompt.meta['template']), prompt.meta['words'], lengths)


def check_template(prompt: Prompt, kinds: Sequence[str]) -> None:
  there = prompt.meta['template'] if prompt.meta['kind'] == NAME else ()
  if set(there) != set(kinds):
    found = ' and '.join(there) or f'kind {prompt.meta["kind"]!r}'
    raise InputError(
      f"{prompt.path}: a prompt of {found}, but a prompt of kind 'template' for "
      f'{" and ".join(kinds)} is needed here'
    )


def check_head(prompt: Prompt, head_sha256: str) -> None:
  if (recorded := prompt.meta['head_sha256']) != head_sha256:
    raise InputError(
      f'{prompt.path}: needs a masked-LM head with SHA-256 {recorded}, not {head_sha256}; give the '
      'backbone that it was trained on'
    )


def arrays(path: str, meta: Mapping[str, Any]) -> dict[str, str]:
  """The axes of the arrays of a file; see ``adapter.Kind``."""
  given = meta.get('template')
  kinds = ('pair',) if isinstance(given, dict) and 'pair' in given else SIDES
  found = convert(dict(meta), f'{path}: meta', _PairMeta if kinds == ('pair',) else _Meta)
  if found.template != (known := {kind: task_templates.FORMS[kind] for kind in kinds}):
    raise InputError(f'{path}: the template in meta is {found.template!s:.200}, not {known}')
  prompts = [name for kind in kinds for name in task_templates.PROMPTS[kind]]
  return {f'{SLOTS}{name}': 'P H' for name in prompts if name not in found.words}


def of_prompts(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, config: EncoderConfig
) -> tuple[TaskTemplates, LearnedTokens | None]:
  """The templates of these prompts, and a table of their vectors.

  Args:
    prompts: of kind template, with equal kinds of input and fixed layers.
  """
  made = TaskTemplates.make(
    [spec(prompt) for prompt in prompts],
    tokenizer,
    config.vocab_size,
  )
  if not made.rows:
    return made, None
  slots: list[Any] = [vectors(prompt) for prompt in prompts]
  return made, LearnedTokens(made.table(slots), prompts[0].meta['fixed_layers'])


def in_texts(
  prompts: Sequence[Prompt],
  specs: Sequence[VectorSpec],
  side: str,
  tokenizer: Tokenizer,
  backbone: Backbone,
  options: EncoderOptions,
) -> InTexts:
  """Puts rows ``[CLS] text [SEP]`` into the templates of the prompts; see ``adapter.Kind``."""
  model = backbone.config
  for prompt in prompts:
    check_template(prompt, SIDES)
  made, adapter = of_prompts(prompts, tokenizer, model)
  lengths = []
  for prompt, spec, template in zip(prompts, specs, made.templates[side], strict=True):
    given, added = {side: spec.max_length(side)}, template.num_tokens
    lengths.append(sum(text_tokens(prompt, given, tokenizer, added, backbone)) + added)
  opening, closing = len(tokenizer.opening), len(tokenizer.closing)
  # The longest template may not have the longest texts.
  most, more = max(lengths), made.extra(side) - opening - closing

  def embed(
    params: Any, tokens: jax.Array, mask: jax.Array, prompt_ids: jax.Array | None = None
  ) -> jax.Array:
    params, adapter = params
    numbers = jnp.zeros(tokens.shape[0], jnp.int32) if prompt_ids is None else prompt_ids
    filled, hidden = task_templates.encode(
      model,
      params,
      made,
      side,
      [bare(tokens, mask, opening, closing)],
      min(tokens.shape[1] + more, most),
      numbers,
      adapter=adapter,
      options=options,
    )
    return task_templates.vectors(model, params, made, side, filled, hidden, specs, numbers)

  return InTexts(embed, adapter, lambda length: min(length + more, most))


def text_tokens(
  prompt: Prompt,
  lengths: Mapping[str, int],
  tokenizer: Tokenizer,
  template: int,
  backbone: Backbone,
) -> list[int]:
  """The most tokens of each text, without special tokens."""
  counts = [length - tokenizer.num_specials for length in lengths.values()]
  most = backbone.config.max_tokens
  if min(counts) < 1 or sum(counts) + template > most:
    options = ', '.join(f'{side}_max_length {length}' for side, length in lengths.items())
    raise InputError(
      f'{prompt.path}: {options}: texts, at least a token each, and {template} tokens of the '
      f'template need {sum(counts) + template} of the {most} positions of {backbone.path}'
    )
  return counts
