from dprjax.serving.hosts import Hosts, is_loopback


def test_loopback_addresses():
  assert all(map(is_loopback, ('127.0.0.1', '127.1.2.3', '::1', 'localhost', 'a.localhost')))
  assert not any(
    map(is_loopback, ('0.0.0.0', '::', '10.0.0.1', 'example.org', '', 'localhost.org'))
  )


def test_names_of_this_machine_and_patterns():
  own, more = Hosts(), Hosts(['Search.example.org', '*.internal'])
  for host in ('localhost', 'localhost:8000', '127.0.0.1:80', '[::1]:8000', 'LOCALHOST'):
    assert own.allow(host) and more.allow(host) and own.allow_origin(f'http://{host}')
  for host in ('search.example.org', 'SEARCH.example.org:443', 'a.internal'):
    assert more.allow(host) and not own.allow(host) and more.allow_origin(f'https://{host}')
  for host in (
    '',
    'evil.org',
    'localhost.evil.org',
    '127.0.0.1.evil.org',
    '[',
    'evil.org@x',
    'a b',
  ):
    assert not more.allow(host) and not more.allow_origin(f'http://{host}')
  assert not more.allow_origin('null') and not more.allow_origin('')
