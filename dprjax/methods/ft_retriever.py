"""Fine-tuning on several tasks without templates: the baseline of Retriever-Prompt (NIR-Prompt)."""

import functools

from dprjax.methods import dpr, dual_encoder, multitask

METHOD = dpr.METHOD._replace(
  data=functools.partial(multitask.find_tasks, numbered=False),
  shapes=functools.partial(multitask.batch_shapes, numbered=False),
  options=(*dual_encoder.OPTIONS, 'tasks'),
)
