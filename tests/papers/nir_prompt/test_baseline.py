import pytest
from etils import epath

from dprjax.models import hub
from dprjax.papers.nir_prompt import multitask
from dprjax.papers.nir_prompt import options as nir
from dprjax.text import tokenizing
from tests.options import with_options
from tests.training.test_frozen import as_encode_runs_it, backbone, folder  # noqa: F401


@pytest.mark.slow
def test_several_tasks_have_that_baseline_each(backbone, folder, tmp_path, devices):  # noqa: F811
  config = with_options(
    method='ft_retriever', backbone__path=str(backbone), batch_size=4, eval__measure='mean'
  )
  for name in ('a', 'b'):
    config.tasks[name] = nir.task(dir=str(folder), format='beir', dev_split='dev')
    config.tasks[name].measure = 'nDCG@10'
  config.data.query_max_length = config.data.passage_max_length = 8
  found = multitask.find_tasks(
    config.data, config, epath.Path(tmp_path / 'run'), devices, numbered=False
  )
  model = hub.load_backbone(str(backbone)).config
  scores = found.open(tokenizing.load_tokenizer(str(backbone)), model).frozen()
  expected = pytest.approx(as_encode_runs_it(backbone, folder), abs=1e-6)
  assert scores.means == {'a/nDCG@10': expected, 'b/nDCG@10': expected, 'mean': expected}
