"""launch/*.yaml: starting, saving and restarting, and published schemas.

The Jobs are checked against Kubernetes' schema.
"""

import pathlib
import re

import pytest
import yaml

from dprjax import encode
from dprjax.base import flags

ROOT = pathlib.Path(__file__).parent.parent.parent
MANIFESTS = sorted((ROOT / 'launch').glob('gke_jobset*.yaml'))
by_name = pytest.mark.parametrize('path', MANIFESTS, ids=lambda path: path.name)


class UniqueKeys(yaml.SafeLoader):
  """A repeated key in a mapping is an error, as for kubectl."""

  def construct_mapping(self, node, deep=False):
    keys = [self.construct_object(key, deep=True) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f'{node.start_mark}: {keys}'
    return super().construct_mapping(node, deep)


def load(path):
  """(the JobSet, its one Job, the one container of the Job)"""
  [jobset] = yaml.load_all(path.read_text(), UniqueKeys)
  [replicated] = jobset['spec']['replicatedJobs']
  [container] = replicated['template']['spec']['template']['spec']['containers']
  return jobset, replicated['template']['spec'], container


def test_there_is_one_for_each_accelerator():
  limits = [load(path)[2]['resources']['limits'] for path in MANIFESTS]
  assert limits == [{'google.com/tpu': 4}, {'nvidia.com/gpu': 8}]


@by_name
def test_all_hosts_run_at_once_and_restart_together(path):
  jobset, job, container = load(path)
  assert jobset['kind'] == 'JobSet' and jobset['apiVersion'] == 'jobset.x-k8s.io/v1alpha2'
  assert job['parallelism'] == job['completions'] > 1
  assert job['backoffLimit'] == 0  # one failed pod ends the Job, and the JobSet decides
  pod = job['template']['spec']
  assert pod['restartPolicy'] == 'Never'  # required with a podFailurePolicy
  assert pod['terminationGracePeriodSeconds'] >= 30
  # Python is process 1, so that it gets SIGTERM.
  assert container['command'] == ['python', '-m', 'dprjax.train']


@by_name
def test_the_exit_status_decides_whether_a_job_restarts(path):
  jobset, job, container = load(path)
  disruption, codes = job['podFailurePolicy']['rules']
  assert disruption == {
    'action': 'FailJob',
    'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
  }
  assert codes == {
    'action': 'FailJob',
    'onExitCodes': {'containerName': container['name'], 'operator': 'In', 'values': [2, 143]},
  }

  def action(message):
    for rule in jobset['spec']['failurePolicy']['rules']:
      assert rule['onJobFailureReasons'] == ['PodFailurePolicy']
      # The pattern of names in JobSet.
      assert re.fullmatch('[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?', rule['name'])
      if any(
        re.search(pattern, message) for pattern in rule.get('onJobFailureMessagePatterns', [''])
      ):
        return rule['action']
    return 'RestartJobSet'

  # Kubernetes' wording (pkg/controller/job/pod_failure_policy.go).
  message = (
    'Container main for pod default/dprjax-slice-0-0-abcde failed with exit code {} matching '
    'FailJob rule at index 1'
  )
  assert action(message.format(2)) == 'FailJobSet'
  assert action(message.format(143)) == 'RestartJobSetAndIgnoreMaxRestarts'
  assert (
    action('Pod default/dprjax-2-0 has condition DisruptionTarget matching FailJob rule at index 0')
    == 'RestartJobSetAndIgnoreMaxRestarts'
  )
  assert 0 < jobset['spec']['failurePolicy']['maxRestarts'] < 100  # crashes do not go on forever


def test_hosts_with_gpus_find_each_other():
  jobset, job, container = load(ROOT / 'launch' / 'gke_jobset_gpu.yaml')
  environment = {entry['name']: entry for entry in container['env']}
  assert environment['DPRJAX_PROCESSES']['value'] == str(job['parallelism'])
  assert environment['DPRJAX_COORDINATOR']['value'] == '$(COORDINATOR):8482'
  # $(COORDINATOR) is only replaced if it is defined before.
  assert list(environment).index('COORDINATOR') < list(environment).index('DPRJAX_COORDINATOR')
  fields = {name: entry.get('valueFrom', {}).get('fieldRef') for name, entry in environment.items()}
  assert 'job-completion-index' in fields['DPRJAX_PROCESS']['fieldPath']
  assert 'coordinator' in fields['COORDINATOR']['fieldPath']
  assert job['completionMode'] == 'Indexed'
  [replicated] = jobset['spec']['replicatedJobs']
  assert jobset['spec']['coordinator']['replicatedJob'] == replicated['name']


def test_a_slice_has_as_many_hosts_as_its_topology():
  _, job, container = load(ROOT / 'launch' / 'gke_jobset.yaml')
  rows, columns = map(
    int, job['template']['spec']['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  )
  assert rows * columns == job['parallelism'] * container['resources']['limits']['google.com/tpu']


@by_name
def test_the_job_is_one_of_kubernetes(path):
  kubernetes_validate = pytest.importorskip(
    'kubernetes_validate', reason='pip install kubernetes-validate'
  )
  _, job, _ = load(path)
  document = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'dprjax'}, 'spec': job}
  kubernetes_validate.validate(document, '1.37', strict=True)
  # Strict it is: a key that Kubernetes does not know is an error.
  job['template']['spec']['terminationGracePeriod'] = 1
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(document, '1.37', strict=True)


def test_an_indexed_job_encodes_a_part_a_pod():
  path = ROOT / 'launch' / 'encode_job.yaml'
  [job] = yaml.load_all(path.read_text(), UniqueKeys)
  spec = job['spec']
  [container] = spec['template']['spec']['containers']
  assert spec['completionMode'] == 'Indexed' and spec['backoffLimitPerIndex'] > 0
  assert f'--part=$(PART)/{spec["completions"]}' in container['args']
  assert next(one for one in container['args'] if one.startswith('--out=')).endswith('-$(PART)')
  assert 'PART' in {entry['name'] for entry in container['env']}
  # backoffLimitPerIndex wants pods that do not restart.
  assert spec['template']['spec']['restartPolicy'] == 'Never'
  flags.parse(encode.Flags, [one.replace('$(PART)', '7') for one in container['args']])
  kubernetes_validate = pytest.importorskip(
    'kubernetes_validate', reason='pip install kubernetes-validate'
  )
  kubernetes_validate.validate(job, '1.37', strict=True)
