"""Scores of documents, tables and verdicts of experiments/topic_dpr.py, all from its ledger."""

from typing import NamedTuple

import numpy as np

import charts
import trials
from dprjax.papers.topic_dpr import papers as records
from dprjax.retrieval import best, exact, figures, measures
from dprjax.text import trec
from lab import statistics
from lab.measures import nearest

LEDGER = trials.LEDGERS / 'topic_dpr.jsonl'
FIXED = ('minilm', 'bm25')  # nothing is trained: the same for every seed
RANKED = ('Success@10', 'RR@100', 'nAP@10', 'nAP@50')
LEFT_OUT = 'nAP@10 of others'  # without the own abstract
QUERIES = ('Align', 'Uniform(q)', 'Sim(q, p-)')
PASSAGES = ('Uniform(p)', 'near topic', 'near category')
BEST = 101  # passages ranked for a query: 100 without its own
NEAREST = 10
WAYS = ('plain', 'oracle', 'infer')
FIGURE = 'topic-dpr.png'
LABELS = {
  'bm25': 'BM25',
  'minilm': 'MiniLM as it is',
  'dpr': 'DPR',
  'words': 'DPR, topic words',
  'random-words': 'DPR, random words',
  'dptdr': 'DPTDR',
  'topic': 'Topic-DPR',
  'without-tt': 'Topic-DPR without topic-topic loss',
  'random-topics': 'topics at random',
  'dptdr-frozen': 'DPTDR, frozen',
  'topic-frozen': 'Topic-DPR, frozen',
}


class Row(NamedTuple):
  """A comparison: a difference above 0 speaks for the claim.

  Attributes:
    claim: its number in docs/results.md; '': only on the page.
    text: the comparison in words.
    paper: the two numbers of the paper.
    measure: of which the difference is; of uniformity and cosines the lower one is above.
    ours, theirs: the systems, as ``name`` or ``name/way``.
  """

  claim: str
  text: str
  paper: str
  measure: str
  ours: str
  theirs: str


LOWER = ('Uniform(q)', 'Uniform(p)', 'Sim(q, p-)', 'Align')
_TITLES = 'the same, topics of titles'
ROWS = (
  Row('T1', 'Topic-DPR above DPTDR', '61.6, 58.6 MAP@10', 'nAP@10', 'topic/oracle', 'dptdr'),
  Row('T1', _TITLES, '', 'nAP@10', 'topic/infer', 'dptdr'),
  Row('T1', 'Topic-DPR above DPTDR, frozen', '53.2, 50.8', 'nAP@10', 'topic-frozen/oracle',
      'dptdr-frozen'),
  Row('T1', _TITLES, '', 'nAP@10', 'topic-frozen/infer', 'dptdr-frozen'),
  Row('', 'topics of words above topics at random', '', 'nAP@10', 'topic/oracle', 'random-topics'),
  Row('', 'topics at random above DPTDR', '', 'nAP@10', 'random-topics', 'dptdr'),
  Row('', 'the topic-topic loss helps', '', 'nAP@10', 'topic/oracle', 'without-tt/oracle'),
  Row('', 'Topic-DPR above DPTDR, own abstract left out', '', LEFT_OUT, 'topic/infer', 'dptdr'),
  Row('T2', 'topic words help DPR', '50.2, 49.5 MAP@50', 'nAP@50', 'words/oracle', 'dpr'),
  Row('T2', _TITLES, '', 'nAP@50', 'words/infer', 'dpr'),
  Row('T3', 'random words hurt DPR', '48.6, 49.5 MAP@50', 'nAP@50', 'dpr', 'random-words/oracle'),
  Row('', 'random words hurt DPR, others for titles', '', 'nAP@50', 'dpr', 'random-words/infer'),
  Row('T4', 'DPTDR above DPR', '58.6, 57.9 MAP@10', 'nAP@10', 'dptdr', 'dpr'),
  *(
    Row('T5', f'Topic-DPR more uniform than {said}', paper, measure, 'topic/oracle', other)
    for said, other, numbers in (
      ('DPTDR', 'dptdr', ('-3.08, -2.50', '-3.02, -2.13')),
      ('DPR', 'dpr', ('-3.08, -2.60', '-3.02, -2.22')),
    )
    for measure, paper in zip(('Uniform(q)', 'Uniform(p)'), numbers, strict=True)
  ),
  Row('T5', 'and better aligned than DPTDR', '.38, .42', 'Align', 'topic/oracle', 'dptdr'),
  Row('', 'Topic-DPR farther from others than DPTDR', '14.8, 34.6', 'Sim(q, p-)', 'topic/oracle',
      'dptdr'),
  Row('T6', 'DPTDR less uniform than DPR', '-2.50, -2.60', 'Uniform(q)', 'dpr', 'dptdr'),
  Row('T6', 'DPTDR less uniform than DPR', '-2.13, -2.22', 'Uniform(p)', 'dpr', 'dptdr'),
  Row('T6', 'and better aligned', '.42, .47', 'Align', 'dptdr', 'dpr'),
  Row('T7', 'topics stand apart, against MiniLM', 'a figure', 'near topic', 'topic', 'minilm'),
  Row('T7', 'the same, against topics at random', '', 'near topic', 'topic', 'random-topics'),
  Row('', 'categories stand apart, against MiniLM', 'a figure', 'near category', 'topic', 'minilm'),
)  # fmt: skip


