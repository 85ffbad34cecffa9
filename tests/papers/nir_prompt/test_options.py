import pytest

from dprjax.papers.nir_prompt import options as nir
from dprjax.training import config as configs
from tests.refusals import refused


@pytest.mark.parametrize(
  'change, message',
  [
    ('c.tasks.qa.data.dir = ""', ('config.tasks.qa.data.dir', '--config.tasks.qa.data')),
    ('c.tasks.qa.form = "triples"', ('config.tasks.qa.form', 'retrieval', 'pairs')),
    ('c.tasks.qa.data.buckets = (3,)', 'config.tasks.qa.data.buckets'),
    ('c.arrangement = "sorted"', ('config.arrangement', 'alternate', 'random_task')),
  ],
)
def test_tasks_that_cannot_be(change, message):
  c = configs.default('nir_retriever')
  c.backbone.path = 'scratch:tiny'
  c.tasks.qa = nir.task(dir='questions')
  with c.ignore_type():
    exec(change, {'c': c, 'nir': nir})
  with refused(message):
    configs.check(c)
