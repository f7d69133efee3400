"""`tandem keys`: API keys for those who may use a cluster."""

import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="API keys for those who may use a cluster.", rich_markup_mode="markdown")


@app.callback()
def _commands() -> None:
    """API keys for those who may use a cluster."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is. Keys of one name have one allowance.")],
    requests_per_minute: Annotated[int, typer.Option(help="More are answered 429; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="Of prompts and answers; 0: no limit.")] = 0,
    weight: Annotated[float, typer.Option(help="Share of tokens while requests wait, against others' 1.")] = 1.0,
    min_priority: Annotated[int, typer.Option(help="Lower numbers, which go first, are answered 403.")] = 0,
    cache_group: Annotated[str, typer.Option(help="Names of a group share cached prompts.")] = "",
) -> None:
    """Make a key. Its entry for the key file goes to stdout; the key itself, to stderr, is shown this once.

    Example:

      tandem keys new alice --requests-per-minute 600 >> keys.toml
    """
    from services.api_keys import entry_for, new_key
    from services.config import ConfigError
    from services.supervisor import EXIT_CONFIGURATION

    key = new_key()
    try:
        entry = entry_for(
            name,
            key,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            weight=weight,
            min_priority=min_priority,
            cache_group=cache_group,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    print(entry.toml())
    print(f"The key of {name}, which is not kept anywhere:\n{key}", file=sys.stderr)
