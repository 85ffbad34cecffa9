"""A Hugging Face hub on loopback: as much of its interface as a push and a fetch need."""

import base64
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
    token: the secret of a writer.
  """

  def __init__(self):
    self.repositories, self.asked, self.token = {}, [], 'hf_right'

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

    def do_POST(self):
      body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
      hub.asked.append(f'POST {self.path}')
      if self.path == '/api/validate-yaml':
        return self.answer({'errors': [], 'warnings': []})
      if self.headers.get('Authorization') != f'Bearer {hub.token}':
        return self.answer({'error': 'Invalid username or password.'}, 401)
      if self.path == '/api/repos/create':
        sent = json.loads(body)
        name = f'{sent["organization"]}/{sent["name"]}'
        status = 409 if name in hub.repositories else 200
        made = {'private': sent.get('visibility') == 'private', 'commits': {}}
        hub.repositories.setdefault(name, made)
        return self.answer({'url': f'http://{self.headers["Host"]}/{name}', 'name': name}, status)
      if found := re.fullmatch(r'/api/models/(.+/.+)/preupload/main', self.path):
        files = [
          {'path': file['path'], 'uploadMode': 'regular', 'shouldIgnore': False, 'oid': None}
          for file in json.loads(body)['files']
        ]
        return self.answer({'files': files})
      if found := re.fullmatch(r'/api/models/(.+/.+)/commit/main', self.path):
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
          line['value']['path']: base64.b64decode(line['value']['content'])
          for line in lines
          if line['key'] == 'file'
        }
        commit = hub.add(found[1], files)
        url = f'http://{self.headers["Host"]}/{found[1]}/commit/{commit}'
        return self.answer({'commitOid': commit, 'commitUrl': url})
      return self.answer({'error': 'not here'}, 404)

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
    patch.setenv('HF_TOKEN', hub.token)
    try:
      yield hub
    finally:
      server.shutdown()
      server.server_close()
      thread.join()
