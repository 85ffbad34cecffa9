"""Turns prompt files of kind template into templates for a batch and a table of vectors."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dprjax.base.errors import InputError
from dprjax.models.adapter import InTexts
from dprjax.models.artifact import Prompt
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.models.hub import Backbone
from dprjax.models.template import bare
from dprjax.papers.nir_prompt import task_templates, template_tokens
from dprjax.papers.nir_prompt.task_templates import TaskTemplates
from dprjax.papers.nir_prompt.template_tokens import LearnedTokens
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES, VectorSpec


def specials(tokenizer: Tokenizer) -> task_templates.Specials:
  """The tokens of the slots [CLS], [SEP] and [MASK]."""
  middle = tokenizer.around_pair.middle
  return task_templates.Specials(tokenizer.opening, middle, tokenizer.closing, tokenizer.mask_id)


def of_prompts(
  prompts: Sequence[Prompt], tokenizer: Tokenizer, config: EncoderConfig
) -> tuple[TaskTemplates, LearnedTokens | None]:
  """The templates of these prompts, and a table of their vectors.

  Args:
    prompts: of kind template, with equal template strings and fixed layers.
  """
  made = TaskTemplates.make(
    [template_tokens.spec(prompt) for prompt in prompts],
    specials(tokenizer),
    tokenizer.encode_bare,
    config.vocab_size,
    tokenizer.pad_id,
    prompts[0].path,
    masked=False,  # checked when the file was read
  )
  vectors = [
    {name: jnp.asarray(array) for name, array in template_tokens.vectors(prompt).items()}
    for prompt in prompts
  ]
  table = made.table(vectors)
  return made, None if table is None else LearnedTokens(table, prompts[0].meta['fixed_layers'])


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
    template_tokens.check_template(prompt, SIDES, model)
  made, adapter = of_prompts(prompts, tokenizer, model)
  lengths = []
  for prompt, spec, template in zip(prompts, specs, made.templates[side], strict=True):
    length = spec.max_length(side)
    tokens = text_tokens(prompt, side, length, tokenizer)
    check_positions(
      prompt, f'{side}_max_length {length}', tokens, template.num_tokens, model, backbone.path
    )
    lengths.append(tokens + template.num_tokens)
  opening, closing = around(tokenizer)
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


def around(tokenizer: Tokenizer) -> tuple[int, int]:
  """The number of special tokens before and after a single text."""
  return len(tokenizer.opening), len(tokenizer.closing)


def text_tokens(prompt: Prompt, side: str, max_length: int, tokenizer: Tokenizer) -> int:
  """The most tokens of a text, without special tokens."""
  if (count := max_length - tokenizer.num_specials) < 1:
    raise InputError(
      f'{prompt.path}: {side}_max_length {max_length} leaves no room beside special tokens'
    )
  return count


def check_positions(
  prompt: Prompt, options: str, texts: int, template: int, config: EncoderConfig, backbone: str
) -> None:
  """Raises InputError if texts and template exceed the positions."""
  if texts + template > config.max_tokens:
    raise InputError(
      f'{prompt.path}: {options}: {texts} tokens of text and {template} of the template exceed the '
      f'{config.max_tokens} positions of {backbone}'
    )
