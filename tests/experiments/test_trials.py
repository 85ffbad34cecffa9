"""Runs that are measured once."""

import trials


def test_sets_are_written_where_the_line_is_of_another_machine(tmp_path):
  written = []

  def work(folder):
    folder.mkdir()
    written.append(folder)
    return {'counts': {'qa': 3}}

  trials.prepare(tmp_path / 'here' / 'sets', work)
  trials.prepare(tmp_path / 'here' / 'sets', work)
  assert len(written) == 1
  lines = trials.ledger(tmp_path / 'here')
  trials.write_ledger(tmp_path / 'there' / trials.LEDGER, lines)
  trials.prepare(tmp_path / 'there' / 'sets', work)
  assert len(written) == 2 and (tmp_path / 'there' / 'sets').is_dir()
  assert trials.ledger(tmp_path / 'there') == lines
