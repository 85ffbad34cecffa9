import numpy as np
import pytest

from dprjax.base import tree
from tests.refusals import refused

QUERY = {'kernel': np.zeros((2, 3), np.float32), 'bias': np.zeros(3, np.float32)}
TREE = {'backbone': {'layers': {'query': QUERY}}, 'prompt': {'prefix': np.zeros(4, np.float16)}}
NAMES = ['backbone/layers/query/bias', 'backbone/layers/query/kernel', 'prompt/prefix']


def test_flatten_names_leaves_and_unflatten_inverts_it():
  named = tree.flatten(TREE)
  assert list(named) == NAMES
  assert named['prompt/prefix'] is TREE['prompt']['prefix']
  assert tree.unflatten(named).keys() == TREE.keys()
  assert tree.flatten(tree.unflatten(named)).keys() == named.keys()


def test_the_first_rule_that_matches_the_whole_name_wins():
  rules = [('.*bias', 1), ('backbone/.*', 2), ('.*', 3)]
  assert tree.first_match(rules, NAMES, 'x') == dict(zip(NAMES, (1, 2, 3), strict=True))


@pytest.mark.parametrize(
  ('patterns', 'message'),
  [
    (['promt/.*'], 'promt/.*'),
    (['(.*'], '(.*'),
  ],
)
def test_a_typing_error_in_trainable_is_an_error(patterns, message):
  with refused('config.trainable', message):
    tree.trainable_names(patterns, NAMES)
