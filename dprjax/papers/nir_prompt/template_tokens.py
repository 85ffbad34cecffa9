"""Learned vectors among the input tokens, and files of templates with such vectors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import flax.struct
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.base.reading import convert
from dprjax.models.adapter import Adapter
from dprjax.models.artifact import Prompt
from dprjax.papers.nir_prompt import task_templates

NAME = 'template'  # of the kind of adapter
POOLINGS = ('mask', 'cls', 'mean')
SLOTS = 'slots/'  # before the names of arrays


class _Meta(msgspec.Struct):
  """Additional keys of meta."""

  pooling: Literal['mask', 'cls', 'mean']
  template: dict[str, str]  # template strings by kind of input
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
  """The learned slots of a template, by names such as ``query/P1``."""
  return {name.removeprefix(SLOTS): array for name, array in prompt.arrays.items()}


def spec(prompt: Prompt) -> task_templates.Spec:
  """The templates of a prompt."""
  lengths = {name: len(array) for name, array in vectors(prompt).items()}
  return task_templates.Spec(prompt.meta['template'], prompt.meta['words'], lengths)


def check_template(prompt: Prompt, kinds: Sequence[str], config: Any) -> None:
  """Checks that a prompt is a template for these kinds of input and this backbone."""
  there = prompt.meta['template'] if prompt.meta['kind'] == NAME else ()
  if set(there) != set(kinds):
    found = ' and '.join(there) or f'kind {prompt.meta["kind"]!r}'
    raise InputError(
      f"{prompt.path}: a prompt of {found}, but a prompt of kind 'template' for "
      f'{" and ".join(kinds)} is needed here'
    )


def check_head(prompt: Prompt, head_sha256: str) -> None:
  """Raises InputError if the template was trained with another masked-LM head."""
  if (recorded := prompt.meta['head_sha256']) != head_sha256:
    raise InputError(
      f'{prompt.path}: needs a masked-LM head with SHA-256 {recorded}, not {head_sha256}; give the '
      'backbone that it was trained on'
    )


def arrays(path: str, meta: Mapping[str, Any]) -> dict[str, str]:
  """The axes of the arrays of a file; see ``adapter.Kind``."""
  strings, where = meta.get('template'), f"{path}: meta's"
  if not isinstance(strings, dict) or set(strings) not in ({'query', 'passage'}, {'pair'}):
    raise InputError(f'{where} template is {strings!r:.60}; expected query and passage, or pair')
  found = convert(dict(meta), f'{path}: meta', _PairMeta if 'pair' in strings else _Meta)
  prompts: list[str] = []
  for kind, string in found.template.items():
    masked = found.pooling == 'mask'
    task_templates.parse(string, kind, f'{where} template of a {kind}', masked=masked)
    prompts += task_templates.prompt_names(string, kind)
  if unknown := [name for name in found.words if name not in prompts]:
    raise InputError(
      f'{where} words: {unknown[0]!r:.40} is not one of: {", ".join(prompts) or "no slot"}'
    )
  return {f'{SLOTS}{name}': 'P H' for name in prompts if name not in found.words}
