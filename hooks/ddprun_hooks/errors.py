"""The errors of this package.

```
HooksError
├── DottedNameError     a dotted name that leads nowhere, or where it may not
├── HookSetupError      a name, an option or a stack that cannot work: mend the configuration
└── ExchangeError       an exchange that went wrong while running
    └── DisagreementError   ranks are about to exchange payloads that do not match
```
"""


class HooksError(Exception):
    """Base of every error this package raises."""


class DottedNameError(HooksError, ValueError):
    """A dotted name that leads nowhere; the message says how far it led and what is there."""


class HookSetupError(HooksError, ValueError):
    """A hook's name, options or place in the stack cannot work."""


class ExchangeError(HooksError, RuntimeError):
    """An exchange between ranks failed."""


class DisagreementError(ExchangeError):
    """Ranks disagree about what they are about to exchange; the message names the ranks."""
