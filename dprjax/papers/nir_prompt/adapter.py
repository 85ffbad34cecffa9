"""The kind of adapter ``template``: words and learned vectors among the tokens of the input."""

from typing import Any

from dprjax.models.adapter import Kind
from dprjax.papers.nir_prompt.learned_tokens import NAME, arrays, in_texts


def _reranker(*args: Any, **options: Any) -> Any:
  from dprjax.papers.nir_prompt import prompt_reranker  # imports the rerankers

  return prompt_reranker.PromptReranker.load(*args, **options)


ADAPTER = Kind(
  NAME,
  'a template of words and vectors among the tokens of the input',
  arrays,
  in_texts=in_texts,
  reranker=_reranker,
  sided=False,
)
