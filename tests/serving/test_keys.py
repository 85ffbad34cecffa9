import hashlib
import os

import pytest

from dprjax.serving import keys
from dprjax.serving.keys import Keys
from dprjax.serving.turns import Tenant
from tests.refusals import refused

HASH = {
  key: hashlib.sha256(key.encode()).hexdigest() for key in ('old', 'new', 'boss', 'scraper', '')
}
TABLES = f"""
[search]
sha256 = ["{HASH['old']}", "{HASH['new'].upper()}"]
prompts = ["qa", "chat-*"]
indexes = []
concurrent = 6
weight = 2

[ops]
sha256 = "{HASH['boss']}"
scopes = ["admin"]

[prometheus]
sha256 = "{HASH['scraper']}"
scopes = ["metrics"]
"""


def test_a_table_for_each_tenant(tmp_path):
  file = tmp_path / 'keys.toml'
  file.write_text(TABLES)
  loaded = Keys(file)
  one = loaded.find('Bearer old')
  assert one is not None and one == loaded.find('bearer new')
  assert one.tenant == Tenant('search', 2.0)
  assert one.concurrent == 6
  assert one.may('read') and not one.may('write') and not one.may('metrics')
  assert [one.may_use('prompts', name) for name in ('qa', 'chat-x', 'qa2', 'QA')] == [
    *(True, True, False, False)
  ]
  assert not one.may_use('indexes', 'qa')
  boss = loaded.find('Bearer boss')
  assert boss is not None and boss.may('write') and boss.may('metrics')
  assert boss.may_use('prompts', 'x')
  scraper = loaded.find('Bearer scraper')
  assert scraper is not None and scraper.may('metrics') and not scraper.may('read')
  for unknown in ('', 'Bearer', 'Bearer ', 'Basic old', 'old', 'Bearer olD'):
    assert loaded.find(unknown) is None


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    (f'[a]\nsha256 = "{HASH["old"]}"\nprompt = ["qa"]', 'prompt'),
    (f'[a]\nsha256 = "{HASH["old"]}"\nscopes = ["all"]', 'scopes'),
    (f'[a]\nsha256 = "{HASH["old"]}"\n[b]\nsha256 = "{HASH["old"]}"', ('a', 'b')),
    (f'[a]\nsha256 = "{HASH[""]}"', 'a'),
    ('[a]\nsha256 = "old"', 'sha256'),
    ('a = 1', 'keys.toml'),
    ('# none', 'keys.toml'),
  ],
)
def test_tables_that_are_refused(tmp_path, text, says):
  file = tmp_path / 'keys.toml'
  file.write_text(text)
  with refused(says):
    Keys(file)


def test_keys_are_exchanged_while_the_server_runs(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(keys, '_LOOK_S', 0.0)
  file = tmp_path / 'keys'
  file.write_text(f'[team]\nsha256 = "{HASH["old"]}"\n')
  loaded = Keys(file)
  assert loaded.find('Bearer old') and not loaded.find('Bearer new')

  def replace(text):
    (tmp_path / 'aside').write_text(text)
    os.replace(tmp_path / 'aside', file)

  replace(f'[team]\nsha256 = "{HASH["new"]}"\n')
  assert loaded.find('Bearer new') and not loaded.find('Bearer old')
  # A file that cannot be used, or is gone, changes nothing.
  replace('[team')
  assert loaded.find('Bearer new') and 'stay as they were' in caplog.text
  file.unlink()
  assert loaded.find('Bearer new')
  replace(f'[team]\nsha256 = "{HASH["old"]}"\n')
  assert loaded.find('Bearer old') and not loaded.find('Bearer new')
