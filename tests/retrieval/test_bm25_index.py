# ruff: noqa: RUF001
import math
import unicodedata

import numpy as np
import pytest

from dprjax.retrieval import bm25_index
from tests.refusals import refused

IDS = ['a', 'b', 'c', 'd']
TEXTS = ['The cat sat on the mat', 'Dogs and cats, cats and dogs', 'Prompt tuning', '']


def test_scores_known_by_hand():
  """The Lucene formula over stemmed words: [cat sat mat], [dog cat cat dog], [prompt tune], [] of
  mean length 9 / 4.
  """
  queries = ['cats', 'tuned prompts', 'nothing of the kind', '', 'cat dog']
  found = bm25_index.build(IDS, TEXTS, k1=1.5, b=0.75).search(queries, 2)

  def weight(documents, count, length):
    idf = math.log(1 + (4 - documents + 0.5) / (documents + 0.5))
    return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / (9 / 4)))

  first, second, dog = weight(2, 1, 3), weight(2, 2, 4), weight(1, 2, 4)
  assert found.rows.tolist() == [[1, 0], [2, -1], [-1, -1], [-1, -1], [1, 0]]
  np.testing.assert_allclose(found.scores[0], [second, first], rtol=1e-6)
  np.testing.assert_allclose(found.scores[4], [second + dog, first], rtol=1e-6)
  assert np.isneginf(found.scores[1, 1])


def test_equal_scores_go_by_falling_id():
  ids = [str(i) for i in range(50)]
  index = bm25_index.build(ids, ['some words'] * 49 + ['words words'])
  for k in (3, 25, 50):
    expected = [49, *map(int, sorted(ids[:49], reverse=True))][:k]
    assert index.search(['words'], k).rows[0].tolist() == expected


LANGUAGES = {
  'Arabic': ('القَاهِرَةُ عَاصِمَةُ مِصْرَ', 'أنا أقرأ الكتاب', 'المطر ينزل اليوم'),
  'Chinese': ('北京是中国的首都', '我每天看书', '今天下大雨'),
  'Hindi': ('दिल्ली भारत की राजधानी है', 'मैं किताब पढ़ता हूँ', 'आज बारिश हो रही है'),
  'Japanese': ('東京は日本の首都です', '私は毎日本を読みます', 'コンピューターが壊れた'),
  'Korean': ('서울은 대한민국의 수도이다', '나는 책을 읽는다', '오늘은 비가 온다'),
  'Thai': ('กรุงเทพเป็นเมืองหลวงของประเทศไทย', 'ฉันอ่านหนังสือทุกวัน', 'วันนี้ฝนตกหนัก'),
  'Turkish': ('İstanbul en büyük şehirdir', 'Ilık kış günü', 'Kitap okuyorum'),
  'Vietnamese': ('Hà Nội là thủ đô của Việt Nam', 'Tôi đọc sách mỗi ngày', 'Hôm nay trời mưa'),
}


@pytest.mark.parametrize('language', ['english', 'none', 'arabic', 'hindi', 'turkish'])
def test_a_query_that_is_a_passage_finds_it_in_every_language(language):
  texts = [text for rows in LANGUAGES.values() for text in rows]
  index = bm25_index.build([str(i) for i in range(len(texts))], texts, language=language)
  for form in ('NFC', 'NFD'):
    found = index.search([unicodedata.normalize(form, text) for text in texts], 2)
    assert found.rows[:, 0].tolist() == list(range(len(texts)))
    assert (found.scores[:, 0] > found.scores[:, 1]).all()


def test_saved_and_loaded(tmp_path):
  index = bm25_index.build(IDS, TEXTS)
  assert bm25_index.load(tmp_path / 'i', 'abc') is None
  bm25_index.save(index, tmp_path / 'i', 'abc')
  again = bm25_index.load(tmp_path / 'i', 'abc')
  assert again.ids == IDS
  for before, after in zip(index.search(['cat dog'], 4), again.search(['cat dog'], 4), strict=True):
    np.testing.assert_array_equal(before, after)
  assert bm25_index.load(tmp_path / 'i', 'other') is None


def test_a_flipped_byte_in_any_file_is_noticed(tmp_path):
  folder = tmp_path / 'i'
  bm25_index.save(bm25_index.build(IDS, TEXTS), folder, 'abc')
  files = [path for path in folder.iterdir() if path.name != 'dprjax_index.json']
  assert len(files) >= 5
  for path in files:
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
      path.unlink()
      if damaged is not None:
        path.write_bytes(damaged)
      with refused(path.name, '/i'):
        bm25_index.load(folder, 'abc')
    path.write_bytes(whole)
  assert bm25_index.load(folder, 'abc').ids == IDS


def test_bad_input():
  with refused('klingon'):
    bm25_index.build(IDS, TEXTS, language='klingon')
  with refused('b', '0', '1'):
    bm25_index.build(IDS, TEXTS, b=2)
  for k1, b in ((math.nan, 0.75), (-1, 0.5)):
    with refused('k1', '1000'):
      bm25_index.build(IDS, TEXTS, k1=k1, b=b)
  with refused('words', '2'):
    bm25_index.build(['a', 'b'], ['', 'the'])