# Scores of a run.


def relevant(documents, own):
  """The judgements: documents with a common category, the own one among them or not.

  A query of which none is left is left out.
  """
  qrels = records.related(
    [
      records.Paper(id_, title, abstract, categories)
      for id_, title, abstract, categories in zip(*documents, strict=True)
    ]
  )
  if own:
    return qrels
  others = {query: {id_: 1 for id_ in found if id_ != query} for query, found in qrels.items()}
  return {query: found for query, found in others.items() if found}


def ranking(vectors, way, documents):
  """{measure: scores of each document} of rankings by vectors, or of the rows of BM25."""
  ids = documents.ids
  if 'rows' in vectors:
    found = best.TopK(vectors['scores'], vectors['rows'])
  else:
    k = min(BEST, len(ids))
    found = exact.search(vectors[way], vectors['passages'], k, ids_at=best.ids_of(ids))
  run = trec.run_from_rows(ids, ids, found.rows, found.scores)
  values = measures.measure(run.top(BEST - 1), relevant(documents, True), RANKED)['per_query']
  others = run.keep(~run.same_id()).top(BEST - 1)
  left = measures.measure(others, relevant(documents, False), ('nAP@10',))['per_query']['nAP@10']
  return {name: np.array(list(values[name].values())) for name in RANKED} | {
    LEFT_OUT: np.array(list(left.values()))
  }


def uniformity(x):
  """A score of each unit vector; their mean is ``statistics.uniformity``.

  With R_i the mean kernel of a vector with the others and R their mean, it is log R + 2 (R_i - R) /
  R: the variance over vectors is that of the U-statistic, which the logarithm moves little (the
  infinitesimal jackknife, Efron 1982).
  """
  kernel = np.exp(-2 * np.clip(2 - 2 * x @ x.T, 0, None))
  np.fill_diagonal(kernel, 0)
  each = kernel.sum(axis=1) / (len(x) - 1)
  return np.log(each.mean()) + 2 * (each / each.mean() - 1)


def scores(vectors, documents, topics):
  """The scores of each document, by ``way measure`` for titles and by measure for abstracts."""
  found = {}
  for way in ['plain'] if 'rows' in vectors else [way for way in WAYS if way in vectors]:
    ranked = ranking(vectors, way, documents)
    found |= {f'{way} {name}': values for name, values in ranked.items()}
  if 'rows' in vectors:
    return found
  names = {name: i for i, name in enumerate(sorted(set().union(*documents.categories)))}
  marked = np.zeros((len(documents.ids), len(names)), bool)
  for row, some in zip(marked, documents.categories, strict=True):
    row[[names[name] for name in some]] = True
  labels = {'topic': np.eye(len(topics), dtype=bool)[topics.assign(documents.abstracts)]}
  labels['category'] = marked
  if 'dealt' in vectors:
    labels['dealt'] = np.eye(len(topics), dtype=bool)[vectors['dealt']]
  p = statistics.unit(vectors['passages'])
  found['Uniform(p)'] = uniformity(p)
  near = nearest(p, NEAREST)
  for kind, some in labels.items():
    found[f'near {kind}'] = np.mean([(some & some[rows]).any(axis=1) for rows in near.T], axis=0)
  unrelated = (marked.astype(np.float32) @ marked.T.astype(np.float32)) == 0
  for way in ('plain', 'oracle'):
    if way in vectors:
      q = statistics.unit(vectors[way])
      found[f'{way} Align'] = np.sum((q - p) ** 2, axis=1)
      found[f'{way} Uniform(q)'] = uniformity(q)
      found[f'{way} Sim(q, p-)'] = np.sum((q @ p.T) * unrelated, 1) / unrelated.sum(1)
  return found


# Tables of a ledger.


