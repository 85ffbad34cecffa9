"""The dual encoder and its loss in plain numpy, float64: slow, short, and written from the papers
alone.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def _norm(x, p, eps):
  mean = x.mean(-1, keepdims=True)
  return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * p['scale'] + p[
    'bias'
  ]


def _dense(x, p, layer):
  return x @ p['kernel'][layer] + p['bias'][layer]


def encode(config, params, tokens, mask, prefix=None, types=0):
  """BERT with key/value prefixes. Returns [B, T, H] float64."""
  return states(config, params, tokens, mask, prefix, types)[-1]


def states(config, params, tokens, mask, prefix=None, types=0, shift=0):
  """The hidden states [B, T, H] before the first layer and after each; the first token's position
  is ``shift``.
  """
  e = params['embeddings']
  places = e['position']['embedding'][None, shift : shift + tokens.shape[1]]
  x = e['word']['embedding'][tokens] + places + e['token_type']['embedding'][types]
  return layers(config, params['layers'], _norm(x, e['norm'], config.layer_norm_eps), mask, prefix)


def layers(config, params, x, mask, prefix=None):
  """The hidden states before the first of these stacked layers and after each."""
  batch, length, _ = x.shape
  a, m = params['attention'], params['mlp']
  seen_states = [x]
  for layer in range(a['query']['bias'].shape[0]):
    q, k, v = (
      _dense(x, a[name], layer).reshape(batch, length, config.num_heads, -1)
      for name in ('query', 'key', 'value')
    )
    seen = mask
    if prefix is not None:
      k, v = (
        np.concatenate([np.broadcast_to(own, (batch, *own.shape)), rest], 1)
        for own, rest in zip(prefix[layer], (k, v), strict=True)
      )
      seen = np.concatenate([np.ones((batch, prefix.shape[2]), bool), mask], 1)
    s = np.einsum('btnd,bsnd->bnts', q, k) / np.sqrt(config.head_dim)
    s = np.where(seen[:, None, None], s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    context = np.einsum('bnts,bsnd->btnd', w / w.sum(-1, keepdims=True), v).reshape(x.shape)
    x = _norm(
      x + _dense(context, a['output'], layer),
      {k: v[layer] for k, v in a['norm'].items()},
      config.layer_norm_eps,
    )
    h = _dense(x, m['up'], layer)
    h = h * 0.5 * (1 + _erf(h / np.sqrt(2)))
    x = _norm(
      x + _dense(h, m['down'], layer),
      {k: v[layer] for k, v in m['norm'].items()},
      config.layer_norm_eps,
    )
    seen_states.append(x)
  return seen_states


def pool(hidden, mask, pooling, normalize):
  x = (
    hidden[:, 0]
    if pooling == 'cls'
    else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
  )
  return x / np.linalg.norm(x, axis=1, keepdims=True) if normalize else x


def loss(q, p, passage_index, relevant, temperature=1.0, in_batch=True, corpus=((), ())):
  """DPTDR Eq. 3 over the whole batch, a query at a time: -log softmax of the positive among what
  may be contrasted. ``corpus`` has the vectors and numbers of more passages.
  """
  lists, correct, seen = candidate_scores(
    q, p, passage_index, relevant, temperature, in_batch, corpus
  )
  total = sum(-log_softmax(scores)[0] for scores in lists)
  return total / len(lists), correct / len(lists), seen / len(lists)


def log_softmax(scores):
  shifted = scores - scores.max()
  return shifted - np.log(np.exp(shifted).sum())


def divergence(teacher, student):
  """The mean over queries of KL(teacher || student), of lists as `candidate_scores` gives them."""
  found = []
  for wanted, scores in zip(teacher, student, strict=True):
    wanted, scores = log_softmax(wanted), log_softmax(scores)
    found.append(np.sum(np.exp(wanted) * (wanted - scores)))
  return np.mean(found)


def candidate_scores(q, p, passage_index, relevant, temperature, in_batch, corpus=((), ())):
  """For each query, the scores of its positive and its negatives; how many positives are first, and
  how many negatives there are in all.
  """
  rows, candidates, _ = p.shape
  passage_index, relevant = np.asarray(passage_index).tolist(), np.asarray(relevant).tolist()
  all_scores = np.einsum('ih,jch->ijc', q, p) / temperature
  lists, correct, seen = [], 0, 0
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
    for vector, number in zip(*corpus, strict=True):
      if number not in relevant[i] and number != passage_index[i][0]:
        negatives.append(q[i] @ vector / temperature)
    lists.append(np.array([positive, *negatives]))
    correct += positive > max(negatives, default=-np.inf)
    seen += len(negatives)
  return lists, correct, seen


def distillation_loss(scores, teacher, kind):
  """Loss of [B, C] scores, the positive in column 0, a query at a time; NaN: no score."""
  values = []
  for own, wanted in zip(scores, teacher, strict=True):
    known = np.flatnonzero(~np.isnan(wanted))
    if kind == 'margin_mse':
      pairs = [c for c in known if c > 0 and 0 in known]
      values += [((own[0] - own[c]) - (wanted[0] - wanted[c])) ** 2 for c in pairs]
    elif len(known) > 1:
      p, q = (np.exp(x[known]) / np.exp(x[known]).sum() for x in (wanted, own))
      values.append(np.sum(p * np.log(p / q)))
  return np.mean(values)


def mlm_loss(config, head, embedding, hidden, positions, targets, weights):
  """BERT's masked-LM head, a masked token at a time: the sums of cross-entropies, of weights, and
  of what is predicted right.
  """
  total, count, right = 0.0, 0.0, 0.0
  for row, place in np.ndindex(*positions.shape):
    state = hidden[row, positions[row, place]].astype(np.float64)
    logits = mlm_logits(config, head, embedding, state)
    entropy = (
      np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[targets[row, place]]
    )
    total += weights[row, place] * entropy
    count += weights[row, place]
    right += weights[row, place] * (logits.argmax() == targets[row, place])
  return total, count, right


def sibling_loss(first, second, temperature=1.0):
  """DPTDR Eq. 4 over all 2m texts, a text at a time: -log softmax of its sibling among all texts
  but itself.
  """
  texts = [(i, x) for pair in zip(first, second, strict=True) for i, x in enumerate(pair)]
  owner = [i // 2 for i in range(len(texts))]
  total, correct = 0.0, 0
  for i, (_, x) in enumerate(texts):
    others = [j for j in range(len(texts)) if j != i]
    scores = np.array([x @ texts[j][1] for j in others]) / temperature
    (target,) = [k for k, j in enumerate(others) if owner[j] == owner[i]]
    total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target]
    correct += scores[target] > max(np.delete(scores, target))
  return total / len(texts), correct / len(texts)


def pair_row(form, first, second, max_length):
  """Tokens and token types of one pair: the second text is cut to the room beside the first."""
  room = max_length - form.specials
  first = list(first)
  second = list(second)[: room - len(first)]
  opening, middle, closing, second_type = form
  row = [*opening, *first, *middle, *second, *closing]
  behind = len(second) + len(closing)
  return np.array(row, np.int32), np.repeat([0, second_type], [len(row) - behind, behind])


def pair_score(config, params, head, tokens, types):
  """Log-odds of relevance by BertForSequenceClassification for one pair without padding."""
  first = encode(config, params, tokens[None], np.ones((1, len(tokens)), bool), types=types[None])[
    0, 0
  ]
  logits = (
    np.tanh(first @ head['dense']['kernel'] + head['dense']['bias']) @ head['output']['kernel']
    + head['output']['bias']
  )
  return logits[0] if len(logits) == 1 else logits[1] - logits[0]


def ranking_loss(scores, kind):
  """Of [B, C] scores, the positive in column 0: softmax cross-entropy a query, or binary
  cross-entropy a pair; the mean.
  """
  total = 0.0
  for row in scores:
    if kind == 'listwise':
      total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[0]
    else:
      p = 1 / (1 + np.exp(-row))
      total -= (np.log(p[0]) + np.log(1 - p[1:]).sum()) / len(row)
  return total / len(scores)


def prompt_encoder(params):
  """NIR-Prompt Eq. 2: Embedding, two layers of an LSTM in both directions, and an MLP, [P, H]."""

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  x = params['embedding']
  for layer in (0, 1):
    ways = []
    for way in ('forward', 'backward'):
      cell = params[f'{way}_{layer}']['cell']
      h = c = np.zeros(x.shape[1] // 2)
      states = []
      for row in x if way == 'forward' else x[::-1]:
        i, f, g, o = (
          row @ cell[f'i{gate}']['kernel']
          + h @ cell[f'h{gate}']['kernel']
          + cell[f'h{gate}']['bias']
          for gate in 'ifgo'
        )
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
      ways.append(np.array(states if way == 'forward' else states[::-1]))
    x = np.concatenate(ways, axis=1)
  x = np.maximum(x @ params['hidden']['kernel'] + params['hidden']['bias'], 0)
  return x @ params['output']['kernel'] + params['output']['bias']


def encode_template(config, params, row, fixed_layers):
  """The last states [T, H] of one input of word ids and of vectors, which the first layers see as
  they are.
  """
  e = params['embeddings']
  words = np.array([e['word']['embedding'][x] if np.ndim(x) == 0 else x for x in row])
  x = words + e['position']['embedding'][: len(row)] + e['token_type']['embedding'][0]
  x = _norm(x, e['norm'], config.layer_norm_eps)
  layer_params = params['layers']
  for layer in range(config.num_layers):
    for place, token in enumerate(row):
      if layer < fixed_layers and np.ndim(token):
        x[place] = token
    one = _slice(layer_params, layer)
    x = layers(config, one, x[None], np.ones((1, len(row)), bool))[-1][0]
  return x


def _slice(tree, layer):
  if isinstance(tree, dict):
    return {name: _slice(leaf, layer) for name, leaf in tree.items()}
  return tree[layer : layer + 1]


def mlm_logits(config, head, embedding, state):
  """A logit for every word, from the last state of one token."""
  x = state @ head['dense']['kernel'] + head['dense']['bias']
  return (
    embedding @ _norm(x * 0.5 * (1 + _erf(x / np.sqrt(2))), head['norm'], config.layer_norm_eps)
    + (head['bias'])
  )


def numeric_gradient(f, x, eps=1e-6):
  gradient = np.zeros_like(x)
  for i in np.ndindex(x.shape):
    up, down = x.copy(), x.copy()
    up[i] += eps
    down[i] -= eps
    gradient[i] = (f(up) - f(down)) / (2 * eps)
  return gradient
