"""Counters and timers of the server, for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class ServerMetrics:
  """Metrics of one server. A model's label is empty for unserved names."""

  def __init__(self) -> None:
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
    self.stage_seconds = Histogram(
      'stage_seconds',
      'Tokenise: of a request. Queue: of its first text. Device: of a batch, with its transfers.',
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

  def text(self) -> bytes:
    """All metrics in Prometheus's text format."""
    return generate_latest(self.registry)
