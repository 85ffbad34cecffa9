"""Makes a prompt from documents without judgements, by commands that run once each.

Below the workdir are ``queries`` (a BEIR folder), ``runs``, ``mined.jsonl``, ``training``,
``prompt`` (prompt.npz and its card), ``passages`` (vectors of the frozen encoder, searched by the
prompt), ``metrics``, ``choice.json`` and the report.
"""

import json
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np
from etils import epath

from dprjax.asking import passages
from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.data import docstrings, sources
from dprjax.formats.qrels import Qrels, read_qrels
from dprjax.formats.rankings import Rankings
from dprjax.retrieval import choosing, measures
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate, Choice
from dprjax.runtime import config as configs
from dprjax.runtime import options
from dprjax.runtime import workdir as workdirs
from dprjax.runtime.stages import ModelFiles, Stages, TextFiles, differences

METHOD = 'nolabels'
DOCSTRINGS = 'docstrings:'
_FUSION = 'zscore'
_MEASURE = 'nDCG@10'
_JUDGED = 'judged'
_MOST_PRICE = 1e6
# The compared systems, by names of runs.
_SYSTEMS = {
  'frozen': ('frozen encoder', FROZEN),
  'bm25': ('BM25', BM25),
  'fused': ('frozen encoder with BM25', Candidate('frozen', fused=True)),
  'prompt': ('+ prompt', Candidate('prompt')),
  'prompt-fused': ('+ prompt, with BM25', Candidate('prompt', fused=True)),
}

_TEXT = options.text('')
OPTIONS = {
  'method': _TEXT,
  'seed': options.whole(42, least=0, most=2**31 - 1),
  'data.dir': _TEXT,
  'data.judged': _TEXT,
  'data.judged_split': _TEXT,
  'queries.passages': options.whole(2000, least=1, most=10**7),
  'queries.per_passage': options.whole(3, least=1, most=100),
  'queries.answers': _TEXT,
  'queries.endpoint': _TEXT,
  'queries.model': _TEXT,
  'queries.template': _TEXT,
  'queries.examples': _TEXT,
  'queries.concurrency': options.whole(4, least=1, most=256),
  'queries.budget': options.number(0.0, least=0, most=1e9),
  'queries.price_in': options.number(0.0, least=0, most=_MOST_PRICE),
  'queries.price_out': options.number(0.0, least=0, most=_MOST_PRICE),
  'within': options.whole(20, least=1, most=10**6),
  'reranker_path': _TEXT,
  'depth': options.whole(100, least=1, most=10**6),
  'sample': options.whole(30, least=1, most=10**6),
  'measures': options.texts(),
  'retriever_recipe': _TEXT,
}
"""Options besides ``config.retriever``; configs/nolabels.py explains them."""

OURS = (
  'seed',
  *('data.dir', 'data.format', 'data.mined_negatives', 'data.train_split', 'data.token_cache'),
  *('data.passage_embeddings', 'distillation.scores', 'distillation.temperature'),
)
"""Options of ``config.retriever`` set by the pipeline."""


