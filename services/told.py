"""How commands end with errors that a user can mend."""

import sys


class told:
    """Ends the command with a message instead of a traceback for errors that a user can mend."""

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        from engine.config import ModelError
        from engine.memory import DoesNotFit
        from services.config import ConfigError
        from services.supervisor import EXIT_CONFIGURATION

        configuration = isinstance(error, (ConfigError, ModelError, DoesNotFit, *self._errors))
        # An OSError without number has a message of ours; others are for the maintainers.
        if configuration or (isinstance(error, OSError) and error.errno is None):
            print(f"error: {error}", file=sys.stderr)
            sys.exit(EXIT_CONFIGURATION if configuration else 1)
