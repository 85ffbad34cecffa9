"""Routes of batches: files and batches as in the OpenAI interface."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from dprjax.serving.answers import Failure, json_answer
from dprjax.serving.backfill import Backfill
from dprjax.serving.backlog import (
  Backlog,
  BatchCard,
  FileCard,
  Full,
  InUse,
  Metadata,
  UnknownEntry,
)
from dprjax.serving.batcher import Busy
from dprjax.serving.messages import Upload, serves

if TYPE_CHECKING:
  from dprjax.serving.app import App

_UPLOADS = 4  # at a time
_SPARE = 64 << 10  # bytes of an upload beside the file


class BatchRequest(Struct):
  """A file of requests to process. `completion_window` is returned, but not a promise."""

  input_file_id: str
  endpoint: Literal['/v1/embeddings']
  completion_window: Annotated[str, Meta(max_length=16)] = '24h'
  metadata: Metadata | None = None


class _Page(Struct, kw_only=True):
  object: Literal['list'] = 'list'
  has_more: bool
  first_id: str | None
  last_id: str | None


class FileList(_Page, kw_only=True):
  data: list[FileCard]


class BatchList(_Page, kw_only=True):
  data: list[BatchCard]


class FileGone(Struct, kw_only=True):
  id: str
  object: Literal['file'] = 'file'
  deleted: bool = True


class BackfillRoutes:
  """Handlers of an `App`."""

  def __init__(self, app: 'App', backlog: Backlog, backfill: Backfill):
    self._app, self._backlog, self._backfill = app, backlog, backfill
    self._uploads = 0

  @serves('POST', '/v1/files', 'Upload a file of requests, one a line', FileCard, asked=Upload)
  async def _upload(self, request: Request) -> Response:
    if self._uploads >= _UPLOADS:
      raise Busy(5.0, f'{_UPLOADS} files are uploaded at a time')
    self._uploads += 1
    try:
      return await self._take(request)
    finally:
      self._uploads -= 1

  async def _take(self, request: Request) -> Response:
    app, most = self._app, self._backlog.most_bytes
    if not request.headers.get('content-type', '').startswith('multipart/form-data'):
      raise Failure(415, 'send a form, with the header Content-Type: multipart/form-data')
    stream = app.chunks(request, most + _SPARE)
    try:
      parser = MultiPartParser(
        request.headers, stream, max_files=1, max_fields=8, max_part_size=4096
      )
      async with app.arriving(most / app.limits.bytes):
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
      raise Failure(400, f'the body is no form: {error}') from error
    try:
      card = await self._keep(request, form)
    finally:
      await form.close()
    return json_answer(card)

  async def _keep(self, request: Request, form: FormData) -> FileCard:
    most, tenant = self._backlog.most_bytes, request.state.grant.tenant.name
    file, purpose = form.get('file'), form.get('purpose')
    if not isinstance(file, UploadFile):
      raise Failure(400, 'the form has no file', param='file')
    if purpose != 'batch':
      raise Failure(400, 'the purpose of a file is batch', param='purpose')
    if (file.size or 0) > most:
      raise Failure(413, f'the file is larger than {most:,} bytes', param='file')
    self._app.enter(request, size=file.size or 0)
    name = ''.join(one for one in file.filename or '' if one.isprintable())[:255]
    return await self._do(lambda: self._backlog.add_file(tenant, name, 'batch', file.file))

  @serves('GET', '/v1/files', 'The files', FileList)
  async def _files(self, request: Request) -> Response:
    tenant, purpose = request.state.grant.tenant.name, request.query_params.get('purpose')
    cards = await self._do(lambda: self._backlog.files(tenant))
    cards = [card for card in cards if purpose in (None, card.purpose)]
    return json_answer(_page(FileList, cards, request, 10_000))

  @serves('GET', '/v1/files/{name}', 'One of them', FileCard)
  async def _file(self, request: Request) -> Response:
    return json_answer(await self._named(request, self._backlog.file))

  @serves('DELETE', '/v1/files/{name}', 'Remove it', FileGone)
  async def _delete(self, request: Request) -> Response:
    await self._named(request, self._backlog.delete_file)
    return json_answer(FileGone(id=request.path_params['name']))

  @serves('GET', '/v1/files/{name}/content', 'Its content', bytes)
  async def _content(self, request: Request) -> Response:
    self._app.enter(request)
    path = await self._named(request, self._backlog.content)
    return FileResponse(path, media_type='application/octet-stream')

  @serves('POST', '/v1/batches', 'Work off a file', BatchCard, asked=BatchRequest)
  async def _create(self, request: Request) -> Response:
    asked = await self._app.read(request, BatchRequest)
    self._app.enter(request, size=request.state.size)
    tenant = request.state.grant.tenant.name
    card = await self._do(
      lambda: self._backlog.add_batch(
        tenant, asked.input_file_id, asked.endpoint, asked.completion_window, asked.metadata
      )
    )
    self._backfill.wake()
    return json_answer(card)

  @serves('GET', '/v1/batches', 'The batches', BatchList)
  async def _batches(self, request: Request) -> Response:
    tenant = request.state.grant.tenant.name
    cards = await self._do(lambda: self._backlog.batches(tenant))
    return json_answer(_page(BatchList, cards, request, 100))

  @serves('GET', '/v1/batches/{name}', 'One of them', BatchCard)
  async def _batch(self, request: Request) -> Response:
    return json_answer(await self._named(request, self._backlog.batch))

  @serves('POST', '/v1/batches/{name}/cancel', 'End it', BatchCard)
  async def _cancel(self, request: Request) -> Response:
    card = await self._named(request, self._backlog.cancel)
    self._backfill.wake()
    return json_answer(card)

  async def _named(self, request: Request, work: Callable[[str, str], Any]) -> Any:
    """Calls ``work`` with the tenant and the id that the address names."""
    tenant, id = request.state.grant.tenant.name, request.path_params['name']
    return await self._do(lambda: work(tenant, id))

  async def _do(self, work: Callable[[], Any]) -> Any:
    try:
      return await self._app.on_files(work)
    except UnknownEntry:
      raise Failure(404, 'there is no such file or batch', param='id') from None
    except InUse:
      raise Failure(409, 'a batch needs this file; cancel it first', param='id') from None
    except Full:
      raise Failure(
        413, 'the files of this tenant have no more room; delete some', param='file'
      ) from None


def _page(kind: Any, cards: Sequence[Any], request: Request, most: int) -> Any:
  """A part of a list by the fields ``after`` and ``limit`` of the address."""
  limit, after = request.query_params.get('limit', '20'), request.query_params.get('after')
  if not limit.isascii() or not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
    raise Failure(400, f'limit: expected 1 to {most:,}', param='limit')
  start = 0
  if after is not None:
    start = next((n + 1 for n, card in enumerate(cards) if card.id == after), 0)
    if not start:
      raise Failure(400, f'after: there is no {after[:100]!r} in this list', param='after')
  shown = [*cards[start : start + int(limit)]]
  ends = (shown[0].id, shown[-1].id) if shown else (None, None)
  more = start + len(shown) < len(cards)
  return kind(data=shown, has_more=more, first_id=ends[0], last_id=ends[1])
