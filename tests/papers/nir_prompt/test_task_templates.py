import numpy as np
import pytest

from dprjax.papers.nir_prompt import task_templates
from dprjax.papers.nir_prompt.task_templates import Spec, Specials, TaskTemplates
from tests.refusals import refused

SPECIALS = Specials((1,), (2, 2), (2,), 4)
VOCABULARY = 41
WORDS = {'a query:': (20, 21), 'what is it?': (22, 23, 24), '': ()}


def tokenize(texts):
  return {text: np.array(WORDS[text], np.int32) for text in texts}


def make(*specs, masked=True):
  return TaskTemplates.make(
    specs, SPECIALS, tokenize, VOCABULARY, 0, 'config.template.text', masked=masked
  )


@pytest.mark.parametrize(
  ('string', 'kind'),
  [
    ('[CLS] P1 text P2 [SEP]', 'query'),
    ('[CLS] second first [MASK] [SEP]', 'pair'),
    ('text [MASK] [SEP]', 'query'),
  ],
)
def test_bad_template_strings(string, kind):
  with refused('config.template.text', kind):
    task_templates.parse(string, kind, 'config.template.text')


def test_a_form_without_mask_where_none_is_needed():
  made = make(Spec({'query': '[CLS] text [SEP]'}, {}, {}), masked=False)
  assert made.extra('query') == 2


def test_forms_and_tokenizers_that_do_not_fit():
  with refused('config.template.text'):
    make(
      Spec({'query': '[CLS] text [MASK] [SEP]'}, {}, {}),
      Spec({'query': '[CLS] [MASK] text [SEP]'}, {}, {}),
    )
  with refused('config.template.text'):
    TaskTemplates.make(
      [Spec({'query': '[CLS] text [MASK] [SEP]'}, {}, {})],
      SPECIALS._replace(mask_id=None),
      tokenize,
      VOCABULARY,
      0,
      'config.template.text',
    )


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (('yes', 'perhaps'), ('perhaps', '2')),
    (('yes', 'zzz'), 'zzz'),
    (('yes', 'yes'), 'yes'),
  ],
)
def test_label_words(words, message):
  ids = {'yes': [7], 'no': [8], 'perhaps': [9, 10], 'zzz': [3]}

  def look_up(texts):
    return {text: np.array(ids[text], np.int32) for text in texts}

  assert task_templates.label_ids(('no', 'yes'), look_up, [0, 3], 'here') == (8, 7)
  with refused(message):
    task_templates.label_ids(words, look_up, [0, 3], 'config.template.verbalizer')
