"""launch/serve/: it starts an existing command, and Kubernetes takes it."""

import json
import pathlib
import re
import shlex

import pytest
import yaml

from dprjax import serve
from dprjax.base import flags
from dprjax.serving import server

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / 'launch' / 'serve'


def parse(words):
  args, _ = flags.parse(serve.Flags, words)
  return args


def manifest(name='kubernetes.yaml'):
  return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_container_file():
  text = (FOLDER / 'Containerfile').read_text()
  copied = {
    name for line in re.findall(r'^COPY (.+) \S+$', text, re.MULTILINE) for name in line.split()
  }
  # What setup.py reads, and the folders of a wheel.
  assert copied >= {'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'}
  assert copied >= {'constraints', 'configs', 'launch', 'dprjax'}
  assert [name for name in copied - {'dprjax'} if not (ROOT / name).exists()] == []
  [install] = re.findall(r"^RUN pip install .*? -c (\S+) '\.\[(\w+)\]'", text, re.MULTILINE)
  assert (ROOT / install[0]).is_file() and install[1] == 'serve'
  start = json.loads(re.search(r'^ENTRYPOINT (.+)$', text, re.MULTILINE)[1])
  assert start == ['python', '-m', 'dprjax.serve']
  args = parse(json.loads(re.search(r'^CMD (.+)$', text, re.MULTILINE)[1]))
  assert not server.is_loopback(args.network.host) and args.network.keys
  assert int(re.search(r'^EXPOSE (\d+)$', text, re.MULTILINE)[1]) == args.network.port


def test_the_systemd_unit():
  text = (FOLDER / 'dprjax.service').read_text().replace('\\\n', ' ')
  python, *words = shlex.split(re.search(r'^ExecStart=(.+)$', text, re.MULTILINE)[1])
  assert python.startswith('/') and words[:2] == ['-m', 'dprjax.serve']
  args = parse(words[2:])
  assert server.is_loopback(args.network.host)
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
  assert container['livenessProbe']['httpGet'] == {'path': '/livez', 'port': 'http'}
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


@pytest.mark.slow
def test_kubernetes_takes_it():
  kubernetes_validate = pytest.importorskip(
    'kubernetes_validate', reason='pip install kubernetes-validate'
  )
  for name in ('kubernetes.yaml', 'autoscaling.yaml'):
    for document in manifest(name):
      kubernetes_validate.validate(document, '1.37', strict=True)


def test_the_autoscaling_goes_by_a_metric_that_the_server_has():
  metrics = pytest.importorskip('dprjax.serving.metrics', reason="pip install 'dprjax[serve]'")
  deployment, _ = manifest()
  scaler, budget = manifest('autoscaling.yaml')
  name = deployment['metadata']['name']
  assert scaler['spec']['scaleTargetRef']['name'] == name
  assert scaler['spec']['minReplicas'] >= deployment['spec']['replicas'] > 1
  assert budget['spec']['selector'] == deployment['spec']['selector']
  assert budget['spec']['minAvailable'] < scaler['spec']['minReplicas']
  [document] = manifest('prometheus_adapter.yaml')
  [rule] = document['rules']['custom']
  [metric] = scaler['spec']['metrics']
  assert rule['name']['as'] == metric['pods']['metric']['name']
  own = metrics.ServerMetrics()
  own.stage_seconds.labels('queue').observe(0.1)
  text = own.text().decode()
  for series in re.findall(r'dprjax_\w+{stage="queue"', rule['seriesQuery'] + rule['metricsQuery']):
    assert series in text
  query = rule['metricsQuery']
  assert query.count('(') == query.count(')') and query.count('<<') == query.count('>>') == 6


def test_monitoring_asks_for_metrics_that_the_server_has():
  metrics = pytest.importorskip('dprjax.serving.metrics', reason="pip install 'dprjax[serve]'")
  own = metrics.ServerMetrics()
  own.stage_seconds.labels('queue').observe(0.1)
  own.count_request('POST /v1/embeddings', 'qa', 200, 'one', 0.1)
  own.key_tokens.labels('one').inc()
  text = own.text().decode()
  monitor, rules = manifest('monitoring.yaml')
  _, service = manifest()
  assert monitor['spec']['selector']['matchLabels'] == service['metadata']['labels']
  assert monitor['spec']['endpoints'][0]['port'] == service['spec']['ports'][0]['name']
  board = json.loads((FOLDER / 'dashboard.json').read_text())
  alerts = [rule['expr'] for group in rules['spec']['groups'] for rule in group['rules']]
  shown = [target['expr'] for panel in board['panels'] for target in panel['targets']]
  assert len(alerts) == 3 and len(shown) > 6
  for expression in alerts + shown:
    assert expression.count('(') == expression.count(')')
    for series in re.findall(r'dprjax_\w+', expression):
      assert re.search(rf'^{series}[ {{]', text, re.MULTILINE), series


def test_proxies_give_the_server_as_long_and_as_much_as_it_takes():
  args = parse(['--retriever=mine'])
  for name, size in (('nginx.conf', 'm'), ('Caddyfile', 'MB')):
    text = (FOLDER / name).read_text()
    parse(re.search(r'dprjax\.serve (--[^:]+):', text)[1].split())
    assert f' {args.limits.bytes >> 20}{size}' in text
    assert f' {args.limits.prompt_bytes >> 20}{size}' in text
    [seconds] = re.findall(r'(?:proxy_read|response_header)_timeout (\d+)s', text)
    assert int(seconds) > args.limits.seconds


def test_the_kustomization():
  [made] = manifest('kustomization.yaml')
  assert made['kind'] == 'Kustomization'
  found = [document for name in made['resources'] for document in manifest(name)]
  [image] = made['images']
  pod = found[0]['spec']['template']['spec']
  assert pod['containers'][0]['image'] == f'{image["name"]}:{image["newTag"]}'
  [secret] = made['secretGenerator']
  [volume] = [one for one in pod['volumes'] if 'secret' in one]
  assert volume['secret']['secretName'] == secret['name']
  [mount] = [one for one in pod['containers'][0]['volumeMounts'] if one['name'] == volume['name']]
  keys = parse(pod['containers'][0]['args']).network.keys
  assert [f'{mount["mountPath"]}/{name}' for name in secret['files']] == [keys]
