"""Fine-tuning on several tasks without templates: the baseline of Retriever-Prompt (NIR-Prompt)."""

import functools

from dprjax.papers.nir_prompt import multitask
from dprjax.training import dpr, dual_encoder

METHOD = dpr.METHOD._replace(
  data=functools.partial(multitask.find_tasks, numbered=False),
  shapes=functools.partial(multitask.batch_shapes, numbered=False),
  options={dpr.build: dual_encoder.OPTIONS},
)
