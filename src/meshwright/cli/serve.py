"""The verb `serve`: serves a trained model with OpenAI's API."""

import argparse
import re
import socket
from pathlib import Path
from typing import Any

from meshwright.cli.common import add_model_arguments, compile_steps, open_model, positive, whole, whole_number
from meshwright.cli.ranks import degree_of, follows, started
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

LOCALHOST = "127.0.0.1"

port = whole_number("a whole number, at most 65535", most=65535)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `serve`."""
    add_model_arguments(parser, compiles=True)
    parser.add_argument("--name", help="the model's name in requests (default: the name of its folder)")
    parser.add_argument(
        "--adapter",
        metavar="NAME=RUN",
        type=named,
        action="append",
        default=[],
        help="adapters on the same base (a run, or a peft folder), named NAME in requests; may be repeated",
    )
    parser.add_argument(
        "--adapters-from",
        metavar="DIR",
        type=Path,
        help="let clients load and unload adapters in this folder (/v1/load_lora_adapter)",
    )
    parser.add_argument(
        "--beside",
        metavar="NAME=MODEL",
        type=named,
        action="append",
        default=[],
        help="another model, named NAME in requests; may be repeated",
    )
    parser.add_argument(
        "--votes", metavar="FILE", type=Path, help="serve /arena, where people compare two models, and write votes here"
    )
    parser.add_argument("--host", default=LOCALHOST, help="address to listen at; any but localhost needs a key")
    parser.add_argument("--port", metavar="N", type=port, default=8000, help="0: any free port (default 8000)")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the key that clients must send")
    _add_limits(parser)
    parser.epilog = (
        "/ is a chat page, /arena compares two models (--votes), /metrics has metrics for Prometheus.\n\n"
        "examples:\n"
        "  meshwright serve runs/tuned\n"
        "  meshwright serve path/to/base --adapter sql=runs/sql --adapter chat=runs/chat\n"
        "  meshwright serve runs/tuned --host 0.0.0.0 --api-key-file key.txt"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-batch", metavar="N", type=positive, default=32, help="concurrent answers (default 32)")
    parser.add_argument(
        "--max-queue",
        metavar="N",
        type=positive,
        default=64,
        help="waiting requests; further ones get 429 (default 64)",
    )
    parser.add_argument(
        "--max-context", metavar="N", type=positive, help="tokens of prompt and answer (default: the model's positions)"
    )
    parser.add_argument(
        "--prefix-cache",
        metavar="MIB",
        type=whole,
        default=256,
        help="memory for keys and values of finished answers, reused by prompts with the same prefix (default 256)",
    )
    parser.add_argument(
        "--max-body", metavar="BYTES", type=positive, default=4 * 2**20, help="largest request (default 4 MiB)"
    )


def named(text: str) -> tuple[str, Path]:
    """Parse `NAME=RUN`; raise an error that argparse reports with the option's name."""
    match = re.fullmatch(r"([^=\s]+)=(.+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: must be NAME=RUN")
    return match[1], Path(match[2])


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    _check_one_model(arguments)
    if (status := started(arguments)) is not None:
        return status
    if "ranks" in arguments and not arguments.ranks.leads:
        _opened(arguments)
        return 0
    try:
        import uvicorn

        from meshwright.serve.connections import configured
        from meshwright.serve.http import LOCAL, Server, ServerLimits
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"serve needs starlette and uvicorn: {install('serve')}") from error
    # Torch loads here, so that --help and usage errors never wait for it.
    from meshwright.serve.prefixes import Prefixes
    from meshwright.serve.served import Capacity, default_name, loader_of, open_served

    key = read_key(arguments.api_key_file)
    if arguments.host not in LOCAL and key is None:
        raise UserError(
            f"--host {arguments.host}: other machines could reach the model; set the key that clients must send with "
            "--api-key-file FILE, or listen at localhost"
        )
    adapters, beside = dict(arguments.adapter), dict(arguments.beside)
    if len(adapters) < len(arguments.adapter) or len(beside) < len(arguments.beside):
        raise UserError("--adapter, --beside: a name is given twice; give each model its own")
    if arguments.adapters_from is not None and not arguments.adapters_from.is_dir():
        raise UserError(f"--adapters-from {arguments.adapters_from}: is not a folder")
    if arguments.votes is not None and not (adapters or beside or arguments.adapters_from):
        raise UserError("--votes: an arena needs two models; give another with --beside or --adapter")
    limits = ServerLimits(
        max_body=arguments.max_body, max_queue=arguments.max_queue, api_key=key, votes=arguments.votes
    )
    prefixes = Prefixes(arguments.prefix_cache * 2**20) if arguments.prefix_cache else None
    room = Capacity(max_batch=arguments.max_batch, max_context=arguments.max_context, prefixes=prefixes)
    with listen(arguments.host, arguments.port) as listening:  # before loading, because the port may be in use
        trained = _opened(arguments)
        folder, name = arguments.adapters_from, arguments.name or default_name(trained)
        models = open_served(trained, name, adapters, room, beside=beside, more=folder is not None)
        load = None if folder is None else loader_of(trained, folder, room)
        for model in models:
            template = "chat and completions" if model.prompts.chats else "completions only: it has no chat template"
            print(f"model     {model.name}: {model.about}, {template}, {model.engine.max_context} tokens")
        host, number = listening.getsockname()[:2]
        arena = "" if arguments.votes is None else ", arena at /arena"
        print(
            f"serving   http://{f'[{host}]' if ':' in host else host}:{number}/v1  (chat page at /{arena})", flush=True
        )
        app = Server(models, limits, load).app()
        uvicorn.Server(configured(app, log_level="warning")).run(sockets=[listening])
    return 0


def _check_one_model(arguments: argparse.Namespace) -> None:
    if degree_of(arguments) > 1 and _several(arguments):
        raise UserError(
            "--adapter, --beside, --adapters-from: layout.tp supports only one model; leave layout.tp out, or serve "
            "a merged model (export --hf)"
        )
    if arguments.compile and _several(arguments):
        raise UserError("--compile: supports only one model; leave --adapter, --beside and --adapters-from out")


def _several(arguments: argparse.Namespace) -> bool:
    """Whether other models share the process or the base."""
    return bool(arguments.adapter or arguments.beside or arguments.adapters_from)


def _opened(arguments: argparse.Namespace) -> Any:
    """The model. A process that is not the first of several gets it after the first one has ended."""
    trained = open_model(arguments)
    if not follows(arguments, trained.model) and not _several(arguments):
        compile_steps(arguments, trained.model)
    return trained


def read_key(file: Path | None) -> str | None:
    """The key in a file. Raises `UserError` if it holds none."""
    if file is None:
        return None
    return check_key(file.read_text(encoding="utf-8").strip(), str(file))


def check_key(key: str, where: str) -> str:
    """The key. Raises `UserError` if it is none."""
    if not key or not key.isascii() or not key.isprintable() or any(character.isspace() for character in key):
        raise UserError(f"{where}: contains no key; a key is one word of ASCII characters")
    return key


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises `UserError` if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise UserError(f"--host {host} --port {port}: {what}; give another --port, or 0 for any") from error
    return listening
