import resource

from dprjax.base import database
from tests.refusals import refused


def test_a_full_disk_is_named(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
  try:
    with refused(tmp_path), database.temporary(tmp_path) as tables:
      tables.execute('CREATE TABLE numbers AS SELECT random() AS number FROM range(1_000_000)')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
