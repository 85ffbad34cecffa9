"""Requests for vectors, in the terms of several interfaces."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from dprjax.encoding import codes
from dprjax.serving.answers import Failure
from dprjax.serving.engine import Tokens
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.messages import Document
from dprjax.serving.turns import Steps, Work
from dprjax.text.vector_spec import SIDES

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a request, and of all requests together.

  Attributes:
    bytes, prompt_bytes: of a body, and of an uploaded prompt file.
    inputs: texts, queries or documents.
    tokens: of all texts, after truncation.
    requests: answered at a time.
    seconds: for the request to arrive, and again for the answer.
    wait: the most seconds before the work on a request begins, by a prediction.
    memory: bytes of bodies and answers of all requests.
  """

  bytes: int = 8 << 20
  prompt_bytes: int = 256 << 20
  inputs: int = 2048
  tokens: int = 300_000
  requests: int = 512
  seconds: float = 60
  wait: float = 10
  memory: int = 1 << 30

  def check_texts(self, number: int, param: str) -> None:
    """Raises Failure if a request has too many texts."""
    if number > self.inputs:
      raise Failure(413, f'{number} texts; {self.inputs} at most', param=param)

  def check_values(self, number: int) -> None:
    """Raises Failure if a body has more values than texts, token ids and their fields make."""
    most = self.tokens + 16 * self.inputs
    if number > most:
      raise Failure(413, f'{number:,} values in the JSON; {most:,} at most')

  def check_work(self, work: Work, param: str) -> None:
    """Raises Failure if the texts of a request have too many tokens, or take too long alone."""
    if work.tokens > self.tokens:
      raise Failure(413, f'{work.tokens:.0f} tokens; {self.tokens} at most', param=param)
    if work.seconds > self.seconds:
      raise Failure(
        413,
        f'these texts take about {work.seconds:.0f} s, an answer {self.seconds:g} s at most; send '
        'them in parts',
        param=param,
      )


class Wanted(NamedTuple):
  """The vectors that a request asks for.

  Attributes:
    name, side: of the prompt.
    said: whether the request names the side.
    dimensions: None: all.
    normalize: whether vectors get length 1; None: by the prompt.
    cut: whether texts that are too long may lose their end.
  """

  name: str
  side: str
  said: bool = True
  dimensions: int | None = None
  normalize: bool | None = None
  cut: bool = True

  def check(self, tokens: Tokens, whole: int) -> None:
    """Raises Failure if the prompt does not give such vectors for these texts."""
    version = tokens.version
    if version.two_sided and not self.said:
      names = ' or '.join(f'{self.name}:{side}' for side in SIDES)
      raise Failure(
        400, f'queries and passages have different vectors: ask for {names}', param='model'
      )
    shorter = {length for length in version.meta.get('matryoshka', ()) if length < whole}
    given = sorted({*shorter, whole}, reverse=True)
    if self.dimensions not in (None, *given):
      sizes = ' or '.join(map(str, given))
      raise Failure(400, f'this model has vectors of {sizes} dimensions', param='dimensions')
    if self.normalize is False and version.spec.normalize:
      raise Failure(400, 'vectors of this model have length 1', param='normalize')
    if tokens.truncated and not self.cut:
      most = version.spec.max_length(self.side)
      raise Failure(
        413,
        f'text {tokens.truncated[0]} has more than the {most} tokens of this model',
        param='truncate',
      )

  def finish(self, tokens: Tokens, vectors: Float[np.ndarray, 'n H']) -> Float[np.ndarray, 'n d']:
    """Converts vectors of the model to the requested ones."""
    normalized = tokens.version.spec.normalize
    vectors = codes.cut(vectors, self.dimensions or vectors.shape[1], normalized)
    if self.normalize and not normalized:
      norms = np.linalg.norm(vectors, axis=1, keepdims=True)
      vectors = vectors / np.where(norms > 0, norms, np.float32(1))
    return vectors


def decode(content: bytes, kind: type[_T]) -> _T:
  """A body of JSON. Raises Failure."""
  try:
    return msgspec.json.decode(content, type=kind)
  except msgspec.ValidationError as error:
    raise Failure(400, str(error), param=_field(str(error))) from error
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    raise Failure(400, f'the body is not JSON, or a text is not Unicode: {error}') from error


def count_values(content: bytes) -> Steps:
  """The number of values in JSON, without building them, as a job of one slice."""
  yield len(content)
  data = np.frombuffer(content.replace(rb'\\', b'').replace(rb'\"', b''), np.uint8)
  inside = np.add.accumulate(data == ord('"'), dtype=np.uint8) & 1  # of a string
  begins = (data == ord(',')) | (data == ord('[')) | (data == ord('{'))
  return int(np.count_nonzero(begins > inside))


def _field(message: str) -> str | None:
  found = re.search(r'at `\$\.(\w+)', message) or re.search(r'field `(\w+)`', message)
  return found and found[1]


def split(model: str, default: str, said: Mapping[str, str | None] = {}) -> tuple[str, str, bool]:
  """The name of a prompt, the side, and whether it was named: 'qa:query' gives 'qa', 'query', True.

  Args:
    model: may name the side.
    said: fields that may give the side.

  Raises:
    UnknownPrompt: an unknown side.
    Failure: contradictory sides.
  """
  name, colon, side = model.rpartition(':')
  if not colon:
    name, side = model, ''
  elif side not in SIDES:
    raise UnknownPrompt(model)
  for field, word in said.items():
    other = _side_of(word or '')
    if side and other and side != other:
      raise Failure(400, f'{field} says {other}, and another field says {side}', param=field)
    side = side or other
  return name, side or default, bool(side or any(said.values()))


def _side_of(task: str) -> str:
  """The side that a `messages.Task` names, or ''."""
  if task.endswith('query'):
    return 'query'
  return 'passage' if task.endswith(('passage', 'document')) else ''


def inputs(given: str | Sequence[Any], param: str) -> list[Any]:
  """Texts, or lists of token ids, of a field that may be one of these. Raises Failure."""
  if isinstance(given, str):
    return [given]
  kinds = {type(one) for one in given}
  if kinds == {int}:
    return [given]
  if kinds <= {str, Document}:
    return [one if isinstance(one, str) else one.text for one in given]
  if kinds == {list}:
    return [*given]
  raise Failure(400, 'expected a text, a list of texts, token ids, or a list of these', param=param)
