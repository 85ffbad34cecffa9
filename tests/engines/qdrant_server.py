"""A stand-in for a Qdrant server: its HTTP interface, as the models of its client publish it.

A server is in no package index that tests may assume. The models, which are made from its OpenAPI
document, read each request; the embedded mode of the client answers it.
"""

import http.server
import json
import re
import threading
import warnings
from typing import Any

import pydantic
import qdrant_client
from qdrant_client.http import models


class QdrantServer:
  """A server on a free port of this machine.

  Attributes:
    url: of the server.
    full: whether its disk is full.
    token: the key that it wants; '': none.
  """

  full, token = False, ''

  def __init__(self) -> None:
    self.client = qdrant_client.QdrantClient(':memory:', force_disable_check_same_thread=True)
    self._lock = threading.Lock()
    server = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log_message(self, *_: Any) -> None:
        pass

      def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        status, found = server.answer(self.command, self.path, body, self.headers)
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command != 'HEAD':
          self.wfile.write(content)

      do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer

    self._http = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._http.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._http.server_port}'
    threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

  def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
    if self.token and headers.get('api-key') != self.token:
      return 401, {'status': {'error': 'Must provide an API key'}}
    try:
      # The embedded mode warns that it has no index to look at more of.
      with self._lock, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return 200, self.handle(method, path.partition('?')[0], body)
    except (pydantic.ValidationError, ValueError) as error:
      return 400, {'status': {'error': str(error)}}
    except OSError as error:
      return 500, {'status': {'error': str(error)}}

  def handle(self, method: str, path: str, body: bytes) -> dict[str, Any]:
    if path in ('', '/'):
      return {'title': 'qdrant', 'version': '1.17.0'}
    return {'result': self._result(method, path, body), 'status': 'ok', 'time': 0.0}

  def _result(self, method: str, path: str, body: bytes) -> Any:
    client = self.client
    if path == '/collections':
      return plain(client.get_collections())
    found = re.fullmatch(r'/collections/(\w+)(/.*)?', path)
    assert found is not None, path
    name, rest = found[1], found[2] or ''
    match method, rest:
      case 'GET', '/exists':
        return {'exists': client.collection_exists(name)}
      case 'GET', '':
        return plain(client.get_collection(name))
      case 'PUT', '':
        made = models.CreateCollection.model_validate_json(body)
        return client.create_collection(
          name,
          made.vectors,
          sparse_vectors_config=made.sparse_vectors,
          quantization_config=made.quantization_config,
          metadata=made.metadata,
        )
      case 'PATCH', '':
        change = models.UpdateCollection.model_validate_json(body)
        return client.update_collection(name, metadata=change.metadata)
      case 'DELETE', '':
        return client.delete_collection(name)
      case 'PUT', '/points':
        if self.full:
          raise OSError('Service internal error: No space left on device: WAL buffer size exceeds')
        client.upsert(name, models.PointsBatch.model_validate_json(body).batch)
        return {'operation_id': 0, 'status': 'completed'}
      case 'POST', '/points/delete':
        client.delete(name, models.PointIdsList.model_validate_json(body))
        return {'operation_id': 0, 'status': 'completed'}
      case 'POST', '/points/count':
        return {'count': client.count(name).count}
      case 'POST', '/points':
        wanted = models.PointRequest.model_validate_json(body)
        return plain(client.retrieve(name, wanted.ids, True, wanted.with_vector))
      case 'POST', '/points/query/batch':
        requests = models.QueryRequestBatch.model_validate_json(body).searches
        return plain(client.query_batch_points(name, requests))
    raise ValueError(f'{method} {path}')

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()


def plain(value: Any) -> Any:
  """A model, or a list of models, as JSON has it."""
  if isinstance(value, list):
    return [plain(one) for one in value]
  return json.loads(value.model_dump_json())
