"""User errors: the only exceptions printed as one line instead of a stack trace."""

NEAREST = "the nearest legal layout is"


class OneLine(BaseException):
    """An exception that a notebook shows as its message, without frames."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the frames."""
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, ValueError):
    """An error that the user can fix, in the command line, the recipe, the data or a file. Its message is one sentence,
    which also says what would work.

    The command line prints the sentence and exits with 2; a run that ends with it is not restarted. Every other
    exception is a bug, ours or a library's: its stack trace is shown, and a run that crashes with it may be restarted.
    """

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.remedy = remedy
        """The remedy, if it is a separate sentence."""
