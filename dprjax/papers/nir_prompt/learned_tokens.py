"""Words and learned vectors among the tokens of the input, and the prompts that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import flax.linen as nn
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
  """Token ids from the vocabulary size on select rows of the table ``vectors``; NaN beyond it.

  The first ``fixed_layers`` layers get the unchanged rows at these tokens, without position
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
    actual = ' and '.join(there) or f'kind {prompt.meta["kind"]!r}'
    raise InputError(
      f"{prompt.path}: a prompt of {actual}, but a prompt of kind 'template' for "
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
  template = meta.get('template')
  kinds = ('pair',) if isinstance(template, dict) and 'pair' in template else SIDES
  fields = convert(dict(meta), f'{path}: meta', _PairMeta if kinds == ('pair',) else _Meta)
  if fields.template != (known := {kind: task_templates.FORMS[kind] for kind in kinds}):
    raise InputError(f'{path}: the template in meta is {fields.template!s:.200}, not {known}')
  prompts = [name for kind in kinds for name in task_templates.PROMPTS[kind]]
  return {f'{SLOTS}{name}': 'P H' for name in prompts if name not in fields.words}


def of_prompts(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, config: EncoderConfig
) -> tuple[TaskTemplates, LearnedTokens | None]:
  """The templates of prompts with equal kinds of input and fixed layers, and their vectors."""
  templates = TaskTemplates.make([spec(prompt) for prompt in prompts], tokenizer, config.vocab_size)
  if not templates.rows:
    return templates, None
  slots: list[Any] = [vectors(prompt) for prompt in prompts]
  return templates, LearnedTokens(templates.table(slots), prompts[0].meta['fixed_layers'])


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
  templates, adapter = of_prompts(prompts, tokenizer, model)
  lengths = []
  for prompt, spec, template in zip(prompts, specs, templates.templates[side], strict=True):
    limits, added = {side: spec.max_length(side)}, template.num_tokens
    lengths.append(sum(text_tokens(prompt, limits, tokenizer, added, backbone)) + added)
  opening, closing = len(tokenizer.opening), len(tokenizer.closing)
  # The longest template may not have the longest texts.
  most, more = max(lengths), templates.extra(side) - opening - closing

  def embed(
    params: Any, tokens: jax.Array, mask: jax.Array, prompt_ids: jax.Array | None = None
  ) -> jax.Array:
    params, adapter = params
    numbers = jnp.zeros(tokens.shape[0], jnp.int32) if prompt_ids is None else prompt_ids
    text, length = bare(tokens, mask, opening, closing), min(tokens.shape[1] + more, most)
    return task_templates.vectors(
      model,
      params,
      templates,
      side,
      text,
      length,
      numbers,
      specs,
      adapter=adapter,
      options=options,
    )

  return InTexts(embed, adapter, lambda length: min(length + more, most))


def text_tokens(
  prompt: Prompt,
  lengths: Mapping[str, int],
  tokenizer: Tokenizer,
  template: int,
  backbone: Backbone,
) -> list[int]:
  counts = [length - tokenizer.num_specials for length in lengths.values()]
  most = backbone.config.max_tokens
  if min(counts) < 1 or sum(counts) + template > most:
    options = ', '.join(f'{side}_max_length {length}' for side, length in lengths.items())
    raise InputError(
      f'{prompt.path}: {options}: texts, at least a token each, and {template} tokens of the '
      f'template need {sum(counts) + template} of the {most} positions of {backbone.path}'
    )
  return counts


# The encoder of the vectors of a slot (NIR-Prompt section 3.3.2, Eq. 2).
#
# Embedding(P, H) -> a bidirectional LSTM of two layers (H/2 each way) -> Linear -> ReLU -> Linear.

LSTM_LAYERS = 2


class PromptEncoder(nn.Module):
  """The encoder of one slot, with the initial values of PyTorch."""

  length: int
  width: int

  @nn.compact
  def __call__(self) -> Float[Array, 'P H']:
    half = self.width // 2
    x: Any = self.param('embedding', nn.initializers.normal(1.0), (self.length, self.width))[None]
    for layer in range(LSTM_LAYERS):
      forward, backward = (
        nn.RNN(_cell(half), name=f'{way}_{layer}') for way in ('forward', 'backward')
      )
      x = nn.Bidirectional(forward, backward)(x)  # type: ignore[arg-type]
    x = nn.relu(_linear(self.width, 'hidden')(x))
    return _linear(self.width, 'output')(x)[0]


def init_prompt_encoders(
  config: EncoderConfig, keys: Mapping[str, Array], lengths: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
  encoders: dict[str, dict[str, Any]] = {}
  for length in sorted(set(lengths.values())):
    names = [name for name in lengths if lengths[name] == length]
    init = jax.jit(jax.vmap(PromptEncoder(length, config.hidden_size).init))
    several = jax.device_get(init(jnp.stack([keys[name] for name in names]))['params'])
    encoders |= {
      name: jax.tree.map(lambda leaf, place=place: leaf[place], several)
      for place, name in enumerate(names)
    }
  return encoders


def encode_prompts(
  several: Mapping[str, Mapping[str, Any]],
) -> dict[str, Float[Array, 'P H']]:
  """The vectors of several encoders, by name.

  Encoders of equal length run as one: an LSTM is four loops, and compiling them for each encoder
  would dominate the start.
  """
  vectors: dict[str, Array] = {}
  for length in sorted({params['embedding'].shape[0] for params in several.values()}):
    names = [name for name, params in several.items() if params['embedding'].shape[0] == length]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(several[name] for name in names))
    encoder = PromptEncoder(*stacked['embedding'].shape[1:])
    rows: Any = jax.vmap(lambda params, encoder=encoder: encoder.apply({'params': params}))(stacked)
    vectors |= {name: rows[place] for place, name in enumerate(names)}
  return vectors


def _cell(width: int) -> nn.OptimizedLSTMCell:
  init = _uniform(width)
  # PyTorch adds two biases.
  return nn.OptimizedLSTMCell(
    width,
    kernel_init=init,
    recurrent_kernel_init=init,
    bias_init=_uniform(width, terms=2),
    parent=None,
  )


def _linear(width: int, name: str) -> nn.Dense:
  return nn.Dense(width, kernel_init=_uniform(width), bias_init=_uniform(width), name=name)


def _uniform(width: int, terms: int = 1) -> nn.initializers.Initializer:
  """U(-1/sqrt(width), 1/sqrt(width)) as in PyTorch, or the sum of ``terms`` of these."""

  def init(key: Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
    del out_sharding
    drawn = jax.random.uniform(key, (terms, *shape), dtype, -1.0, 1.0)
    return jnp.sum(drawn, axis=0) * width**-0.5

  return init