class Results:
  """The scores of a ledger, by run and seed."""

  def __init__(self, lines):
    self.lines, self.found = lines, trials.scores_by_run(lines)

  def system(self, name, measure):
    """{seed: {measure: scores}} of ``name`` or ``name/way``; {} where there is none."""
    name, _, way = name.partition('/')
    found = {}
    for seed, kept in self.found[name].items():
      keys = (f'{way} {measure}', f'plain {measure}', f'oracle {measure}', measure)
      if values := [kept[key] for key in keys if key in kept]:
        found[seed] = {measure: values[0]}
    return found

  def compare(self, row):
    """A verdict and the number of seeds; None where runs are missing."""
    pair = [self.system(name, row.measure) for name in (row.ours, row.theirs)]
    if row.theirs in FIXED and pair[1]:
      pair[1] = dict.fromkeys(pair[0], pair[1][0])
    if row.measure in LOWER:
      pair.reverse()
    found = trials.compare(*pair, [row.measure])
    return found and (found, len(pair[0].keys() & pair[1].keys()))

  def cell(self, name, measure):
    """The mean over seeds, and half their range."""
    return trials.cell(each[measure].mean() for each in self.system(name, measure).values())


def claims(results, *, numbered):
  """Rows of comparisons: those of docs/results.md, or those only on the page."""
  return [
    trials.claim_row(row.claim, row.text, row.paper, *found, row.measure)
    for row in ROWS
    if bool(row.claim) == numbered and (found := results.compare(row))
  ]


def write(out, docs=None):
  """OUT/results.md and the figure; into ``docs`` too, if it is given."""
  results = Results(trials.ledger(out))
  made = page(results)
  trials.write(out / 'results.md', made)
  print(made)
  draw(results, out / FIGURE)
  if docs:
    trials.publish(docs, 'topic_dpr', short(results), [out / FIGURE])


def page(results):
  """The tables of the page."""
  commits = ', '.join(dict.fromkeys(line['commit'] for line in results.lines))
  minutes = sum(line['seconds'] for line in results.lines) / 60
  return '\n'.join(
    (
      choices(results),
      main_table(results),
      geometry(results),
      trials.table(trials.CLAIMS, claims(results, numbered=True) + claims(results, numbered=False)),
      f'![nAP@10 of all systems]({FIGURE})\n',
      f'{len(results.lines)} runs, {minutes:.0f} minutes in all; commit {commits}.\n',
    )
  )


def short(results):
  """The tables of docs/experiments; docs/results.md has the claims with numbers."""
  return '\n'.join(
    (
      main_table(results),
      geometry(results),
      trials.table(trials.CLAIMS[1:], [row[1:] for row in claims(results, numbered=False)]),
      f'![nAP@10 of all systems]({FIGURE})\n',
      f'{len(results.lines)} runs.\n',
    )
  )


def choices(results):
  """The scores of the trials on dev."""
  rows = []
  for line in results.lines:
    prefix, _, rest = line['run'].partition('/')
    if prefix == 'dev':
      name = rest.partition('/')[0]
      rows.append(
        [LABELS[name], f'{line["rate"]:.3g}', f'{line["alpha"]:g}', f'{line["nAP@10"]:.4f}']
      )
  return trials.table(['seed 0', 'rate', 'alpha', 'nAP@10 on dev'], rows)


def systems(results):
  """(label, name/way) of what there is."""
  for name, text in LABELS.items():
    kept = next(iter(results.found[name].values()), {})
    for way in WAYS:
      if f'{way} nAP@10' in kept:
        yield (text if way == 'plain' else f'{text}, `{way}`'), f'{name}/{way}'


def main_table(results):
  columns = (*RANKED, LEFT_OUT)
  rows = [
    [text, *(results.cell(name, measure) for measure in columns)] for text, name in systems(results)
  ]
  return trials.table(['', *columns], rows)


def geometry(results):
  columns = (*QUERIES, *PASSAGES, 'near dealt')
  rows = [
    [text.replace(', `oracle`', ''), *(results.cell(name, measure) for measure in columns)]
    for text, name in systems(results)
    if not name.startswith('bm25') and not name.endswith('/infer')
  ]
  return trials.table(['', *columns], rows)


PLAIN = {
  '`': '',
  ', oracle': ' (abstract)',
  ', infer': ' (title)',
  'without topic-topic loss': 'without its loss',
}


def draw(results, path):
  """nAP@10 of each system less that of MiniLM as it is."""
  bars = {}
  for text, name in systems(results):
    if name.partition('/')[0] not in FIXED:
      row = Row('', '', '', 'nAP@10', name, 'minilm')
      (mean, low, high, _), _ = results.compare(row)
      for long, plain in PLAIN.items():
        text = text.replace(long, plain)
      bars[text] = figures.Bar(mean, low, high, False)
  if bars:
    foot = '1,000 papers; topics of titles come from the text in brackets; 95 % intervals'
    label = 'gain in nAP@10 over MiniLM as it is'
    title = 'Random words lose the gain that training brings'
    charts.dots({'': bars}, label, foot, path, title=title)
