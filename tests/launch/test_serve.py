"""launch/serve/: what it starts is a command that there is, and Kubernetes takes it."""

import json
import pathlib
import re
import shlex

import pytest
import yaml

from dprjax import serve
from dprjax.runtime import flags

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / 'launch' / 'serve'


def parse(words):
  args, _ = flags.parse(serve.Flags, words)
  return args


def manifest():
  return list(yaml.safe_load_all((FOLDER / 'kubernetes.yaml').read_text()))


def test_the_container_file():
  text = (FOLDER / 'Containerfile').read_text()
  copied = {
    name for line in re.findall(r'^COPY (.+) \S+$', text, re.MULTILINE) for name in line.split()
  }
  assert {'setup.py', 'configs', 'dprjax'} <= copied  # the wheel holds the last two
  assert [name for name in copied - {'dprjax'} if not (ROOT / name).exists()] == []
  start = json.loads(re.search(r'^ENTRYPOINT (.+)$', text, re.MULTILINE)[1])
  assert start == ['python', '-m', 'dprjax.serve']
  args = parse(json.loads(re.search(r'^CMD (.+)$', text, re.MULTILINE)[1]))
  assert not serve.is_loopback(args.network.host) and args.network.keys
  assert int(re.search(r'^EXPOSE (\d+)$', text, re.MULTILINE)[1]) == args.network.port


def test_the_systemd_unit():
  text = (FOLDER / 'dprjax.service').read_text().replace('\\\n', ' ')
  python, *words = shlex.split(re.search(r'^ExecStart=(.+)$', text, re.MULTILINE)[1])
  assert python.startswith('/') and words[:2] == ['-m', 'dprjax.serve']
  args = parse(words[2:])
  assert serve.is_loopback(args.network.host)
  assert args.network.drain < int(re.search(r'^TimeoutStopSec=(\d+)$', text, re.MULTILINE)[1])


def test_the_kubernetes_manifest():
  deployment, service = manifest()
  pod = deployment['spec']['template']['spec']
  [container] = pod['containers']
  args = parse(container['args'])
  assert args.network.keys and container['ports'] == [
    {'name': 'http', 'containerPort': args.network.port}
  ]
  probes = {name: container[f'{name}Probe']['httpGet'] for name in ('startup', 'readiness')}
  assert all(probe == {'path': '/readyz', 'port': 'http'} for probe in probes.values())
  assert container['livenessProbe']['httpGet'] == {'path': '/healthz', 'port': 'http'}
  pause = container['lifecycle']['preStop']['sleep']['seconds']
  assert pause + args.network.drain < pod['terminationGracePeriodSeconds']
  mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
  assert mounts.keys() == {volume['name'] for volume in pod['volumes']}
  for path in (args.backbone, args.prompts, str(pathlib.Path(args.network.keys).parent)):
    assert path in mounts.values()
  labels = deployment['spec']['template']['metadata']['labels']
  assert deployment['spec']['selector']['matchLabels'] == service['spec']['selector'] == labels
  assert deployment['spec']['replicas'] > 1
  assert service['spec']['ports'][0]['targetPort'] == 'http'


def test_kubernetes_takes_it():
  kubernetes_validate = pytest.importorskip(
    'kubernetes_validate', reason='pip install kubernetes-validate'
  )
  for document in manifest():
    kubernetes_validate.validate(document, '1.37', strict=True)