class NoLabels:
  """One experiment below ``workdir``.

  Args:
    config: of configs/nolabels.py.
    workdir: the folder of all files.

  Raises:
    InputError: a bad option; from ``run``: missing or malformed text, a workdir with other
      contents, or a killed stage.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path):
    check(config)
    self.config, self.workdir = config, workdir

  def run(self) -> Choice:
    """Runs all stages; returns the choice."""
    with workdirs.claim(self.workdir, workdirs.PIPELINE, inputs(self.config)):
      return self._run()

  def _run(self) -> Choice:
    c, work = self.config, self.workdir
    files.write_json(work / 'config.json', json.loads(configs.to_json(c)))
    judged = bool(c.data.judged)
    # Queries; BM25; three encodings and a search; fusion; the filter; mining; training and export;
    # queries with the prompt, their search and fusion; measures of each system; the table. Judged
    # queries are searched by all systems, and a cross-encoder scores once.
    self._stages = Stages(
      work, 15 + len(_SYSTEMS) + 4 * judged + bool(c.reranker_path) + self._trims()
    )
    corpus = self._queries()
    made = TextFiles(
      work / 'queries',
      work / 'queries' / 'corpus.jsonl',
      work / 'queries' / 'queries.jsonl',
      {split: work / 'queries' / 'qrels' / f'{split}.tsv' for split in ('train', 'found')},
    )
    frozen = ModelFiles(c.retriever.backbone.path)
    # The text of a query is removed from its training passage, but not from the searched passage.
    title = 'Encode: passages'
    whole = made._replace(corpus=corpus)
    vectors = self._encode(title, frozen, whole, None, work / 'passages')
    trained_on = vectors
    if self._trims():
      title = 'Encode: passages without the words of their queries'
      trained_on = self._encode(title, frozen, made, None, work / 'trained-on')
    teacher, runs = self._retrieve_train(made, frozen, trained_on)
    self._filter(made, teacher)
    mined = self._mine(made, runs)
    self._train(made, mined, teacher, trained_on, runs['frozen'])
    model = ModelFiles(frozen.backbone, work / 'prompt.npz')
    self._stages.export('Export: the prompt', work / 'training', work / 'prompt.npz')
    if judged:
      # Not under their own name, which may be that of the made queries.
      texts, split = self._judged(corpus), _JUDGED
      qrels = texts.qrels[split]
      runs = self._retrieve(texts, split, frozen, vectors)
    else:
      # Generated queries held out of the training.
      texts, split, vectors = made, 'train', trained_on
      qrels = workdirs.trained(work / 'training') / workdirs.DEV
    queries = self._queries_under('prompt', model, texts, split)
    runs['prompt'] = self._search('prompt', split, vectors, queries)
    runs['prompt-fused'] = self._fuse('prompt', 'prompt-fused', split, runs['bm25'], runs['prompt'])
    metrics = {name: self._measure(name, runs[name], qrels) for name in _SYSTEMS}
    choice = choose({name: _scores(path) for name, path in metrics.items()}, judged)
    files.write_json(work / workdirs.CHOSEN, choice.record())
    self._card(metrics, judged)
    titles = {title: metrics[name] for name, (title, _) in _SYSTEMS.items()}
    self._stages.report(titles, c.measures, work)
    print(self._last_words(choice), flush=True)
    return choice

  def _trims(self) -> bool:
    """Whether the text of a query is removed from its passage, as without a generator."""
    return not (self.config.queries.answers or self.config.queries.endpoint)

  def _queries(self) -> epath.Path:
    """Makes queries; returns the whole corpus."""
    c, q, work = self.config, self.config.queries, self.workdir
    given = c.data.dir
    if given.startswith(DOCSTRINGS):
      given = str(work / 'data')
      if not epath.Path(given).exists():
        docstrings.build(given, c.data.dir.removeprefix(DOCSTRINGS).split(','))
    corpus = passages.corpus_file(given)
    flags = [f'--corpus={corpus or given}', f'--out={work / "queries"}', f'--seed={c.seed}']
    flags += [f'--passages={q.passages}', f'--per_passage={q.per_passage}']
    flags += [f'--{name}={q[name]}' for name in ('answers', 'endpoint', 'model') if q[name]]
    if q.endpoint:
      more = ('template', 'examples', 'concurrency', 'price_in', 'price_out', 'budget')
      flags += [f'--{name}={q[name]}' for name in more if q[name]]
    reads = [corpus or epath.Path(given)]
    reads += [epath.Path(q[name]) for name in ('answers', 'template', 'examples') if q[name]]
    self._stages.run(
      'Make queries', ['queries', *flags], work / 'queries' / 'report.json', reads, None
    )
    return corpus or work / 'queries' / 'passages.jsonl'

  def _retrieve_train(
    self, texts: TextFiles, frozen: ModelFiles, vectors: epath.Path
  ) -> tuple[epath.Path, dict[str, epath.Path]]:
    """The teacher run for the queries, and all runs."""
    runs = self._retrieve(texts, 'train', frozen, vectors)
    if not (reranker := self.config.reranker_path):
      return runs['fused'], runs
    out = self.workdir / 'runs' / 'reranked.train.trec'
    inside = [f'--run={runs["fused"]}', f'--queries={texts.queries}', f'--corpus={texts.corpus}']
    self._stages.run(
      'Score by the cross-encoder',
      ['rerank', f'--backbone={reranker}', *inside, f'--out={out}', f'--depth={self.config.depth}'],
      out,
      [runs['fused'], texts.queries, texts.corpus, *ModelFiles(reranker).files],
    )
    return out, runs

  def _retrieve(
    self, texts: TextFiles, split: str, frozen: ModelFiles, vectors: epath.Path
  ) -> dict[str, epath.Path]:
    """Runs of BM25, the frozen encoder, and their fusion, for the queries of a split."""
    bm25 = self._stages.bm25(
      f'BM25: {_asked(split)}', texts, split, self._run_file('bm25', split), self._depth(split)
    )
    queries = self._queries_under('frozen', frozen, texts, split)
    dense = self._search('frozen', split, vectors, queries)
    fused = self._fuse('frozen', 'fused', split, bm25, dense)
    return {'bm25': bm25, 'frozen': dense, 'fused': fused}

  def _run_file(self, name: str, split: str) -> epath.Path:
    return self.workdir / 'runs' / f'{name}.{split}.trec'

  def _depth(self, split: str) -> int:
    return self.config.depth if split == 'train' else 1000

  def _encode(
    self, title: str, model: ModelFiles, texts: TextFiles, split: str | None, out: epath.Path
  ) -> epath.Path:
    return self._stages.encode(title, model, texts, split, out, self.config.retriever)

  def _queries_under(
    self, name: str, model: ModelFiles, texts: TextFiles, split: str
  ) -> epath.Path:
    """Encodes the queries of a split with the frozen encoder or the prompt."""
    title = f'Encode: {_asked(split)}, {name}'
    return self._encode(title, model, texts, split, self.workdir / 'embeddings' / f'{name}-{split}')

  def _search(self, name: str, split: str, vectors: epath.Path, queries: epath.Path) -> epath.Path:
    out = self._run_file(name, split)
    title = f'Search: {_asked(split)}, {name}'
    return self._stages.search(title, vectors, queries, out, self._depth(split))

  def _fuse(
    self, model: str, name: str, split: str, bm25: epath.Path, dense: epath.Path
  ) -> epath.Path:
    out = self._run_file(name, split)
    title = f'Fuse: {_asked(split)}, {model} with BM25'
    flags = [f'--run=bm25={bm25}', f'--run=dense={dense}', f'--method={_FUSION}', f'--out={out}']
    self._stages.run(title, ['fuse', *flags], out, [bm25, dense])
    return out

  def _filter(self, texts: TextFiles, run: epath.Path) -> None:
    flags = [f'--run={run}', f'--qrels={texts.qrels["train"]}', f'--within={self.config.within}']
    out = texts.qrels['found']
    reads = [run, texts.qrels['train']]
    self._stages.run('Filter by round trips', ['queries', *flags, f'--out={out}'], out, reads)

  def _mine(self, texts: TextFiles, runs: Mapping[str, epath.Path]) -> epath.Path:
    c, out = self.config, self.workdir / 'mined.jsonl'
    named = {name: runs[name] for name in ('bm25', 'frozen')}
    flags = [f'--queries={texts.queries}', f'--corpus={texts.corpus}']
    flags += [f'--qrels={texts.qrels["found"]}', f'--out={out}', '--texts=false']
    flags += [f'--run={name}={path}' for name, path in named.items()]
    flags += [f'--depth={c.depth}', f'--sample={c.sample}', f'--seed={c.seed}']
    reads = [texts.queries, texts.corpus, texts.qrels['found'], *named.values()]
    self._stages.run('Mine negatives', ['mine', *flags], out, reads)
    return out

  def _train(
    self,
    texts: TextFiles,
    mined: epath.Path,
    teacher: epath.Path,
    vectors: epath.Path,
    frozen: epath.Path,
  ) -> None:
    c = self.config
    temperature = scale(teacher, frozen, read_qrels(texts.qrels['found'])) * c.retriever.temperature
    settings = {
      'seed': c.seed,
      'data.format': 'beir',
      'data.dir': texts.folder,
      'data.train_split': 'found',
      'data.mined_negatives': mined,
      'data.passage_embeddings': vectors,
      'distillation.scores': teacher,
      'distillation.temperature': f'{temperature:.3g}',
      'backbone.path': c.retriever.backbone.path,
    }
    flags = differences(c.retriever_recipe, c.retriever, OURS)
    flags += [f'--config.{name}={value}' for name, value in settings.items()]
    reads = [texts.corpus, texts.queries, texts.qrels['found'], mined, teacher]
    reads += [vectors / 'manifest.json', *ModelFiles(c.retriever.backbone.path).files]
    workdir = self.workdir / 'training'
    self._stages.train('Train: the prompt', c.retriever_recipe, flags, workdir, reads, restart=True)

  def _judged(self, corpus: epath.Path) -> TextFiles:
    """The judged queries of the user, over the whole corpus."""
    found = judged_files(self.config)
    folder = epath.Path(self.config.data.judged)
    return TextFiles(folder, corpus, found['queries'], {_JUDGED: found['qrels']})

  def _measure(self, name: str, run: epath.Path, qrels: epath.Path) -> epath.Path:
    names = list(dict.fromkeys([_MEASURE, *self.config.measures]))
    out = self.workdir / 'metrics' / f'{name}.json'
    title, _ = _SYSTEMS[name]
    return self._stages.evaluate(f'Measure: {title}', run, qrels, names, out)

  def _card(self, metrics: Mapping[str, epath.Path], judged: bool) -> None:
    """Exports the prompt to a folder, with its card."""
    what = 'judged queries' if judged else 'queries that nobody judged'
    out, workdir = self.workdir / 'prompt', self.workdir / 'training'
    flags = [f'--workdir={workdir}', f'--out={out}', '--card=true', '--force']
    shown = {'frozen': metrics['frozen'], 'prompt': metrics['prompt']}
    flags += [f'--metrics={name}, {what}={path}' for name, path in shown.items()]
    reads = [workdir / 'metrics.jsonl', *shown.values()]
    self._stages.run('Export: the card', ['export', *flags], out / 'README.md', reads)

  def _last_words(self, choice: Choice) -> str:
    """The choice, what to search with, and where the results are."""
    work, (model, _, fused) = self.workdir, choice.candidate
    under = {'prompt': f'under {work / "prompt" / "prompt.npz"}', 'frozen': 'without a prompt'}
    following = f'search {work / "passages"} {under[model]}' if model in under else 'use only BM25'
    method = _FUSION if fused else ''
    if fused:
      following += ', and fuse the run with that of BM25'
    elif model == 'prompt' and not choice.judged:
      # Half of a step.
      following += ', and fuse the run with that of the frozen encoder'
      method = 'minmax'
    if method:
      following += f': dprjax fuse --method={method}'
    return (
      f'Chosen: {choice.verdict}.\n'
      f'Next: {following}. {work / "report.md"} has the table, {work / "prompt"} the prompt with '
      'its card.'
    )


def judged_files(config: ml_collections.ConfigDict) -> dict[str, epath.Path]:
  """Judged queries and their judgements, by role; the folder need not have a corpus."""
  judged = sources.Source(config.data.judged, 'beir', config.data.judged_split)
  return sources.locate(judged, ('queries', 'qrels'))


def _asked(split: str) -> str:
  """The queries of a split, for the console."""
  return 'made queries' if split == 'train' else 'judged queries'


def scale(teacher: epath.Path, frozen: epath.Path, qrels: Qrels) -> float:
  """The ratio of the margins of a teacher to those of the frozen encoder.

  Margins are between the first relevant passage of a query and the other passages in both runs.
  Divided by this ratio, margins of the teacher have the same root mean square as those of the
  frozen encoder.

  Raises:
    InputError: no query has a margin in both runs.
  """
  ours = theirs = 0.0
  with Rankings(teacher) as scored, Rankings(frozen) as dense:
    for query, judged in qrels.items():
      if query not in scored or query not in dense:
        continue
      one, other = (
        dict(zip(run.ids, run.scores.tolist(), strict=True))
        for run in (scored[query], dense[query])
      )
      both = one.keys() & other.keys()
      positive = next((id_ for id_ in judged if id_ in both and judged[id_] > 0), None)
      if positive is None:
        continue
      theirs += sum((one[positive] - one[id_]) ** 2 for id_ in sorted(both))
      ours += sum((other[positive] - other[id_]) ** 2 for id_ in sorted(both))
  if not (ours and theirs):
    raise InputError(f'{teacher}: no margin between passages that are also in {frozen}')
  return float(np.sqrt(theirs / ours))


def choose(scores: Mapping[str, Mapping[str, float]], judged: bool) -> Choice:
  """Chooses among systems by nDCG@10 of each query, by `choosing.choose`.

  No query was used to train or weigh a system: the prompt never saw judged queries, and generated
  queries were held out.
  """
  ids = sorted(scores['frozen'])
  # Generated queries share words with their passages, which favours BM25.
  names = _SYSTEMS if judged else ('frozen', 'prompt')
  return choosing.choose(
    {_SYSTEMS[name][1]: np.array([scores[name].get(id_, 0.0) for id_ in ids]) for name in names},
    judged=judged,
  )


def _scores(path: epath.Path) -> dict[str, float]:
  return reading.read_json_object(path, 'metrics')['per_query'][_MEASURE]


def check(config: ml_collections.ConfigDict) -> None:
  """Raises InputError for bad options."""
  c = config
  if not c.data.dir:
    raise InputError(
      'config.data.dir is empty: --config.data.dir=PATH names documents, a corpus or a BEIR folder'
    )
  given = dict(configs.flat({k: v for k, v in c.to_dict().items() if k != 'retriever'}))
  options.check(OPTIONS, given, 'config', 'configs/nolabels.py')
  if c.queries.answers and c.queries.endpoint:
    raise InputError('config.queries.answers, config.queries.endpoint: two sources; give one')
  if c.queries.endpoint and not c.queries.model:
    raise InputError('config.queries.model is empty; name the model of config.queries.endpoint')
  measures.parse_measures(list(c.measures))
  r = c.retriever
  if r.method != 'dpr' or r.prompt.sides != 'query' or r.alternatives:
    raise InputError(
      'config.retriever: expected method dpr with prompt.sides query and no alternatives, since '
      'passages keep the vectors of the frozen encoder'
    )
  if r.backbone.path.startswith('scratch:'):
    raise InputError(
      f"config.retriever.backbone.path: {r.backbone.path} has random weights, but the frozen ' "
      "'encoder must find passages; name a trained one"
    )
  if not r.data.hold_out:
    raise InputError(
      'config.retriever.data.hold_out: 0; generated queries must be held out for the comparison'
    )
  configs.check_ranges(r, 'dpr.', 'config.retriever')
  if not c.data.dir.startswith(DOCSTRINGS):
    files.existing(c.data.dir, 'config.data.dir')
  for name in ('answers', 'template', 'examples'):
    if c.queries[name]:
      files.existing_file(c.queries[name], f'config.queries.{name}')
  if c.data.judged:
    read_qrels(judged_files(c)['qrels'])


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The inputs of a pipeline, by flag."""
  folder = config.data.dir
  return {
    '--config.data.dir': None if folder.startswith(DOCSTRINGS) else folder,
    '--config.data.judged': config.data.judged,
    '--config.reranker_path': config.reranker_path,
    **{
      f'--config.queries.{name}': config.queries[name]
      for name in ('answers', 'template', 'examples')
    },
    '--config.retriever.backbone.path': config.retriever.backbone.path,
  }
