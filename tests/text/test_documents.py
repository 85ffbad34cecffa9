"""Documents and the passages that they are cut into."""

import pytest

from dprjax.text import documents
from dprjax.text.documents import Paragraph, Passage
from tests.refusals import refused


def passages(path):
  return list(documents.read_passages(path, path.name))


def test_the_rule():
  def paragraphs(*several):
    return [Paragraph(heading, ' '.join([word] * count)) for heading, word, count in several]

  def sizes(*several, most=10):
    cut = documents.cut(paragraphs(*several), most)
    return [(title, [len(line.split()) for line in text.split('\n')]) for title, text in cut]

  # Whole paragraphs, until the next would not fit.
  assert sizes(('', 'a', 4), ('', 'b', 6), ('', 'c', 1)) == [('', [4, 6]), ('', [1])]
  # A heading begins a new passage.
  assert sizes(('', 'a', 2), ('H', 'b', 2), ('H', 'c', 2)) == [('', [2]), ('H', [2, 2])]
  # A long sentence is cut between words.
  assert sizes(('', 'a', 25)) == [('', [10]), ('', [10]), ('', [5])]
  long = Paragraph('', 'One two three. Four five six seven. Eight nine.')
  assert [text for _, text in documents.cut([long], 7)] == [
    'One two three. Four five six seven.',
    'Eight nine.',
  ]
  # Letters of scripts without spaces are words.
  assert [text for _, text in documents.cut([Paragraph('', '漢' * 5)], 3)] == ['漢漢漢', '漢漢']


def test_markdown(tmp_path):
  pytest.importorskip('markdown_it')
  (tmp_path / 'a.md').write_text(
    '---\ntitle: T\n---\nLead with a [link](http://x).\n\n'
    'Guide\n=====\n\nTwo\nlines.\n\n- one\n- *two*\n'
    '\n## Code\n\n```sh\n# no heading\nrun it\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n'
  )
  assert passages(tmp_path / 'a.md') == [
    Passage('a.md#0', '', 'Lead with a link.'),
    Passage('a.md#1', 'Guide', 'Two lines.\none\ntwo'),
    Passage('a.md#2', 'Code', '# no heading\nrun it\na | b\n1 | 2'),
  ]


@pytest.mark.slow
def test_html_without_menus(tmp_path):
  pytest.importorskip('trafilatura', reason="pip install 'dprjax[documents]'")
  body = 'Install the wheel with pip, and check that the program starts without an error message.'
  (tmp_path / 'a.html').write_text(
    '<html><head><title>The guide</title></head><body><nav><a href="/">Home</a></nav><main>'
    f'<p>{body}</p><h2>On Linux</h2><p>{body}</p></main><footer>Imprint</footer></body></html>'
  )
  assert passages(tmp_path / 'a.html') == [
    Passage('a.html#0', 'The guide', body),
    Passage('a.html#1', 'On Linux', body),
  ]
  (tmp_path / 'empty.html').write_text('<html><body></body></html>')
  assert passages(tmp_path / 'empty.html') == []


@pytest.mark.slow
def test_pdf(tmp_path):
  pytest.importorskip('pypdf', reason="pip install 'dprjax[documents]'")
  fpdf = pytest.importorskip('fpdf')
  pdf = fpdf.FPDF()
  pdf.set_font('helvetica', size=12)
  for text in ('The first page is about wings.', 'The second page is about shocks.'):
    pdf.add_page()
    pdf.multi_cell(0, text=text)
  pdf.output(str(tmp_path / 'a.pdf'))
  expected = 'The first page is about wings.\nThe second page is about shocks.'
  assert passages(tmp_path / 'a.pdf') == [Passage('a.pdf#0', '', expected)]
  whole = (tmp_path / 'a.pdf').read_bytes()
  (tmp_path / 'b.pdf').write_bytes(whole[:200])
  with refused('b.pdf'):
    passages(tmp_path / 'b.pdf')
  pdf = fpdf.FPDF()
  pdf.add_page()
  pdf.set_encryption(owner_password='o', user_password='u')
  pdf.output(str(tmp_path / 'c.pdf'))
  with refused('c.pdf'):
    passages(tmp_path / 'c.pdf')
