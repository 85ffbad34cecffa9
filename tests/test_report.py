import json
import os
import pathlib
import subprocess
import sys

import pytest

from dprjax import report
from tests.analysis.test_comparison import BETTER, WORSE, metrics
from tests.refusals import named_in


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
  assert '+ prompt   0.3030*   0.5000               73,728' in capsys.readouterr().out
  assert (tmp_path / 'r.png').read_bytes().startswith(b'\x89PNG')
  # Neither a formula nor letters that the font lacks stop it.
  report.main([f'--metrics=猫={tmp_path}/a.json', f'--figure={tmp_path}/r.png'])
  capsys.readouterr()
  report.main(
    [f'--metrics=$\\frac$={tmp_path}/a.json', '--measure', 'AP', f'--figure={tmp_path}/r.svg']
  )
  assert '<svg' in (tmp_path / 'r.svg').read_text()
  assert 'nDCG' not in capsys.readouterr().out


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--metrics=a=a.json', '--figure=r.jpeg2000'], ('.png', '.pdf', '.svg')),
    (['--metrics=missing.json'], 'NAME=VALUE'),
    (['--metrics=a=missing.json'], 'missing.json'),
    (['--metrics=a=a.json', '--metrics=a=a.json'], '--metrics'),
    (['--metrics=a=a.json', '--metrics=b=text.json'], 'text.json'),
    (
      ['--metrics=a=a.json', '--metrics=b=list.json'],
      'list.json',
    ),
    (
      ['--metrics=a=a.json', '--metrics=b=hollow.json'],
      ('hollow.json', 'AP'),
    ),
    *(
      ([f'--metrics=a={name}.json'], message)
      for name, message in (
        ('nothing', 'nothing.json'),
        ('text_mean', 'text_mean.json'),
        ('nan', 'nan.json'),
        ('huge', 'huge.json'),
        ('huge_integer', 'huge_integer.json'),
        ('null', 'null.json'),
        ('no_queries', 'no_queries.json'),
        ('lists', 'lists.json'),
        ('uneven', 'uneven.json'),
        ('extra', 'extra.json'),
        ('extra_list', 'extra_list.json'),
        ('vast', 'vast.json'),
        ('deep', 'deep.json'),
      )
    ),
    (['--metrics=a\nb=a.json'], 'a\\nb'),
    (['--metrics=caf\udce9=a.json'], 'caf\\udce9'),
    (['--metrics=a=a.json', '--out='], '--out'),
    (['--metrics=a=a.json', '--figure='], ('.png', '.pdf', '.svg')),
    (['--metrics=a=a.json', '--out=b.png', '--figure=b.png'], ('b.png', '--figure')),
    (['--metrics=a=a.json', '--measure=RR@10'], ('RR@10', 'nDCG@10')),
    (['--metrics=a=a.json', '--metrics=b=other.json'], ('a', 'b')),
    (['--metrics=a=a.json', '--figure=r.jpeg2000'], ('.png', '.pdf', '.svg')),
    (['--metrics=a=a.json', '--figure=folder.png'], 'folder.png'),
  ],
)
def test_bad_input(tmp_path, monkeypatch, error_line, arguments, message):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / 'a.json', metrics(WORSE))
  write(tmp_path / 'list.json', [])
  write(tmp_path / 'hollow.json', {'mean': {'AP': 1.0}, 'per_query': {}})
  write(tmp_path / 'other.json', metrics({'AP': {'z': 1.0}, 'nDCG@10': {'z': 1.0}}))
  (tmp_path / 'text.json').write_text('nDCG = 1')
  (tmp_path / 'folder.png').mkdir()
  whole = '{"mean": {"AP": 0.5}, "per_query": {"AP": {"q": 0.5}}%s}'
  for name, text in {
    'nothing': '{"mean": {}, "per_query": {}}',
    'text_mean': whole.replace('0.5', '"0.5"') % '',
    'nan': whole.replace('0.5', 'NaN') % '',
    'huge': whole.replace('0.5', '1e999') % '',
    'huge_integer': whole.replace('0.5', '1' + '0' * 400) % '',
    'null': whole.replace('"q": 0.5', '"q": null') % '',
    'no_queries': whole.replace('"q": 0.5', '') % '',
    'lists': whole % ', "datasets": {"a": []}',
    'uneven': whole % ', "datasets": {"a": {"mean": {}, "per_query": {}}}',
    'extra': whole % ', "extra": {"x": {}}',
    'extra_list': whole % ', "extra": [1]',
    'vast': whole.replace('0.5', '1e308') % '',
    'deep': whole % f', "extra": {"[" * 3000}{"]" * 3000}',
  }.items():
    (tmp_path / f'{name}.json').write_text(text)
  before = sorted(tmp_path.iterdir())
  with pytest.raises(SystemExit) as ended:
    report.main(['--out=r.md', *arguments])
  assert ended.value.code == 2
  assert named_in(error_line(), message)
  assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_as_a_command(tmp_path):
  write(tmp_path / 'a.json', metrics(WORSE))
  done = subprocess.run(
    [sys.executable, '-m', 'dprjax.report', f'--metrics=frozen={tmp_path}/a.json'],
    capture_output=True,
    text=True,
    check=False,
    env=os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parent.parent)},
  )
  assert done.returncode == 0 and 'frozen' in done.stdout and done.stderr == ''
