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
  """BERT with key/value prefixes. Returns [B, T, H] float64."""
  batch, length = tokens.shape
  e, a, m = params['embeddings'], params['layers']['attention'], params['layers']['mlp']
  x = e['word']['embedding'][tokens] + e['position']['embedding'][None, :length] + e['token_type']['embedding'][0]
  x = _norm(x, e['norm'], config.layer_norm_eps)
  for layer in range(config.num_layers):
    q, k, v = (_dense(x, a[name], layer).reshape(batch, length, config.num_heads, -1) for name in ('query', 'key', 'value'))
    seen = mask
    if prefix is not None:
      k, v = (np.concatenate([np.broadcast_to(own, (batch, *own.shape)), rest], 1) for own, rest in zip(prefix[layer], (k, v), strict=True))
      seen = np.concatenate([np.ones((batch, prefix.shape[2]), bool), mask], 1)
    s = np.einsum('btnd,bsnd->bnts', q, k) / np.sqrt(config.head_dim)
    s = np.where(seen[:, None, None], s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    context = np.einsum('bnts,bsnd->btnd', w / w.sum(-1, keepdims=True), v).reshape(x.shape)
    x = _norm(x + _dense(context, a['output'], layer), {k: v[layer] for k, v in a['norm'].items()}, config.layer_norm_eps)
    h = _dense(x, m['up'], layer)
    h = h * 0.5 * (1 + _erf(h / np.sqrt(2)))
    x = _norm(x + _dense(h, m['down'], layer), {k: v[layer] for k, v in m['norm'].items()}, config.layer_norm_eps)
  return x


def pool(hidden, mask, pooling, normalize):
  x = hidden[:, 0] if pooling == 'cls' else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
  return x / np.linalg.norm(x, axis=1, keepdims=True) if normalize else x


def loss(q, p, passage_index, relevant, temperature=1.0, in_batch=True):
  """DPTDR Eq. 3 over the whole batch, a query at a time: -log softmax of the positive among what may be contrasted."""
  rows, candidates, _ = p.shape
  passage_index, relevant = np.asarray(passage_index).tolist(), np.asarray(relevant).tolist()
  all_scores = np.einsum('ih,jch->ijc', q, p) / temperature
  total, correct, seen = 0.0, 0, 0
  for i in range(rows):
    positive = all_scores[i, i, 0]
    negatives = []
    for j in range(rows):
      for c in range(candidates):
        if (i, 0) == (j, c) or (not in_batch and i != j):
          continue
        if passage_index[j][c] in relevant[i] or passage_index[j][c] == passage_index[i][0]:
          continue
        negatives.append(all_scores[i, j, c])
    scores = np.array([positive, *negatives])
    total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - positive
    correct += positive > max(negatives, default=-np.inf)
    seen += len(negatives)
  return total / rows, correct / rows, seen / rows
