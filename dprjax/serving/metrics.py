"""Counters and timers of the server, for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_MOST_MODELS = 1000  # labels; all others are one


class ServerMetrics:
  """Metrics of one server. The label of a model is empty for unserved names."""

  def __init__(self) -> None:
    self._models: set[str] = set()
    self.registry = CollectorRegistry()
    options: dict[str, Any] = {'namespace': 'dprjax', 'registry': self.registry}
    self.requests = Counter(
      'requests', 'Requests answered.', ['route', 'model', 'status'], **options
    )
    self.request_seconds = Histogram(
      'request_seconds',
      'From the first byte to the answer.',
      ['route'],
      buckets=_SECONDS,
      **options,
    )
    self.key_requests = Counter(
      'key_requests', 'Requests by tenant.', ['tenant', 'status'], **options
    )
    self.key_tokens = Counter('key_tokens', 'Tokens by tenant.', ['tenant'], **options)
    self.stage_seconds = Histogram(
      'stage_seconds',
      'Tokenise: of a request. Queue: of its first text. Device: of a batch, with its transfers. '
      'Slice: a part of a search.',
      ['stage'],
      buckets=_SECONDS,
      **options,
    )
    self.queued = Gauge('queued_texts', 'Texts that wait for a batch.', **options)
    self.batches = Counter('batches', 'Batches by their shape.', ['rows', 'tokens'], **options)
    self.rows = Counter('batch_rows', 'Texts in batches.', **options)
    self.row_places = Counter(
      'batch_row_places', 'Rows of batches: batch_rows / this is the fill.', **options
    )
    self.tokens = Counter('batch_tokens', 'Tokens in batches.', **options)
    self.token_places = Counter(
      'batch_token_places', 'Tokens and padding: 1 - batch_tokens / this is padding.', **options
    )
    self.resident = Gauge('prompts_resident', 'Prompts kept, by place.', ['place'], **options)
    self.loads = Counter('prompt_loads', 'Prompts brought to a place.', ['place'], **options)
    self.evictions = Counter('prompt_evictions', 'Prompts put out of it.', ['place'], **options)
    self.dropped = Counter(
      'dropped_texts', 'Texts whose client had left or timed out before their batch.', **options
    )

  def count_request(self, route: str, model: str, status: int, tenant: str, seconds: float) -> None:
    """Counts a request under its labels; there are at most 1,000 models."""
    if len(self._models) < _MOST_MODELS:
      self._models.add(model)
    elif model not in self._models:
      model = 'others'
    self.request_seconds.labels(route).observe(seconds)
    self.requests.labels(route, model, status).inc()
    if tenant:
      self.key_requests.labels(tenant, status).inc()

  def text(self) -> bytes:
    return generate_latest(self.registry)
