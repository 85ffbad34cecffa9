"""Batches: files of requests, processed while the server is idle.

A thread takes lines of a batch, tenants in turn, and gives them to the engine a few texts at a
time, when no other work waits there, or after a second with a hundredth of the weight of the
tenant. Progress is on disk after each step, so a killed server continues there.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from dprjax.base.errors import InputError, trail
from dprjax.serving import answers, messages
from dprjax.serving.answers import Failure
from dprjax.serving.asked import Limits, Wanted, decode, inputs_of, wanted_by
from dprjax.serving.backlog import (
  ACTIVE,
  Backlog,
  BatchProblem,
  BatchProblems,
  Full,
  Record,
  UnknownEntry,
)
from dprjax.serving.batcher import Busy, NotFinite
from dprjax.serving.engine import Engine, Tokens
from dprjax.serving.keys import Grant
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.messages import EmbeddingRequest, Usage
from dprjax.serving.turns import Tenant

if TYPE_CHECKING:
  from dprjax.serving.admission import Admission

logger = logging.getLogger('dprjax')

_PATH = '/v1/embeddings'
_MOST_LINES = 50_000
_MOST_PROBLEMS = 20  # reported for a file
_STEP = 256  # texts, or lines, between two writes to disk
_GROUP = 64  # texts given to the engine at a time
_PATIENCE_S = 1.0  # while others ask
_NAP_S = 0.002
_IDLE_S = 1.0  # between looks at the folder
_RETRY_S = 10.0  # after a fault of the disk, and until another server may have ended
_CLEAR_S = 600.0
_WEIGHT = 0.01


class _Line(Struct):
  custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
  method: Literal['POST']
  url: Literal['/v1/embeddings']
  body: msgspec.Raw


class _Asked(NamedTuple):
  """The request in a line of a batch, or the reason of its refusal."""

  id: str
  model: str = ''
  wanted: Wanted = Wanted('', '')
  texts: Sequence[Any] = ()
  error: Exception | None = None


class Backfill:
  """The thread that processes batches.

  Args:
    backlog: has them.
    engine: gives vectors.
    limits: of each request.
    admission: counts the limits of tenants.
    grant_of: the present rights of a tenant; None: its key was removed.
  """

  def __init__(
    self,
    backlog: Backlog,
    engine: Engine,
    limits: Limits,
    admission: 'Admission',
    grant_of: Callable[[str], Grant | None],
  ):
    self._backlog, self._engine, self._limits = backlog, engine, limits
    self._admission, self._grant_of = admission, grant_of
    self._stopped, self._more = threading.Event(), threading.Event()
    self._later: dict[str, float] = {}  # tenants over their limits, and until when
    self._served: dict[str, float] = {}  # when each tenant had a step
    self._records: dict[str, Record] = {}  # by id, as they are on disk
    self._looked = 0.0
    self._thread = threading.Thread(target=self._run, name='backfill', daemon=True)

  def start(self) -> None:
    """Starts the work. Call it when everything is compiled."""
    self._thread.start()

  def wake(self) -> None:
    """Signals a new batch."""
    self._more.set()

  def close(self, seconds: float | None = None) -> None:
    """Ends the thread after its step; the rest is on disk."""
    self._stopped.set()
    self._more.set()
    if self._thread.is_alive():
      self._thread.join(seconds)
    self._backlog.close()

  def _run(self) -> None:
    cleared = -_CLEAR_S
    while not self._stopped.is_set():
      try:
        if not self._backlog.acquire():
          self._stopped.wait(_RETRY_S)
          continue
        if time.monotonic() > cleared + _CLEAR_S:
          self._backlog.clear()
          cleared = time.monotonic()
        if not self.step():
          self._more.wait(_IDLE_S)
          self._more.clear()
      except OSError as error:
        logger.error('batches wait: %s', error)
        self._stopped.wait(_RETRY_S)
      except Exception as error:  # the message may repeat a text
        if self._stopped.is_set():  # the engine has ended
          return
        logger.error('a fault of dprjax in batches: %s', trail(error))
        self._stopped.wait(_RETRY_S)

  def step(self) -> bool:
    """Works on one batch for a while; returns whether there was one."""
    now = time.monotonic()
    if not self._records or now > self._looked + _IDLE_S:
      self._records = {one.card.id: one for one in self._backlog.active()} | self._records
      self._looked = now
    self._engine.metrics.backfills.set(len(self._records))
    records = [one for one in self._records.values() if self._later.get(one.tenant, 0.0) <= now]
    if not records:
      return False
    record = min(records, key=lambda one: self._served.get(one.tenant, 0.0))
    self._served[record.tenant] = now
    try:
      self._advance(record)
    except Full:
      self._fail(record, 'disk_quota', 'the files of this tenant have no more room')
    except UnknownEntry:
      self._fail(record, 'file_not_found', 'the file of requests is gone')
    except Busy as error:
      self._later[record.tenant] = time.monotonic() + error.seconds
    except BaseException:
      del self._records[record.card.id]  # the one on disk counts
      raise
    if record.card.status not in ACTIVE:
      del self._records[record.card.id]
    return True

  def _advance(self, record: Record) -> None:
    grant, card = self._grant_of(record.tenant), record.card
    if grant is None or not grant.may('read'):
      return self._fail(record, 'invalid_api_key', 'the key of this batch is gone')
    if self._backlog.is_cancelled(record):
      return self._backlog.finish(record, 'cancelled')
    if card.status == 'validating':
      return self._validate(record)
    with self._backlog.open_input(record) as file:
      asked, ended = self._read(file, grant)
      end = file.tell()
    if asked:
      self._work(record, grant, asked)
    if self._stopped.is_set():
      return None
    record.read = end
    if ended:
      card.status, card.finalizing_at = 'finalizing', int(time.time())
    self._backlog.write(record)
    if ended:
      self._backlog.finish(record, 'completed')
      logger.info('batch %s: %d requests are done', card.id, card.request_counts.total)
    return None

  def _validate(self, record: Record) -> None:
    """Checks every line before the work begins."""
    problems: list[BatchProblem] = []
    seen: set[str] = set()
    most = self._limits.bytes

    def tell(code: str, message: str) -> None:
      problems.append(BatchProblem(code, message, number))

    with self._backlog.open_input(record) as file:
      number = 0
      while (line := file.readline(most + 1)) and len(problems) < _MOST_PROBLEMS:
        number += 1
        if self._stopped.is_set():
          return None
        if len(line) > most:
          tell('line_too_large', f'a line has more than {most:,} bytes')
          break
        if not line.strip():
          continue
        if len(seen) >= _MOST_LINES:
          tell('too_many_requests', f'more than {_MOST_LINES:,} requests')
          break
        try:
          one = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
          tell('invalid_json_line', str(error)[:200])
          continue
        if one.custom_id in seen:
          tell('duplicate_custom_id', 'an earlier line has this custom_id')
        seen.add(one.custom_id)
    if not seen and not problems:
      problems.append(BatchProblem('empty_file', 'there are no requests in the file'))
    card, now = record.card, int(time.time())
    if problems:
      card.errors = BatchProblems(data=problems)
      return self._backlog.finish(record, 'failed')
    card.status, card.in_progress_at, card.request_counts.total = 'in_progress', now, len(seen)
    return self._backlog.write(record)

  def _read(self, file: IO[bytes], grant: Grant) -> tuple[list[_Asked], bool]:
    """The next lines, and whether they are the last ones."""
    found: list[_Asked] = []
    texts = 0
    while len(found) < _STEP and texts < _STEP:
      line = file.readline(self._limits.bytes + 1)
      if not line:
        return found, True
      if line.strip():
        found.append(self._understand(msgspec.json.decode(line, type=_Line), grant))
        texts += len(found[-1].texts)
    return found, False

  def _understand(self, line: _Line, grant: Grant) -> _Asked:
    try:
      request = decode(bytes(line.body), EmbeddingRequest)
      wanted, texts = wanted_by(request), inputs_of(request)
      if not grant.may_use('prompts', wanted.name):
        raise UnknownPrompt(wanted.name)
      self._limits.check_texts(len(texts), 'input')
    except (Failure, UnknownPrompt) as error:
      return _Asked(line.custom_id, error=error)
    return _Asked(line.custom_id, request.model, wanted, texts)

  def _work(self, record: Record, grant: Grant, asked: Sequence[_Asked]) -> None:
    """Answers lines and appends the answers. Raises Busy, Full."""
    tenant, engine = Tenant(grant.tenant.name, _WEIGHT * grant.tenant.weight), self._engine
    guess = sum(engine.estimate(one.wanted.name, one.wanted.side, one.texts) for one in asked)
    with self._admission.enter(tenant, grant.limits, tokens=guess) as permit:
      tokens = [self._tokenize(one, tenant) for one in asked]
      total = sum(one.total for one in tokens if isinstance(one, Tokens))
      permit.know(total)
      vectors = self._embed(tokens, tenant, permit.spend)
    if self._stopped.is_set():
      return
    out, err = [], []
    for one, cut, found in zip(asked, tokens, vectors, strict=True):
      if isinstance(cut, Tokens) and not isinstance(found, Exception):
        out.append(_answer(one, cut, one.wanted.finish(cut, found)))
      else:
        err.append(_failure(one.id, found))
    counts, usage = record.card.request_counts, record.card.usage
    self._backlog.append(record, b''.join(out), b''.join(err))
    counts.completed += len(out)
    counts.failed += len(err)
    usage.prompt_tokens += total
    usage.total_tokens += total
    metrics = self._engine.metrics
    metrics.backfilled.labels('completed').inc(len(out))
    metrics.backfilled.labels('failed').inc(len(err))
    if tenant.name:
      metrics.key_tokens.labels(tenant.name).inc(total)

  def _tokenize(self, one: _Asked, tenant: Tenant) -> Tokens | Exception:
    """Raises OSError if the prompts cannot be read now."""
    if one.error is not None:
      return one.error
    engine, wanted = self._engine, one.wanted
    steps = engine.tokenize_steps(wanted.name, wanted.side, one.texts)
    try:
      tokens: Tokens = engine.pool.submit(tenant, steps).result()
      self._limits.check_tokens(tokens.total, 'input')
      wanted.check(tokens, engine.backbone.config.vector_size)
    except (Failure, InputError, UnknownPrompt) as error:
      return error
    return tokens

  def _embed(
    self,
    tokens: Sequence[Tokens | Exception],
    tenant: Tenant,
    spent: Callable[[float], None],
  ) -> list[Any]:
    """The vectors of each line, or an error."""
    found: list[Any] = [[] if isinstance(one, Tokens) else one for one in tokens]
    texts = [
      (number, text)
      for number, one in enumerate(tokens)
      if isinstance(one, Tokens)
      for text in one.texts
    ]
    for start in range(0, len(texts), _GROUP):
      group = texts[start : start + _GROUP]
      try:
        vectors = [*self._submit([text for _, text in group], tenant, spent)]
      except NotFinite:  # of one text; each text is tried again separately
        vectors = [self._submit_alone(text, tenant, spent) for _, text in group]
      for (number, _), vector in zip(group, vectors, strict=True):
        if isinstance(vector, Exception):
          found[number] = vector
        elif isinstance(found[number], list):
          found[number].append(vector)
    return [np.stack(one) if isinstance(one, list) else one for one in found]

  def _submit_alone(
    self, text: Any, tenant: Tenant, spent: Callable[[float], None]
  ) -> np.ndarray | Exception:
    try:
      return self._submit([text], tenant, spent)[0]
    except NotFinite as error:
      return error

  def _submit(
    self, texts: Sequence[Any], tenant: Tenant, spent: Callable[[float], None]
  ) -> np.ndarray:
    """Vectors of a few texts, when no other work waits or after a while. Raises Busy at the end."""
    batcher, until = self._engine.batcher, time.monotonic() + _PATIENCE_S
    while batcher.busy and time.monotonic() < until and not self._stopped.is_set():
      time.sleep(_NAP_S)
    while not self._stopped.is_set():
      try:
        return batcher.submit(texts, tenant, spent).result()
      except Busy as error:  # the queue is full
        self._stopped.wait(error.seconds)
    raise Busy(1.0)

  def _fail(self, record: Record, code: str, message: str) -> None:
    record.card.errors = BatchProblems(data=[BatchProblem(code, message)])
    self._backlog.finish(record, 'failed')
    logger.warning('batch %s failed: %s', record.card.id, message)


def _answer(one: _Asked, tokens: Tokens, vectors: np.ndarray) -> bytes:
  """A line of the file of answers."""
  rows = answers.written(vectors, one.wanted.form)
  body = messages.EmbeddingResponse(
    data=[messages.Embedding(index=n, embedding=row) for n, row in enumerate(rows)],
    model=one.model,
    usage=Usage(tokens.total, tokens.total),
    truncated=tokens.truncated,
  )
  return _line(one.id, 200, body)


def _failure(custom_id: str, error: Exception) -> bytes:
  """A line of the file of errors."""
  response = answers.failed(error, _PATH)
  return _line(custom_id, response.status_code, msgspec.json.decode(response.body))


def _line(custom_id: str, status: int, body: Any) -> bytes:
  id = f'batch_req_{secrets.token_hex(12)}'
  response = {'status_code': status, 'request_id': id, 'body': body}
  line = {'id': id, 'custom_id': custom_id, 'response': response, 'error': None}
  return answers.encode(line) + b'\n'
