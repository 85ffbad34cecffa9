"""Reranker-Prompt of NIR-Prompt: a masked language model answers yes or no to a pair prompt."""

import itertools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dprjax.base.files import PathLike, sha256_file
from dprjax.encoding.embedder import check_size
from dprjax.models import artifact, head_specs, hub
from dprjax.models.encoder_config import EncoderOptions
from dprjax.models.template import Packed, unpack
from dprjax.papers.nir_prompt import learned_tokens, task_templates
from dprjax.papers.nir_prompt.learned_tokens import check_head, check_template
from dprjax.retrieval.reranker import Reranker, load_model
from dprjax.text import tokenizing
from dprjax.text.vector_spec import SIDES


class PromptReranker(Reranker):
  """A masked language model with a pair prompt: its answer at [MASK] is yes or no.

  The score is logit(yes) - logit(no), whose sigmoid is P(yes | yes or no); or P(yes) - P(no) over
  the vocabulary, for ``probability`` in the prompt meta. Above 0 the pair matches.

      reranker = PromptReranker.load('backbone', 'qa.npz')
      reranker.score([('how do planes fly', 'The lift of a swept wing ...')])   # float32 [1]
  """

  head = 'mlm'

  def __init__(
    self,
    backbone: hub.Backbone,
    tokenizer: tokenizing.Tokenizer,
    prompt: artifact.Prompt,
    max_length: int | None = None,
    *,
    score: str | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
  ):
    """See ``load``. The prompt must be made for the backbone (``artifact.load_prompt_for``).

    Raises:
      InputError: the masked-LM head is missing, or differs from that of the prompt; the prompt is
        not a pair prompt; a word of the verbalizer is not one token; prompt and texts exceed the
        positions.
    """
    config = backbone.config
    check_template(prompt, ('pair',))
    mlm_head = task_templates.need_head(backbone.heads, backbone.path)
    check_head(prompt, head_specs.sha256('mlm', config, mlm_head))
    yes, no = task_templates.label_ids(
      prompt.meta['verbalizer'], tokenizer, f'{prompt.path}: verbalizer in meta'
    )
    templates, adapter = learned_tokens.of_prompts([prompt], tokenizer, config)
    (template,) = templates.templates['pair']
    self.prompt, self.score_kind = prompt, score or prompt.meta['score']
    self._most: list[int] | None = None  # tokens of each text
    if max_length is None:
      lengths = {side: prompt.meta[f'{side}_max_length'] for side in SIDES}
      self._most = learned_tokens.text_tokens(
        prompt, lengths, tokenizer, template.num_tokens, backbone
      )
      max_length = sum(self._most) + template.num_tokens
    check_size('max_length', max_length)
    template.cut(np.zeros((0, 2), np.int32), max_length)  # raises without room for texts

    def score_rows(
      params: Any, rows: jax.Array, lengths: jax.Array, options: EncoderOptions
    ) -> jax.Array:
      encoder, head, adapter = params
      tasks = jnp.zeros(rows.shape[0], jnp.int32)
      pairs = unpack(rows, lengths)
      logits = task_templates.answer(
        *(config, encoder, head, templates, pairs, rows.shape[1], tasks),
        adapter=adapter,
        options=options,
      )
      return task_templates.answer_score(logits, yes, no, self.score_kind)

    super().__init__(
      *(backbone, tokenizer, template, max_length, score_rows),
      (mlm_head.params, adapter),
      mesh=mesh,
      batch_size=batch_size,
      dtype=dtype,
    )

  @classmethod
  def load(
    cls,
    path: PathLike,
    prompt: PathLike,
    *,
    max_length: int | None = None,
    score: str | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 64,
    dtype: str = 'auto',
  ) -> Self:
    """Loads a masked language model and a pair prompt.

    Args:
      path: a Hugging Face directory with a masked-LM head, a hub id, or ``package:NAME``.
      max_length: tokens of a pair with its template, cutting the passage first; default: each text
        is cut at its maximum length in the prompt meta.
      score: 'logit' or 'probability', in place of the setting of the prompt.
      mesh, batch_size, dtype: as for ``Encoder.load``.

    Raises:
      InputError: a file cannot be read, or the prompt was made for another backbone, head or
        tokenizer.
    """
    artifact.load_prompt(prompt)  # first, because loading a backbone takes long
    backbone, tokenizer = load_model(path, cls.head)
    loaded = artifact.load_prompt_for(prompt, tokenizer.sha256, backbone)
    return cls(
      backbone,
      tokenizer,
      loaded,
      max_length,
      score=score,
      mesh=mesh,
      batch_size=batch_size,
      dtype=dtype,
    )

  @property
  def settings(self) -> dict[str, Any]:
    return super().settings | {
      'prompt_sha256': sha256_file(self.prompt.path),
      'score': self.score_kind,
      'text_tokens': self._most,
    }

  @property
  def files(self) -> list[str]:
    return [*super().files, self.prompt.path]

  def pack(self, pairs: Sequence[tuple[str, str]]) -> Packed:
    prefixes = [self.prompt.meta.get(f'{side}_prefix', '') for side in SIDES]
    texts = [[prefix + pair[i] for pair in pairs] for i, prefix in enumerate(prefixes)]
    tokens = self.tokenizer.encode_bare(itertools.chain(*texts))
    rows = [[tokens[text] for text in of_side] for of_side in texts]
    if self._most is None:
      return self._template.pack(rows, self.max_length, self.tokenizer.pad_id)
    kept = [[row[:most] for row in of_side] for of_side, most in zip(rows, self._most, strict=True)]
    cut = sum(
      any(len(row) > most for row, most in zip(pair, self._most, strict=True))
      for pair in zip(*rows, strict=True)
    )
    packed = self._template.pack(kept, self.max_length, self.tokenizer.pad_id)
    return packed._replace(cut=cut)  # if both texts fit, no more is cut
