"""Inspection: a small backbone against NumPy, all-MiniLM-L6-v2 against published numbers."""

import json
import math

import jax
import numpy as np
import pytest
import scipy.stats

from dprjax import Retriever
from dprjax.models import artifact, encoder, hub
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.topic_dpr import topic_models
from dprjax.papers.topic_dpr.paper_records import Paper, write_beir
from dprjax.text import tokenizing as texts_of
from lab import inspection, sts
from tests.refusals import named_in

TOPICS = ('wool', 'iron', 'salt', 'milk')
# One worker makes the shared files.
pytestmark = [pytest.mark.xdist_group('inspection'), pytest.mark.slow]


def sentence(topic, part, point):
  return f'What is known of {topic} in part {part} is point number {point}.'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """A folder with sts.csv, dump.xml and a BEIR data set."""
  folder = tmp_path_factory.mktemp('texts')
  (folder / 'sts.csv').write_text(
    ''.join(
      f'{sentence(topic, 1, i)},{sentence(other, 1 + i % 2, 3)},'
      f'{(5 - 0.5 * (i % 3)) * (topic == other)}\n'
      for topic in TOPICS
      for other in TOPICS[:2]
      for i in range(3)
    )
  )
  pages = ''.join(
    f'<page><title>{topic}</title><ns>0</ns><revision><text>{topic} is a thing.\n'
    + ''.join(
      f'== Part {part} ==\n' + '\n\n'.join(sentence(topic, part, i) for i in range(3)) + '\n'
      for part in range(2)
    )
    + '== See also ==\nThere are more of such things to be seen.</text></revision></page>\n'
    for topic in TOPICS
  )
  (folder / 'dump.xml').write_text(f'<mediawiki>{pages}</mediawiki>')
  (folder / 'flat.xml').write_text(
    '<mediawiki><page><title>a</title><ns>0</ns><revision><text>One. Two '
    'words.</text></revision></page></mediawiki>'
  )
  beir = folder / 'beir'
  (beir / 'qrels').mkdir(parents=True)
  (beir / 'corpus.jsonl').write_text(
    ''.join(
      json.dumps({'_id': f'd{i}', 'title': topic, 'text': sentence(topic, 1, i) if topic else ''})
      + '\n'
      for i, topic in enumerate([*TOPICS, ''])
    )
  )
  (beir / 'queries.jsonl').write_text(
    ''.join(
      json.dumps({'_id': f'q{i}', 'text': f'about {topic}'}) + '\n'
      for i, topic in enumerate(TOPICS)
    )
  )
  # q1's second positive is not in the corpus, q2's has no text, and q3 has none.
  judged = [('q0', 'd0', 1), ('q1', 'd1', 2), ('q1', 'gone', 1), ('q2', 'd4', 1), ('q3', 'd3', 0)]
  (beir / 'qrels' / 'test.tsv').write_text(
    'query-id\tcorpus-id\tscore\n' + ''.join(f'{q}\t{d}\t{grade}\n' for q, d, grade in judged)
  )
  return folder


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A folder: two backbones of different depth with one tokenizer, and prompts for the first."""
  folder = tmp_path_factory.mktemp('backbones')
  tokenizer = texts_of.train_wordpiece(
    [sentence(topic, 1, 2) + ' about a thing' for topic in TOPICS], 200, folder / 'tokenizer'
  )
  for number, layers in enumerate((2, 3)):
    config = EncoderConfig('bert', tokenizer.vocab_size, 32, layers, 4, 64, max_positions=64)
    # Weights far larger than initial ones, so that attention is not even and texts differ.
    params = jax.tree.map(
      lambda leaf: 8 * leaf if leaf.ndim > 2 else leaf,
      hub.init_params(config, jax.random.key(number)),
    )
    hub.save_backbone(folder / f'deep{layers}', config, params, source=folder / 'tokenizer')
  backbone = hub.load_backbone(folder / 'deep2')
  prefix = np.random.default_rng(0).normal(size=(2, 2, 3, 4, 8)).astype(np.float32)
  for shift in (False, True):
    meta = {
      'format': artifact.FORMAT,
      'version': artifact.VERSION,
      'kind': 'prefix',
      'backbone': 'deep2',
      'backbone_sha256': backbone.sha256,
      'tokenizer_sha256': tokenizer.sha256,
      'pooling': 'mean',
      'normalize': False,
      'temperature': 1.0,
      'shift_positions': shift,
      'query_max_length': 32,
      'passage_max_length': 48,
      'dprjax_version': '0',
    }
    artifact.save_prompt(
      folder / f'prompt{"-shifted" if shift else ""}.npz', artifact.Prompt(meta, {'prefix': prefix})
    )
  meta['tokenizer_sha256'] = 'b' * 64
  artifact.save_prompt(folder / 'other-tokens.npz', artifact.Prompt(meta, {'prefix': prefix}))
  return folder


def flags(data, *names):
  return [
    f'--{name}={data / file}'
    for name, file in (('sts', 'sts.csv'), ('wikipedia', 'dump.xml'), ('beir', 'beir'))
    if name in names
  ]


def unit(vectors):
  return vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)


@pytest.mark.parametrize('prompt', [None, 'prompt-shifted.npz'])
def test_inspect_equals_numpy(data, small, prompt):
  texts = inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir')
  retriever = Retriever.load(
    small / 'deep2', prompt and small / prompt, query_max_length=32, passage_max_length=48
  )
  found = inspection.inspect('deep2', retriever, texts)

  pairs = sts.read_pairs(data / 'sts.csv')
  first, second = (unit(retriever.encode([pair[i] for pair in pairs], 'query')) for i in (0, 1))
  cosines = np.sum(first * second, axis=1)
  assert found.spearman == pytest.approx(
    scipy.stats.spearmanr(cosines, [pair.score for pair in pairs]).statistic
  )

  anchor, positive, negative = (
    unit(retriever.encode([triplet[i] for triplet in texts.triplets], 'query')) for i in range(3)
  )
  assert found.accuracy == np.mean(
    np.sum(anchor * positive, axis=1) > np.sum(anchor * negative, axis=1)
  )

  raw_queries = np.float64(retriever.encode(['about wool', 'about iron'], 'query'))
  raw_passages = np.float64(
    retriever.encode([f'{topic} {sentence(topic, 1, i)}' for i, topic in enumerate(TOPICS)])
  )
  queries, passages = unit(raw_queries), unit(raw_passages)
  for x, y, alignment, uniformity in (
    (queries, passages, found.alignment, found.uniformity),
    (raw_queries, raw_passages, found.raw_alignment, found.raw_uniformity),
  ):
    assert alignment == pytest.approx(np.mean(np.sum((x - y[:2]) ** 2, axis=1)))
    distances = [np.sum((y[i] - y[j]) ** 2) for i in range(4) for j in range(i)]
    assert uniformity == pytest.approx(
      -2 * min(distances) + math.log(np.mean(np.exp(-2 * (np.array(distances) - min(distances)))))
    )

  # The attention of one text at a time, without padding; only two, as each length is compiled.
  backbone, entropies = retriever.encoder.backbones['passage'], []
  loaded = retriever.encoder.entry().prompt
  two = ['about wool', texts.attended[0]]
  for tokens in retriever.encoder.tokenize(two, 'passage'):
    weights = np.asarray(
      encoder.first_token_attention(
        backbone.config,
        jax.tree.map(np.asarray, backbone.params),
        tokens[None],
        np.ones((1, len(tokens)), bool),
        adapter=None
        if loaded is None
        else Prefix(
          loaded.of_side('passage')['prefix'], shift=3 if prompt == 'prompt-shifted.npz' else 0
        ),
      )
    )[:, 0]  # [L, N, S]
    assert weights.shape == (2, 4, len(tokens) + (0 if prompt is None else 3))
    entropies.append(-np.sum(weights * np.log(np.maximum(weights, 1e-30)), axis=-1))
  np.testing.assert_allclose(inspection.first_token_entropies(retriever, two), entropies, rtol=1e-4)
  np.testing.assert_array_equal(
    found.entropy, inspection.first_token_entropies(retriever, texts.attended).mean(axis=0)
  )
  assert found.entropy.std() > 0.01


def test_read_texts(data, caplog):
  caplog.set_level('INFO', logger='dprjax')
  texts = inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir')
  assert len(texts.pairs) == 24 and len(texts.triplets) == 24 and len(texts.passages) == 4
  assert sorted(texts.positives) == [
    ('about iron', 'iron ' + sentence('iron', 1, 1)),
    ('about wool', 'wool ' + sentence('wool', 1, 0)),
  ]
  assert '2 of 4 positives' in caplog.text
  # Sections with a theme, not the text before the first heading.
  assert sorted(texts.attended) == sorted(
    '\n'.join(sentence(topic, part, i) for i in range(3)) for topic in TOPICS for part in range(2)
  )
  assert texts.named['triplets'] == '24 triplets from 4 articles of dump.xml'

  few = inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir', most=2)
  assert len(few.pairs) == 24  # published numbers are over all pairs
  assert (len(few.triplets), len(few.attended), len(few.passages)) == (2, 2, 2)
  assert few.named['triplets'] == '2 triplets from 2 articles of dump.xml'
  assert set(few.passages) <= set(texts.passages)
  assert few == inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir', most=2)

  # Without a dump, the attention is on passages; without both, on the sentences.
  assert inspection.read_texts(data / 'sts.csv', beir=data / 'beir').attended == texts.passages
  sentences = inspection.read_texts(data / 'sts.csv').attended
  assert sorted(sentences) == sorted({text for pair in texts.pairs for text in pair[:2]})


def test_the_command(data, small, tmp_path, capsys):
  inspection.main(
    [
      f'--backbone={small}/deep2/',
      f'--backbone=deeper={small}/deep3',
      f'--backbone=prompted={small}/deep2',
      f'--prompt=prompted={small}/prompt.npz',
      *flags(data, 'sts', 'wikipedia', 'beir'),
      '--max_length=32',
      f'--out={tmp_path}/r.md',
      f'--figure={tmp_path}/r.svg',
    ]
  )
  output = capsys.readouterr()
  lines = (tmp_path / 'r.md').read_text().splitlines()
  assert (
    lines[0]
    == '| backbone | STS Spearman | section accuracy | alignment | uniformity | uniformity of '
    'queries | raw alignment | raw uniformity | CLS attention entropy | in the last layer |'
  )
  rows = [line.strip('| ').split(' | ') for line in lines[2:5]]
  assert [row[0] for row in rows] == ['deep2', 'deeper', 'prompted']
  texts = inspection.read_texts(data / 'sts.csv', data / 'dump.xml', data / 'beir')
  found = inspection.inspect(
    '', Retriever.load(small / 'deep2', query_max_length=32, passage_max_length=32), texts
  )
  assert [float(cell) for cell in rows[0][1:]] == pytest.approx(
    [
      found.spearman,
      found.accuracy,
      found.alignment,
      found.uniformity,
      found.query_uniformity,
      found.raw_alignment,
      found.raw_uniformity,
      found.entropy.mean(),
      found.entropy[-1].mean(),
    ],
    abs=1e-4,
  )
  assert rows[2][1:] != rows[0][1:]
  notes = '\n'.join(lines[6:13])
  assert '24 pairs of sts.csv' in notes and '8 sections of dump.xml' in notes
  assert 'deep2: cls pooling, at most 32 tokens; deeper: cls pooling' in notes
  by_layer = lines.index('| CLS attention entropy | layer 1 | layer 2 | layer 3 |')
  assert lines[by_layer + 2].startswith('| deep2 |') and lines[by_layer + 2].endswith('|  |')
  assert '24 triplets' in output.out and 'section accuracy' in output.out
  assert 'prompted: inspected in' in output.err
  assert (tmp_path / 'r.svg').read_text().count('<g id="axes_') == 4  # raw vectors have their own


@pytest.fixture(scope='module')
def papers(tmp_path_factory):
  """A BEIR folder of 24 papers of three themes, and its topic model."""
  folder = tmp_path_factory.mktemp('papers')
  made = [
    Paper(
      f'p{i}',
      f'about {TOPICS[i % 3]}',
      sentence(TOPICS[i % 3], 1 + i % 2, i),
      (f'{TOPICS[i % 3]}.X', *(['extra'] if i < 2 else [])),
    )
    for i in range(24)
  ]
  write_beir(folder / 'beir', made, 'test', own=False)
  fitted = topic_models.fit(
    [paper.passage for paper in made],
    topic_models.TopicSettings('lda', topics=2, sweeps=5, alpha=0.1, eta=0.1, gamma=1.0, seed=0),
  )
  topic_models.save_topics(folder / 'topics.npz', fitted.topics)
  return folder, made, fitted.topics


def test_attention_under_a_prompt_of_topics(papers, small, tmp_path):
  _, made, model = papers
  prefixes = np.random.default_rng(1).normal(size=(2, 2, 2, 3, 4, 8)).astype(np.float32)
  plain = artifact.load_prompt(small / 'prompt.npz')
  files = {}
  for name, meta, arrays in (
    ('topics', {'kind': 'topic'}, {'prefix': prefixes, **model.arrays()}),
    *((k, {}, {'prefix': prefixes[k]}) for k in range(2)),
  ):
    files[name] = tmp_path / f'{name}.npz'
    artifact.save_prompt(files[name], artifact.Prompt(plain.meta | meta, arrays))
  passages = [paper.passage for paper in made]
  own = model.assign(passages)
  assert set(own.tolist()) == {0, 1}

  def entropy(name, chosen):
    retriever = Retriever.load(small / 'deep2', files[name], batch_size=8)
    return inspection.first_token_entropies(retriever, chosen, batch_size=8).mean(axis=0)

  each = [entropy(k, [passages[i] for i in np.flatnonzero(own == k)]) for k in range(2)]
  expected = sum(each[k] * np.mean(own == k) for k in range(2))
  np.testing.assert_allclose(entropy('topics', passages), expected, atol=1e-5)
  assert not np.allclose(each[0], each[1], atol=1e-3)


def test_categories_and_topics_of_passages(papers):
  folder, made, model = papers
  texts = inspection.read_texts(beir=folder / 'beir', topic_model=model)
  assert sorted(texts.passages) == sorted(paper.passage for paper in made)
  by_passage = {paper.passage: paper for paper in made}
  of_query = {
    row: next(paper for paper in made if paper.passage == own) for row, own in texts.pairs_of_own
  }
  assert len(of_query) == 24
  for row, paper in of_query.items():
    assert texts.queries[row] == paper.title
    for column, passage in enumerate(texts.passages):
      common = set(paper.categories) & set(by_passage[passage].categories)
      assert texts.unrelated[row, column] == (not common)
  for row, passage in enumerate(texts.passages):
    own = {
      texts.label_names['category'][label]
      for label in np.flatnonzero(texts.labels['category'][row])
    }
    assert own == set(by_passage[passage].categories)
  assert texts.labels['topic'].argmax(axis=1).tolist() == model.assign(texts.passages).tolist()


def test_the_command_with_categories_and_topics(papers, small, tmp_path, capsys):
  folder, made, model = papers
  inspection.main(
    [
      f'--backbone={small}/deep2',
      f'--beir={folder}/beir',
      f'--topics={folder}/topics.npz',
      f'--tsne={tmp_path}/map.svg',
      f'--out={tmp_path}/r.md',
      '--max_length=32',
    ]
  )
  lines = (tmp_path / 'r.md').read_text().splitlines()
  values = dict(
    zip(
      *([cell.strip() for cell in line.strip('|').split('|')] for line in (lines[0], lines[2])),
      strict=True,
    )
  )
  retriever = Retriever.load(small / 'deep2', query_max_length=32, passage_max_length=32)
  x = unit(retriever.encode([paper.title for paper in made], 'query'))
  y = unit(retriever.encode([paper.passage for paper in made], 'passage'))
  cosines = x @ y.T
  unrelated = np.array([[not set(a.categories) & set(b.categories) for b in made] for a in made])
  assert float(values['Sim(q, p+)']) == pytest.approx(np.diag(cosines).mean(), abs=1e-4)
  assert float(values['Sim(q, p-)']) == pytest.approx(cosines[unrelated].mean(), abs=1e-4)
  pairs = [np.sum((x[i] - x[j]) ** 2) for i in range(24) for j in range(i)]
  assert float(values['uniformity of queries']) == pytest.approx(
    math.log(np.mean(np.exp(-2 * np.array(pairs)))), abs=1e-4
  )
  near = np.argsort(-(y @ y.T - 9 * np.eye(24)), axis=1, kind='stable')[:, :10]
  topic = model.assign([paper.passage for paper in made])
  for kind, same in (('topic', topic[:, None] == topic[None]), ('category', ~unrelated)):
    share = np.mean([same[i, near[i]].mean() for i in range(24)])
    # Passages of equal cosine may come in another order.
    assert float(values[f'10 nearest: same {kind}']) == pytest.approx(share, abs=0.02)
  drawn = (tmp_path / 'map.svg').read_text()
  assert drawn.count('<g id="axes_') == 2
  notes = '\n'.join(lines[4:])
  assert 'Sim(q, p+): mean cosine of a query and its own passage, 24 queries of beir/test' in notes


def test_a_collapsed_backbone(data, small, tmp_path, capsys):
  """All texts get one vector: no ranks, no accuracy, no crash."""
  backbone = hub.load_backbone(small / 'deep2')
  hub.save_backbone(
    tmp_path / 'flat',
    backbone.config,
    jax.tree.map(lambda leaf: 0 * leaf + 1, backbone.params),
    source=backbone.path,
  )
  inspection.main(
    [
      f'--backbone={tmp_path}/flat',
      *flags(data, 'sts', 'wikipedia', 'beir'),
      '--max_length=32',
      f'--figure={tmp_path}/r.png',
    ]
  )
  [row] = [
    line.split()
    for line in capsys.readouterr().out.splitlines()
    if line.lstrip().startswith('flat ')
  ][:1]
  assert row[1:3] == ['undefined', '0.0000']


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--backbone={small}/deep2'], ('--sts', '--wikipedia', '--beir')),
    (['--backbone={small}/none', '--sts={data}/sts.csv'], 'none'),
    (
      [
        '--backbone={small}/deep2',
        '--backbone={small}/deep3',
        '--prompt={small}/prompt.npz',
        '--sts={data}/sts.csv',
      ],
      '--prompt',
    ),
    (['--backbone={small}/deep3', '--prompt={small}/prompt.npz', '--sts={data}/sts.csv'], 'prompt'),
    (
      ['--backbone={small}/deep2', '--prompt={small}/other-tokens.npz', '--sts={data}/sts.csv'],
      'b' * 64,
    ),
    (['--backbone={small}/deep2', '--sts=constant.csv'], 'constant.csv'),
    (
      ['--backbone={small}/deep2', '--wikipedia={data}/flat.xml'],
      ('flat.xml', 'max_texts', '1,000'),
    ),
    (['--backbone={small}/deep2', '--beir={data}/beir', '--split=dev'], 'dev.tsv'),
    (['--backbone={small}/deep2', '--sts={data}/sts.csv', '--max_length=65'], '64'),
    (['--backbone={small}/deep2', '--sts={data}/sts.csv', '--topics=t.npz'], '--topics'),
    (
      ['--backbone={small}/deep2', '--beir={data}/beir', '--topics={small}/prompt.npz'],
      'topics/meta',
    ),
    (['--backbone={small}/deep2', '--beir={data}/beir', '--tsne=a.txt'], '--tsne=a.txt'),
  ],
)
def test_bad_input(data, small, tmp_path, monkeypatch, error_line, arguments, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'constant.csv').write_text('One.,Two.,2\nThree.,Four.,2.0\n')
  before = sorted(tmp_path.iterdir())
  with pytest.raises(SystemExit) as ended:
    # The last value of a flag counts.
    inspection.main(
      [
        '--max_length=32',
        '--out=r.md',
        '--figure=r.png',
        *(argument.format(data=data, small=small) for argument in arguments),
      ]
    )
  assert ended.value.code == 2
  assert named_in(error_line(), message)
  assert sorted(tmp_path.iterdir()) == before


def test_minilm_on_the_benchmarks(data_dir, minilm, tmp_path):
  pairs = (data_dir / 'stsb' / 'raw' / 'stsb-en-test.csv').read_text().splitlines(keepends=True)
  (tmp_path / 'fifth.csv').write_text(''.join(pairs[::5]))
  texts = inspection.read_texts(tmp_path / 'fifth.csv', beir=data_dir / 'scifact', most=40)
  found = inspection.inspect('MiniLM', Retriever.load(minilm, passage_max_length=64), texts)
  # By sentence-transformers on these pairs; on all of them .8203, as published.
  assert found.spearman == pytest.approx(0.8049, abs=5e-4)
  # Cosines are above 0, so squared distances are below 2; pairs are nearer than that.
  assert 0.5 < found.alignment < 1.1 and -4 < found.uniformity < -2.5
  assert found.entropy.shape == (6, 12)
  assert np.all((found.entropy >= 0) & (found.entropy < math.log(64)))
