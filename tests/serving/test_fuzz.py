"""Requests that the OpenAPI document of the server allows, and others: none makes it fail."""

import threading

import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax.serving.app import App
from dprjax.serving.engine import Engine
from dprjax.serving.indexes import ServedReranker
from dprjax.serving.options import Limits, ServerOptions
from tests.serving.conftest import running

pytestmark = pytest.mark.xdist_group('serving')


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # of schemathesis and its imports
def test_no_request_is_a_fault_of_the_server(small, tmp_path, caplog):
  # Slow to import.
  hypothesis = pytest.importorskip('hypothesis', reason="pip install 'dprjax[dev]'")
  schemathesis = pytest.importorskip('schemathesis', reason="pip install 'dprjax[dev]'")
  folder = tmp_path / 'prompts'
  small.write(folder, 'qa', 2)
  options = ServerOptions(rows=(1, 4), lengths=(48,), slots=6, deadline=0.001)
  engine = Engine(small.path, folder, options=options)
  app = App(
    engine,
    (),
    [ServedReranker('cross', small.path)],
    limits=Limits(bytes=100_000, seconds=20),
  )
  seen = set()
  with running(app) as address:
    schema = schemathesis.openapi.from_url(f'{address}/openapi.json')
    checks = [
      schemathesis.checks.not_a_server_error,
      schemathesis.specs.openapi.checks.status_code_conformance,
      schemathesis.specs.openapi.checks.content_type_conformance,
      schemathesis.specs.openapi.checks.response_schema_conformance,
    ]
    for result in schema.get_all_operations():
      operation = result.ok()

      @hypothesis.settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
      )
      @hypothesis.given(case=operation.as_strategy(), name=hypothesis.strategies.booleans())
      def ask(case, name):
        if case.method == 'POST' and name and isinstance(case.body, dict):
          case.body['model'] = 'cross' if case.path.endswith('rerank') else 'qa:query'
        response = case.call(timeout=60)
        seen.add((case.operation.label, response.status_code))
        case.validate_response(response, checks=checks)

      ask()
  app.engine.close()
  assert ('POST /v1/embeddings', 200) in seen and ('POST /v1/rerank', 200) in seen
  assert not [line for line in caplog.messages if 'a fault of dprjax' in line]
  assert threading.active_count() < 50
