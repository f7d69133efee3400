"""The model's folder for `tandem up`. A GGUF file is converted in a process of its own, under a progress bar."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from services.process import die_with_parent


class StartFailed(Exception):
    """The cluster cannot start; the message says what to do."""


async def prepare_model(model: str, event: Callable[..., None], stop: asyncio.Event) -> Path | None:
    """The folder of `model`; None if `stop` was set meanwhile. Raises StartFailed.

    `event("progress", fraction=..., what=...)` is told how far a conversion is.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.weights.resolve",
        model,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the supervisor
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.gather(_follow(model, process.stdout, event), process.stderr.read(), process.wait())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return None
        folder, errors, code = reading.result()
    finally:
        stopped.cancel()
        reading.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0 or not folder:
        message = errors.decode(errors="replace").strip().removeprefix("error: ")
        raise StartFailed(message or f"the model {model} cannot be prepared (exit status {code})")
    return Path(folder)


async def _follow(model: str, lines: asyncio.StreamReader, event: Callable[..., None]) -> str:
    """Shows `progress FRACTION WHAT` lines as a bar; returns the last other line, which is the folder."""
    last = ""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"model {model}", total=1.0)
        async for raw in lines:
            text = raw.decode(errors="replace").rstrip()
            if text.startswith("progress "):
                _, fraction, what = text.split(" ", 2)
                progress.update(task, completed=float(fraction), description=f"model {model}: {what}")
                event("progress", fraction=float(fraction), what=what)
            elif text:
                last = text
    return last
