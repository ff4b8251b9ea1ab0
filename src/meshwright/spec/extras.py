"""Optional dependencies: the command that installs them, which every message gives."""


def install(extra: str, *, python: str = "") -> str:
    """The command that installs an extra of this package, for the interpreter at `python` if it is another one."""
    return f"{f'{python} -m ' if python else ''}pip install 'meshwright[{extra}]'"
