# ruff: noqa: RUF001
"""Words by hand, in scripts with and without spaces."""

import unicodedata

import pytest

from dprjax.base.words import words


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('The cat sat, a 2nd time: x_y 7', ['the', 'cat', 'sat', '2nd', 'time', 'x_y']),
    ('TGF-β, café, m² ½ Œuvre', ['tgf', 'café', 'm²', 'œuvre']),
    ('cafe\u0301 Ha\u0300 No\u0323\u0302i', ['café', 'hà', 'nội']),
    ('भारत की राजधानी', ['भारत', 'की', 'राजधानी']),
    ('क्\u200dष क्ष', ['क्ष', 'क्ष']),
    ('சென்னை தலைநகரம்', ['சென்னை', 'தலைநகரம்']),
    ('القَاهِرَةُ كتـــاب', ['القاهرة', 'كتاب']),
    ('יְרוּשָׁלַיִם', ['ירושלים']),
    ('می\u200cخوانم', ['میخوانم']),
    ('北京是', ['北', '京', '是', '北京', '京是']),
    ('コンピ', ['コ', 'ン', 'ピ', 'コン', 'ンピ']),
    ('กินที่', ['กิ', 'น', 'ที่', 'กิน', 'นที่']),
    ('학교에 가', ['학', '교', '에', '학교', '교에', '가']),
    ('ភ្នំ\u200bពេញ', ['ភ្', 'នំ', 'ភ្នំ', 'ពេ', 'ញ', 'ពេញ']),
    ('iPhone手机 東京2020', ['iphone', '手', '机', '手机', '東', '京', '東京', '2020']),
    ('ＡＢＣ１２ eﬃcient hy\u00adphen Windows™', ['abc12', 'efficient', 'hyphen', 'windows']),
    ('İSTANBUL Isparta ısı', ['istanbul', 'isparta', 'isi']),
    ('🎉🎂 ❤\ufe0f 🇫🇷 © ok', ['🎉', '🎂', '❤', '🇫🇷', 'ok']),
    ('', []),
  ],
)
def test_words(text, expected):
  assert words(text) == expected
  for form in ('NFC', 'NFD'):
    assert words(unicodedata.normalize(form, text)) == expected


def test_turkish():
  assert words('İSTANBUL Isparta ısı title TITLE', turkish=True) == (
    ['istanbul', 'ısparta', 'ısı', 'title', 'tıtle']
  )
