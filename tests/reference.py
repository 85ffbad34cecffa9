"""The dual encoder and its loss in plain numpy, float64: slow, short, and written from the papers alone."""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def _norm(x, p, eps):
  mean = x.mean(-1, keepdims=True)
  return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * p['scale'] + p['bias']


def _dense(x, p, layer):
  return x @ p['kernel'][layer] + p['bias'][layer]


def encode(config, params, tokens, mask, prefix=None):
  """BERT with key/value prefixes, one text at a time. Returns [B, T, H] float64."""
  out = []
  for row, real in zip(tokens, mask, strict=True):
    e = params['embeddings']
    x = e['word']['embedding'][row] + e['position']['embedding'][np.arange(len(row))] + e['token_type']['embedding'][0]
    x = _norm(x, e['norm'], config.layer_norm_eps)
    a, m = params['layers']['attention'], params['layers']['mlp']
    for layer in range(config.num_layers):
      q, k, v = (_dense(x, a[name], layer).reshape(len(row), config.num_heads, -1) for name in ('query', 'key', 'value'))
      seen = real
      if prefix is not None:
        k, v = np.concatenate([prefix[layer, 0], k]), np.concatenate([prefix[layer, 1], v])
        seen = np.concatenate([np.ones(prefix.shape[2], bool), real])
      heads = []
      for n in range(config.num_heads):
        s = q[:, n] @ k[:, n].T / np.sqrt(config.head_dim)
        s = np.where(seen[None], s, -np.inf)
        w = np.exp(s - s.max(1, keepdims=True))
        heads.append(w / w.sum(1, keepdims=True) @ v[:, n])
      x = _norm(x + _dense(np.concatenate(heads, 1), a['output'], layer), {k: v[layer] for k, v in a['norm'].items()}, config.layer_norm_eps)
      h = _dense(x, m['up'], layer)
      h = h * 0.5 * (1 + _erf(h / np.sqrt(2)))
      x = _norm(x + _dense(h, m['down'], layer), {k: v[layer] for k, v in m['norm'].items()}, config.layer_norm_eps)
    out.append(x)
  return np.stack(out)


def pool(hidden, mask, pooling, normalize):
  x = hidden[:, 0] if pooling == 'cls' else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
  return x / np.linalg.norm(x, axis=1, keepdims=True) if normalize else x


def loss(q, p, passage_index, relevant, temperature=1.0, in_batch=True):
  """DPTDR Eq. 3 over the whole batch, a query at a time: -log softmax of the positive among what may be contrasted."""
  rows, candidates, _ = p.shape
  total, correct, seen = 0.0, 0, 0
  for i in range(rows):
    positive = q[i] @ p[i, 0] / temperature
    negatives = []
    for j in range(rows):
      for c in range(candidates):
        if (i, 0) == (j, c) or (not in_batch and i != j):
          continue
        if passage_index[j, c] in relevant[i] or passage_index[j, c] == passage_index[i, 0]:
          continue
        negatives.append(q[i] @ p[j, c] / temperature)
    scores = np.array([positive, *negatives])
    total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - positive
    correct += positive > max(negatives, default=-np.inf)
    seen += len(negatives)
  return total / rows, correct / rows, seen / rows
