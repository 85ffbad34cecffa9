"""Turns prompt files of kind template into templates for a batch and a table of vectors."""

from collections.abc import Mapping, Sequence
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
    given, added = {side: spec.max_length(side)}, template.num_tokens
    lengths.append(sum(text_tokens(prompt, given, tokenizer, added, backbone)) + added)
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


def text_tokens(
  prompt: Prompt,
  lengths: Mapping[str, int],
  tokenizer: Tokenizer,
  template: int,
  backbone: Backbone,
) -> list[int]:
  """The most tokens of each text, without special tokens.

  Args:
    lengths: the same with special tokens, by side.
    template: tokens around the texts.
  """
  counts = [length - tokenizer.num_specials for length in lengths.values()]
  most = backbone.config.max_tokens
  if min(counts) < 1 or sum(counts) + template > most:
    options = ', '.join(f'{side}_max_length {length}' for side, length in lengths.items())
    raise InputError(
      f'{prompt.path}: {options}: texts, at least a token each, and {template} tokens of the '
      f'template need {sum(counts) + template} of the {most} positions of {backbone.path}'
    )
  return counts
