"""Flags as the fields of a class: how words are read, and the text of --help."""

import dataclasses

import pytest

from dprjax.base import flags
from dprjax.base.flags import flag, group, switch
from tests.refusals import command_refused, refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  deep: int = flag('how deep', 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  name: str = flag('100 % of it')
  count: int | None = flag('at most', None, least=0, most=100)
  share: float = flag('of all', 0.5, most=1)
  on: bool = flag('whether', True)
  strict: bool = switch('fail')
  kind: str = flag('', 'one', choices=('one', 'two'))
  paths: tuple[str, ...] = flag('some', ())
  words: tuple[int, ...] = flag('more', (1, 2), split=' ')
  commas: tuple[int, ...] = flag('in one word', (1, 2), split=',')
  pairs: tuple[tuple[str, str], ...] = flag('perhaps named', (), read=flags.maybe_named)
  named: dict[str, str] = flag('by name', {})
  source: str | None = flag('this', None, name='from', either='source')
  other: bool = switch('or that', either='source')
  place: str = flag('here', 'nowhere', env='DPRJAX_TEST_PLACE')
  inner: Inner = group(Inner, 'below')


def read(*words):
  return flags.parse(Flags, ['--name=x', '--from=y', *words])[0]


@pytest.mark.parametrize(
  ('words', 'field', 'value'),
  [
    (['--count=0'], 'count', 0),
    (['--on=False'], 'on', False),
    (['--strict'], 'strict', True),
    (['--paths=a', '--paths=b'], 'paths', ('a', 'b')),
    (['--words', '5', '6', '--words=7'], 'words', (5, 6, 7)),
    (['--commas=5, 6'], 'commas', (5, 6)),
    (['--pairs=a=b', '--pairs=c/d=e'], 'pairs', (('a', 'b'), ('', 'c/d=e'))),
    (['--paths=~/a', '--paths=./~/b', '--paths=c~/d'], 'paths', ('/home/x/a', './~/b', 'c~/d')),
    (['--named=a=~/b'], 'named', {'a': '/home/x/b'}),
    (['--from=milvus:~/b'], 'source', 'milvus:/home/x/b'),
  ],
)
def test_the_type_says_how_words_are_read(words, field, value, monkeypatch):
  monkeypatch.setenv('HOME', '/home/x')
  found = read(*words)
  assert getattr(found, field) == value
  assert flags.given(found, 'kind', field, 'place') == [field]


@pytest.mark.parametrize(
  ('words', 'flag'),
  [
    (['--count=101'], '--count'),
    (['--count=' + '9' * 5000], '--count'),
    (['--share=nan'], '--share'),
    (['--on=yes'], '--on'),
    (['--kind=three'], '--kind'),
    (['--named=a=b', '--named=a=c'], '--named'),
    (['--commas=1,x'], '--commas'),
    (['--other'], '--other'),
    (['--nam=x'], '--nam=x'),  # no abbreviations
  ],
)
def test_a_bad_flag_is_one_line_that_names_it(words, flag, capsys):
  with pytest.raises(SystemExit) as end:
    read(*words)
  command_refused((end.value.code, capsys.readouterr().err), flag)


def test_a_flag_that_goes_with_another_is_refused_without_it():
  with refused('--paths', '--name'):
    flags.refuse(read('--paths=a'), ('count', 'paths'), 'name')
  flags.refuse(read(), ('count', 'paths', 'named'), 'name')
