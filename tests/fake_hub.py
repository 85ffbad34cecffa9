"""A Hugging Face hub on loopback: as much of its interface as a fetch needs."""

import contextlib
import hashlib
import http.server
import json
import re
import threading

import pytest
from huggingface_hub import constants


class Hub:
  """Repositories, by name: ``private`` and ``commits``, of which each is {path: content}.

  Attributes:
    repositories: their content.
    asked: the method and path of every request.
  """

  def __init__(self):
    self.repositories, self.asked = {}, []

  def add(self, name, files, private=False):
    """A further commit of a repository; returns its hash."""
    made = self.repositories.setdefault(name, {'private': private, 'commits': {}})
    before = list(made['commits'].values())[-1] if made['commits'] else {}
    commit = hashlib.sha1(f'{name}{len(made["commits"])}'.encode()).hexdigest()
    made['commits'][commit] = before | files
    return commit

  def find(self, name, revision):
    """The hash and the files of a revision; None where there is none."""
    commits = self.repositories.get(name, {'commits': {}})['commits']
    commit = list(commits)[-1] if revision == 'main' and commits else revision
    return (commit, commits[commit]) if commit in commits else None


def _handler(hub):
  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
      pass

    def answer(self, value, status=200, headers=()):
      content = value if isinstance(value, bytes) else json.dumps(value).encode()
      self.send_response(status)
      for name, text in headers:
        self.send_header(name, text)
      self.send_header('Content-Length', str(len(content)))
      self.end_headers()
      if self.command != 'HEAD':
        self.wfile.write(content)

    def do_GET(self):
      hub.asked.append(f'{self.command} {self.path}')
      path = self.path.partition('?')[0]
      if found := re.fullmatch(r'/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?', path):
        made, revision = hub.repositories.get(found[1]), found[3] or 'main'
        state = hub.find(found[1], revision)
        if made is None or (state is None and found[3]):
          return self.missing('RepoNotFound' if made is None else 'RevisionNotFound')
        commit, files = state or (None, {})
        if found[2] == 'tree':
          entries = [
            {'type': 'file', 'path': name, 'size': len(content), 'oid': 'f' * 40}
            for name, content in files.items()
          ]
          return self.answer(entries)
        about = {'id': found[1], 'private': made['private'], 'sha': commit}
        return self.answer(about | {'siblings': [{'rfilename': name} for name in files]})
      if found := re.fullmatch(r'/([^/]+/[^/]+)/resolve/([^/]+)/(.+)', path):
        state = hub.find(found[1], found[2])
        if state is None or found[3] not in state[1]:
          return self.missing('EntryNotFound')
        content = state[1][found[3]]
        digest = hashlib.sha256(content).hexdigest()
        return self.answer(content, 200, [('X-Repo-Commit', state[0]), ('ETag', f'"{digest}"')])
      return self.missing('EntryNotFound')

    do_HEAD = do_GET

    def missing(self, code):
      self.answer({'error': code}, 404, [('X-Error-Code', code)])

  return Handler


@contextlib.contextmanager
def serve(cache):
  """A hub that the client of this process uses, with a cache of its own."""
  hub = Hub()
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _handler(hub))
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  endpoint = f'http://127.0.0.1:{server.server_port}'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(constants, 'HF_HUB_OFFLINE', False)
    patch.setattr(constants, 'ENDPOINT', endpoint)
    patch.setattr(
      constants,
      'HUGGINGFACE_CO_URL_TEMPLATE',
      endpoint + '/{repo_id}/resolve/{revision}/{filename}',
    )
    patch.setattr(constants, 'HF_HUB_CACHE', str(cache))
    patch.setattr(constants, 'HF_HUB_DISABLE_PROGRESS_BARS', True)
    try:
      yield hub
    finally:
      server.shutdown()
      server.server_close()
      thread.join()
