"""What a client sends: bodies within a limit, and work on them in threads, which ends when the client leaves."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from meshwright.serve.api import ApiError, parse
from meshwright.serve.browser import is_json
from meshwright.serve.conversation import EncodingLimits, EncodingStoppedError, PromptTooLongError
from meshwright.spec.errors import UserError

SMALL_BODY = 2**16
"""Bytes that are parsed in about a millisecond."""
DISCARDED = 64 * 2**20
"""Bytes of an oversized request that are read and discarded, so that the client can receive the error."""
ENCODING_SECONDS = 30.0
"""Seconds until all prompts of a request are encoded."""

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")


async def read_request(kind: type[ModelT], request: Request, most: int) -> ModelT:
    """The request in a body of at most `most` bytes. A large one is parsed in a thread while other requests are
    answered."""
    body = await _body(request, most)
    return await asyncio.to_thread(parse, kind, body) if len(body) > SMALL_BODY else parse(kind, body)


async def _body(request: Request, most: int) -> bytes:
    if not is_json(request):
        raise ApiError(415, "send JSON with the header Content-Type: application/json")
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
        elif size > DISCARDED:
            break
    if size > most:
        raise ApiError(413, f"the body is larger than this server's limit of {most} bytes")
    return bytes(body)


async def checked(work: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Run `work` in a thread; a `UserError` becomes the client's error."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except UserError as error:
        raise ApiError(400, str(error)) from error


async def encoded(
    request: Request, threads: Executor, work: Callable[[EncodingLimits], ResultT], most: int | None = None
) -> ResultT:
    """The result of `work` on prompts of at most `most` tokens, in one of the threads; ended when the client leaves, or
    after `ENCODING_SECONDS`."""
    limits = EncodingLimits(most, ENCODING_SECONDS)
    running = asyncio.get_running_loop().run_in_executor(threads, work, limits)
    gone = asyncio.create_task(left(request))
    try:
        await asyncio.wait({running, gone}, timeout=ENCODING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
    except PromptTooLongError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
    except EncodingStoppedError:
        pass
    except UserError as error:
        raise ApiError(400, str(error)) from error
    finally:
        limits.stop()
        running.cancel()
        gone.cancel()
    if gone.done():
        raise ClientDisconnect
    raise ApiError(503, f"the prompt was not encoded within {ENCODING_SECONDS:.0f} s; shorten it, or try again later")


async def left(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
