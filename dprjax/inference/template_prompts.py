"""Turns prompt files of kind template into templates for a batch and a table of vectors."""

from collections.abc import Sequence

import jax.numpy as jnp

from dprjax.base.errors import InputError
from dprjax.data.text import Tokenizer
from dprjax.models import task_templates
from dprjax.models.adapters import template_tokens
from dprjax.models.adapters.template_tokens import LearnedTokens
from dprjax.models.artifact import Prompt
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.task_templates import TaskTemplates


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
