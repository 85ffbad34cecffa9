"""Tables, verdicts and figures of experiments/topic_dpr.py, of whatever runs there are."""

import json
import pathlib

import numpy as np

import trials
from dprjax.analysis import figures, statistics
from dprjax.base import files
from dprjax.formats import paper_records, trec
from dprjax.retrieval import best, exact, measures
from lab import figures as drawn
from lab.measures import nearest, tsne

MEASURES = ('Success@1', 'Success@10', 'RR@100', 'nAP@10', 'nAP@50')
COUNTED, LEFT_OUT = 'counted', 'left out'
GEOMETRY = ('Uniform(q)', 'Uniform(p)', 'Sim(q, p+)', 'Sim(q, p-)')
WAYS = ('plain', 'oracle', 'infer', 'all')
DRAWS = 5000
NEAREST = 10
FIXED = ('minilm', 'bm25')  # nothing is trained: the same for every seed
LABELS = {
  'minilm': 'MiniLM as it is',
  'bm25': 'BM25',
  'dptdr': 'DPTDR',
  'one': 'K = 1',
  'topic': 'Topic-DPR',
  'own': "Topic-DPR, `query='own'`",
  'without-tt': 'Topic-DPR without tt',
  'dpr': 'DPR',
  'dptdr-tuned': 'DPTDR',
  'topic-tuned': 'Topic-DPR',
  'words': 'DPR, topic words',
  'random-words': 'DPR, random words',
  'random-topics': 'topics at random',
  'ten': 'K = 10',
  'lda': 'topics by LDA',
}
FROZEN = ('dptdr', 'one', 'topic', 'own', 'without-tt', 'random-topics', 'ten', 'lda')
TUNED = ('dpr', 'dptdr-tuned', 'topic-tuned', 'words', 'random-words')
FIGURES = ('topic-dpr-map.png', 'topic-dpr-bars.png')


def relevant(documents, own):
  """The judgements: documents with a common category, the own one among them or not.

  A query of which none is left is left out.
  """
  qrels = paper_records.related(
    [
      paper_records.Paper(id_, title, abstract, categories)
      for id_, title, abstract, categories in zip(*documents, strict=True)
    ]
  )
  if own:
    return qrels
  others = {query: {id_: 1 for id_ in found if id_ != query} for query, found in qrels.items()}
  return {query: found for query, found in others.items() if found}


def ranked(vectors, way, ids, most):
  """The run of a file of vectors, or of BM25's rows."""
  if 'rows' in vectors:
    found = best.TopK(vectors['scores'], vectors['rows'])
  else:
    queries = vectors[way]
    flat = queries.reshape(-1, queries.shape[-1])
    k, ids_at = min(most, len(ids)), best.ids_of(ids)
    top = exact.search(flat, vectors['passages'], k, ids_at=ids_at)
    found = best.best_of(top, len(queries) if queries.ndim == 3 else 1, k, ids_at)
  return trec.run_from_rows(ids, ids, found.rows, found.scores)


def scores(out, key, documents, most):
  """Of each query, by way, own abstract counted or left out, and measure."""
  path = pathlib.Path(out) / 'scores' / f'{key}.npz'
  if path.exists():
    return dict(np.load(path))
  vectors = np.load(pathlib.Path(out) / 'vectors' / f'{key}.npz')
  judged = {COUNTED: relevant(documents, True), LEFT_OUT: relevant(documents, False)}
  found = {}
  for way in ['plain'] if 'rows' in vectors else [way for way in WAYS if way in vectors]:
    run = ranked(vectors, way, documents.ids, most)
    runs = {COUNTED: run, LEFT_OUT: run.keep(~run.same_id())}
    for own, qrels in judged.items():
      values = measures.measure(runs[own].top(most - 1), qrels, MEASURES)['per_query']
      for name in MEASURES:
        found[f'{way}/{own}/{name}'] = np.array(list(values[name].values()))
  _save(path, found)
  return found


def _save(path, arrays):
  path.parent.mkdir(exist_ok=True)
  with files.atomic_write(path, 'wb') as file:
    np.savez(file, **arrays)


