"""docs/plans.md and the ledger that it comes from."""

import json

import pytest

import plans


@pytest.mark.slow
def test_the_page_is_what_the_ledger_says():
  assert plans.known_page() == plans.PAGE.read_text()


def test_a_ledger_gives_what_it_knows_and_no_more(tmp_path):
  line = plans.LEDGER.read_text().partition('\n')[0]
  path = tmp_path / 'plans.jsonl'
  path.write_text(line + '\n')
  known, ledger = json.loads(line), plans.Ledger(path)
  job = plans.programs.CompileJob(**known['job'] | {'config': tuple(known['job']['config'])})
  assert ledger.compile_program(job).answer == known['answer']
  assert all(f'{name} {at}' in ledger.versions for name, at in known['versions'].items())
  other = plans.dataclasses.replace(job, length=job.length + 1)
  with pytest.raises(plans.Absent):
    ledger.compile_program(other)
