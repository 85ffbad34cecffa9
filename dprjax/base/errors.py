"""The exception for bad input."""


class InputError(ValueError):
  """A file, a line, a flag or a config key that cannot be used as it is.

  The message is one line: what was wrong, where (file, line, config key) and what to do about it.
  Commands print it as ``dprjax: error: ...`` and exit with status 2 (see ``dprjax.runtime.cli``).
  """