class Results:
  """What was measured: values and bootstrap draws by run, way and measure."""

  def __init__(self, out, documents, topics, last):
    self.out, self.documents, self.last = pathlib.Path(out), documents, last
    names = sorted({name for row in documents.categories for name in row})
    numbers = {name: number for number, name in enumerate(names)}
    marked = np.zeros((len(documents.ids), len(names)), bool)
    for row, some in zip(marked, documents.categories, strict=True):
      row[[numbers[name] for name in some]] = True
    own = topics.assign(documents.abstracts)
    self.labels = {'topic': np.eye(len(topics), dtype=bool)[own], 'category': marked}
    self.label_names = {'topic': [' '.join(row[:3]) for row in topics.names], 'category': names}
    self.unrelated = (marked.astype(np.float32) @ marked.T.astype(np.float32)) == 0
    self._counts = {}
    self._found = {}

  def counts(self, n):
    """How often each document is drawn: the same draws for all systems."""
    if n not in self._counts:
      rng = np.random.default_rng(0)
      self._counts[n] = rng.multinomial(n, np.full(n, 1 / n), DRAWS).astype(np.float32)
    return self._counts[n]

  def seeds(self, name, step=None):
    step = 0 if name in FIXED else self.last if step is None else step
    found = self.out.glob(f'vectors/{name}-[0-9]*-test-{step}.npz')
    return sorted(int(path.stem.split('-')[-3]) for path in found)

  def path(self, name, seed, step=None, folder='vectors'):
    if name in FIXED:
      seed, step = 0, 0
    return self.out / folder / f'{name}-{seed}-test-{self.last if step is None else step}.npz'

  def find(self, name, seed, step=None):
    """The values and draws of a run, ``{way|measure: (value, draws)}``."""
    path = self.path(name, seed, step, 'found')
    if path.stem not in self._found:
      if not path.exists():
        _save(path, self._measure(self.path(name, seed, step)))
      arrays = dict(np.load(path))
      self._found[path.stem] = {key: (float(row[0]), row[1:]) for key, row in arrays.items()}
    return self._found[path.stem]

  def _measure(self, path):
    vectors = dict(np.load(path))
    found = {}

    def keep(way, name, value, draws):
      found[f'{way}|{name}'] = np.concatenate([[value], draws])

    def keep_ratio(way, name, above, below=None):
      below = np.ones(len(above)) if below is None else below
      counts = self.counts(len(above))
      draws = (counts @ above.astype(np.float32)) / (counts @ below.astype(np.float32))
      keep(way, name, above.sum() / below.sum(), draws)

    def keep_uniformity(way, name, x):
      square = np.clip(2 - 2 * x @ x.T, 0, None)  # of unit vectors
      kernel = np.exp(-2 * square).astype(np.float32)
      np.fill_diagonal(kernel, 0)
      n, counts = len(x), self.counts(len(x))
      # Pairs of one document with itself are none.
      pairs = n**2 - (counts.astype(np.float64) ** 2).sum(axis=1)
      total = ((counts @ kernel) * counts).sum(axis=1, dtype=np.float64)
      keep(way, name, statistics.uniformity(x), np.log(total / pairs))

    for key, values in scores(self.out, path.stem, self.documents, 101).items():
      way, own, name = key.split('/')
      keep_ratio(way, f'{own} {name}', values)
    if 'rows' in vectors:
      return found
    p = statistics.unit(vectors['passages'])
    keep_uniformity('plain', 'Uniform(p)', p)
    near = nearest(p, NEAREST)
    labels = dict(self.labels)
    if 'topics' in vectors:
      labels['dealt'] = np.eye(vectors['topics'].max() + 1, dtype=bool)[vectors['topics']]
    for kind, marked in labels.items():
      shares = np.mean([(marked & marked[column]).any(axis=1) for column in near.T], axis=0)
      keep_ratio('plain', f'near {kind}', shares)
    for way in ('plain', 'oracle', 'infer'):
      if way not in vectors:
        continue
      q = statistics.unit(vectors[way])
      cosines = q @ p.T
      keep_uniformity(way, 'Uniform(q)', q)
      keep_ratio(way, 'Sim(q, p+)', np.diagonal(cosines))
      keep_ratio(
        way, 'Sim(q, p-)', np.where(self.unrelated, cosines, 0).sum(1), self.unrelated.sum(1)
      )
    return found

  def stat(self, name, seed, way, measure, step=None):
    """Value and draws. What has one prompt has one way; the passages have none."""
    found = self.find(name, seed, step)
    return found.get(f'{way}|{measure}', found.get(f'plain|{measure}'))

  def ways(self, name):
    seeds = self.seeds(name)
    found = self.find(name, seeds[0]) if seeds else {}
    return [way for way in WAYS if f'{way}|{COUNTED} nAP@10' in found]

  def cell(self, name, way, measure, step=None):
    """The mean over seeds, and half their range."""
    found = [self.stat(name, seed, way, measure, step) for seed in self.seeds(name, step)]
    return trials.cell([pair[0] for pair in found if pair is not None])

  def both(self, name, other):
    """The seeds that both have."""
    mine, others = self.seeds(name), self.seeds(other)
    if name in FIXED:
      return others if mine else []
    return mine if other in FIXED and others else sorted(set(mine) & set(others))

  def compare(self, name, way, other, measure, sign, other_measure=None, other_way=None):
    """A verdict on ``sign`` times the difference of two systems being positive."""
    values, draws = [], []
    for seed in self.both(name, other):
      a = self.stat(name, seed, way, measure)
      b = self.stat(other, seed, other_way or way, other_measure or measure)
      if a is None or b is None:
        return None
      values.append(a[0] - b[0])
      draws.append(a[1] - b[1])
    return trials.verdict(values, np.mean(draws, axis=0), sign) if values else None

  def path_of(self, name, way, measure, seeds):
    """Values ``[seeds, steps]`` and draws ``[seeds, steps, D]``, from MiniLM as it is on."""
    steps = [0, self.last // 3, self.last * 2 // 3, self.last]
    found = [
      [
        self.stat(*(('minilm', 0) if step == 0 else (name, seed)), way, measure, step)
        for step in steps
      ]
      for seed in seeds
    ]
    if any(pair is None for row in found for pair in row):
      return None
    return (
      np.array([[pair[0] for pair in row] for row in found]),
      np.array([[pair[1] for pair in row] for row in found]),
    )

  def has_path(self, name):
    steps = (self.last // 3, self.last * 2 // 3, self.last)
    return bool(self.seeds('minilm')) and len({tuple(self.seeds(name, s)) for s in steps}) == 1

  def compare_at_equal(self, name, way, other, measure, sign):
    """``compare`` where both have the same nAP@10: the highest that both reach.

    Between checkpoints all is linear; before the first one stands MiniLM as it is.
    """
    if not (self.has_path(name) and self.has_path(other)):
      return None
    seeds = self.both(name, other)
    paths = [
      [self.path_of(one, way, what, seeds) for what in (f'{COUNTED} nAP@10', measure)]
      for one in (name, other)
    ]
    if not seeds or any(path is None for pair in paths for path in pair):
      return None

    def difference(*arrays):
      """Of one draw or seed: nAP@10 and the measure of both, ``[steps]`` each."""
      x, y, other_x, other_y = arrays
      x, other_x = np.maximum.accumulate(x), np.maximum.accumulate(other_x)
      target = min(x[-1], other_x[-1])
      return first_at(target, x, y) - first_at(target, other_x, other_y)

    values = [
      difference(*(path[0][row] for pair in paths for path in pair)) for row in range(len(seeds))
    ]
    means = [path[1].mean(axis=0) for pair in paths for path in pair]  # [steps, D]
    draws = np.array([difference(*(mean[:, i] for mean in means)) for i in range(DRAWS)])
    point = difference(*(path[0].mean(axis=0) for pair in paths for path in pair))
    found = trials.verdict(values, draws, sign)
    return (point, *found[1:])


def first_at(target, x, y):
  """y where the ascending x first reaches the target."""
  at = int(np.searchsorted(x, target))
  if at == 0:
    return y[0]
  at = min(at, len(x) - 1)
  width = x[at] - x[at - 1]
  share = (target - x[at - 1]) / width if width > 0 else 1.0
  return y[at - 1] + min(share, 1.0) * (y[at] - y[at - 1])


def write(out, documents, topics, last, docs=None, maps=True):
  """OUT/results.md and the figures; into ``docs`` too, if it is given."""
  results = Results(out, documents, topics, last)
  made = '\n'.join(
    part
    for part in (
      chosen_table(results),
      main_table(results, COUNTED),
      main_table(results, LEFT_OUT),
      geometry_table(results),
      better(results),
      uniform(results),
      words(results),
      dptdr_against_dpr(results),
      apart(results),
      draw(results, maps),
      ledger(results),
    )
    if part
  )
  trials.write(results.out / 'results.md', made)
  if docs:
    trials.publish(docs, 'topic_dpr', made, [results.out / name for name in FIGURES])


def chosen_table(results):
  rows = []
  for kind in ('dptdr', 'topic'):
    path = results.out / f'chosen-{kind}.json'
    if path.exists():
      found = json.loads(path.read_text())
      for tried in found['tried']:
        best = all(tried[name] == value for name, value in found['chosen'].items())
        rows.append(
          [
            LABELS[kind],
            f'{tried["rate"]:g}',
            f'{tried["alpha"]:g}, {tried["margin"]:g}',
            f'{tried["nAP@10"]:.4f}{" (chosen)" if best else ""}',
          ]
        )
  if not rows:
    return ''
  head = ['frozen, seed 0', 'rate', 'alpha, margin', 'nAP@10 on dev']
  return trials.table(head, rows)


def systems(results, *, every=True):
  """(training, name, way) of what there is."""
  found = [('', name, 'plain') for name in ('bm25', 'minilm') if results.seeds(name)]
  for training, names in (('frozen', FROZEN), ('tuned', TUNED)):
    for name in names:
      ways = results.ways(name)
      if name == 'random-topics':
        ways = [way for way in ways if way != 'infer']  # there is nothing to infer
      found += [(training, name, way) for way in ways if every or way != 'all']
  return found


def label(training, name, way):
  words = [LABELS[name], training, '' if way == 'plain' else f'`{way}`']
  return ', '.join(word for word in words if word)


def main_table(results, own):
  rows = [
    [
      label(training, name, way),
      str(len(results.seeds(name))) if training else '',
      *(results.cell(name, way, f'{own} {measure}') for measure in MEASURES),
    ]
    for training, name, way in systems(results)
  ]
  if not rows:
    return ''
  return trials.table([f'own abstract {own}', 'seeds', *MEASURES], rows)


def geometry_table(results):
  rows = []
  for training, name, way in systems(results, every=False):
    if name != 'bm25':
      values = [results.cell(name, way, measure) for measure in GEOMETRY]
      near = [results.cell(name, way, f'near {kind}') for kind in ('topic', 'category')]
      rows.append([label(training, name, way), *values, *near])
  if not rows:
    return ''
  head = ['', *GEOMETRY, '10 nearest: same topic', 'same category']
  return trials.table(head, rows)


def claims(results, cases, measures_, sign=1):
  """A table of verdicts: a row for each (label, name, way, other), a column for each measure."""
  rows = []
  for text, name, way, other in cases:
    found = [results.compare(name, way, other, measure, sign) for measure in measures_.values()]
    if any(found):
      rows.append([text, *map(trials.shown, found)])
  return rows and trials.table(['', *measures_], rows)


def better(results):
  """Topic-DPR > DPTDR, and K = 1."""
  cases = []
  for other, against in (('dptdr', 'DPTDR'), ('one', 'K = 1')):
    for name, way in (
      ('topic', 'oracle'),
      ('topic', 'infer'),
      ('own', 'infer'),
      ('own', 'oracle'),
      ('topic', 'all'),
    ):
      what = f"`{way}`, trained with `query='own'`" if name == 'own' else f'`{way}`'
      cases.append((f'frozen, {what}, against {against}', name, way, other))
  for way in ('oracle', 'infer', 'all'):
    cases.append((f'tuned, `{way}`, against DPTDR', 'topic-tuned', way, 'dptdr-tuned'))
  found = claims(results, cases, {name: f'{COUNTED} {name}' for name in ('nAP@10', 'nAP@50')})
  left = claims(results, cases, {name: f'{LEFT_OUT} {name}' for name in ('nAP@10', 'nAP@50')})
  controls = claims(
    results,
    [
      ('tt: with, against without, `oracle`', 'topic', 'oracle', 'without-tt'),
      ('tt: with, against without, `infer`', 'topic', 'infer', 'without-tt'),
      ('topics of words, against topics at random, `oracle`', 'topic', 'oracle', 'random-topics'),
      ('K = 10, against K = 5, `oracle`', 'ten', 'oracle', 'topic'),
      ('K = 10, against K = 5, `infer`', 'ten', 'infer', 'topic'),
      ('LDA, against hLDA, `oracle`', 'lda', 'oracle', 'topic'),
      ('LDA, against hLDA, `infer`', 'lda', 'infer', 'topic'),
    ],
    {name: f'{COUNTED} {name}' for name in ('nAP@10', 'nAP@50')},
  )
  if not found:
    return ''
  return (
    f'**Topic-DPR is better than DPTDR** (Table 1), own abstract counted:\n\n{found}\n'
    f'Own abstract left out:\n\n{left}\n'
    + (f'What makes the difference (is the first better?):\n\n{controls}' if controls else '')
  )


def uniform(results):
  """More uniform; lower Sim(q, p-)."""
  cases = []
  for name, training, others in (
    ('topic', 'frozen', ('dptdr', 'one', 'minilm')),
    ('topic-tuned', 'tuned', ('dptdr-tuned', 'dpr')),
  ):
    for way in ('oracle', 'infer'):
      cases += [
        (f'{training}, `{way}`, against {LABELS[other]}', name, way, other) for other in others
      ]
  lower = {name: name for name in GEOMETRY if name != 'Sim(q, p+)'}
  found = claims(results, cases, lower, sign=-1)
  if not found:
    return ''
  rows = []
  for text, name, way, other in cases:
    if other != 'minilm':
      at_equal = [
        results.compare_at_equal(name, way, other, measure, -1) for measure in lower.values()
      ]
      if any(at_equal):
        rows.append([text, *map(trials.shown, at_equal)])
  made = f'**More uniform, lower Sim(q, p-)** (Table 3), after all updates:\n\n{found}'
  if rows:
    made += '\nWhere both have the same nAP@10:\n\n' + trials.table(['', *lower], rows)
  return made


def words(results):
  """Topic words help, random words hurt."""
  wanted = {name: f'{COUNTED} {name}' for name in ('Success@10', 'RR@100', 'nAP@10', 'nAP@50')}
  helped, hurt = (
    claims(results, [(f'`{way}`', name, way, 'dpr') for way in ('oracle', 'infer')], wanted, sign)
    for name, sign in (('words', 1), ('random-words', -1))
  )
  return (f'**Topic words help** (Table 2), against DPR:\n\n{helped}\n' if helped else '') + (
    f'**Random words hurt** (Table 2), against DPR:\n\n{hurt}' if hurt else ''
  )


def dptdr_against_dpr(results):
  """Better MAP, less uniform."""
  case = [('tuned', 'dptdr-tuned', 'plain', 'dpr')]
  better_map = claims(results, case, {name: f'{COUNTED} {name}' for name in ('nAP@10', 'nAP@50')})
  less = claims(results, case, {name: name for name in ('Uniform(q)', 'Uniform(p)')})
  if not better_map:
    return ''
  return (
    f'**DPTDR has a better MAP than DPR** (Table 1):\n\n{better_map}\n'
    f'**and is less uniform** (Table 3):\n\n{less}'
  )


def apart(results):
  """Topics stand apart."""
  rows = []
  for text, other, measure, other_measure in (
    ('against frozen MiniLM', 'minilm', 'near topic', None),
    ('against topics at random', 'random-topics', 'near topic', None),
    ('against what topics at random do to their own labels', 'random-topics', 'near topic',
     'near dealt'),
    ('same category, against frozen MiniLM', 'minilm', 'near category', None),
    ('same category, against topics at random', 'random-topics', 'near category', None),
  ):  # fmt: skip
    found = results.compare('topic', 'oracle', other, measure, 1, other_measure)
    if found:
      rows.append([text, trials.shown(found)])
  if not rows:
    return ''
  made = '**Topics stand apart** (Figure 4): 10 nearest passages, frozen Topic-DPR:\n\n'
  made += trials.table(['', 'share of the 10 nearest with the same topic'], rows)
  dealt = results.cell('random-topics', 'oracle', 'near dealt')
  if dealt:
    sizes = self_share(results)
    made += (
      f'\nOf topics at random, {dealt} of the 10 nearest have the same, where {sizes:.3f} would by '
      'chance.\n'
    )
  return made


def self_share(results):
  """How often two documents have the same topic at random."""
  dealt = np.load(results.path('random-topics', results.seeds('random-topics')[0]))['topics']
  shares = np.bincount(dealt) / len(dealt)
  return float((shares**2).sum())


def draw(results, with_maps):
  """The figures; the lines that show them."""
  lines = []
  chosen = [
    ('MiniLM', 'minilm', 'plain'),
    ('DPTDR', 'dptdr', 'plain'),
    ('K = 1', 'one', 'plain'),
    ('Topic-DPR, oracle', 'topic', 'oracle'),
    ('Topic-DPR, infer', 'topic', 'infer'),
    ("Topic-DPR, query='own', infer", 'own', 'infer'),
    ('Topic-DPR, all', 'topic', 'all'),
  ]
  chosen = [row for row in chosen if results.seeds(row[1])]
  if chosen:
    bars = {}
    for measure in ('nAP@10', 'nAP@50'):
      bars[measure] = {}
      for text, name, way in chosen:
        found = [
          results.stat(name, seed, way, f'{COUNTED} {measure}') for seed in results.seeds(name)
        ]
        low, high = np.quantile(np.mean([pair[1] for pair in found], axis=0), [0.025, 0.975])
        mean = float(np.mean([pair[0] for pair in found]))
        bars[measure][text] = figures.Bar(mean, float(low), float(high), False)
    foot = 'frozen backbone, own abstract counted; 95 % bootstrap intervals'
    figures.dots(
      bars,
      'mean over queries and seeds',
      foot,
      results.out / FIGURES[1],
      title='Topic prompts rank higher than one prompt',
      differences=False,
    )
    lines.append(f'![nAP@10 and nAP@50 of frozen systems]({FIGURES[1]})')
  maps = {'MiniLM as it is': 'minilm', 'Topic-DPR, frozen': 'topic'}
  maps = {text: name for text, name in maps.items() if with_maps and results.seeds(name)}
  if 'Topic-DPR, frozen' in maps:
    path = results.out / FIGURES[0]
    points = {}
    for text, name in maps.items():
      seed = results.seeds(name)[0]
      kept = results.path(name, seed, folder='tsne')
      if not kept.exists():
        _save(kept, {'points': tsne(np.load(results.path(name, seed))['passages'])})
      points[text] = np.load(kept)['points']
    foot = f't-SNE of {len(results.documents.ids):,} abstracts; grey: other categories'
    drawn.maps(points, results.labels, results.label_names, foot, path)
    lines.append(f'![Abstracts by topic and category]({FIGURES[0]})')
  return '\n\n'.join(lines) + '\n' if lines else ''


def ledger(results):
  lines = trials.ledger(results.out)
  if not lines:
    return ''
  commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
  hours = sum(line['seconds'] for line in lines) / 3600
  return f'{len(lines)} runs, {hours:.1f} hours in all; commit {commits}.\n'
