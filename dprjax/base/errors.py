"""The one exception that a person caused and a person can mend."""


class InputError(ValueError):
  """Bad input: a file, a line, a flag or a config key that cannot be used as it is.

  The message says what was wrong, where (file, line, config key) and what to do about it, in one
  line. Commands print it as ``dprjax: error: ...`` and exit with status 2 (see
  ``dprjax.runtime.cli``); Python users catch it as a ``ValueError``.
  """
