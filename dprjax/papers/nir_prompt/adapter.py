"""The kind of adapter ``template``, for files that NIR-Prompt trains."""

from typing import Any

from dprjax.models.adapter import Kind
from dprjax.papers.nir_prompt import template_prompts, template_tokens


def _reranker(*args: Any, **options: Any) -> Any:
  from dprjax.papers.nir_prompt import prompt_reranker  # imports the rerankers

  return prompt_reranker.PromptReranker.load(*args, **options)


ADAPTER = Kind(
  template_tokens.NAME,
  'a template of words and vectors among the tokens of the input',
  template_tokens.arrays,
  in_texts=template_prompts.in_texts,
  reranker=_reranker,
  sided=False,
)
