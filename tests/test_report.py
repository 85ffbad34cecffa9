import json

import pytest

from dprjax import report
from tests.refusals import command_refused
from tests.retrieval.test_comparison import BETTER, WORSE, metrics


def write(path, content):
  path.write_text(json.dumps(content))
  return path


def test_tables_and_figure(tmp_path, capsys):
  write(tmp_path / 'a.json', metrics(WORSE))
  write(
    tmp_path / 'b.json',
    metrics(BETTER, extra={'trained parameters': 73728, 'file size': '288 KB', 'GB|h': '12000'}),
  )
  report.main(
    [
      f'--metrics=frozen={tmp_path}/a.json',
      f'--metrics=+ prompt={tmp_path}/b.json',
      f'--out={tmp_path}/r.md',
      f'--figure={tmp_path}/r.png',
    ]
  )
  assert (tmp_path / 'r.md').read_text() == '\n'.join(
    [
      '| system | nDCG@10 | AP | trained parameters | file size | GB\\|h |',
      '| --- | ---: | ---: | ---: | ---: | ---: |',
      '| frozen | 0.2030 | 0.5000 |  |  |  |',
      '| + prompt | 0.3030* | 0.5000 | 73,728 | 288 KB | 12,000 |',
      '',
      '100 queries. *: significantly different from frozen (95 % paired bootstrap over queries, '
      '10,000 draws).',
      '',
    ]
  )
  assert '+ prompt  0.3030*  0.5000              73,728' in capsys.readouterr().out
  assert (tmp_path / 'r.png').read_bytes().startswith(b'\x89PNG')
  # Neither a formula nor letters that the font lacks stop it.
  report.main([f'--metrics=猫={tmp_path}/a.json', f'--figure={tmp_path}/r.png'])
  capsys.readouterr()
  report.main(
    [f'--metrics=$\\frac$={tmp_path}/a.json', '--measure', 'AP', f'--figure={tmp_path}/r.svg']
  )
  assert '<svg' in (tmp_path / 'r.svg').read_text()
  assert 'nDCG' not in capsys.readouterr().out


def test_a_table_for_a_paper(tmp_path, capsys):
  write(tmp_path / 'a.json', metrics(WORSE))
  write(tmp_path / 'b.json', metrics(BETTER, extra={'trained_%': '0.3'}))
  systems = [f'--metrics=frozen={tmp_path}/a.json', f'--metrics=R&D {{x}}={tmp_path}/b.json']
  report.main([*systems, f'--out={tmp_path}/r.tex', '--format=latex'])
  capsys.readouterr()
  comment, *lines = (tmp_path / 'r.tex').read_text().splitlines()
  assert comment.startswith('% 100 queries. *: ')
  assert lines == [
    r'\begin{tabular}{lrrr}',
    r'\toprule',
    r'system & nDCG@10 & AP & trained\_\% \\',
    r'\midrule',
    r'frozen & 0.2030 & 0.5000 &  \\',
    r'R\&D \{x\} & 0.3030* & 0.5000 & 0.3 \\',
    r'\bottomrule',
    r'\end{tabular}',
  ]


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--metrics=missing.json'], 'NAME=VALUE'),
    (['--metrics=a=a.json', '--metrics=b=hollow.json'], 'hollow.json'),
    (['--metrics=a=deep.json'], 'deep.json'),
    (['--metrics=a=a.json', '--out=b.png', '--figure=b.png'], ('b.png', '--figure')),
    (['--metrics=a=a.json', '--measure=RR@10'], ('RR@10', 'nDCG@10')),
    (['--metrics=a=a.json', '--metrics=b=other.json'], ('a', 'b')),
    (['--metrics=a=a.json', '--figure=r.jpeg2000'], ('.png', '.pdf', '.svg')),
  ],
)
def test_bad_input(tmp_path, monkeypatch, command, arguments, message):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / 'a.json', metrics(WORSE))
  write(tmp_path / 'hollow.json', {'mean': {'AP': 1.0}, 'per_query': {}})
  write(tmp_path / 'other.json', metrics({'AP': {'z': 1.0}, 'nDCG@10': {'z': 1.0}}))
  deep = f'{"[" * 3000}{"]" * 3000}'
  (tmp_path / 'deep.json').write_text(f'{{"mean": {{}}, "per_query": {{}}, "extra": {deep}}}')
  before = sorted(tmp_path.iterdir())
  command_refused(command(report, '--out=r.md', *arguments), message)
  assert sorted(tmp_path.iterdir()) == before
